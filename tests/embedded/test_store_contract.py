"""The contract of a store: what the lab needs of S3, the same tests for every one.

They run against the store of each runtime's test cluster. `make store-check` (LAB_TEST_STORE=1) runs them against
the store that S3_ENDPOINT, S3_BUCKET, S3_ACCESS_KEY_ID and S3_SECRET_ACCESS_KEY name, else against the one that is up
in this checkout. Everything is written below one prefix of the test's own, which is deleted at the end.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest
from minio import Minio
from minio.error import S3Error
from pydantic import SecretStr

from lab.runtimes.compose import ComposeRuntime
from lab.runtimes.embedded import EmbeddedRuntime
from lab.runtimes.engine import engine_problem
from lab.runtimes.protocol import Runtime
from lab.settings import CHECKOUT, StoreAccess, load_settings
from lab.storage import Entry, Location, Storage, open_storage
from lab.store import probe
from tests.conftest import GIVEN_STORE, Cluster

ClientName = Literal["pyarrow", "s3fs"]
CLIENTS: tuple[ClientName, ...] = ("pyarrow", "s3fs")
REFUSALS = {"AccessDenied", "AllAccessDisabled", "NoSuchBucket"}
READY_LIMIT_S = 3.0
MULTIPART_BYTES = 12 * 2**20


def chosen_store() -> StoreAccess | None:
    """The store that `make store-check` is about; None: that of the tests' own cluster."""
    if not os.environ.get("LAB_TEST_STORE"):
        return None
    if GIVEN_STORE.get("S3_ENDPOINT"):
        return StoreAccess.from_environment(GIVEN_STORE)
    if not (CHECKOUT / ".env").is_file():
        return None
    settings = load_settings(CHECKOUT / ".env")
    runtimes: list[Runtime] = [EmbeddedRuntime(settings, CHECKOUT)]
    if not engine_problem():
        runtimes.append(ComposeRuntime(settings))
    for runtime in runtimes:
        cluster = runtime.access()
        if cluster is not None:
            return settings.store_access(cluster.store)
    return None


CHOSEN = chosen_store()

if CHOSEN is not None:

    @pytest.fixture(scope="module")
    def access() -> StoreAccess:
        assert CHOSEN is not None
        return CHOSEN

else:

    @pytest.fixture(scope="module")
    def access(cluster: Cluster) -> StoreAccess:
        return cluster.settings.store_access(cluster.access.store)


@pytest.fixture
def raw(access: StoreAccess) -> Minio:
    """The store by the `minio` package: keys as they are."""
    return probe.client(access, timeout_s=20)


@pytest.fixture
def prefix(access: StoreAccess, raw: Minio) -> Iterator[str]:
    name = f"contract-{uuid.uuid4().hex[:12]}"
    yield name
    for key in keys(raw, access.bucket, name):
        raw.remove_object(access.bucket, key)


def keys(raw: Minio, bucket: str, prefix: str) -> list[str]:
    """Every key below a prefix, folder keys too, sorted."""
    found = raw.list_objects(bucket, prefix=f"{prefix}/", recursive=True)
    return sorted(str(item.object_name) for item in found)


def opened(access: StoreAccess, prefix: str, client: ClientName) -> Storage:
    return open_storage(Location("s3", f"{access.bucket}/{prefix}"), access, client)


def put(raw: Minio, bucket: str, key: str, content: bytes) -> None:
    raw.put_object(bucket, key, io.BytesIO(content), len(content))


def get(raw: Minio, bucket: str, key: str) -> bytes:
    response = raw.get_object(bucket, key)
    try:
        return bytes(response.read())
    finally:
        response.close()
        response.release_conn()


# --- Objects ------------------------------------------------------------------------------------------------


