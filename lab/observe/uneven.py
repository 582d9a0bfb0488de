"""The job of lesson `uneven`: more batches on one rank than on another, and a rank that never reports."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from typing import Any

import ray.train.torch
import torch
from torch import nn

from lab.errors import EnvironmentBroken
from lab.observe.job import Job, say
from lab.observe.training import outcome_json
from lab.storage import Storage
from lab.training.defaults import COLLECTIVE_TIMEOUT_S
from lab.training.records import read_observations
from lab.training.report import MissingRank, Rank, join_run, observe_rank, report
from lab.training.run import Outcome, fit
from lab.training.state import bare, tensors_sha256
from lab.training.stepboard import StepBoard, UnevenSteps, limited_group

SILENT_S = 300.0
"""How long the rank that never reports does nothing; it is ended with its worker group long before."""


def observe(job: Job) -> dict[str, Any]:
    """Two fits, both of which end in an error on purpose: uneven batches, then a missing report."""
    even = job.broken("even")
    batches = int(job.params["batches"])
    config = {
        "batches": batches // job.workers * job.workers if even else batches,
        "limit": float(job.params["limit"]),
        "join": not job.broken("no-join"),
        "all_report": even,
    }
    say(f"{config['batches']} batches over {job.workers} ranks, limit {config['limit']:g} s")
    # the rank that is through waits in its report, and must not give up before the other one does
    patience = config["limit"] + COLLECTIVE_TIMEOUT_S
    uneven = _fit(job, f"{job.run}-batches", uneven_batches, config, patience)
    say(f"rank 0 alone reports, limit {job.params['report_limit']:g} s")
    silent = _fit(job, f"{job.run}-report", rank_zero_reports, config, float(job.params["report_limit"]))
    return {"batches": uneven, "report": silent}


def _fit(job: Job, name: str, function: Any, config: dict[str, Any], report_limit_s: float) -> dict[str, Any]:
    # read by Ray when the fit starts; this process belongs to the lesson alone
    os.environ["RAY_TRAIN_COLLECTIVE_TIMEOUT_S"] = str(report_limit_s)
    storage = job.storage()
    outcome = fit(
        function,
        config,
        storage=storage,
        name=name,
        workers=job.workers,
        role="worker",
        fresh=True,
        lab_state=False,
        say=lambda line: None,
    )
    found = outcome_json(outcome)
    if found["error"]:
        found["error"].pop("text")  # a traceback; the message is its last line
    ranks = _seen(storage, outcome)
    if len(ranks) < job.workers:
        raise EnvironmentBroken(
            f"run {name}: {len(ranks)} of {job.workers} ranks said what they saw; it ended with {found['error']}."
        )
    return {"outcome": found, "ranks": ranks}


def _seen(storage: Storage, outcome: Outcome) -> list[dict[str, Any]]:
    if not outcome.attempts:
        return []
    rows = read_observations(storage, outcome.name, outcome.attempts - 1)
    left_out = {"attempt", "local_rank", "node_rank", "started", "world_rank", "world_size"}
    return [{key: value for key, value in row.items() if key not in left_out} for row in rows]


def uneven_batches(config: dict[str, Any]) -> None:
    """Deal the batches out in turn; train with `join`, then without, as many loops do."""
    rank = join_run()
    mine = range(rank.world_rank, config["batches"], rank.world_size)
    joined = _train(rank, len(mine), config["limit"], join=config["join"])
    bare_loop = _train(rank, len(mine), config["limit"], join=False)
    observe_rank(rank, {"batches": len(mine), "join": joined, "no_join": bare_loop})
    if bare_loop["error"]:
        raise UnevenSteps(bare_loop["error"])
    # a rank that is through goes on to its report and waits there, until the group is ended
    report(rank, {"loss": 0.0})


def _train(rank: Rank, steps: int, limit_s: float, *, join: bool) -> dict[str, Any]:
    """DDP for `steps` steps; how many were done, how long (seconds) the last one took, and how it ended."""
    board = StepBoard(rank, limit_s)
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(
        nn.Linear(4, 2), parallel_strategy_kwargs={"process_group": limited_group(limit_s)}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank.world_rank)
    done, error, began = 0, "", time.monotonic()
    try:
        with model.join() if join else nullcontext():
            for number in range(steps):
                began = time.monotonic()
                with board.step(number):
                    optimizer.zero_grad()
                    model(torch.randn(8, 4, generator=generator)).square().mean().backward()
                    optimizer.step()
                done += 1
            board.leave(done)
    except UnevenSteps as raised:
        error = str(raised)
    return {
        "steps": done,
        "error": error,
        "last_step_seconds": time.monotonic() - began,
        "parameters_sha256": tensors_sha256(bare(model).state_dict()),
    }


def rank_zero_reports(config: dict[str, Any]) -> None:
    """Rank 0 reports, as in `if rank == 0: report(...)`; the others never do."""
    rank = join_run()
    began = time.monotonic()
    if not rank.first and not config["all_report"]:
        observe_rank(rank, {"reported": False})
        time.sleep(SILENT_S)
        return
    try:
        report(rank, {"loss": 0.0})
    except MissingRank as error:
        observe_rank(rank, {"reported": False, "waited": time.monotonic() - began, "error": str(error)})
        raise
    observe_rank(rank, {"reported": True, "waited": time.monotonic() - began, "error": ""})
