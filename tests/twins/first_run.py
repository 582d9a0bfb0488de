"""Broken copies of a document of `first-run`, by claim."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]


def one_process_for_two_ranks(document: Document) -> None:
    ranks = document["train"]["ranks"]
    ranks[1]["pid"] = ranks[0]["pid"]


def both_ranks_see_one_sample(document: Document) -> None:
    first, second = (rank["ids"][0]["ids"] for rank in document["train"]["ranks"])
    second[0] = first[0]


def one_gradient_for_all(document: Document) -> None:
    ranks = document["train"]["ranks"]
    ranks[1]["local_gradient_sha256"] = ranks[0]["local_gradient_sha256"]


def ranks_end_apart(document: Document) -> None:
    document["train"]["ranks"][1]["parameters_sha256"] = "0" * 64


def learns_too_little(document: Document) -> None:
    document["train"]["outcome"]["metrics"]["accuracy"] = 0.94


def late_report_replaces_the_last(document: Document) -> None:
    document["train"]["outcome"]["metrics"]["late"] = 1


def a_checkpoint_lacks_the_optimizer(document: Document) -> None:
    files = document["train"]["files"]
    files[:] = [entry for entry in files if not entry["path"].endswith("0001_attempt-000/optimizer.pt")]


def one_rank_too_many_is_let_in(document: Document) -> None:
    document["host"]["too_many"] |= {"refused": False, "exit": 0, "message": ""}


TWINS = {
    "processes": one_process_for_two_ranks,
    "data": both_ranks_see_one_sample,
    "gradients": one_gradient_for_all,
    "parameters": ranks_end_apart,
    "accuracy": learns_too_little,
    "result-metrics": late_report_replaces_the_last,
    "tree": a_checkpoint_lacks_the_optimizer,
    "too-many": one_rank_too_many_is_let_in,
}
