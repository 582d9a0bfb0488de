"""A run that a lesson counts must be its own: nothing of an earlier one in its folder, its own settings of Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def driver_setting(name: str, value: float) -> Iterator[None]:
    """Give the fits of this block one of Ray Train's settings: it takes them from the driver's environment."""
    before = os.environ.get(name)
    os.environ[name] = f"{value:g}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
