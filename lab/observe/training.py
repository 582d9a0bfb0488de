"""What lessons that train hand back: a fit's outcome, its ranks, its files, as plain JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lab.storage import Storage
from lab.training.records import read_epoch_log, read_observations
from lab.training.run import Outcome


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """How the fit ended. `checkpoint` is the folder's name; `error` is None or a `Failure` as a dict."""
    error = outcome.error
    return {
        "name": outcome.name,
        "metrics": outcome.metrics,
        "checkpoint": outcome.checkpoint.rstrip("/").rpartition("/")[2] if outcome.checkpoint else None,
        "error": asdict(error) if error else None,
        "seconds": round(outcome.seconds, 3),
        "resumed_from_epoch": outcome.resumed_from_epoch,
        "attempts": outcome.attempts,
        "first_step_at": outcome.first_step_at,
    }


def run_json(storage: Storage, outcome: Outcome) -> dict[str, Any]:
    """The outcome with what each rank of its newest attempt saw, the epoch log and every file of the run."""
    name = outcome.name
    newest = outcome.attempts - 1
    return {
        "outcome": outcome_json(outcome),
        "ranks": read_observations(storage, name, newest) if newest >= 0 else [],
        "epochs": read_epoch_log(storage, name),
        "files": [
            {"path": entry.path.removeprefix(f"{name}/"), "size": entry.size} for entry in storage.files(name)
        ],
    }
