"""The one way in which ranks report: plain finite numbers, every score there, one checkpoint, the lab's epoch log."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import torch
from pyarrow.fs import LocalFileSystem
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2._internal.exceptions import CollectiveTimeoutError
from torch.optim.optimizer import register_optimizer_step_post_hook

from lab.storage import Location, Storage
from lab.training.records import begin_attempt, write_epoch, write_observation


class NonFiniteMetric(ValueError):
    """A metric is NaN or infinite. Nothing was reported, so the run's name still resumes (pitfall C2)."""


class MissingMetric(KeyError):
    """A metric that every report must carry is not there."""

    def __str__(self) -> str:
        return str(self.args[0])


class NotPlainMetric(TypeError):
    """A metric cannot be turned into a plain number, string, list or dict."""


class SharedFileName(ValueError):
    """Ranks would overwrite one another's files, because Ray merges their folders into one (pitfall C6)."""


class MissingRank(RuntimeError):
    """Some ranks did not report in time (pitfall F1)."""


class FirstStep:
    """When this process took its first optimizer step: `at`, in seconds since 1970, None until then."""

    def __init__(self) -> None:
        self.at: float | None = None
        # for the life of the process: torch calls the hooks of every optimizer in turn, so none may take itself away
        register_optimizer_step_post_hook(self._taken)

    def _taken(self, *_: Any) -> None:
        self.at = self.at or time.time()


@dataclass(frozen=True)
class Rank:
    """This worker's place in its run. Made by `join_run`, once, by every rank.

    `attempt` counts the starts of this run name from 0, over restarts and over `fit`s.
    """

    run: str
    storage: Storage
    attempt: int
    world_rank: int
    world_size: int
    local_rank: int
    node_rank: int
    started: float
    first_step: FirstStep

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which saves and writes for all."""
        return self.world_rank == 0


def join_run() -> Rank:
    """Find this worker's place in its run; every rank must call it, before it reports.

    The storage is the very filesystem object that the driver gave to `RunConfig`.

    Raises:
        MissingRank: a rank did not call it in time.
    """
    context = ray.train.get_context()
    where = context.get_storage()
    filesystem = where.storage_filesystem
    kind = "local" if isinstance(filesystem, LocalFileSystem) else "s3"
    storage = Storage(Location(kind, str(where.storage_fs_path)), filesystem)  # type: ignore[arg-type]
    run, world_rank, world_size = (
        context.get_experiment_name(),
        context.get_world_rank(),
        context.get_world_size(),
    )
    started = time.time()
    attempt = 0
    if world_rank == 0:
        attempt = begin_attempt(storage, run, {"time": started, "world_size": world_size})
    try:
        attempt = broadcast_from_rank_zero({"attempt": attempt})["attempt"]
    except CollectiveTimeoutError as error:
        raise _missing(error, "join the run") from error
    return Rank(
        run=run,
        storage=storage,
        attempt=attempt,
        world_rank=world_rank,
        world_size=world_size,
        local_rank=context.get_local_rank(),
        node_rank=context.get_node_rank(),
        started=started,
        first_step=FirstStep(),
    )


def report(
    rank: Rank,
    metrics: Mapping[str, Any],
    checkpoint_dir: Path | str | None = None,
    *,
    epoch: int | None = None,
    required: Sequence[str] = ("loss",),
    sharded: bool = False,
    **options: Any,
) -> None:
    """Report once; every rank must call it, equally often.

    Ray keeps rank 0's metrics. Rank 0 alone hands over its folder, unless `sharded`: then every rank does, and
    each of its file names must hold `rank-<r>` (`shard_name` makes such a name).

    Args:
        metrics: numbers, strings, or dicts of them; NumPy scalars and 0-d tensors are made plain.
        checkpoint_dir: a folder to upload; it may be deleted once this returns (not with an async upload).
        epoch: the epoch that is done, from 0; writes a row of the epoch log. None: no row.
        required: metrics that must be there, nested ones as "eval/accuracy"; the run's score is always required.
        sharded: every rank uploads.
        options: handed to `ray.train.report` as they are.

    Raises:
        NonFiniteMetric, MissingMetric, NotPlainMetric, SharedFileName: before anything is sent.
        MissingRank: another rank did not report in time.
    """
    plain = plain_metrics(metrics, epoch)
    check_required(plain, [*required, *_score()], epoch)
    checkpoint = None
    if checkpoint_dir is not None and (rank.first or sharded):
        if sharded:
            _check_shard_names(Path(checkpoint_dir), rank.world_rank)
        checkpoint = ray.train.Checkpoint.from_directory(str(checkpoint_dir))
    name = None
    if epoch is not None:
        # the attempt in the name: an orphan of a killed attempt never mixes with its successor (pitfall C3)
        name = f"checkpoint_epoch-{epoch:04d}_attempt-{rank.attempt:03d}"
        if rank.first:
            row = {
                "epoch": epoch,
                "attempt": rank.attempt,
                "time": time.time(),
                "world_size": rank.world_size,
                "metrics": plain,
                "checkpoint": name if checkpoint else None,
            }
            write_epoch(rank.storage, rank.run, row)
    if checkpoint is None:
        options.pop("validation", None)  # Ray refuses it on a rank that hands over no checkpoint
    print(line(rank, plain, epoch), flush=True)
    try:
        ray.train.report(plain, checkpoint=checkpoint, checkpoint_dir_name=name, **options)
    except CollectiveTimeoutError as error:
        raise _missing(error, "report" if epoch is None else f"report epoch {epoch}") from error


def observe_rank(rank: Rank, seen: Mapping[str, Any]) -> None:
    """Hand back what this rank saw, as `<run>/observations/rank-<r>-attempt-<k>.json`; a second call replaces."""
    place = {
        "world_rank": rank.world_rank,
        "world_size": rank.world_size,
        "local_rank": rank.local_rank,
        "node_rank": rank.node_rank,
        "started": rank.started,
        "first_step_at": rank.first_step.at,
    }
    write_observation(
        rank.storage, rank.run, rank.world_rank, rank.attempt, {**place, **_plain(dict(seen), "seen")}
    )


def shard_name(stem: str, rank: int, suffix: str = ".pt") -> str:
    """The file name of one rank's shard: `stem.rank-3.pt`."""
    return f"{stem}.rank-{rank}{suffix}"


