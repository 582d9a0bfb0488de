"""Streams of tensors on the ranks: steps compared before the first one, batches cut to them, columns checked.

A local shuffle cuts Ray Data's batches short in mid-stream (pitfall D5), and one step more on one rank than on
another hangs DDP (D8). So the steps are planned (`steps.py`), compared between ranks, and then delivered exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow
import torch
import torch.distributed as dist

from lab.errors import UserError
from lab.training.steps import ShortStream

Batch = dict[str, torch.Tensor]


class StepsDisagree(RuntimeError):
    """The ranks were about to start with different numbers of steps."""


def agree_on_steps(steps: int) -> list[int]:
    """Compare the steps of all ranks before the first one; every rank must call it.

    Returns:
        Each rank's steps, in rank order; they are equal.

    Raises:
        StepsDisagree: they are not; raised on every rank, so that none waits for another.
    """
    if not dist.is_initialized():
        return [steps]
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([steps]))
    every = [int(one.item()) for one in found]
    if len(set(every)) > 1:
        listed = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(every))
        raise StepsDisagree(
            f"the ranks would do different numbers of steps ({listed}): plan them from the same rows."
        )
    return every


def full_batches(
    batches: Iterable[Mapping[str, torch.Tensor]], worker_batch: int, steps: int
) -> Iterator[Batch]:
    """Cut a stream of batches of any size anew into exactly `steps` batches of `worker_batch` rows, in order.

    Args:
        batches: dicts of tensors whose first dimension counts rows.

    Raises:
        ShortStream: the stream ends first.
    """
    done = 0
    held: Batch = {}
    rows = 0
    for batch in batches:
        if done == steps:
            continue  # read to its end: a shard that is left half read keeps its blocks and its coordinator busy
        held = {name: torch.cat([held[name], part]) if held else part for name, part in batch.items()}
        rows = len(next(iter(held.values())))
        while rows >= worker_batch and done < steps:
            yield {name: part[:worker_batch] for name, part in held.items()}
            held = {name: part[worker_batch:] for name, part in held.items()}
            rows -= worker_batch
            done += 1
    if done < steps:
        raise ShortStream(
            f"the shard ended after {done} of {steps} steps with {rows} rows left over: "
            "it holds fewer rows than were counted."
        )


def check_columns(
    names: Sequence[str], types: Sequence[Any], wanted: Sequence[str], setting: str = "columns"
) -> None:
    """See that the wanted columns are there and can become tensors.

    Args:
        names, types: of the data set's schema; types are pyarrow's or Ray Data's tensor types.

    Raises:
        UserError: a column is missing (the sentence names those that there are), or is no number or tensor.
    """
    kinds = dict(zip(names, types, strict=True))
    numeric = [name for name, kind in kinds.items() if is_tensor(kind)]
    for name in wanted:
        if name not in kinds:
            raise UserError(f"{setting}={name!r} is not a column: the data has {', '.join(names)}.")
        if name not in numeric:
            raise UserError(
                f"{setting}={name!r} is a column of {kinds[name]}, which cannot become a tensor: turn it into numbers "
                f"first, or use {', '.join(numeric) or 'data with a column of numbers'}."
            )


def is_tensor(kind: Any) -> bool:
    """Whether a column of this pyarrow type (or one of Ray Data's tensor types) can become a tensor."""
    if isinstance(kind, pyarrow.BaseExtensionType):
        return "tensor" in type(kind).__name__.lower()
    if not isinstance(kind, pyarrow.DataType):
        return False
    types = pyarrow.types
    if types.is_fixed_size_list(kind):
        return is_tensor(kind.value_type)
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))
