"""The arithmetic of shards and steps, and streams that are cut to them."""

from __future__ import annotations

from itertools import count

import pyarrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.errors import UserError
from lab.training.steps import Plan, ShortStream, by_steps, plan_steps, refuse_empty_shards
from lab.training.streams import agree_on_steps, check_columns, full_batches

SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=12)


def stream(sizes: list[int]) -> list[dict[str, torch.Tensor]]:
    """Batches of these sizes, with consecutive ids from 0."""
    parts = torch.arange(sum(sizes)).split(sizes)
    return [{"id": part, "x": part.float()[:, None]} for part in parts]


@pytest.mark.parametrize(
    ("rows", "workers", "batch", "per_rank", "dropped", "steps", "left_out"),
    [
        (1000, 4, 32, 250, 0, 7, 104),
        (1003, 4, 32, 250, 3, 7, 107),
        (17, 3, 2, 5, 2, 2, 5),
        (3, 3, 1, 1, 0, 1, 0),
    ],
)
def test_a_plan_counts_every_row(
    rows: int, workers: int, batch: int, per_rank: int, dropped: int, steps: int, left_out: int
) -> None:
    plan = plan_steps(rows, workers, batch)
    assert (plan.rows_per_rank, plan.dropped, plan.steps, plan.left_out) == (
        per_rank,
        dropped,
        steps,
        left_out,
    )
    assert str(plan).startswith(f"{rows - left_out} of {rows} rows used")


@given(rows=st.integers(1, 5000), workers=st.integers(1, 16), batch=st.integers(1, 64))
def test_used_and_left_out_rows_are_all_rows(rows: int, workers: int, batch: int) -> None:
    plan = Plan(rows, workers, batch)
    assert plan.steps * batch * workers + plan.left_out == rows
    assert 0 <= plan.dropped < workers
    assert plan.left_out - plan.dropped < batch * workers


@pytest.mark.parametrize("rows", [0, 2])
def test_an_empty_shard_is_refused(rows: int) -> None:
    with pytest.raises(UserError, match=f"{rows} rows for 3 workers"):
        refuse_empty_shards(rows, 3)


@pytest.mark.parametrize(
    ("rows", "workers", "batch", "words"),
    [
        (17, 3, 32, "at most 5"),
        (2, 3, 1, "at most 2 workers"),
        (10, 0, 1, "workers=0"),
        (10, 2, 0, "worker batch 0"),
    ],
)
def test_a_plan_without_a_step_is_refused(rows: int, workers: int, batch: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        plan_steps(rows, workers, batch)


@given(sizes=SIZES, batch=st.integers(1, 16))
def test_full_batches_keep_rows_and_order(sizes: list[int], batch: int) -> None:
    steps = sum(sizes) // batch
    found = list(full_batches(stream(sizes), batch, steps))
    assert [len(one["id"]) for one in found] == [batch] * steps
    ids = [int(i) for one in found for i in one["id"]]
    assert ids == list(range(steps * batch))
    assert [float(x) for one in found for x in one["x"].flatten()] == [float(i) for i in ids]


@pytest.mark.parametrize("sizes", [[8, 8, 8, 6, 8, 2], [8, 8, 5, 8, 8, 3]])
def test_the_short_batches_of_a_local_shuffle_become_full(sizes: list[int]) -> None:
    assert [len(one["id"]) for one in full_batches(stream(sizes), 8, 5)] == [8] * 5


@given(sizes=SIZES, batch=st.integers(1, 16), more=st.integers(1, 3))
def test_a_stream_that_ends_early_is_named(sizes: list[int], batch: int, more: int) -> None:
    steps = sum(sizes) // batch
    with pytest.raises(ShortStream, match=f"after {steps} of {steps + more} steps"):
        list(full_batches(stream(sizes), batch, steps + more))


def test_an_endless_stream_ends_by_steps_and_goes_on() -> None:
    numbers = iter(count())
    assert list(by_steps(numbers, 3)) == [0, 1, 2]
    assert list(by_steps(numbers, 3)) == [3, 4, 5]


class OwnIterator:
    """As Ray's prepared loader: its own iterator, which `iter()` starts anew."""

    def __iter__(self) -> OwnIterator:
        self.numbers = count()
        return self

    def __next__(self) -> int:
        return next(self.numbers)


def test_a_stream_that_iter_would_start_anew_goes_on() -> None:
    numbers = iter(OwnIterator())
    assert [list(by_steps(numbers, 2)) for _ in range(2)] == [[0, 1], [2, 3]]


def test_an_endless_stream_without_steps_is_refused() -> None:
    with pytest.raises(UserError, match="--steps"):
        by_steps(iter(count()), None)


def test_a_stream_with_a_length_needs_no_steps() -> None:
    assert list(by_steps([1, 2, 3], None)) == [1, 2, 3]


def test_a_stream_shorter_than_its_steps_is_named() -> None:
    with pytest.raises(ShortStream, match="after 2 of 3 steps"):
        list(by_steps(iter([1, 2]), 3))


def test_one_process_agrees_with_itself() -> None:
    assert agree_on_steps(4) == [4]


NAMES = ["id", "x", "name", "image"]
TYPES = [pyarrow.int64(), pyarrow.float32(), pyarrow.string(), pyarrow.list_(pyarrow.float32(), 4)]


def test_columns_of_numbers_pass() -> None:
    check_columns(NAMES, TYPES, ["id", "x", "image"])
    check_columns(["t"], [pyarrow.fixed_shape_tensor(pyarrow.float32(), [2, 2])], ["t"])


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("label", "'label' is not a column: the data has id, x, name, image"),
        ("name", "'name' is a column of string, .* use id, x, image"),
    ],
)
def test_a_column_that_cannot_be_used_is_refused(wanted: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_columns(NAMES, TYPES, [wanted])
