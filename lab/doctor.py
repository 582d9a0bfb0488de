"""`lab doctor`: what is wrong on this machine or cluster, one line each, with the setting and the fix."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal

import requests

from lab.errors import LabError
from lab.jobs import JobsClient, run_job
from lab.runtimes.compose import port_taken
from lab.runtimes.engine import engine_problem
from lab.runtimes.protocol import Access, Runtime
from lab.settings import LOGS, ROOT, Settings, readable_by_others
from lab.store.probe import probe

Level = Literal["ok", "warning", "fault"]

CLOCK_LIMIT_S = 60.0
"""Clock skew worth a word. S3 signatures are refused beyond 15 minutes."""
SHM_LIMIT_BYTES = 256 * 2**20
"""Below this Ray puts its object store on disk (pitfall F10)."""
JOB_LIMIT_S = 40.0


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, how it is, and what to do when it is not well."""

    name: str
    level: Level
    text: str


def examine(settings: Settings, runtime: Runtime) -> Iterator[Check]:
    """Look at everything; each check is yielded as soon as it is known."""
    yield _python()
    yield _secrets(ROOT / ".env")
    yield _engine(runtime)
    access = runtime.access()
    if access is None:
        yield Check("cluster", "ok", "none is up (make up starts one)")
        yield from _ports(settings, runtime)
        yield Check("cpus", "ok", f"{os.cpu_count()} cores on this host")
        yield _shm_here()
        return
    yield Check(
        "cluster",
        "ok",
        f"up: a head and {access.nodes} workers of {access.node_cpus} CPUs, {access.dashboard}",
    )
    yield from _store(settings, access)
    yield from _nodes(settings, access)


def _python() -> Check:
    here = ".".join(str(part) for part in sys.version_info[:3])
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Check(
        "python", "ok" if good else "fault", f"{here} on the host" + ("" if good else ": use 3.11 to 3.13")
    )


def _secrets(env_file: Path) -> Check:
    if readable_by_others(env_file):
        return Check("secrets", "warning", f"others may read {env_file}: chmod 600 {env_file}")
    return Check("secrets", "ok", f"{env_file} is its owner's alone")


def _engine(runtime: Runtime) -> Check:
    problem = engine_problem()
    if not problem:
        return Check("engine", "ok", "a Docker engine with Compose answers")
    return Check("engine", "fault" if runtime.name == "compose" else "ok", f"no containers: {problem}")


def _ports(settings: Settings, runtime: Runtime) -> Iterator[Check]:
    """Of a cluster to come."""
    asked = settings.ports() if runtime.name == "compose" else settings.chosen_ports()
    for name, port in asked.items():
        if port_taken(port):
            yield Check("ports", "fault", f"{name}={port} is taken on 127.0.0.1: set another port")
        else:
            yield Check("ports", "ok", f"{name}={port} is free")
    if not asked:
        yield Check("ports", "ok", "any free ones will be taken")


def _shm_here() -> Check:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return Check("shm", "ok", "this system has no /dev/shm")
    return _shm("this host", shutil.disk_usage(shm).total)


def _shm(where: str, size: int) -> Check:
    if size >= SHM_LIMIT_BYTES:
        return Check("shm", "ok", f"{size / 2**20:,.0f} MB on {where}")
    return Check(
        "shm",
        "warning",
        f"only {size / 2**20:,.0f} MB on {where}: Ray's object store goes to disk; raise LAB_SHM_SIZE",
    )


def _store(settings: Settings, access: Access) -> Iterator[Check]:
    store = settings.store_access(access.store)
    try:
        probe(store)
    except LabError as error:
        yield Check("store", "fault", str(error))
        return
    yield Check("store", "ok", f"put, get, list and delete in bucket {store.bucket} at {store.endpoint}")
    try:
        answer = requests.get(store.endpoint, timeout=3, verify=store.ca_bundle or True)
        skew = abs(parsedate_to_datetime(answer.headers["Date"]).timestamp() - time.time())
    except (requests.RequestException, KeyError, ValueError) as error:
        yield Check("clock", "warning", f"the store's clock could not be read ({type(error).__name__})")
        return
    good = skew <= CLOCK_LIMIT_S
    text = f"{skew:.0f} s between this host and the store"
    yield Check("clock", "ok" if good else "fault", text if good else f"{text}: set the host's clock (NTP)")


def _nodes(settings: Settings, access: Access) -> Iterator[Check]:
    client = JobsClient(access.dashboard, settings.ray_auth_token.get_secret_value())
    request: dict[str, Any] = {"run": "doctor", "storage": access.local_root, "params": {}}
    log = LOGS / "doctor.log"
    try:
        document = run_job(client, "doctor", request, log=log, say=lambda line: None, limit_s=JOB_LIMIT_S)
    except LabError as error:
        yield Check("nodes", "fault", str(error))
        return
    nodes = document["nodes"]
    for node in nodes:
        versions = ", ".join(f"{name} {number}" for name, number in node["versions"].items())
        yield Check(
            "node",
            "ok",
            f"{node['role']} {node['ip']}: {node['cpus']} CPUs, OMP_NUM_THREADS {node['omp'] or 'unset'}, {versions}",
        )
        skew = abs(node["time"] - nodes[0]["time"])
        if skew > CLOCK_LIMIT_S:
            yield Check(
                "clock", "fault", f"node {node['ip']} is {skew:.0f} s off the head: set its clock (NTP)"
            )
    small = [node for node in nodes if node["shm_bytes"] is not None]
    if small:
        least = min(small, key=lambda node: node["shm_bytes"])
        yield _shm(f"node {least['ip']}", least["shm_bytes"])
    if len(nodes) != access.nodes + 1:
        yield Check(
            "nodes", "fault", f"{len(nodes)} nodes are alive, {access.nodes + 1} expected: make down, make up"
        )
    logical, cores = access.nodes * access.node_cpus, os.cpu_count() or 1
    if logical > cores:
        yield Check(
            "cpus",
            "ok",
            f"{logical} logical CPUs on worker nodes, {cores} cores on the host: more ranks than cores is slower, still correct",
        )
