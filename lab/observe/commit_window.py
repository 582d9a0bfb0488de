"""The job of lesson `commit-window`: a rank kills itself, many times in one fit, at each poll interval."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import ray.train

from lab.errors import EnvironmentBroken
from lab.leftovers import SNAPSHOT, NoUploads, find, named_by, remove
from lab.observe.alive import dead
from lab.observe.job import Job, say
from lab.observe.own_run import driver_setting, start_clean
from lab.observe.training import outcome_json
from lab.storage import Storage
from lab.training.checkpoints import own_directory
from lab.training.report import Rank, join_run, report
from lab.training.run import fit

POLL = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
COMMIT_LIMIT_S = 60.0
LOOK_S = 0.05
"""Seconds between two looks of the watcher at the snapshot."""
LATE_S = 2.0
"""Seconds beyond one poll interval that a late kill waits at least."""
UPLOADS = 2.0
"""... or so many times what the reports before took beyond one interval, if that is more."""


def report_and_die(config: dict[str, Any]) -> None:
    """One attempt: a report whose commit is awaited and timed; one after which rank 0 kills itself.

    Notes go to a folder on the node's own disk, which outlives the process: a note takes microseconds, and the kill
    shall come when it is due.
    """
    rank = join_run()
    notes = Path(config["notes"])
    kills: Sequence[Mapping[str, Any]] = config["kills"]
    first = _first_epoch(rank, by_listing=bool(config["by_listing"]))
    _note(
        notes,
        f"start-{rank.attempt:03d}-{rank.world_rank}",
        {"attempt": rank.attempt, "rank": rank.world_rank, "first_epoch": first, "started": rank.started},
    )
    epoch = first
    for epoch in range(first, first + int(config["awaited"])):
        _report(rank, epoch, int(config["bytes"]), notes)
        returned = time.time()
        _wait_for(rank, epoch)
        if rank.first:
            _note(
                notes,
                f"lag-{rank.attempt:03d}-{epoch:04d}",
                {"epoch": epoch, "attempt": rank.attempt, "seconds": time.time() - returned},
            )
    if rank.attempt >= len(kills):
        return
    epoch += 1
    _report(rank, epoch, int(config["bytes"]), notes)
    returned = time.time()
    if not rank.first:
        time.sleep(COMMIT_LIMIT_S)  # until the controller ends this process
        raise RuntimeError(f"rank 0 was to kill itself after epoch {epoch}, and did not.")
    kill = kills[rank.attempt]
    delay = _late(notes, float(config["interval"])) if kill["kind"] == "late" else float(kill["delay"])
    time.sleep(max(0.0, returned + delay - time.time()))
    _note(
        notes,
        f"kill-{rank.attempt:03d}",
        {
            "attempt": rank.attempt,
            "kind": kill["kind"],
            "epoch": epoch,
            "returned": returned,
            "killed": time.time(),
        },
    )
    os.kill(os.getpid(), signal.SIGKILL)


def _late(notes: Path, interval: float) -> float:
    """One poll and an upload, with room: predicted from the commits timed so far."""
    beyond = max([0.0, *(float(one["seconds"]) - interval for one in _read(notes, "lag"))])
    return interval + max(LATE_S, UPLOADS * beyond)


def _report(rank: Rank, epoch: int, size: int, notes: Path) -> None:
    folder = notes.parent / f"{notes.name}-checkpoint-{rank.world_rank}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.bin").write_bytes(epoch.to_bytes(4, "big") * (size // 4))
    report(rank, {"loss": 1.0 / (epoch + 1), "epoch": epoch}, folder, epoch=epoch)


def _first_epoch(rank: Rank, *, by_listing: bool) -> int:
    """The epoch to begin with: one more than that of the checkpoint that Ray hands out."""
    if by_listing:  # the twin: whoever trusts the folders resumes from one that was never committed
        names = [name for name in rank.storage.folders(rank.run) if name.startswith("checkpoint_epoch-")]
        return 1 + max((epoch_of(name) for name in names), default=-1)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with own_directory(checkpoint) as folder:
        content = (folder / "model.bin").read_bytes()
    return 1 + int.from_bytes(content[:4], "big")


def epoch_of(folder: str) -> int:
    """The epoch in a name that the lab's report helper gives: `checkpoint_epoch-0003_attempt-000`."""
    return int(folder.removeprefix("checkpoint_epoch-").partition("_")[0])


