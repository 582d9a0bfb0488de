"""What breaks each claim of lesson `iterable`, in a copy of its document."""

from __future__ import annotations

from typing import Any

Doc = dict[str, Any]


def one_loader_worker_reads_nothing(document: Doc) -> None:
    rows = document["ranks"][0]["streams"]["bare"]
    reading = rows[0][1]
    document["ranks"][0]["streams"]["bare"] = [row for row in rows if row[1] != reading]


def two_readers_have_the_same_part(document: Doc) -> None:
    document["ranks"][1]["streams"]["shared"] = document["ranks"][0]["streams"]["shared"]


def a_second_pass_is_made(document: Doc) -> None:
    """Every row is still there once, but rank 1's come from a pass of its own."""
    rows = document["ranks"][1]["streams"]["ray-data"]
    document["ranks"][1]["streams"]["ray-data"] = [[number, "another"] for number, _ in rows]


def one_rank_does_a_step_less(document: Doc) -> None:
    document["ranks"][1]["endless"]["epochs"][0].pop()


def the_second_epoch_starts_anew(document: Doc) -> None:
    for rank in document["ranks"]:
        rank["endless"]["epochs"][1] = rank["endless"]["epochs"][0]


def nothing_is_refused(document: Doc) -> None:
    document["host"]["no_steps"] |= {"refused": False, "message": "", "exit": 0}


TWINS = {
    "bare": one_loader_worker_reads_nothing,
    "shared": two_readers_have_the_same_part,
    "ray-data": a_second_pass_is_made,
    "steps": one_rank_does_a_step_less,
    "goes-on": the_second_epoch_starts_anew,
    "no-steps": nothing_is_refused,
}
