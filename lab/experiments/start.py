"""`make bench-start`: how long until training trains, from one run on one machine.

    python -m lab.experiments.start [LESSON ...]        default: every lesson

Seconds for `up`; with the cluster up, from the start of `lab run LESSON` to the lesson's first optimizer step; the
same for the same work under `torchrun` on this host; and the ratio of the two. The JSON of it all goes to
`results/bench-start/`. Nothing may be up before; what it starts it ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.errors import INTERRUPTED, EnvironmentBroken, LabError, UserError
from lab.lessons import find, lessons
from lab.runtimes.choice import choose, make_runtime
from lab.settings import CHECKOUT, ROOT, load_settings

RANKS = 2
EPOCHS = 2
UP_LIMIT_S = 600.0
LESSON_LIMIT_S = 900.0
TORCHRUN_LIMIT_S = 180.0


@dataclass(frozen=True)
class Start:
    """One way to start training: seconds from the command to its first optimizer step (None: it takes none)."""

    what: str
    first_step_s: float | None
    total_s: float


def first_steps(document: Any) -> Iterator[float]:
    """Every `first_step_at` anywhere in a document, seconds since 1970."""
    if isinstance(document, dict):
        found = document.get("first_step_at")
        if isinstance(found, int | float):
            yield float(found)
        for value in document.values():
            yield from first_steps(value)
    elif isinstance(document, list):
        for value in document:
            yield from first_steps(value)


def run(arguments: Sequence[str], limit_s: float, good: Sequence[int] = (0,)) -> tuple[float, float]:
    """Run a command of this Python's; returns when it began (seconds since 1970) and how long it took.

    Raises:
        EnvironmentBroken: it ended with another code than the `good` ones, or not within the limit.
    """
    began = time.time()
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=CHECKOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # as Ray and torchrun give a rank with one CPU
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentBroken(f"{' '.join(arguments)} did not end within {limit_s:.0f} s.") from None
    if done.returncode not in good:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise EnvironmentBroken(f"{' '.join(arguments)} ended with {done.returncode}: {''.join(last)}")
    return began, time.time() - began


def of_lesson(name: str) -> Start:
    """Run one lesson's short form on the cluster that is up."""
    run_name = f"bench-start-{time.strftime('%Y%m%d-%H%M%S')}"
    began, seconds = run(
        ["-m", "lab", "run", name, "--quick", "--name", run_name], LESSON_LIMIT_S, good=(0, 1)
    )
    document = json.loads((ROOT / "results" / name / run_name / "document.json").read_text())
    first = min(first_steps(document), default=None)
    return Start(name, None if first is None else first - began, seconds)


def of_torchrun() -> Start:
    """The same work under torchrun, on this host.

    Raises:
        EnvironmentBroken: torchrun failed.
    """
    with tempfile.TemporaryDirectory(prefix="lab-torchrun-") as folder:
        began, seconds = run(
            [
                *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"),
                *("-m", "lab.experiments.torchrun_script", folder, str(EPOCHS)),
            ],
            TORCHRUN_LIMIT_S,
        )
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*.json"))]
    if len(ranks) != RANKS:
        raise EnvironmentBroken(f"torchrun ran {len(ranks)} ranks of {RANKS}.")
    return Start(f"torchrun, {RANKS} ranks", min(first_steps(ranks)) - began, seconds)


def say(line: str) -> None:
    """A line of progress, beside the table."""
    print(line, file=sys.stderr, flush=True)


def measure(names: Sequence[str]) -> dict[str, Any]:
    """Everything, as one JSON object.

    Raises:
        UserError: no such lesson, or a cluster is up already.
        EnvironmentBroken: something did not work.
    """
    chosen = [find(name).name for name in names] or list(lessons())
    settings = load_settings()
    choice = choose(settings)
    if make_runtime(choice.name, settings).access() is not None:
        raise UserError("a cluster is up already, so its start cannot be measured: run `make down` first.")
    say(f"torchrun, then a cluster ({choice.name}) and {len(chosen)} lesson(s), each in its short form")
    reference = of_torchrun()
    try:
        _, up_s = run(["-m", "lab", "up"], UP_LIMIT_S)
        say(f"up in {up_s:.1f} s")
        starts = []
        for name in chosen:
            starts.append(of_lesson(name))
            say(f"{name}: {starts[-1].total_s:.1f} s")
    finally:
        run(["-m", "lab", "down"], UP_LIMIT_S)
    return {
        "runtime": choice.name,
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "up_s": up_s,
        "torchrun": asdict(reference),
        "lessons": [asdict(start) for start in starts],
    }


def table(found: dict[str, Any]) -> list[str]:
    """The lines that a person reads."""
    reference = found["torchrun"]["first_step_s"]
    lines = [
        f"runtime {found['runtime']}, {found['cores']} cores; seconds from the command's start; -: no optimizer step",
        f"{'':24s} {'first step':>10s} {'ratio':>6s} {'whole command':>14s}",
        f"{'make up':24s} {'':10s} {'':6s} {found['up_s']:14.1f}",
    ]
    for start in (found["torchrun"], *found["lessons"]):
        first = start["first_step_s"]
        step, ratio = ("-", "-") if first is None else (f"{first:.1f}", f"{first / reference:.1f}")
        lines.append(f"{start['what']:24s} {step:>10s} {ratio:>6s} {start['total_s']:14.1f}")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Measure, print, keep; the exit codes are those of `lab`."""
    try:
        found = measure(arguments)
    except LabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        return INTERRUPTED
    print("\n".join(table(found)))
    path = ROOT / "results" / "bench-start" / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")
    print(f"results: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
