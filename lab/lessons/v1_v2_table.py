"""The committed table of lesson `v1-v2`: idioms of V1 programs, and what each does on the pinned Ray.

Outcomes are written as `lab.observe.v1_idioms.outcome` writes them. An upgrade of Ray that changes one shows as a
difference; then look at it, and correct the row.
"""

from __future__ import annotations

from dataclasses import dataclass

RAY = "2.60.0"
"""The version on which every row was measured."""


@dataclass(frozen=True)
class Idiom:
    """One idiom: what it does with RAY_TRAIN_V2_ENABLED=0 (`v1`), and unset or 1 (`v2`); what V2 has instead (`way`).

    `needs_fit`: it can be seen in a training function or on a result alone. `tried` is the outcome of the V2 way where
    the lesson runs it too, else "".
    """

    id: str
    code: str
    v1: str
    v2: str
    way: str
    tried: str = "works"
    needs_fit: bool = False


def _gone(field: str) -> str:
    return f"DeprecationWarning: `RunConfig({field})` is deprecated."


def _trial(method: str) -> str:
    return f"DeprecationWarning: `{method}` is deprecated because the concept of a `Trial` will soon be removed in Ray Train."


_AMP = (
    "DeprecationWarning: The `accelerate`, `backward`, and `prepare_optimizer` utility methods in the `ray.train.torch` "
    "module are deprecated and will be removed in a future release."
)


def _air(name: str) -> str:
    return f"ValueError: Invalid `{name}` type: <class 'ray.air.config.{name}'>."


