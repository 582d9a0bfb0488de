"""What the docs pages quote comes from results; and every image that a page shows is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lab.errors import UserError
from lab.lessons import lessons
from lab.report.docs import BEGIN, END, measured_block, newest, publish, rewrite
from lab.settings import CHECKOUT, ROOT

PAGES = [
    CHECKOUT / "README.md",
    *(CHECKOUT / "docs" / f"{name}.md" for name in ("index", "pitfalls", *lessons())),
]


def result(**changes: Any) -> dict[str, Any]:
    claims = [
        {
            "id": "a",
            "statement": "A | B",
            "expected": 1,
            "measured": 0.123456789,
            "verdict": "holds",
            "reason": "",
        },
        {
            "id": "c",
            "statement": "C",
            "expected": None,
            "measured": None,
            "verdict": "not shown",
            "reason": "no GPU\nhere",
        },
        {
            "id": "d",
            "statement": "D",
            "expected": "x",
            "measured": f"{ROOT}/runs",
            "verdict": "holds",
            "reason": "",
        },
    ]
    environment = {
        "date": "2026-12-01T10:00:00+0000",
        "revision": "abc1234",
        "machine": "Linux x86_64",
        "host_cores": 2,
        "versions": {"ray": "2.60.0"},
    }
    base = {
        "lesson": "threads",
        "holds": True,
        "params": {"quick": False, "broken": ""},
        "runtime": "embedded",
        "seconds": 12.3,
        "claims": claims,
        "measurements": {"ratio": 0.37654321, "rates": {"a": [1.0, 2.000004]}},
        "figures": ["throughput.png"],
        "environment": environment,
        "run": "one",
    }
    return base | changes


def test_the_block_has_every_claim_every_measurement_and_the_machine() -> None:
    block = measured_block(result())
    assert "| `a` A \\| B | holds | 1 | 0.1235 |" in block
    assert "| `c` C | not shown | null | no GPU here |" in block
    assert "| `d` D | holds | x | $LAB_ROOT/runs |" in block
    assert "| ratio | 0.3765 |" in block
    assert '| rates | {"a": [1.0, 2.0]} |' in block
    assert "Linux x86_64 with 2 cores (ray 2.60.0)" in block


def test_only_what_is_between_the_markers_changes() -> None:
    page = f"# T\n\nbefore\n{BEGIN}\nold\n{END}\nafter\n"
    once = rewrite(page, "new")
    assert once == f"# T\n\nbefore\n{BEGIN}\nnew\n{END}\nafter\n"
    assert rewrite(once, "new") == once


def test_a_page_without_markers_gets_them_at_its_end() -> None:
    once = rewrite("# T\n", "new")
    assert once == f"# T\n\n## Measured\n\n{BEGIN}\nnew\n{END}\n"
    assert rewrite(once, "new") == once


@pytest.mark.parametrize("page", [BEGIN, END, f"{END} {BEGIN}", f"{BEGIN} {BEGIN} {END}"])
def test_lone_or_double_markers_are_refused(page: str) -> None:
    with pytest.raises(UserError, match="needs one"):
        rewrite(page, "new")


def test_the_newest_full_run_that_holds_is_taken() -> None:
    results = [
        result(run="old"),
        result(run="good"),
        result(run="failed", holds=False),
        result(run="short", params={"quick": True, "broken": ""}),
        result(run="twin", params={"quick": False, "broken": "one-thread"}),
        result(run="other", lesson="context"),
    ]
    assert newest(results, "threads")["run"] == "good"
    with pytest.raises(UserError, match="'uneven' has no full run"):
        newest(results, "uneven")


def test_figures_are_copied_under_the_lesson_s_name(tmp_path: Path) -> None:
    docs, folder = tmp_path / "docs", tmp_path / "run"
    docs.mkdir()
    folder.mkdir()
    (folder / "throughput.png").write_bytes(b"png")
    with pytest.raises(UserError, match="has no page"):
        publish(result(folder=str(folder)), docs)
    (docs / "threads.md").write_text("# threads\n")
    written = publish(result(folder=str(folder)), docs)
    assert written == [docs / "threads.md", docs / "images" / "threads-throughput.png"]
    assert written[1].read_bytes() == b"png"
    assert BEGIN in written[0].read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_image_of_a_page_is_there(page: Path) -> None:
    shown = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    names = re.findall(r"!\[[^]]*\]\(([^)]+)\)", shown)
    assert [name for name in names if not (page.parent / name).is_file()] == []


def test_every_pitfall_that_is_named_has_its_row() -> None:
    rows = re.findall(r"^\| ([SCDFK]\d+) \|", (CHECKOUT / "docs" / "pitfalls.md").read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    files = [*PAGES, *(CHECKOUT / "lab").rglob("*.py"), CHECKOUT / "docker-compose.yml"]
    named = {
        name
        for file in files
        for found in re.findall(r"pitfalls?\s+((?:[SCDFK]\d+(?:,\s*|\s+and\s+)?)+)", file.read_text())
        for name in re.findall(r"[SCDFK]\d+", found)
    }
    assert named
    assert named <= set(rows)


def test_every_page_that_is_linked_is_there() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
