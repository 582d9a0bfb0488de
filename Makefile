# The interface of the Ray Train Lab. `make` alone lists the targets with their knobs.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.SUFFIXES:
MAKEFLAGS += --no-print-directory

# --- Knobs: `make run LESSON=first-run WORKERS=4` -------------------------------------------------
# A knob on make's command line reaches the lab as LAB_<KNOB>, as it stands. The environment's NAME or STORE is somebody
# else's: there, and in .env, the lab reads LAB_<KNOB> alone.
KNOBS := RUNTIME NODES NODE_CPUS WORKERS STORE STORAGE SEED NAME FRESH KEEP QUICK DASHBOARD_PORT S3_PORT
given = $(filter command,$(firstword $(origin $(1))))
$(foreach knob,$(KNOBS),$(if $(call given,$(knob)),$(eval export LAB_$(knob) = $$(value $(knob)))))
# One word of the shell, whatever is in it.
quoted = '$(subst ','\'',$(value $(1)))'

PYTHON = python3# any Python from 3.11 to 3.13; makes .venv
LESSON =# a lesson's name, several with commas, or all
ARGS =# a lesson's own options, as in ARGS='--epochs 3'
RUN =# a run's name, for logs and results
RANK =# one rank, for logs
FOLDER =# a folder with a program of your own, for submit
CMD =# how to start it, for submit, as in CMD='python train.py first-try'
TESTS =# pytest's own arguments, as in TESTS='-k storage'

# A misspelt knob would have no effect at all, without a word.
OTHERS := PYTHON LESSON ARGS RUN RANK FOLDER CMD TESTS YES BASE_IMAGE MINIO_IMAGE LAB_% S3_%
unknown := $(foreach name,$(.VARIABLES),$(if $(call given,$(name)),$(filter-out $(KNOBS) $(OTHERS),$(name))))
$(if $(strip $(unknown)),$(error $(strip $(unknown)) is no knob of the lab: `make help` lists them))

VENV := .venv
BIN := $(VENV)/bin
LAB := $(BIN)/lab

LESSONS := first-run multi-node shards-sampler shards-ray-data iterable global-batch context threads uneven checkpoints resume async-checkpoint commit-window v1-v2 article

# --- Set-up: each stamp says what .venv holds --------------------------------------------------------
$(VENV)/.light: pyproject.toml requirements.lock scripts/venv
	@scripts/venv "$(PYTHON)" $(VENV) light

$(VENV)/.cluster: $(VENV)/.light
	@scripts/venv "$(PYTHON)" $(VENV) cluster

$(VENV)/.dev: $(VENV)/.light
	@scripts/venv "$(PYTHON)" $(VENV) dev

.PHONY: light runtime
light: $(VENV)/.light

runtime: $(VENV)/.light # whatever the chosen runtime needs on this host
	@chosen=$$($(LAB) choose 2>/dev/null) || { $(LAB) choose; exit $$?; }; \
	if [ "$$chosen" = embedded ]; then $(MAKE) --silent $(VENV)/.cluster; fi

.DEFAULT:
	@echo "'$@' is neither a target nor a lesson: \`make\` lists them." >&2; exit 2

##@ Start here

.PHONY: demo
demo: runtime ## The main job: set up, start a cluster, run first-run and multi-node, show the claims [KEEP=1 RUNTIME=]
	@$(LAB) run first-run,multi-node

.PHONY: test
test: $(VENV)/.cluster $(VENV)/.dev check ## Every test: lint, unit, embedded, containers where an engine answers [TESTS=]
	@LAB_REQUIRE_COMPOSE=$(LAB_REQUIRE_COMPOSE) scripts/test quick $(TESTS)

.PHONY: setup
setup: runtime ## .venv for the chosen runtime, and .env with fresh secrets [RUNTIME= PYTHON=]
	@$(LAB) setup

##@ Lessons

.PHONY: run
run: runtime ## Run one lesson [LESSON= WORKERS= NODES= STORAGE= SEED= NAME= FRESH=1 QUICK=1 KEEP=1 ARGS=]
	@$(LAB) run $(call quoted,LESSON) $(ARGS)

.PHONY: lessons
lessons: runtime ## Run every lesson, with one table of claims at the end [QUICK=1]
	@$(LAB) run all

.PHONY: $(LESSONS)
$(LESSONS): runtime
	@$(LAB) run $@ $(ARGS)

