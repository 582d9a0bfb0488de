"""What a person sees of claims, and which of a job's lines are for the user."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lab.console import print_claims, short
from lab.lessons.run import visible

RESULT = {
    "lesson": "sample",
    "claims": [
        {"statement": "A is [b] and [/c]", "expected": 1, "measured": 1, "verdict": "holds", "reason": ""},
        {"statement": "C", "expected": 1, "measured": 2, "verdict": "fails", "reason": ""},
        {"statement": "D", "expected": None, "measured": None, "verdict": "not shown", "reason": "one disk"},
    ],
}
COUNTS = "1 claims hold, 1 fail, 1 not shown here."


def printed(terminal: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120, highlight=False, soft_wrap=True)
    print_claims(console, [RESULT])
    return stream.getvalue()


def test_claims_without_a_terminal_are_a_plain_line_each() -> None:
    lines = printed(terminal=False).splitlines()
    assert lines == [
        "holds     sample: A is [b] and [/c] (expected 1; measured 1)",
        "fails     sample: C (expected 1; measured 2)",
        "not shown sample: D (expected null; measured one disk)",
        COUNTS,
    ]


def test_claims_on_a_terminal_are_a_table_with_every_word() -> None:
    text = printed(terminal=True)
    for word in ("A is [b] and [/c]", "one disk", "holds", "fails", "not shown", COUNTS):
        assert word in text


def test_a_long_value_is_cut_to_one_line() -> None:
    assert short({"b": [1, 2]}) == '{"b": [1, 2]}'
    assert short("x" * 60) == "x" * 60
    assert short("x" * 61) == "x" * 59 + "…"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("LAB| training", "training"),
        ("(RayTrainWorker pid=1) [rank 0/2] loss 0.5", "[rank 0/2] loss 0.5"),
        ("[rank 11/12] x", "[rank 11/12] x"),
        ("(raylet) some chatter", None),
        ("", None),
    ],
)
def test_the_lab_s_own_words_and_each_rank_s_lines_are_shown(line: str, shown: str | None) -> None:
    assert visible(line) == shown
