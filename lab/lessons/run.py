"""Running a lesson: check, submit its job, judge its claims, draw, write the result."""

from __future__ import annotations

import re
import secrets
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lab import __version__
from lab.errors import UserError
from lab.jobs import JobsClient, run_job
from lab.lessons import preflight
from lab.lessons.contract import Judged, Lesson, LessonResult, Params, judge
from lab.report.results import result_folder, write_result
from lab.runtimes.protocol import Access, Runtime, Say
from lab.settings import CHECKOUT, LOGS, ROOT, Settings, StoreAccess, check_together
from lab.store.probe import probe

JOB_BASE_S = 120
JOB_PATIENCE = 10
"""A lesson's job may take this many times what it takes on a quiet machine, and `JOB_BASE_S` seconds more."""

_PASSING = re.compile(r"LAB\| (.*)|.*?(\[rank \d+/\d+.*)")


def visible(line: str) -> str | None:
    """What of a job's log line is for the user: the lab's own words and each rank's lines; else None."""
    match = _PASSING.match(line)
    return (match.group(1) or match.group(2)) if match else None


@dataclass(frozen=True)
class Host:
    """What a lesson may look at from the host, after its job: the store by the training keys, and refusals."""

    lesson: Lesson
    params: Params
    settings: Settings
    access: Access
    store: StoreAccess
    runtime: str

    def refusal(self, **changes: Any) -> dict[str, Any]:
        """What the lab answers when the parameters are changed so, before anything starts."""
        began = time.monotonic()
        params = replace(self.params, **changes)
        try:
            check_all(self.lesson, params, self.settings, self.access, self.runtime)
        except UserError as error:
            return {
                "refused": True,
                "message": str(error),
                "exit": error.exit_code,
                "seconds": time.monotonic() - began,
            }
        return {"refused": False, "message": "", "exit": 0, "seconds": time.monotonic() - began}


HostStep = Callable[[Host, dict[str, Any]], dict[str, Any]]


def check_all(
    lesson: Lesson, params: Params, settings: Settings, access: Access | None, runtime: str
) -> None:
    """Every refusal that needs no cluster; with one up, its real shape counts.

    Raises:
        UserError: the first thing wrong.
    """
    shape = (
        preflight.Shape(access.nodes, access.node_cpus)
        if access
        else preflight.Shape(settings.nodes, settings.node_cpus)
    )
    check_together(settings)
    preflight.check(lesson, params, shape)
    local_root = access.local_root if access else default_local_root(runtime)
    location = preflight.storage_location(lesson, params, local_root, settings.s3_bucket)
    preflight.check_storage(lesson, params, location, local_root, runtime)
    if location.kind == "s3" and settings.store != "external" and location.bucket != settings.s3_bucket:
        raise UserError(
            f"LAB_STORAGE={location} is in bucket {location.bucket!r}, but the training code's keys reach "
            f"{settings.s3_bucket!r} alone: use s3://{settings.s3_bucket}/PREFIX, or set S3_BUCKET before `make up`."
        )


def default_local_root(runtime: str) -> str:
    """The nodes' folder for local storage paths, as known before a cluster is up."""
    return "/lab/storage" if runtime == "compose" else str(ROOT / ".lab" / "storage" / "local")


def new_run_name(lesson: Lesson) -> str:
    """A run name that no other run has."""
    return f"{lesson.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def run_lesson(
    lesson: Lesson, params: Params, settings: Settings, runtime: Runtime, access: Access, say: Say, line: Say
) -> LessonResult:
    """Run one lesson on a cluster that is up.

    Args:
        say: takes the lab's own lines.
        line: takes every line of the job's log.

    Raises:
        UserError: a setting is wrong.
        EnvironmentBroken: the cluster or the store failed.
    """
    began = time.monotonic()
    check_all(lesson, params, settings, access, runtime.name)
    store = settings.store_access(access.store)
    probe(store)
    location = preflight.storage_location(lesson, params, access.local_root, settings.s3_bucket)
    run = params.name or new_run_name(lesson)
    log = LOGS / f"{run}.log"
    say(f"{lesson.name}: run {run}, {params.workers} ranks, storage {location}")
    say(f"log: {log}")
    client = JobsClient(access.dashboard, settings.ray_auth_token.get_secret_value())
    request = {"run": run, "storage": str(location), "params": asdict(params)}
    document = run_job(
        client,
        lesson.observe,
        request,
        log=log,
        say=line,
        limit_s=JOB_BASE_S + JOB_PATIENCE * lesson.seconds[1],
    )
    if lesson.host is not None:
        host = Host(lesson, params, settings, access, store, runtime.name)
        document["host"] = lesson.host(host, document)
    document["runtime"] = {"name": runtime.name, "shared_disk": access.shared_disk}
    folder = result_folder(ROOT, lesson.name, run)
    claims = tuple(judge(claim, document) for claim in lesson.claims)
    measurements, figures = _shown(lesson, document, folder, claims, say)
    result = LessonResult(
        lesson=lesson.name,
        run=run,
        runtime=runtime.name,
        claims=claims,
        measurements=measurements,
        figures=figures,
        files={"storage": f"{location}/{run}", "log": str(log), "results": str(folder)},
        environment=captured(document.get("environment", {}), settings) | runtime.captured(),
        params=asdict(params),
        seconds=round(time.monotonic() - began, 2),
    )
    write_result(folder, result, document)
    return result


def _shown(
    lesson: Lesson, document: dict[str, Any], folder: Path, claims: tuple[Judged, ...], say: Say
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Measurements and figures. After a training that failed there may be nothing to show: the claims say so."""
    try:
        return dict(lesson.measurements(document)), tuple(
            path.name for path in lesson.figures(document, folder)
        )
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        if all(claim.verdict != "fails" for claim in claims):
            raise
        say(f"{lesson.name}: no figures, for a claim failed and what they show is missing ({error!r})")
        return {}, ()


def captured(seen: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Where and with what it was measured, without secrets."""
    git = subprocess.run(
        ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    return {
        "lab": __version__,
        "revision": git.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **seen,
        "settings": settings.public(),
    }


def log_of(run: str) -> Path:
    """The log of a run.

    Raises:
        UserError: there is none.
    """
    path = LOGS / f"{run}.log"
    if not path.is_file():
        raise UserError(f"RUN={run!r} has no log below {LOGS}: that folder's names are the runs there are.")
    return path
