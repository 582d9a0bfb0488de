"""The embedded runtime for real: up, a two-node training job, the token, data that stays, nothing left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import requests

from lab import cluster
from lab.errors import UserError
from lab.runtimes import _processes, _state
from lab.runtimes.embedded import CODE, EmbeddedRuntime
from lab.runtimes.protocol import Access
from lab.settings import Settings, load_settings
from lab.store import probe

pytestmark = pytest.mark.embedded

NODES, NODE_CPUS = 2, 1

TRAINING = """\
import json, os, sys, tempfile
import ray, torch
import torch.distributed as dist
from ray import train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from lab.settings import StoreAccess
from lab.storage import open_storage, parse_location

def loop():
    rank, folder = train.get_context().get_world_rank(), os.environ["LAB_LOCAL_STORAGE"]
    open(f"{folder}/rank-{rank}", "w").close()
    total = torch.ones(1) * (rank + 1)
    dist.all_reduce(total)
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, [ray.util.get_node_ip_address(), sorted(os.listdir(folder))])
    with tempfile.TemporaryDirectory() as scratch:
        open(f"{scratch}/seen.json", "w").write(json.dumps(seen))
        train.report({"total": float(total)}, Checkpoint.from_directory(scratch) if rank == 0 else None)

storage = open_storage(parse_location("s3://lab/runs"), StoreAccess.from_environment())
result = TorchTrainer(
    loop,
    scaling_config=ScalingConfig(
        num_workers=2, placement_strategy="SPREAD", label_selector={"lab-role": "worker"}
    ),
    run_config=RunConfig(name="two-nodes", storage_path=storage.path, storage_filesystem=storage.filesystem),
).fit()
with result.filesystem.open_input_stream(result.checkpoint.path + "/seen.json") as stream:
    seen = json.loads(stream.read())
