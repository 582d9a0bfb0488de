"""Lesson `resume` beyond its short form: a live twin for every part of the state."""

from __future__ import annotations

import pytest

from lab.lessons.resume import WITHOUT
from tests.conftest import Cluster, claims


@pytest.mark.full
@pytest.mark.parametrize("part", WITHOUT)
def test_c8_a_state_without_any_one_part_makes_the_lesson_fail(cluster: Cluster, part: str) -> None:
    result = cluster.run("resume", "--leave-out", part, "--all-storages", "false")
    assert claims(result)["halves"]["verdict"] == "fails"
    assert not result.holds
