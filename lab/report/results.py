"""Results on disk: `results/<lesson>/<run>/result.json`, with the document and the figures beside it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
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
    part = folder / "result.json.part"  # whole or not at all
    part.write_text(json.dumps(content, indent=2, default=str) + "\n")
    part.rename(folder / "result.json")


def read_results(root: Path, left_out: Callable[[Path], object] = lambda path: None) -> list[dict[str, Any]]:
    """Every result below `results/`, oldest first; each with its `folder`. One that cannot be read is `left_out`."""
    results = []
    for path in sorted((root / "results").glob("*/*/result.json"), key=lambda item: item.stat().st_mtime):
        found = _read(path)
        if found is None:
            left_out(path)
        else:
            results.append(found)
    return results


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    whole = isinstance(content, dict) and all(item.name in content for item in fields(LessonResult))
    return content | {"folder": str(path.parent)} if whole else None


def find_results(root: Path, run: str) -> list[dict[str, Any]]:
    """The results of one run, or in one folder of that name, the newest last.

    Raises:
        UserError: there is none of that name.
    """
    found = [item for item in read_results(root) if run in (item["run"], Path(item["folder"]).name)]
    if found:
        return found
    raise UserError(f"RUN={run!r} has no result below {root / 'results'}: see `make results`.")
