"""The job of lesson `checkpoints`: one training function on three kinds of storage; what is then in each."""

from __future__ import annotations

import hashlib
import os
import random
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray.train
from ray.train.collective import barrier

from lab.observe.job import Job, say
from lab.observe.own_run import start_clean
from lab.observe.training import outcome_json
from lab.storage import Storage
from lab.training.records import read_epoch_log, read_observations
from lab.training.report import (
    MissingMetric,
    Rank,
    SharedFileName,
    join_run,
    observe_rank,
    report,
    shard_name,
)
from lab.training.run import fit

SCORES = (0.3, 0.9, 0.8, 0.1, 0.5)
"""Of the first five checkpoints: rank 0's, through the helper."""
SHARDED, SAME_NAMES, WHOLE, LAST = 0.6, 0.7, 0.4, 0.2
"""Of the checkpoint sharded by rank, of the two reported past the helper, and of the last one."""


@dataclass(frozen=True)
class Kind:
    """One kind of storage and what is kept there."""

    name: Literal["local", "pyarrow", "s3fs"]
    keep: int
    order: Literal["max", "min"]


KINDS = (Kind("local", 2, "max"), Kind("pyarrow", 1, "min"), Kind("s3fs", 1, "max"))


def blob(size: int, *about: object) -> bytes:
    """`size` bytes that depend on `about` alone."""
    return random.Random("/".join(map(str, about))).randbytes(size)


def save_and_report(config: dict[str, Any]) -> None:
    """Report ten times, in five ways, be refused twice, and write down what each left in the store right after it."""
    rank = join_run()
    run = _Reports(rank, int(config["bytes"]), bool(config["every_rank_uploads"]))
    for epoch, score in enumerate(SCORES):
        run.whole(epoch, score)
    # waits until the controller has registered all of them, and so pruned
    committed = ray.train.get_all_reported_checkpoints(
        consistency_mode=ray.train.CheckpointConsistencyMode.COMMITTED
    )
    after_five = {
        "ray_says": [[Path(one.checkpoint.path).name, one.metrics["eval"]["score"]] for one in committed],
        "stored": _checkpoint_folders(rank) if rank.first else [],
    }
    run.sharded(len(SCORES))
    run.past_helper("same-names", SAME_NAMES, "who.txt", "model.bin")
    run.past_helper("every-rank", WHOLE, shard_name("model", rank.world_rank, ".bin"))
    run.refused(len(SCORES) + 1)
    run.past_helper("no-score", None, "model.bin")
    run.whole(len(SCORES) + 1, LAST)
    observe_rank(
        rank, {"after_five": after_five, "reports": run.reports, "refused": run.refusals, "sent": run.sent}
    )


class _Reports:
    """The ways to report, on one rank. `sent` counts the bytes that this rank handed to Ray, by folder."""

    def __init__(self, rank: Rank, size: int, every_rank_uploads: bool) -> None:
        self.rank, self.size, self.every_rank_uploads = rank, size, every_rank_uploads
        self.reports: list[dict[str, Any]] = []
        self.refusals: dict[str, str] = {}
        self.sent: dict[str, int] = {}

    def whole(self, epoch: int, score: float) -> None:
        """Through the helper: rank 0's folder; as a twin, every rank's."""
        rank, everyone = self.rank, self.every_rank_uploads
        name = shard_name("model", rank.world_rank, ".bin") if everyone else "model.bin"
        notes = shard_name("epoch", rank.world_rank, ".txt") if everyone else "notes/epoch.txt"
        files = {name: blob(self.size, epoch), notes: f"epoch {epoch}\n".encode()}
        with _folder(files) as folder:
            report(rank, self._metrics(score), folder, epoch=epoch, sharded=everyone)
        self._saw(self._name(epoch), "rank 0", score, files, handed=rank.first or everyone)

    def sharded(self, epoch: int) -> None:
        """Through the helper, each rank its own part of the model; first with one name for all, which is refused."""
        rank = self.rank
        part = blob(self.size, epoch)[rank.world_rank :: rank.world_size]
        with _folder({"part.bin": part}) as folder:
            try:
                report(rank, self._metrics(SHARDED), folder, epoch=epoch, sharded=True)
            except SharedFileName as error:
                self.refusals["shared name"] = str(error)
        files = {shard_name("part", rank.world_rank, ".bin"): part}
        with _folder(files) as folder:
            report(rank, self._metrics(SHARDED), folder, epoch=epoch, sharded=True)
        self._saw(self._name(epoch), "sharded", SHARDED, files, handed=True)

    def past_helper(self, how: str, score: float | None, *names: str) -> None:
        """Ray's own report; every rank hands its folder over, or rank 0 alone a checkpoint that has no score."""
        rank = self.rank
        about = (how, rank.world_rank) if how == "same-names" else (how,)
        files = {
            name: f"rank {rank.world_rank}\n".encode() if name.endswith(".txt") else blob(self.size, *about)
            for name in names
        }
        handed = rank.first or score is not None
        with _folder(files) as folder:
            checkpoint = ray.train.Checkpoint.from_directory(folder) if handed else None
            metrics = {"loss": 1.0} if score is None else self._metrics(score)
            ray.train.report(metrics, checkpoint=checkpoint, checkpoint_dir_name=f"checkpoint_{how}")
        self._saw(f"checkpoint_{how}", how, score, files, handed=handed)

    def refused(self, epoch: int) -> None:
        """The helper with a checkpoint whose metrics lack the score."""
        with _folder({"model.bin": blob(self.size, "refused")}) as folder:
            try:
                report(self.rank, {"loss": 1.0}, folder, epoch=epoch)
            except MissingMetric as error:
                self.refusals["no score"] = str(error)

    def _metrics(self, score: float) -> dict[str, Any]:
        return {"loss": 1.0 - score, "eval": {"score": score}}

    def _name(self, epoch: int) -> str:
        return f"checkpoint_epoch-{epoch:04d}_attempt-{self.rank.attempt:03d}"

    def _saw(self, folder: str, how: str, score: float | None, files: dict[str, bytes], handed: bool) -> None:
        self.sent[folder] = sum(map(len, files.values())) if handed else 0
        seen: dict[str, Any] = {"folder": folder, "how": how, "score": score}
        if handed:
            seen["saved"] = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        barrier()  # a rank's report returns when its own upload is done, whatever the others still send
        if self.rank.first:
            # before the next report: the newest checkpoint is never pruned
            seen["stored"] = _stored(self.rank.storage, f"{self.rank.run}/{folder}")
        self.reports.append(seen)


