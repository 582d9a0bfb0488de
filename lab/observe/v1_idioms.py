"""What a V1 program's idioms do on the installed Ray, in a process of its own for each RAY_TRAIN_V2_ENABLED.

`python -c "from lab.observe.v1_idioms import main; main()" ANSWER STORAGE RUN FIT` writes one JSON object to the file ANSWER:
`{"ray": version, "v2": whether TorchTrainer is V2's, "idioms": {id: outcome}, "ways": {id: outcome}}`. An outcome is
"works", "works: value", "warns: sentence", or "Exception: its first sentence". The ids are those of
`lab.lessons.v1_v2_table`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
import ray.air
import ray.air.session
import ray.train
import ray.train.torch
import ray.tune
import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, SyncConfig
from ray.train.torch import TorchTrainer
from torch import nn

from lab.settings import StoreAccess
from lab.storage import Storage, open_storage, parse_location

WORKERS = 2
Call = Callable[[], Any]
SENTENCE = 200
"""Characters of an exception's first sentence that are kept."""


class OldCallback(ray.tune.Callback):  # type: ignore[misc]
    """A Tune callback, as V1 programs gave to `RunConfig`."""


def outcome(call: Call) -> str:
    """What a call does: works, warns, or raises, in one line without what differs from run to run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            value = call()
        except Exception as error:  # noqa: BLE001 - whatever it raises is the observation
            return f"{type(error).__name__}: {first_sentence(str(error))}"
    said = [str(item.message) for item in caught if item.category is UserWarning]
    if said:
        return f"warns: {first_sentence(said[0])}"
    return f"works: {value}" if isinstance(value, str | int | float) else "works"


def first_sentence(text: str) -> str:
    """The first sentence, on one line, cut to `SENTENCE` characters."""
    line = " ".join(text.split())
    # some of Ray's sentences follow one another without a space
    return re.split(r"(?<=[.!?]) (?=[A-Z`])|(?<=[a-z]\.)(?=[A-Z][a-z]+ )", line, maxsplit=1)[0][:SENTENCE]


def on_a_rank(config: dict[str, Any]) -> None:
    """Every idiom of the training function, then two reports: with a checkpoint, and without one."""
    context = ray.train.get_context()
    rank = int(context.get_world_rank())
    idioms = {
        "session-report": outcome(lambda: ray.air.session.report({"step": 0})),
        "trial-id": outcome(lambda: bool(context.get_trial_id())),
        "trial-name": outcome(lambda: bool(context.get_trial_name())),
        "trial-dir": outcome(lambda: bool(context.get_trial_dir())),
        "get-metadata": outcome(lambda: len(context.get_metadata())),
        "accelerate": outcome(lambda: ray.train.torch.accelerate(amp=False)),
        "prepare-optimizer": outcome(
            lambda: ray.train.torch.prepare_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1))
        ),
        "cpus": outcome(_cpus),
    }
    model = nn.Linear(1, 1)
    mean = torch.tensor(float(rank))
    dist.all_reduce(mean)
    ways = {
        "trial-id": outcome(lambda: bool(context.get_experiment_name())),
        "trial-name": outcome(lambda: bool(context.get_experiment_name())),
        "trial-dir": outcome(lambda: bool(config["folder"])),
        "get-metadata": outcome(lambda: len(config["metadata"])),
        "metadata": outcome(lambda: len(config["metadata"])),
        "resume-from-checkpoint": outcome(lambda: _read(config["start"])),
        "accelerate": outcome(lambda: ray.train.torch.prepare_model(model)),
        "prepare-optimizer": outcome(lambda: torch.optim.SGD(model.parameters(), 0.1).step()),
    }
    seen = json.dumps({"idioms": idioms, "ways": ways})
    metrics = {f"of-rank-{rank}": rank, "mean": float(mean) / WORKERS, "seen": seen}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"rank-{rank}.txt").write_text("saved")
        ray.train.report({**metrics, "step": 1}, checkpoint=Checkpoint.from_directory(folder))
    ray.train.report({**metrics, "step": 2})


def _cpus() -> int:
    group = ray.util.get_current_placement_group()
    return int(sum(bundle.get("CPU", 0) for bundle in group.bundle_specs))


def _read(path: str) -> str:
    filesystem = ray.train.get_context().get_storage().storage_filesystem
    with Checkpoint(path, filesystem).as_directory() as folder:
        return Path(folder, "weights.txt").read_text()


def _nothing(config: dict[str, Any]) -> None:
    """A training function that is never started."""


@dataclass(frozen=True)
class Probe:
    """Where the probe's own run is kept, and how it is named."""

    storage: Storage
    name: str

    def run_config(self, **more: Any) -> Any:
        """A `RunConfig` for this run."""
        return RunConfig(
            name=self.name, storage_path=self.storage.path, storage_filesystem=self.storage.filesystem, **more
        )

    def trainer(self, **more: Any) -> Any:
        """A trainer that is made and not started."""
        return TorchTrainer(_nothing, **{"scaling_config": ScalingConfig(num_workers=WORKERS), **more})

    def fit(self) -> Any:
        """The one fit: `on_a_rank` on two ranks."""
        start = f"{self.name}-start"
        self.storage.write(f"{start}/weights.txt", b"of another run")
        return TorchTrainer(
            on_a_rank,
            train_loop_config={
                "metadata": {"data": "digits"},
                "start": self.storage.at(start),
                "folder": self.storage.at(self.name),
            },
            scaling_config=ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 1}),
            run_config=self.run_config(),
        ).fit()