def newest(storage: Storage, run: str) -> int:
    """The newest epoch that the run's snapshot names, read from the store; -1 before the first commit."""
    try:
        return max((epoch_of(name) for name in named_by(storage.read(f"{run}/{SNAPSHOT}"))), default=-1)
    except (FileNotFoundError, ValueError):
        return -1  # not there yet, or (local path) half written this very moment


def _wait_for(rank: Rank, epoch: int) -> None:
    end = time.monotonic() + COMMIT_LIMIT_S
    while newest(rank.storage, rank.run) < epoch:
        if time.monotonic() > end:
            raise TimeoutError(f"epoch {epoch} was reported and not committed within {COMMIT_LIMIT_S:.0f} s")
        time.sleep(0.01)


def _note(folder: Path, name: str, content: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(content))


def _read(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{kind}-*.json"))]


@dataclass
class Watcher:
    """Reads a run's snapshot again and again, beside Ray; and the controller's processor time, once it is known.

    `looks` are (began, newest epoch), one whenever the epoch changes and one for each question asked later, so all
    are kept; times are seconds since 1970.
    """

    storage: Storage
    run: str
    looks: list[tuple[float, int]] = field(default_factory=list)
    cpu: list[tuple[float, float]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def watching(self) -> Iterator[Watcher]:
        """Watch while the block runs."""
        threads = [threading.Thread(target=one, daemon=True) for one in (self._look, self._sample)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(timeout=30)

    def between(self, begin: float, end: float) -> int:
        """The newest epoch in the snapshot at the last look that began after `begin` and before `end`.

        Raises:
            EnvironmentBroken: nobody looked in between.
        """
        seen = [epoch for at, epoch in self.looks if begin < at < end]
        if not seen:
            raise EnvironmentBroken(
                f"nobody looked at the snapshot of {self.run} between a kill and the restart: the machine is too busy."
            )
        return seen[-1]

    def load(self, begin: float, end: float) -> float | None:
        """Processor seconds of the controller per second between two moments; None when it was not seen."""
        inside = [(at, used) for at, used in self.cpu if begin <= at <= end]
        if len(inside) < 2 or inside[-1][0] - inside[0][0] < 0.5 * (end - begin):
            return None
        return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])

    def _look(self) -> None:
        while not self._stop.wait(LOOK_S):
            began = time.time()
            try:
                self.looks.append((began, newest(self.storage, self.run)))
            except OSError as error:  # a look that failed is no look; the next one is due
                say(f"the snapshot of {self.run} could not be read just now: {error}")

    def _sample(self) -> None:
        pid = None
        while not self._stop.wait(LOOK_S):
            if pid is None:
                pid = _controller()
                continue
            used = _processor_seconds(pid)
            if used is None:
                return
            self.cpu.append((time.time(), used))


def _controller() -> int | None:
    """The process id of this job's controller, which Ray puts on the driver's node; None while there is none."""
    from ray.util.state import list_actors
    from ray.util.state.exception import RayStateApiException

    job = ray.get_runtime_context().get_job_id()
    try:
        actors = list_actors(
            address=ray.get_runtime_context().gcs_address,
            filters=[("class_name", "=", "TrainController"), ("state", "=", "ALIVE"), ("job_id", "=", job)],
            detail=True,
            timeout=10,
        )
    except (RayStateApiException, OSError):
        return None
    return next((int(actor.pid) for actor in actors if actor.pid), None)


def _processor_seconds(pid: int) -> float | None:
    psutil: Any = importlib.import_module("psutil")  # Ray brings it along
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


def plan(interval: float, kills: int, *, all_at_once: bool = False) -> list[dict[str, Any]]:
    """The kills of one fit: at once, then at growing parts of the interval, the last one late."""
    spread = max(0, kills - 3)
    planned: list[dict[str, Any]] = [{"kind": "at once", "delay": 0.0}]
    planned += [{"kind": "in between", "delay": interval * (one + 1) / (spread + 1)} for one in range(spread)]
    planned += [{"kind": "at once", "delay": 0.0}] if kills > 2 else []
    planned += [{"kind": "late", "delay": 0.0}]
    if all_at_once:  # the twin: does not wait for the commit
        planned = [{**one, "kind": "hasty"} if one["kind"] == "late" else one for one in planned]
    return planned


def observe(job: Job) -> dict[str, Any]:
    """One fit at each poll interval, the longer one first."""
    cases = [
        (float(job.params["interval"]), job.run),
        (float(job.params["short_interval"]), f"{job.run}-short"),
    ]
    start_clean(job.storage(), job, *(run for _, run in cases))
    return {"intervals": [_one(job, interval, run) for interval, run in cases]}


def _one(job: Job, interval: float, run: str) -> dict[str, Any]:
    storage = job.storage()
    careless = job.broken("careless")
    kills = plan(interval, int(job.params["kills"]), all_at_once=careless)
    notes = Path(job.local_root, "commit-window", run)
    shutil.rmtree(notes, ignore_errors=True)
    say(f"poll interval {interval:g} s: rank 0 kills itself {len(kills)} times, run {run}")
    watcher = Watcher(storage, run)
    with driver_setting(POLL, interval), watcher.watching():
        outcome = fit(
            report_and_die,
            {
                "notes": str(notes),
                "kills": kills,
                "awaited": int(job.params["awaited"]),
                "interval": interval,
                "bytes": int(job.params["kilobytes"]) * 1024,
                "by_listing": careless,
            },
            storage=storage,
            name=run,
            workers=job.workers,
            role="head",
            max_failures=len(kills),
            lab_state=False,
            say=say,
        )
    starts, lags = _read(notes, "start"), _read(notes, "lag")
    killed = [_killed(kill, starts, watcher) for kill in _read(notes, "kill")]
    shutil.rmtree(notes, ignore_errors=True)
    found = find(storage, run, NoUploads())
    leftovers = [{"name": one.name, "bytes": one.bytes} for one in found.folders] if found else []
    if found and dead(run) and not careless:
        remove(storage, found, NoUploads())
    return {
        "interval": interval,
        "run": run,
        "planned": [kill["kind"] for kill in kills],
        "outcome": outcome_json(outcome),
        "kills": killed,
        "lags": [round(one["seconds"], 3) for one in lags],
        "median_lag": statistics.median([one["seconds"] for one in lags]) if lags else None,
        "leftovers": leftovers,
        "folders": [name for name in storage.folders(run) if name.startswith("checkpoint_")],
        "named": list(found.kept) if found else [],
    }


def _killed(kill: dict[str, Any], starts: list[dict[str, Any]], watcher: Watcher) -> dict[str, Any]:
    after = [one for one in starts if one["attempt"] == kill["attempt"] + 1]
    restarted = min((one["started"] for one in after), default=time.time())
    committed = watcher.between(kill["killed"], restarted)
    load = watcher.load(kill["returned"], kill["killed"]) if kill["kind"] == "late" else None
    return {
        "attempt": kill["attempt"],
        "kind": kill["kind"],
        "epoch": kill["epoch"],
        "after_seconds": round(kill["killed"] - kill["returned"], 4),
        "committed": committed,
        "first_epochs": [one["first_epoch"] for one in after],
        "restart_seconds": round(restarted - kill["killed"], 2),
        "controller_load": None if load is None else round(load, 4),
    }
