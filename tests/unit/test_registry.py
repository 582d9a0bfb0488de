"""The registry is the one list of lessons: the docs and the README repeat it, and nothing else.

`python -m tests.unit.test_registry` writes the rows of the tables anew.
"""

from __future__ import annotations

import importlib.util
import re

import pytest

from lab.errors import UserError
from lab.lessons import find, lessons
from lab.lessons.contract import Lesson
from lab.lessons.options import own_fields
from lab.settings import CHECKOUT

LESSONS = list(lessons().values())
NAMES = [lesson.name for lesson in LESSONS]
TABLES = [("README.md", "docs/"), ("docs/index.md", "")]
ROWS = re.compile(r"(?:^\| \[`.*\n)+", re.MULTILINE)


def row(lesson: Lesson, page: str) -> str:
    """A lesson's row in a table of lessons; `page` is its docs page, relative to the table's file."""
    where = "the head" if lesson.needs.role == "head" else f"{lesson.needs.nodes} or more worker nodes"
    quick, full = lesson.seconds
    return f"| [`{lesson.name}`]({page}) | {lesson.title} | {where} | {full} s ({quick} s) |"


def rows(folder: str) -> str:
    return "".join(f"{row(lesson, f'{folder}{lesson.name}.md')}\n" for lesson in LESSONS)


@pytest.mark.parametrize(("file", "folder"), TABLES)
def test_the_tables_of_lessons_are_the_registry_s(file: str, folder: str) -> None:
    found = ROWS.findall((CHECKOUT / file).read_text())
    assert found == [rows(folder)], "run `python -m tests.unit.test_registry`"


@pytest.mark.parametrize("lesson", LESSONS, ids=NAMES)
def test_a_lesson_s_page_names_its_command_and_everything_that_can_be_broken(lesson: Lesson) -> None:
    text = (CHECKOUT / "docs" / f"{lesson.name}.md").read_text()
    assert f"make {lesson.name}" in text
    missing = [broken.name for broken in lesson.breaks if broken.name not in text]
    assert not missing


@pytest.mark.parametrize("lesson", LESSONS, ids=NAMES)
def test_a_lesson_is_complete(lesson: Lesson) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9-]*", lesson.name)
    assert lesson.title
    assert lesson.idea
    assert importlib.util.find_spec(f"lab.observe.{lesson.observe}")
    ids = [claim.id for claim in lesson.claims]
    assert ids
    assert len(set(ids)) == len(ids)
    assert lesson.breaks, "a lesson has a live twin"
    for broken in lesson.breaks:
        assert set(broken.fails) <= set(ids)
        assert broken.fails
    assert all(field.metadata.get("help") for field in own_fields(lesson).values())
    assert 0 < lesson.seconds[0] <= lesson.seconds[1]


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("frist-run", "did you mean 'first-run'?"),
        ("first_run", "did you mean 'first-run'?"),
        ("Multi-Node", "did you mean 'multi-node'?"),
        ("zzz", "see `make list`."),
    ],
)
def test_an_unknown_lesson_suggests_the_nearest(asked: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        find(asked)
    assert str(caught.value) == f"LESSON={asked!r} is not a lesson: {hint}"


if __name__ == "__main__":
    for name, below in TABLES:
        path = CHECKOUT / name
        path.write_text(ROWS.sub(lambda found, below=below: rows(below), path.read_text()))  # type: ignore[misc]
