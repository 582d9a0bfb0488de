"""The containers themselves: what they may do, who reaches them, and that `up` and `down` keep their word."""

from __future__ import annotations

import io
import json
import subprocess
import uuid
from typing import Any

import pytest
import requests

from lab import cluster as nodes_of
from lab.runtimes.project import compose
from lab.store.probe import client
from tests.conftest import Cluster

pytestmark = [pytest.mark.compose, pytest.mark.parametrize("cluster", ["compose"], indirect=True)]
LIMIT_S = 240


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def containers(cluster: Cluster) -> dict[str, list[dict[str, Any]]]:
    """`docker inspect` of every container of the project, by service."""
    ids = docker(
        "ps", "-aq", "--filter", f"label=com.docker.compose.project={cluster.settings.project}"
    ).split()
    found: dict[str, list[dict[str, Any]]] = {}
    for each in json.loads(docker("inspect", *ids)):
        found.setdefault(each["Config"]["Labels"]["com.docker.compose.service"], []).append(each)
    return found


def token(cluster: Cluster) -> str:
    return cluster.settings.ray_auth_token.get_secret_value()


def test_every_container_is_confined(cluster: Cluster) -> None:
    found = containers(cluster)
    assert set(found) == {"head", "worker", "minio", "bucket"}
    for service, each in ((service, each) for service, group in found.items() for each in group):
        host = each["HostConfig"]
        assert host["CapDrop"] == ["ALL"], service
        assert not host["CapAdd"], service
        assert "no-new-privileges:true" in host["SecurityOpt"], service
        assert not host["Privileged"], service
        if service == "minio":
            assert host["ReadonlyRootfs"]
        else:
            assert each["Config"]["User"] == "1000:1000", service


def test_ports_are_published_on_loopback_alone(cluster: Cluster) -> None:
    published = {
        service: [
            (inner, binding["HostIp"])
            for each in group
            for inner, bindings in (each["HostConfig"]["PortBindings"] or {}).items()
            for binding in bindings
        ]
        for service, group in containers(cluster).items()
    }
    assert published == {
        "head": [("8265/tcp", "127.0.0.1")],
        "minio": [("9000/tcp", "127.0.0.1")],
        "worker": [],
        "bucket": [],
    }


def test_the_stores_own_account_is_known_to_the_store_and_its_job_alone(cluster: Cluster) -> None:
    password = cluster.settings.store_root_password.get_secret_value()
    for service, group in containers(cluster).items():
        for each in group:
            knows = any(password in entry for entry in each["Config"]["Env"])
            assert knows == (service in ("minio", "bucket")), service
            arguments = json.dumps([each["Path"], each["Args"]])
            assert password not in arguments
            assert token(cluster) not in arguments


def test_the_dashboard_wants_the_token(cluster: Cluster) -> None:
    url = f"{cluster.access.dashboard}/api/jobs/"
    assert requests.get(url, timeout=10).status_code == 401
    assert (
        requests.get(url, timeout=10, headers={"Authorization": f"Bearer {token(cluster)}"}).status_code
        == 200
    )


def test_up_again_changes_nothing(cluster: Cluster) -> None:
    before = {each["Id"] for group in containers(cluster).values() for each in group}
    assert cluster.runtime.up(print) == cluster.access
    after = {
        each["Id"] for service, group in containers(cluster).items() for each in group if service != "bucket"
    }
    assert after <= before


def test_the_bucket_job_may_be_repeated_and_fails_loudly(cluster: Cluster) -> None:
    again = compose(cluster.settings, ["run", "--rm", "--no-deps", "-T", "bucket"], limit_s=LIMIT_S)
    assert again.code == 0, again.err
    assert "proven" in again.out
    wrong = compose(
        cluster.settings,
        ["run", "--rm", "--no-deps", "-T", "-e", "STORE_ROOT_PASSWORD=not-the-password", "bucket"],
        limit_s=LIMIT_S,
    )
    assert wrong.code in (2, 3)
    assert "Traceback" not in wrong.err + wrong.out
    assert "bucket: " in wrong.err + wrong.out


def test_scaling_gives_a_head_and_three_workers(cluster: Cluster) -> None:
    def scale(workers: int) -> None:
        done = compose(
            cluster.settings,
            ["up", "--detach", "--wait", "--no-recreate", "--scale", f"worker={workers}"],
            limit_s=LIMIT_S,
        )
        assert done.code == 0, done.err

    scale(3)
    alive = [node for node in nodes_of.nodes(cluster.access.dashboard, token(cluster)) if node.alive]
    assert sorted(node.role for node in alive) == ["head", "worker", "worker", "worker"]
    scale(2)
    assert cluster.runtime.access() == cluster.access


def test_down_leaves_nothing_and_keeps_the_data(cluster: Cluster) -> None:
    store = cluster.settings.store_access(cluster.access.store)
    key, content = f"kept/{uuid.uuid4().hex}", uuid.uuid4().bytes

    client(store).put_object(store.bucket, key, io.BytesIO(content), len(content))
    cluster.runtime.down(print)
    project = f"label=com.docker.compose.project={cluster.settings.project}"
    assert docker("ps", "-aq", "--filter", project).split() == []
    assert docker("network", "ls", "-q", "--filter", project).split() == []
    assert cluster.runtime.access() is None
    assert cluster.runtime.status() == []
    assert cluster.runtime.up(print) == cluster.access
    answer = client(store).get_object(store.bucket, key)
    try:
        assert answer.read() == content
    finally:
        answer.close()
        answer.release_conn()
