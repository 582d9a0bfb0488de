"""The probe's sentences: against sockets that misbehave, and against a real SeaweedFS (marked `embedded`)."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr

from lab.errors import LabError, UserError
from lab.runtimes import _processes
from lab.settings import StoreAccess
from lab.store import probe, seaweedfs

BUCKET, KEY, SECRET = "lab", "training-key", "training-secret"
ROOT_USER, ROOT_PASSWORD = "root-user", "root-password"


def access(endpoint: str, **changes: str) -> StoreAccess:
    values = {"bucket": BUCKET, "access_key_id": KEY, "secret_access_key": SECRET, **changes}
    return StoreAccess(
        endpoint=endpoint,
        bucket=values["bucket"],
        access_key_id=values["access_key_id"],
        secret_access_key=SecretStr(values["secret_access_key"]),
    )


def sentence(wrong: StoreAccess, setting: str = "S3_ENDPOINT", limit_s: float = 5.0) -> str:
    """What the probe says, checked for what every sentence must keep to."""
    begin = time.monotonic()
    with pytest.raises(UserError) as caught:
        probe.probe(wrong, setting=setting)
    assert time.monotonic() - begin < limit_s
    text = str(caught.value)
    assert "\n" not in text
    assert wrong.secret_access_key.get_secret_value() not in text
    return text


@contextmanager
def silent_server() -> Iterator[str]:
    """A server that accepts and never answers, like a frozen store."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def dripping_server() -> Iterator[str]:
    """A server that answers one byte a second: no single read times out."""
    stop = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection:
            for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000:
                try:
                    connection.sendall(bytes([byte]))
                except OSError:
                    return
                if stop.wait(0.5):
                    return

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        server.settimeout(0.2)

        def accept() -> None:
            while not stop.is_set():
                try:
                    connection, _ = server.accept()
                except OSError:
                    continue
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        stop.set()
        thread.join(2)


def test_a_refused_port_is_named() -> None:
    text = sentence(access(f"http://127.0.0.1:{_processes.free_ports(1)[0]}"))
    assert "S3_ENDPOINT" in text
    assert "refused" in text


def test_the_setting_that_the_endpoint_came_from_is_blamed() -> None:
    text = sentence(access(f"http://127.0.0.1:{_processes.free_ports(1)[0]}"), setting="S3_PUBLIC_ENDPOINT")
    assert text.startswith("S3_PUBLIC_ENDPOINT=")


def test_an_unknown_host_is_named() -> None:
    text = sentence(access("http://no-such-host.invalid:9000"))
    assert "S3_ENDPOINT" in text
    assert "no-such-host.invalid" in text
    assert "unknown host" in text


def test_a_missing_scheme_is_named_before_anything_is_sent() -> None:
    assert "no scheme" in sentence(access("127.0.0.1:9000"))


def test_a_frozen_server_is_named_within_the_limit() -> None:
    with silent_server() as endpoint:
        text = sentence(access(endpoint))
    assert endpoint in text
    assert "did not answer" in text


def test_a_server_that_drips_is_named_within_the_limit() -> None:
    with dripping_server() as endpoint:
        text = sentence(access(endpoint), limit_s=6.0)
    assert "did not answer" in text