def test_put_get_list_and_delete(access: StoreAccess, raw: Minio, prefix: str) -> None:
    put(raw, access.bucket, f"{prefix}/a/one", b"1")
    put(raw, access.bucket, f"{prefix}/a/one", b"replaced")
    put(raw, access.bucket, f"{prefix}/two", b"")
    assert keys(raw, access.bucket, prefix) == [f"{prefix}/a/one", f"{prefix}/two"]
    assert get(raw, access.bucket, f"{prefix}/a/one") == b"replaced"
    raw.remove_object(access.bucket, f"{prefix}/a/one")
    raw.remove_object(access.bucket, f"{prefix}/never-there")
    assert keys(raw, access.bucket, prefix) == [f"{prefix}/two"]
    with pytest.raises(S3Error) as caught:
        raw.get_object(access.bucket, f"{prefix}/a/one")
    assert caught.value.code == "NoSuchKey"


def test_what_one_client_writes_every_client_reads(access: StoreAccess, raw: Minio, prefix: str) -> None:
    contents = {"empty": b"", "binary": bytes(range(256)) * 40, "deep/er/é ü+%.txt": "zwölf".encode()}
    storages = {client: opened(access, prefix, client) for client in CLIENTS}
    for name, content in contents.items():
        for client, storage in storages.items():
            storage.write(f"{client}/{name}", content)
        put(raw, access.bucket, f"{prefix}/minio/{name}", content)
    for writer in (*CLIENTS, "minio"):
        for name, content in contents.items():
            assert get(raw, access.bucket, f"{prefix}/{writer}/{name}") == content
            for storage in storages.values():
                assert storage.read(f"{writer}/{name}") == content
    expected = [
        Entry(f"{writer}/{name}", len(content))
        for writer in (*CLIENTS, "minio")
        for name, content in contents.items()
    ]
    for storage in storages.values():
        assert storage.files() == sorted(expected, key=lambda entry: entry.path)
        assert storage.folders() == sorted((*CLIENTS, "minio"))


