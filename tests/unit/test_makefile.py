"""The user's interface: every target explained, every knob of the settings reachable."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from lab.lessons import lessons
from lab.settings import CHECKOUT, Settings

TEXT = (CHECKOUT / "Makefile").read_text()
TARGETS = re.findall(
    "[a-z-]+",
    """
    demo test setup run lessons list results up down status doctor dashboard logs submit images pull base-image
    store-check bench-start check test-full clean clean-data
    """,
)


def variable(name: str) -> list[str]:
    found = re.search(rf"^{name} := (.*)$", TEXT, re.MULTILINE)
    assert found
    return found[1].split()


def make(*words: str, folder: Path | None = None) -> str:
    """What `make` prints; without the knobs of whoever runs the tests."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL") and not key.startswith("LAB_")
    }
    command = ["make", "-f", str(CHECKOUT / "Makefile"), *words]
    return subprocess.run(
        command,
        cwd=folder or CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    ).stdout


def test_make_alone_lists_every_target_lesson_and_knob(tmp_path: Path) -> None:
    listed = make(folder=tmp_path)
    for name in TARGETS:
        assert re.search(rf"^  {name} +\S", listed, re.MULTILINE), name
    for name in (*lessons(), *variable("KNOBS")):
        assert re.search(rf"\b{name}\b", listed), name
    assert not list(tmp_path.iterdir())


def test_every_lesson_is_a_target() -> None:
    assert variable("LESSONS") == list(lessons())


def test_the_knobs_are_those_of_the_settings() -> None:
    aliases = {
        choice
        for field in Settings.model_fields.values()
        for choice in getattr(field.validation_alias, "choices", ())
    }
    assert {f"LAB_{name}" for name in variable("KNOBS")} == aliases


def test_every_target_that_is_not_a_file_is_phony() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):(?!=)", TEXT, re.MULTILINE))
    phony = {name for line in re.findall(r"^\.PHONY: (.*)$", TEXT, re.MULTILINE) for name in line.split()}
    assert targets <= phony


@pytest.mark.parametrize("knob", variable("KNOBS"))
def test_a_knob_reaches_the_lab(tmp_path: Path, knob: str) -> None:
    shown = make(
        "-s", "--eval", f'show: ; @echo "[$${{LAB_{knob}-unset}}]"', "show", f"{knob}=va lue", folder=tmp_path
    )
    assert shown == "[va lue]\n"
    shown = make("-s", "--eval", f'show: ; @echo "[$${{LAB_{knob}-unset}}]"', "show", folder=tmp_path)
    assert shown == "[unset]\n"


def test_a_value_arrives_as_it_was_written(tmp_path: Path) -> None:
    odd = "x$y#z'$(shell echo no)"
    shown = make("-s", "--eval", 'show: ; @echo "$$LAB_NAME"', "show", f"NAME={odd}", folder=tmp_path)
    assert shown == f"{odd}\n"
    assert """run 'a"; touch F; '\\'''""" in make("-n", "run", """LESSON=a"; touch F; '""")


def test_the_environments_words_are_no_knobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NAME", "STORE", "LESSON", "RUN", "YES", "ARGS", "FOLDER", "CMD"):
        monkeypatch.setenv(name, "somebody-elses")
    for target in ("run", "results", "logs", "submit", "clean-data", "list"):
        assert "somebody" not in make("-n", target)
    shown = make("-s", "--eval", 'show: ; @echo "[$$LAB_NAME]"', "show", folder=tmp_path)
    assert shown == "[]\n"


def test_a_program_of_the_user_s_is_two_words_whatever_is_in_them() -> None:
    said = make("-n", "submit", "FOLDER=my folder", "CMD=python train.py 'x'; ls $HOME $(shell echo no)")
    assert said.endswith(
        """lab submit 'my folder' 'python train.py '\\''x'\\''; ls $HOME $(shell echo no)'\n"""
    )


@pytest.mark.parametrize("words", [(), ("FOLDER=x",), ("CMD=x",)])
def test_a_program_needs_its_folder_and_its_command(words: tuple[str, ...]) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        make("-o", "light", "submit", *words)
    assert "FOLDER= and CMD= are needed" in caught.value.stderr
    assert caught.value.returncode == 2


def test_a_misspelt_knob_is_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        make("-n", "list", "WORKRES=3")
    assert "WORKRES is no knob" in caught.value.stderr
    assert caught.value.returncode == 2


def test_only_yes_1_deletes() -> None:
    assert "--yes" in make("-n", "clean-data", "YES=1")
    for no in ("YES=no", "YES=0", "YES=false", "YES="):
        assert "--yes" not in make("-n", "clean-data", no)


def test_clean_keeps_data_and_results() -> None:
    recipe = TEXT.split("\nclean: ")[1].split("\n\n")[0]
    removed = re.findall(r"rm -rf (.*)", recipe)
    assert removed
    assert not re.search(r"results|\.lab|\.env", removed[0])
