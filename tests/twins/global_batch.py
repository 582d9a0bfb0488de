"""Broken copies of a document of `global-batch`, by claim."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]


def each_rank_takes_the_whole_batch(document: Document) -> None:
    document["worlds"]["2"]["cases"]["float64"]["sizes"] = [document["params"]["global_batch"]]


def two_steps_swap_a_sample(document: Document) -> None:
    first = document["worlds"]["2"]["ids"][0]
    first[0][0], first[1][0] = first[1][0], first[0][0]


def one_loss_differs(document: Document) -> None:
    document["worlds"]["2"]["cases"]["float64"]["losses"][5] += 1e-5


def float32_drifts_away(document: Document) -> None:
    document["worlds"]["2"]["cases"]["float32"]["weights"]["relative"] = 2e-3


def accumulated_weights_differ(document: Document) -> None:
    document["worlds"]["2"]["cases"]["accumulated"]["weights"]["largest"] = 1e-5


def the_worker_batch_does_not_matter(document: Document) -> None:
    document["worlds"]["2"]["cases"]["worker batch"]["weights"]["largest"] = 1e-7


def scaling_changes_nothing(document: Document) -> None:
    cases = document["worlds"]["2"]["cases"]
    cases["worker batch, scaled"]["epoch_loss"] = list(cases["worker batch"]["epoch_loss"])


def an_indivisible_batch_is_let_in(document: Document) -> None:
    document["host"]["indivisible"] |= {"refused": False, "exit": 0, "message": ""}


TWINS = {
    "product": each_rank_takes_the_whole_batch,
    "same-batches": two_steps_swap_a_sample,
    "float64": one_loss_differs,
    "float32": float32_drifts_away,
    "accumulation": accumulated_weights_differ,
    "worker-batch": the_worker_batch_does_not_matter,
    "lr-scaling": scaling_changes_nothing,
    "refused": an_indivisible_batch_is_let_in,
}
