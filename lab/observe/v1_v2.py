"""The job of lesson `v1-v2`: the idioms of `lab.observe.v1_idioms` with RAY_TRAIN_V2_ENABLED unset, 1 and 0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lab.errors import EnvironmentBroken
from lab.observe.job import Job, say

SETTING = "RAY_TRAIN_V2_ENABLED"
LIMIT_S = 150.0
"""Of one process: it imports Ray and torch, and fits once."""
PROGRAM = "from lab.observe.v1_idioms import main; main()"


def observe(job: Job) -> dict[str, Any]:
    """One process a setting. The short form leaves the fit out where the variable is 1."""
    found = {}
    for setting in ("unset", "1", "0"):
        with_fit = setting != "1" or not job.quick
        given = "0" if setting == "unset" and job.broken("v1-default") else setting
        say(
            f"{SETTING} {'unset' if setting == 'unset' else '= ' + setting}{', with a fit' if with_fit else ''}"
        )
        found[setting] = _probe(job, given, f"{job.run}-{setting}", with_fit)
    return {"settings": found}


def _probe(job: Job, setting: str, name: str, with_fit: bool) -> dict[str, Any]:
    env = {key: value for key, value in os.environ.items() if key != SETTING}
    if setting != "unset":
        env[SETTING] = setting
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lab-v1-v2-") as folder:
        answer = Path(folder, "answer.json")
        command = [
            sys.executable,
            "-c",
            PROGRAM,
            str(answer),
            job.storage_uri,
            name,
            "fit" if with_fit else "",
        ]
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired as expired:
            sys.stderr.write((expired.stderr or b"").decode(errors="replace"))
            raise EnvironmentBroken(
                f"the idioms with {SETTING} {setting} took more than {LIMIT_S:.0f} s: look at `make status`."
            ) from None
        if done.returncode != 0 or not answer.is_file():
            sys.stderr.write(done.stderr)
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise EnvironmentBroken(f"the idioms with {SETTING} {setting} could not be run: {last}")
        found: dict[str, Any] = json.loads(answer.read_text())
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if "V2" in line]
    return {**found, "with_fit": with_fit, "said": said, "seconds": round(time.monotonic() - began, 2)}
