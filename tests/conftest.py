"""Shared by all tests: a root folder of their own, and one cluster a runtime for the whole session."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

# Before `lab.settings` is imported: the tests never touch the checkout's own `.env`, cluster or data.
_ROOT = Path(tempfile.mkdtemp(prefix="lab-tests-"))
os.environ["LAB_ROOT"] = str(_ROOT)
GIVEN_STORE = {name: value for name, value in os.environ.items() if name.startswith("S3_")}
"""A store that the user named: for `make store-check` alone."""
for _name in [
    name for name in os.environ if name.startswith(("S3_", "LAB_")) and not name.startswith("LAB_TEST_")
]:
    if _name not in ("LAB_ROOT", "LAB_REQUIRE_COMPOSE", "LAB_STORE", "LAB_BASE_IMAGE"):
        os.environ.pop(_name)

from lab.lessons import find  # noqa: E402
from lab.lessons.contract import LessonResult  # noqa: E402
from lab.lessons.options import parameters  # noqa: E402
from lab.lessons.run import run_lesson  # noqa: E402
from lab.runtimes.choice import make_runtime  # noqa: E402
from lab.runtimes.protocol import Access, Runtime  # noqa: E402
from lab.settings import Settings, load_settings  # noqa: E402

RUNTIMES = os.environ.get("LAB_TEST_RUNTIMES", "embedded,compose").split(",")
QUICK = os.environ.get("LAB_TEST_FORM", "quick") == "quick"


def free_port() -> int:
    """A port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up, shared by all tests of one runtime."""

    runtime: Runtime
    access: Access
    settings: Settings

    def run(self, lesson: str, *words: str, broken: str = "", **overrides: Any) -> LessonResult:
        """Run a lesson in the session's form; `overrides` are settings by field name."""
        settings = load_settings(runtime=self.runtime.name, quick=QUICK, **overrides)
        item = find(lesson)
        params = parameters(item, settings, words, broken)
        return run_lesson(item, params, settings, self.runtime, self.access, print, print)


@pytest.fixture(scope="session", params=RUNTIMES)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A head and two workers on each runtime, started once for all tests that use it."""
    name = str(request.param)
    os.environ["LAB_DASHBOARD_PORT"] = str(free_port())
    os.environ["LAB_S3_PORT"] = str(free_port())
    settings = load_settings(runtime=name)
    runtime = make_runtime(name, settings)
    try:
        access = runtime.up(print)
    except BaseException:
        print(runtime.diagnose())
        runtime.down(print)
        raise
    yield Cluster(runtime, access, settings)
    runtime.down(print)
    if name == "compose":
        for volume in subprocess.run(
            [
                "docker",
                "volume",
                "ls",
                "-q",
                "--filter",
                f"label=com.docker.compose.project={settings.project}",
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout.split():
            subprocess.run(
                ["docker", "volume", "rm", volume], check=True, timeout=30, stdout=subprocess.DEVNULL
            )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the quick form the tests marked `full` are not selected; pytest's closing line counts them."""
    left_out = [item for item in items if QUICK and item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failing test on a cluster says what the cluster's parts logged."""
    outcome = yield
    report = outcome.get_result()
    found = getattr(item, "funcargs", {}).get("cluster")
    if report.when == "call" and report.failed and isinstance(found, Cluster):
        report.sections.append(("cluster", found.runtime.diagnose()))


def pytest_unconfigure() -> None:
    """The tests' own root goes with them."""
    shutil.rmtree(_ROOT, ignore_errors=True)


def claims(result: LessonResult) -> dict[str, dict[str, Any]]:
    """A result's claims by id."""
    return {claim.id: asdict(claim) for claim in result.claims}
