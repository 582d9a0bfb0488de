"""Lesson `article` without a cluster: refusals, hidden modules, counted uploads."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lab.errors import UserError
from lab.lessons.article import LESSON, Article


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reports": 3}, "--reports=3"),
        ({"rows": 201}, "use 200 or 202"),
        ({"rows": 1}, "use 2."),
        ({"kilobytes": 0}, "--kilobytes=0"),
    ],
)
def test_bad_input_is_one_sentence(changes: dict[str, int], said: str) -> None:
    with pytest.raises(UserError) as caught:
        LESSON.check(replace(Article(), **changes))
    assert said in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_hidden_module_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    from lab.observe.train_extra import Hidden

    monkeypatch.setattr(sys, "meta_path", [Hidden(["colorsys"]), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with pytest.raises(ModuleNotFoundError, match="colorsys"):
        importlib.import_module("colorsys")
    assert importlib.import_module("json")


def test_packages_of_the_default_extra_alone() -> None:
    pytest.importorskip("ray")
    from lab.observe.train_extra import modules_of, only_in_default

    found = only_in_default()
    assert "aiohttp-cors" in found
    assert "pyarrow" not in found
    assert "requests" not in found, "both extras ask for it"
    assert "aiohttp_cors" in modules_of(found)


def test_uploads_are_counted_and_the_function_is_put_back(tmp_path: Path) -> None:
    fs = pytest.importorskip("pyarrow.fs")
    pytest.importorskip("ray")
    from lab.observe.article_programs import counted_uploads

    original = fs.copy_files
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "model.pt").write_text("x")
    (tmp_path / "to").mkdir()
    with counted_uploads() as sent:
        fs.copy_files(str(tmp_path / "from"), str(tmp_path / "to"))
        with pytest.raises(FileNotFoundError):
            fs.copy_files(str(tmp_path / "missing"), str(tmp_path / "nowhere"))
    assert sent == ["to"]
    assert (tmp_path / "to" / "model.pt").read_text() == "x"
    assert fs.copy_files is original
