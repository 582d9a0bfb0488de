"""Ray jobs over the Jobs REST API, so that the host needs no Ray of its own.

Source of the endpoints: Ray's "Jobs REST API" reference for 2.60 (`/api/jobs/`).
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import shlex
import time
from collections.abc import Callable, Mapping
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
OWN = "own-"
"""The names of jobs with a user's own program begin so."""
TERMINAL = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended: Ray's status and words for it, the document it sent (None if none), seconds from submission."""

    id: str
    status: str
    message: str
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

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, content: bytes | None = None
    ) -> requests.Response:
        response = self._session.request(
            method, self._url + path, json=body, data=content, timeout=REQUEST_TIMEOUT_S
        )
        if response.status_code in (401, 403):
            raise UserError(WRONG_TOKEN)
        return response

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, content: bytes | None = None
    ) -> requests.Response:
        response = self._ask(method, path, body, content)
        if response.status_code >= 400:
            raise EnvironmentBroken(
                f"the cluster answered {response.status_code} to {method} {path}: {response.text.strip()[-300:]}"
            )
        return response

    def observe(self, module: str, request: dict[str, Any]) -> str:
        """Start `python -m lab.observe MODULE REQUEST` on the head; returns the job's id.

        The request is JSON in the entry point, which everybody can read: never put a secret there.
        """
        command = f"exec python3 -m lab.observe {shlex.quote(module)} {shlex.quote(json.dumps(request))}"
        return self._start({"entrypoint": command})

    def submit(self, command: str, package: bytes, environment: Mapping[str, str]) -> str:
        """Start a command line of the user's on the head, in a folder made from a zip file; returns the job's id.

        Args:
            command: for the head's shell. Everybody can read it.
            package: the folder, which every process of the job starts in.
            environment: variables of every process of the job.
        """
        name = f"_ray_pkg_{hashlib.sha256(package).hexdigest()[:16]}.zip"  # Ray's own form of a name
        place = f"/api/packages/gcs/{name}"
        try:
            # the question keeps a package from being collected before the job has it, so it comes first
            if self._ask("GET", place).status_code != 200:
                self._call("PUT", place, content=package)
        except requests.RequestException as error:
            raise self._silent(error) from None
        return self._start(
            {
                "entrypoint": command,
                "submission_id": f"{OWN}{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
                "runtime_env": {"working_dir": f"gcs://{name}", "env_vars": dict(environment)},
            }
        )

    def _start(self, job: dict[str, Any]) -> str:
        try:
            return str(self._call("POST", "/api/jobs/", job).json()["submission_id"])
        except requests.RequestException as error:
            raise self._silent(error) from None

    def _silent(self, error: requests.RequestException) -> EnvironmentBroken:
        return EnvironmentBroken(
            f"the cluster's Jobs API at {self._url} does not answer ({type(error).__name__}): "
            "look at `make status` and `make logs`."
        )

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
                asked = time.monotonic()
                try:
                    about = self._call("GET", f"/api/jobs/{job}").json()
                    status = str(about["status"])
                    text = str(self._call("GET", f"/api/jobs/{job}/logs").json().get("logs") or "")
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
                    message = str(about.get("message") or "")
                    return JobOutcome(job, status, message, receiver.document, time.monotonic() - began)
                if time.monotonic() - began > limit_s:
                    self.stop(job)
                    raise EnvironmentBroken(
                        f"job {job} did not end within {limit_s:.0f} s and was stopped; see {log}."
                    )
                # the log comes whole each time: a long one is asked for a tenth of the time at most
                time.sleep(max(POLL_S, 9 * (answered - asked)))


def run_job(
    client: JobsClient, module: str, request: dict[str, Any], *, log: Path, say: Say, limit_s: float
) -> dict[str, Any]:
    """Run one observation job and return its document.

    Raises:
        UserError: the job found a mistake in what the user set.
        EnvironmentBroken: the job died or sent no document.
        KeyboardInterrupt: as it came, after the job was told to stop.
    """
    outcome = _followed(client, client.observe(module, request), log, say, limit_s)
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


def run_own(
    client: JobsClient,
    command: str,
    package: bytes,
    environment: Mapping[str, str],
    *,
    logs: Path,
    say: Say,
    line: Callable[[str], object],
) -> JobOutcome:
    """Run a program of the user's to its end, however long it takes; its log goes to `logs`, by the job's id.

    Raises:
        EnvironmentBroken: the cluster stopped answering.
        KeyboardInterrupt: as it came, after the job was told to stop.
    """
    job = client.submit(command, package, environment)
    log = logs / f"{job}.log"
    say(f"job: {job}  log: {log}")
    return _followed(client, job, log, line, math.inf)


def _followed(
    client: JobsClient, job: str, log: Path, line: Callable[[str], object], limit_s: float
) -> JobOutcome:
    try:
        return client.follow(job, log, line, limit_s)
    except KeyboardInterrupt:
        client.stop(job)
        raise
