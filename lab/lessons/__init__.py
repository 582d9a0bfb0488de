"""The registry of lessons: the command line, the Makefile, the docs and the tests enumerate it."""

from __future__ import annotations

import difflib
import importlib

from lab.errors import UserError
from lab.lessons.contract import Lesson

_MODULES = (
    "first_run",
    "multi_node",
    "shards_sampler",
    "shards_ray_data",
    "iterable",
    "global_batch",
    "context",
    "threads",
    "uneven",
    "checkpoints",
    "resume",
    "async_checkpoint",
    "commit_window",
    "v1_v2",
    "article",
)


def lessons() -> dict[str, Lesson]:
    """Every lesson by name, in the order in which to take them."""
    found = [importlib.import_module(f"lab.lessons.{module}").LESSON for module in _MODULES]
    return {lesson.name: lesson for lesson in found}


def find(name: str) -> Lesson:
    """The lesson of that name.

    Raises:
        UserError: there is none; the sentence suggests the nearest.
    """
    known = lessons()
    if name in known:
        return known[name]
    if not name:
        raise UserError("LESSON is missing: `make list` shows the lessons; `make run LESSON=first-run`, say.")
    near = difflib.get_close_matches(name.replace("_", "-").lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else "see `make list`."
    raise UserError(f"LESSON={name!r} is not a lesson: {hint}")