@pytest.mark.parametrize("client", [*CLIENTS, "minio"])
def test_a_large_object_is_sent_in_parts_and_comes_back_whole(
    access: StoreAccess, raw: Minio, prefix: str, client: str
) -> None:
    content = b"".join(hashlib.sha256(str(i).encode()).digest() for i in range(MULTIPART_BYTES // 32))
    key = f"{prefix}/large"
    if client == "minio":
        raw.put_object(access.bucket, key, io.BytesIO(content), len(content), part_size=5 * 2**20)
    else:
        filesystem = opened(access, prefix, client).filesystem  # type: ignore[arg-type]
        with filesystem.open_output_stream(f"{access.bucket}/{key}") as stream:
            for start in range(0, len(content), 2**20):
                stream.write(content[start : start + 2**20])
    found = raw.stat_object(access.bucket, key)
    assert found.size == MULTIPART_BYTES
    if client != "s3fs":  # its parts are larger than this object
        assert "-" in str(found.etag), "a single PUT: the ETag of an object in parts ends in their number"
    for reader in CLIENTS:
        assert hashlib.sha256(opened(access, prefix, reader).read("large")).digest() == (
            hashlib.sha256(content).digest()
        )


# --- Folders, listings, deleting ----------------------------------------------------------------------------


@pytest.mark.parametrize("client", CLIENTS)
def test_s5_folder_keys_are_pyarrow_s_alone_and_are_never_listed_as_files(
    access: StoreAccess, raw: Minio, prefix: str, client: ClientName
) -> None:
    storage = opened(access, prefix, client)
    storage.filesystem.create_dir(storage.at("run/checkpoint"), recursive=True)
    storage.write("run/checkpoint/model.pt", b"weights")
    folder_keys = [key for key in keys(raw, access.bucket, prefix) if key.endswith("/")]
    assert bool(folder_keys) == (client == "pyarrow")
    for reader in CLIENTS:
        assert opened(access, prefix, reader).files() == [Entry("run/checkpoint/model.pt", 7)]
        assert opened(access, prefix, reader).files("run") == [Entry("run/checkpoint/model.pt", 7)]
        assert opened(access, prefix, reader).folders("run") == ["checkpoint"]


@pytest.mark.parametrize("client", CLIENTS)
def test_what_is_not_there_lists_as_nothing(access: StoreAccess, prefix: str, client: ClientName) -> None:
    storage = opened(access, prefix, client)
    assert storage.files() == []
    assert storage.folders("run") == []
    with pytest.raises(FileNotFoundError):
        storage.read("run/never-there")


@pytest.mark.parametrize("reader", CLIENTS)
def test_s8_a_listing_is_never_stale(access: StoreAccess, prefix: str, reader: ClientName) -> None:
    writer = opened(access, prefix, "pyarrow" if reader == "s3fs" else "s3fs")
    storage = opened(access, prefix, reader)
    writer.write("run/one", b"1")
    assert storage.files() == [Entry("run/one", 1)]
    writer.write("run/two", b"22")
    assert storage.files() == [Entry("run/one", 1), Entry("run/two", 2)]
    writer.delete_tree("run")
    assert storage.files() == []


@pytest.mark.parametrize("client", CLIENTS)
def test_a_tree_is_deleted_whole_and_nothing_beside_it(
    access: StoreAccess, raw: Minio, prefix: str, client: ClientName
) -> None:
    storage = opened(access, prefix, client)
    for index in range(12):
        storage.write(f"run/checkpoint_{index % 3}/part-{index}", b"x")
    storage.filesystem.create_dir(storage.at("run/empty"), recursive=True)
    storage.write("run-2/kept", b"x")
    storage.write("kept", b"x")
    storage.delete_tree("run")
    storage.delete_tree("never-there")
    left = [key for key in keys(raw, access.bucket, prefix) if not key.endswith("/")]
    assert left == [f"{prefix}/kept", f"{prefix}/run-2/kept"]
    assert keys(raw, access.bucket, f"{prefix}/run") == []


# --- Rights -------------------------------------------------------------------------------------------------


def test_another_bucket_is_refused(access: StoreAccess, raw: Minio) -> None:
    other = f"{access.bucket[:50]}-not-yours"
    attempts = (
        lambda: put(raw, other, "intruder", b"x"),
        lambda: get(raw, other, "intruder"),
        lambda: list(raw.list_objects(other)),
        lambda: raw.remove_object(other, "intruder"),
    )
    for attempt in attempts:
        with pytest.raises(S3Error) as caught:
            attempt()
        assert caught.value.code in REFUSALS
    for client in CLIENTS:
        storage = open_storage(Location("s3", other), access, client)
        with pytest.raises(OSError, match=r"(?i)access.?denied|no.?such.?bucket|not found|does not exist"):
            storage.write("intruder", b"x")


def test_making_and_removing_buckets_is_refused(access: StoreAccess, raw: Minio) -> None:
    fresh = f"lab-contract-{uuid.uuid4().hex[:12]}"
    made = []
    try:
        for client in CLIENTS:
            filesystem = open_storage(Location("s3", fresh), access, client).filesystem
            with pytest.raises(OSError):  # noqa: PT011 - each client has its own words
                filesystem.create_dir(fresh)
        with pytest.raises(S3Error) as caught:
            raw.make_bucket(fresh)
        assert caught.value.code == "AccessDenied"
        with pytest.raises(S3Error) as caught:
            raw.remove_bucket(access.bucket)
        assert caught.value.code in ("AccessDenied", "BucketNotEmpty")
    finally:
        made = [bucket.name for bucket in raw.list_buckets() if bucket.name == fresh]
        for name in made:
            raw.remove_bucket(name)
    assert made == []


def test_these_keys_see_their_own_bucket_alone(access: StoreAccess, raw: Minio) -> None:
    assert [bucket.name for bucket in raw.list_buckets()] == [access.bucket]


def test_a_wrong_secret_and_an_unknown_key_are_refused(access: StoreAccess) -> None:
    for change, code in (
        ({"secret_access_key": SecretStr("not-the-secret")}, "SignatureDoesNotMatch"),
        ({"access_key_id": "nobody-here"}, "InvalidAccessKeyId"),
    ):
        stranger = probe.client(access.model_copy(update=change), timeout_s=20)
        with pytest.raises(S3Error) as caught:
            put(stranger, access.bucket, "intruder", b"x")
        assert caught.value.code == code


# --- Clients ------------------------------------------------------------------------------------------------

FIRST_USE = """
import json, sys, time
from lab.settings import StoreAccess
from lab.storage import Location, open_storage
import pyarrow.fs, s3fs  # an import is not the store's doing
access = StoreAccess.from_environment()
began = time.monotonic()
storage = open_storage(Location("s3", f"{access.bucket}/{sys.argv[1]}"), access, sys.argv[2])
storage.write("first", b"x")
print(json.dumps({"seconds": time.monotonic() - began, "files": len(storage.files())}))
"""


@pytest.mark.parametrize("client", CLIENTS)
def test_s9_the_first_use_in_a_fresh_process_is_quick(
    access: StoreAccess, prefix: str, tmp_path: Path, client: ClientName
) -> None:
    """No region is looked up, no metadata service asked: both would cost seconds without a way out."""
    around = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_USE, prefix, client],
        env=around | access.environment() | {"HOME": str(tmp_path), "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["files"] == 1
    assert found["seconds"] < READY_LIMIT_S


class Recorder(ThreadingHTTPServer):
    """Answers 200 without content to everything, and keeps what was asked: (method, Host, path)."""

    def __init__(self) -> None:
        asked = self.asked = list[tuple[str, str, str]]()

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                asked.append((self.command, str(self.headers.get("Host")), self.path))
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.send_header("ETag", '"0"')
                self.end_headers()

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: the test looks at `asked`."""

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def host(self) -> str:
        """A name: with a bare address every client uses path style anyway."""
        return f"localhost:{self.server_port}"


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("client", [*CLIENTS, "minio"])
def test_s11_buckets_are_in_the_path_and_never_in_the_host_name(recorder: Recorder, client: str) -> None:
    access = StoreAccess(
        endpoint=f"http://{recorder.host}",
        bucket="bucket",
        access_key_id="key-id",
        secret_access_key=SecretStr("secret-of-it"),
    )
    if client == "minio":
        put(probe.client(access), "bucket", "run/file", b"x")
    else:
        filesystem = opened(access, "run", client).filesystem  # type: ignore[arg-type]
        filesystem.get_file_info("bucket/run/file")
    assert recorder.asked
    for _, host, path in recorder.asked:
        assert host == recorder.host
        assert path.startswith("/bucket")


BARE = """
from pyarrow.fs import FileSystem, S3FileSystem
import sys
if sys.argv[1] == "from_uri":
    filesystem, path = FileSystem.from_uri("s3://bucket/file?region=nowhere-1")
else:
    filesystem = S3FileSystem(region="nowhere-1", connect_timeout=1, request_timeout=1)
filesystem.get_file_info("bucket/file")
"""


@pytest.mark.parametrize(("route", "heeds"), [("from_uri", True), ("constructor", False)])
def test_s3_only_from_uri_heeds_the_endpoint_in_the_environment(
    recorder: Recorder, tmp_path: Path, route: str, heeds: bool
) -> None:
    """Pins pyarrow: the bare constructor ignores AWS_ENDPOINT_URL and asks Amazon, hence one explicit filesystem.

    The region does not exist, so that nobody is really asked.
    """
    done = subprocess.run(
        [sys.executable, "-c", BARE, route],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "AWS_ENDPOINT_URL": f"http://{recorder.host}",
            "AWS_ACCESS_KEY_ID": "key-id",
            "AWS_SECRET_ACCESS_KEY": "secret-of-it",
            "AWS_EC2_METADATA_DISABLED": "true",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert bool(recorder.asked) is heeds
    assert (done.returncode == 0) is heeds
    if not heeds:
        assert "bucket.s3.nowhere-1.amazonaws.com" in done.stderr
