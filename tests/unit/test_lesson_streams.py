"""What the lessons on streams refuse from their parameters alone (issue 4, bad input)."""

from __future__ import annotations

from typing import Any

import pytest

from lab.errors import UserError
from lab.lessons import iterable, preflight, shards_ray_data, uneven
from lab.lessons.contract import Lesson
from lab.lessons.preflight import Shape

SHAPE = Shape(nodes=2, node_cpus=4)


def refusal(lesson: Lesson, **changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        preflight.check(lesson, lesson.params(**changes), SHAPE)
    return str(caught.value)


@pytest.mark.parametrize("lesson", [shards_ray_data.LESSON, iterable.LESSON, uneven.LESSON])
def test_the_defaults_fit(lesson: Lesson) -> None:
    preflight.check(lesson, lesson.params(), SHAPE)
    preflight.check(lesson, lesson.params(**lesson.quick), SHAPE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": 2}, "--rows has 2 rows for 4 workers"),
        ({"rows": 100}, "worker batch 32 is more than the 25 rows"),
        ({"worker_batch": 0}, "--worker-batch=0 holds no row"),
        ({"workers": 2}, "LAB_WORKERS=2 is too few"),
        ({"workers": 8}, "LAB_WORKERS=8 leaves too few CPUs for the data pipeline: have 8 CPUs, need 9"),
        ({"parquet": "s3://"}, "--parquet='s3://' names no bucket"),
        ({"parquet": "data"}, "--parquet='data' is not absolute"),
    ],
)
def test_shards_ray_data_refuses(changes: dict[str, Any], words: str) -> None:
    assert refusal(shards_ray_data.LESSON, **changes).startswith(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "--steps=0: an endless stream"),
        ({"loader_workers": 0}, "--loader-workers=0"),
        ({"worker_batch": 0}, "--worker-batch=0"),
        ({"numbers": 3}, "--numbers=3 is too short for 4 readers"),
    ],
)
def test_iterable_refuses(changes: dict[str, Any], words: str) -> None:
    assert refusal(iterable.LESSON, **changes).startswith(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": 1}, "LAB_WORKERS=1: one rank waits for nobody"),
        ({"batches": 8}, "--batches=8 gives 2 workers no uneven work to do: use 9."),
        ({"batches": 1}, "--batches=1 gives 2 workers no uneven work to do: use 3."),
        ({"limit": 0.0}, "--limit=0 is not a limit"),
        ({"report_limit": 61.0}, "--report-limit=61 is not a limit"),
    ],
)
def test_uneven_refuses(changes: dict[str, Any], words: str) -> None:
    assert refusal(uneven.LESSON, **changes).startswith(words)


@pytest.mark.parametrize(("batches", "workers", "each"), [(9, 2, [5, 4]), (10, 3, [4, 3, 3]), (3, 2, [2, 1])])
def test_batches_are_dealt_out_in_turn(batches: int, workers: int, each: list[int]) -> None:
    assert uneven.dealt({"params": {"batches": batches, "workers": workers}}) == each
