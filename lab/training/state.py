"""The training state: everything that makes a resumed run bit-identical to one that never stopped (C8, C9).

A saved state is a folder: `model.pt`, `optimizer.pt`, `scheduler.pt`, `rng.pt`, `progress.json` and `manifest.json`,
which names every other file with its size and SHA-256. Read with `weights_only=True`; a plain torch script
needs `torch.load("model.pt", weights_only=True)` alone.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

SCHEMA = 1
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
PARTS = ("model", "optimizer", "scheduler", "epoch", "rng", "sampler", "history")
"""What a state consists of. `save(parts=...)` can leave one out, to show what it is for."""

_TENSOR_PARTS = ("model", "optimizer", "scheduler", "rng")


class DamagedCheckpoint(RuntimeError):
    """A saved state that must not be used. The sentence names the file and what to do."""


@dataclass(frozen=True)
class TrainingState:
    """One moment of a run. A part that was left out on purpose is None.

    `epoch` is the next epoch to do, from 0; `step` counts optimizer steps; `sampler_epoch` is what
    `set_epoch` gets in that epoch; `rng` holds one entry per rank; `history` one dict per epoch done.
    """

    model: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    rng: list[dict[str, Any]] | None = None
    epoch: int | None = None
    step: int = 0
    sampler_epoch: int | None = None
    history: list[dict[str, Any]] | None = None
    world_size: int = 1
    global_batch: int = 0
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


def bare(model: nn.Module) -> nn.Module:
    """The model itself, without the wrapper that `prepare_model` puts around it above one rank."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def seed_rank(seed: int, epoch: int, rank: int) -> None:
    """Seed Python, NumPy and torch for one rank: different on each rank, the same in each run."""
    digest = hashlib.sha256(f"{seed}/{epoch}/{rank}".encode()).digest()
    value = int.from_bytes(digest[:7], "big")
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def rng_state() -> dict[str, Any]:
    """This process's random number generators as plain lists and tensors (so that `weights_only` loads them)."""
    version, numbers, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    name, keys, position, has_gauss, cached = legacy
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [
            str(name),
            torch.from_numpy(keys.astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Put this process's generators where `rng_state` found them."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])


def gather_rng() -> list[dict[str, Any]] | None:
    """The generators of every rank, on rank 0; None elsewhere. Every rank must call it."""
    mine = rng_state()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    first = dist.get_rank() == 0
    everyone: list[Any] | None = [None] * dist.get_world_size() if first else None
    dist.gather_object(mine, everyone)
    return everyone


def restore_rank(state: TrainingState, rank: int, world_size: int) -> None:
    """Restore a rank's generators; with another world size than saved, seed anew from (seed, epoch, rank)."""
    if state.rng is not None and state.world_size == world_size:
        restore_rng(state.rng[rank])
    else:
        seed_rank(state.seed, state.epoch or 0, rank)


def save(folder: Path, state: TrainingState, parts: Collection[str] = PARTS) -> None:
    """Write a state into `folder` (made if need be); rank 0 alone calls it.

    Args:
        parts: what to keep, of `PARTS`; the manifest says what there is.

    Raises:
        ValueError: a part that is not one of `PARTS`.
    """
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        raise ValueError(
            f"no such part of the training state: {', '.join(unknown)} (there are {', '.join(PARTS)})"
        )
    folder.mkdir(parents=True, exist_ok=True)
    kept = [part for part in PARTS if part in parts]
    for part in _TENSOR_PARTS:
        if part in kept:
            torch.save(getattr(state, part), folder / f"{part}.pt")
    progress: dict[str, Any] = {
        "world_size": state.world_size,
        "global_batch": state.global_batch,
        "seed": state.seed,
        "extra": state.extra,
    }
    if "epoch" in kept:
        progress |= {"epoch": state.epoch, "step": state.step}
    if "sampler" in kept:
        progress["sampler_epoch"] = state.sampler_epoch
    if "history" in kept:
        progress["history"] = state.history
    (folder / PROGRESS).write_text(json.dumps(progress, allow_nan=False))
    names = [f"{part}.pt" for part in _TENSOR_PARTS if part in kept] + [PROGRESS]
    manifest = {
        "schema": SCHEMA,
        "epoch": state.epoch,
        "parts": kept,
        "files": {name: _fingerprint(folder / name) for name in names},
    }
    # last: a folder without a manifest was never finished
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def load(folder: Path, required: Collection[str] = PARTS) -> TrainingState:
    """Read a state, after checking every file against the manifest.

    Args:
        required: the parts that must be there.

    Raises:
        DamagedCheckpoint: a file is missing, changed or unreadable, or a required part was not saved.
    """
    manifest = read_manifest(
        (folder / MANIFEST).read_bytes() if (folder / MANIFEST).is_file() else None, str(folder)
    )
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise damaged(f"{path} is missing")
        if _fingerprint(path) != expected:
            raise damaged(f"{path} is not what was saved (its size or SHA-256 differs from {MANIFEST})")
    absent = [part for part in required if part not in manifest["parts"]]
    if absent:
        raise damaged(f"{folder} was saved without {', '.join(absent)}")
    try:
        tensors = {
            part: torch.load(folder / f"{part}.pt", weights_only=True, map_location="cpu")
            for part in _TENSOR_PARTS
            if part in manifest["parts"]
        }
        progress = json.loads((folder / PROGRESS).read_text())
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise damaged(f"{folder} cannot be read ({type(error).__name__})") from error
    return TrainingState(**tensors, **progress)


def read_manifest(content: bytes | None, where: str) -> dict[str, Any]:
    """Check a manifest's own form. `where` names its folder in messages.

    Raises:
        DamagedCheckpoint: there is none, it cannot be read, or it has another schema.
    """
    if content is None:
        raise damaged(f"{where}/{MANIFEST} is missing")
    try:
        manifest = json.loads(content)
        sound = isinstance(manifest["files"], dict) and isinstance(manifest["parts"], list)
        schema = manifest["schema"]
    except (ValueError, KeyError, TypeError):
        raise damaged(f"{where}/{MANIFEST} cannot be read") from None
    if schema != SCHEMA:
        raise damaged(f"{where}/{MANIFEST} has schema {schema!r}, this lab reads {SCHEMA}")
    if not sound or PROGRESS not in manifest["files"]:
        raise damaged(f"{where}/{MANIFEST} is incomplete")
    return dict(manifest)


def damaged(what: str) -> DamagedCheckpoint:
    """The exception for a checkpoint in which `what` is wrong."""
    return DamagedCheckpoint(
        f"checkpoint damaged: {what}; restore it from a copy, or start anew with --fresh."
    )


def _fingerprint(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}


def tensors_sha256(tensors: dict[str, Any]) -> str:
    """SHA-256 over names, types, shapes and bytes: equal if and only if bit-identical."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        array = tensor.detach().cpu().contiguous().numpy()
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def state_sha256(value: Any) -> str:
    """SHA-256 of nested dicts and lists of tensors and plain values: an optimizer's or generators' state."""
    digest = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            digest.update(tensors_sha256({"": item}).encode())
        elif isinstance(item, dict):
            for key in sorted(item, key=repr):
                digest.update(f"{key!r}:".encode())
                add(item[key])
        elif isinstance(item, list | tuple):
            digest.update(b"[")
            for part in item:
                add(part)
            digest.update(b"]")
        else:
            digest.update(f"{item!r};".encode())

    add(value)
    return digest.hexdigest()
