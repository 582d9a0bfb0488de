"""The Compose project: which files and variables describe it, and what of it runs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.errors import EnvironmentBroken
from lab.runtimes.engine import ANSWER_S, Output, call
from lab.settings import Settings, check_store

SOURCE = Path(__file__).resolve().parents[2]
"""The checkout that this code lies in: the Compose files and what images are made of."""
FILE = "docker-compose.yml"
OVERRIDES = {
    "minio": None,
    "seaweedfs": "images/seaweedfs/compose.yml",
    "external": "images/external/compose.yml",
}
NODE_STORE = "http://minio:9000"
"""The lab's own store, whichever it is, as the nodes see it."""
_PROJECT = "com.docker.compose.project"


@dataclass(frozen=True)
class Container:
    """One container of the project. `ports` maps container ports to ports on the host's loopback."""

    service: str
    name: str
    state: str
    status: str
    ports: Mapping[int, int]
    labels: Mapping[str, str]

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def healthy(self) -> bool:
        return self.running and "(healthy)" in self.status

    @property
    def exit_code(self) -> int | None:
        """Of a container that has ended."""
        found = re.match(r"Exited \((\d+)\)", self.status)
        return int(found[1]) if found else None


def environment(settings: Settings, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that the Compose files are filled with. Holds secrets: for a child's environment alone.

    Raises:
        UserError: the store and its endpoint contradict each other.
    """
    check_store(settings)
    access = settings.store_access(settings.s3_endpoint or NODE_STORE)
    known = {
        **access.environment(),
        "COMPOSE_PROJECT_NAME": settings.project,
        "RAY_AUTH_TOKEN": settings.ray_auth_token.get_secret_value(),
        "STORE_ROOT_USER": settings.store_root_user,
        "STORE_ROOT_PASSWORD": settings.store_root_password.get_secret_value(),
        "LAB_NODES": str(settings.nodes),
        "LAB_NODE_CPUS": str(settings.node_cpus),
        "LAB_DASHBOARD_PORT": str(settings.dashboard_port),
        "LAB_S3_PORT": str(settings.s3_port),
    }
    # A profile or file list of the user's shell would change which services there are.
    inherited = {
        name: value
        for name, value in (os.environ if base is None else base).items()
        if name not in ("COMPOSE_FILE", "COMPOSE_PROFILES", "S3_SESSION_TOKEN", "S3_CA_BUNDLE")
    }
    return {**inherited, **known}


def files(settings: Settings, root: Path = SOURCE) -> list[str]:
    """The options that name the project's folder and files for the chosen store."""
    options = ["--project-directory", str(root), "--file", str(root / FILE)]
    override = OVERRIDES[settings.store]
    return [*options, "--file", str(root / override)] if override else options


def compose(
    settings: Settings,
    arguments: list[str],
    *,
    limit_s: float,
    extra: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Output:
    """Run `docker compose ARGUMENTS` for this project."""
    variables = {**environment(settings), **(extra or {})}
    return call(["compose", *files(settings), *arguments], limit_s=limit_s, environ=variables, log=log)


def described(settings: Settings) -> dict[str, Any]:
    """The services as Compose understands them: name -> definition. Holds secrets: never log it.

    Raises:
        EnvironmentBroken: Compose refuses the files.
    """
    output = compose(settings, ["config", "--format", "json"], limit_s=2 * ANSWER_S)
    if not output.ok:
        raise EnvironmentBroken(f"Compose does not accept {FILE}: {output.last_line}.")
    services: dict[str, Any] = json.loads(output.out)["services"]
    return services


def containers(project: str) -> list[Container]:
    """Every container of a project, those that have ended too. Asks the engine, not the Compose files.

    Raises:
        EnvironmentBroken: the engine does not answer.
    """
    service = '{{.Label "com.docker.compose.service"}}'
    fields = [service, "{{.Names}}", "{{.State}}", "{{.Status}}", "{{.Ports}}", "{{.Labels}}"]
    output = call(
        [
            "ps",
            "--all",
            "--no-trunc",
            "--filter",
            f"label={_PROJECT}={project}",
            "--format",
            "\t".join(fields),
        ],
        limit_s=ANSWER_S,
    )
    if not output.ok:
        raise EnvironmentBroken(f"the Docker engine does not list its containers: {output.last_line}.")
    found = [parse_container(row) for row in output.out.splitlines() if row]
    return sorted(found, key=lambda container: (container.service, container.name))


def parse_container(row: str) -> Container:
    """One line of `docker ps` as `containers` asks for it, fields parted by tabs."""
    service, name, state, status, ports, labels = row.split("\t")
    published = {
        int(inner): int(outer) for outer, inner in re.findall(r"127\.0\.0\.1:(\d+)->(\d+)/tcp", ports)
    }
    pairs = (pair.partition("=") for pair in labels.split(",") if pair.startswith("lab."))
    return Container(service, name, state, status, published, {key: value for key, _, value in pairs})
