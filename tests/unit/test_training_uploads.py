"""Pitfall C7: the folder of a background upload outlives the caller's `with`, or is refused."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from lab.training.uploads import UPLOADING, NothingToUpload, take_over


def test_c7_the_files_outlive_the_callers_temporary_folder(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        Path(folder, "sub").mkdir()
        Path(folder, "model.pt").write_bytes(b"weights")
        Path(folder, "sub", "a.txt").write_text("a")
        kept = take_over(Path(folder))
        assert list(Path(folder).iterdir()) == [], "the caller may fill it anew"
        Path(folder, "model.pt").write_bytes(b"the next epoch's")
    assert not Path(folder).exists()
    assert kept.name.startswith(UPLOADING)
    assert kept.parent == tmp_path, "on the same disk: nothing is copied"
    assert (kept / "model.pt").read_bytes() == b"weights"
    assert (kept / "sub" / "a.txt").read_text() == "a"


def test_c7_a_folder_that_is_gone_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NothingToUpload, match="is empty"):
        take_over(tmp_path)
    with pytest.raises(NothingToUpload, match="not there"):
        take_over(tmp_path / "gone")
    assert list(tmp_path.iterdir()) == []
