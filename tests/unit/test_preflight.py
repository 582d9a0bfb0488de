"""What is refused from the settings alone."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lab.errors import UserError
from lab.lessons import preflight
from lab.lessons.contract import Lesson, Needs, Params
from lab.lessons.preflight import Shape
from lab.storage import Location

HEAD = Lesson(
    name="one",
    title="",
    idea="",
    needs=Needs("head"),
    observe="",
    claims=(),
    figures=lambda document, folder: [],
)
NODES = replace(HEAD, name="several", needs=Needs("worker", nodes=2), default_storage="s3")
STREAM = replace(HEAD, name="stream", needs=Needs("worker", spare_cpus=1), default_storage="s3")
SHAPE = Shape(nodes=2, node_cpus=4)


@dataclass(frozen=True)
class Shared(Params):
    shared_path: bool = True


@pytest.mark.parametrize(
    ("lesson", "params"),
    [
        (HEAD, Params(workers=1)),
        (HEAD, Params(workers=4)),
        (NODES, Params(workers=2)),
        (NODES, Params(workers=8)),
        (STREAM, Params(workers=7)),
        (HEAD, Params(name="mine", fresh=True)),
    ],
)
def test_what_fits_passes(lesson: Lesson, params: Params) -> None:
    preflight.check(lesson, params, SHAPE)


@pytest.mark.parametrize(
    ("lesson", "params", "shape", "sentence"),
    [
        (HEAD, Params(workers=0), SHAPE, "LAB_WORKERS=0 is not a world size"),
        (HEAD, Params(workers=-1), SHAPE, "LAB_WORKERS=-1 is not a world size"),
        (HEAD, Params(workers=5), SHAPE, "LAB_WORKERS=5 does not fit: have 4 CPUs on the head, need 5"),
        (
            NODES,
            Params(workers=9),
            SHAPE,
            "LAB_WORKERS=9 does not fit: have 8 CPUs on 2 worker nodes, need 9",
        ),
        (NODES, Params(workers=1), SHAPE, "LAB_WORKERS=1 cannot be on 2 nodes"),
        # pitfall D7: no CPU would be left for Ray Data
        (
            STREAM,
            Params(workers=2),
            Shape(nodes=1, node_cpus=2),
            "LAB_WORKERS=2 leaves too few CPUs for the data pipeline: have 2 CPUs, need 3",
        ),
        (NODES, Params(workers=2), Shape(1, 4), "LAB_NODES=1 is too few for lesson several: it needs 2"),
        (HEAD, Params(fresh=True), SHAPE, "LAB_FRESH=1 needs the run"),
        (HEAD, Params(name="../other"), SHAPE, "LAB_NAME='../other' cannot name a run"),
        (HEAD, Params(name="a/b"), SHAPE, "LAB_NAME='a/b' cannot name a run"),
    ],
)
def test_what_cannot_fit_is_refused(lesson: Lesson, params: Params, shape: Shape, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        preflight.check(lesson, params, shape)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_lesson_s_own_check_is_asked() -> None:
    def refuse(params: Params) -> None:
        raise UserError(f"not with seed {params.seed}")

    with pytest.raises(UserError, match="not with seed 3"):
        preflight.check(replace(HEAD, check=refuse), Params(seed=3), SHAPE)


def test_the_default_storage_is_the_lesson_s() -> None:
    where = [preflight.storage_location(lesson, Params(), "/root/local", "lab") for lesson in (HEAD, NODES)]
    assert where == [Location("local", "/root/local/runs"), Location("s3", "lab/runs")]
    asked = preflight.storage_location(HEAD, Params(storage="s3://mine/x"), "/root/local", "lab")
    assert asked == Location("s3", "mine/x")


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every folder may be written to, as root may: for tests that ask for something else of a path."""
    monkeypatch.setattr(os, "access", lambda path, mode: True)


@pytest.mark.usefixtures("may_write")
def test_a_local_path_on_several_nodes_is_refused_unless_shared() -> None:
    local = Location("local", "/data/runs")
    with pytest.raises(
        UserError, match=r"^LAB_STORAGE=/data/runs is a local path.*s3://BUCKET.*S3_ENDPOINT.*--shared-path"
    ):
        preflight.check_storage(NODES, Params(), local, "/data", "embedded")
    preflight.check_storage(NODES, Shared(), local, "/data", "embedded")
    preflight.check_storage(NODES, Params(), Location("s3", "lab/runs"), "/data", "embedded")
    preflight.check_storage(HEAD, Params(), local, "/data", "embedded")


@pytest.mark.usefixtures("may_write")
@pytest.mark.parametrize("path", ["/data2/runs", "/other", "/"])
def test_containers_keep_one_folder_alone(path: str) -> None:
    with pytest.raises(UserError, match="the only folder that the containers keep"):
        preflight.check_storage(HEAD, Params(), Location("local", path), "/data", "compose")
    preflight.check_storage(HEAD, Params(), Location("local", path), "/data", "embedded")


def test_more_ranks_than_cores_is_a_warning_alone(tmp_path: Path) -> None:
    assert preflight.warnings(Params(workers=2), cores=2) == []
    (warning,) = preflight.warnings(Params(workers=3), cores=2)
    assert "3 ranks on a host with 2 cores" in warning
