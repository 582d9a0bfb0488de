"""What the docs pages quote: figures and tables of real runs, copied from `results/` into `docs/`.

`python -m lab.report.docs [LESSON ...]` takes of each lesson the newest full run that holds, copies its figures to
`docs/images/<lesson>-<figure>.png`, and rewrites in `docs/<lesson>.md` what stands between the two markers.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.console import short
from lab.errors import LabError, UserError
from lab.lessons import find, lessons
from lab.report.results import read_results
from lab.settings import CHECKOUT, ROOT

BEGIN = "<!-- measured -->"
END = "<!-- /measured -->"
WIDEST = 160
"""Characters of a table's cell."""


def measured_block(result: Mapping[str, Any]) -> str:
    """The run's claims and measurements as Markdown, with the machine that gave them."""
    environment = result["environment"]
    versions = ", ".join(f"{name} {number}" for name, number in sorted(environment["versions"].items()))
    lines = [
        f"Measured {environment['date'][:10]} at revision {environment['revision']}, runtime {result['runtime']}, on "
        f"{environment['machine']} with {environment['host_cores']} cores ({versions}); "
        f"{result['seconds']:.0f} s with the cluster up. Made by `make docs-figures`.",
        "",
        "| claim | | expected | measured |",
        "|---|---|---|---|",
    ]
    for claim in result["claims"]:
        measured = claim["reason"] if claim["verdict"] == "not shown" else claim["measured"]
        lines.append(
            _row(f"`{claim['id']}` {claim['statement']}", claim["verdict"], claim["expected"], measured)
        )
    lines += ["", "| measurement | value |", "|---|---|"]
    lines += [_row(name.replace("_", " "), value) for name, value in result["measurements"].items()]
    return "\n".join(lines)


def rewrite(page: str, block: str) -> str:
    """The page with `block` between the markers; a page without them gets them at its end.

    Raises:
        UserError: the page has one marker without the other, or several.
    """
    counts = page.count(BEGIN), page.count(END)
    if counts == (0, 0):
        return f"{page.rstrip()}\n\n## Measured\n\n{BEGIN}\n{block}\n{END}\n"
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if counts != (1, 1) or not found:
        raise UserError(
            f"a docs page needs one {BEGIN} and then one {END}: it has {counts[0]} and {counts[1]}."
        )
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


def newest(results: Iterable[dict[str, Any]], lesson: str) -> dict[str, Any]:
    """The newest result of the lesson's full form that holds; `results` are oldest first.

    Raises:
        UserError: there is none.
    """
    found = [
        result
        for result in results
        if result["lesson"] == lesson
        and result["holds"]
        and not result["params"]["quick"]
        and not result["params"]["broken"]
    ]
    if found:
        return found[-1]
    raise UserError(f"LESSON={lesson!r} has no full run that holds: `lab run {lesson}` first.")


def publish(result: Mapping[str, Any], docs: Path) -> list[Path]:
    """Copy the result's figures and rewrite its page.

    Returns:
        What was written.

    Raises:
        UserError: the page is missing or its markers are wrong.
    """
    lesson = result["lesson"]
    page = docs / f"{lesson}.md"
    if not page.is_file():
        raise UserError(f"LESSON={lesson!r} has no page {page}: write it first.")
    page.write_text(rewrite(page.read_text(), measured_block(result)))
    written = [page]
    (docs / "images").mkdir(exist_ok=True)
    for name in result["figures"]:
        target = docs / "images" / f"{lesson}-{name}"
        shutil.copyfile(Path(result["folder"]) / name, target)
        written.append(target)
    return written


def _row(*cells: Any) -> str:
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(value: Any) -> str:
    # the checkout's own path says nothing to a reader
    text = short(_rounded(value), WIDEST).replace(str(ROOT), "$LAB_ROOT")
    return " ".join(text.replace("|", "\\|").split())


def _rounded(value: Any) -> Any:
    """The value with every float at 4 significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def main(arguments: Sequence[str]) -> int:
    """Publish the named lessons, or all; returns the exit code."""
    try:
        chosen = [find(name).name for name in arguments] or list(lessons())
        results = read_results(ROOT)
        found = [newest(results, name) for name in chosen]
        for result in found:
            for path in publish(result, CHECKOUT / "docs"):
                print(path.relative_to(CHECKOUT))
    except LabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
