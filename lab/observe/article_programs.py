"""Three small training programs as one types them from memory, and one that works.

Each has lines of the lab's own (`join_run`, `observe_rank`, the counted uploads) beside what is shown.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint
from torch import nn

from lab.training.report import join_run, observe_rank


@contextmanager
def counted_uploads() -> Iterator[list[str]]:
    """The checkpoint folders that this process uploads: Ray Train copies each with `pyarrow.fs.copy_files`."""
    sent: list[str] = []
    original = pyarrow.fs.copy_files

    def copy(source: Any, destination: Any, *rest: Any, **named: Any) -> Any:
        done = original(source, destination, *rest, **named)
        sent.append(Path(str(destination)).name)
        return done

    pyarrow.fs.copy_files = copy
    try:
        yield sent
    finally:
        pyarrow.fs.copy_files = original


def numbers_alone(config: dict[str, Any]) -> None:
    """Reports a loss and nothing else; asks for its shard without saying which."""
    rank = join_run()
    try:
        rows = ray.train.get_dataset_shard()
        without_name = "works"
    except KeyError as error:  # a reader's program ends here; this one goes on by the right name
        rows = ray.train.get_dataset_shard("train")
        without_name = f"{type(error).__name__}: {error.args[0]}"
    ids = _train_on(rows)
    for epoch in range(2):
        ray.train.report({"loss": 1.0 / (epoch + 1), "epoch": epoch})
    observe_rank(rank, {"without_name": without_name, "ids": ids})


def one_folder_for_all(config: dict[str, Any]) -> None:
    """Every rank hands the same folder over at each step; at last one that nobody made."""
    rank = join_run()
    times = [time.perf_counter()]
    with counted_uploads() as sent:
        for step in range(int(config["reports"])):
            checkpoint = Checkpoint.from_directory(config["folder"])
            mine = checkpoint if rank.first or not config["careful"] else None
            ray.train.report({"loss": 1.0 / (step + 1), "step": step}, checkpoint=mine)
            times.append(time.perf_counter())
    observe_rank(rank, {"uploads": sent, "seconds": _steps(times)})
    ray.train.report({"loss": 0.0}, checkpoint=Checkpoint.from_directory(config["never_made"]))


def never_starts(config: dict[str, Any]) -> None:
    """Asked for on more ranks than there are CPUs."""
    observe_rank(join_run(), {"started": True})


def working(config: dict[str, Any]) -> None:
    """The shard by its name; rank 0 alone saves, into a folder made for it, with each report."""
    rank = join_run()
    ids = _train_on(ray.train.get_dataset_shard("train"))
    model = ray.train.torch.prepare_model(nn.Linear(2, 1))
    times = [time.perf_counter()]
    with counted_uploads() as sent:
        for step in range(int(config["reports"])):
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = None
                if rank.first:
                    bare = model.module if hasattr(model, "module") else model
                    torch.save(bare.state_dict(), Path(folder, "model.pt"))
                    checkpoint = Checkpoint.from_directory(folder)
                ray.train.report({"loss": 1.0 / (step + 1), "step": step}, checkpoint=checkpoint)
            times.append(time.perf_counter())
    observe_rank(rank, {"ids": ids, "uploads": sent, "seconds": _steps(times)})


def _steps(times: list[float]) -> list[float]:
    return [round(later - earlier, 4) for earlier, later in pairwise(times)]


def _train_on(rows: Any) -> list[int]:
    """One pass over a shard of rows `{"id": i, "x": [a, b]}`, a step each 32 rows; the ids in their order."""
    model = ray.train.torch.prepare_model(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen: list[int] = []
    for batch in rows.iter_torch_batches(batch_size=32):
        optimizer.zero_grad()
        model(batch["x"].float()).square().mean().backward()
        optimizer.step()
        seen += batch["id"].tolist()
    return seen
