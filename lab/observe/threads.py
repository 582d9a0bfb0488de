"""The job of lesson `threads`: one fit whose ranks time the same step with few and with too many threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch.nn import functional

from lab.errors import EnvironmentBroken
from lab.observe.job import Job, say
from lab.observe.training import outcome_json
from lab.training.data import digits
from lab.training.models import build_model
from lab.training.records import read_observations
from lab.training.report import join_run, observe_rank
from lab.training.run import fit
from lab.training.threads import MANY, multiples, rank_counts, thread_count

BATCH = 32
PAIR_RANKS = 2
WARM_UP_STEPS = 2
TASK_LIMIT_S = 60.0


def observe(job: Job) -> dict[str, Any]:
    """Ray's own default by plain tasks, then pairs and grid in one fit on the head."""
    cores = os.cpu_count() or 1
    many = thread_count(MANY, cores)
    grid = [
        (ranks, threads)
        for ranks in rank_counts(job.workers)
        for threads in dict.fromkeys(
            thread_count(multiple, cores) for multiple in multiples(job.params["threads"])
        )
    ]
    config = {
        "seed": job.seed,
        "window_s": float(job.params["window"]),
        "pairs": int(job.params["pairs"]),
        "rounds": int(job.params["rounds"]),
        "many": 1 if job.broken("one-thread") else many,
        "grid": grid,
    }
    say(
        f"{cores} cores: {config['pairs']} pairs of 1 and {many} threads at {PAIR_RANKS} ranks, then {len(grid)} cells"
    )
    storage = job.storage()
    outcome = fit(
        time_steps,
        config,
        storage=storage,
        name=job.run,
        workers=job.workers,
        role="head",
        fresh=bool(job.params["fresh"]),
        say=say,
    )
    newest = outcome.attempts - 1
    return {
        "cores": cores,
        "many": many,
        "batch": BATCH,
        "default": ray_default(),
        "outcome": outcome_json(outcome),
        "ranks": read_observations(storage, job.run, newest) if newest >= 0 else [],
    }


def time_steps(config: Mapping[str, Any]) -> None:
    """On each rank: time the same training step in windows, all ranks at once, or some while the others wait.

    The step is the small CNN's forward, backward and update on a batch that is in memory: no input, no exchange
    with other ranks, nothing but computing. Its many small operations each split among the threads and wait for
    the last: with more threads than cores, for one that has no core.
    """
    rank = join_run()
    seen: dict[str, Any] = {
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "torch_threads": torch.get_num_threads(),
    }
    step = make_step(int(config["seed"]))

    def window(ranks: int, threads: int) -> dict[str, Any] | None:
        """Samples and seconds of this rank, None when it only waits; every rank calls it."""
        active = rank.world_rank < ranks
        torch.set_num_threads(threads if active else 1)
        if active:
            for _ in range(WARM_UP_STEPS):  # the threads start with the first step that uses them
                step()
        dist.barrier()
        found = timed(step, float(config["window_s"])) if active else None
        dist.barrier()  # nobody warms up while another is still being timed
        return found

    window(PAIR_RANKS, 1)
    seen["os_threads_before"] = os_threads()
    seen["pairs"] = []
    for pair in range(int(config["pairs"])):
        arms = [("one", 1), ("many", int(config["many"]))]
        # every other pair the other way round: a drift of the machine then hits both alike
        found = {
            name: window(PAIR_RANKS, threads) for name, threads in (arms if pair % 2 == 0 else arms[::-1])
        }
        if pair == 0:
            seen["os_threads_after"] = os_threads()
        if rank.world_rank < PAIR_RANKS:
            seen["pairs"].append(found)
    seen["grid"] = []
    for _ in range(int(config["rounds"])):
        for ranks, threads in config["grid"]:
            cell = window(ranks, threads)
            if cell is not None:
                seen["grid"].append({"ranks": ranks, "threads": threads, **cell})
    print(
        f"[rank {rank.world_rank}/{rank.world_size}] {len(seen['pairs'])} pairs, {len(seen['grid'])} windows"
    )
    observe_rank(rank, seen)


def make_step(seed: int) -> Callable[[], None]:
    """The step that is timed: one optimizer step of the small CNN on one batch of digits."""
    model = build_model("small-cnn", seed)
    images, labels, _ = (tensor[:BATCH] for tensor in digits("train").tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def timed(step: Callable[[], None], window_s: float) -> dict[str, Any]:
    """Take steps for about `window_s` seconds, one at least."""
    steps, began = 0, time.perf_counter()
    while (seconds := time.perf_counter() - began) < window_s or not steps:
        step()
        steps += 1
    return {"samples": steps * BATCH, "seconds": seconds}


def os_threads() -> int | None:
    """This process's threads, as the system counts them; None where there is no /proc."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else None


def ray_default() -> dict[str, Any]:
    """`OMP_NUM_THREADS` in plain tasks on this node, by the CPUs they ask for, and what the node itself sets."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    ask = ray.remote(max_retries=0)(_omp)
    asked = {
        "0.25": ask.options(num_cpus=0.25, scheduling_strategy=here),
        "2": ask.options(num_cpus=2, scheduling_strategy=here),
        "2, set to 7": ask.options(
            num_cpus=2, scheduling_strategy=here, runtime_env={"env_vars": {"OMP_NUM_THREADS": "7"}}
        ),
    }
    # one after another: together they might need more CPUs than the node has
    found: dict[str, Any] = {}
    for name, task in asked.items():
        try:
            found[name] = ray.get(task.remote(), timeout=TASK_LIMIT_S)
        except ray.exceptions.GetTimeoutError:
            raise EnvironmentBroken(
                f"a task of {name} CPUs did not run within {TASK_LIMIT_S:.0f} s: look at `make status`."
            ) from None
    return {
        "node": found["2"]["node"],
        "tasks": {name: answer["omp"] for name, answer in found.items()},
    }


def _omp() -> dict[str, Any]:
    # a worker is its raylet's child: what the raylet has was set on the node, before Ray chose
    environment = Path(f"/proc/{os.getppid()}/environ")
    entries = environment.read_bytes().split(b"\0") if environment.exists() else []
    node = [entry.partition(b"=")[2].decode() for entry in entries if entry.startswith(b"OMP_NUM_THREADS=")]
    return {"omp": os.environ.get("OMP_NUM_THREADS"), "node": node[0] if node else None}
