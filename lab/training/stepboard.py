"""Who is at which step: so that a collective that times out can name the rank that did not come (pitfall D8)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import ray.util
import torch.distributed as dist
from ray.train.collective import broadcast_from_rank_zero

from lab.training.report import Rank

LIMIT_S = 20.0
"""How long a rank waits in one collective for the others."""


class UnevenSteps(RuntimeError):
    """A rank waited in a collective for ranks that did not come to that step."""


def limited_group(limit_s: float = LIMIT_S) -> Any:
    """A process group of all ranks whose collectives end after `limit_s` seconds; every rank must call it.

    Apart from the default group, so that a slow start has its own, longer limit. Give it to DDP as `process_group`.
    """
    return dist.new_group(timeout=timedelta(seconds=limit_s))


class StepBoard:
    """Each rank writes where it is; read when a collective times out. Every rank must make one, at the same time.

    The board is a key-value store in rank 0's process: one small write a step, no waiting for another rank.
    Steps count from 0.
    """

    def __init__(self, rank: Rank, limit_s: float = LIMIT_S) -> None:
        self.rank = rank
        self.limit_s = limit_s
        patience = timedelta(seconds=30)
        if rank.first:
            host = ray.util.get_node_ip_address()
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=patience)
            broadcast_from_rank_zero({"host": host, "port": self._store.port})
        else:
            where = broadcast_from_rank_zero({})
            self._store = dist.TCPStore(where["host"], where["port"], is_master=False, timeout=patience)

    @contextmanager
    def step(self, number: int, collective: str = "all-reduce of the gradients") -> Iterator[None]:
        """Around one step with its collectives.

        Raises:
            UnevenSteps: a collective in it timed out; the sentence names this rank, the step, and who is missing.
        """
        self._store.set(f"step/{self.rank.world_rank}", str(number))
        try:
            yield
        except RuntimeError as error:
            if not timed_out(error):
                raise
            where = {other: self.where(other) for other in range(self.rank.world_size)}
            raise UnevenSteps(
                sentence(self.rank.world_rank, number, collective, self.limit_s, where)
            ) from error

    def leave(self, steps: int) -> None:
        """This rank is past its last step, having done `steps`."""
        self._store.set(f"left/{self.rank.world_rank}", str(steps))

    def where(self, rank: int) -> tuple[int | None, int | None]:
        """(The newest step that a rank began, the steps with which it left); None for what has not happened."""
        return self._number(f"step/{rank}"), self._number(f"left/{rank}")

    def _number(self, key: str) -> int | None:
        return int(self._store.get(key)) if self._store.check([key]) else None


def timed_out(error: BaseException) -> bool:
    """Whether torch's error says that a collective ran into its limit."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def sentence(
    rank: int,
    step: int,
    collective: str,
    limit_s: float,
    where: dict[int, tuple[int | None, int | None]],
) -> str:
    """What `rank` says when it waited in vain: who is missing, and where they are.

    Args:
        where: of each rank, (the newest step that it began, the steps with which it left).
    """
    missing = []
    for other, (began, left) in sorted(where.items()):
        if other == rank:
            continue
        if left is not None and left <= step:
            missing.append(f"rank {other}, which left the loop after {left} steps")
        elif began is None or began < step:
            missing.append(
                f"rank {other}, which is {'before its first step' if began is None else f'in step {began}'}"
            )
    waited_for = " and ".join(missing) or "the others, which did come to this step"
    return (
        f"rank {rank} waited {limit_s:g} s in the {collective} of step {step} (from 0) for {waited_for}: "
        "give every rank the same number of steps, or train inside `with model.join()`."
    )
