"""What breaks each claim of lesson `uneven`, in a copy of its document."""

from __future__ import annotations

from typing import Any

Doc = dict[str, Any]


def the_early_rank_is_left_behind(document: Doc) -> None:
    """It did its steps, but did not take part in the last one."""
    document["batches"]["ranks"][1]["join"]["parameters_sha256"] = "0" * 64


def the_wait_goes_on(document: Doc) -> None:
    for rank in document["batches"]["ranks"]:
        rank["no_join"]["last_step_seconds"] *= 10


def another_rank_is_named(document: Doc) -> None:
    error = document["batches"]["outcome"]["error"]
    error["message"] = error["message"].replace("rank 1, which left", "rank 3, which left")


def the_wait_for_reports_has_no_limit(document: Doc) -> None:
    for rank in document["report"]["ranks"]:
        if "waited" in rank:
            rank["waited"] = 100.0


TWINS = {
    "join": the_early_rank_is_left_behind,
    "hang": the_wait_goes_on,
    "named": another_rank_is_named,
    "never-reports": the_wait_for_reports_has_no_limit,
}
