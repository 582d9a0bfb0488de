"""Storage locations, names and endpoints: what is accepted, and the one sentence for what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from lab.errors import UserError
from lab.settings import StoreAccess
from lab.storage import Entry, Location, check_endpoint, check_name, open_storage, parse_location


@pytest.mark.parametrize(
    ("uri", "location"),
    [
        ("/data/runs", Location("local", "/data/runs")),
        ("/data//runs/", Location("local", "/data/runs")),
        ("s3://lab", Location("s3", "lab")),
        ("s3://lab/", Location("s3", "lab")),
        ("s3://lab/a/b/", Location("s3", "lab/a/b")),
    ],
)
def test_a_location_is_read(uri: str, location: Location) -> None:
    assert parse_location(uri) == location
    assert parse_location(str(location)) == location


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("relative/path", "not absolute"),
        ("", "not absolute"),
        ("~/runs", "not absolute"),
        ("/data/../etc", "'..'"),
        ("/my data", "space"),
        ("/data/runs ", "space"),
        ("s3://lab/my runs", "space"),
        ("/data\x00/runs", "control character"),
        ("s3:/lab/runs", "malformed"),
        ("s3:lab", "malformed"),
        ("s3://[x", "malformed"),
        ("s3://", "no bucket"),
        ("s3:///runs", "no bucket"),
        ("s3://ab/runs", "bucket 'ab'"),
        ("s3://Lab/runs", "bucket 'Lab'"),
        ("s3://lab_1/runs", "bucket 'lab_1'"),
        ("s3://lab/a//b", "empty"),
        ("s3://lab/../other", "'..'"),
        ("s3://lab/./x", "'.'"),
        ("s3://key:secret@lab/runs", "keys"),
        ("s3://lab/runs?endpoint_override=x", "options"),
        ("gs://lab/runs", "unknown scheme 'gs'"),
        ("file:///data", "unknown scheme 'file'"),
        ("http://127.0.0.1:9000/lab", "unknown scheme 'http'"),
    ],
)
def test_a_wrong_location_is_refused_in_one_sentence(uri: str, why: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_location(uri)
    sentence = str(caught.value)
    shown = uri.replace("key:secret@", "***@")  # keys are not repeated
    assert sentence.startswith(f"LAB_STORAGE={shown!r} ")
    assert why in sentence
    assert "\n" not in sentence


@given(st.text(max_size=40))
def test_any_text_is_a_location_or_a_user_error(text: str) -> None:
    try:
        location = parse_location(text)
    except UserError:
        return
    assert ".." not in location.path.split("/")
    assert location.kind == "s3" or location.path.startswith("/")


@pytest.mark.parametrize("name", ["a", "first-run-20261201-120000-ab12", "Run_1.2", "x" * 100])
def test_a_run_name_is_accepted(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "..", "a..b", "../x", "a/b", "/a", "a b", ".hidden", "-x", "a\n", "naïve", "x" * 101]
)
def test_a_wrong_run_name_is_refused(name: str) -> None:
    with pytest.raises(UserError) as caught:
        check_name(name)
    assert str(caught.value).startswith(f"LAB_NAME={name!r} cannot name a run: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["http://minio:9000", "https://s3.example.org", "http://[::1]:9000/"])
def test_an_endpoint_is_accepted(endpoint: str) -> None:
    assert check_endpoint(endpoint) == endpoint.rstrip("/")


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("minio:9000", "no scheme"),
        ("127.0.0.1:9000", "no scheme"),
        ("", "no scheme"),
        ("ftp://minio:9000", "no scheme"),
        ("http://", "no host"),
        ("http://:9000", "no host"),
        ("http://minio:port", "no valid port"),
        ("http://minio:0", "no valid port"),
        ("http://minio:70000", "no valid port"),
        ("http://mi nio:9000", "space"),
        ("http://minio:9000/lab", "more than host and port"),
        ("http://key:secret@minio:9000", "more than host and port"),
    ],
)
def test_a_wrong_endpoint_is_refused(endpoint: str, why: str) -> None:
    with pytest.raises(UserError) as caught:
        check_endpoint(endpoint)
    assert str(caught.value).startswith("S3_ENDPOINT=")
    assert why in str(caught.value)


def test_local_storage_writes_lists_reads_and_deletes(tmp_path: Path) -> None:
    storage = open_storage(Location("local", str(tmp_path)))
    storage.write("run/a/one", b"1")
    storage.write("run/two", b"22")
    storage.write("other/three", b"333")
    (tmp_path / "run" / "empty").mkdir()
    assert storage.files("run") == [Entry("run/a/one", 1), Entry("run/two", 2)]
    assert storage.folders() == ["other", "run"]
    assert storage.read("run/two") == b"22"
    storage.delete_tree("run")
    storage.delete_tree("never-there")
    assert storage.files() == [Entry("other/three", 3)]


@pytest.mark.parametrize("relative", ["", "/", "//"])
def test_the_root_is_never_deleted(tmp_path: Path, relative: str) -> None:
    storage = open_storage(Location("local", str(tmp_path)))
    storage.write("kept", b"")
    with pytest.raises(ValueError, match="never deleted"):
        storage.delete_tree(relative)
    assert storage.files() == [Entry("kept", 0)]


def test_an_s3_location_without_keys_is_refused() -> None:
    with pytest.raises(UserError, match="S3_ENDPOINT"):
        open_storage(Location("s3", "lab/runs"))


def test_opening_an_s3_location_sends_nothing() -> None:
    access = StoreAccess(
        endpoint="http://127.0.0.1:1",
        bucket="lab",
        access_key_id="key",
        secret_access_key=SecretStr("secret"),
    )
    storage = open_storage(Location("s3", "lab/runs"), access)
    assert storage.path == "lab/runs"
    assert storage.at("x") == "lab/runs/x"
    assert storage.at("") == "lab/runs"
