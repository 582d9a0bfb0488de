"""Lesson `commit-window` without Ray: what it refuses, what it plans, and pitfall C3 as its claims."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from lab.errors import UserError
from lab.lessons.commit_window import LESSON, CommitWindow, lost, orphan
from lab.lessons.contract import judge
from lab.observe.commit_window import epoch_of, plan
from tests.unit.test_twins import DOCUMENTS, twins

C3 = ("first-epoch", "at-once", "late", "window", "orphans", "cleaned")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kills": 1}, "--kills=1"),
        ({"kills": 51}, "--kills=51"),
        ({"awaited": 0}, "--awaited=0"),
        ({"short_interval": 0.0}, "--short-interval=0"),
        ({"interval": 0.5}, "--interval=0.5"),
        ({"interval": 2.0, "short_interval": 1.0}, "use 4 or more"),
        ({"interval": float("nan")}, "--interval=nan"),
        ({"kilobytes": 0}, "--kilobytes=0"),
        ({"name": "mine-short"}, "LAB_NAME='mine-short'"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        LESSON.check(CommitWindow(**changes))
    assert said in str(refused.value)


def test_the_defaults_and_the_quick_form_are_allowed() -> None:
    LESSON.check(CommitWindow())
    LESSON.check(CommitWindow(**LESSON.quick))


@pytest.mark.parametrize("kills", range(2, 12))
def test_each_plan_begins_at_once_and_ends_late(kills: int) -> None:
    planned = plan(2.0, kills)
    assert len(planned) == kills
    assert (planned[0]["kind"], planned[-1]["kind"]) == ("at once", "late")
    assert [one["kind"] for one in planned].count("late") == 1
    assert all(0 < one["delay"] < 2 for one in planned if one["kind"] == "in between")
    assert "late" not in [one["kind"] for one in plan(2.0, kills, all_at_once=True)]


def test_the_orphan_of_a_lost_report_is_named_by_epoch_and_attempt() -> None:
    assert orphan(3, 1) == "checkpoint_epoch-0003_attempt-001"
    assert epoch_of(orphan(3, 1)) == 3
    assert lost({"epoch": 4, "committed": 3}) == 1


@pytest.mark.parametrize("claim", C3)
def test_c3_is_a_claim_that_holds_and_can_fail(claim: str) -> None:
    document = json.loads((DOCUMENTS / "commit-window.json").read_text())
    found = next(item for item in LESSON.claims if item.id == claim)
    assert judge(found, document).verdict == "holds"
    broken = copy.deepcopy(document)
    twins("commit-window")[claim](broken)
    assert judge(found, broken).verdict == "fails"
