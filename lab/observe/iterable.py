"""The job of lesson `iterable`: one stream, read by PyTorch's loader and by Ray Data, and one without an end."""

from __future__ import annotations

import multiprocessing
from typing import Any

import ray.data
import ray.train
import ray.train.torch
import torch
from ray.data import DataContext, ExecutionOptions
from torch.utils.data import DataLoader

from lab.cluster import ROLE_LABEL
from lab.errors import EnvironmentBroken, UserError
from lab.observe.job import Job, say
from lab.observe.number_stream import Numbers, flat
from lab.observe.training import outcome_json
from lab.training.records import read_observations
from lab.training.report import join_run, observe_rank
from lab.training.run import fit
from lab.training.steps import by_steps
from lab.training.streams import agree_on_steps

EPOCHS = 2


def observe(job: Job) -> dict[str, Any]:
    """One fit: the bare stream, the one that shares itself out, Ray Data's, and the endless one."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    end = int(job.params["numbers"])
    say(
        f"{job.workers} ranks, {job.params['loader_workers']} loader workers each, read the stream 0..{end - 1}"
    )
    # the very same class of stream, given to Ray Data: one read task, whatever the number of ranks
    stream = ray.data.from_torch(Numbers(end)).map(flat)
    options = ExecutionOptions(label_selector={ROLE_LABEL: "worker"})
    split: list[str] = [] if job.broken("not-split") else ["train"]
    storage = job.storage()
    outcome = fit(
        read_streams,
        {
            "end": end,
            "loader_workers": int(job.params["loader_workers"]),
            "steps": int(job.params["steps"]),
            "batch": int(job.params["worker_batch"]),
            "new_iterator": job.broken("new-iterator"),
        },
        storage=storage,
        name=job.run,
        workers=job.workers,
        role="worker",
        fresh=True,
        datasets={"train": stream},
        dataset_config=ray.train.DataConfig(datasets_to_split=split, execution_options=options),
        say=lambda line: None,
    )
    if outcome.error:
        raise EnvironmentBroken(f"run {job.run} ended early: {outcome.error.kind}: {outcome.error.message}")
    rows = read_observations(storage, outcome.name, outcome.attempts - 1)
    return {
        "outcome": outcome_json(outcome),
        "ranks": [{key: row[key] for key in ("rank", "streams", "endless")} for row in rows],
    }


def read_streams(config: dict[str, Any]) -> None:
    """The training function: read each stream once, and the endless one for two epochs of `steps`."""
    rank = join_run()
    place = (rank.world_rank, rank.world_size)
    end, workers = config["end"], config["loader_workers"]
    shard = ray.train.get_dataset_shard("train")
    streams = {
        "bare": [_rows(batch) for batch in _loader(Numbers(end), workers, 1)],
        "shared": [_rows(batch) for batch in _loader(Numbers(end, place), workers, 1)],
        "ray-data": [
            list(
                zip(
                    batch["number"].tolist(),
                    [f"{name:08x}" for name in batch["reading"].tolist()],
                    strict=True,
                )
            )
            for batch in shard.iter_torch_batches(batch_size=1)
        ],
    }
    observe_rank(
        rank,
        {
            "streams": {
                name: [row for batch in batches for row in batch] for name, batches in streams.items()
            },
            "endless": _endless(config, place),
        },
    )


def _loader(stream: Numbers, workers: int, batch: int) -> Any:
    """A loader through `prepare_data_loader`, which leaves the loader of an IterableDataset as it is.

    Its workers are started afresh: forked, they would inherit the gRPC threads of Ray's worker (pitfall D9).
    """
    start = multiprocessing.get_context("spawn") if workers else None
    return ray.train.torch.prepare_data_loader(
        DataLoader(stream, batch_size=batch, num_workers=workers, multiprocessing_context=start)
    )


def _rows(batch: dict[str, Any]) -> list[tuple[int, str]]:
    return list(zip(batch["number"].tolist(), batch["reading"], strict=True))


def _endless(config: dict[str, Any], place: tuple[int, int]) -> dict[str, Any]:
    """Two epochs of `steps` batches from one iterator, every step a collective; and the refusal without steps."""
    steps = config["steps"]
    loader = _loader(Numbers(None, place), 0, config["batch"])
    batches = iter(loader)
    agreed = agree_on_steps(steps)
    epochs = []
    for _ in range(EPOCHS):
        if config["new_iterator"]:
            batches = iter(loader)
        seen = []
        for batch in by_steps(batches, steps):
            torch.distributed.all_reduce(torch.ones(1))
            seen.append(batch["number"].tolist())
        epochs.append(seen)
    try:
        by_steps(batches, None)
        refusal = ""
    except UserError as error:
        refusal = str(error)
    return {"agreed": agreed, "epochs": epochs, "without_steps": refusal}
