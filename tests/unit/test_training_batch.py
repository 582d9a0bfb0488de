"""Batch arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.errors import UserError
from lab.training.batch import nearest_batches, nearest_worlds, worker_batch_size

sizes = st.integers(1, 4096)
worlds = st.integers(1, 64)


@given(sizes, worlds)
def test_worker_batches_add_up_or_are_refused(batch: int, world: int) -> None:
    if batch % world == 0:
        assert worker_batch_size(batch, world) * world == batch
    else:
        with pytest.raises(UserError) as caught:
            worker_batch_size(batch, world)
        assert str(batch) in str(caught.value)
        assert str(world) in str(caught.value)


@given(sizes, worlds)
def test_what_is_proposed_works_and_is_nearest(batch: int, world: int) -> None:
    for proposed in nearest_batches(batch, world):
        assert worker_batch_size(proposed, world) >= 1
        assert abs(proposed - batch) <= world
    for proposed in nearest_worlds(batch, world):
        assert worker_batch_size(batch, proposed) >= 1


def test_the_sentence_names_both_values_and_the_fix() -> None:
    with pytest.raises(
        UserError, match=r"128 .* 3 workers: use a global batch of 126 or 129, or 2 or 4 workers"
    ):
        worker_batch_size(128, 3)


@pytest.mark.parametrize(("batch", "world"), [(0, 2), (-8, 2), (8, 0), (8, -1)])
def test_nothing_below_one(batch: int, world: int) -> None:
    with pytest.raises(UserError):
        worker_batch_size(batch, world)


def test_a_huge_batch_is_answered_at_once() -> None:
    assert nearest_worlds(10**25 + 1, 2) == (1, 11)
