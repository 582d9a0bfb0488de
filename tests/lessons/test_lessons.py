"""Every lesson of the registry, one body for both runtimes; and its live twins."""

from __future__ import annotations

import pytest

from lab.lessons import find, lessons
from tests.conftest import QUICK, RUNTIMES, Cluster, claims

NAMES = list(lessons())
TWINS = [(name, broken.name) for name, lesson in lessons().items() for broken in lesson.breaks]
QUICK_TWINS = {
    ("first-run", "no-prepare-model"),
    ("multi-node", "one-node"),
    ("shards-sampler", "no-set-epoch"),
    ("uneven", "no-join"),
}
"""Live twins of the quick form, on one runtime; `make test-full` runs all on both. Every claim has a twin on a
document besides, in tests/unit/test_twins.py."""

CHANCE = {("first-run", "shuffled-labels"): ("accuracy", 0.2)}
"""Twins after which a measured value must be no better than chance: the claim, and the bound."""


@pytest.mark.parametrize("name", NAMES)
def test_every_claim_of_the_lesson_holds(cluster: Cluster, name: str) -> None:
    lesson = find(name)
    # the quick form too resumes on every kind of storage once, on one runtime (pitfall C8)
    everywhere = (name, cluster.runtime.name) == ("resume", RUNTIMES[0])
    result = cluster.run(name, *(["--all-storages"] if everywhere else []))
    found = claims(result)
    assert list(found) == [claim.id for claim in lesson.claims]
    failed = {key: claim for key, claim in found.items() if claim["verdict"] == "fails"}
    assert not failed
    unshown = {key for key, claim in found.items() if claim["verdict"] == "not shown"}
    assert unshown <= {claim.id for claim in lesson.claims if claim.may_be_unshown}
    assert result.holds
    assert result.figures, "a lesson has a figure"
    if everywhere:
        clients = {where.rpartition(" by ")[2] for where in found["halves"]["measured"]}
        assert clients == {"LocalFileSystem", "PyFileSystem", "S3FileSystem"}


@pytest.mark.parametrize("cluster", RUNTIMES[:1] if QUICK else RUNTIMES, indirect=True)
@pytest.mark.parametrize(
    ("name", "broken"),
    [pytest.param(*twin, marks=() if twin in QUICK_TWINS else pytest.mark.full) for twin in TWINS],
)
def test_a_broken_mechanism_makes_its_claim_fail(cluster: Cluster, name: str, broken: str) -> None:
    expected = next(item for item in find(name).breaks if item.name == broken)
    result = cluster.run(name, broken=broken)
    verdicts = {key: claim["verdict"] for key, claim in claims(result).items()}
    assert {key: verdicts[key] for key in expected.fails} == dict.fromkeys(expected.fails, "fails")
    assert not result.holds
    if (name, broken) in CHANCE:
        claim, bound = CHANCE[name, broken]
        assert claims(result)[claim]["measured"] < bound
