"""The job of lesson `first-run`: one fit of the reference loop on the head."""

from __future__ import annotations

from typing import Any

from lab.observe.job import Job, say
from lab.observe.training import run_json
from lab.training.loop import LoopConfig, train_loop
from lab.training.run import fit


def observe(job: Job) -> dict[str, Any]:
    """Train the small CNN on the digits; a last report without a checkpoint follows the last epoch."""
    config = LoopConfig(
        epochs=int(job.params["epochs"]),
        global_batch=int(job.params["global_batch"]),
        seed=job.seed,
        late_report=True,
        prepare_model=not job.broken("no-prepare-model"),
        prepare_loader=not job.broken("no-prepare-loader"),
        shuffled_labels=job.broken("shuffled-labels"),
    )
    storage = job.storage()
    outcome = fit(
        train_loop,
        config.to_dict(),
        storage=storage,
        name=job.run,
        workers=job.workers,
        role="head",
        fresh=bool(job.params["fresh"]),
        say=say,
    )
    return {"train": run_json(storage, outcome)}
