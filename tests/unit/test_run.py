"""What a run shows when its training failed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab.lessons import find
from lab.lessons.contract import Judged
from lab.lessons.run import _shown

LESSON = replace(find("first-run"), measurements=lambda document: {"accuracy": document["absent"]})


def claim(verdict: str) -> Judged:
    return Judged("id", "statement", 1, 1, verdict)  # type: ignore[arg-type]


def test_a_failed_training_has_no_figures_but_its_claims(tmp_path: Path) -> None:
    said: list[str] = []
    assert _shown(LESSON, {}, tmp_path, (claim("holds"), claim("fails")), said.append) == ({}, ())
    assert "absent" in said[0]


def test_what_is_missing_though_every_claim_holds_is_a_defect(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        _shown(LESSON, {}, tmp_path, (claim("holds"),), lambda line: None)
