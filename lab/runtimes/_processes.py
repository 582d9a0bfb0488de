"""Processes of the lab's own: recorded so that a reused pid is never taken for one, and ended by id."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

MARKER = "LAB_CLUSTER_ID"
"""In the environment of every process of a cluster, children included."""

SCRATCH = "LAB_SCRATCH"
"""Beside it: the cluster's scratch folder."""


@dataclass(frozen=True)
class Record:
    """A process that the lab started. `created` (seconds since the epoch) tells it from a later one of that pid."""

    name: str
    pid: int
    created: float
    log: str

    def process(self) -> psutil.Process | None:
        """The process itself, or None when it has ended."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < 0.05
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process() is not None


def start(name: str, command: list[str], env: Mapping[str, str], cwd: Path, log: Path) -> Record:
    """Start a process in a session of its own (a terminal's Ctrl-C is for the lab alone), output to `log`."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Record(name, child.pid, psutil.Process(child.pid).create_time(), str(log))


def marked(cluster_id: str, started: Iterable[Record] = ()) -> list[psutil.Process]:
    """Every process of a cluster that runs.

    Found by the marker in its environment, which a process that retitles itself may have written over, or by
    belonging to the session of one of the `started`.
    """
    sessions = {record.pid: record.created for record in started if not _reused(record)}
    found = []
    for process, env in _environments():
        if env.get(MARKER) == cluster_id or _belongs(process, sessions):
            found.append(process)
    return found


def _belongs(process: psutil.Process, sessions: Mapping[int, float]) -> bool:
    try:
        created = sessions.get(os.getsid(process.pid))
        return created is not None and process.create_time() >= created - 0.05
    except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
        return False


def _reused(record: Record) -> bool:
    """Whether the pid, and so the session's number, belongs to another process by now."""
    return psutil.pid_exists(record.pid) and not _same(record)


def _same(record: Record) -> bool:
    try:
        return bool(abs(psutil.Process(record.pid).create_time() - record.created) < 0.05)
    except psutil.NoSuchProcess:
        return False


def clusters_below(root: Path) -> dict[str, str]:
    """The clusters of the checkout `root` of which a process still runs: scratch folder by id."""
    return {
        env[MARKER]: env.get(SCRATCH, "")
        for _, env in _environments()
        if MARKER in env and env.get("LAB_ROOT") == str(root)
    }


def _environments() -> Iterator[tuple[psutil.Process, Mapping[str, str]]]:
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            env = _environment(process)
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue  # gone by now, or another user's: not the lab's
        yield process, env


def _environment(process: psutil.Process) -> Mapping[str, str]:
    if sys.platform != "linux":
        return process.environ()
    # Ray's processes retitle themselves over the start of their environment: psutil stops reading there.
    raw = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")
    return dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)


def with_children(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes and all below them."""
    found = []
    for process in processes:
        try:
            found += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found


def end(processes: Iterable[psutil.Process], patience_s: float) -> None:
    """Ask each to end (SIGTERM), wait, and kill those that are still there."""
    live = list(processes)
    for process in live:
        _signal(process.terminate)
    _, stubborn = psutil.wait_procs(live, timeout=patience_s)
    for process in stubborn:
        _signal(process.kill)
    psutil.wait_procs(stubborn, timeout=3)


def _signal(send: Callable[[], None]) -> None:
    try:
        send()
    except psutil.NoSuchProcess:
        return


def end_marked(
    cluster_id: str, started: Iterable[Record] = (), patience_s: float = 2.0
) -> list[psutil.Process]:
    """End every process of the cluster, see `marked`.

    Returns:
        Those that could not be ended.
    """
    records = tuple(started)
    for _ in range(3):
        left = marked(cluster_id, records)
        if not left:
            return []
        end(left, patience_s)
    return marked(cluster_id, records)


def wait_until(ready: Callable[[], bool], limit_s: float, pause_s: float = 0.1) -> bool:
    """Poll `ready` until it is true or the limit has passed; whether it became true."""
    limit = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() > limit:
            return False
        time.sleep(pause_s)
    return True


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, on any address; all different.

    From below the range for outgoing connections, so that none takes one before its server does.
    """
    held: list[socket.socket] = []
    try:
        start_at = 20000 + int.from_bytes(os.urandom(2), "big") % 10000
        port = start_at
        while len(held) < count and port < start_at + 2000:
            candidate = socket.socket()
            try:
                candidate.bind(("", port))
            except OSError:
                candidate.close()
            else:
                held.append(candidate)
            port += 1
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


def port_is_free(port: int) -> bool:
    """Whether a server could listen on this port of 127.0.0.1."""
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def tail(path: Path, lines: int = 30, at_most: int = 64_000) -> str:
    """The last lines of a log; empty when there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - at_most))
        text = file.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:])
