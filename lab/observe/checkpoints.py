"""Runs in a storage location, as the head sees it: list them, delete what is asked for by name."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from lab.observe.job import Job


def observe(job: Job) -> dict[str, Any]:
    """List runs (`action` "list") or delete the runs in `names` (`action` "clean").

    Returns:
        `{"runs": {name: {"files": n, "bytes": n, "checkpoints": [folder, ...]}}, "deleted": [name, ...]}`; the
        runs are those there before anything is deleted.
    """
    storage = job.storage()
    runs: dict[str, dict[str, Any]] = defaultdict(lambda: {"files": 0, "bytes": 0, "checkpoints": set()})
    for entry in storage.files():
        run, _, rest = entry.path.partition("/")
        if not rest:
            continue  # a file at the root belongs to no run
        runs[run]["files"] += 1
        runs[run]["bytes"] += entry.size
        if rest.startswith("checkpoint_"):
            runs[run]["checkpoints"].add(rest.partition("/")[0])
    deleted = []
    if job.params["action"] == "clean":
        for name in job.params["names"]:
            if name in runs:
                storage.delete_tree(name)
                deleted.append(name)
    return {
        "runs": {
            name: run | {"checkpoints": sorted(run["checkpoints"])} for name, run in sorted(runs.items())
        },
        "deleted": deleted,
    }
