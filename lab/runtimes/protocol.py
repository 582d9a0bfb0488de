"""What every runtime offers. A lesson never knows which one it runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Say = Callable[[str], None]
"""Takes one line for the user."""


@dataclass(frozen=True)
class Access:
    """How the host reaches a cluster that is up.

    `dashboard` is a URL on loopback that serves the Jobs API; `store` is the store's URL as the host sees it,
    `node_store` as the nodes see it; `local_root` is the folder that each node keeps for local storage paths;
    `shared_disk` says that the nodes see one another's files below `local_root`.
    """

    dashboard: str
    store: str
    node_store: str
    local_root: str
    shared_disk: bool
    nodes: int
    node_cpus: int


@dataclass(frozen=True)
class Part:
    """One process or container of the lab, for `status`."""

    name: str
    state: str
    detail: str = ""


class Runtime(Protocol):
    """The life of a cluster and its store."""

    name: str
    verbs: frozenset[str]
    """The verbs it has: up, down, status, submit; later the faults (kill, stop, add, partition, ...)."""

    def up(self, say: Say) -> Access:
        """Start what is not up and return once the cluster and the store are proven healthy.

        Raises:
            UserError: a setting cannot be met (a port is taken, no engine).
            EnvironmentBroken: something did not become healthy within its limit. Nothing is left half-started.
        """
        ...

    def down(self, say: Say) -> None:
        """End every process or container that `up` started. Data stays."""
        ...

    def access(self) -> Access | None:
        """How to reach the cluster, or None when none is up."""
        ...

    def status(self) -> list[Part]:
        """What is up, part by part; empty when nothing is."""
        ...

    def captured(self) -> dict[str, str]:
        """What a result says of this runtime beside its name: image digests, the store's version."""
        ...

    def diagnose(self) -> str:
        """The last relevant lines of every part's log, for a failing test or run."""
        ...
