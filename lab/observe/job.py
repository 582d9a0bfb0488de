"""The job's side of a lesson: what it was asked, where it stores, how it speaks."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lab.cluster import ROLE_LABEL
from lab.errors import EnvironmentBroken
from lab.settings import StoreAccess
from lab.storage import Client, Storage, open_storage, parse_location

LINE = "LAB| "
"""Before each line that the host shows while a job runs."""


def say(line: str) -> None:
    """Say one line to the user who watches the job."""
    # the line's end with the line: of two threads' lines print() would write the ends afterwards
    print(f"{LINE}{line}\n", end="", flush=True)


@dataclass(frozen=True)
class Job:
    """One observation job. `run` is the run's name, unique unless the user gave one; `params` the lesson's."""

    run: str
    storage_uri: str
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def workers(self) -> int:
        """World size that the user asked for."""
        return int(self.params["workers"])

    @property
    def seed(self) -> int:
        """The lesson's seed."""
        return int(self.params["seed"])

    @property
    def quick(self) -> bool:
        """Whether the short form is wanted."""
        return bool(self.params["quick"])

    def broken(self, mechanism: str) -> bool:
        """Whether the live twin `mechanism` is asked for."""
        return bool(self.params.get("broken") == mechanism)

    def storage(self, uri: str = "", client: Client = "pyarrow") -> Storage:
        """The run's storage, or another one, opened with this node's own keys."""
        location = parse_location(uri or self.storage_uri)
        return open_storage(
            location, StoreAccess.from_environment() if location.kind == "s3" else None, client
        )

    @property
    def local_root(self) -> str:
        """The folder for local paths on this node; another node's is another disk."""
        return os.environ["LAB_LOCAL_STORAGE"]

    @property
    def bucket(self) -> str:
        """The lab's bucket."""
        return StoreAccess.from_environment().bucket


def code_hash() -> str:
    """Digest of the lab's Python files, to see that every node runs the same code (pitfall K8)."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def node_facts() -> dict[str, Any]:
    """What this node is: versions, cores, clock (Unix seconds), shared memory (bytes), threads, code."""
    versions: dict[str, str] = {"python": platform.python_version()}
    for package in ("ray", "torch", "pyarrow", "s3fs"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "missing"
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "versions": versions,
        "code": code_hash(),
        "host_cores": os.cpu_count() or 1,
        "machine": f"{platform.system()} {platform.machine()}",
        "omp": os.environ.get("OMP_NUM_THREADS", ""),
        "time": time.time(),
        "shm_bytes": shm.total if shm else None,
    }


def ask_nodes() -> list[tuple[dict[str, Any], Any]]:
    """Ask every node that is alive for its `node_facts`: what Ray says of the node, and the answer to come.

    A node starts a process for it, which takes seconds: ask early, do something else, then `cluster_facts`.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=0, max_retries=0, max_calls=1)(
        node_facts
    )  # the process ends with its answer
    return [
        (
            node,
            remote.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def cluster_facts(asked: list[tuple[dict[str, Any], Any]], timeout_s: float = 30.0) -> list[dict[str, Any]]:
    """The answers to `ask_nodes`, each with its node's id, address, labels and logical CPUs.

    Raises:
        EnvironmentBroken: a node does not answer within `timeout_s`.
    """
    import ray

    nodes, coming = zip(*asked, strict=True)
    try:
        answers = ray.get(list(coming), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise EnvironmentBroken(
            f"not every node answered within {timeout_s:.0f} s: look at `make status`, then `make down` and `make up`."
        ) from None
    return [
        {
            "id": node["NodeID"],
            "ip": node["NodeManagerAddress"],
            "role": node.get("Labels", {}).get(ROLE_LABEL, ""),
            "cpus": int(node["Resources"].get("CPU", 0)),
            **facts,
        }
        for node, facts in zip(nodes, answers, strict=True)
    ]


def role_cpus(role: str) -> list[int]:
    """Logical CPUs of each node that is alive and has the label `lab-role` of this value."""
    import ray

    return [
        int(node["Resources"].get("CPU", 0))
        for node in ray.nodes()
        if node["Alive"] and node.get("Labels", {}).get(ROLE_LABEL) == role
    ]


def check_same_everywhere(nodes: list[dict[str, Any]]) -> None:
    """Every node must run the same code and versions as the head.

    Raises:
        EnvironmentBroken: one does not, or a node offers 0 CPUs (F9); the sentence names it.
    """
    here = code_hash()
    versions = next((node["versions"] for node in nodes if node["role"] == "head"), nodes[0]["versions"])
    for node in nodes:
        if node["code"] != here:
            raise EnvironmentBroken(
                f"node {node['ip']} runs other lab code than the head: `make down`, then `make up` "
                "(with containers and no bind mount, `make images` first)."
            )
        if node["versions"] != versions:
            raise EnvironmentBroken(
                f"node {node['ip']} has other versions than the head ({node['versions']} against {versions}): "
                "build the images again (make images) and restart (make down, make up)."
            )
        if node["cpus"] < 1:
            raise EnvironmentBroken(
                f"node {node['ip']} offers 0 CPUs: set LAB_NODE_CPUS to 1 or more and restart."
            )


def environment(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    """The part of a document that says where it was measured."""
    return {
        "versions": nodes[0]["versions"],
        "code": nodes[0]["code"],
        "host_cores": nodes[0]["host_cores"],
        "machine": nodes[0]["machine"],
        "nodes": [{key: node[key] for key in ("id", "ip", "role", "cpus")} for node in nodes],
        "argv": sys.argv[1:2],
    }