def plain_metrics(metrics: Mapping[str, Any], epoch: int | None = None) -> dict[str, Any]:
    """Metrics as plain Python values.

    Raises:
        NonFiniteMetric: NaN or infinite, named with its epoch.
        NotPlainMetric: something else than numbers, strings, None, lists and dicts.
    """
    plain: dict[str, Any] = _plain(dict(metrics), "")
    for name, value in _leaves(plain):
        if isinstance(value, float) and not math.isfinite(value):
            where = "" if epoch is None else f" in epoch {epoch}"
            raise NonFiniteMetric(
                f"metric {name!r} is {value}{where}: nothing was reported; lower the learning rate or look at the "
                "data, then run the same name again to resume from the last checkpoint."
            )
    return plain


def check_required(metrics: Mapping[str, Any], required: Sequence[str], epoch: int | None = None) -> None:
    """See that each required metric is there as a number; "a/b" is `metrics["a"]["b"]` or `metrics["a/b"]`.

    Raises:
        MissingMetric: one is not; the sentence names those that are.
    """
    there = dict(_leaves(metrics))
    for name in required:
        value = there.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            where = "" if epoch is None else f" of epoch {epoch}"
            raise MissingMetric(
                f"metric {name!r} is missing from the report{where}, or no number: it has {', '.join(sorted(there))}."
            )


def line(rank: Rank, metrics: Mapping[str, Any], epoch: int | None) -> str:
    """The line that the host shows for this rank: `[rank 0/2] epoch 3 loss 0.123 ...`."""
    shown = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in _leaves(metrics)
    ]
    start = f"[rank {rank.world_rank}/{rank.world_size}]"
    where = [] if epoch is None else [f"epoch {epoch}"]
    return " ".join([start, *where, *(text for text in shown if not text.startswith("epoch "))])


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return value.item()
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return _plain(value.item(), name)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}/{key}" if name else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    raise NotPlainMetric(
        f"metric {name!r} is a {type(value).__name__}: report a number (for a tensor of many, its .mean().item())."
    )


def _leaves(metrics: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in metrics.items():
        name = f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            found += _leaves(value, name)
        elif isinstance(value, list):
            found += [(name, item) for item in value]
        else:
            found.append((name, value))
    return found


def _score() -> list[str]:
    # Ray has no public way to ask a worker for the run's configuration
    from ray.train.v2._internal.execution.context import get_train_context

    score = get_train_context().train_run_context.run_config.checkpoint_config.checkpoint_score_attribute
    return [str(score)] if score else []


def _check_shard_names(folder: Path, rank: int) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and f"rank-{rank}" not in path.relative_to(folder).as_posix().replace(
            "/", "."
        ).split("."):
            raise SharedFileName(
                f"{path.name!r} of rank {rank} would be overwritten by another rank's: "
                f"name it {shard_name(path.stem, rank, path.suffix)!r}."
            )


def _missing(error: Exception, what: str) -> MissingRank:
    cause = getattr(error, "cause", error)
    ranks = getattr(cause, "_missing_ranks", None)
    seconds = getattr(cause, "_timeout_s", None)
    named = f"rank {', '.join(map(str, ranks))}" if ranks else "a rank"
    within = f" within {seconds:.0f} s" if seconds else ""
    return MissingRank(f"{named} did not {what}{within}: every rank must call it equally often.")
