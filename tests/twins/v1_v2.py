"""Broken copies of a document of `v1-v2`, by claim."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]


def another_ray(document: Document) -> None:
    for seen in document["settings"].values():
        seen["ray"] = "2.61.0"


def an_idiom_works_again(document: Document) -> None:
    document["settings"]["1"]["idioms"]["verbose"] = "works"


def v1_is_the_default(document: Document) -> None:
    document["settings"]["unset"] = document["settings"]["0"]


def v1_says_that_it_goes(document: Document) -> None:
    document["settings"]["0"]["said"] = ["Ray Train V1 is deprecated, use V2"]


def a_way_is_closed(document: Document) -> None:
    document["settings"]["unset"]["ways"]["tune-callback"] = "warns: no callback is called any more."


def both_ranks_are_in_the_result(document: Document) -> None:
    document["settings"]["unset"]["idioms"]["other-rank"] = "works: of-rank-0, of-rank-1"


def v2_keeps_the_last_report(document: Document) -> None:
    document["settings"]["unset"]["idioms"]["result-metrics"] = "works: report 2 of 2"


def v2_reserves_one_more(document: Document) -> None:
    document["settings"]["unset"]["idioms"]["cpus"] = "works: 3"


TWINS = {
    "pinned": another_ray,
    "table": an_idiom_works_again,
    "default": v1_is_the_default,
    "v1-silent": v1_says_that_it_goes,
    "ways": a_way_is_closed,
    "rank-0": both_ranks_are_in_the_result,
    "last-report": v2_keeps_the_last_report,
    "cpus": v2_reserves_one_more,
}
