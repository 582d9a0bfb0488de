"""The job of lesson `global-batch`: the same training at several world sizes, with one global batch and without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import ray.train.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lab.observe.job import Job, say
from lab.observe.training import outcome_json
from lab.training.batch import worker_batch_size
from lab.training.data import digits
from lab.training.models import build_model
from lab.training.records import read_observations
from lab.training.report import join_run, observe_rank
from lab.training.run import fit
from lab.training.shards import GlobalBatchSampler, accumulated_backward, micro_batches
from lab.training.state import bare

MOMENTUM = 0.9


def observe(job: Job) -> dict[str, Any]:
    """One fit on the head for each world size; each does every case."""
    storage = job.storage()
    worlds = sorted({1, 2, job.workers})
    config = {
        "global_batch": int(job.params["global_batch"]),
        "worker_batch": int(job.params["worker_batch"]),
        "largest": int(job.params["largest"]),
        "epochs": int(job.params["epochs"]),
        "lr": float(job.params["lr"]),
        "seed": job.seed,
        "own_sampler": not job.broken("ray-sampler"),
        "share": not job.broken("undivided-accumulation"),
    }
    found: dict[str, Any] = {}
    for world in worlds:
        say(f"{world} rank(s): {len(CASES)} trainings on 1,536 images")
        name = f"{job.run}-world-{world}"
        outcome = fit(
            train_cases,
            config,
            storage=storage,
            name=name,
            workers=world,
            role="head",
            fresh=bool(job.params["fresh"]),
            lab_state=False,
            say=say,
        )
        newest = outcome.attempts - 1
        ranks = read_observations(storage, name, newest) if newest >= 0 else []
        found[str(world)] = {
            "outcome": outcome_json(outcome),
            # what is the same on all ranks comes from rank 0; the samples from each
            "cases": ranks[0]["cases"] if ranks else {},
            "ids": [rank["ids"] for rank in ranks],
        }
    compare_weights(found)
    return {"worlds": found}


def compare_weights(worlds: dict[str, Any]) -> None:
    """Put each case's distance from the one-rank training in the place of its 9,930 weights.

    `weights` becomes {"largest": of all absolute differences, "relative": norm of the difference over norm}.
    """
    alone = worlds["1"]["cases"]
    references = {name: torch.tensor(case["weights"], dtype=torch.float64) for name, case in alone.items()}
    for world in worlds.values():
        for name, case in world["cases"].items():
            reference = references[REFERENCE[name]]
            difference = torch.tensor(case["weights"], dtype=torch.float64) - reference
            case["weights"] = {
                "largest": float(difference.abs().max()),
                "relative": float(difference.norm() / reference.norm()),
            }


@dataclass(frozen=True)
class Case:
    """One training: its numbers, whether the global batch or the worker batch is fixed, its learning rate."""

    double: bool = True
    fixed_worker_batch: bool = False
    scaled_lr: bool = False
    accumulated: bool = False


CASES = {
    "float64": Case(),
    "float32": Case(double=False),
    "accumulated": Case(accumulated=True),
    "worker batch": Case(fixed_worker_batch=True),
    "worker batch, scaled": Case(fixed_worker_batch=True, scaled_lr=True),
}

REFERENCE = {
    "float64": "float64",
    "float32": "float32",
    "accumulated": "float64",
    "worker batch": "worker batch",
    "worker batch, scaled": "worker batch",
}
"""The one-rank training with which a case is compared."""


def train_cases(config: dict[str, Any]) -> None:
    """Runs on every rank: all cases, one after the other."""
    rank = join_run()
    cases: dict[str, Any] = {}
    ids: list[list[int]] = []
    for name, case in CASES.items():
        trained = Training(case, config, rank.world_rank, rank.world_size)
        trained.run(config["epochs"])
        cases[name] = {
            "case": asdict(case),
            "global_batch": trained.global_batch,
            "worker_batch": trained.worker_batch,
            "lr": trained.lr,
            "parts": trained.parts,
            "losses": trained.losses,
            "epoch_loss": trained.evaluated,
            "sizes": sorted(trained.sizes),
            "weights": flat(trained.model).tolist(),
        }
        if name == "float64":
            ids = trained.ids
    # one copy of the weights is enough: DDP keeps them the same on all ranks (lesson first-run)
    observe_rank(rank, {"cases": cases if rank.first else {}, "ids": ids})


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters in one float64 vector."""
    return torch.cat([value.detach().double().flatten() for value in bare(model).state_dict().values()])


class Training:
    """Plain SGD with momentum on the digits: no dropout, no batch norm, nothing random but the order."""

    def __init__(self, case: Case, config: dict[str, Any], rank: int, world_size: int) -> None:
        self.world_size = world_size
        self.config = config
        wanted = config["global_batch"]
        if case.fixed_worker_batch:
            self.worker_batch = config["worker_batch"]
            self.global_batch = self.worker_batch * world_size
        else:
            self.worker_batch = worker_batch_size(wanted, world_size)
            self.global_batch = wanted
        base = config["lr"]
        self.lr = base * world_size if case.scaled_lr else base
        self.parts = micro_batches(self.worker_batch, config["largest"]) if case.accumulated else 1
        dtype = torch.float64 if case.double else torch.float32
        images, labels, ids = digits("train").tensors
        self.data = TensorDataset(images.to(dtype), labels, ids)
        self.model = ray.train.torch.prepare_model(build_model("small-cnn", config["seed"]).to(dtype))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=MOMENTUM)
        self.sampler = GlobalBatchSampler(len(self.data), self.global_batch, world_size, rank, config["seed"])
        self.losses: list[float] = []
        self.evaluated: list[float] = []
        self.ids: list[list[int]] = []
        self.sizes: set[int] = set()

    def run(self, epochs: int) -> None:
        """Train; keeps each step's loss over the global batch, and after each epoch the loss over all samples."""
        torch.manual_seed(self.config["seed"])
        loader = self._loader()
        for epoch in range(epochs):
            for x, y, ids in self._batches(loader, epoch):
                self.optimizer.zero_grad()
                share = accumulated_backward(self.model, self._loss, x, y, self.parts)
                self.optimizer.step()
                self.losses.append(self._mean(share))
                self.sizes.add(len(ids))
                if epoch < 2:
                    self.ids.append(ids.tolist())
            self.evaluated.append(self._everything())

    def _loader(self) -> DataLoader[Any]:
        if self.config["own_sampler"]:
            return ray.train.torch.prepare_data_loader(
                DataLoader(self.data, batch_sampler=self.sampler), add_dist_sampler=False
            )
        loader = DataLoader(self.data, batch_size=self.worker_batch, shuffle=True)
        return ray.train.torch.prepare_data_loader(loader)

    def _batches(self, loader: DataLoader[Any], epoch: int) -> Iterator[Any]:
        self.sampler.set_epoch(epoch)
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        return iter(loader)

    def _loss(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(output, y)
        # the twin: each part's mean is added up whole, as if it were the batch's
        return loss if self.config["share"] else loss * self.parts

    def _mean(self, share: torch.Tensor) -> float:
        total = share.double()
        if self.world_size > 1:
            dist.all_reduce(total)
        return float(total / self.world_size)

    def _everything(self) -> float:
        images, labels, _ = self.data.tensors
        with torch.no_grad():
            return float(functional.cross_entropy(bare(self.model)(images), labels))
