"""Broken copies of a document of `context`, by claim."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]


def _ranks(document: Document, placement: str) -> list[dict[str, Any]]:
    return sorted(document["placements"][placement]["ranks"], key=lambda rank: rank["world_rank"])


def local_ranks_all_zero_on_one_node(document: Document) -> None:
    for rank in _ranks(document, "one-node"):
        rank["local_rank"] = 0


def both_ranks_on_one_node(document: Document) -> None:
    first, second = _ranks(document, "spread")
    second["node_id"] = first["node_id"]


def world_ranks_take_turns_between_nodes(document: Document) -> None:
    ranks = _ranks(document, "two-nodes-full")
    ranks[1]["world_rank"], ranks[2]["world_rank"] = 2, 1


def the_driver_gets_a_context(document: Document) -> None:
    document["driver"] = {"raised": None, "message": "", "gave": "TrainContext"}


def one_model_stays_behind(document: Document) -> None:
    _ranks(document, "spread")[1]["moves"] = []


def wrapped_at_one_rank(document: Document) -> None:
    _ranks(document, "alone")[0]["wrapped_in"] = "DistributedDataParallel"


def keys_without_a_prefix(document: Document) -> None:
    _ranks(document, "one-node")[0]["keys"] = ["bias", "weight"]


def use_gpu_asks_for_none(document: Document) -> None:
    document["use_gpu"]["with"] = document["use_gpu"]["without"]


TWINS = {
    "one-node": local_ranks_all_zero_on_one_node,
    "spread": both_ranks_on_one_node,
    "two-nodes-full": world_ranks_take_turns_between_nodes,
    "driver": the_driver_gets_a_context,
    "moved": one_model_stays_behind,
    "wrapped": wrapped_at_one_rank,
    "keys": keys_without_a_prefix,
    "use-gpu": use_gpu_asks_for_none,
}
