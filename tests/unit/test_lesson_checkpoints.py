"""Lesson `checkpoints`: its theory of what remains, against Ray's rule step by step; its own options."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.errors import UserError
from lab.lessons.checkpoints import ALL, LESSON, Checkpoints, expected_tree, ranked, retained
from lab.observe import kept_checkpoints

Reports = list[tuple[str, float | None]]
SCORES = st.lists(st.none() | st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.9]), min_size=1, max_size=12)


def one_by_one(reports: Reports, keep: int, order: str) -> set[str]:
    """What Ray 2.60's checkpoint manager does at each report: insert by score, then delete below the best `keep`."""
    sign = 1.0 if order == "max" else -1.0
    kept: list[tuple[float, int, str]] = []
    for at, (name, score) in enumerate(reports):
        kept = sorted([*kept, (sign * (float("-inf") if score is None else score), at, name)])
        kept = [entry for entry in kept if entry in kept[-keep:] or entry[1] == at]
    return {name for _, _, name in kept}


@given(SCORES, st.integers(1, 4), st.sampled_from(["max", "min"]))
def test_what_remains_is_the_best_few_and_the_latest(
    scores: list[float | None], keep: int, order: str
) -> None:
    reports: Reports = [(f"c{at}", score) for at, score in enumerate(scores)]
    assert set(retained(reports, keep, order)) == one_by_one(reports, keep, order)


def test_c5_the_best_is_not_the_latest_and_one_to_keep_leaves_two() -> None:
    reports: Reports = [("a", 0.3), ("b", 0.9), ("c", 0.8)]
    assert retained(reports, 1, "max") == ["b", "c"]
    assert retained(reports, 1, "min") == ["a", "c"]
    assert ranked(reports, "max")[-1] == "b"


def test_the_lesson_expects_the_scores_that_its_job_reports() -> None:
    job = kept_checkpoints
    assert [score for _, score in ALL] == [
        *job.SCORES,
        job.SHARDED,
        job.SAME_NAMES,
        job.WHOLE,
        None,
        job.LAST,
    ]
    assert {kind.order for kind in job.KINDS} == {"max", "min"}


def test_the_tree_grows_by_one_observation_a_rank() -> None:
    assert len(expected_tree(1, "max", 4)) == len(expected_tree(1, "max", 2)) + 2


@pytest.mark.parametrize("kilobytes", [0, -1, 100_001])
def test_a_size_that_cannot_work_is_refused(kilobytes: int) -> None:
    with pytest.raises(UserError, match=f"--kilobytes={kilobytes} .*use 1 to 100000"):
        LESSON.check(replace(Checkpoints(), kilobytes=kilobytes))
