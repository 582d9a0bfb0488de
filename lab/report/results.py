"""Results on disk: `results/<lesson>/<run>/result.json`, with the document and the figures beside it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.errors import UserError
from lab.lessons.contract import LessonResult

SCHEMA = 1


def result_folder(root: Path, lesson: str, run: str) -> Path:
    """A new folder below `results/`: `<run>`, or `<run>.2`, ... when the run was resumed: no result is lost."""
    for attempt in itertools.count(1):
        folder = root / "results" / lesson / (run if attempt == 1 else f"{run}.{attempt}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable: the count has no end")


def write_result(folder: Path, result: LessonResult, document: Mapping[str, Any]) -> None:
    """Write `result.json` and the `document.json` from which the claims were judged."""
    (folder / "document.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    content = asdict(result) | {"holds": result.holds}
    (folder / "result.json").write_text(json.dumps(content, indent=2, default=str) + "\n")


def read_results(root: Path) -> list[dict[str, Any]]:
    """Every result below `results/`, oldest first; each with its `folder`."""
    found = []
    for path in sorted((root / "results").glob("*/*/result.json"), key=lambda item: item.stat().st_mtime):
        found.append(json.loads(path.read_text()) | {"folder": str(path.parent)})
    return found


def find_result(root: Path, run: str) -> dict[str, Any]:
    """The newest result of one run.

    Raises:
        UserError: there is none of that name.
    """
    found = [result for result in read_results(root) if result["run"] == run]
    if found:
        return found[-1]
    raise UserError(f"RUN={run!r} has no result below {root / 'results'}: see `lab results`.")
