"""Lesson `resume` beyond its short form: every kind of storage, and a live twin for every part of the state."""

from __future__ import annotations

import pytest

from lab.lessons.resume import WITHOUT
from tests.conftest import QUICK, RUNTIMES, Cluster, claims


@pytest.mark.parametrize("cluster", RUNTIMES[:1] if QUICK else RUNTIMES, indirect=True)
def test_c8_bit_identical_on_a_local_path_s3_by_pyarrow_and_s3_by_s3fs(cluster: Cluster) -> None:
    result = cluster.run("resume", "--all-storages")
    halves = claims(result)["halves"]
    assert halves["verdict"] == "holds"
    assert sorted(where.rpartition(" by ")[2] for where in halves["measured"]) == [
        "LocalFileSystem",
        "PyFileSystem",
        "S3FileSystem",
    ]


@pytest.mark.full
@pytest.mark.parametrize("part", WITHOUT)
def test_c8_a_state_without_any_one_part_makes_the_lesson_fail(cluster: Cluster, part: str) -> None:
    result = cluster.run("resume", "--leave-out", part, "--all-storages", "false")
    assert claims(result)["halves"]["verdict"] == "fails"
    assert not result.holds
