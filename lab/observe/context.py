"""The job of lesson `context`: who each rank is in four placements, and what `prepare_model` made of its model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from torch import nn

from lab.errors import UserError
from lab.observe.job import Job, role_cpus, say
from lab.observe.training import outcome_json
from lab.training.records import read_observations
from lab.training.report import join_run, observe_rank
from lab.training.run import Role, fit

PER_NODE = 2
"""Ranks on each of the two nodes that the placement `two-nodes-full` fills."""


@dataclass(frozen=True)
class Placement:
    """`ranks` on `nodes` nodes of one role, `cpus` logical CPUs each; `spread` as in `fit`."""

    name: str
    role: Role
    ranks: int
    nodes: int
    spread: bool
    cpus: float = 1


def placements(job: Job) -> tuple[list[Placement], list[Placement]]:
    """What is tried on the head, and what on the worker nodes.

    Raises:
        UserError: the worker nodes have a number of CPUs that two ranks cannot fill.
    """
    head, workers = role_cpus("head"), role_cpus("worker")
    spread = min(job.workers, len(workers))
    return (
        [
            Placement("alone", "head", 1, 1, spread=False),
            Placement("one-node", "head", min(job.workers, head[0]), 1, spread=False),
        ],
        [
            Placement("spread", "worker", spread, spread, spread=not job.broken("packed")),
            Placement("two-nodes-full", "worker", 2 * PER_NODE, 2, spread=False, cpus=_share(workers[0])),
        ],
    )


def _share(node_cpus: int) -> float:
    """The CPUs to ask for so that exactly `PER_NODE` ranks fit on a node, however many nodes there are."""
    if node_cpus < PER_NODE:
        return node_cpus / PER_NODE
    share = node_cpus // PER_NODE  # above 1, Ray takes whole CPUs alone
    if node_cpus // share != PER_NODE:
        raise UserError(
            f"LAB_NODE_CPUS={node_cpus} cannot be filled by exactly {PER_NODE} ranks, as lesson context needs: "
            f"`make down`, then NODE_CPUS={node_cpus + 1}."
        )
    return float(share)


def observe(job: Job) -> dict[str, Any]:
    """Four fits, the head's and the workers' side by side; and the driver's own view."""
    on_head, on_workers = placements(job)

    def run_all(these: list[Placement]) -> list[tuple[Placement, dict[str, Any]]]:
        return [(placement, run(job, placement)) for placement in these]

    say("alone and one-node on the head, spread and two-nodes-full on the workers")
    with ThreadPoolExecutor(max_workers=2) as pool:  # a fit is mostly start-up: two overlap well
        found = [pair for half in pool.map(run_all, (on_head, on_workers)) for pair in half]
    return {
        "driver_node": ray.get_runtime_context().get_node_id(),
        "driver": asked_on_the_driver(),
        "placements": {
            placement.name: {"asked": {"ranks": placement.ranks, "nodes": placement.nodes}, **seen}
            for placement, seen in found
        },
        "use_gpu": use_gpu(job.workers),
    }


def run(job: Job, placement: Placement) -> dict[str, Any]:
    """One fit: its outcome, and each rank's table row."""
    storage, name = job.storage(), f"{job.run}-{placement.name}"
    outcome = fit(
        introduce,
        {"prepare_model": not job.broken("no-prepare-model")},
        storage=storage,
        name=name,
        workers=placement.ranks,
        role=placement.role,
        spread=placement.spread,
        cpus_per_worker=placement.cpus,
        fresh=bool(job.params["fresh"]),
        say=say,
    )
    newest = outcome.attempts - 1
    return {
        "outcome": outcome_json(outcome),
        "ranks": read_observations(storage, name, newest) if newest >= 0 else [],
    }


def watched_layer() -> tuple[nn.Module, list[str]]:
    """A layer, and the devices to which it will be asked to move: on a CPU, moving leaves no other trace."""
    layer = nn.Linear(4, 2)
    moves: list[str] = []
    move = layer.to

    def to(*args: Any, **kwargs: Any) -> Any:
        moves.extend(str(value) for value in (*args, *kwargs.values()))
        return move(*args, **kwargs)

    layer.to = to
    return layer, moves


def introduce(config: Mapping[str, Any]) -> None:
    """On each rank: say who it is, and what `prepare_model` hands back."""
    rank = join_run()
    context = ray.train.get_context()
    model, moves = watched_layer()
    prepared = ray.train.torch.prepare_model(model) if config["prepare_model"] else model
    seen = {
        "local_world_size": context.get_local_world_size(),
        "node_id": ray.get_runtime_context().get_node_id(),
        "node_ip": ray.util.get_node_ip_address(),
        "pid": os.getpid(),
        "device": str(ray.train.torch.get_device()),
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "moves": moves,
        "parameters_on": sorted({str(parameter.device) for parameter in prepared.parameters()}),
        "wrapped_in": type(prepared).__name__ if prepared is not model else None,
        "keys": sorted(prepared.state_dict()),
        "cuda": torch.cuda.is_available(),
    }
    print(
        f"[rank {rank.world_rank}/{rank.world_size}] local rank {rank.local_rank}, node rank {rank.node_rank}, "
        f"node {seen['node_ip']}, model in {seen['wrapped_in'] or 'nothing'} on {seen['device']}",
        flush=True,
    )
    observe_rank(rank, seen)


def asked_on_the_driver() -> dict[str, Any]:
    """What `get_context()` does outside a worker: the exception's class and first line, or the class of what it gave."""
    try:
        context = ray.train.get_context()
    except Exception as error:  # noqa: BLE001 - which exception it is, is the question
        return {
            "raised": type(error).__name__,
            "message": str(error).strip().partition("\n")[0],
            "gave": None,
        }
    return {"raised": None, "message": "", "gave": type(context).__name__}


def use_gpu(workers: int) -> dict[str, Any]:
    """What a run asks the cluster for with and without `use_gpu`, and how many GPUs there are."""
    return {
        "without": ScalingConfig(num_workers=workers).total_resources,
        "with": ScalingConfig(num_workers=workers, use_gpu=True).total_resources,
        "cluster_gpus": int(ray.cluster_resources().get("GPU", 0)),
    }
