"""Lesson `uneven`: a rank with one batch more waits for ranks that are done; a rank that never reports is waited for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.errors import UserError
from lab.lessons.contract import Break, Claim, Document, Finding, Lesson, Needs, Params
from lab.lessons.judging import equal
from lab.report.plots import figure

PATIENCE = 2.0
"""A wait that ends by its limit takes between once and this many times the limit."""
REPORT_S = 40.0
"""Within this, a missing report has to end the run (pitfall F1)."""


@dataclass(frozen=True)
class Uneven(Params):
    """`batches` dealt out in turn; `limit` and `report_limit` are seconds."""

    batches: int = field(default=9, metadata={"help": "batches, dealt out to the ranks in turn"})
    limit: float = field(default=20.0, metadata={"help": "seconds a rank waits in a collective of DDP"})
    report_limit: float = field(default=30.0, metadata={"help": "seconds a report waits for the other ranks"})


def _check(params: Uneven) -> None:
    if params.workers < 2:
        raise UserError(f"LAB_WORKERS={params.workers}: one rank waits for nobody; use 2 or more.")
    if params.batches % params.workers == 0 or params.batches < params.workers:
        near = max(params.batches // params.workers, 1) * params.workers + 1
        raise UserError(
            f"--batches={params.batches} gives {params.workers} workers no uneven work to do: use {near}."
        )
    for name, value in (("limit", params.limit), ("report-limit", params.report_limit)):
        if not 1 <= value <= 60:
            raise UserError(f"--{name}={value:g} is not a limit for a lesson: use 1 to 60 seconds.")


def dealt(document: Document) -> list[int]:
    """Batches of each rank, from the parameters: rank r takes r, r + W, r + 2 W, ..."""
    batches, workers = document["params"]["batches"], document["params"]["workers"]
    return [len(range(rank, batches, workers)) for rank in range(workers)]


def _ranks(document: Document, which: str) -> list[Mapping[str, Any]]:
    ranks: list[Mapping[str, Any]] = document[which]["ranks"]
    if len(ranks) != document["params"]["workers"]:
        error = document[which]["outcome"]["error"]
        raise ValueError(f"{len(ranks)} ranks of {which} said what they saw: {error and error['message']}")
    return ranks


def _join(document: Document) -> Finding:
    ranks = [rank["join"] for rank in _ranks(document, "batches")]
    return equal(
        {"steps": dealt(document), "errors": [], "different parameters": 1},
        {
            "steps": [rank["steps"] for rank in ranks],
            "errors": [rank["error"] for rank in ranks if rank["error"]],
            "different parameters": len({rank["parameters_sha256"] for rank in ranks}),
        },
    )


def _hang(document: Document) -> Finding:
    work = dealt(document)
    limit = document["params"]["limit"]
    ranks = [rank["no_join"] for rank in _ranks(document, "batches")]
    hung = [number for number, rank in enumerate(ranks) if rank["error"]]
    waited = [ranks[number]["last_step_seconds"] for number in hung]
    expected = [number for number, count in enumerate(work) if count > min(work)]
    return Finding(
        {
            "ranks that hang": expected,
            "steps": [min(work)] * len(work),
            "seconds": f"{limit:g} to {limit * PATIENCE:g}",
        },
        {
            "ranks that hang": hung,
            "steps": [rank["steps"] for rank in ranks],
            "seconds": [round(s, 2) for s in waited],
        },
        hung == expected
        and {rank["steps"] for rank in ranks} == {min(work)}
        # the clock of the wait starts a moment before the limit's own
        and all(limit * 0.99 <= seconds <= limit * PATIENCE for seconds in waited),
    )


def _named(document: Document) -> Finding:
    work = dealt(document)
    error = document["batches"]["outcome"]["error"] or {"kind": "no error", "message": ""}
    absent = [number for number, count in enumerate(work) if count == min(work)]
    words = ["all-reduce", f"step {min(work)}", *(f"rank {number}, which left" for number in absent)]
    return Finding(
        f"UnevenSteps, naming {'; '.join(words)}",
        f"{error['kind']}: {error['message']}",
        error["kind"] == "UnevenSteps" and all(word in error["message"] for word in words),
    )


def _report(document: Document) -> Finding:
    error = document["report"]["outcome"]["error"] or {"kind": "no error", "message": ""}
    absent = ", ".join(str(rank) for rank in range(1, document["params"]["workers"]))
    waited = next((rank["waited"] for rank in _ranks(document, "report") if "waited" in rank), None)
    return Finding(
        f"MissingRank within {REPORT_S:g} s: rank {absent} did not report",
        f"{error['kind']} after {waited and round(waited, 1)} s: {error['message']}",
        error["kind"] == "MissingRank"
        and f"rank {absent} did not report" in error["message"]
        and waited is not None
        and waited < REPORT_S,
    )


def _measurements(document: Document) -> dict[str, Any]:
    return {
        "batches by rank": [rank["batches"] for rank in _ranks(document, "batches")],
        "seconds of the last step": {
            which: [round(rank[which]["last_step_seconds"], 3) for rank in _ranks(document, "batches")]
            for which in ("join", "no_join")
        },
        "seconds in report": [rank.get("waited") for rank in _ranks(document, "report")],
        "fit_seconds": [document[which]["outcome"]["seconds"] for which in ("batches", "report")],
    }


def _figures(document: Document, folder: Path) -> list[Path]:
    path = folder / "waiting.png"
    ranks = _ranks(document, "batches")
    with figure(path, columns=2) as (left, right):
        for place, (which, label) in enumerate((("join", "with join"), ("no_join", "without"))):
            for rank in ranks:
                y = place * (len(ranks) + 1) + rank["rank"]
                done = rank[which]["steps"]
                left.barh(y, done, color="#4477aa", edgecolor="white")
                if rank[which]["error"]:
                    left.barh(y, 1, left=done, color="#ee6677", hatch="//", edgecolor="white")
                    left.text(done + 1.1, y, "waits", va="center")
                left.text(0.1, y, f"rank {rank['rank']}, {label}", va="center", color="white")
        left.invert_yaxis()
        left.set_yticks([])
        left.set(
            xlabel="steps done", title=f"{document['params']['batches']} batches over {len(ranks)} ranks"
        )
        names = ["last step\nwith join", "last step\nwithout", "report of\nrank 0 alone"]
        seconds = [
            max(rank["join"]["last_step_seconds"] for rank in ranks),
            max(rank["no_join"]["last_step_seconds"] for rank in ranks),
            max(rank.get("waited", 0.0) for rank in _ranks(document, "report")),
        ]
        right.bar(names, seconds, color=["#4477aa", "#ee6677", "#ee6677"])
        for place, value in enumerate(seconds):
            right.text(place, value, f"{value:.1f} s", ha="center", va="bottom")
        for place, limit in ((1, "limit"), (2, "report_limit")):
            right.hlines(document["params"][limit], place - 0.4, place + 0.4, color="#222222", linestyle="--")
        right.set(ylabel="seconds", title="Waiting ends at its limit (dashed)")
    return [path]


LESSON = Lesson(
    name="uneven",
    title="one batch more on one rank hangs them all, unless a limit ends it",
    idea=(
        "Every step of DDP is a meeting of all ranks. A rank with one batch more waits for ranks that have left; so "
        "does a report that one rank alone calls. A limit turns the silence into a sentence that names who is missing; "
        "join() lets the ranks that are done take part until the last one is."
    ),
    needs=Needs("worker"),
    observe="uneven",
    params=Uneven,
    default_storage="s3",
    check=_check,
    quick={"limit": 5.0, "report_limit": 8.0},
    claims=(
        Claim("join", "with join, uneven ranks end by themselves, all with the same parameters", _join),
        Claim("hang", "without, the rank with more batches waits in the next step until its limit", _hang),
        Claim("named", "the run's error names the collective, the step and the rank that left", _named),
        Claim("never-reports", "a report that the other ranks do not make ends, naming them", _report),
    ),
    breaks=(
        Break("no-join", "leaves out join where it would help", ("join",)),
        Break(
            "even",
            "gives every rank the same work, and all report: nothing hangs",
            ("hang", "named", "never-reports"),
        ),
    ),
    measurements=_measurements,
    figures=_figures,
    seconds=(35, 75),
)
