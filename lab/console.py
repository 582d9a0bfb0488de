"""What a person sees: rich tables and colour on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lab.errors import INTERRUPTED

_STYLE = {"holds": "green", "fails": "bold red", "not shown": "yellow"}


class _Output(Console):
    def on_broken_pipe(self) -> None:
        """Whoever read (`lab list | head -1`) has gone: as good as a Ctrl-C. Rich would end with 1, a claim that failed."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(INTERRUPTED)


def make_console() -> Console:
    """Standard output, for what was asked for. When nobody reads any more, printing ends the process with 130."""
    return _Output(highlight=False, soft_wrap=True)


def make_error_console() -> Console:
    """Standard error, for what went wrong."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def short(value: Any, limit: int = 60) -> str:
    """A value on one line of at most `limit` characters."""
    text = value if isinstance(value, str) else json.dumps(_rounded(value), default=str)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _rounded(value: Any) -> Any:
    """The value with its floats to 5 digits: what a person compares. Results keep them whole."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


WHOLE = 2000
"""Characters of a claim that failed: to compare what was expected with what was measured, one needs all of both."""


def print_claims(console: Console, results: Iterable[Mapping[str, Any]]) -> None:
    """The table of claims of one or more results, with the count of each verdict."""
    counts = {"holds": 0, "fails": 0, "not shown": 0}
    rows: list[tuple[str, ...]] = []
    for result in results:
        for claim in result["claims"]:
            counts[claim["verdict"]] += 1
            limit = WHOLE if claim["verdict"] == "fails" else 60
            detail = claim["reason"] if claim["verdict"] == "not shown" else short(claim["measured"], limit)
            rows.append(
                (
                    result["lesson"],
                    claim["statement"],
                    short(claim["expected"], limit),
                    detail,
                    claim["verdict"],
                )
            )
    if console.is_terminal:
        table = Table("lesson", "claim", "expected", "measured", "verdict", show_lines=False)
        for row in rows:
            table.add_row(*map(escape, row[:-1]), f"[{_STYLE[row[-1]]}]{row[-1]}[/]")
        console.print(table, soft_wrap=False)
    else:
        for lesson, statement, expected, measured, verdict in rows:
            console.print(
                f"{verdict:9s} {lesson}: {statement} (expected {expected}; measured {measured})", markup=False
            )
    console.print(
        f"{counts['holds']} claims hold, {counts['fails']} fail, {counts['not shown']} not shown here.",
        markup=False,
    )
