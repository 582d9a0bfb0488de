"""Mistakes that show only when something is tried: ports, endpoints, keys, a cluster of another shape, Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lab.runtimes._processes import MARKER
from lab.settings import CHECKOUT, ROOT, load_settings
from tests.commands import assert_refused, lab
from tests.conftest import Cluster

INTERRUPT_LIMIT_S = 40.0
STATE = Path(".lab") / "embedded.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.fixture
def plain() -> Iterator[int]:
    """The port of a server that answers every connection in plain text, so never TLS."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # closed: the test is over
                    return
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=5)


def processes_of(root: Path) -> list[str]:
    """Processes of any cluster that was started for this root."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        if MARKER in environment and environment.get("LAB_ROOT") == str(root):
            found.append(f"{process.pid} {process.name()}")
    return found


def assert_nothing_is_up(root: Path) -> None:
    assert not (root / STATE).exists()
    assert processes_of(root) == []


def external(endpoint: str) -> dict[str, str]:
    return {"LAB_STORE": "external", "S3_ENDPOINT": endpoint}


@pytest.mark.parametrize(
    ("endpoint", "part"),
    [
        ("", "S3_ENDPOINT"),
        ("127.0.0.1:9000", "no scheme"),
        ("ftp://127.0.0.1:9000", "no scheme"),
        ("http://127.0.0.1:99999", "no valid port"),
        ("http://127.0.0.1:9000/lab", "more than host and port"),
        ("http://127.0.0.1:1", "refused"),
        ("http://no-such-host.invalid:9000", "no-such-host.invalid"),
        ("http://127.0.0.1:{silent}", "did not answer within"),
        ("https://127.0.0.1:{plain}", "http://127.0.0.1:{plain}"),
    ],
)
def test_a_wrong_endpoint_is_named_before_anything_starts(
    root: Path, silent: int, plain: int, endpoint: str, part: str
) -> None:
    ports = {"silent": silent, "plain": plain}
    variables = external(endpoint.format(**ports))
    assert_refused(root, ["run", "multi-node"], variables, ["S3_ENDPOINT", part.format(**ports)])
    assert_nothing_is_up(root)


@pytest.mark.parametrize("setting", ["LAB_DASHBOARD_PORT", "LAB_S3_PORT"])
def test_a_port_that_is_taken_is_named_with_its_setting(root: Path, silent: int, setting: str) -> None:
    assert_refused(root, ["up"], {setting: str(silent)}, [f"{setting}={silent}", "taken"])
    assert_nothing_is_up(root)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"S3_ACCESS_KEY_ID": "nobody-here"}, "S3_ACCESS_KEY_ID"),
        ({"S3_SECRET_ACCESS_KEY": "not-the-secret"}, "S3_SECRET_ACCESS_KEY"),
        ({"S3_BUCKET": "never-made"}, "S3_BUCKET=never-made is missing"),
    ],
)
def test_wrong_keys_or_bucket_are_named(
    cluster: Cluster, root: Path, change: dict[str, str], part: str
) -> None:
    store = cluster.settings.store_access(cluster.access.store)
    variables = store.environment() | external(cluster.access.store) | change
    assert_refused(root, ["run", "multi-node"], variables, [part])
    assert_nothing_is_up(root)


embedded = pytest.mark.parametrize("cluster", ["embedded"], indirect=True)
"""The containers' own refusals are in tests/compose."""


def own(cluster: Cluster) -> dict[str, str]:
    """The variables by which a command finds the tests' own cluster."""
    return {name: os.environ[name] for name in ("LAB_DASHBOARD_PORT", "LAB_S3_PORT")}


@embedded
def test_a_cluster_of_another_shape_is_refused_and_stays_up(cluster: Cluster) -> None:
    variables = own(cluster)
    assert_refused(ROOT, ["up", "--nodes", "3"], variables, ["LAB_NODES=3", "make down"])
    answer = lab(ROOT, "status", **variables)
    assert answer.code == 0
    assert answer.out.count(" up ") == 4, answer  # head, two workers, store


@embedded
def test_the_real_shape_counts_once_a_cluster_is_up(cluster: Cluster) -> None:
    cpus = cluster.access.node_cpus
    words = ["run", "first-run", "--workers", str(cpus + 1)]
    variables = own(cluster) | {"LAB_NODE_CPUS": "64"}
    assert_refused(
        ROOT, words, variables, [f"LAB_WORKERS={cpus + 1}", f"have {cpus} CPUs", f"need {cpus + 1}"]
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after_s", [0.0, 2.5])
def test_an_interrupted_up_leaves_nothing_and_says_so(root: Path, number: int, after_s: float) -> None:
    load_settings(root / ".env")
    command = subprocess.Popen(
        [sys.executable, "-m", "lab", "up"],
        cwd=CHECKOUT,
        env={**os.environ, "LAB_ROOT": str(root), "LAB_RUNTIME": "embedded"}
        | {"LAB_DASHBOARD_PORT": "8265", "LAB_S3_PORT": "9000"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + INTERRUPT_LIMIT_S
        while not (root / STATE).exists() and command.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(after_s)
        command.send_signal(number)
        _, err = command.communicate(timeout=INTERRUPT_LIMIT_S)
    finally:
        command.kill()
    assert command.returncode == 130, err
    assert "nothing is left running" in err
    assert_nothing_is_up(root)
