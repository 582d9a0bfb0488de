"""Which runtime: the one that is set, else containers when they can run, else local processes."""

from __future__ import annotations

from dataclasses import dataclass

from lab.errors import UserError
from lab.runtimes import compose, embedded
from lab.runtimes.engine import engine_problem
from lab.runtimes.protocol import Runtime
from lab.settings import Settings


@dataclass(frozen=True)
class Choice:
    """The runtime's name and the reason, one short clause."""

    name: str
    why: str


def choose(settings: Settings) -> Choice:
    """Decide the runtime; nothing is started, built or pulled.

    Raises:
        UserError: `LAB_RUNTIME=compose` and no engine that could run it.
    """
    if settings.runtime == "compose":
        problem = engine_problem()
        if problem:
            raise UserError(f"LAB_RUNTIME=compose cannot run: {problem}")
        return Choice("compose", "LAB_RUNTIME says so")
    if settings.runtime == "embedded":
        return Choice("embedded", "LAB_RUNTIME says so")
    if embedded.EmbeddedRuntime(settings).access() is not None:
        return Choice("embedded", "its cluster is up")
    problem = engine_problem()
    if problem:
        return Choice("embedded", f"no containers here: {problem}")
    if compose.ComposeRuntime(settings).access() is not None:
        return Choice("compose", "its cluster is up")
    missing = compose.images_missing(settings)
    if not missing:
        return Choice("compose", "an engine answers and has the images")
    obstacle = compose.images_problem(settings)
    if obstacle:
        return Choice("embedded", f"an engine answers, but {obstacle}")
    return Choice("compose", f"an engine answers and can get {', '.join(missing)}")


def present(settings: Settings) -> list[Runtime]:
    """The runtimes that may have something up here, whichever is set.

    Raises:
        UserError: `LAB_RUNTIME=compose` and no engine that could be asked.
    """
    if settings.runtime == "compose":
        choose(settings)
    names = ["embedded"] if engine_problem() else ["embedded", "compose"]
    return [make_runtime(name, settings) for name in names]


def make_runtime(name: str, settings: Settings) -> Runtime:
    """The runtime of that name."""
    return compose.ComposeRuntime(settings) if name == "compose" else embedded.EmbeddedRuntime(settings)
