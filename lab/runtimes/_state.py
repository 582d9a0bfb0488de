"""What the embedded runtime started, kept in the checkout: no secret in it."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.errors import UserError
from lab.runtimes._processes import Record
from lab.runtimes.protocol import Access


@dataclass(frozen=True)
class State:
    """A cluster that is up, coming up or left over. `access` is None until it has been healthy."""

    cluster_id: str
    scratch: str
    logs: str
    records: tuple[Record, ...] = ()
    store_ports: dict[str, int] = dataclasses.field(default_factory=dict)
    addresses: dict[str, str] = dataclasses.field(default_factory=dict)
    access: Access | None = None

    @property
    def alive(self) -> bool:
        """Whether every process still runs."""
        return bool(self.records) and all(record.alive for record in self.records)


def load(path: Path) -> State | None:
    """The recorded state, or None.

    Raises:
        UserError: the file is not one that the lab wrote.
    """
    try:
        raw = json.loads(path.read_text())
        raw["records"] = tuple(Record(**each) for each in raw["records"])
        raw["access"] = Access(**raw["access"]) if raw["access"] else None
        if any(type(each.pid) is not int or each.pid <= 1 for each in raw["records"]):
            raise ValueError("no process of the lab's has such an id")
        return State(**raw)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{path} is damaged: end what `ps` shows of this checkout, then delete the file."
        ) from None


def save(path: Path, state: State) -> None:
    """Write the state, whole or not at all, mode 600."""
    draft = path.with_suffix(".new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(dataclasses.asdict(state), file, indent=1)
    draft.replace(path)


@contextmanager
def locked(path: Path, limit_s: float = 60.0) -> Iterator[None]:
    """Hold the checkout's lock: one `up` or `down` at a time.

    Raises:
        UserError: another one held it longer than the limit.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        limit = time.monotonic() + limit_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise UserError(
                        f"another `make up` or `make down` of this checkout has held {path} for {limit_s:.0f} s: "
                        "wait for it or end it."
                    ) from None
                time.sleep(0.1)
        yield
