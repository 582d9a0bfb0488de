"""Lesson `shards-sampler`: the laws of shards, for any sizes (pitfalls D1, D2, D3, D9)."""

from __future__ import annotations

import ast
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lab.errors import UserError
from lab.lessons.shards_sampler import BEFORE, CHANGED, LESSON, MEASURED_WITH, ShardsSampler, dealt, padding
from lab.settings import CHECKOUT
from lab.training.shards import exact_shard, worker_loader

rows = st.integers(1, 300)
ranks = st.integers(1, 16)


def numbered(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def shards(count: int, world: int, epoch: int = 0, **options: bool) -> list[list[int]]:
    """What torch's own sampler gives each rank."""
    samplers = [DistributedSampler(numbered(count), world, rank, **options) for rank in range(world)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


@given(rows, ranks, st.booleans())
def test_D3_padding_repeats_the_first_samples_and_nothing_else(count: int, world: int, shuffle: bool) -> None:
    order = dealt(shards(count, world, shuffle=shuffle))
    extra = padding(count, world)
    assert 0 <= extra < world
    assert sorted(order[:count]) == list(range(count))
    assert order[count:] == [order[place % count] for place in range(extra)]


@given(rows, ranks)
def test_without_shuffling_shards_are_stripes(count: int, world: int) -> None:
    for rank, shard in enumerate(shards(count, world, shuffle=False)):
        stripe = list(range(rank, count, world))
        assert shard[: len(stripe)] == stripe


@settings(max_examples=30)
@given(st.integers(50, 300), ranks, st.integers(0, 1000))
def test_D2_another_epoch_is_another_order_and_the_same_epoch_the_same(
    count: int, world: int, epoch: int
) -> None:
    assert shards(count, world, epoch) == shards(count, world, epoch)
    assert dealt(shards(count, world, epoch)) != dealt(shards(count, world, epoch + 1))


@given(rows, ranks)
def test_D3_exact_shards_hold_every_sample_once(count: int, world: int) -> None:
    if count < world:
        with pytest.raises(UserError, match=f"{count} samples leave {world - count} of {world} workers"):
            exact_shard(count, world, 0)
        return
    everyone = [exact_shard(count, world, rank) for rank in range(world)]
    assert sorted(sample for shard in everyone for sample in shard) == list(range(count))
    assert max(map(len, everyone)) - min(map(len, everyone)) <= 1


@given(st.lists(st.booleans(), min_size=2, max_size=60), st.integers(2, 8), st.integers(1, 16))
def test_D3_sums_over_exact_shards_are_the_single_processs(right: list[bool], world: int, batch: int) -> None:
    world = min(world, len(right))
    pairs = []
    for rank in range(world):
        shard = exact_shard(len(right), world, rank)
        loader = DataLoader(TensorDataset(torch.tensor(list(shard))), batch_size=batch)
        ids = [int(sample) for (part,) in loader for sample in part]
        pairs.append((sum(right[sample] for sample in ids), len(ids)))
    assert (sum(c for c, _ in pairs), sum(t for _, t in pairs)) == (sum(right), len(right))


def test_D1_the_committed_table_is_the_pinned_rays() -> None:
    assert f"=={MEASURED_WITH}" in (CHECKOUT / "pyproject.toml").read_text()
    recorded = json.loads((Path(__file__).parent.parent / "documents" / "shards-sampler.json").read_text())
    assert recorded["environment"]["versions"]["ray"] == MEASURED_WITH
    for way, changed in CHANGED.items():
        assert recorded["ranks"]["ranks"][0]["settings"][way]["after"] == {**BEFORE[way], **changed}


def test_D1_the_labs_loop_depends_on_no_setting_that_ray_changes() -> None:
    changed = {name for settings in CHANGED.values() for name in settings} | {"generator"}
    tree = ast.parse((CHECKOUT / "lab" / "training" / "loop.py").read_text())
    loaders = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "DataLoader"
    ]
    assert loaders
    assert not {word.arg for loader in loaders for word in loader.keywords} & changed


def test_D3_seven_samples_on_two_ranks_count_one_of_them_twice() -> None:
    first, second = shards(7, 2, shuffle=False)
    assert (first, second) == ([0, 2, 4, 6], [1, 3, 5, 0])


def test_D9_loader_processes_come_from_a_fork_server_and_stay() -> None:
    data = numbered(12)
    sampler: DistributedSampler[int] = DistributedSampler(data, 2, 1, shuffle=True, seed=3)
    loader = worker_loader(data, 4, sampler, 2, timeout_s=100)
    assert loader.multiprocessing_context.get_start_method() == "forkserver"
    assert loader.persistent_workers
    assert loader.timeout == 100
    before = set(multiprocessing.active_children())
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen.append([int(sample) for (batch,) in loader for sample in batch])
        expected = list(sampler)
        assert seen[-1] == expected
    started = set(multiprocessing.active_children()) - before
    assert len(started) == 2, "the same two processes read both epochs"
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workers": 1}, "LAB_WORKERS=1"),
        ({"rows": 3}, "--rows=3 is fewer samples than the 4 workers"),
        ({"rows": 1001}, "use 1000 or 1004"),
        ({"epochs": 1}, "--epochs=1"),
        ({"repeats": 0}, "--repeats=0"),
    ],
)
def test_bad_input_is_one_sentence(changes: dict[str, int], said: str) -> None:
    with pytest.raises(UserError) as caught:
        LESSON.check(replace(ShardsSampler(), **changes))
    assert said in str(caught.value)
    assert str(caught.value).endswith(".")
