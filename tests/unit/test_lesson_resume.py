"""Lesson `resume`: its table of parts and its own options."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.errors import UserError
from lab.lessons.resume import COMPARED, LESSON, WITHOUT, Resume
from lab.training import state


def test_every_part_of_the_state_has_a_claim_and_changes_something() -> None:
    assert set(WITHOUT) == set(state.PARTS)
    for expected in WITHOUT.values():
        assert set(expected) <= set(COMPARED)
        assert False in expected.values()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 5}, "--epochs=5 .*even number, 4 or more"),
        ({"epochs": 2}, "--epochs=2 .*even number, 4 or more"),
        ({"global_batch": 63}, "63 cannot be shared by 2 workers"),
        ({"workers": 1, "global_batch": 63}, "63 cannot be shared by 2 workers"),
        ({"global_batch": 1536}, "--global-batch=1536 .*use 768 or less"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        LESSON.check(replace(Resume(), **changes))  # type: ignore[arg-type]


def test_its_defaults_work() -> None:
    LESSON.check(Resume())
