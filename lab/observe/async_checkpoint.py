"""The job of lesson `async-checkpoint`: sync against async upload, validation, a kill and a folder lost in mid-upload.

All in one fit. It consists of phases; each is begun once, and an attempt goes on with those not yet begun, so that
the phase `held` may kill its attempt and `naive` may fail its own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.validation_config import ValidationConfig, ValidationTaskConfig

from lab.cluster import ROLE_LABEL
from lab.leftovers import SNAPSHOT, find, named_by, uploads_of
from lab.observe.alive import dead, live_runs
from lab.observe.checkpoints import clean_run
from lab.observe.job import Job, say
from lab.observe.own_run import driver_setting, start_clean
from lab.observe.restore import download
from lab.observe.training import outcome_json
from lab.settings import StoreAccess
from lab.storage import Storage
from lab.training import state as states
from lab.training.checkpoints import own_directory
from lab.training.records import read_documents, write_document
from lab.training.report import Rank, join_run, report
from lab.training.run import fit
from lab.training.uploads import report_async

PHASES = ("measure", "validate", "kept", "held", "naive", "last")
MB = 1_000_000
SMALL = MB
HELD = 24 * MB
"""Bytes of the upload that is cut off: several parts of a multipart upload (5 MB at least each)."""
KEEP = 4
"""Checkpoints that stay; those of `validate` and one more, so that the large ones of `measure` are pruned."""
LIMIT_S = 90.0
NOTES = "phases"
PAUSES_S = (1.0, 0.5, 0.0)
"""What the validations wait: the first takes longest, so that order of ending is not order of reporting by chance."""


def phases(config: dict[str, Any]) -> None:
    """The training function: the phases that no attempt has begun."""
    rank = join_run()
    begun = broadcast_from_rank_zero([one["phase"] for one in notes(rank.storage, rank.run)])
    run = _Phases(rank, config)
    for phase in PHASES:
        if phase in begun:
            continue
        if rank.first:
            note(rank, phase, {"attempt": rank.attempt, "first_epoch": run.first_epoch, "began": time.time()})
        # nobody is ahead: a rank that dies in this phase leaves no other in the one before
        broadcast_from_rank_zero({"phase": phase})
        getattr(run, phase)()


def note(rank: Rank, phase: str, content: dict[str, Any]) -> None:
    """Write or replace a phase's note in the run's folder."""
    write_document(rank.storage, f"{rank.run}/{NOTES}/{phase}.json", {"phase": phase, **content})


def notes(storage: Storage, run: str) -> list[dict[str, Any]]:
    """The notes of the phases begun so far."""
    return read_documents(storage, f"{run}/{NOTES}")


class _Phases:
    def __init__(self, rank: Rank, config: dict[str, Any]) -> None:
        self.rank = rank
        self.config = config
        self.careless = bool(config["careless"])
        self.first_epoch = self._resume()
        self.epoch = self.first_epoch
        self.weights: dict[int, torch.Tensor] = {}

    def _resume(self) -> int:
        if self.careless:  # the twin trusts the folders instead of the snapshot
            names = [n for n in self.rank.storage.folders(self.rank.run) if n.startswith("checkpoint_epoch-")]
            return 1 + max((epoch_of(name) for name in names), default=-1)
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return 0
        with own_directory(checkpoint) as folder:
            return int(states.load(folder).epoch or 0)

    def measure(self) -> None:
        """Pairs of a sync and an async report of the same size, one waited for before the next begins."""
        rows = []
        for size in self.config["megabytes"]:
            for pair in range(self.config["pairs"]):
                # who goes first alternates, so that neither always meets the other's leftovers in caches
                for mode in ("sync", "async") if pair % 2 == 0 else ("async", "sync"):
                    rows.append(self._timed(mode, size, pair))
        self._note("measure", {"rows": rows})

    def _timed(self, mode: str, megabytes: int, pair: int) -> dict[str, Any]:
        asynchronous = mode == "async" and not self.careless
        with tempfile.TemporaryDirectory(prefix="lab-checkpoint-") as folder:
            began = time.perf_counter()
            saved = self._save(Path(folder), megabytes * MB)
            save_seconds = time.perf_counter() - began
            began = time.perf_counter()
            (report_async if asynchronous else report)(self.rank, self._metrics(), folder, epoch=self.epoch)
            stall = time.perf_counter() - began
        self._committed()
        seconds = time.perf_counter() - began
        row = {
            "mode": mode,
            "megabytes": megabytes,
            "pair": pair,
            "save_seconds": round(save_seconds, 4),
            "stall_seconds": round(stall, 4),
            "commit_seconds": round(seconds, 4),
            "saved": saved,
            "stored": self._stored(self._folder()),
        }
        self.epoch += 1
        return row

    def validate(self) -> None:
        """Three reports that ask for a validation; the loop goes on meanwhile, and asks for the results at the end."""
        reported = []
        first = self._folder()
        for pause in PAUSES_S:
            with tempfile.TemporaryDirectory(prefix="lab-checkpoint-") as folder:
                self._save(Path(folder), SMALL)
                asked = {"pause_s": pause, "instead": first if self.careless else ""}
                report_async(
                    self.rank,
                    self._metrics(),
                    folder,
                    epoch=self.epoch,
                    validation=ValidationTaskConfig(fn_kwargs=asked),
                )
            reported.append({"folder": self._folder(), "epoch": self.epoch, "returned": time.time()})
            self.epoch += 1
        mode = ray.train.CheckpointConsistencyMode.VALIDATED
        known = ray.train.get_all_reported_checkpoints(consistency_mode=mode, timeout_s=LIMIT_S)
        self._note(
            "validate",
            {
                "reported": reported,
                "known": {
                    Path(one.checkpoint.path).name: {"status": one.status.name, "metrics": one.metrics}
                    for one in known
                },
            },
        )

    def kept(self) -> None:
        """A temporary folder that is gone before its upload begins, through the lab's helper."""
        base = Path(tempfile.mkdtemp(prefix="lab-kept-"))
        saved, folder_was_there = self._vanishing(base, helper=not self.careless)
        self._committed()
        self._note(
            "kept",
            {
                "folder_there_when_upload_began": folder_was_there,
                "saved": saved,
                "stored": self._stored(self._folder()),
                "left_on_disk": sorted(path.name for path in base.iterdir()) if base.is_dir() else [],
            },
        )
        shutil.rmtree(base, ignore_errors=True)
        self.epoch += 1

    def naive(self) -> None:
        """The same past the helper: what Ray makes of it."""
        base = Path(tempfile.mkdtemp(prefix="lab-naive-"))
        # before: the controller may end this process at once
        self._note("naive", {"folder": self._folder(), "epoch": self.epoch})
        self._vanishing(base, helper=False)
        shutil.rmtree(base, ignore_errors=True)
        time.sleep(LIMIT_S / 3)  # until the controller ends this process, which the failed upload makes it do
        self.epoch += 1

    def _vanishing(self, base: Path, *, helper: bool) -> tuple[dict[str, str], bool]:
        gone, started = threading.Event(), threading.Event()
        there = []

        def late(checkpoint: Checkpoint, name: str) -> Checkpoint:
            """Ray's own upload, begun late, as behind another one in Ray's queue of uploads."""
            gone.wait(LIMIT_S)
            there.append(Path(checkpoint.path).is_dir())
            started.set()
            found: Checkpoint = (
                ray.train.get_context().get_storage().persist_current_checkpoint(checkpoint, name)
            )
            return found

        with tempfile.TemporaryDirectory(dir=base) as folder:
            saved = self._save(Path(folder), SMALL)
            if helper:
                report_async(self.rank, self._metrics(), folder, epoch=self.epoch, checkpoint_upload_fn=late)
            else:
                report(
                    self.rank,
                    self._metrics(),
                    folder,
                    epoch=self.epoch,
                    checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
                    checkpoint_upload_fn=late,
                )
        gone.set()
        if self.rank.first:
            started.wait(LIMIT_S)
        return saved, bool(there and there[0])

    def held(self) -> None:
        """An upload that stops after its first files, and a kill while it is open."""
        rank, opened = self.rank, threading.Event()
        committed = newest(rank.storage, rank.run) if rank.first else None
        folder_name = self._folder()

        def hold(checkpoint: Checkpoint, name: str) -> Checkpoint:
            """The manifest first, then part of the weights; the stream is never closed."""
            source = Path(checkpoint.path)
            target = f"{rank.run}/{name}"
            for file in sorted(source.iterdir()):
                if file.name != "model.pt":
                    rank.storage.write(f"{target}/{file.name}", file.read_bytes())
            content = (source / "model.pt").read_bytes()
            with rank.storage.filesystem.open_output_stream(rank.storage.at(f"{target}/model.pt")) as stream:
                stream.write(content[: 2 * len(content) // 3])
                stream.flush()
                opened.set()
                time.sleep(LIMIT_S)
            return checkpoint

        with tempfile.TemporaryDirectory(prefix="lab-checkpoint-") as folder:
            self._save(Path(folder), HELD)
            report_async(rank, self._metrics(), folder, epoch=self.epoch, checkpoint_upload_fn=hold)
        if not rank.first:
            time.sleep(LIMIT_S)  # until the controller ends this process
            return
        if not opened.wait(LIMIT_S):
            raise TimeoutError(f"the upload of epoch {self.epoch} was not open within {LIMIT_S:.0f} s")
        time.sleep(0.5)  # parts go to the store in the background
        self._note(
            "held",
            {
                "folder": folder_name,
                "epoch": self.epoch,
                "committed": committed,
                "killed": time.time(),
            },
        )
        os.kill(os.getpid(), signal.SIGKILL)

    def last(self) -> None:
        """One more checkpoint; and the cleaner is told to delete in this run, which is alive."""
        if self.rank.first:
            uploads = uploads_of(self.rank.storage, _access(self.rank.storage))
            answer = clean_run(self.rank.storage, self.rank.run, uploads, live_runs(), delete=True)
            again = find(self.rank.storage, self.rank.run, uploads)
            self._note(
                "last",
                {"cleaner": answer, "still_there": [one.name for one in again.folders] if again else []},
            )
        with tempfile.TemporaryDirectory(prefix="lab-checkpoint-") as folder:
            self._save(Path(folder), SMALL)
            report_async(self.rank, self._metrics(), folder, epoch=self.epoch)
        self._committed()

    def _metrics(self) -> dict[str, Any]:
        return {"loss": 1.0 / (self.epoch + 1), "epoch": self.epoch}

    def _folder(self) -> str:
        return f"checkpoint_epoch-{self.epoch:04d}_attempt-{self.rank.attempt:03d}"

    def _save(self, folder: Path, size: int) -> dict[str, str]:
        """Save a state whose weights take `size` bytes; rank 0 alone. Returns each file's SHA-256."""
        if not self.rank.first:
            return {}
        if size not in self.weights:
            self.weights = {size: torch.rand(size // 4)}  # one size at a time: 100 MB each
        self.weights[size][0] = float(self.epoch)
        states.save(
            folder,
            states.TrainingState(
                model={"weights": self.weights[size]},
                optimizer={},
                scheduler={},
                rng=[],
                epoch=self.epoch + 1,
                sampler_epoch=self.epoch + 1,
                history=[],
                world_size=self.rank.world_size,
            ),
        )
        return {path.name: _sha256(path.read_bytes()) for path in sorted(folder.iterdir())}

    def _stored(self, folder: str) -> dict[str, str]:
        if not self.rank.first:
            return {}
        storage, below = self.rank.storage, f"{self.rank.run}/{folder}"
        return {
            entry.path.removeprefix(f"{below}/"): _sha256(storage.read(entry.path))
            for entry in storage.files(below)
        }

    def _committed(self) -> None:
        ray.train.get_all_reported_checkpoints(
            consistency_mode=ray.train.CheckpointConsistencyMode.COMMITTED, timeout_s=LIMIT_S
        )

    def _note(self, phase: str, content: dict[str, Any]) -> None:
        if self.rank.first:
            begun = {"attempt": self.rank.attempt, "first_epoch": self.first_epoch}
            note(self.rank, phase, begun | content)


def validate(checkpoint: Checkpoint, pause_s: float, instead: str) -> dict[str, Any]:
    """Ray's task beside the training: read the checkpoint and say which epoch is in it.

    Args:
        pause_s: seconds that it takes.
        instead: as a twin, the folder to read whatever checkpoint is asked for.
    """
    if instead:
        where = f"{checkpoint.path.rstrip('/').rpartition('/')[0]}/{instead}"
        checkpoint = Checkpoint(path=where, filesystem=checkpoint.filesystem)
    with own_directory(checkpoint) as folder:
        saved = states.load(folder)
    time.sleep(pause_s)
    weights = (saved.model or {})["weights"]
    return {
        "validated_epoch": int(saved.epoch or 0) - 1,
        "validated_mark": float(weights[0]),
        "validated_at": time.time(),
    }


def epoch_of(folder: str) -> int:
    """The epoch in a name that the lab's report helper gives."""
    return int(folder.removeprefix("checkpoint_epoch-").partition("_")[0])


def newest(storage: Storage, run: str) -> int:
    """The newest epoch that the run's snapshot names."""
    return max(epoch_of(name) for name in named_by(storage.read(f"{run}/{SNAPSHOT}")))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _access(storage: Storage) -> StoreAccess | None:
    return StoreAccess.from_environment() if storage.location.kind == "s3" else None


def observe(job: Job) -> dict[str, Any]:
    """One fit through all phases, then the cleaner on what it left."""
    storage = job.storage()
    start_clean(storage, job, job.run)
    careless = job.broken("careless")
    say(f"{job.run}: sync and async reports of {job.params['megabytes']} MB, then two failures on purpose")
    # rank 0 saves, uploads and reads back up to 100 MB while the others wait for it
    with driver_setting("RAY_TRAIN_COLLECTIVE_TIMEOUT_S", 2 * LIMIT_S):
        outcome = fit(
            phases,
            {
                "megabytes": [int(size) for size in str(job.params["megabytes"]).split(",")],
                "pairs": int(job.params["pairs"]),
                "careless": careless,
            },
            storage=storage,
            name=job.run,
            workers=job.workers,
            role="head",
            keep=KEEP,
            score="epoch",
            max_failures=3,
            say=say,
            validation_config=ValidationConfig(
                fn=validate, ray_remote_kwargs={"num_cpus": 0, "label_selector": {ROLE_LABEL: "head"}}
            ),
        )
    seen = {one["phase"]: one for one in notes(storage, job.run)}
    held = seen.get("held", {}).get("folder", "")
    naive = seen.get("naive", {}).get("folder", "")
    return {
        "poll_interval": float(os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"]),
        "outcome": outcome_json(outcome),
        "phases": seen,
        "snapshot": list(named_by(storage.read(f"{job.run}/{SNAPSHOT}"))),
        "held_folder": _folder_json(storage, job.run, held),
        "naive_folder": _folder_json(storage, job.run, naive),
        "cleaning": _cleaning(job, storage),
    }


def _folder_json(storage: Storage, run: str, folder: str) -> dict[str, Any]:
    """What is stored in a folder that was never committed, and what the lab's loader says to it."""
    if not folder:
        return {}
    below = f"{run}/{folder}"
    with tempfile.TemporaryDirectory() as target:
        download(storage, below, Path(target))
        try:
            states.load(Path(target))
            says = ""
        except states.DamagedCheckpoint as error:
            says = str(error).replace(target, folder)
    return {
        "name": folder,
        "there": folder in storage.folders(run),
        "files": {entry.path.removeprefix(f"{below}/"): entry.size for entry in storage.files(below)},
        "loader_says": says,
    }


def _cleaning(job: Job, storage: Storage) -> dict[str, Any]:
    """Show, then delete, then look again; what stayed is compared by its content."""
    dead(job.run)
    uploads = uploads_of(storage, _access(storage))

    def stored() -> dict[str, int]:
        return {entry.path.removeprefix(f"{job.run}/"): entry.size for entry in storage.files(job.run)}

    before = stored()
    shown = clean_run(storage, job.run, uploads, live_runs(), delete=False)
    after_showing = stored()
    done = clean_run(storage, job.run, uploads, live_runs(), delete=not job.broken("careless"))
    again = clean_run(storage, job.run, uploads, live_runs(), delete=False)
    gone = sorted(set(before) - set(stored()))
    return {
        "shown": shown,
        "showing_deleted": sorted(set(before) - set(after_showing)),
        "done": done,
        "again": again,
        "deleted_folders": sorted({path.partition("/")[0] for path in gone}),
        "folders": [name for name in storage.folders(job.run) if name.startswith("checkpoint_")],
    }
