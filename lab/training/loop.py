"""The one resumable reference loop. Runs on every rank of a `TorchTrainer`; see `run.fit` for the driver's side."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lab.errors import UserError
from lab.training import state as states
from lab.training.batch import worker_batch_size
from lab.training.checkpoints import own_directory
from lab.training.data import digits, linear_toy
from lab.training.models import build_model
from lab.training.report import Rank, join_run, observe_rank, report


class PlannedCrash(RuntimeError):
    """The crash that `LoopConfig.crash_at` asks for."""


@dataclass(frozen=True)
class LoopConfig:
    """What the reference loop is told. Epochs count from 0; sizes are samples.

    From `prepare_model` on, the fields are switches with which a lesson breaks one mechanism on purpose.
    """

    dataset: Literal["digits", "linear"] = "digits"
    rows: int = 1000
    """Rows of the linear toy."""
    model: Literal["small-cnn", "linear"] = "small-cnn"
    dropout: float = 0.0
    epochs: int = 8
    global_batch: int = 64
    lr: float = 3e-3
    optimizer: Literal["adam", "sgd"] = "adam"
    scheduler_step: int = 4
    """Epochs between two steps of StepLR."""
    scheduler_gamma: float = 0.5
    seed: int = 0
    checkpoint_every: int = 1
    """Epochs between two checkpoints; the last epoch always has one. 0: none at all."""
    evaluate: bool = True
    loader_workers: int = 0
    other_world_size: Literal["keep", "refuse"] = "keep"
    """When resumed with another number of ranks: keep the global batch (each rank takes more or less), or refuse."""
    record_epochs: int = 2
    """Of the first so many epochs of an attempt, which sample ids a rank saw goes into its observations."""

    prepare_model: bool = True
    prepare_loader: bool = True
    set_epoch: bool = True
    shuffled_labels: bool = False
    late_report: bool = False
    """One more report after the last epoch, without a checkpoint, with the metric `late` = 1."""
    saved_parts: tuple[str, ...] = states.PARTS
    stop_after_epoch: int | None = None
    crash_at: tuple[int, int] | None = None
    """(epoch, batch) before which the last rank raises, in attempt 0 alone."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `train_loop_config`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LoopConfig:
        """The opposite of `to_dict`; also takes lists for tuples, as JSON gives them.

        Raises:
            UserError: a field that there is not.
        """
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UserError(
                f"the loop has no setting {', '.join(unknown)}: it has {', '.join(sorted(known))}."
            )
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        return cls(**given)


def train_loop(config: dict[str, Any]) -> None:
    """Train, report each epoch, save and resume; `config` is `LoopConfig.to_dict()`.

    Raises:
        UserError: the ranks do not divide the global batch, or the run was begun with another batch.
        lab.training.state.DamagedCheckpoint: the checkpoint to resume from is not what was saved.
    """
    settings = LoopConfig.from_dict(config)
    Training(settings, join_run(), restored(settings)).run()


