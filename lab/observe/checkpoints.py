"""Runs in a storage location, as the head sees it: list them, find and remove leftovers, delete runs asked for by name."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from lab.errors import UserError
from lab.leftovers import PREFIX, Uploads, find, is_run, remove, uploads_of
from lab.observe.alive import Alive, live_runs
from lab.observe.job import Job
from lab.settings import StoreAccess
from lab.storage import Storage


def observe(job: Job) -> dict[str, Any]:
    """Do one of three things (`action`) with the runs in the job's storage; `delete` false: show alone.

    * "list": nothing more than `runs`;
    * "leftovers": what nothing refers to in the runs `names` (all, if there are none) is shown, or deleted;
    * "whole": the runs `names` are shown, or deleted.

    Returns:
        `{"runs": {name: {"files": n, "bytes": n, "checkpoints": [folder, ...]}}, "cleaned": [one of `clean_run` or
        `clean_if_clear` or `delete_whole` a run]}`; `runs` are those there before anything is deleted.

    Raises:
        UserError: the snapshot of a run asked for by name cannot be read.
    """
    storage = job.storage()
    runs = listed(storage)
    action = job.params["action"]
    delete = bool(job.params.get("delete"))
    names = [name for name in job.params.get("names") or sorted(runs) if name in runs]
    cleaned: list[dict[str, Any]] = []
    if action != "list" and names:
        alive = live_runs()
        if action == "whole":
            cleaned = [delete_whole(storage, name, alive, delete=delete) for name in names]
        else:
            access = StoreAccess.from_environment() if storage.location.kind == "s3" else None
            uploads = uploads_of(storage, access)
            clean = clean_run if job.params.get("names") else clean_if_clear
            cleaned = [clean(storage, name, uploads, alive, delete=delete) for name in names]
    return {"runs": runs, "cleaned": cleaned}


def clean_run(storage: Storage, name: str, uploads: Uploads, alive: Alive, *, delete: bool) -> dict[str, Any]:
    """Find what nothing refers to in one run; with `delete` remove it, unless the run is alive.

    Returns:
        `{"name", "is_run", "held": why it is left alone or "", "folders": [{"name", "files", "bytes"}],
        "uploads": [key], "deleted": whether}`.

    Raises:
        UserError: the snapshot cannot be read, so nothing can be told to be a leftover.
    """
    held = alive.holds(name)
    found = find(storage, name, uploads)
    if found is None:
        return {"name": name, "is_run": False, "held": held, "folders": [], "uploads": [], "deleted": False}
    deleted = delete and not held and not found.none
    if deleted:
        remove(storage, found, uploads)
    return {
        "name": name,
        "is_run": True,
        "held": held,
        "folders": [{"name": one.name, "files": one.files, "bytes": one.bytes} for one in found.folders],
        "uploads": [one.key for one in found.uploads],
        "deleted": deleted,
    }


def clean_if_clear(
    storage: Storage, name: str, uploads: Uploads, alive: Alive, *, delete: bool
) -> dict[str, Any]:
    """`clean_run` for one of all runs: one whose snapshot cannot be read is passed over, and says why in `unclear`."""
    try:
        return clean_run(storage, name, uploads, alive, delete=delete)
    except UserError as error:
        return {"name": name, "is_run": True, "unclear": str(error)}


def delete_whole(storage: Storage, name: str, alive: Alive, *, delete: bool) -> dict[str, Any]:
    """Delete a run with all that is in it, unless it is alive, or no run: `{"name", "is_run", "held", "deleted"}`."""
    held, run = alive.holds(name), is_run(storage, name)
    deleted = delete and run and not held
    if deleted:
        storage.delete_tree(name)
    return {"name": name, "is_run": run, "held": held, "deleted": deleted}


def listed(storage: Storage) -> dict[str, dict[str, Any]]:
    """Every folder at the root: `{name: {"files": n, "bytes": n, "checkpoints": [folder, ...]}}`."""
    runs: dict[str, dict[str, Any]] = defaultdict(lambda: {"files": 0, "bytes": 0, "checkpoints": set()})
    for entry in storage.files():
        run, _, rest = entry.path.partition("/")
        if not rest:
            continue  # a file at the root belongs to no run
        runs[run]["files"] += 1
        runs[run]["bytes"] += entry.size
        folder, inside, _ = rest.partition("/")
        if inside and folder.startswith(PREFIX):
            runs[run]["checkpoints"].add(folder)
    # a folder without a file, as an upload that found nothing leaves it
    for run in runs:
        runs[run]["checkpoints"] |= {name for name in storage.folders(run) if name.startswith(PREFIX)}
    return {name: run | {"checkpoints": sorted(run["checkpoints"])} for name, run in sorted(runs.items())}
