"""From settings and command-line words to a lesson's parameters."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import Field, fields, replace
from typing import Any, get_type_hints

from lab.errors import UserError
from lab.lessons.contract import Lesson, Params
from lab.settings import Settings

_SPELT = {"broken": "--break"}
"""Parameters whose option is called otherwise."""
MOST = 1_000_000
"""No number of rows, epochs or bytes in this lab is larger: a slip of the finger must not fill a disk."""

COMMON = tuple(field.name for field in fields(Params))


def own_fields(lesson: Lesson) -> dict[str, Field[Any]]:
    """The parameters that this lesson has beside the common ones."""
    return {field.name: field for field in fields(lesson.params) if field.name not in COMMON}


def option(name: str) -> str:
    """A field's long option."""
    return "--" + name.replace("_", "-")


def _convert(name: str, text: str, kind: Any, choices: tuple[str, ...]) -> Any:
    if choices and text not in choices:
        raise UserError(f"{option(name)}={text!r} is unknown: choose one of {', '.join(choices)}.")
    if kind is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise UserError(f"{option(name)}={text!r} is not a yes or no: use true or false.")
    if kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise UserError(f"{option(name)}={text!r} is not {wanted}.") from None
        if not -MOST <= number <= MOST:
            raise UserError(f"{option(name)}={text} is more than the lab is made for: use {MOST} at most.")
        return number
    return text


def parse_own(lesson: Lesson, words: Sequence[str]) -> dict[str, Any]:
    """Read a lesson's own options (`--key value`, `--key=value`, a bare `--flag`) from command-line words.

    Raises:
        UserError: an option that the lesson does not have, or a value that it cannot take.
    """
    known = own_fields(lesson)
    hints = get_type_hints(lesson.params)
    values: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, text = word.partition("=")
        name = key.removeprefix("--").replace("-", "_")
        if not key.startswith("--") or name not in known:
            near = difflib.get_close_matches(name, [*known, *COMMON], n=1)
            hint = (
                f"did you mean {_SPELT.get(near[0], option(near[0]))}?"
                if near
                else f"see `make list LESSON={lesson.name}`."
            )
            raise UserError(f"{word!r} is not an option of lesson {lesson.name}: {hint}")
        kind = hints[name]
        if not equals:
            if kind is bool:
                values[name] = True
                continue
            if not rest:
                raise UserError(f"{key} needs a value.")
            text = rest.pop(0)
        values[name] = _convert(name, text, kind, known[name].metadata.get("choices", ()))
    return values


def parameters(lesson: Lesson, settings: Settings, words: Sequence[str] = (), broken: str = "") -> Params:
    """The parameters of one run: the lesson's defaults, its quick form, the settings, its own options.

    Raises:
        UserError: an option or a value that the lesson cannot take.
    """
    if broken and broken not in (names := [item.name for item in lesson.breaks]):
        raise UserError(
            f"--break={broken!r} is unknown: lesson {lesson.name} can break {', '.join(names) or 'nothing'}."
        )
    values: dict[str, Any] = dict(lesson.quick) if settings.quick else {}
    values |= {
        "seed": settings.seed,
        "storage": settings.storage or "",
        "name": settings.name or "",
        "fresh": settings.fresh,
        "quick": settings.quick,
        "broken": broken,
    }
    if settings.workers is not None:
        values["workers"] = settings.workers
    return replace(lesson.params(), **(values | parse_own(lesson, words)))
