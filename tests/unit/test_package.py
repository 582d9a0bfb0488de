"""The zip file in which a user's program travels."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lab import package
from lab.errors import UserError
from lab.package import pack


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("train.py", "deep/er/data.txt", "__pycache__/x.pyc", "deep/.venv/bin/python", ".env"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "run.sh").write_text("echo")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "train.py")
    return tmp_path


def test_the_program_s_files_travel_and_their_surroundings_do_not(folder: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(pack(folder, {}))) as archive:
        assert archive.namelist() == ["link", "run.sh", "train.py", "deep/er/data.txt"]
        assert archive.read("deep/er/data.txt") == b"deep/er/data.txt"
        assert archive.getinfo("run.sh").external_attr >> 16 & 0o777 == 0o755


def test_the_same_files_are_the_same_package(folder: Path) -> None:
    first = pack(folder, {})
    os.utime(folder / "train.py", (1, 1))
    assert pack(folder, {}) == first
    (folder / "train.py").write_text("another")
    assert pack(folder, {}) != first


def test_data_is_no_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "LIMIT_BYTES", 2 * 2**20)
    (folder / "data.bin").write_bytes(bytes(3 * 2**20))
    with pytest.raises(UserError, match=f"FOLDER='{folder}' holds more than 2 MiB"):
        pack(folder, {})


@pytest.mark.parametrize(("name", "said"), [("train.py", "is no folder"), ("empty", "holds no file")])
def test_what_holds_no_program_is_refused(folder: Path, name: str, said: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match=f"FOLDER='{folder / name}' {said}"):
        pack(folder / name, {})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.symlink_to(path.parent / "missing"), "is no file, or a link to none"),
        (lambda path: path.symlink_to(path), "is no file, or a link to none"),
        (lambda path: path.symlink_to(path.parent / "deep"), "is a link to a folder"),
        (os.mkfifo, "is no file, or a link to none"),
        (lambda path: (path.parent / "odd\\one").touch(), "one: has a name that not every system can hold"),
        (
            lambda path: open(os.fsencode(path) + b"\xff", "w").close(),
            r"odd\\xff: has a name that not every system can hold",
        ),
    ],
)
def test_what_would_be_lost_on_the_way_is_refused(
    folder: Path, make: Callable[[Path], object], said: str
) -> None:
    make(folder / "odd")
    with pytest.raises(UserError, match=f"FOLDER='{folder}' cannot be sent: .*{said}"):
        pack(folder, {})


def test_no_secret_of_the_lab_travels_whatever_its_file_is_called(folder: Path) -> None:
    (folder / "deep" / "env.bak").write_text("STORE_ROOT_PASSWORD=do-not-show\n")
    with pytest.raises(UserError, match=r"deep/env\.bak: holds the lab's STORE_ROOT_PASSWORD") as caught:
        pack(folder, {"STORE_ROOT_PASSWORD": "do-not-show"})
    assert "do-not-show" not in str(caught.value)