def made(probe: Probe) -> dict[str, Call]:
    """The idioms that need no training: configurations, trainers, the driver's own calls."""
    from ray.train.torch.torch_trainer import TorchTrainer as OldTrainer

    checkpoint = Checkpoint(probe.storage.at(f"{probe.name}-start"), probe.storage.filesystem)
    return {
        "resume-from-checkpoint": lambda: probe.trainer(resume_from_checkpoint=checkpoint),
        "metadata": lambda: probe.trainer(metadata={"data": "digits"}),
        "old-import": lambda: OldTrainer(_nothing, scaling_config=ScalingConfig(num_workers=WORKERS)),
        "air-scaling-config": lambda: probe.trainer(
            scaling_config=ray.air.ScalingConfig(num_workers=WORKERS)
        ),
        "air-run-config": lambda: probe.trainer(run_config=ray.air.RunConfig(name=probe.name)),
        "air-failure-config": lambda: RunConfig(failure_config=ray.air.FailureConfig(max_failures=1)),
        "air-checkpoint-config": lambda: RunConfig(checkpoint_config=ray.air.CheckpointConfig(num_to_keep=1)),
        "verbose": lambda: RunConfig(verbose=0),
        "stop": lambda: RunConfig(stop={"training_iteration": 3}),
        "sync-config": lambda: RunConfig(sync_config=SyncConfig()),
        "log-to-file": lambda: RunConfig(log_to_file=True),
        "progress-reporter": lambda: RunConfig(progress_reporter=ray.tune.CLIReporter()),
        "tune-callback": lambda: RunConfig(callbacks=[OldCallback()]),
        "fail-fast": lambda: FailureConfig(fail_fast=True),
        "trainer-resources": lambda: ScalingConfig(num_workers=WORKERS, trainer_resources={"CPU": 0}),
        "checkpoint-frequency": lambda: CheckpointConfig(checkpoint_frequency=1),
        "checkpoint-at-end": lambda: CheckpointConfig(checkpoint_at_end=True),
        "from-dict": lambda: Checkpoint.from_dict({"epoch": 1}),
        "tuner": lambda: ray.tune.Tuner(probe.trainer()),
        "driver-context": lambda: ray.train.get_context().get_world_size(),
    }


