"""The `lab` command as a user runs it, and what the lab promises about mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.settings import CHECKOUT

LIMIT_S = 5.0
SECRET = "s3cret"


@dataclass(frozen=True)
class Answer:
    """What one command printed and how it ended."""

    code: int
    out: str
    err: str
    seconds: float


def lab(root: Path, *words: str, **variables: str) -> Answer:
    """Run the command with a root of its own and no knob but those given; never with an engine at hand."""
    kept = ("LAB_", "S3_", "STORE_", "RAY_", "COMPOSE_", "DOCKER_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(kept)}
    environment |= {
        "LAB_ROOT": str(root),
        "PATH": "/nonexistent",
        "LAB_RUNTIME": "embedded",
    }
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "lab", *words],
        cwd=CHECKOUT,
        env=environment | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


def left(root: Path) -> set[str]:
    """What a command left in its root beside `.env`."""
    return {path.name for path in root.iterdir()} - {".env"}


def assert_refused(
    root: Path, words: Sequence[str], variables: Mapping[str, str], parts: Sequence[str]
) -> None:
    """One sentence with all `parts`, exit 2, within the limit, no secret shown."""
    answer = lab(root, *words, **variables)
    assert answer.code == 2, answer
    assert answer.err.count("\n") == 1, "one sentence"
    assert "Traceback" not in answer.err
    assert SECRET not in answer.err
    for part in parts:
        assert part in answer.err
    busy = max(
        1.0, os.getloadavg()[0] / (os.cpu_count() or 1)
    )  # processes a core: others' work is not the lab's
    assert answer.seconds < LIMIT_S * busy
