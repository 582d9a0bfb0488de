"""The job of lesson `multi-node`: the same training on several nodes, on one, and where it cannot work."""

from __future__ import annotations

from typing import Any

import ray

from lab.errors import UserError
from lab.observe.job import Job, say
from lab.observe.restore import restored
from lab.observe.sharing import nodes_without
from lab.observe.training import outcome_json, run_json
from lab.training.loop import LoopConfig, train_loop
from lab.training.run import Outcome, fit


def observe(job: Job) -> dict[str, Any]:
    """Three fits: several nodes with the run's storage, one node with a local path, several with a local path."""
    storage, local = job.storage(), job.storage(f"{job.local_root}/runs")
    if storage.location.kind == "local":
        _prove_shared(storage.path)
    config = LoopConfig(
        epochs=int(job.params["epochs"]), global_batch=int(job.params["global_batch"]), seed=job.seed
    )
    say(f"{job.workers} ranks on several nodes, storage {storage.location}")
    several = fit(
        train_loop,
        config.to_dict(),
        storage=storage,
        name=job.run,
        workers=job.workers,
        role="head" if job.broken("one-node") else "worker",
        fresh=bool(job.params["fresh"]),
        say=say,
    )
    say(f"the same on the head alone, storage {local.location}")
    other_seed = int(job.broken("other-seed"))
    alone = fit(
        train_loop,
        LoopConfig(**{**config.to_dict(), "seed": job.seed + other_seed}).to_dict(),
        storage=local,
        name=f"{job.run}-one-node",
        workers=job.workers,
        role="head",
        fresh=True,
        say=lambda line: None,
    )
    unshared = nodes_without(local.path)
    say(
        f"several nodes with the local path {local.path}, which {len(unshared)} of them do not share with the head"
    )
    return {
        "several": run_json(storage, several),
        "alone": run_json(local, alone),
        "driver_node": ray.get_runtime_context().get_node_id(),
        "restored": restored(storage, job.run, outcome_json(several)["checkpoint"])
        if several.checkpoint
        else None,
        "unshared_nodes": unshared,
        "local_path": outcome_json(_with_local_path(job, config)) if unshared else None,
    }


def _prove_shared(path: str) -> None:
    without = nodes_without(path)
    if without:
        raise UserError(
            f"LAB_STORAGE={path} with --shared-path: a file written there on the head is not on {', '.join(without)}; "
            "mount the same folder on every node, or use s3://BUCKET/PREFIX."
        )


def _with_local_path(job: Job, config: LoopConfig) -> Outcome:
    """What Ray itself does with a local path on nodes that share no disk, the lab's check being off."""
    local = job.storage(f"{job.local_root}/unshared")
    return fit(
        train_loop,
        {**config.to_dict(), "epochs": 1},
        storage=local,
        name=f"{job.run}-unshared",
        workers=job.workers,
        role="worker",
        fresh=True,
        say=lambda line: None,
    )
