"""The arithmetic of lesson `threads`, and what it refuses."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.errors import UserError
from lab.lessons.threads import LESSON, grid_rates, pair_rates
from lab.training.threads import default_threads, multiples, rank_counts, thread_count


@given(st.integers(1, 512))
def test_rank_counts_double_up_to_the_workers(workers: int) -> None:
    counts = rank_counts(workers)
    assert counts[0] == 1
    assert counts[-1] == workers
    assert all(after <= 2 * before for before, after in itertools.pairwise(counts))


@pytest.mark.parametrize(("cpus", "threads"), [(0.25, 1), (1, 1), (1.9, 1), (2, 2), (4, 4)])
def test_ray_s_default_is_the_floor_and_at_least_one(cpus: float, threads: int) -> None:
    assert default_threads(cpus) == threads


def test_multiples_of_two_cores() -> None:
    assert [thread_count(multiple, 2) for multiple in multiples("0.25, 0.5,1,3.5")] == [1, 1, 2, 7]


@pytest.mark.parametrize("text", ["", "1,,2", "one", "0", "-1", "nan", "inf"])
def test_what_is_no_multiple_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--threads="):
        multiples(text)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": 1}, "LAB_WORKERS=1"),
        ({"workers": 100_000}, "LAB_WORKERS=100000.*--oversubscribe"),
        ({"threads": "1,4"}, "--threads=1,4 .*--oversubscribe"),
        ({"pairs": 0}, "--pairs=0"),
        ({"rounds": 0}, "--rounds=0"),
        ({"window": 0.0}, "--window=0 "),
        ({"window": 60.0}, "--window=60 "),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        LESSON.check(replace(LESSON.params(), **changes))


def test_oversubscribe_lets_the_grid_go_beyond_the_cores() -> None:
    beyond = {"workers": 2 * (os.cpu_count() or 1) + 2, "threads": "1,8", "oversubscribe": True}
    LESSON.check(replace(LESSON.params(), **beyond))


def window(samples: int) -> dict[str, float]:
    return {"samples": samples, "seconds": 2.0}


def test_rates_add_up_over_the_active_ranks_before_the_median() -> None:
    first = {
        "pairs": [{"one": window(20), "many": window(2)}, {"one": window(40), "many": window(4)}],
        "grid": [{"ranks": 1, "threads": 1, **window(6)}]
        + [{"ranks": 2, "threads": 1, **window(samples)} for samples in (2, 20, 200)],
    }
    second = {
        "pairs": [{"one": window(10), "many": window(6)}, {"one": window(10), "many": window(6)}],
        "grid": [{"ranks": 2, "threads": 1, **window(samples)} for samples in (4, 20, 2)],
    }
    idle = {"pairs": [], "grid": []}
    document = {"ranks": [first, second, idle]}
    assert pair_rates(document) == [(15.0, 4.0), (25.0, 5.0)]
    assert grid_rates(document) == {(1, 1): 3.0, (2, 1): 20.0}
