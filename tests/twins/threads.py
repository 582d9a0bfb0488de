"""Broken copies of a document of `threads`, by claim."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]


def many_threads_are_as_fast(document: Document) -> None:
    for rank in document["ranks"]:
        for pair in rank["pairs"]:
            pair["many"] = dict(pair["one"])


def no_thread_was_started(document: Document) -> None:
    for rank in document["ranks"]:
        rank["os_threads_after"] = rank["os_threads_before"]


def a_rank_takes_every_core(document: Document) -> None:
    document["ranks"][1] |= {"omp": None, "torch_threads": document["cores"]}


def a_grid_beyond_the_cores_is_let_in(document: Document) -> None:
    document["host"]["too_many"] |= {"refused": False, "exit": 0, "message": ""}


TWINS = {
    "oversubscribed": many_threads_are_as_fast,
    "real-threads": no_thread_was_started,
    "default": a_rank_takes_every_core,
    "refused": a_grid_beyond_the_cores_is_let_in,
}
