"""The job of lesson `shards-sampler`: what each rank reads through `prepare_data_loader`, and the same at one rank."""

from __future__ import annotations

import os
import time
from typing import Any

import ray
import ray.train.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lab.observe.job import Job, say
from lab.observe.training import outcome_json
from lab.training.data import digits
from lab.training.loop import LoopConfig, evaluate
from lab.training.records import read_observations
from lab.training.report import join_run, observe_rank
from lab.training.run import fit
from lab.training.shards import worker_loader

BATCH = 32
SMALL_BATCH = 4
EVAL_ROWS = 7
LOADER_WORKERS = 2
LOADER_ROWS = 120
LOADER_EPOCHS = 20
FEW = 48
"""Rows of the loaders that compare generators."""


def observe(job: Job) -> dict[str, Any]:
    """Two fits on the head: the ranks that were asked for, and one rank alone."""
    storage = job.storage()
    config = {
        "rows": int(job.params["rows"]),
        "epochs": int(job.params["epochs"]),
        "repeats": int(job.params["repeats"]),
        "seed": job.seed,
        "fork": not job.quick,
        "set_epoch": not job.broken("no-set-epoch"),
        "exact": not job.broken("padded-evaluation"),
    }
    document: dict[str, Any] = {
        "constants": {
            "batch": BATCH,
            "small_batch": SMALL_BATCH,
            "eval_rows": EVAL_ROWS,
            "loader_rows": LOADER_ROWS,
            "loader_epochs": LOADER_EPOCHS,
        }
    }
    for part, workers, name in (("ranks", job.workers, job.run), ("one", 1, f"{job.run}-one-rank")):
        say(f"{workers} rank(s): who reads which sample")
        outcome = fit(
            read_shards,
            {**config, "part": part},
            storage=storage,
            name=name,
            workers=workers,
            role="head",
            fresh=bool(job.params["fresh"]) or part == "one",
            lab_state=False,
            say=say,
        )
        newest = outcome.attempts - 1
        document[part] = {
            "outcome": outcome_json(outcome),
            "ranks": read_observations(storage, name, newest) if newest >= 0 else [],
        }
    return document


def read_shards(config: dict[str, Any]) -> None:
    """Runs on every rank: read, look at settings, evaluate, and hand back what was seen."""
    rank = join_run()
    seen: dict[str, Any] = {"pid": os.getpid(), "settings": settings_table()}
    held_out = _few_held_out()
    settings = LoopConfig(dataset="digits")
    exact = evaluate(settings, _part_right(), held_out, rank.world_rank, rank.world_size)
    seen["exact"] = [round(exact["accuracy"] * exact["eval_total"]), int(exact["eval_total"])]
    seen["generators"] = [_epoch(prepared(FEW, shuffle=True, generator=_seeded(seed))) for seed in (1, 2)]
    if config["part"] == "one":
        torch.manual_seed(config["seed"])
        loader = prepared(config["rows"], shuffle=True)
        seen["sampler"] = type(loader.sampler).__name__
        seen["set_epoch"] = hasattr(loader.sampler, "set_epoch")
        seen["reads"] = [_epoch(loader) for _ in range(2)]
    else:
        seen |= _read_all(config)
        seen["padded"] = _padded_evaluation(held_out)
        if not config["exact"]:
            sums = torch.tensor(seen["padded"])
            dist.all_reduce(sums)
            seen["exact"] = sums.tolist()
        seen["loader_workers"] = [_loader_processes(config["seed"]) for _ in range(config["repeats"])]
        if config["fork"]:
            seen["fork"] = _forked()
    observe_rank(rank, seen)


def _read_all(config: dict[str, Any]) -> dict[str, Any]:
    rows, epochs = config["rows"], config["epochs"]
    world = dist.get_world_size()
    moved, still = prepared(rows, shuffle=True), prepared(rows, shuffle=True)
    even = []
    for epoch in range(epochs):
        if config["set_epoch"]:
            moved.sampler.set_epoch(config["seed"] * 1_000_003 + epoch)
        even.append(_epoch(moved))
    return {
        "even": even,
        "still": [_epoch(still) for _ in range(2)],
        "uneven": _epoch(prepared(rows + 1, shuffle=True)),
        "striped": _epoch(prepared(rows, shuffle=False)),
        "dropped": _epoch(prepared(rows, shuffle=False, drop_last=True)),
        # one sample short of a full batch on each rank: the padding fills it
        "dropped_small": _epoch(
            prepared(SMALL_BATCH * world - 1, shuffle=False, drop_last=True, batch_size=SMALL_BATCH)
        ),
        "own_seeds": [
            _epoch(
                ray.train.torch.prepare_data_loader(
                    DataLoader(
                        numbered(FEW),
                        batch_size=BATCH,
                        sampler=DistributedSampler(numbered(FEW), seed=seed),
                    )
                )
            )
            for seed in (1, 2)
        ],
    }


def numbered(rows: int) -> TensorDataset:
    """A data set whose samples are their own ids."""
    return TensorDataset(torch.arange(rows))


