"""From settings and command-line words to a lesson's parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lab.errors import UserError
from lab.lessons.contract import Break, Lesson, Needs, Params
from lab.lessons.options import own_fields, parameters, parse_own
from lab.settings import Settings, load_settings, make_env_file


@dataclass(frozen=True)
class Knobs(Params):
    epochs: int = field(default=8, metadata={"help": "passes"})
    rate: float = 0.1
    spread: bool = False
    model: str = field(default="small", metadata={"choices": ("small", "large")})


LESSON = Lesson(
    name="sample",
    title="",
    idea="",
    needs=Needs("head"),
    observe="",
    claims=(),
    figures=lambda document, folder: [],
    params=Knobs,
    quick={"epochs": 2, "workers": 1},
    breaks=(Break("no-epochs", "", ()),),
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    make_env_file(tmp_path / ".env")
    return load_settings(tmp_path / ".env")


def test_own_fields_are_those_beside_the_common_ones() -> None:
    assert list(own_fields(LESSON)) == ["epochs", "rate", "spread", "model"]


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([], {}),
        (["--epochs", "3"], {"epochs": 3}),
        (["--epochs=3", "--rate", "1e-3"], {"epochs": 3, "rate": 1e-3}),
        (["--spread"], {"spread": True}),
        (["--spread", "--epochs", "3"], {"spread": True, "epochs": 3}),
        (["--spread=no"], {"spread": False}),
        (["--model", "large"], {"model": "large"}),
        (["--rate", "-1"], {"rate": -1.0}),
    ],
)
def test_own_options_are_read(words: list[str], values: dict[str, object]) -> None:
    assert parse_own(LESSON, words) == values


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--epoch", "3"], "'--epoch' is not an option of lesson sample: did you mean --epochs?"),
        (["--zzz"], "'--zzz' is not an option of lesson sample: see `make list LESSON=sample`."),
        (["stray"], "'stray' is not an option of lesson sample"),
        (["epochs", "3"], "'epochs' is not an option of lesson sample"),
        (["--epochs"], "--epochs needs a value."),
        (["--epochs", "three"], "--epochs='three' is not a whole number."),
        (["--epochs", "1.5"], "--epochs='1.5' is not a whole number."),
        (["--rate", "fast"], "--rate='fast' is not a number."),
        (["--spread=perhaps"], "--spread='perhaps' is not a yes or no"),
        (["--model", "huge"], "--model='huge' is unknown: choose one of small, large."),
    ],
)
def test_a_wrong_option_is_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_own(LESSON, words)
    assert str(caught.value).startswith(sentence)


def test_own_options_win_over_the_quick_form_and_settings_over_both(settings: Settings) -> None:
    plain = parameters(LESSON, settings)
    assert plain == Knobs()
    short = settings.model_copy(update={"quick": True, "seed": 5})
    assert parameters(LESSON, short) == Knobs(epochs=2, workers=1, seed=5, quick=True)
    assert parameters(LESSON, short.model_copy(update={"workers": 4}), ["--epochs", "3"]) == Knobs(
        epochs=3, workers=4, seed=5, quick=True
    )


def test_an_unknown_break_names_those_there_are(settings: Settings) -> None:
    assert parameters(LESSON, settings, broken="no-epochs").broken == "no-epochs"
    with pytest.raises(
        UserError, match=r"^--break='no-epoch' is unknown: lesson sample can break no-epochs\."
    ):
        parameters(LESSON, settings, broken="no-epoch")
