"""The job of lesson `article`: the article's programs as typed from memory, and a working one, in four fits."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import ray.data
import ray.exceptions
import ray.train
from ray.train import CheckpointConfig, FailureConfig, RunConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.exceptions import TrainingFailedError

from lab.observe.article_programs import never_starts, numbers_alone, one_folder_for_all, working
from lab.observe.job import Job, role_cpus, say
from lab.observe.own_run import driver_setting, start_clean
from lab.observe.train_extra import without_default
from lab.storage import Storage
from lab.training.defaults import POLL_INTERVAL_S, TORCH_TIMEOUT_S
from lab.training.records import read_observations
from lab.training.run import failure_of, scaling

POLL = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
START_TIMEOUT_S = 3.0
KEEP = 2
PROGRAMS = ("numbers", "folder", "working", "crowd")


def observe(job: Job) -> dict[str, Any]:
    """Run the four programs; `careful` types the first three and the crowd as the working one does."""
    storage, careful = job.storage(), job.broken("careful")
    start_clean(storage, job, *(_name(job, which) for which in PROGRAMS))
    reports, rows = int(job.params["reports"]), int(job.params["rows"])
    own = Path(job.local_root, "article", job.run)
    folder = own / "my-checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.pt").write_bytes(bytes(int(job.params["kilobytes"]) * 1024))
    run = _Programs(job, storage)
    try:
        have = sum(role_cpus("head"))
        asked = job.workers if careful else have + 1
        config = {
            "reports": reports,
            "folder": str(folder),
            "never_made": str(folder if careful else own / "never-made"),
            "careful": careful,
        }

        def one_folder_reported() -> dict[str, Any]:
            say(f"1. every rank reports one folder {reports} times")
            return run.fit("folder", one_folder_for_all, config, keep=KEEP if careful else None)

        def crowd_asked_for() -> dict[str, Any]:
            say(f"3. {asked} ranks on {have} CPUs")
            return run.fit("crowd", never_starts, {}, workers=asked)

        # of two programs side by side one mostly waits: for Ray's poll, or for CPUs that there are not
        room = have >= 2 * job.workers
        say("as typed, at Ray's own poll interval")
        with driver_setting(POLL, None), ThreadPoolExecutor(1) as beside:
            waiting = beside.submit(one_folder_reported)
            if not room:
                waiting.result()
            say("2. reports without a checkpoint; a shard without a name")
            numbers = run.fit("numbers", working if careful else numbers_alone, {"reports": 2}, rows=rows)
            one_folder = waiting.result()
        with (
            driver_setting(POLL, POLL_INTERVAL_S),
            driver_setting(START_TIMEOUT, START_TIMEOUT_S),
            ThreadPoolExecutor(2) as beside,
        ):
            waiting = beside.submit(crowd_asked_for)
            if not room:
                waiting.result()
            imports = beside.submit(without_default)
            say("4. a version that works")
            works = run.fit("working", working, {"reports": reports}, rows=rows, keep=KEEP)
            crowd, train_extra = waiting.result(), imports.result()
    finally:
        shutil.rmtree(own)
    return {
        "numbers": numbers,
        "folder": one_folder,
        "working": works,
        "crowd": {**crowd, "have": have, "asked": asked, "start_timeout_s": START_TIMEOUT_S},
        "default_start_limit": FailureConfig().controller_failure_limit,
        "keep": KEEP,
        "driver_context": _driver_context(),
        "train_extra": train_extra,
    }


class _Programs:
    """Runs one program after another, each under a name of its own."""

    def __init__(self, job: Job, storage: Storage) -> None:
        self.job, self.storage = job, storage

    def fit(
        self,
        which: str,
        program: Callable[[dict[str, Any]], None],
        config: dict[str, Any],
        *,
        workers: int = 0,
        rows: int = 0,
        keep: int | None = None,
    ) -> dict[str, Any]:
        """`TorchTrainer(program).fit()` and what can be seen of it: the result or what was raised, ranks, folders."""
        name = _name(self.job, which)
        data = ray.data.from_items([{"id": i, "x": [i / rows, 1.0]} for i in range(rows)]) if rows else None
        trainer = TorchTrainer(
            program,
            train_loop_config=config,
            torch_config=TorchConfig(timeout_s=int(TORCH_TIMEOUT_S)),
            scaling_config=scaling(workers or self.job.workers, "head", None),
            run_config=RunConfig(
                name=name,
                storage_path=self.storage.path,
                storage_filesystem=self.storage.filesystem,
                checkpoint_config=CheckpointConfig(num_to_keep=keep),
                # Ray's own limit is none at all: it would try to start the ranks without end
                failure_config=FailureConfig(controller_failure_limit=1),
            ),
            datasets={"train": data} if data is not None else None,
        )
        began = time.monotonic()
        ended = _ended(trainer)
        seconds = time.monotonic() - began
        folders = [one for one in self.storage.folders(name) if one.startswith("checkpoint_")]
        return {
            "name": name,
            **ended,
            "seconds": round(seconds, 2),
            "ranks": read_observations(self.storage, name),
            "folders": {one: len(self.storage.files(f"{name}/{one}")) for one in folders},
        }


def _ended(trainer: Any) -> dict[str, Any]:
    try:
        result = trainer.fit()
    except (TrainingFailedError, ray.exceptions.RayError) as raised:
        cause = failure_of(raised)
        return {
            "result": None,
            "raised": type(raised).__name__,
            "training_failed": isinstance(raised, TrainingFailedError),
            "cause": cause.kind,
            "message": cause.message,
        }
    table = result.metrics_dataframe
    return {
        "result": {
            "metrics": result.metrics,
            "rows": 0 if table is None else len(table),
            "error": None if result.error is None else str(result.error),
            "checkpoint": Path(result.checkpoint.path).name if result.checkpoint else None,
        },
        "raised": None,
        "training_failed": False,
        "cause": "",
        "message": "",
    }


def _driver_context() -> str:
    try:
        return f"works: {ray.train.get_context().get_world_size()}"
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).partition('. ')[0]}"


def _name(job: Job, which: str) -> str:
    return f"{job.run}-{which}"
