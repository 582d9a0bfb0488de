"""Processes by id and marker, the state file, the lock, ports: without Ray."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.cluster import Node
from lab.errors import UserError
from lab.runtimes import _namespaces, _processes, _state
from lab.runtimes._processes import MARKER, Record
from lab.runtimes.embedded import missing_nodes
from lab.runtimes.protocol import Access
from lab.store import seaweedfs

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)",
]


@pytest.fixture
def cluster_id() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield name
    for process in _processes.marked(name):
        process.kill()


def start(cluster_id: str, tmp_path: Path, command: list[str] = SLEEP, **more: str) -> Record:
    env = {"PATH": os.defpath, MARKER: cluster_id, **more}
    return _processes.start("part", command, env, tmp_path, tmp_path / "part.log")


def test_a_record_is_alive_until_its_process_ends(cluster_id: str, tmp_path: Path) -> None:
    record = start(cluster_id, tmp_path)
    assert record.alive
    process = record.process()
    assert process is not None
    _processes.end([process], 5)
    assert not record.alive


def test_a_reused_pid_is_not_taken_for_the_process() -> None:
    mine = psutil.Process()
    assert Record("me", mine.pid, mine.create_time(), "").alive
    assert not Record("me", mine.pid, mine.create_time() - 10, "").alive


def test_every_marked_process_is_found_and_ended(cluster_id: str, tmp_path: Path) -> None:
    child = (
        f"import subprocess, sys, time; subprocess.Popen({SLEEP!r}, start_new_session=True); time.sleep(60)"
    )
    record = start(cluster_id, tmp_path, [sys.executable, "-c", child])
    assert _processes.wait_until(lambda: len(_processes.marked(cluster_id)) == 2, 5)
    process = record.process()
    assert process is not None
    process.kill()  # the child, in a session of its own, outlives it
    assert _processes.wait_until(lambda: not record.alive, 5)
    assert len(_processes.marked(cluster_id)) == 1
    assert _processes.end_marked(cluster_id) == []
    assert _processes.marked(cluster_id) == []


def test_a_process_that_lost_its_environment_is_found_by_its_session(cluster_id: str, tmp_path: Path) -> None:
    # As Ray's processes do, which retitle themselves over it; the parent ends first.
    child = f"import subprocess; subprocess.Popen({SLEEP!r}, env={{}})"
    record = start(cluster_id, tmp_path, [sys.executable, "-c", child])
    assert _processes.wait_until(lambda: not record.alive, 10)
    assert _processes.marked(cluster_id) == []
    assert len(_processes.marked(cluster_id, [record])) == 1
    assert _processes.end_marked(cluster_id, [record]) == []
    assert _processes.marked(cluster_id, [record]) == []


def test_a_session_whose_number_was_reused_is_left_alone(cluster_id: str, tmp_path: Path) -> None:
    # The session must have a living leader of its own: pytest's may have ended, or be outside of a container.
    other = uuid.uuid4().hex
    leader = start(other, tmp_path)
    earlier = Record("part", leader.pid, leader.created - 1e6, "")
    assert _processes.marked(cluster_id, [earlier]) == []
    assert len(_processes.marked(cluster_id, [leader])) == 1
    assert _processes.end_marked(other) == []


def test_another_clusters_processes_are_left_alone(cluster_id: str, tmp_path: Path) -> None:
    other = uuid.uuid4().hex
    kept = start(other, tmp_path)
    start(cluster_id, tmp_path)
    assert _processes.end_marked(cluster_id) == []
    assert kept.alive
    assert _processes.end_marked(other) == []


def test_a_process_that_ignores_sigterm_is_killed(cluster_id: str, tmp_path: Path) -> None:
    record = start(cluster_id, tmp_path, STUBBORN)
    assert _processes.wait_until(lambda: (tmp_path / "part.log").read_text() != "", 5)
    process = record.process()
    assert process is not None
    begin = time.monotonic()
    _processes.end([process], 0.3)
    assert not record.alive
    assert time.monotonic() - begin < 3


def test_clusters_of_a_checkout_are_found_by_its_root(cluster_id: str, tmp_path: Path) -> None:
    start(cluster_id, tmp_path, LAB_ROOT=str(tmp_path), LAB_SCRATCH="/tmp/lab-x")
    assert _processes.wait_until(lambda: _processes.clusters_below(tmp_path) == {cluster_id: "/tmp/lab-x"}, 5)
    assert _processes.clusters_below(tmp_path / "other") == {}


def test_free_ports_are_different_and_free() -> None:
    ports = _processes.free_ports(12)
    assert len(set(ports)) == 12
    for port in ports:
        with socket.socket() as server:
            server.bind(("", port))


def test_a_taken_port_is_seen() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not _processes.port_is_free(port)
    assert _processes.port_is_free(port)


def test_waiting_has_a_limit() -> None:
    begin = time.monotonic()
    assert not _processes.wait_until(lambda: False, 0.3)
    assert 0.3 <= time.monotonic() - begin < 2


def test_a_tail_is_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {number}" for number in range(10_000)))
    assert _processes.tail(log, lines=2) == "line 9998\nline 9999"
    assert _processes.tail(tmp_path / "none") == ""


# State and lock


def state() -> _state.State:
    return _state.State(
        cluster_id="c",
        scratch="/tmp/lab-x",
        logs="/logs",
        records=(Record("head", 4711, 2.5, "/log"),),
        store_ports={"s3": 9000},
        addresses={"head": "127.0.0.2"},
        access=Access("http://d", "http://s", "http://n", "/local", True, 2, 4),
    )


def test_the_state_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "embedded.json"
    assert _state.load(path) is None
    for each in (state(), dataclasses.replace(state(), access=None, records=())):
        _state.save(path, each)
        assert _state.load(path) == each
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"records": 3, "access": None})])
def test_a_damaged_state_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "embedded.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"embedded\.json is damaged"):
        _state.load(path)


@pytest.mark.parametrize("pid", [-1, 0, 1, "7", True, None])
def test_a_state_with_an_odd_pid_is_damaged(tmp_path: Path, pid: object) -> None:
    path = tmp_path / "embedded.json"
    content = dataclasses.asdict(state())
    content["records"][0]["pid"] = pid
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"embedded\.json is damaged"):
        _state.load(path)


def test_the_lock_is_held_by_one_and_waiting_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "embedded.lock"
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with _state.locked(path):
            held.set()
            done.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(5)
    with pytest.raises(UserError, match="another `make up`"), _state.locked(path, limit_s=0.3):
        raise AssertionError("the lock was given twice")
    done.set()
    holder.join(5)
    with _state.locked(path, limit_s=1):
        assert path.exists()


# Shape and namespaces


def node(role: str, cpus: float = 4, alive: bool = True) -> Node:
    return Node(uuid.uuid4().hex, "127.0.0.2", role, alive, cpus)


def test_a_whole_cluster_lacks_nothing() -> None:
    assert (
        missing_nodes([node("head"), node("worker"), node("worker"), node("worker", alive=False)], 2, 4) == ""
    )


@given(st.lists(st.sampled_from(["head", "worker", ""]), max_size=5), st.integers(1, 3))
def test_a_cluster_is_whole_exactly_with_one_head_and_the_workers(roles: list[str], workers: int) -> None:
    whole = roles.count("head") == 1 and roles.count("worker") == workers
    assert (missing_nodes([node(role) for role in roles], workers, 4) == "") == whole


def test_a_node_with_other_cpus_is_not_the_one_asked_for() -> None:
    assert "4 CPUs" in missing_nodes([node("head"), node("worker", cpus=2)], 1, 4)


def test_a_namespace_hides_one_folder_from_the_others_and_goes_with_its_process(tmp_path: Path) -> None:
    prefix = _namespaces.prefix()
    if prefix is None:
        pytest.skip("no mount namespaces here")
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    own.mkdir()
    (shared / "theirs").touch()
    command = ["sh", "-c", 'ls "$0"; touch "$0/mine"', str(shared)]
    run = subprocess.run(
        _namespaces.with_own_disk(prefix, own, shared, command),
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    assert run.stdout == ""
    assert [path.name for path in shared.iterdir()] == ["theirs"]
    assert [path.name for path in own.iterdir()] == ["mine"]
    assert str(shared) not in Path("/proc/self/mountinfo").read_text()


# The store's configuration


def test_the_training_identity_reaches_one_bucket() -> None:
    config = seaweedfs.identities(
        bucket="b", root_user="root", root_password="r" * 8, access_key_id="key", secret_access_key="s" * 8
    )
    identities = config["identities"]
    assert isinstance(identities, list)
    root, training = identities
    assert "Admin" in root["actions"]
    assert training["actions"] == ["Read:b", "Write:b", "List:b", "Tagging:b"]


def test_the_stores_command_line_has_every_port_and_no_secret() -> None:
    ports = seaweedfs.Ports(*range(30001, 30009))
    arguments = seaweedfs.weed_arguments(data="/d", config="/c.json", ports=ports)
    numbers = [argument.rsplit("=", 1)[1] for argument in arguments if ".port" in argument]
    assert {str(number) for number in dataclasses.astuple(ports)} <= set(numbers)
    assert "-ip.bind=127.0.0.1" in arguments
    assert "-s3.ip.bind=127.0.0.1" in arguments
    assert "-master.telemetry=false" in arguments
