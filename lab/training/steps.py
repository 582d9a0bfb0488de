"""How many steps each rank does in an epoch, planned before the first one; and how a stream without an end gets one.

Ray Data splits a data set into equal shards and drops what is left over (pitfall D6). No Ray, no torch: the host
plans too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from lab.errors import UserError

Item = TypeVar("Item")


class ShortStream(RuntimeError):
    """A stream ended before the steps that it was planned for."""


@dataclass(frozen=True)
class Plan:
    """What an equal split of `rows` among `workers` ranks means, at `worker_batch` rows per rank and step."""

    rows: int
    workers: int
    worker_batch: int

    @property
    def rows_per_rank(self) -> int:
        """Rows of each shard: Ray Data's equal split rounds down."""
        return self.rows // self.workers

    @property
    def dropped(self) -> int:
        """Rows that are in no shard."""
        return self.rows - self.rows_per_rank * self.workers

    @property
    def steps(self) -> int:
        """Steps of an epoch, on every rank: full batches alone."""
        return self.rows_per_rank // self.worker_batch

    @property
    def left_out(self) -> int:
        """Rows that no step sees: the dropped ones, and each shard's last incomplete batch."""
        return self.rows - self.steps * self.worker_batch * self.workers

    def __str__(self) -> str:
        used = self.rows - self.left_out
        return f"{used} of {self.rows} rows used: {self.steps} steps of {self.worker_batch} on {self.workers} ranks"


def refuse_empty_shards(rows: int, workers: int, setting: str = "the data set") -> None:
    """See that every rank gets a row.

    Raises:
        UserError: there are fewer rows than ranks; Ray Data would give every rank none, and say nothing (D6).
    """
    if rows < workers:
        raise UserError(
            f"{setting} has {rows} rows for {workers} workers, so every shard would be empty: "
            f"use at most {rows or 'as many workers as it has rows, once it has some'}{' workers' if rows else ''}."
        )


def plan_steps(rows: int, workers: int, worker_batch: int, setting: str = "the data set") -> Plan:
    """The steps of an epoch over `rows` rows.

    Args:
        rows: rows of the whole data set, as counted before the split.
        setting: what the user would change, for the sentence.

    Raises:
        UserError: a shard would be empty, or smaller than one batch.
    """
    if workers < 1:
        raise UserError(f"workers={workers} is not a number of ranks: use 1 or more.")
    if worker_batch < 1:
        raise UserError(f"worker batch {worker_batch} holds no row: use 1 or more.")
    refuse_empty_shards(rows, workers, setting)
    plan = Plan(rows, workers, worker_batch)
    if plan.steps == 0:
        raise UserError(
            f"worker batch {worker_batch} is more than the {plan.rows_per_rank} rows that each of {workers} workers "
            f"gets of {rows}: use a worker batch of at most {plan.rows_per_rank}."
        )
    return plan


def by_steps(stream: Iterable[Item], steps: int | None) -> Iterator[Item]:
    """An epoch of exactly `steps` batches of a stream.

    Args:
        stream: for one epoch after another of an endless stream, the same iterator each time, made once by
            `iter(loader)`: it is never asked for a new one, because the loader that `prepare_data_loader`
            returns is its own iterator, and `iter()` would begin its stream anew.
        steps: None or 0: to the end of the stream, which must then know its length.

    Raises:
        UserError: no steps, and a stream that has no length: it may have no end.
        ShortStream: the stream ends first.
    """
    if steps:
        return _exactly(stream if isinstance(stream, Iterator) else iter(stream), steps)
    try:
        length = len(stream)  # type: ignore[arg-type]
    except TypeError:
        raise UserError(
            "an endless stream needs the steps of an epoch: steps is not set; use --steps with 1 or more."
        ) from None
    return _exactly(iter(stream), length)


def _exactly(stream: Iterator[Item], steps: int) -> Iterator[Item]:
    for done in range(steps):
        try:
            item = next(stream)
        except StopIteration:
            raise ShortStream(f"the stream ended after {done} of {steps} steps.") from None
        yield item