def test_something_that_is_no_store_is_named() -> None:
    import http.server

    class Page(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.send_response(405)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html>no</html>")

        def log_message(self, *arguments: object) -> None:
            return None

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        text = sentence(access(f"http://127.0.0.1:{server.server_port}"))
        server.shutdown()
    assert text.startswith("S3_ENDPOINT=")


# Against a real store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real SeaweedFS with a third identity that may only read."""
    folder = tmp_path_factory.mktemp("store")
    weed = Path(sys.executable).parent / "weed"
    binary = str(weed) if weed.is_file() else shutil.which("weed")
    assert binary, "SeaweedFS is not installed: make setup"
    config = seaweedfs.identities(
        bucket=BUCKET,
        root_user=ROOT_USER,
        root_password=ROOT_PASSWORD,
        access_key_id=KEY,
        secret_access_key=SECRET,
    )
    identities = config["identities"]
    assert isinstance(identities, list)
    identities.append(
        {
            "name": "reader",
            "credentials": [{"accessKey": "reader-key", "secretKey": "reader-secret"}],
            "actions": [f"Read:{BUCKET}", f"List:{BUCKET}"],
        }
    )
    (folder / "s3.json").write_text(json.dumps(config))
    (folder / "data").mkdir()
    ports = seaweedfs.Ports(*_processes.free_ports(len(seaweedfs.Ports.names())))
    sockets = Path("/tmp") / f"lab-probe-{ports.s3}"
    sockets.mkdir()
    arguments = seaweedfs.weed_arguments(
        data=str(folder / "data"), config=str(folder / "s3.json"), ports=ports, sockets=str(sockets)
    )
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([binary, *arguments], stdout=log, stderr=log)
    endpoint = f"http://127.0.0.1:{ports.s3}"
    root = access(endpoint, access_key_id=ROOT_USER, secret_access_key=ROOT_PASSWORD)

    def ready() -> bool:
        try:
            probe.ensure_bucket(root)
            probe.probe(root)
            probe.ensure_bucket(
                access(endpoint, bucket="foreign", access_key_id=ROOT_USER, secret_access_key=ROOT_PASSWORD)
            )
        except LabError:
            return False
        return True

    try:
        assert _processes.wait_until(ready, 30), (folder / "log").read_text()[-2000:]
        yield endpoint
    finally:
        server.kill()
        server.wait(5)
        shutil.rmtree(sockets)
        for path in seaweedfs.stray_sockets(ports):
            Path(path).unlink(missing_ok=True)


@pytest.mark.embedded
def test_the_training_keys_pass_and_leave_nothing(store: str) -> None:
    probe.probe(access(store))
    left = list(probe.client(access(store)).list_objects(BUCKET, prefix=".lab-probe/", recursive=True))
    assert left == []


@pytest.mark.embedded
def test_making_the_bucket_may_be_repeated(store: str) -> None:
    root = access(store, access_key_id=ROOT_USER, secret_access_key=ROOT_PASSWORD)
    probe.ensure_bucket(root)
    probe.ensure_bucket(root)
    assert probe.client(root).bucket_exists(BUCKET)


@pytest.mark.embedded
@pytest.mark.parametrize("other", ["foreign", "not-there"])
def test_the_training_keys_are_kept_out_of_other_buckets(store: str, other: str) -> None:
    assert probe.refuses_other_buckets(access(store), other)


@pytest.mark.embedded
def test_keys_that_reach_another_bucket_are_noticed(store: str) -> None:
    root = access(store, access_key_id=ROOT_USER, secret_access_key=ROOT_PASSWORD)
    assert not probe.refuses_other_buckets(root, "foreign")


@pytest.mark.embedded
@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"access_key_id": "unknown-key"}, "S3_ACCESS_KEY_ID"),
        ({"secret_access_key": "wrong-secret"}, "S3_SECRET_ACCESS_KEY"),
        ({"bucket": "not-there"}, "S3_BUCKET=not-there"),
        ({"bucket": "foreign"}, "S3_BUCKET=foreign"),
    ],
)
def test_keys_secrets_and_buckets_are_told_apart(store: str, changes: dict[str, str], setting: str) -> None:
    assert sentence(access(store, **changes)).startswith(setting)


@pytest.mark.embedded
def test_a_missing_and_a_foreign_bucket_read_the_same(store: str) -> None:
    missing = sentence(access(store, bucket="not-there")).replace("not-there", "X")
    assert missing == sentence(access(store, bucket="foreign")).replace("foreign", "X")


@pytest.mark.embedded
def test_keys_that_may_only_read_are_told_so(store: str) -> None:
    text = sentence(access(store, access_key_id="reader-key", secret_access_key="reader-secret"))
    assert text.startswith("S3_ACCESS_KEY_ID may read")


@pytest.mark.embedded
def test_https_to_an_http_port(store: str) -> None:
    text = sentence(access(store.replace("http://", "https://")))
    assert text.startswith("S3_ENDPOINT=https://")
    assert f"write {store}" in text


@pytest.mark.embedded
def test_a_skewed_clock(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from minio import time as minio_time

    ahead = datetime.now(UTC) + timedelta(hours=2)
    monkeypatch.setattr(minio_time, "utcnow", lambda: ahead)
    text = sentence(access(store))
    assert "clock" in text


def test_http_to_an_https_port(tmp_path: Path) -> None:
    import ssl

    certificate = tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-keyout", str(certificate), "-out", str(tmp_path / "public.pem")],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    certificate.write_text(certificate.read_text() + (tmp_path / "public.pem").read_text())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    import http.server

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port
        plain = sentence(access(f"http://127.0.0.1:{port}"))
        untrusted = sentence(access(f"https://127.0.0.1:{port}"))
        server.shutdown()
    assert f"write https://127.0.0.1:{port}" in plain
    assert "S3_CA_BUNDLE" in untrusted
