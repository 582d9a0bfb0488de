"""The driver's side without a cluster: where a name resumes, and what a failure says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray.train")
from ray.train.v2._internal import constants
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from lab.errors import UserError
from lab.leftovers import SNAPSHOT
from lab.storage import Storage, open_storage, parse_location
from lab.training import state
from lab.training.defaults import driver_environment
from lab.training.loop import LoopConfig
from lab.training.run import delete_run, failure_of, resume_point


def a_run(root: Path, epoch: int = 3) -> Storage:
    """A storage with the run `r`: one committed checkpoint, and an orphan that is newer."""
    for folder, at in [("checkpoint_a", epoch), ("checkpoint_orphan", epoch + 1)]:
        state.save(root / "r" / folder, state.TrainingState(epoch=at, history=[]), ["epoch", "history"])
    result = {"version": 0, "checkpoint_dir_name": "checkpoint_a", "metrics": {"epoch": epoch - 1}}
    content = {"checkpoint_results": [result], "latest_checkpoint_result": result}
    (root / "r" / SNAPSHOT).write_text(json.dumps(content))
    return open_storage(parse_location(str(root)))


def test_resumes_at_the_committed_epoch_never_at_an_orphans(tmp_path: Path) -> None:
    storage = a_run(tmp_path)
    assert resume_point(storage, "r") == 3
    assert resume_point(storage, "r", lab_state=False) == 3
    assert resume_point(storage, "new") is None


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("snapshot truncated", SNAPSHOT),
        ("snapshot of another kind", SNAPSHOT),
        ("folder gone", "checkpoint_a, which is gone"),
        ("manifest gone", "manifest.json is missing"),
        ("manifest damaged", "manifest.json cannot be read"),
        ("file gone", "progress.json is missing"),
        ("file short", "progress.json has 1 bytes"),
    ],
)
def test_what_cannot_resume_is_named_with_the_fix(tmp_path: Path, damage: str, named: str) -> None:
    storage = a_run(tmp_path)
    folder = tmp_path / "r" / "checkpoint_a"
    snapshot = tmp_path / "r" / SNAPSHOT
    if damage == "snapshot truncated":
        snapshot.write_text(snapshot.read_text()[:40])
    elif damage == "snapshot of another kind":
        snapshot.write_text("[]")
    elif damage == "folder gone":
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    elif damage == "manifest gone":
        (folder / "manifest.json").unlink()
    elif damage == "manifest damaged":
        (folder / "manifest.json").write_text("{")
    elif damage == "file gone":
        (folder / "progress.json").unlink()
    else:
        (folder / "progress.json").write_text("{")
    with pytest.raises(UserError) as caught:
        resume_point(storage, "r")
    assert named in str(caught.value)
    assert "run r cannot resume" in str(caught.value)
    assert "--fresh" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fresh_deletes_that_run_alone(tmp_path: Path) -> None:
    storage = a_run(tmp_path)
    storage.write("other/file", b"x")
    assert delete_run(storage, "r")
    assert not delete_run(storage, "r")
    assert [entry.path for entry in storage.files()] == ["other/file"]
    with pytest.raises(UserError):
        delete_run(storage, "../other")
    with pytest.raises(UserError, match=r"LAB_NAME=other.*no run"):
        delete_run(storage, "other")
    assert storage.files("other")


def test_a_failure_is_the_ranks_own_error_not_what_it_did_to_others() -> None:
    gloo = UserExceptionWithTraceback(RuntimeError("[gloo] Connection closed by peer [::1]:1"), "trace")
    own = UserExceptionWithTraceback(ValueError("the reason\nmore"), "trace")
    failure = failure_of(WorkerGroupError("text", {0: gloo, 1: own}))
    assert (failure.kind, failure.message, failure.rank) == ("ValueError", "the reason", 1)
    failure = failure_of(ControllerError(OSError("store gone")))
    assert (failure.kind, failure.message, failure.rank) == ("OSError", "store gone", None)


def test_every_train_variable_exists_in_the_installed_ray() -> None:
    """A misspelt name would be ignored by Ray without a word."""
    known = {value for name, value in vars(constants).items() if name.endswith("_ENV_VAR")}
    ours = {name for name in driver_environment() if name.startswith("RAY_TRAIN_")}
    assert ours <= known
    # METRICS_ENABLED is read by the driver alone; the rest must reach controller and workers
    assert ours - {constants.METRICS_ENABLED_ENV_VAR} <= constants.ENV_VARS_TO_PROPAGATE


def test_loop_config_survives_json_and_refuses_what_it_does_not_know() -> None:
    config = LoopConfig(crash_at=(4, 2), dropout=0.5)
    assert LoopConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(UserError, match="learning_rate"):
        LoopConfig.from_dict({"learning_rate": 1})
