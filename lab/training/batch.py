"""Batch arithmetic: global batch = worker batch x world size."""

from __future__ import annotations

from lab.errors import UserError


def worker_batch_size(global_batch: int, world_size: int) -> int:
    """The samples that each rank takes per step.

    Args:
        global_batch: samples per optimizer step over all ranks.
        world_size: number of ranks.

    Raises:
        UserError: one of them is below 1, or the ranks do not divide the batch; the sentence names both and
            the nearest values that work.
    """
    if world_size < 1:
        raise UserError(f"workers={world_size} is not a number of ranks: use 1 or more.")
    if global_batch < 1:
        raise UserError(f"global batch {global_batch} holds no sample: use {world_size} or more.")
    if global_batch % world_size == 0:
        return global_batch // world_size
    raise UserError(
        f"global batch {global_batch} cannot be shared by {world_size} workers: use a global batch of "
        f"{either(nearest_batches(global_batch, world_size))}, or {either(nearest_worlds(global_batch, world_size))} "
        "workers."
    )


def nearest_batches(global_batch: int, world_size: int) -> tuple[int, ...]:
    """The multiples of `world_size` next to `global_batch`, without 0, ascending."""
    below = global_batch // world_size * world_size
    return tuple(batch for batch in (below, below + world_size) if batch >= world_size)


FAR = 1000
"""A number of workers further away than this is no advice."""


def nearest_worlds(global_batch: int, world_size: int) -> tuple[int, ...]:
    """The divisors of `global_batch` next to `world_size`, ascending: one below, one above where one is near."""
    below = range(min(world_size, global_batch), 0, -1)
    above = range(world_size + 1, min(global_batch, world_size + FAR) + 1)
    nearest = (
        next((count for count in counts if global_batch % count == 0), None) for counts in (below, above)
    )
    return tuple(count for count in nearest if count is not None)


def either(values: tuple[int, ...]) -> str:
    """Values to choose from, as words."""
    return " or ".join(str(value) for value in values)