leaked = [name for name in os.environ if name.startswith(("STORE_", "AWS_")) or name == "RAY_LEAK"]
print("SAW " + json.dumps({"total": result.metrics["total"], "seen": seen, "leaked": leaked}))
"""


@dataclass(frozen=True)
class Lab:
    """A checkout of its own, with its cluster up."""

    root: Path
    settings: Settings
    runtime: EmbeddedRuntime
    access: Access
    seconds: float

    @property
    def state(self) -> _state.State:
        found = _state.load(self.root / ".lab" / "embedded.json")
        assert found is not None
        return found

    def submit(self, entrypoint: str, limit_s: float = 90) -> str:
        """Run a job through the Jobs API; its log."""
        jobs = f"{self.access.dashboard}/api/jobs/"
        headers = {"Authorization": f"Bearer {self.settings.ray_auth_token.get_secret_value()}"}
        made = requests.post(jobs, headers=headers, json={"entrypoint": entrypoint}, timeout=30)
        made.raise_for_status()
        job = jobs + made.json()["submission_id"]
        status = [""]

        def ended() -> bool:
            status[0] = requests.get(job, headers=headers, timeout=10).json()["status"]
            return status[0] in ("SUCCEEDED", "FAILED", "STOPPED")

        _processes.wait_until(ended, limit_s, pause_s=0.5)
        log = str(requests.get(f"{job}/logs", headers=headers, timeout=10).json()["logs"])
        assert status[0] == "SUCCEEDED", log[-3000:]
        return log


def settings_of(root: Path, **values: object) -> Settings:
    return load_settings(
        root / ".env", **{"nodes": NODES, "node_cpus": NODE_CPUS, "store": "seaweedfs", **values}
    )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    root = tmp_path_factory.mktemp("checkout")
    patch = pytest.MonkeyPatch()
    for name in ("LAB_DASHBOARD_PORT", "LAB_S3_PORT"):  # the session's own cluster, of another root, has them
        patch.delenv(name, raising=False)
    patch.setenv("OMP_NUM_THREADS", "7")
    patch.setenv("RAY_LEAK", "of the user's shell")
    patch.setenv("AWS_ACCESS_KEY_ID", "of the user's shell")
    settings = settings_of(root)
    runtime = EmbeddedRuntime(settings, root)
    begin = time.monotonic()
    try:
        access = runtime.up(print)
        yield Lab(root, settings, runtime, access, time.monotonic() - begin)
    finally:
        runtime.down(print)
        patch.undo()


def test_the_cluster_has_the_shape_that_was_asked_for(lab: Lab) -> None:
    found = cluster.nodes(lab.access.dashboard, lab.settings.ray_auth_token.get_secret_value())
    assert [node.role for node in found] == ["head", "worker", "worker"]
    assert all(node.alive and node.cpus == NODE_CPUS for node in found)
    if sys.platform == "linux":
        assert len({node.ip for node in found}) == 3


def test_status_names_every_part(lab: Lab) -> None:
    assert {part.name: part.state for part in lab.runtime.status()} == {
        "store": "up",
        "head": "up",
        "worker-1": "up",
        "worker-2": "up",
    }


def test_up_again_returns_what_is_up_at_once(lab: Lab) -> None:
    begin = time.monotonic()
    assert lab.runtime.up(print) == lab.access
    assert time.monotonic() - begin < 3


def test_defaults_ask_for_nothing_that_is_not_up(lab: Lab) -> None:
    plain = load_settings(lab.root / ".env")
    assert (plain.nodes, plain.node_cpus, plain.store) != (NODES, NODE_CPUS, "seaweedfs")
    assert EmbeddedRuntime(plain, lab.root).up(print) == lab.access


@pytest.mark.parametrize(
    ("changes", "setting"), [({"nodes": 1}, "LAB_NODES=1"), ({"node_cpus": 2}, "LAB_NODE_CPUS=2")]
)
def test_another_shape_is_refused_while_it_is_up(lab: Lab, changes: dict[str, object], setting: str) -> None:
    with pytest.raises(UserError, match=f"{setting}.*make down"):
        EmbeddedRuntime(settings_of(lab.root, **changes), lab.root).up(print)


@pytest.mark.parametrize(("headers", "status"), [({}, 401), ({"Authorization": "Bearer " + "0" * 64}, 403)])
def test_nobody_gets_in_without_the_token(lab: Lab, headers: dict[str, str], status: int) -> None:
    jobs = f"{lab.access.dashboard}/api/jobs/"
    assert requests.get(jobs, headers=headers, timeout=10).status_code == status
    made = requests.post(jobs, headers=headers, json={"entrypoint": "true"}, timeout=10)
    assert made.status_code == status


def test_dashboard_and_store_listen_on_loopback_alone(lab: Lab) -> None:
    ports = {int(url.rsplit(":", 1)[1]) for url in (lab.access.dashboard, lab.access.store)}
    ports |= set(lab.state.store_ports.values())
    listening = [
        connection.laddr
        for process in _processes.marked(lab.state.cluster_id, lab.state.records)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port in ports
    ]
    assert {address.port for address in listening} == ports
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_no_secret_is_in_a_command_line_the_state_or_a_log(lab: Lab) -> None:
    secrets = [
        secret.get_secret_value()
        for secret in (
            lab.settings.ray_auth_token,
            lab.settings.s3_secret_access_key,
            lab.settings.store_root_password,
        )
    ]
    processes = _processes.marked(lab.state.cluster_id, lab.state.records)
    texts = [" ".join(process.cmdline()) for process in processes]
    texts.append((lab.root / ".lab" / "embedded.json").read_text())
    texts += [path.read_text(errors="replace") for path in Path(lab.state.logs).rglob("*.log")]
    texts.append(lab.runtime.diagnose())
    assert len(texts) > 10
    assert not [secret for secret in secrets for text in texts if secret in text]


def test_two_ranks_train_on_two_nodes_and_write_to_the_store(lab: Lab) -> None:
    script = lab.root / "training.py"
    script.write_text(TRAINING)
    log = lab.submit(f"python {script}")
    saw = json.loads(next(line for line in log.splitlines() if line.startswith("SAW ")).removeprefix("SAW "))
    assert saw["total"] == 3
    assert saw["leaked"] == []
    addresses = {address for address, _ in saw["seen"]}
    if sys.platform == "linux":
        assert addresses == {"127.0.0.3", "127.0.0.4"}
    listings = [names for _, names in saw["seen"]]
    on_head = sorted(path.name for path in Path(lab.access.local_root).iterdir())
    if lab.access.shared_disk:
        assert listings == [["rank-0", "rank-1"]] * 2
        assert on_head == ["rank-0", "rank-1"]
    else:
        assert listings == [["rank-0"], ["rank-1"]]
        assert on_head == []


def test_a_job_sees_the_cluster_and_no_thread_count_of_the_users_shell(lab: Lab) -> None:
    words = "RAY_ADDRESS", "OMP_NUM_THREADS", "PYTHONPATH", "LAB_CLUSTER_ID"
    log = lab.submit(
        f"""python -c 'import os; print("|".join(os.environ.get(x, "") for x in {json.dumps(words)}))'"""
    )
    address, threads, path, cluster_id = log.strip().splitlines()[-1].split("|")
    assert address.startswith(f"{lab.state.addresses['head']}:")
    assert threads != "7"
    assert path == str(CODE)
    assert cluster_id == lab.state.cluster_id


def test_another_checkout_runs_at_the_same_time_and_ctrl_c_ends_only_its_own(
    lab: Lab, tmp_path: Path
) -> None:
    script = textwrap.dedent(f"""\
        from pathlib import Path
        from lab.runtimes.embedded import EmbeddedRuntime
        from lab.settings import load_settings
        root = Path({str(tmp_path)!r})
        settings = load_settings(root / ".env", nodes=1, node_cpus=1, store="seaweedfs")
        EmbeddedRuntime(settings, root).up(print)
        """)
    env = {**os.environ, "PYTHONPATH": str(CODE), "LAB_ROOT": str(tmp_path)}
    starting = subprocess.Popen(
        [sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    path = tmp_path / ".lab" / "embedded.json"

    def half_way() -> bool:
        found = _state.load(path)
        return found is not None and len(found.records) >= 2

    assert _processes.wait_until(half_way, 30, pause_s=0.02)
    other = _state.load(path)
    assert other is not None
    starting.send_signal(signal.SIGINT)
    _, errors = starting.communicate(timeout=40)
    assert "KeyboardInterrupt" in errors
    assert not path.exists()
    assert _processes.marked(other.cluster_id, other.records) == []
    assert not Path(other.scratch).exists()
    assert lab.runtime.access() == lab.access


def test_a_port_that_is_taken_is_named_and_nothing_is_started(lab: Lab, tmp_path: Path) -> None:
    port = int(lab.access.dashboard.rsplit(":", 1)[1])
    runtime = EmbeddedRuntime(settings_of(tmp_path, dashboard_port=port), tmp_path)
    with pytest.raises(UserError, match=f"LAB_DASHBOARD_PORT={port} is taken"):
        runtime.up(print)
    assert runtime.status() == []
    assert _processes.clusters_below(tmp_path) == {}


def test_an_external_store_is_proven_before_anything_starts(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="S3_ENDPOINT"):
        EmbeddedRuntime(settings_of(tmp_path, store="external"), tmp_path).up(print)
    settings = settings_of(tmp_path, store="external", s3_endpoint=lab.access.store)
    begin = time.monotonic()
    with pytest.raises(UserError, match="S3_ACCESS_KEY_ID is not known"):
        EmbeddedRuntime(settings, tmp_path).up(print)
    assert time.monotonic() - begin < 8
    assert _processes.clusters_below(tmp_path) == {}


# The last tests end the cluster: the order in this file counts.


def test_what_is_left_of_a_cluster_is_cleared_and_said_and_the_data_stays(lab: Lab) -> None:
    store = probe.client(lab.settings.store_access(lab.access.store))
    kept = Path(lab.access.local_root) / "kept"
    kept.touch()
    store.fput_object("lab", "kept", str(lab.root / ".env"))
    before = lab.state
    worker = next(record for record in before.records if record.name == "worker-1").process()
    assert worker is not None
    worker.kill()
    assert _processes.wait_until(lambda: lab.runtime.access() is None, 5)
    assert {part.name for part in lab.runtime.status() if part.state == "dead"} == {"worker-1"}
    said: list[str] = []
    access = lab.runtime.up(said.append)
    assert "no longer whole" in said[0]
    assert dataclasses.replace(access, dashboard="", store="", node_store="") == dataclasses.replace(
        lab.access, dashboard="", store="", node_store=""
    )
    assert _processes.marked(before.cluster_id, before.records) == []
    store = probe.client(lab.settings.store_access(access.store))
    assert store.stat_object("lab", "kept").size == (lab.root / ".env").stat().st_size
    assert kept.exists()


def test_down_leaves_no_process_mount_or_scratch_and_keeps_logs_and_data(lab: Lab) -> None:
    state = lab.state
    lab.runtime.down(print)
    assert _processes.marked(state.cluster_id, state.records) == []
    assert not Path(state.scratch).exists()
    assert not (lab.root / ".lab" / "embedded.json").exists()
    mounts = Path("/proc/self/mountinfo")
    assert not mounts.exists() or str(lab.root) not in mounts.read_text()
    assert list(Path(state.logs).glob("n0/raylet.out"))
    assert (Path(lab.access.local_root) / "kept").exists()
    assert lab.runtime.access() is None
    assert lab.runtime.status() == []
    said: list[str] = []
    lab.runtime.down(said.append)
    assert said == []
