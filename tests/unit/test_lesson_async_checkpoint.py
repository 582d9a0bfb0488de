"""Lesson `async-checkpoint` without Ray: what it refuses, and pitfall C7 as its claims."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from lab.errors import UserError
from lab.lessons.async_checkpoint import LESSON, AsyncCheckpoint, sizes
from lab.lessons.contract import judge
from tests.unit.test_twins import DOCUMENTS, twins

C7 = ("kept", "naive")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"megabytes": "1,10"}, "ends in 10"),
        ({"megabytes": ""}, "--megabytes=''"),
        ({"megabytes": "1,x"}, "'x'"),
        ({"megabytes": "1,-5,100"}, "'-5'"),
        ({"megabytes": "100,1"}, "not ascending"),
        ({"megabytes": "100,100"}, "not ascending"),
        ({"megabytes": "5000"}, "'5000'"),
        ({"pairs": 0}, "--pairs=0"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        LESSON.check(AsyncCheckpoint(**changes))
    assert said in str(refused.value)


def test_the_defaults_and_the_quick_form_are_allowed() -> None:
    LESSON.check(AsyncCheckpoint())
    LESSON.check(AsyncCheckpoint(**LESSON.quick))
    assert sizes("1,10,100") == [1, 10, 100]


@pytest.mark.parametrize("claim", C7)
def test_c7_is_a_claim_that_holds_and_can_fail(claim: str) -> None:
    document = json.loads((DOCUMENTS / "async-checkpoint.json").read_text())
    found = next(item for item in LESSON.claims if item.id == claim)
    assert judge(found, document).verdict == "holds"
    broken = copy.deepcopy(document)
    twins("async-checkpoint")[claim](broken)
    assert judge(found, broken).verdict == "fails"
