"""Data, models, and the training state: what is saved comes back bit for bit, what is damaged never does."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import numpy as np  # noqa: E402

from lab.errors import UserError  # noqa: E402
from lab.training import state  # noqa: E402
from lab.training.data import digits, linear_toy  # noqa: E402
from lab.training.models import build_model  # noqa: E402


def make_state() -> state.TrainingState:
    model = build_model("linear", 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    return state.TrainingState(
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        scheduler=scheduler.state_dict(),
        rng=[state.rng_state(), state.rng_state()],
        epoch=1,
        step=1,
        sampler_epoch=1,
        history=[{"epoch": 0, "loss": 0.5}],
        world_size=2,
        global_batch=64,
        seed=3,
    )


def test_digits_split_is_fixed_disjoint_and_whole() -> None:
    train, held_out = digits("train"), digits("held-out")
    images, labels, ids = train.tensors
    assert images.shape == (1536, 1, 8, 8)
    assert len(held_out) == 261
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert 0.0 == images.min() < images.max() == 1.0
    assert ids.tolist() == list(range(1536))
    assert state.tensors_sha256({"x": images}) == state.tensors_sha256({"x": digits("train").tensors[0]})
    counts = torch.bincount(torch.cat([labels, held_out.tensors[1]]))
    # the collection's own class counts, from its description at UCI
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_shuffled_labels_keep_images_and_counts() -> None:
    true, shuffled = digits("train"), digits("train", shuffled_labels_seed=1)
    assert torch.equal(true.tensors[0], shuffled.tensors[0])
    assert torch.equal(true.tensors[1].bincount(), shuffled.tensors[1].bincount())
    assert (true.tensors[1] == shuffled.tensors[1]).float().mean() < 0.2


def test_linear_toy_follows_its_seed() -> None:
    assert torch.equal(linear_toy(10, 1).tensors[0], linear_toy(10, 1).tensors[0])
    assert not torch.equal(linear_toy(10, 1).tensors[0], linear_toy(10, 2).tensors[0])
    assert linear_toy(10, 1).tensors[1].shape == (10, 2)


def test_building_a_model_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first = build_model("small-cnn", 1).state_dict()
    assert torch.equal(torch.rand(1), expected)
    assert state.tensors_sha256(first) == state.tensors_sha256(build_model("small-cnn", 1).state_dict())
    assert sum(tensor.numel() for tensor in first.values()) == 9930
    with pytest.raises(UserError, match="'resnet'"):
        build_model("resnet", 1)


def test_state_comes_back_bit_identical(tmp_path: Path) -> None:
    saved = make_state()
    state.save(tmp_path, saved)
    loaded = state.load(tmp_path)
    for part in ("model", "optimizer", "scheduler", "rng", "history"):
        assert state.state_sha256(getattr(loaded, part)) == state.state_sha256(getattr(saved, part))
    assert (loaded.epoch, loaded.step, loaded.sampler_epoch, loaded.world_size) == (1, 1, 1, 2)


def test_rng_goes_on_where_it_was() -> None:
    state.seed_rank(1, 2, 3)
    saved = state.rng_state()
    expected = (random.random(), float(np.random.rand()), float(torch.rand(1)))
    state.restore_rng(saved)
    assert (random.random(), float(np.random.rand()), float(torch.rand(1))) == expected


def test_another_world_size_seeds_anew_by_seed_epoch_and_rank() -> None:
    saved = make_state()
    seen = set()
    for seed, epoch, rank in [(3, 1, 0), (3, 1, 1), (3, 2, 0), (4, 1, 0)]:
        state.restore_rank(replace(saved, seed=seed, epoch=epoch), rank, 3)
        seen.add(float(torch.rand(1)))
    assert len(seen) == 4
    state.restore_rank(saved, 1, 2)
    assert state.state_sha256(state.rng_state()) == state.state_sha256(saved.rng[1])  # type: ignore[index]


@pytest.mark.parametrize("part", state.PARTS)
def test_a_part_left_out_is_none_and_refused_unless_expected(tmp_path: Path, part: str) -> None:
    kept = [one for one in state.PARTS if one != part]
    state.save(tmp_path, make_state(), kept)
    loaded = state.load(tmp_path, kept)
    assert getattr(loaded, {"sampler": "sampler_epoch"}.get(part, part)) is None
    with pytest.raises(state.DamagedCheckpoint, match=f"saved without {part}"):
        state.load(tmp_path)


def test_unknown_part(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="momentum"):
        state.save(tmp_path, make_state(), ["momentum"])


FILES = ("model.pt", "optimizer.pt", "scheduler.pt", "rng.pt", "progress.json", "manifest.json")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", ["gone", "empty", "truncated", "one byte"])
def test_damage_is_named_and_never_loaded(tmp_path: Path, file: str, how: str) -> None:
    state.save(tmp_path, make_state())
    path = tmp_path / file
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.write_bytes(b"!" + content[1:])
    with pytest.raises(state.DamagedCheckpoint) as caught:
        state.load(tmp_path)
    assert str(path) in str(caught.value)
    assert "--fresh" in str(caught.value)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    state.save(tmp_path, make_state())
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"schema": 99}))
    with pytest.raises(state.DamagedCheckpoint, match="schema 99"):
        state.load(tmp_path)


def test_nothing_but_weights_is_unpickled(tmp_path: Path) -> None:
    """A file that would run code on loading is refused even when the manifest vouches for it."""

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (print, ("ran",))

    saved = make_state()
    state.save(tmp_path, replace(saved, extra={}, model={"weight": Evil()}))
    with pytest.raises(state.DamagedCheckpoint, match="cannot be read"):
        state.load(tmp_path)
