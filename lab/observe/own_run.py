"""A run that a lesson counts must be its own: nothing of an earlier one may lie in its folder."""

from __future__ import annotations

from lab.errors import UserError
from lab.observe.job import Job, say
from lab.storage import Storage
from lab.training.run import delete_run


def start_clean(storage: Storage, name: str, job: Job) -> None:
    """See that run `name` is not there; with `--fresh` delete it, saying so.

    Raises:
        UserError: it is there, and `--fresh` is not given.
    """
    if job.params["fresh"]:
        if delete_run(storage, name):
            say(f"deleted run {name} in {storage.location} (--fresh)")
    elif storage.files(name):
        raise UserError(
            f"LAB_NAME={job.run}: {storage.location}/{name} is there already, and this lesson counts what its own run "
            "stores; use another --name, or --fresh to delete it."
        )
