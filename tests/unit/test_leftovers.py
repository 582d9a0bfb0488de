"""What is a leftover and what is not, on a local path; and who is alive (pitfall C3)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow.fs import LocalFileSystem

from lab.errors import UserError
from lab.leftovers import MARKER, SNAPSHOT, NoUploads, Upload, find, remove
from lab.observe.alive import Alive, run_of
from lab.observe.checkpoints import clean_if_clear, clean_run, delete_whole, listed
from lab.storage import Location, Storage

RUN = "mine"
NOBODY = Alive((), 0)


class FakeUploads:
    """Remembers what it was asked for, and drops what it is told to drop."""

    def __init__(self, *keys: str) -> None:
        self.there = [Upload(key, f"id-{number}") for number, key in enumerate(keys)]
        self.asked: list[str] = []

    def find(self, prefix: str, keys: Iterable[str]) -> list[Upload]:
        self.asked = [prefix, *keys]
        return [upload for upload in self.there if upload.key.startswith(prefix)]

    def abort(self, upload: Upload) -> None:
        self.there.remove(upload)


def a_run(root: Path, named: Iterable[str], folders: Iterable[str]) -> Storage:
    storage = Storage(Location("local", str(root)), LocalFileSystem())
    results = [{"checkpoint_dir_name": name, "metrics": {}} for name in named]
    content = {"checkpoint_results": results, "latest_checkpoint_result": results[-1] if results else None}
    storage.write(f"{RUN}/{SNAPSHOT}", json.dumps(content).encode())
    storage.write(f"{RUN}/epoch-log/row.json", b"{}")
    for name in folders:
        storage.write(f"{RUN}/{name}/model.pt", name.encode())
    return storage


def test_c3_the_orphan_is_found_and_removed_and_nothing_else_is(tmp_path: Path) -> None:
    storage = a_run(
        tmp_path,
        ["checkpoint_a", "checkpoint_b"],
        ["checkpoint_a", "checkpoint_b", "checkpoint_lost", "mine"],
    )
    (tmp_path / RUN / "checkpoint_empty").mkdir()
    uploads = FakeUploads(f"{tmp_path.name}/elsewhere/x")
    found = find(storage, RUN, uploads)
    assert found is not None
    assert [(one.name, one.files, one.bytes) for one in found.folders] == [
        ("checkpoint_empty", 0, 0),
        ("checkpoint_lost", 1, 15),
    ]
    remove(storage, found, uploads)
    assert storage.folders(RUN) == ["checkpoint_a", "checkpoint_b", "epoch-log", "mine"]
    assert len(uploads.there) == 1, "another run's upload stays"
    again = find(storage, RUN, uploads)
    assert again is not None
    assert again.none


def test_the_likely_keys_are_asked_for_where_a_store_lists_by_exact_key_alone(tmp_path: Path) -> None:
    storage = a_run(tmp_path, ["checkpoint_a"], ["checkpoint_a"])
    (tmp_path / RUN / "checkpoint_cut").mkdir()
    uploads = FakeUploads()
    find(storage, RUN, uploads)
    assert [asked.rpartition(f"{RUN}/")[2] for asked in uploads.asked] == ["", "checkpoint_cut/model.pt"]


@settings(max_examples=40, deadline=None)
@given(names=st.sets(st.from_regex(r"checkpoint_[a-z0-9]{1,6}", fullmatch=True), max_size=8), data=st.data())
def test_what_stays_is_what_the_snapshot_names(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], data: st.DataObject
) -> None:
    named = sorted(data.draw(st.sets(st.sampled_from(sorted(names)))) if names else [])
    storage = a_run(tmp_path_factory.mktemp("runs"), named, names)
    answer = clean_run(storage, RUN, NoUploads(), NOBODY, delete=True)
    left = [name for name in storage.folders(RUN) if name.startswith("checkpoint_")]
    assert left == named
    assert {one["name"] for one in answer["folders"]} == names - set(named)
    assert answer["deleted"] is bool(names - set(named))


def test_showing_deletes_nothing_and_a_live_run_is_left_alone(tmp_path: Path) -> None:
    storage = a_run(tmp_path, ["checkpoint_a"], ["checkpoint_a", "checkpoint_lost"])
    for alive, delete in ((NOBODY, False), (Alive((RUN,), 0), True), (Alive((), 1), True)):
        answer = clean_run(storage, RUN, NoUploads(), alive, delete=delete)
        assert [one["name"] for one in answer["folders"]] == ["checkpoint_lost"]
        assert not answer["deleted"]
        assert "checkpoint_lost" in storage.folders(RUN)
        assert bool(answer["held"]) is (alive is not NOBODY)
    assert not delete_whole(storage, RUN, Alive((RUN,), 0), delete=True)["deleted"]
    assert storage.files(RUN)
    assert delete_whole(storage, RUN, NOBODY, delete=True)["deleted"]
    assert not storage.files(RUN)


def test_a_run_s_checkpoints_are_its_folders_and_not_the_snapshot(tmp_path: Path) -> None:
    storage = a_run(tmp_path, ["checkpoint_a"], ["checkpoint_a", "checkpoint_lost"])
    assert listed(storage)[RUN]["checkpoints"] == ["checkpoint_a", "checkpoint_lost"]


def test_a_folder_that_is_no_run_has_no_leftovers(tmp_path: Path) -> None:
    storage = Storage(Location("local", str(tmp_path)), LocalFileSystem())
    storage.write("data/checkpoint_x/model.pt", b"x")
    assert find(storage, "data", NoUploads()) is None
    assert not delete_whole(storage, "data", NOBODY, delete=True)["deleted"]
    assert storage.files("data"), "a user's own folder is not deleted, even by its name"
    storage.write(f"data/{MARKER}", b"")
    with pytest.raises(
        UserError, match=r"is missing.*--whole"
    ):  # killed before its first commit, or the file was lost
        find(storage, "data", NoUploads())
    assert delete_whole(storage, "data", NOBODY, delete=True)["deleted"]


def test_among_all_runs_one_without_a_snapshot_is_passed_over_and_says_why(tmp_path: Path) -> None:
    storage = a_run(tmp_path, ["checkpoint_a"], ["checkpoint_a", "checkpoint_lost"])
    storage.write(f"lost/{MARKER}", b"")
    storage.write("lost/checkpoint_x/model.pt", b"x")
    first, second = (
        clean_if_clear(storage, name, NoUploads(), NOBODY, delete=True) for name in ("lost", RUN)
    )
    assert "--whole" in first["unclear"]
    assert storage.files("lost/checkpoint_x")
    assert [one["name"] for one in second["folders"]] == ["checkpoint_lost"]
    assert second["deleted"]


def test_with_a_damaged_snapshot_nothing_is_a_leftover(tmp_path: Path) -> None:
    storage = a_run(tmp_path, ["checkpoint_a"], ["checkpoint_a"])
    for content in (b"{", b"[]", b"{}"):
        storage.write(f"{RUN}/{SNAPSHOT}", content)
        with pytest.raises(UserError, match=r"damaged.*--whole"):
            clean_run(storage, RUN, NoUploads(), NOBODY, delete=True)
    assert "checkpoint_a" in storage.folders(RUN)


@pytest.mark.parametrize(
    ("entrypoint", "run"),
    [
        (
            'exec python3 -m lab.observe resume \'{"run": "r-1", "storage": "s3://lab/runs"}\'',
            "r-1",
        ),
        ("python train.py", None),
        ("python -m lab.observe", None),
        ("python -m lab.observe x 'no json'", None),
        ("python -m lab.observe x '[1]'", None),
        ("it's cut", None),
        ("", None),
    ],
)
def test_the_run_of_an_entry_point(entrypoint: str, run: str | None) -> None:
    assert run_of(entrypoint) == run


def test_who_is_alive() -> None:
    alive = Alive(("first-run-1",), 0)
    assert "first-run-1" in alive.holds("first-run-1")
    assert alive.holds("first-run-1-s3fs"), "a lesson's second run"
    assert not alive.holds("first-run-10")
    assert not alive.holds("first-run")
    assert "did not start" in Alive((), 2).holds("anything")