def prepared(rows: int, batch_size: int = BATCH, **options: Any) -> DataLoader[Any]:
    """A loader of numbered rows as Ray prepares it."""
    loader = DataLoader(numbered(rows), batch_size=batch_size, **options)
    return ray.train.torch.prepare_data_loader(loader)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _epoch(loader: DataLoader[Any]) -> list[int]:
    return [int(sample) for (batch,) in loader for sample in batch]


class OwnBatches(BatchSampler):  # type: ignore[misc]  # torch is not followed
    """A user's own batch sampler."""


def _own_init(worker: int) -> None:
    """A user's own `worker_init_fn`."""


def settings_table() -> dict[str, dict[str, Any]]:
    """A loader's settings before and after `prepare_data_loader`, for the four ways to write one.

    Returns:
        by way ("plain", "weighted sampler", "batch sampler", "own DistributedSampler"): {"before": settings, "after":
        settings}.
    """
    data = numbered(FEW)
    options: dict[str, Any] = {
        "num_workers": 2,
        "persistent_workers": True,
        "prefetch_factor": 5,
        "multiprocessing_context": "spawn",
        "pin_memory": True,
        "timeout": 30,
        "worker_init_fn": _own_init,
    }
    generator = _seeded(1)
    sharded = DistributedSampler(data, num_replicas=2, rank=0, shuffle=True)
    loaders = {
        "plain": DataLoader(data, batch_size=8, shuffle=True, drop_last=True, generator=generator, **options),
        "weighted sampler": DataLoader(
            data, batch_size=8, sampler=WeightedRandomSampler(torch.ones(FEW), FEW, generator=generator)
        ),
        "batch sampler": DataLoader(data, batch_sampler=OwnBatches(SequentialSampler(data), 8, False)),
        "own DistributedSampler": DataLoader(
            data, batch_size=8, sampler=sharded, drop_last=True, generator=generator, **options
        ),
    }
    table = {}
    for way, loader in loaders.items():
        before = _settings(loader, generator)
        after = _settings(ray.train.torch.prepare_data_loader(loader), generator)
        table[way] = {"before": before, "after": after}
    return table


def _settings(loader: DataLoader[Any], generator: torch.Generator) -> dict[str, Any]:
    context: Any = loader.multiprocessing_context
    return {
        "sampler": type(loader.sampler).__name__,
        "batch_sampler": None if loader.batch_sampler is None else type(loader.batch_sampler).__name__,
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "num_workers": loader.num_workers,
        "persistent_workers": loader.persistent_workers,
        "prefetch_factor": loader.prefetch_factor,
        "multiprocessing_context": context.get_start_method() if context else None,
        "generator": "yours" if loader.generator is generator else None,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": "yours" if loader.worker_init_fn is _own_init else None,
    }


def _few_held_out() -> TensorDataset:
    return TensorDataset(*(tensor[:EVAL_ROWS] for tensor in digits("held-out").tensors))


def _part_right() -> nn.Module:
    """A classifier that is right on some digits and wrong on others, the same in every process."""
    images, labels, _ = (tensor[:40] for tensor in digits("train").tensors)
    targets = nn.functional.one_hot(labels, 10).double()
    pixels = images.flatten(1).double()
    # ridge regression in closed form: nothing random, and in float64 no doubt about the largest output
    weights = torch.linalg.solve(pixels.T @ pixels + torch.eye(64).double(), pixels.T @ targets)
    layer = nn.Linear(64, 10, bias=False)
    with torch.no_grad():
        layer.weight.copy_(weights.T)
    return nn.Sequential(nn.Flatten(), layer)


def _padded_evaluation(held_out: TensorDataset) -> list[int]:
    """[correct, total] of this rank, by the loader that Ray prepares."""
    model = _part_right()
    loader = ray.train.torch.prepare_data_loader(DataLoader(held_out, batch_size=BATCH, shuffle=False))
    correct = total = 0
    with torch.no_grad():
        for x, y, _ in loader:
            correct += int((model(x).argmax(1) == y).sum())
            total += len(y)
    return [correct, total]


def _loader_processes(seed: int) -> dict[str, Any]:
    """Twenty epochs through loader processes from a fork server (pitfall D9)."""
    data = numbered(LOADER_ROWS)
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=seed)
    loader = worker_loader(data, BATCH // 2, sampler, LOADER_WORKERS)
    shards = ray.train.torch.prepare_data_loader(loader)
    began = time.monotonic()
    reads = []
    for epoch in range(LOADER_EPOCHS):
        sampler.set_epoch(epoch)
        reads.append(_epoch(shards))
    return {"reads": reads, "seconds": round(time.monotonic() - began, 2)}


def _forked() -> dict[str, Any]:
    """The same by the loader that Ray prepares, whose processes are forked: what happened, for the record."""
    loader = prepared(LOADER_ROWS, shuffle=True, num_workers=LOADER_WORKERS, timeout=20)
    began = time.monotonic()
    done, error = 0, ""
    try:
        for epoch in range(LOADER_EPOCHS):
            loader.sampler.set_epoch(epoch)
            _epoch(loader)
            done += 1
    except RuntimeError as raised:  # a dead loader process, or none that answers within the time-out
        error = str(raised).splitlines()[0]
    return {"epochs": done, "error": error, "seconds": round(time.monotonic() - began, 2)}
