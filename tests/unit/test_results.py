"""Results on disk: none is lost, each says all it must."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lab.errors import UserError
from lab.lessons.contract import Judged, LessonResult, Verdict
from lab.report.results import SCHEMA, find_results, read_results, result_folder, write_result


def result(run: str, *verdicts: Verdict) -> LessonResult:
    return LessonResult(
        lesson="sample",
        run=run,
        runtime="embedded",
        claims=tuple(Judged(f"c{i}", "", 1, 1, verdict) for i, verdict in enumerate(verdicts)),
        measurements={"path": Path("/x")},
        figures=(),
        files={"storage": "/x", "log": "/y"},
        environment={},
        params={},
        seconds=1.5,
    )


def test_a_run_of_the_same_name_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    folders = [result_folder(tmp_path, "sample", "mine") for _ in range(3)]
    assert [folder.name for folder in folders] == ["mine", "mine.2", "mine.3"]
    assert all(folder.is_dir() for folder in folders)


def test_a_result_is_written_and_found_again(tmp_path: Path) -> None:
    for age, (run, loss) in enumerate([("old", 1.0), ("mine", 2.0), ("mine", 3.0)]):
        folder = result_folder(tmp_path, "sample", run)
        write_result(folder, result(run, "holds"), {"loss": loss})
        os.utime(folder / "result.json", (age, age))
    assert [found["run"] for found in read_results(tmp_path)] == ["old", "mine", "mine"]
    newest = find_results(tmp_path, "mine")[-1]
    assert find_results(tmp_path, "mine.2") == [newest]
    assert newest["schema"] == SCHEMA == LessonResult.schema
    assert newest["holds"] is True
    assert newest["folder"] == str(tmp_path / "results" / "sample" / "mine.2")
    assert json.loads((Path(newest["folder"]) / "document.json").read_text()) == {"loss": 3.0}


def test_a_damaged_result_hides_no_other(tmp_path: Path) -> None:
    write_result(result_folder(tmp_path, "sample", "good"), result("good", "holds"), {})
    for number, content in enumerate(("", "{}", "[]", '{"run": ')):
        (result_folder(tmp_path, "sample", f"bad-{number}") / "result.json").write_text(content)
    left_out: list[Path] = []
    assert [found["run"] for found in read_results(tmp_path, left_out.append)] == ["good"]
    assert len(left_out) == 4
    assert find_results(tmp_path, "good")[-1]["holds"]


def test_an_unknown_run_is_a_user_error(tmp_path: Path) -> None:
    assert read_results(tmp_path) == []
    with pytest.raises(UserError, match=r"^RUN='mine' has no result"):
        find_results(tmp_path, "mine")[-1]


@pytest.mark.parametrize(
    ("verdicts", "holds"),
    [
        (("holds", "holds"), True),
        (("holds", "not shown"), True),
        (("holds", "fails"), False),
        (("not shown",), False),
        ((), False),
    ],
)
def test_a_lesson_holds_when_something_was_shown_and_nothing_failed(
    verdicts: tuple[Verdict, ...], holds: bool
) -> None:
    assert result("mine", *verdicts).holds is holds
