"""The runtime of containers: `docker compose` with limits. The host needs neither Ray nor torch."""

from __future__ import annotations

import errno
import json
import socket
import urllib.request
from pathlib import Path
from typing import Any

from lab.errors import EnvironmentBroken, LabError, UserError
from lab.runtimes.engine import ANSWER_S, Output, call, engine_problem
from lab.runtimes.images import digests, images_missing, images_problem, obtain
from lab.runtimes.project import FILE, NODE_STORE, SOURCE, Container, compose, containers, environment
from lab.runtimes.protocol import Access, Part, Say
from lab.settings import LOGS, Settings, check_together

__all__ = ["ComposeRuntime", "engine_problem", "images_missing", "images_problem"]

UP_S = 300
"""Seconds for everything to be healthy."""
DOWN_S = 120
"""Seconds for everything to end, on an engine that is busy."""
NODES_PATIENCE_S = 2
"""Seconds that `down` gives the nodes, as the embedded runtime does."""
LOCAL_ROOT = "/lab/storage"
DASHBOARD_INSIDE = 8265
S3_INSIDE = 9000
_LOG_LINES = 40


class ComposeRuntime:
    """One container for the head, each worker and the store (see `docker-compose.yml`)."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.name = "compose"
        self.verbs = frozenset({"up", "down", "status", "submit"})

    def up(self, say: Say) -> Access:
        """See `Runtime.up`. A whole cluster that is up is taken as it is, unless another was asked for."""
        self._need_engine()
        check_together(self.settings)
        there = self._containers()
        up = self._as_it_is(there)
        if up is not None:
            self._need_answer(up)
            return up
        before = [each for each in there if each.running]
        # What was not asked for stays as it is.
        kept = {
            name: value for name, value in traits(there).items() if name not in self.settings.model_fields_set
        }
        settings = self.settings.model_copy(update=kept)
        self._need_ports(before)
        obtain(settings, say)
        say(f"starting a head, {settings.nodes} workers and the store ({settings.store})")
        try:
            output = compose(
                settings,
                ["up", "--detach", "--wait", "--wait-timeout", str(UP_S), "--remove-orphans"],
                limit_s=UP_S + ANSWER_S,
            )
            if not output.ok:
                raise self._failed(output.last_line)
            access = self.access()
            if access is None:
                raise self._failed("the head is not healthy")
            self._need_answer(access)
        except (LabError, KeyboardInterrupt):
            # A cluster that works stays, as it was before; one that does not is not left half-started.
            if not before or self.access() is None:
                say("stopping what was started")
                self.down(say)
            raise
        return access

    def _as_it_is(self, there: list[Container]) -> Access | None:
        """A cluster that is up, whole, and that no setting asks to be otherwise."""
        access = self._access(there)
        whole = all(each.healthy or each.exit_code == 0 for each in there)
        return access if access and whole and not self.settings.asks_for(**traits(there)) else None

    def down(self, say: Say) -> None:
        self._need_engine()
        if not self._containers() and not self._networks():
            return
        # All of a cluster's nodes go: draining them, which `stop_grace_period` has time for, would save nothing.
        self._of_base("stop", "--timeout", str(NODES_PATIENCE_S), "worker", "head")
        output = self._of_base("down", "--remove-orphans")
        left = [each.name for each in self._containers()] + self._networks()
        if left or not output.ok:
            raise EnvironmentBroken(
                f"stopping left {', '.join(left) or 'something'} behind ({output.last_line}): "
                f"run `docker compose -p {self.settings.project} down` and see what it says."
            )

    def _of_base(self, *arguments: str) -> Output:
        """Compose with the base file alone: it knows every service and network, whatever store was chosen at the start."""
        return call(
            ["compose", "--project-directory", str(SOURCE), "--file", str(SOURCE / FILE), *arguments],
            limit_s=DOWN_S,
            environ=environment(self.settings.model_copy(update={"store": "minio", "s3_endpoint": None})),
        )

    def access(self) -> Access | None:
        """As the protocol says; also None when no engine answers, for then no cluster is up either."""
        return self._access(self._containers()) if engine_problem() is None else None

    def _access(self, there: list[Container]) -> Access | None:
        head = _running(there, "head")
        if head is None or not head.healthy or DASHBOARD_INSIDE not in head.ports:
            return None
        store = _running(there, "minio")
        node_store = head.labels.get("lab.s3-endpoint", NODE_STORE)
        if store is not None and S3_INSIDE in store.ports:
            from_host = f"http://127.0.0.1:{store.ports[S3_INSIDE]}"
        else:
            from_host = self.settings.s3_public_endpoint or node_store
        return Access(
            dashboard=f"http://127.0.0.1:{head.ports[DASHBOARD_INSIDE]}",
            store=from_host,
            node_store=node_store,
            local_root=LOCAL_ROOT,
            shared_disk=False,
            nodes=sum(each.service == "worker" and each.running for each in there),
            node_cpus=int(head.labels.get("lab.node-cpus", self.settings.node_cpus)),
        )

    def status(self) -> list[Part]:
        if engine_problem() is not None:
            return []
        found = self._containers()
        if not any(each.running for each in found):
            return []
        return [_part(each) for each in found]

    def captured(self) -> dict[str, str]:
        return {f"image {name}": digest for name, digest in digests(self.settings).items()}

    def diagnose(self) -> str:
        problem = engine_problem()
        if problem:
            return problem
        now = self._story(self._containers())
        kept = self._failure_log()
        if not now and kept.is_file():
            return f"(of the last start that failed, from {kept})\n{kept.read_text(errors='replace')}"
        return now

    def build(self, say: Say) -> None:
        """Build or pull every image that is missing or out of date.

        Raises:
            UserError: no engine.
            EnvironmentBroken: an image cannot be had.
        """
        self._need_engine()
        obtain(self.settings, say)

    def _containers(self) -> list[Container]:
        return containers(self.settings.project)

    def _networks(self) -> list[str]:
        output = call(
            [
                "network",
                "ls",
                "--filter",
                f"label=com.docker.compose.project={self.settings.project}",
                "--format",
                "{{.Name}}",
            ],
            limit_s=ANSWER_S,
        )
        return output.out.split()

    def _need_engine(self) -> None:
        problem = engine_problem()
        if problem:
            raise UserError(f"LAB_RUNTIME=compose cannot work: {problem}")

    def _need_ports(self, running: list[Container]) -> None:
        """Refuse a port that another program holds, before anything starts."""
        ours = {port for each in running for port in each.ports.values()}
        for variable, port in self.settings.ports().items():
            if port not in ours and port_taken(port):
                raise UserError(
                    f"{variable}={port} is taken by another program on 127.0.0.1: set {variable} to a free port, "
                    "or stop that program."
                )

    def _need_answer(self, access: Access) -> None:
        """The Jobs API must answer on the host with this token: health inside proves less.

        Raises:
            EnvironmentBroken: it does not.
        """
        request = urllib.request.Request(
            f"{access.dashboard}/api/version",
            headers={"Authorization": f"Bearer {self.settings.ray_auth_token.get_secret_value()}"},
        )
        # No proxy of the user's stands between this host and its own loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=ANSWER_S) as answer:
                json.load(answer)
        except (OSError, ValueError) as error:
            raise EnvironmentBroken(
                f"the dashboard at {access.dashboard} does not answer the host: {error}; if another RAY_AUTH_TOKEN "
                "is in force since the cluster started, run `make down` and `make up`."
            ) from None

    def _failed(self, reason: str) -> LabError:
        """The error of a failed start, from the part that is to blame; keeps the logs, which `down` would delete."""
        found = self._containers()
        log = self._failure_log()
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(self._story(found))
        blamed = next((each for each in found if _at_fault(each)), None)
        if blamed is None:
            return EnvironmentBroken(f"the containers did not start: {reason}; their logs are in {log}.")
        said = self._log(blamed, 1).strip().splitlines()
        last = said[-1].strip() if said else reason
        if blamed.service == "bucket" and blamed.exit_code == UserError.exit_code:
            return UserError(last.removeprefix("bucket: "))
        return EnvironmentBroken(
            f"{blamed.service} is {blamed.status}, its last words: {last[:300]}; see {log}."
        )

    def _story(self, found: list[Container]) -> str:
        return "\n".join(
            f"== {each.name}: {each.status}\n{self._log(each, _LOG_LINES)}"
            for each in found
            if each.state != "created"
        )

    def _log(self, container: Container, lines: int) -> str:
        output = call(["logs", "--tail", str(lines), container.name], limit_s=ANSWER_S)
        return output.out + output.err

    def _failure_log(self) -> Path:
        return LOGS / "compose-up.log"


def _running(there: list[Container], service: str) -> Container | None:
    """The one running container of a service that has no more than one."""
    return next((each for each in there if each.service == service and each.running), None)


def traits(there: list[Container]) -> dict[str, Any]:
    """Of a cluster whose head runs, what its settings were, by field; nothing of one that is down."""
    head, store = _running(there, "head"), _running(there, "minio")
    if head is None:
        return {}
    found: dict[str, Any] = {
        "nodes": sum(each.service == "worker" for each in there),
        "node_cpus": int(head.labels["lab.node-cpus"]),
        "store": head.labels.get("lab.store", "minio"),
        "dashboard_port": head.ports.get(DASHBOARD_INSIDE),
    }
    if found["store"] == "external":
        found["s3_endpoint"] = head.labels["lab.s3-endpoint"]
    if store is not None:
        found["s3_port"] = store.ports.get(S3_INSIDE)
    return found


def port_taken(port: int) -> bool:
    """Whether something listens on this port of loopback, or of every address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the engine's own proxy does: a port that is only winding down counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            # A port below 1024 is the engine's to open, not this process's.
            return error.errno == errno.EADDRINUSE
    return False


def _at_fault(container: Container) -> bool:
    """A part that failed by itself, not one that waits for it."""
    if container.state == "created":
        return False
    if container.service == "bucket":
        return container.exit_code not in (0, None)
    return not container.healthy


def _part(container: Container) -> Part:
    if container.exit_code == 0 and container.service == "bucket":
        return Part(container.name, "done")
    health = "healthy" if container.healthy else container.state
    ports = ", ".join(f"127.0.0.1:{outer} -> {inner}" for inner, outer in sorted(container.ports.items()))
    return Part(container.name, health, ports or container.status)