def _folder(files: dict[str, bytes]) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="lab-checkpoint-")
    for name, content in files.items():
        path = Path(folder.name, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def _stored(storage: Storage, folder: str) -> dict[str, dict[str, Any]]:
    return {
        entry.path.removeprefix(f"{folder}/"): {
            "size": entry.size,
            "sha256": hashlib.sha256(storage.read(entry.path)).hexdigest(),
        }
        for entry in storage.files(folder)
    }


def _checkpoint_folders(rank: Rank) -> list[str]:
    # by their files: a store may list a folder that was emptied a moment ago
    inside = [entry.path.removeprefix(f"{rank.run}/").split("/") for entry in rank.storage.files(rank.run)]
    return sorted({parts[0] for parts in inside if len(parts) > 1 and parts[0].startswith("checkpoint_")})


def observe(job: Job) -> dict[str, Any]:
    """One fit on each kind of storage."""
    client = job.params["s3_client"]
    chosen = [kind for kind in KINDS if kind.name == "local" or client in ("both", kind.name)]
    storages = [(kind, _storage(job, kind), _name(job, kind)) for kind in chosen]
    for _, storage, name in storages:
        start_clean(storage, job, name)
    return {"kinds": {kind.name: _one(job, kind, storage, name) for kind, storage, name in storages}}


def _storage(job: Job, kind: Kind) -> Storage:
    """The run's own storage for its kind, the lab's default for the other."""
    own_is_s3 = job.storage_uri.startswith("s3://")
    if kind.name == "local":
        return job.storage(f"{job.local_root}/runs" if own_is_s3 else "")
    return job.storage("" if own_is_s3 else f"s3://{job.bucket}/runs", kind.name)


def _name(job: Job, kind: Kind) -> str:
    # both S3 clients write below the same prefix
    return f"{job.run}-s3fs" if kind.name == "s3fs" else job.run


def _one(job: Job, kind: Kind, storage: Storage, name: str) -> dict[str, Any]:
    keep = None if job.broken("careless") else kind.keep
    say(f"{kind.name}: {storage.location}/{name}, keep {keep} by {kind.order} of eval/score")
    outcome = fit(
        save_and_report,
        {"bytes": int(job.params["kilobytes"]) * 1024, "every_rank_uploads": job.broken("careless")},
        storage=storage,
        name=name,
        workers=job.workers,
        role="head",
        keep=keep,
        score="eval/score",
        order=kind.order,
        lab_state=False,
        say=say,
    )
    if outcome.error:
        say(f"run {name} failed: {outcome.error.kind}: {outcome.error.message}")
    files = storage.files(name)
    return {
        "name": name,
        "location": str(storage.location),
        "keep": kind.keep,
        "order": kind.order,
        "outcome": outcome_json(outcome),
        "best": [Path(path.rstrip("/")).name for path, _ in outcome.best],
        "table": [_score(row) for row in outcome.table],
        "ranks": read_observations(storage, name),
        "log": [[row["epoch"], row["time"]] for row in read_epoch_log(storage, name)],
        "files": [entry.path.removeprefix(f"{name}/") for entry in files],
        "on_disk": _walk(Path(storage.path, name)) if kind.name == "local" else None,
        "content": {
            entry.path.removeprefix(f"{name}/"): hashlib.sha256(storage.read(entry.path)).hexdigest()
            for entry in files
            if re.match(rf"{re.escape(name)}/checkpoint_[^/]+/", entry.path)
        },
    }


def _score(row: dict[str, Any]) -> float | None:
    found = row.get("eval")  # pandas fills a missing one with NaN
    return float(found["score"]) if isinstance(found, dict) else None


def _walk(root: Path) -> dict[str, int]:
    """Every file below `root` by the operating system's own listing, with its size; folders end in a slash."""
    found = {}
    for folder, folders, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            found[path.relative_to(root).as_posix()] = path.stat().st_size
        found |= {Path(folder, one).relative_to(root).as_posix() + "/": 0 for one in folders}
    return found
