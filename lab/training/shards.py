"""Who gets which sample: the lab's own sampler, exact shards, and steps that add up to one global batch.

`prepare_data_loader` gives each world size another order, pads uneven shards and drops a loader's settings (pitfalls
D1, D3). What is here does none of that: hand its loaders to `prepare_data_loader(..., add_dist_sampler=False)`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from lab.errors import UserError
from lab.training.batch import worker_batch_size


class GlobalBatchSampler(Sampler[list[int]]):  # type: ignore[misc]  # torch is not followed
    """A batch sampler by which every world size, 1 included, takes the same global batches in the same order.

    Each epoch has one permutation of all rows, drawn from (seed, epoch) alone. It is cut into global batches, and rank r
    takes the places r, r + world_size, ... of each. Nothing is padded; rows that fill no global batch wait for another
    epoch's permutation (`left_out` counts them).

    Args:
        rows: samples in the data set.
        global_batch: samples per optimizer step, over all ranks.
        world_size, rank: this worker's place.
        seed: of the order; below 2**31.
        shuffle: False: the order of the data set.

    Raises:
        UserError: the ranks do not divide the global batch, or it is larger than the data set.
    """

    def __init__(
        self, rows: int, global_batch: int, world_size: int, rank: int, seed: int = 0, *, shuffle: bool = True
    ) -> None:
        worker_batch_size(global_batch, world_size)
        if rows < global_batch:
            raise UserError(
                f"global batch {global_batch} is more than the {rows} samples there are: use {rows} or fewer."
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size}")
        self.rows = rows
        self.global_batch = global_batch
        self.world_size = world_size
        self.rank = rank
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0

    @property
    def left_out(self) -> int:
        """Rows that an epoch does not use, because they fill no global batch."""
        return self.rows % self.global_batch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's order; call it before each epoch, at every world size."""
        self.epoch = epoch

    def order(self) -> list[int]:
        """The epoch's order of all rows, the same on every rank."""
        if not self.shuffle:
            return list(range(self.rows))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return [int(row) for row in torch.randperm(self.rows, generator=generator)]

    def __len__(self) -> int:
        return self.rows // self.global_batch

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        for step in range(len(self)):
            batch = order[step * self.global_batch : (step + 1) * self.global_batch]
            yield batch[self.rank :: self.world_size]


def exact_shard(rows: int, world_size: int, rank: int) -> range:
    """The rows of one rank when nothing is padded: every `world_size`-th from `rank`; shards differ by one at most.

    Raises:
        UserError: a rank would get no row.
    """
    if rows < world_size:
        raise UserError(
            f"{rows} samples leave {world_size - rows} of {world_size} workers without any: use at most {rows} workers, "
            "or more samples."
        )
    return range(rank, rows, world_size)


def worker_loader(
    dataset: Dataset[Any],
    batch_size: int,
    sampler: DistributedSampler[Any],
    loader_workers: int,
    timeout_s: float = 120.0,
) -> DataLoader[Any]:
    """A loader with loader processes that works inside a Ray worker (pitfall D9).

    A Ray worker has gRPC threads, and a process forked from one with threads may hang. So the loader processes come from
    a fork server that has none, and stay from epoch to epoch. The loader brings its own `DistributedSampler`:
    `prepare_data_loader` then leaves these settings as they are.

    Args:
        loader_workers: loader processes of this rank, 1 or more; `dataset` must be picklable.
        timeout_s: longest wait for one batch, start of the processes included; `RuntimeError` instead of a hang.
    """
    context = multiprocessing.get_context("forkserver")
    # once in the server, instead of once in each of its children
    context.set_forkserver_preload(["torch.utils.data"])
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=loader_workers,
        multiprocessing_context=context,
        persistent_workers=True,
        timeout=timeout_s,
    )


def micro_batches(worker_batch: int, most: int) -> int:
    """Into how many equal parts a worker batch goes so that none has more than `most` samples.

    Raises:
        UserError: `most` is below 1.
    """
    if most < 1:
        raise UserError(f"a micro-batch of {most} samples trains nothing: use 1 or more.")
    return next(
        parts
        for parts in range(1, worker_batch + 1)
        if worker_batch % parts == 0 and worker_batch // parts <= most
    )


def accumulated_backward(
    model: nn.Module,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    parts: int,
) -> torch.Tensor:
    """Add up the gradients of `parts` equal micro-batches: those of the whole batch, in less memory.

    `loss` is a mean over its samples, so each part's is divided by `parts`. Ranks talk once, in the last part.

    Args:
        x, y: the worker batch; `parts` divides its length.

    Returns:
        The mean loss of the worker batch, detached.

    Raises:
        ValueError: `parts` does not divide the batch.
    """
    if len(x) % parts:
        raise ValueError(f"{parts} parts do not divide a batch of {len(x)}")
    total = torch.zeros((), dtype=x.dtype)
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]] = list(
        zip(x.chunk(parts), y.chunk(parts), strict=True)
    )
    for part, (some_x, some_y) in enumerate(pairs):
        with nullcontext() if part == parts - 1 else _without_sync(model):
            share = loss(model(some_x), some_y) / parts
            share.backward()
        total += share.detach()
    return total


def _without_sync(model: nn.Module) -> AbstractContextManager[Any]:
    # at one rank the model is not wrapped, and there is nothing to hold back
    if isinstance(model, nn.parallel.DistributedDataParallel):
        held: AbstractContextManager[Any] = model.no_sync()
        return held
    return nullcontext()