IDIOMS = (
    Idiom(
        "restore",
        "TorchTrainer.restore(path)",
        "works",
        "DeprecationWarning: The `restore` and `can_restore` APIs are deprecated and will be removed in a future release.",
        "fit() with the same RunConfig(name, storage_path); get_checkpoint() in the loop (lesson resume)",
        tried="",
        needs_fit=True,
    ),
    Idiom(
        "can-restore",
        "TorchTrainer.can_restore(path)",
        "works: True",
        "DeprecationWarning: The `restore` and `can_restore` APIs are deprecated and will be removed in a future release.",
        "look for checkpoint_manager_snapshot.json in the run's folder",
        needs_fit=True,
    ),
    Idiom(
        "resume-from-checkpoint",
        "TorchTrainer(resume_from_checkpoint=c)",
        "works",
        "DeprecationWarning: `resume_from_checkpoint` is deprecated and will be removed in an upcoming release.",
        "hand the checkpoint's path over in train_loop_config and open it in the loop",
        tried="works: of another run",
    ),
    Idiom(
        "metadata",
        "TorchTrainer(metadata={...})",
        "works",
        "DeprecationWarning: `get_metadata` was an experimental API that accessed the metadata passed to "
        "`<Framework>Trainer(metadata=...)`.",
        "train_loop_config={...}",
        tried="works: 1",
    ),
    Idiom(
        "get-metadata",
        "get_context().get_metadata()",
        "works: 0",
        "DeprecationWarning: `get_metadata` was an experimental API that accessed the metadata passed to "
        "`<Framework>Trainer(metadata=...)`.",
        "config[...]",
        tried="works: 1",
        needs_fit=True,
    ),
    Idiom(
        "old-import",
        "from ray.train.torch.torch_trainer import TorchTrainer",
        "works",
        "DeprecationWarning: Detected use of a deprecated Trainer import from `ray.train.torch.torch_trainer`.",
        "from ray.train.torch import TorchTrainer",
    ),
    Idiom(
        "air-scaling-config",
        "ray.air.ScalingConfig",
        "works",
        _air("ScalingConfig"),
        "ray.train.ScalingConfig",
    ),
    Idiom("air-run-config", "ray.air.RunConfig", "works", _air("RunConfig"), "ray.train.RunConfig"),
    Idiom(
        "air-failure-config",
        "ray.air.FailureConfig",
        "works",
        _air("FailureConfig"),
        "ray.train.FailureConfig",
    ),
    Idiom(
        "air-checkpoint-config",
        "ray.air.CheckpointConfig",
        "works",
        _air("CheckpointConfig"),
        "ray.train.CheckpointConfig",
    ),
    Idiom(
        "session-report",
        "ray.air.session.report(...)",
        "works",
        "warns: `report` is meant to only be called inside a function that is executed by a Tuner or Trainer.",
        "ray.train.report(...)",
        tried="works: True",
        needs_fit=True,
    ),
    Idiom(
        "verbose",
        "RunConfig(verbose=0)",
        "works",
        _gone("verbose"),
        "ray.tune.RunConfig(verbose=0), with Tune alone",
    ),
    Idiom(
        "stop",
        "RunConfig(stop={...})",
        "works",
        _gone("stop"),
        "return from the training function; ray.tune.RunConfig(stop=...), with Tune",
    ),
    Idiom(
        "sync-config",
        "RunConfig(sync_config=SyncConfig())",
        "works",
        _gone("sync_config"),
        "ray.tune.SyncConfig, with Tune alone",
    ),
    Idiom(
        "log-to-file",
        "RunConfig(log_to_file=True)",
        "works",
        _gone("log_to_file"),
        "nothing: each process has its log below Ray's session folder",
    ),
    Idiom(
        "progress-reporter",
        "RunConfig(progress_reporter=...)",
        "works",
        _gone("progress_reporter"),
        "ray.tune.RunConfig(progress_reporter=...), with Tune alone",
    ),
    Idiom(
        "tune-callback",
        "RunConfig(callbacks=[a Tune callback])",
        "works",
        "ValueError: All callbacks must be instances of `ray.train.UserCallback`.",
        "a subclass of ray.train.UserCallback",
    ),
    Idiom(
        "fail-fast",
        "FailureConfig(fail_fast=True)",
        "works",
        "DeprecationWarning: `ray.train.FailureConfig(fail_fast)` is deprecated since it is only relevant in the context "
        "of multiple trials running in Ray Tune.",
        "max_failures=0, the default; ray.tune.FailureConfig(fail_fast=True), with Tune",
    ),
    Idiom(
        "trainer-resources",
        "ScalingConfig(trainer_resources={...})",
        "works",
        "DeprecationWarning: `ray.train.ScalingConfig(trainer_resources)` is deprecated.",
        "resources_per_worker alone: the controller reserves nothing",
    ),
    Idiom(
        "cpus",
        "CPUs reserved for 2 ranks",
        "works: 3",
        "works: 2",
        "nothing: V2 needs one CPU less",
        tried="",
        needs_fit=True,
    ),
    Idiom(
        "checkpoint-frequency",
        "CheckpointConfig(checkpoint_frequency=1)",
        "works",
        "DeprecationWarning: `checkpoint_frequency` is deprecated since it does not apply to user-defined training functions.",
        "report(..., checkpoint=...) whenever one is due",
        tried="works: True",
    ),
    Idiom(
        "checkpoint-at-end",
        "CheckpointConfig(checkpoint_at_end=True)",
        "works",
        "DeprecationWarning: `checkpoint_at_end` is deprecated since it does not apply to user-defined training functions.",
        "report(..., checkpoint=...) after the last step",
        tried="works: True",
    ),
    Idiom(
        "from-dict",
        "Checkpoint.from_dict({...})",
        "AttributeError: The new `ray.train.Checkpoint` class does not support `from_dict()`.",
        "AttributeError: The new `ray.train.Checkpoint` class does not support `from_dict()`.",
        "write files into a folder, Checkpoint.from_directory(folder)",
    ),
    Idiom(
        "tuner",
        "ray.tune.Tuner(trainer)",
        "works",
        "TuneError: Improper 'run' - not string nor trainable.",
        "Tuner(a function that makes a trainer and fits it)",
    ),
    Idiom(
        "trial-id",
        "get_context().get_trial_id()",
        "works: True",
        _trial("get_trial_id"),
        "get_context().get_experiment_name()",
        tried="works: True",
        needs_fit=True,
    ),
    Idiom(
        "trial-name",
        "get_context().get_trial_name()",
        "works: True",
        _trial("get_trial_name"),
        "get_context().get_experiment_name()",
        tried="works: True",
        needs_fit=True,
    ),
    Idiom(
        "trial-dir",
        "get_context().get_trial_dir()",
        "works: True",
        _trial("get_trial_dir"),
        "hand a folder over in train_loop_config",
        tried="works: True",
        needs_fit=True,
    ),
    Idiom(
        "accelerate",
        "ray.train.torch.accelerate(amp=False)",
        "works",
        _AMP,
        "prepare_model; torch.amp for mixed precision",
        needs_fit=True,
    ),
    Idiom(
        "prepare-optimizer",
        "ray.train.torch.prepare_optimizer(o)",
        "works",
        _AMP,
        "the optimizer as it is",
        needs_fit=True,
    ),
    Idiom(
        "driver-context",
        "get_context().get_world_size() on the driver",
        "warns: `get_world_size` is meant to only be called inside a function that is executed by a Tuner or Trainer.",
        "RuntimeError: `get_context` cannot be used outside of a Ray Train training function.",
        "call it in the training function",
        tried="",
    ),
    Idiom(
        "result-config",
        "result.config",
        "works: 1",
        "DeprecationWarning: The `config` property for a `ray.train.Result` is deprecated, since it is only relevant in the "
        "context of Ray Tune.",
        "keep the train_loop_config that you passed",
        tried="",
        needs_fit=True,
    ),
    Idiom(
        "result-metrics",
        "result.metrics, the last report without a checkpoint",
        "works: report 2 of 2",
        "works: report 1 of 2",
        "hand a checkpoint over with each report that shall count",
        tried="works: report 1 of 2",
        needs_fit=True,
    ),
    Idiom(
        "other-rank",
        "a metric that rank 1 alone reports",
        "works: of-rank-0",
        "works: of-rank-0",
        "reduce over the ranks, report the same on each",
        tried="works: mean 0.5",
        needs_fit=True,
    ),
)


def markdown() -> str:
    """The table as the docs page shows it: idiom, V1, V2, the V2 way."""

    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("<class", "\\<class")

    rows = [
        f"| `{idiom.code}` | {cell(idiom.v1)} | {cell(idiom.v2)} | {cell(idiom.way)} |" for idiom in IDIOMS
    ]
    return "\n".join(
        [f"| idiom, on Ray {RAY} | 0: V1 | unset or 1: V2 | instead |", "|---|---|---|---|", *rows]
    )


if __name__ == "__main__":
    print(markdown())