.PHONY: list
list: light ## The lessons: what each needs, how long it takes [LESSON=]
	@$(LAB) list $(if $(call given,LESSON),$(call quoted,LESSON))

.PHONY: results
results: light ## Past runs, or one in full [RUN=]
	@$(LAB) results $(if $(value RUN),$(call quoted,RUN))

##@ The cluster

.PHONY: up
up: runtime ## Start the cluster and the store [RUNTIME= NODES= NODE_CPUS= STORE=]
	@$(LAB) up

.PHONY: down
down: light ## End them; data stays
	@$(LAB) down

.PHONY: status
status: light ## What is up
	@$(LAB) status

.PHONY: doctor
doctor: light ## Look for what is wrong: engine, nodes, store, clock, shared memory
	@$(LAB) doctor

.PHONY: dashboard
dashboard: light ## The URL of Ray's dashboard [ARGS=--token]
	@$(LAB) dashboard $(ARGS)

.PHONY: logs
logs: light ## The log of a run, rank by rank [RUN= RANK=]
	@$(LAB) logs $(if $(value RUN),$(call quoted,RUN)) $(if $(value RANK),--rank $(call quoted,RANK)) $(ARGS)

.PHONY: submit
submit: light ## Run a program of your own on the cluster that is up [FOLDER= CMD=]
	@$(if $(and $(value FOLDER),$(value CMD)),,echo "FOLDER= and CMD= are needed: make submit FOLDER=my-folder CMD='python train.py'" >&2; exit 2;) \
	$(LAB) submit $(call quoted,FOLDER) $(call quoted,CMD)

##@ Images

.PHONY: images
images: light ## Build the lab's images [STORE= BASE_IMAGE=]
	@$(LAB) images build

.PHONY: pull
pull: runtime ## Fetch all that a demo will need, for tomorrow without a network
	@$(LAB) images pull

.PHONY: base-image
base-image: ## Make the base image from Debian's packages, where none can be pulled (as root) [BASE_IMAGE=]
	@scripts/base-image

##@ Measuring

.PHONY: store-check
store-check: $(VENV)/.cluster $(VENV)/.dev ## The S3 contract tests against the store that S3_ENDPOINT names, or that is up
	@LAB_TEST_STORE=1 LAB_TEST_RUNTIMES=$$($(LAB) choose 2>/dev/null) \
	  $(BIN)/python -m pytest tests/embedded/test_store_contract.py $(TESTS)

.PHONY: bench-start
bench-start: $(VENV)/.cluster ## Seconds from command to first optimizer step, against torchrun
	@$(BIN)/python -m lab.experiments.start

##@ For developers

.PHONY: check
check: $(VENV)/.cluster $(VENV)/.dev ## ruff, mypy --strict, shellcheck, hadolint, docker compose config
	@scripts/check

.PHONY: test-full
test-full: $(VENV)/.cluster $(VENV)/.dev check ## The same tests with the lessons' full forms
	@LAB_REQUIRE_COMPOSE=$(LAB_REQUIRE_COMPOSE) scripts/test full $(TESTS)

.PHONY: docs-figures
docs-figures: runtime ## Run the lessons in full; put their figures and tables into docs [LESSON= RUNTIME=]
	@scripts/docs-figures $(BIN) $(if $(call given,LESSON),$(call quoted,LESSON),all)

.PHONY: lock
lock: $(VENV)/.dev ## Resolve the pins again
	@UV=$(BIN)/uv scripts/lock

##@ Cleaning

.PHONY: clean
clean: ## Delete what can be made again: .venv and caches; no data, no result
	@if [ -x $(LAB) ] && [ -f "$${LAB_ROOT:-.}/.env" ]; then $(LAB) down; fi
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

.PHONY: clean-data
clean-data: light ## Delete results, storage and volumes, after saying what [YES=1]
	@$(LAB) clean-data $(if $(and $(call given,YES),$(filter 1,$(YES))),--yes)

.PHONY: help
help:
	@awk 'BEGIN {FS = ":.*## "} \
	  /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z-]+:.*## / {split($$1, name, ":"); printf "  %-12s %s\n", name[1], $$2}' $(firstword $(MAKEFILE_LIST))
	@printf '\nOne target a lesson: %s\n' "$(LESSONS)"
	@printf 'Knobs (make KNOB=value, or LAB_KNOB in the environment or .env): %s\n' "$(KNOBS)"