class Training:
    """The loop's moving parts on one rank: starts anew, or from a saved state."""

    def __init__(self, settings: LoopConfig, rank: Rank, saved: states.TrainingState | None = None) -> None:
        self.settings = settings
        self.rank = rank
        worker_batch = worker_batch_size(settings.global_batch, rank.world_size)
        self.train_set, self.held_out = _datasets(settings)
        model = build_model(settings.model, settings.seed, settings.dropout)
        if saved and saved.global_batch != settings.global_batch:
            raise UserError(
                f"global batch {settings.global_batch} differs from the {saved.global_batch} with which run "
                f"{rank.run} was begun: use {saved.global_batch}, another name, or --fresh."
            )
        if saved and settings.other_world_size == "refuse" and saved.world_size != rank.world_size:
            raise UserError(
                f"workers={rank.world_size} differs from the {saved.world_size} with which the state of run {rank.run} "
                f"was saved: use {saved.world_size}, or other_world_size='keep', which keeps the global batch of "
                f"{saved.global_batch}."
            )
        if saved and saved.model is not None:
            model.load_state_dict(saved.model)
        self.model = ray.train.torch.prepare_model(model) if settings.prepare_model else model
        self.optimizer = _optimizer(settings, self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(
            self.optimizer, settings.scheduler_step, settings.scheduler_gamma
        )
        # order of construction: StepLR writes into the optimizer's groups, so both are loaded after both exist
        if saved and saved.optimizer is not None:
            self.optimizer.load_state_dict(saved.optimizer)
        if saved and saved.scheduler is not None:
            self.scheduler.load_state_dict(saved.scheduler)
        self.epoch = (saved.epoch or 0) if saved else 0
        self.step = saved.step if saved else 0
        self.sampler_epoch = (saved.sampler_epoch or 0) if saved else 0
        self.history = list(saved.history or []) if saved else []
        self.resumed_from = self.epoch if saved else None
        loader = DataLoader(
            self.train_set, batch_size=worker_batch, shuffle=True, num_workers=settings.loader_workers
        )
        # prepare_data_loader drops a generator, a batch sampler, prefetching and more (D1): none is used here
        self.loader = ray.train.torch.prepare_data_loader(loader) if settings.prepare_loader else loader
        # last: nothing after this draws a random number before the first batch
        if saved:
            states.restore_rank(replace(saved, seed=settings.seed), rank.world_rank, rank.world_size)
        else:
            states.seed_rank(settings.seed, 0, rank.world_rank)
        self.ids: list[dict[str, Any]] = []
        self.first_gradient: str | None = None

    def run(self) -> None:
        """Train the epochs that are left, report each, and hand back what this rank saw."""
        metrics: dict[str, Any] = {}
        while self.epoch < self.settings.epochs:
            metrics = self.do_epoch()
            stop = self.settings.stop_after_epoch
            if stop is not None and self.epoch > stop:
                break
        if self.settings.late_report:
            # a complete run that is resumed trains nothing: its last epoch is the saved history's
            report(self.rank, {**(metrics or self.history[-1]), "late": 1})
        observe_rank(self.rank, self.seen())

    def do_epoch(self) -> dict[str, Any]:
        """Train and report one epoch; returns its metrics."""
        settings, rank = self.settings, self.rank
        began = time.perf_counter()
        self._set_epoch()
        self.model.train()
        losses: list[torch.Tensor] = []
        seen: list[int] = []
        for batch, (x, y, ids) in enumerate(self.loader):
            self._maybe_crash(batch)
            if self.first_gradient is None:
                self.first_gradient = _local_gradient(settings, states.bare(self.model), x, y)
            self.optimizer.zero_grad()
            loss = _loss(settings, self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.step += 1
            losses.append(loss.detach().double() * len(x))
            seen += ids.tolist()
        if len(self.ids) < settings.record_epochs:
            self.ids.append({"epoch": self.epoch, "ids": seen})
        metrics: dict[str, Any] = {
            "epoch": self.epoch,
            # over all ranks: the history is then the same on each, whoever's state a resumed run starts from
            "loss": _mean(torch.stack(losses).sum(), len(seen), rank.world_size),
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "step": self.step,
        }
        if settings.evaluate:
            metrics |= evaluate(
                settings, states.bare(self.model), self.held_out, rank.world_rank, rank.world_size
            )
        metrics["seconds"] = time.perf_counter() - began
        self.scheduler.step()
        self.history.append({key: value for key, value in metrics.items() if key != "seconds"})
        done = self.epoch
        self.epoch += 1
        self.sampler_epoch += 1
        self._report(metrics, done)
        return metrics

    def _set_epoch(self) -> None:
        # at one rank there is no DistributedSampler and so no such method (D2)
        sampler: Any = getattr(self.loader, "sampler", None)
        if self.settings.set_epoch and hasattr(sampler, "set_epoch"):
            # Ray makes the sampler with seed 0; folded in here, the seed decides the order too
            sampler.set_epoch(self.settings.seed * 1_000_003 + self.sampler_epoch)

    def _maybe_crash(self, batch: int) -> None:
        crash = self.settings.crash_at
        last = self.rank.world_rank == self.rank.world_size - 1
        if crash is not None and self.rank.attempt == 0 and last and (self.epoch, batch) == crash:
            raise PlannedCrash(f"planned crash in epoch {self.epoch} before batch {batch}")

    def _report(self, metrics: dict[str, Any], done: int) -> None:
        every = self.settings.checkpoint_every
        due = every > 0 and (self.epoch % every == 0 or self.epoch == self.settings.epochs)
        if not due:
            report(self.rank, metrics, epoch=done)
            return
        rng = states.gather_rng()
        with tempfile.TemporaryDirectory(prefix="lab-checkpoint-") as folder:
            if self.rank.first:
                states.save(Path(folder), self._state(rng), self.settings.saved_parts)
            report(self.rank, metrics, folder, epoch=done)

    def _state(self, rng: list[dict[str, Any]] | None) -> states.TrainingState:
        return states.TrainingState(
            model=states.bare(self.model).state_dict(),
            optimizer=self.optimizer.state_dict(),
            scheduler=self.scheduler.state_dict(),
            rng=rng,
            epoch=self.epoch,
            step=self.step,
            sampler_epoch=self.sampler_epoch,
            history=self.history,
            world_size=self.rank.world_size,
            global_batch=self.settings.global_batch,
            seed=self.settings.seed,
        )

    def seen(self) -> dict[str, Any]:
        """What this rank observed: who it is, fingerprints of all it holds, the sample ids it was given."""
        context = ray.get_runtime_context()
        return {
            "pid": os.getpid(),
            "node_id": context.get_node_id(),
            "node_ip": ray.util.get_node_ip_address(),
            "omp_threads": os.environ.get("OMP_NUM_THREADS"),
            "torch_threads": torch.get_num_threads(),
            "parameters_sha256": states.tensors_sha256(states.bare(self.model).state_dict()),
            "optimizer_sha256": states.state_sha256(self.optimizer.state_dict()),
            "scheduler_sha256": states.state_sha256(self.scheduler.state_dict()),
            "rng_sha256": states.state_sha256(states.rng_state()),
            "local_gradient_sha256": self.first_gradient,
            "ids": self.ids,
            "history": self.history,
            "resumed_from": self.resumed_from,
            "finished": time.time(),
        }


def evaluate(
    settings: LoopConfig, model: nn.Module, dataset: TensorDataset, rank: int, world_size: int
) -> dict[str, float]:
    """Evaluate exactly (D3): each rank takes every `world_size`-th sample, nothing is padded, sums are added up.

    Returns:
        `eval_loss`, `eval_total`, and for digits `accuracy`: the single process's values, on every rank.
    """
    x, y, _ = (tensor[rank::world_size] for tensor in dataset.tensors)
    sums = torch.zeros(3, dtype=torch.float64)
    training = model.training
    model.eval()
    with torch.no_grad():
        if len(x):
            output = model(x)
            correct = (output.argmax(1) == y).sum() if settings.dataset == "digits" else torch.tensor(0)
            total_loss = _loss(settings, output, y).double() * len(x)
            sums = torch.stack(
                [correct.double(), torch.tensor(float(len(x)), dtype=torch.float64), total_loss]
            )
    model.train(training)
    if world_size > 1:
        dist.all_reduce(sums)
    correct_sum, total, loss_sum = sums.tolist()
    found = {"eval_loss": loss_sum / total, "eval_total": int(total)}
    if settings.dataset == "digits":
        found |= {"accuracy": correct_sum / total}
    return found


def _datasets(settings: LoopConfig) -> tuple[TensorDataset, TensorDataset]:
    if settings.dataset == "digits":
        labels = settings.seed if settings.shuffled_labels else None
        return digits("train", shuffled_labels_seed=labels), digits("held-out")
    return linear_toy(settings.rows, settings.seed), linear_toy(261, settings.seed + 1)


def restored(settings: LoopConfig) -> states.TrainingState | None:
    """The state to resume from, checked file by file, or None in a new run.

    Raises:
        lab.training.state.DamagedCheckpoint: it is not what was saved.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with own_directory(checkpoint) as folder:
        return states.load(folder, settings.saved_parts)


def _optimizer(settings: LoopConfig, model: nn.Module) -> torch.optim.Optimizer:
    if settings.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=settings.lr)
    return torch.optim.SGD(model.parameters(), lr=settings.lr)


def _loss(settings: LoopConfig, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if settings.dataset == "digits":
        return functional.cross_entropy(output, y)
    return functional.mse_loss(output, y)


def _mean(total: torch.Tensor, count: int, world_size: int) -> float:
    sums = torch.stack([total, torch.tensor(float(count), dtype=torch.float64)])
    if world_size > 1:
        dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def _local_gradient(settings: LoopConfig, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> str:
    """SHA-256 of this rank's own gradient, before DDP averages it; leaves no trace in RNG, gradients or optimizer."""
    parameters = dict(model.named_parameters())
    with torch.random.fork_rng(devices=[]):
        gradients = torch.autograd.grad(_loss(settings, model(x), y), list(parameters.values()))
    return states.tensors_sha256(dict(zip(parameters, gradients, strict=True)))
