"""Each claim's judge, on a document alone: it holds as recorded, and fails when the thing claimed is broken.

`tests/documents/<lesson>.json` is the document of a real run (`results/<lesson>/<run>/document.json`).
`tests/twins/<module>.py` has, for each claim id, a function that breaks a copy of it.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.lessons import find, lessons
from lab.lessons.contract import judge

DOCUMENTS = Path(__file__).resolve().parent.parent / "documents"
Twin = Callable[[dict[str, Any]], None]


def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCUMENTS / f"{name}.json").read_text())
    return found


def twins(name: str) -> dict[str, Twin]:
    found: dict[str, Twin] = importlib.import_module(f"tests.twins.{name.replace('-', '_')}").TWINS
    return found


@pytest.mark.parametrize("name", list(lessons()))
def test_every_claim_has_a_twin(name: str) -> None:
    assert set(twins(name)) == {claim.id for claim in find(name).claims}


@pytest.mark.parametrize("name", list(lessons()))
def test_the_recorded_document_holds(name: str) -> None:
    judged = [judge(claim, document(name)) for claim in find(name).claims]
    assert [(claim.id, claim.measured) for claim in judged if claim.verdict == "fails"] == []


@pytest.mark.parametrize(
    ("name", "claim"), [(name, claim.id) for name, item in lessons().items() for claim in item.claims]
)
def test_a_broken_document_fails_its_claim(name: str, claim: str) -> None:
    broken = copy.deepcopy(document(name))
    twins(name)[claim](broken)
    found = next(item for item in find(name).claims if item.id == claim)
    verdict = judge(found, broken)
    assert verdict.verdict == "fails"
    assert "Error" not in str(verdict.measured), "the twin breaks the thing claimed, not the document's form"


@pytest.mark.parametrize("name", list(lessons()))
def test_an_empty_document_holds_nothing(name: str) -> None:
    assert {judge(claim, {}).verdict for claim in find(name).claims} == {"fails"}
