"""Broken copies of a document of `article`, by claim."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]


def numbers_reach_the_result(document: Document) -> None:
    document["numbers"]["result"].update({"metrics": {"loss": 0.5, "epoch": 1}, "rows": 2})


def one_row_is_read_twice(document: Document) -> None:
    first, second = document["working"]["ranks"]
    second["ids"][0] = first["ids"][0]


def the_folder_is_there(document: Document) -> None:
    document["folder"].update({"raised": None, "cause": "", "training_failed": False})


def one_checkpoint_is_pruned(document: Document) -> None:
    folders = document["folder"]["folders"]
    folders.pop(next(name for name, files in folders.items() if files))


def rank_zero_uploads_alone(document: Document) -> None:
    document["folder"]["ranks"][1]["uploads"] = []


def reports_are_as_quick(document: Document) -> None:
    for rank in document["folder"]["ranks"]:
        rank["seconds"] = list(document["working"]["ranks"][0]["seconds"])


def an_error_is_returned(document: Document) -> None:
    document["folder"].update({"result": {"error": "no such folder"}, "raised": None})


def the_driver_is_a_rank(document: Document) -> None:
    document["driver_context"] = "works: 1"


def the_crowd_gives_up_at_once(document: Document) -> None:
    document["crowd"]["seconds"] = document["crowd"]["start_timeout_s"]


def the_crowd_is_let_in(document: Document) -> None:
    document["host"]["crowd"].update({"refused": False, "message": "", "exit": 0})


def train_brings_the_dashboard(document: Document) -> None:
    extra = document["train_extra"]
    extra["without"] = dict(extra["with"])


TWINS = {
    "numbers-alone": numbers_reach_the_result,
    "shard-name": one_row_is_read_twice,
    "missing-folder": the_folder_is_there,
    "keeps-all": one_checkpoint_is_pruned,
    "every-rank": rank_zero_uploads_alone,
    "slow": reports_are_as_quick,
    "raised": an_error_is_returned,
    "driver-context": the_driver_is_a_rank,
    "crowd": the_crowd_gives_up_at_once,
    "crowd-refused": the_crowd_is_let_in,
    "train-extra": train_brings_the_dashboard,
}
