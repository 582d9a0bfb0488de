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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
STOP_LIMIT_S = 5.0
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
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        content: bytes | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> requests.Response:
        response = self._session.request(method, self._url + path, json=body, data=content, timeout=timeout_s)
        if response.status_code in (401, 403):
            raise UserError(WRONG_TOKEN)
        return response

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, content: bytes | None = None
    ) -> requests.Response:
        return self._good(self._ask(method, path, body, content))

    def _good(self, response: requests.Response) -> requests.Response:
        if response.status_code >= 400:
            asked = f"{response.request.method} {response.request.path_url}"
            raise EnvironmentBroken(
                f"the cluster answered {response.status_code} to {asked}: {response.text.strip()[-300:]}"
            )
        return response

    def observe(self, job: str, module: str, request: dict[str, Any]) -> None:
        """Start `python -m lab.observe MODULE REQUEST` on the head, as job `job`.

        The request is JSON in the entry point, which everybody can read: never put a secret there.
        """
        command = f"exec python3 -m lab.observe {shlex.quote(module)} {shlex.quote(json.dumps(request))}"
        self._start({"submission_id": job, "entrypoint": command})

    def submit(self, job: str, command: str, package: bytes, environment: Mapping[str, str]) -> None:
        """Start a command line of the user's on the head, in a folder made from a zip file, as job `job`.

        Args:
            job: the id.
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
        self._start(
            {
                "submission_id": job,
                "entrypoint": command,
                "runtime_env": {"working_dir": f"gcs://{name}", "env_vars": dict(environment)},
            }
        )

    def _start(self, job: dict[str, Any]) -> None:
        try:
            self._call("POST", "/api/jobs/", job)
        except requests.RequestException as error:
            raise self._silent(error) from None

    def _silent(self, error: requests.RequestException) -> EnvironmentBroken:
        return EnvironmentBroken(
            f"the cluster's Jobs API at {self._url} does not answer ({type(error).__name__}): "
            "look at `make status` and `make logs`."
        )

    def stop(self, job: str) -> bool:
        """Stop a job, also one that is still on its way in; whether the cluster took the word."""
        limit = time.monotonic() + STOP_LIMIT_S
        while not self._stopped(job):
            if time.monotonic() > limit:
                return False
            time.sleep(POLL_S)
        return True

    def _stopped(self, job: str) -> bool:
        try:
            answer = self._ask("POST", f"/api/jobs/{job}/stop", timeout_s=STOP_LIMIT_S)
            if answer.status_code >= 400:
                return False
            return bool(answer.json().get("stopped")) or self._about(job)["status"] in TERMINAL
        except (requests.RequestException, EnvironmentBroken):
            return False

    def _about(self, job: str) -> dict[str, Any]:
        response = self._ask("GET", f"/api/jobs/{job}")
        if response.status_code == 404:
            raise _JobUnknown(
                f"the cluster knows no job {job} any more: it was ended, or started anew, while the job ran."
            )
        about: dict[str, Any] = self._good(response).json()
        return about

    def _log(self, job: str, node: str) -> str:
        response = self._ask("GET", f"/api/jobs/{job}/logs")
        if response.status_code < 400:
            return str(response.json().get("logs") or "")
        # Ray reads the log as strict UTF-8, and fails at the first byte that is none; as a file it hands out any byte
        place = f"node_id={node}&filename=job-driver-{job}.log"
        content = self._call("GET", f"/api/v0/logs/file?{place}&lines=-1").content
        return content.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")

    def follow(
        self,
        job: str,
        log: Path,
        on_line: Callable[[str], object],
        limit_s: float,
        receiver: Receiver | None = None,
    ) -> JobOutcome:
        """Follow a job to its end, handing on each whole line of its log once and writing all of it to `log`.

        Args:
            receiver: takes the lines of a document out of the log; None: every line is handed on.

        Raises:
            EnvironmentBroken: the cluster stopped answering, or lost the job; or the job outlived `limit_s`, and is
                stopped then.
        """
        began = answered = time.monotonic()
        seen = 0
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            while True:
                asked = time.monotonic()
                try:
                    about = self._about(job)
                    status = str(about["status"])
                    text = self._log(job, str(about.get("driver_node_id")))
                    answered = time.monotonic()
                except _JobUnknown:
                    raise
                except (requests.RequestException, EnvironmentBroken) as error:
                    if time.monotonic() - answered > UNREACHABLE_LIMIT_S:
                        raise EnvironmentBroken(
                            f"the cluster did not answer for {UNREACHABLE_LIMIT_S:.0f} s while job {job} ran "
                            f"({type(error).__name__}); its log so far is {log}."
                        ) from None
                    time.sleep(POLL_S)
                    continue
                end = len(text) if status in TERMINAL else text.rfind("\n") + 1
                for line in text[seen:end].removesuffix("\n").split("\n") if end > seen else ():
                    if receiver is None or not receiver.takes(line):
                        file.write(line + "\n")
                        on_line(line)
                file.flush()
                seen = max(seen, end)
                if status in TERMINAL:
                    message = str(about.get("message") or "")
                    document = receiver.document if receiver else None
                    return JobOutcome(job, status, message, document, time.monotonic() - began)
                if time.monotonic() - began > limit_s:
                    self.stop(job)
                    raise EnvironmentBroken(
                        f"job {job} did not end within {limit_s:.0f} s and was stopped; see {log}."
                    )
                # the log comes whole each time: a long one is asked for a tenth of the time at most
                time.sleep(max(POLL_S, 9 * (answered - asked)))


class _JobUnknown(EnvironmentBroken):
    """The cluster has no job of that id."""


def run_job(
    client: JobsClient, module: str, request: dict[str, Any], *, log: Path, say: Say, limit_s: float
) -> dict[str, Any]:
    """Run one observation job and return its document.

    Raises:
        UserError: the job found a mistake in what the user set.
        EnvironmentBroken: the job died or sent no document.
        KeyboardInterrupt: as it came, after the job was told to stop.
    """
    job = _new_id("lab-")
    with _stopping(client, job, say):
        client.observe(job, module, request)
        outcome = client.follow(job, log, say, limit_s, Receiver())
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
    job = _new_id(OWN)
    log = logs / f"{job}.log"
    with _stopping(client, job, say):
        client.submit(job, command, package, environment)
        say(f"job: {job}  log: {log}")
        return client.follow(job, log, line, math.inf)


def _new_id(kind: str) -> str:
    return f"{kind}{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


@contextmanager
def _stopping(client: JobsClient, job: str, say: Say) -> Iterator[None]:
    """Whoever leaves early, by a Ctrl-C or since nobody reads any more, leaves no job behind."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if not client.stop(job):
            say(f"job {job} could not be stopped: it may still run, until `make down`")
        elif job.startswith(OWN):
            say(f"job {job}: stopped")
        raise
