"""Lesson `v1-v2` without a cluster: its table, and how outcomes are written."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

from lab.errors import UserError
from lab.lessons.contract import Params
from lab.lessons.v1_v2 import KINDS, LESSON, differences, kind_of
from lab.lessons.v1_v2_table import IDIOMS, markdown
from lab.settings import CHECKOUT


def test_the_table_has_each_idiom_once_and_its_v2_way() -> None:
    names = [idiom.id for idiom in IDIOMS]
    assert len(names) == len(set(names))
    assert [idiom.id for idiom in IDIOMS if not idiom.way] == []


def test_the_page_shows_the_committed_table() -> None:
    page = (CHECKOUT / "docs" / "v1-v2.md").read_text()
    assert markdown() in page, "python -m lab.lessons.v1_v2_table prints it"


def document(**changes: str) -> dict[str, object]:
    """As the table says, but for `changes` to what V2 does."""

    def seen(setting: str) -> dict[str, object]:
        idioms = {idiom.id: idiom.v1 if setting == "0" else idiom.v2 for idiom in IDIOMS}
        return {"with_fit": True, "idioms": idioms | (changes if setting == "unset" else {})}

    return {"settings": {setting: seen(setting) for setting in ("unset", "1", "0")}}


def test_a_document_like_the_table_has_no_difference() -> None:
    assert differences(document()) == []


def test_a_difference_names_setting_idiom_and_both_outcomes() -> None:
    (only,) = differences(document(stop="works"))
    assert only == "unset: stop: table 'DeprecationWarning: `RunConfig(stop)` is deprecated.', now 'works'"


def test_an_idiom_that_was_not_run_or_is_not_in_the_table_is_a_difference() -> None:
    changed = document(another="works")
    del changed["settings"]["0"]["idioms"]["stop"]  # type: ignore[index]
    assert differences(changed) == [
        "unset: another: table 'no such row', now 'works'",
        "0: stop: table 'works', now 'not run'",
    ]


@pytest.mark.parametrize(
    ("outcome", "other", "kind"),
    [
        ("works: 1", "", 0),
        ("works: 1", "works: 1", 0),
        ("works: 1", "works: 2", 1),
        ("warns: x", "", 2),
        ("E: x", "", 3),
    ],
)
def test_kinds_of_outcomes(outcome: str, other: str, kind: int) -> None:
    assert kind_of(outcome, other) == KINDS[kind]


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(UserError, match="LAB_WORKERS=3"):
        LESSON.check(replace(Params(), workers=3))


def test_outcomes_are_one_line() -> None:
    pytest.importorskip("ray")
    from lab.observe.v1_idioms import outcome

    def fails() -> None:
        raise ValueError("`x` is gone.\nUse `y`. See elsewhere.")

    def warns() -> None:
        warnings.warn("Nothing\n was done. Go away.", UserWarning, stacklevel=1)

    assert outcome(fails) == "ValueError: `x` is gone."
    assert outcome(warns) == "warns: Nothing was done."
    assert outcome(lambda: None) == "works"
    assert outcome(lambda: 3) == "works: 3"
