"""What breaks each claim of lesson `shards-ray-data`, in a copy of its document."""

from __future__ import annotations

from typing import Any

Doc = dict[str, Any]


def _case(document: Doc, case: str, rank: int, run: int = 0) -> dict[str, Any]:
    part = document["small"] if case in ("odd", "few") else document["runs"][run]
    found: dict[str, Any] = part["ranks"][rank]["cases"][case]
    return found


def a_row_is_on_two_ranks(document: Doc) -> None:
    _case(document, "train", 1)["epochs"][0]["ids"][0] = _case(document, "train", 0)["epochs"][0]["ids"][0]


def the_left_over_rows_go_to_a_rank(document: Doc) -> None:
    """A split that rounds up: no row is dropped, the shards are unequal."""
    _case(document, "odd", 0)["epochs"][0]["ids"] += [15, 16]


def the_second_epoch_repeats_a_row(document: Doc) -> None:
    ids = _case(document, "train", 0)["epochs"][1]["ids"]
    ids[0] = ids[1]


def one_rank_gets_both_rows(document: Doc) -> None:
    _case(document, "few", 0)["epochs"][0]["ids"] = [0, 1]


def one_rank_s_order_differs(document: Doc) -> None:
    _case(document, "ordered", 2, run=1)["epochs"][0]["ids"].reverse()


def every_batch_is_full(document: Doc) -> None:
    for rank in range(len(document["runs"][0]["ranks"])):
        _case(document, "ragged-a", rank)["epochs"][0]["sizes"] = [8] * 5


def one_rank_does_a_step_more(document: Doc) -> None:
    _case(document, "ragged-b", 0)["steps"]["sizes"].append(8)


def the_evaluation_set_is_split(document: Doc) -> None:
    for rank in range(len(document["runs"][0]["ranks"])):
        seen = _case(document, "evaluation", rank)["epochs"][0]
        seen["ids"] = seen["ids"][rank::4]


def the_sentence_does_not_name_the_column(document: Doc) -> None:
    document["refusals"]["words"]["message"] = "the data cannot become tensors."


def a_local_file_is_not_read(document: Doc) -> None:
    for rank in range(len(document["runs"][0]["ranks"])):
        seen = _case(document, "rest", rank, run=1)["epochs"][0]
        seen["ids"] = [row for row in seen["ids"] if row < 800]


def all_is_read_before_the_first_batch(document: Doc) -> None:
    for rank in range(len(document["runs"][0]["ranks"])):
        _case(document, "train", rank)["epochs"][0]["first_at"] += 3600.0


def every_cpu_may_be_taken(document: Doc) -> None:
    document["host"]["no_spare"] |= {"refused": False, "message": "", "exit": 0}


TWINS = {
    "disjoint": a_row_is_on_two_ranks,
    "rows": the_left_over_rows_go_to_a_rank,
    "union": the_second_epoch_repeats_a_row,
    "empty-shard": one_rank_gets_both_rows,
    "order": one_rank_s_order_differs,
    "ragged": every_batch_is_full,
    "steps": one_rank_does_a_step_more,
    "evaluation": the_evaluation_set_is_split,
    "words": the_sentence_does_not_name_the_column,
    "parquet": a_local_file_is_not_read,
    "streaming": all_is_read_before_the_first_batch,
    "spare-cpu": every_cpu_may_be_taken,
}
