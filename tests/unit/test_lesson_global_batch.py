"""Lesson `global-batch`: batch arithmetic, the lab's sampler and accumulation, for any sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
import torch
from torch import nn
from torch.nn import functional

from lab.errors import UserError
from lab.lessons.global_batch import LESSON, GlobalBatch, batches
from lab.training.shards import GlobalBatchSampler, accumulated_backward, micro_batches

worlds = st.integers(1, 8)
worker_batches = st.integers(1, 12)
seeds = st.integers(0, 2**31 - 1)


def everyone(rows: int, batch: int, world: int, seed: int, epoch: int) -> list[list[list[int]]]:
    """Per rank, per step, the samples."""
    samplers = [GlobalBatchSampler(rows, batch, world, rank, seed) for rank in range(world)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


@given(st.integers(1, 300), worker_batches, worlds, seeds, st.integers(0, 50))
def test_every_world_size_has_the_same_global_batches_in_the_same_order(
    rows: int, worker: int, world: int, seed: int, epoch: int
) -> None:
    batch = worker * world
    assume(rows >= batch)
    alone = everyone(rows, batch, 1, seed, epoch)
    shared = everyone(rows, batch, world, seed, epoch)
    assert batches(shared) == batches(alone)
    assert len(alone[0]) == rows // batch
    assert all(len(part) == worker for steps in shared for part in steps)


@given(st.integers(1, 300), worker_batches, worlds, seeds)
def test_an_epoch_uses_each_sample_at_most_once_and_says_how_many_are_left_out(
    rows: int, worker: int, world: int, seed: int
) -> None:
    batch = worker * world
    assume(rows >= batch)
    used = [sample for steps in everyone(rows, batch, world, seed, 0) for part in steps for sample in part]
    assert len(used) == len(set(used))
    assert set(used) <= set(range(rows))
    assert len(used) + GlobalBatchSampler(rows, batch, world, 0).left_out == rows


@settings(max_examples=25)
@given(st.integers(60, 300), seeds, st.integers(0, 50))
def test_the_order_depends_on_seed_and_epoch_alone(rows: int, seed: int, epoch: int) -> None:
    sampler = GlobalBatchSampler(rows, 4, 2, 1, seed)
    sampler.set_epoch(epoch)
    order = sampler.order()
    torch.manual_seed(99)
    assert sampler.order() == order
    sampler.set_epoch(epoch + 1)
    assert sampler.order() != order


@given(st.integers(1, 300), st.integers(1, 64), worlds)
def test_what_the_sampler_cannot_share_it_refuses(rows: int, batch: int, world: int) -> None:
    if batch % world == 0 and rows >= batch:
        assert len(GlobalBatchSampler(rows, batch, world, 0)) == rows // batch
    else:
        with pytest.raises(UserError, match=f"global batch {batch}"):
            GlobalBatchSampler(rows, batch, world, 0)


@given(st.integers(1, 512), st.integers(1, 600))
def test_micro_batches_are_equal_small_enough_and_as_few_as_can_be(worker: int, most: int) -> None:
    parts = micro_batches(worker, most)
    assert worker % parts == 0
    assert worker // parts <= most
    assert all(worker % fewer or worker // fewer > most for fewer in range(1, parts))


def test_a_micro_batch_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="micro-batch of 0 samples"):
        micro_batches(8, 0)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), seeds)
def test_accumulated_gradients_are_the_whole_batchs(parts: int, each: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(parts * each, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 2, (parts * each,), generator=generator)
    grads, losses = [], []
    for count in (1, parts):
        model = nn.Linear(3, 2).double()
        with torch.no_grad():
            model.weight.copy_(torch.linspace(-1, 1, 6).reshape(2, 3))
            model.bias.zero_()
        losses.append(accumulated_backward(model, functional.cross_entropy, x, y, count))
        grads.append(model.weight.grad)
    assert torch.allclose(grads[0], grads[1], atol=1e-12, rtol=0)
    assert abs(float(losses[0] - losses[1])) < 1e-12


def test_parts_that_do_not_divide_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 parts do not divide a batch of 4"):
        accumulated_backward(nn.Linear(1, 1), functional.mse_loss, torch.ones(4, 1), torch.ones(4, 1), 3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workers": 1}, "LAB_WORKERS=1"),
        ({"workers": 3}, "global batch 128 cannot be shared by 3 workers"),
        ({"epochs": 1}, "--epochs=1"),
        ({"global_batch": 2048}, "--global-batch=2048"),
        ({"worker_batch": 0}, "--worker-batch=0"),
        ({"worker_batch": 400}, "use 1 to 384"),
        ({"largest": 0}, "--largest=0"),
        ({"largest": 128}, "use 1 to 127"),
        ({"lr": 0.0}, "--lr=0"),
    ],
)
def test_bad_input_is_one_sentence(changes: dict[str, float], said: str) -> None:
    with pytest.raises(UserError) as caught:
        LESSON.check(replace(GlobalBatch(), **changes))
    assert said in str(caught.value)
    assert str(caught.value).endswith(".")