def made_ways(probe: Probe) -> dict[str, Call]:
    """What V2 has instead of the idioms in `made`, where it can be tried without training."""
    tune = ray.tune.RunConfig
    return {
        "old-import": probe.trainer,
        "air-scaling-config": lambda: probe.trainer(scaling_config=ScalingConfig(num_workers=WORKERS)),
        "air-run-config": lambda: probe.trainer(run_config=RunConfig(name=probe.name)),
        "air-failure-config": lambda: RunConfig(failure_config=FailureConfig(max_failures=1)),
        "air-checkpoint-config": lambda: RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=1)),
        "verbose": lambda: tune(verbose=0),
        "stop": lambda: tune(stop={"training_iteration": 3}),
        "sync-config": lambda: tune(sync_config=ray.tune.SyncConfig()),
        "log-to-file": lambda: tune(log_to_file=True),
        "progress-reporter": lambda: tune(progress_reporter=ray.tune.CLIReporter()),
        "tune-callback": lambda: RunConfig(callbacks=[type("Mine", (ray.train.UserCallback,), {})()]),
        "fail-fast": lambda: tune(failure_config=ray.tune.FailureConfig(fail_fast=True)),
        "trainer-resources": lambda: ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 1}),
        "from-dict": _from_directory,
        "tuner": lambda: ray.tune.Tuner(_nothing, run_config=tune(name=probe.name)),
    }


def _from_directory() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "epoch.txt").write_text("1")
        Checkpoint.from_directory(folder)


def after(probe: Probe, result: Any) -> dict[str, Call]:
    """The idioms that look back at a run that ended."""
    path, filesystem = probe.storage.at(probe.name), probe.storage.filesystem
    own = [f"of-rank-{rank}" for rank in range(WORKERS)]
    return {
        "can-restore": lambda: TorchTrainer.can_restore(path, storage_filesystem=filesystem),
        "restore": lambda: TorchTrainer.restore(path, storage_filesystem=filesystem),
        "result-config": lambda: len(result.config),
        "result-metrics": lambda: f"report {result.metrics['step']} of 2",
        "other-rank": lambda: ", ".join(name for name in own if name in result.metrics),
    }


def after_ways(probe: Probe, result: Any) -> dict[str, Call]:
    """What V2 has instead, seen on the run that ended."""
    return {
        "can-restore": lambda: _snapshot(probe),
        "session-report": lambda: "step" in result.metrics,
        "checkpoint-frequency": lambda: bool(result.checkpoint.path),
        "checkpoint-at-end": lambda: bool(result.checkpoint.path),
        "result-metrics": lambda: f"report {result.metrics['step']} of 2",
        "other-rank": lambda: f"mean {result.metrics['mean']}",
    }


def _snapshot(probe: Probe) -> None:
    probe.storage.read(f"{probe.name}/checkpoint_manager_snapshot.json")


def outcomes(calls: Mapping[str, Call]) -> dict[str, str]:
    """Each call's outcome."""
    return {name: outcome(call) for name, call in calls.items()}


def observed(probe: Probe, with_fit: bool) -> dict[str, Any]:
    """All of it, in this process's generation of Ray Train."""
    v2 = any(".v2." in kind.__module__ for kind in TorchTrainer.__mro__)
    idioms = outcomes(made(probe))
    ways = outcomes(made_ways(probe)) if v2 else {}
    if with_fit:
        result = probe.fit()
        seen = json.loads(result.metrics["seen"])
        idioms |= seen["idioms"] | outcomes(after(probe, result))
        ways |= (seen["ways"] | outcomes(after_ways(probe, result))) if v2 else {}
    return {"ray": version("ray"), "v2": v2, "idioms": idioms, "ways": ways}


def main() -> None:
    """Probe, write the answer, leave nothing in the store: V1 keeps a pickled trainer there, with its keys."""
    answer, uri, name, with_fit = sys.argv[1:5]
    location = parse_location(uri)
    storage = open_storage(location, StoreAccess.from_environment() if location.kind == "s3" else None)
    setting = os.environ.get("RAY_TRAIN_V2_ENABLED")
    # the ranks' processes must import the same generation of ray.train as this one
    runtime_env = {"env_vars": {"RAY_TRAIN_V2_ENABLED": setting}} if setting is not None else None
    ray.init(address="auto", logging_level=logging.WARNING, runtime_env=runtime_env)
    try:
        found = observed(Probe(storage, name), with_fit == "fit")
    finally:
        for folder in (name, f"{name}-start"):
            storage.delete_tree(folder)
    Path(answer).write_text(json.dumps(found))
