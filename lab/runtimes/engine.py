"""The container engine: one way to call its command line, and what may be wrong with it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.errors import EnvironmentBroken

ANSWER_S = 5.0
"""Seconds for the engine to answer a question."""
MIN_COMPOSE = (2, 26)
MIN_ENGINE = (25, 0)
"""The first engine with `start_interval` in health checks."""
INSTEAD = "or choose LAB_RUNTIME=embedded, which needs no containers"
_STOP_S = 5.0


@dataclass(frozen=True)
class Output:
    """How a call ended. `code` is None when its time was up."""

    code: int | None
    out: str
    err: str

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def last_line(self) -> str:
        """The last line it said, errors first: where a command line tool puts its reason."""
        return last_line(self.err or self.out)


def last_line(text: str) -> str:
    """The last line that says something: where programs put their reason."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def call(
    arguments: Sequence[str],
    *,
    limit_s: float,
    environ: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Output:
    """Run `docker ARGUMENTS` with a limit. Secrets belong in `environ`, never in the arguments.

    The call has a session of its own: an interrupt reaches this process alone, which then ends the call and
    the plugin behind it, and knows what it has to clean up.

    Args:
        log: a file that takes everything it prints, instead of `Output`.

    Raises:
        EnvironmentBroken: there is no `docker` command.
    """
    with open(log or os.devnull, "a") as file:
        try:
            process = subprocess.Popen(
                ["docker", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file if log else subprocess.PIPE,
                stderr=subprocess.STDOUT if log else subprocess.PIPE,
                text=True,
                errors="replace",
                env=None if environ is None else dict(environ),
                start_new_session=True,
            )
        except FileNotFoundError:
            raise EnvironmentBroken(f"docker is not installed: install Docker, {INSTEAD}.") from None
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return Output(None, "", f"no answer within {limit_s:g} s")
        except BaseException:  # an interrupt above all: the call must not go on behind the user's back
            _end(process)
            raise
    return Output(process.returncode, out or "", err or "")


def _end(process: subprocess.Popen[str]) -> None:
    """End a call and its plugin: both are in the call's own process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.communicate(timeout=_STOP_S)
            break
        except subprocess.TimeoutExpired:
            continue


def version_of(text: str) -> tuple[int, int] | None:
    """Major and minor of a version such as `v2.26.1-4` or `26.1.5+dfsg1`."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def engine_problem() -> str | None:
    """Why containers cannot be used here, as one sentence; None when they can."""
    if shutil.which("docker") is None:
        return f"docker is not on the PATH: install Docker with Compose v2.26 or newer, {INSTEAD}."
    server = call(["version", "--format", "{{.Server.Version}}"], limit_s=ANSWER_S)
    if not server.ok:
        if "permission denied" in server.err.lower():
            return f"this user may not use the Docker engine: add it to the group docker, {INSTEAD}."
        host = os.environ.get("DOCKER_HOST")
        where = f"at DOCKER_HOST={host}" if host else "on this machine"
        return f"no Docker engine answers {where} within {ANSWER_S:g} s: start one, {INSTEAD}."
    engine = version_of(server.out)
    if engine is None or engine < MIN_ENGINE:
        return (
            f"the Docker engine is version {server.out.strip()}, too old: install 25.0 or newer, {INSTEAD}."
        )
    compose = call(["compose", "version", "--short"], limit_s=ANSWER_S)
    if not compose.ok:
        return f"docker has no Compose plugin: install Compose v2.26 or newer, {INSTEAD}."
    found = version_of(compose.out)
    if found is None or found < MIN_COMPOSE:
        return f"Compose is version {compose.out.strip()}, too old: install v2.26 or newer, {INSTEAD}."
    return None
