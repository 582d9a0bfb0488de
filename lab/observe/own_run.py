"""A run that a lesson counts must be its own: nothing of an earlier one in its folder, its own settings of Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from lab.errors import UserError
from lab.observe.job import Job, say
from lab.storage import Storage
from lab.training.run import delete_run


def start_clean(storage: Storage, job: Job, *names: str) -> None:
    """See that no run of these names is there; with `--fresh` delete them, saying so.

    Raises:
        UserError: one is there, and `--fresh` is not given.
    """
    for name in names:
        if job.params["fresh"]:
            if delete_run(storage, name):
                say(f"deleted run {name} in {storage.location} (--fresh)")
        elif storage.files(name):
            raise UserError(
                f"LAB_NAME={job.run}: {storage.location}/{name} is there already, and this lesson counts what its own "
                "runs do from their first epoch on; use another --name, or --fresh to delete it."
            )


@contextmanager
def driver_setting(name: str, value: float | None) -> Iterator[None]:
    """Give the fits of this block one of Ray Train's settings: it takes them from the driver's environment.

    None: Ray's own default.
    """
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = f"{value:g}"
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
