"""Ray jobs over the Jobs REST API, so that the host needs no Ray of its own.

Source of the endpoints: Ray's "Jobs REST API" reference for 2.60 (`/api/jobs/`).
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from lab.channel import Receiver
from lab.cluster import WRONG_TOKEN
from lab.errors import EnvironmentBroken, UserError
from lab.runtimes.protocol import Say

POLL_S = 0.4
REQUEST_TIMEOUT_S = 20.0
UNREACHABLE_LIMIT_S = 60.0
TERMINAL = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended: Ray's status, the document it sent (None if none), seconds from submission."""

    id: str
    status: str
    document: dict[str, Any] | None
    seconds: float


class JobsClient:
    """Submits jobs to one cluster's dashboard and follows them.

    Args:
        dashboard: its URL, `http://host:port`.
        token: Ray's authentication token. It travels in a header alone.
    """

    def __init__(self, dashboard: str, token: str) -> None:
        self._url = dashboard.rstrip("/")
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy for the outside must not see the cluster's token
        self._session.headers["Authorization"] = f"Bearer {token}"

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        response = self._session.request(method, self._url + path, json=body, timeout=REQUEST_TIMEOUT_S)
        if response.status_code in (401, 403):
            raise UserError(WRONG_TOKEN)
        if response.status_code >= 400:
            raise EnvironmentBroken(
                f"the cluster answered {response.status_code} to {method} {path}: {response.text.strip()[-300:]}"
            )
        return response.json()

    def submit(self, module: str, request: dict[str, Any]) -> str:
        """Start `python -m lab.observe MODULE REQUEST` on the head; returns the job's id.

        The request is JSON in the entry point, which everybody can read: never put a secret there.
        """
        command = f"exec python3 -m lab.observe {shlex.quote(module)} {shlex.quote(json.dumps(request))}"
        try:
            return str(self._call("POST", "/api/jobs/", {"entrypoint": command})["submission_id"])
        except requests.RequestException as error:
            raise EnvironmentBroken(
                f"the cluster's Jobs API at {self._url} does not answer ({type(error).__name__}): "
                "look at `make status` and `make logs`."
            ) from None

    def stop(self, job: str) -> None:
        """Ask a job to stop."""
        self._call("POST", f"/api/jobs/{job}/stop")

    def follow(self, job: str, log: Path, on_line: Callable[[str], object], limit_s: float) -> JobOutcome:
        """Follow a job to its end, handing on each whole line of its log once and writing all of it to `log`.

        Raises:
            EnvironmentBroken: the cluster stopped answering, or the job outlived `limit_s`; it is stopped then.
        """
        began = answered = time.monotonic()
        receiver = Receiver()
        seen = 0
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            while True:
                try:
                    status = str(self._call("GET", f"/api/jobs/{job}")["status"])
                    text = str(self._call("GET", f"/api/jobs/{job}/logs").get("logs") or "")
                    answered = time.monotonic()
                except (requests.RequestException, EnvironmentBroken) as error:
                    if time.monotonic() - answered > UNREACHABLE_LIMIT_S:
                        raise EnvironmentBroken(
                            f"the cluster did not answer for {UNREACHABLE_LIMIT_S:.0f} s while job {job} ran "
                            f"({type(error).__name__}); its log so far is {log}."
                        ) from None
                    time.sleep(POLL_S)
                    continue
                end = len(text) if status in TERMINAL else text.rfind("\n") + 1
                for line in text[seen:end].splitlines():
                    if not receiver.takes(line):
                        file.write(line + "\n")
                        on_line(line)
                file.flush()
                seen = max(seen, end)
                if status in TERMINAL:
                    return JobOutcome(job, status, receiver.document, time.monotonic() - began)
                if time.monotonic() - began > limit_s:
                    self.stop(job)
                    raise EnvironmentBroken(
                        f"job {job} did not end within {limit_s:.0f} s and was stopped; see {log}."
                    )
                time.sleep(POLL_S)


def run_job(
    client: JobsClient, module: str, request: dict[str, Any], *, log: Path, say: Say, limit_s: float
) -> dict[str, Any]:
    """Run one observation job and return its document.

    Raises:
        UserError: the job found a mistake in what the user set.
        EnvironmentBroken: the job died or sent no document.
        KeyboardInterrupt: as it came, after the job was told to stop.
    """
    job = client.submit(module, request)
    try:
        outcome = client.follow(job, log, say, limit_s)
    except KeyboardInterrupt:
        client.stop(job)
        raise
    document = outcome.document
    if document is None:
        raise EnvironmentBroken(
            f"the job ended as {outcome.status} without handing back what it saw; see {log}."
        )
    error = document.get("error")
    if error:
        kind = UserError if error["kind"] == "user" else EnvironmentBroken
        where = "" if error["kind"] == "user" else f" (log: {log})"
        raise kind(f"{error['message']}{where}")
    return document
