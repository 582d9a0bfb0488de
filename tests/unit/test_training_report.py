"""What may be reported, and the lab's own records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ray.train")
import numpy as np  # noqa: E402

from lab.storage import open_storage, parse_location  # noqa: E402
from lab.training import records  # noqa: E402
from lab.training import report as reports  # noqa: E402


def test_c2_metrics_become_plain_python() -> None:
    plain = reports.plain_metrics(
        {
            "a": np.float32(0.5),
            "b": np.int64(3),
            "c": torch.tensor(2.0),
            "d": np.array(1.5),
            "eval": {"accuracy": torch.tensor(1)},
            "flag": np.bool_(True),
        }
    )
    assert plain == {"a": 0.5, "b": 3, "c": 2.0, "d": 1.5, "eval": {"accuracy": 1}, "flag": True}
    assert [type(value) for value in plain.values()] == [float, int, float, float, dict, bool]


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), np.float32("-inf"), torch.tensor(float("nan"))]
)
def test_c2_non_finite_is_refused_by_name_and_epoch(value: Any) -> None:
    with pytest.raises(reports.NonFiniteMetric, match=r"'eval/loss' .* epoch 4"):
        reports.plain_metrics({"eval": {"loss": value}}, 4)


def test_a_tensor_of_many_is_refused() -> None:
    with pytest.raises(reports.NotPlainMetric, match="'x' is a Tensor"):
        reports.plain_metrics({"x": torch.ones(2)})


def test_every_required_metric_must_be_there() -> None:
    reports.check_required({"loss": 1.0, "eval": {"accuracy": 0.5}}, ["loss", "eval/accuracy"])
    reports.check_required({"eval/accuracy": 0.5}, ["eval/accuracy"])
    with pytest.raises(reports.MissingMetric, match=r"'eval/accuracy' .* epoch 2.* it has loss"):
        reports.check_required({"loss": 1.0}, ["eval/accuracy"], 2)
    with pytest.raises(reports.MissingMetric):
        reports.check_required({"loss": "low"}, ["loss"])


def test_c6_shards_carry_their_rank(tmp_path: Path) -> None:
    (tmp_path / reports.shard_name("optimizer", 1)).write_bytes(b"")
    reports._check_shard_names(tmp_path, 1)
    (tmp_path / reports.shard_name("optimizer", 11)).write_bytes(b"")
    with pytest.raises(reports.SharedFileName, match="optimizer"):
        reports._check_shard_names(tmp_path, 1)


def test_the_line_of_a_rank(tmp_path: Path) -> None:
    storage = open_storage(parse_location(str(tmp_path)))
    rank = reports.Rank("r", storage, 0, 1, 2, 1, 0, 0.0, reports.FirstStep())
    assert reports.line(rank, {"epoch": 3, "loss": 0.1234567}, 3) == "[rank 1/2] epoch 3 loss 0.1235"


def test_the_first_step_of_any_optimizer_is_noted_and_no_later_one() -> None:
    first = reports.FirstStep()
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    assert first.at is None
    torch.optim.SGD([weight], lr=0.1).step()
    noted = first.at
    assert noted is not None
    torch.optim.Adam([weight]).step()
    assert first.at == noted


def test_c4_an_epoch_done_twice_is_two_rows_in_time_order(tmp_path: Path) -> None:
    storage = open_storage(parse_location(str(tmp_path)))
    assert records.read_epoch_log(storage, "r") == []
    assert records.last_attempt(storage, "r") is None
    for epochs in ([0, 1], [1, 2]):
        attempt = records.begin_attempt(storage, "r", {})
        for epoch in epochs:
            records.write_epoch(storage, "r", {"epoch": epoch, "attempt": attempt, "time": 0.0})
    rows = [(row["attempt"], row["epoch"]) for row in records.read_epoch_log(storage, "r")]
    assert rows == [(0, 0), (0, 1), (1, 1), (1, 2)]
    assert records.last_attempt(storage, "r") == 1


def test_observations_are_replaced_and_chosen_by_attempt(tmp_path: Path) -> None:
    storage = open_storage(parse_location(str(tmp_path)))
    for attempt, rank, value in [(0, 1, 1), (0, 0, 2), (1, 0, 3), (0, 1, 4)]:
        records.write_observation(storage, "r", rank, attempt, {"value": value})
    assert [row["value"] for row in records.read_observations(storage, "r")] == [2, 4, 3]
    assert [row["value"] for row in records.read_observations(storage, "r", 1)] == [3]
