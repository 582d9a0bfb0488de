"""The lab's own records beside Ray's in a run's folder: attempts, the epoch log, what each rank observed.

    <run>/attempts/attempt-000.json                    one per start of the worker group, over all `fit`s of the name
    <run>/epoch-log/attempt-000-epoch-0003.json        one per epoch done; an epoch done twice is two rows
    <run>/observations/rank-0-attempt-0.json           one per rank and attempt

They exist because `Result.metrics_dataframe` holds retained checkpoints alone, in score order (pitfall C4).
No Ray, no torch: the host reads them too.
"""

from __future__ import annotations

import json
from typing import Any

from lab.storage import Storage

ATTEMPTS = "attempts"
EPOCH_LOG = "epoch-log"
OBSERVATIONS = "observations"


def begin_attempt(storage: Storage, run: str, about: dict[str, Any]) -> int:
    """Record that the run's worker group starts once more; rank 0 alone calls it.

    Returns:
        The attempt's number: 0 for the first start of this run name.
    """
    attempt = len(storage.files(f"{run}/{ATTEMPTS}"))
    write_document(storage, f"{run}/{ATTEMPTS}/attempt-{attempt:03d}.json", {"attempt": attempt, **about})
    return attempt


def write_epoch(storage: Storage, run: str, row: dict[str, Any]) -> None:
    """Write one row of the epoch log; it holds at least `epoch`, `attempt` and `time` (seconds since 1970)."""
    name = f"attempt-{row['attempt']:03d}-epoch-{row['epoch']:04d}.json"
    write_document(storage, f"{run}/{EPOCH_LOG}/{name}", row)


def read_epoch_log(storage: Storage, run: str) -> list[dict[str, Any]]:
    """All epochs that were done, in time order; an epoch done twice is there twice."""
    rows = read_documents(storage, f"{run}/{EPOCH_LOG}")
    return sorted(rows, key=lambda row: (row["attempt"], row["epoch"]))


def write_observation(storage: Storage, run: str, rank: int, attempt: int, seen: dict[str, Any]) -> None:
    """Write what one rank saw; a second call of the same rank and attempt replaces the first."""
    content = {"rank": rank, "attempt": attempt, **seen}
    write_document(storage, f"{run}/{OBSERVATIONS}/rank-{rank}-attempt-{attempt}.json", content)


def read_observations(storage: Storage, run: str, attempt: int | None = None) -> list[dict[str, Any]]:
    """What each rank saw, sorted by attempt and rank; of one attempt alone if given."""
    rows = read_documents(storage, f"{run}/{OBSERVATIONS}")
    chosen = [row for row in rows if attempt is None or row["attempt"] == attempt]
    return sorted(chosen, key=lambda row: (row["attempt"], row["rank"]))


def last_attempt(storage: Storage, run: str) -> int | None:
    """The number of the run's newest attempt, or None when it never started."""
    count = len(storage.files(f"{run}/{ATTEMPTS}"))
    return count - 1 if count else None


def write_document(storage: Storage, path: str, content: dict[str, Any]) -> None:
    """Write one record as JSON."""
    storage.write(path, json.dumps(content, allow_nan=False).encode())


def read_documents(storage: Storage, folder: str) -> list[dict[str, Any]]:
    """Every record below `folder`, by path."""
    return [json.loads(storage.read(entry.path)) for entry in storage.files(folder)]
