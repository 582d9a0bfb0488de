"""The driver's side: run a training function on the right nodes, resume or start anew, and say how it ended."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ray
import ray.exceptions
from pyarrow import ArrowException
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.callback import RayTrainCallback
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError

from lab.cluster import ROLE_LABEL
from lab.errors import UserError
from lab.leftovers import SNAPSHOT, is_run
from lab.storage import Storage, check_name
from lab.training import state
from lab.training.defaults import TORCH_TIMEOUT_S
from lab.training.records import last_attempt, read_observations

Role = Literal["head", "worker"]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Failure:
    """Why a run ended early: the exception's class, its first line, the rank it came from, its whole text."""

    kind: str
    message: str
    rank: int | None = None
    text: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a `fit` ended.

    `metrics` and `checkpoint` are of the last report with a checkpoint (Ray's rule), `best` lists every retained
    one, (folder, metrics), worst first. Paths have no scheme: use them with the storage's filesystem. `seconds`
    is the whole `fit`; `first_step_at` (seconds since 1970) is the last rank's, from the newest attempt, for
    training functions that observe it. `resumed_from_epoch` is the first epoch to do, None for a new run.
    """

    name: str
    path: str
    metrics: dict[str, Any] | None
    checkpoint: str | None
    best: tuple[tuple[str, dict[str, Any]], ...]
    error: Failure | None
    seconds: float
    resumed_from_epoch: int | None
    attempts: int
    first_step_at: float | None
    returned: Any = None
    table: tuple[dict[str, Any], ...] = ()
    """The rows of Ray's `metrics_dataframe`, in its order."""


class _LeanTrainer(TorchTrainer):  # type: ignore[misc]
    """Ray's trainer without two helper processes, of about 2 s of a core each, that a run of the lab has no use for.

    The cleaner frees the ranks' resources after a controller that died; here they go with the job. The data set
    manager hands out shards of the `datasets`. Ray 2.60 has a switch for neither.
    """

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        without: tuple[type[RayTrainCallback], ...] = (PlacementGroupCleanerCallback,)
        if not self.datasets:
            without += (DatasetsCallback,)
        return [one for one in super()._create_default_callbacks() if not isinstance(one, without)]


def fit(
    train_fn: Callable[[dict[str, Any]], Any],
    config: Mapping[str, Any],
    *,
    storage: Storage,
    name: str,
    workers: int,
    role: Role | None = "worker",
    spread: bool | None = None,
    fresh: bool = False,
    keep: int | None = None,
    score: str | None = None,
    order: Literal["max", "min"] = "max",
    max_failures: int = 0,
    start_failures: int = 0,
    datasets: Mapping[str, Any] | None = None,
    cpus_per_worker: float = 1,
    torch_timeout_s: float = TORCH_TIMEOUT_S,
    lab_state: bool = True,
    say: Say = print,
    **trainer_options: Any,
) -> Outcome:
    """Run `train_fn` on `workers` ranks, with one explicit filesystem for driver, controller and ranks.

    The driver's process needs `defaults.driver_environment()` set before `import ray`, and `ray.init` done.

    Args:
        train_fn: a function of a module that every node has; called with `config`.
        name: the run's name; an existing one resumes, and that is said.
        role: the nodes' label `lab-role` that ranks go to; None: any node.
        spread: True: as many nodes as there are; False: as few as fit; None: True on workers, False on the head.
        fresh: delete the run first, saying so.
        keep, score, order: `CheckpointConfig`'s num_to_keep, score attribute and order.
        max_failures: restarts of the worker group.
        start_failures: how often the worker group may fail to start, each after RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S.
        cpus_per_worker: logical CPUs per rank; also Ray's default for OMP threads (the floor of it, at least 1).
        torch_timeout_s: limit of each collective of torch.
        lab_state: checkpoints carry the lab's manifest; False for a training function with files of its own.
        trainer_options: handed to `TorchTrainer` as they are (`dataset_config`, ...).

    Returns:
        The outcome; a run that failed has `error`, nothing is raised for it.

    Raises:
        UserError: the name cannot name a run, or what it would resume from is damaged; before anything starts.
    """
    check_name(name)
    if fresh and delete_run(storage, name):
        say(f"deleted run {name} in {storage.location} (--fresh)")
    resumed = resume_point(storage, name, lab_state=lab_state)
    if resumed is not None:
        complete = resumed >= config.get("epochs", resumed + 1)
        say(
            f"resuming {name} at epoch {resumed}"
            + (": it is complete, nothing is left to train" if complete else "")
        )
    trainer = _LeanTrainer(
        train_fn,
        train_loop_config=dict(config),
        torch_config=TorchConfig(timeout_s=int(torch_timeout_s)),
        scaling_config=scaling(workers, role, spread, cpus_per_worker),
        run_config=RunConfig(
            name=name,
            storage_path=storage.path,
            storage_filesystem=storage.filesystem,
            failure_config=FailureConfig(max_failures=max_failures, controller_failure_limit=start_failures),
            checkpoint_config=CheckpointConfig(
                num_to_keep=keep, checkpoint_score_attribute=score, checkpoint_score_order=order
            ),
        ),
        datasets=dict(datasets) if datasets else None,
        **trainer_options,
    )
    began = time.monotonic()
    result: Any = None
    error: Failure | None = None
    handler = signal.getsignal(signal.SIGINT)
    try:
        result = trainer.fit()
    except (TrainingFailedError, ray.exceptions.RayError) as raised:
        error = failure_of(raised)
    finally:
        if threading.current_thread() is threading.main_thread():
            # Ray leaves its own, and with it a reference that keeps the controller's process (0.4 GB)
            signal.signal(signal.SIGINT, handler)
    seconds = time.monotonic() - began
    return _outcome(storage, name, result, error, seconds, resumed)


def scaling(workers: int, role: Role | None, spread: bool | None, cpus_per_worker: float = 1) -> Any:
    """The `ScalingConfig` that puts ranks where a lesson wants them."""
    nodes = _alive_nodes(role)
    wide = spread if spread is not None else role == "worker"
    # STRICT_SPREAD promises one node per rank but never starts when nodes are too few; then SPREAD evens out
    strategy = "PACK" if not wide else "STRICT_SPREAD" if workers <= nodes else "SPREAD"
    return ScalingConfig(
        num_workers=workers,
        resources_per_worker={"CPU": cpus_per_worker},
        placement_strategy=strategy,
        label_selector={ROLE_LABEL: role} if role else None,
    )


def _alive_nodes(role: Role | None) -> int:
    return sum(
        1
        for node in ray.nodes()
        if node["Alive"] and (role is None or node.get("Labels", {}).get(ROLE_LABEL) == role)
    )


def delete_run(storage: Storage, name: str) -> bool:
    """Delete a run's folder.

    Returns:
        Whether there was one.

    Raises:
        UserError: there is something else of that name.
    """
    check_name(name)
    if not storage.files(name):
        return False
    if not is_run(storage, name):
        raise UserError(
            f"LAB_NAME={name}: {storage.location}/{name} is no run of Ray Train, and --fresh deletes runs alone: "
            "use another --name."
        )
    storage.delete_tree(name)
    return True


def resume_point(storage: Storage, name: str, *, lab_state: bool = True) -> int | None:
    """The first epoch that a run of this name would do, or None when it would start anew.

    Read from the checkpoint manager's snapshot and the lab's manifest in the checkpoint that it calls the latest,
    never from a folder listing: a folder may be an orphan of a killed attempt (pitfall C3).

    Args:
        lab_state: False: the checkpoint has no manifest of the lab's; the epoch is 1 + the metric `epoch`, or 0.

    Raises:
        UserError: the snapshot or its checkpoint is damaged or incomplete; the sentence names it and what to do.
    """
    check_name(name)
    files = {entry.path: entry.size for entry in storage.files(name)}
    snapshot = f"{name}/{SNAPSHOT}"
    if snapshot not in files:
        return None
    try:
        content = json.loads(storage.read(snapshot))
        latest = content["latest_checkpoint_result"]
        known = [result["checkpoint_dir_name"] for result in content["checkpoint_results"]]
        folder = latest["checkpoint_dir_name"] if latest else None
        metrics = latest["metrics"] if latest else {}
    except (ValueError, KeyError, TypeError):
        raise _unusable(name, f"{storage.location}/{snapshot} is damaged") from None
    if folder is None:
        return None
    for one in dict.fromkeys([*known, folder]):
        if not any(path.startswith(f"{name}/{one}/") for path in files):
            raise _unusable(name, f"the snapshot names {storage.location}/{name}/{one}, which is gone")
    if not lab_state:
        epoch = metrics.get("epoch") if isinstance(metrics, dict) else None
        return int(epoch) + 1 if isinstance(epoch, int | float) else 0
    return _epoch_of(storage, name, folder, files)


def _epoch_of(storage: Storage, name: str, folder: str, files: Mapping[str, int]) -> int:
    where = f"{storage.location}/{name}/{folder}"
    path = f"{name}/{folder}/{state.MANIFEST}"
    try:
        manifest = state.read_manifest(storage.read(path) if path in files else None, where)
    except state.DamagedCheckpoint as error:
        raise _unusable(name, str(error).removeprefix("checkpoint damaged: ").partition(";")[0]) from None
    for file, expected in manifest["files"].items():
        size = files.get(f"{name}/{folder}/{file}")
        if size is None:
            raise _unusable(name, f"{where}/{file} is missing")
        if size != expected.get("size"):
            raise _unusable(name, f"{where}/{file} has {size} bytes instead of {expected.get('size')}")
    epoch = manifest.get("epoch")
    # a state saved without its epoch starts again at 0 (a lesson's twin)
    return int(epoch) if isinstance(epoch, int) and "epoch" in manifest["parts"] else 0


def _unusable(name: str, what: str) -> UserError:
    return UserError(
        f"run {name} cannot resume: {what}; restore it from a copy, use another --name, or start anew with --fresh."
    )


def failure_of(raised: BaseException) -> Failure:
    """The failure that explains a run's end: a rank's own error rather than what it did to the others."""
    if isinstance(raised, WorkerGroupError) and raised.worker_failures:
        ranked = sorted(
            raised.worker_failures.items(), key=lambda item: (_collateral(_cause(item[1])), item[0])
        )
        rank, error = ranked[0]
        return _failure(_cause(error), rank)
    if isinstance(raised, ControllerError):
        return _failure(_cause(raised.controller_failure), None)
    return _failure(_cause(raised), None)


def _cause(error: BaseException) -> BaseException:
    for attribute in ("_base_exc", "health_check_failure", "cause"):
        inner = getattr(error, attribute, None)
        if isinstance(inner, BaseException) and inner is not error:
            return _cause(inner)
    return error


_COLLATERAL = ("closed by peer", "connection reset", "gloo", "barrier was reset")


def _collateral(error: BaseException) -> bool:
    text = f"{type(error).__name__} {error}".lower()
    return any(word in text for word in _COLLATERAL)


def _failure(error: BaseException, rank: int | None) -> Failure:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Failure(type(error).__name__, lines[0] if lines else "no message", rank, str(error))


def _outcome(
    storage: Storage, name: str, result: Any, error: Failure | None, seconds: float, resumed: int | None
) -> Outcome:
    first_step_at, attempts = _steps(storage, name)
    best = result.best_checkpoints or [] if result else []
    table = result.metrics_dataframe if result else None
    return Outcome(
        name=name,
        path=storage.at(name),
        metrics=result.metrics if result else None,
        checkpoint=result.checkpoint.path if result and result.checkpoint else None,
        best=tuple((checkpoint.path, metrics) for checkpoint, metrics in best),
        error=error,
        seconds=seconds,
        resumed_from_epoch=resumed,
        attempts=attempts,
        first_step_at=first_step_at,
        returned=getattr(result, "return_value", None),
        table=tuple(table.to_dict("records")) if table is not None else (),
    )


def _steps(storage: Storage, name: str) -> tuple[float | None, int]:
    try:
        attempt = last_attempt(storage, name)
        if attempt is None:
            return None, 0
        seen = read_observations(storage, name, attempt)
    except (OSError, ArrowException):  # the store went down: the run's own error says so already
        return None, 0
    steps = [one["first_step_at"] for one in seen if one.get("first_step_at")]
    return (max(steps) if steps else None), attempt + 1
