"""Rows C1 to C10 of the pitfalls that lessons `checkpoints` and `resume` show: held in a real run, caught when broken.

The documents are of real runs; tests/lessons runs the lessons themselves. C3 is lesson `commit-window`'s, C7
`async-checkpoint`'s, C10 tests/embedded/test_head_lost.py's; C2 is in tests/embedded/test_training_core.py.
"""

from __future__ import annotations

import copy

import pytest

from lab.lessons import find
from lab.lessons.contract import judge
from tests.unit.test_twins import document, twins

ROWS = {
    "C1": [("resume", "name"), ("resume", "fresh")],
    "C4": [("checkpoints", "log")],
    "C5": [("checkpoints", "latest-best"), ("checkpoints", "retained")],
    "C6": [("checkpoints", "same-names"), ("checkpoints", "sharded"), ("checkpoints", "rank-0")],
    "C8": [
        ("resume", "halves"),
        ("resume", "crash"),
        *(
            ("resume", f"without-{part}")
            for part in ("model", "optimizer", "scheduler", "epoch", "rng", "sampler", "history")
        ),
    ],
    "C9": [("resume", "plain"), ("resume", "other-size")],
}


@pytest.mark.parametrize(
    ("row", "lesson", "claim"),
    [(row, lesson, claim) for row, shown in ROWS.items() for lesson, claim in shown],
    ids=str,
)
def test_the_row_is_a_claim_that_holds_and_can_fail(row: str, lesson: str, claim: str) -> None:
    found = next(item for item in find(lesson).claims if item.id == claim)
    seen = document(lesson)
    assert judge(found, seen).verdict == "holds", row
    broken = copy.deepcopy(seen)
    twins(lesson)[claim](broken)
    assert judge(found, broken).verdict == "fails", row
