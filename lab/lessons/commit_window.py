"""Lesson `commit-window`: what a kill right after `report` costs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.errors import UserError
from lab.lessons.contract import Break, Claim, Document, Finding, Lesson, Needs, Params, not_shown
from lab.lessons.judging import equal
from lab.report.plots import COLOURS, figure

LEAST_RATIO = 2.0
"""How many times shorter the window must be at the short interval; the intervals themselves differ more."""
UNSEEN = "the controller's process was not seen: it is not on the driver's node"


@dataclass(frozen=True)
class CommitWindow(Params):
    """`kills` a poll interval; each attempt first has `awaited` reports whose commit is timed."""

    kills: int = field(default=6, metadata={"help": "times that rank 0 kills itself, at each poll interval"})
    awaited: int = field(default=2, metadata={"help": "reports an attempt whose commit is awaited and timed"})
    interval: float = field(
        default=2.0, metadata={"help": "the longer poll interval, in seconds: Ray's default"}
    )
    short_interval: float = field(default=0.1, metadata={"help": "the shorter one, in seconds: the lab's"})
    kilobytes: int = field(default=64, metadata={"help": "size of a checkpoint"})


def _check(params: CommitWindow) -> None:
    if not 2 <= params.kills <= 50:
        raise UserError(f"--kills={params.kills} is out of range: use 2 (one at once, one late) to 50.")
    if not 1 <= params.awaited <= 20:
        raise UserError(f"--awaited={params.awaited} is out of range: use 1 to 20.")
    if not params.short_interval >= 0.01:
        raise UserError(
            f"--short-interval={params.short_interval:g} is too short to poll in: use 0.01 or more."
        )
    if not 1 <= params.interval <= 30:
        raise UserError(
            f"--interval={params.interval:g} is out of range: use 1 to 30 s (an upload must fit well inside)."
        )
    if params.interval < 4 * params.short_interval:
        raise UserError(
            f"--interval={params.interval:g} is too near to --short-interval={params.short_interval:g} to compare: "
            f"use {4 * params.short_interval:g} or more."
        )
    if not 1 <= params.kilobytes <= 10_000:
        raise UserError(f"--kilobytes={params.kilobytes} is out of range: use 1 to 10000.")
    if params.name and params.name.endswith("-short"):
        raise UserError(
            f"LAB_NAME={params.name!r} ends in -short, the name of this lesson's second run: use another."
        )


def _intervals(document: Document) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = document["intervals"]
    for one in found:
        error = one["outcome"]["error"]
        if error:
            raise ValueError(f"at {one['interval']:g} s: {error['message']}")
        if len(one["kills"]) != document["params"]["kills"]:
            raise ValueError(f"at {one['interval']:g} s: {len(one['kills'])} kills were noted")
    if len(found) != 2:
        raise ValueError(f"{len(found)} intervals")
    return found


def lost(kill: Mapping[str, Any]) -> int:
    """Reports that had returned before the kill and that no snapshot ever named."""
    return int(kill["epoch"]) - int(kill["committed"])


def _first_epoch(document: Document) -> Finding:
    workers = document["params"]["workers"]
    kills = [kill for one in _intervals(document) for kill in one["kills"]]
    return equal(
        [[kill["committed"] + 1] * workers for kill in kills], [kill["first_epochs"] for kill in kills]
    )


def _late(document: Document) -> Finding:
    late = [(one["interval"], kill) for one in _intervals(document) for kill in one["kills"][-1:]]
    soon = [f"{kill['after_seconds']:g} s" for interval, kill in late if kill["after_seconds"] <= interval]
    return Finding(
        "0 reports lost, the kill more than one interval after the report",
        {
            f"at {interval:g} s": f"{lost(kill)} lost, killed after {kill['after_seconds']:g} s"
            for interval, kill in late
        },
        not soon and all(lost(kill) == 0 for _, kill in late),
    )


def _at_once(document: Document) -> Finding:
    one = _intervals(document)[0]
    kills = [kill for kill in one["kills"] if kill["kind"] == "at once"]
    quick = [kill for kill in kills if kill["after_seconds"] < one["interval"] / 4]
    if not quick:
        raise ValueError(f"no kill came within {one['interval'] / 4:g} s of its report")
    return Finding(
        ">= 1 report lost by each", [lost(kill) for kill in quick], all(lost(kill) >= 1 for kill in quick)
    )


def _window(document: Document) -> Finding:
    long, short = (statistics.median(one["lags"]) for one in _intervals(document))
    ratio = long / short
    return Finding(
        f">= {LEAST_RATIO:g} times shorter",
        f"{ratio:.1f} times ({long:.2f} s, {short:.2f} s)",
        ratio >= LEAST_RATIO,
    )


def orphan(epoch: int, attempt: int) -> str:
    """The folder of a report, as the lab's helper names it."""
    return f"checkpoint_epoch-{epoch:04d}_attempt-{attempt:03d}"


def _orphans(document: Document) -> Finding:
    expected: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    size = document["params"]["kilobytes"] * 1024
    for one in _intervals(document):
        key = f"at {one['interval']:g} s"
        expected[key] = {
            orphan(kill["epoch"] - back, kill["attempt"]): size
            for kill in one["kills"]
            for back in range(lost(kill))
        }
        measured[key] = {folder["name"]: folder["bytes"] for folder in one["leftovers"]}
    found = equal(expected, measured)
    # without one there was nothing to find
    return Finding(found.expected, found.measured, bool(found.holds) and any(expected.values()))


def _cleaned(document: Document) -> Finding:
    return equal(
        {f"at {one['interval']:g} s": sorted(one["named"]) for one in _intervals(document)},
        {f"at {one['interval']:g} s": sorted(one["folders"]) for one in _intervals(document)},
    )


def _loads(one: Mapping[str, Any]) -> list[float]:
    return [kill["controller_load"] for kill in one["kills"] if kill["controller_load"] is not None]


def _price(document: Document) -> Finding:
    long, short = (_loads(one) for one in _intervals(document))
    if not long or not short:
        return not_shown(UNSEEN)
    a, b = statistics.median(long), statistics.median(short)
    return Finding("more of a core", f"{b * 100:.1f} % of a core instead of {a * 100:.1f} %", b > a)


def _measurements(document: Document) -> dict[str, Any]:
    found = {}
    for one in document["intervals"]:
        loads = _loads(one)
        found[f"interval {one['interval']:g} s"] = {
            "reports_lost": dict(sorted(Counter(str(lost(kill)) for kill in one["kills"]).items())),
            "median_seconds_from_report_to_commit": round(statistics.median(one["lags"]), 3)
            if one["lags"]
            else None,
            "longest": max(one["lags"], default=None),
            "median_restart_seconds": statistics.median([kill["restart_seconds"] for kill in one["kills"]])
            if one["kills"]
            else None,
            "controller_percent_of_a_core": round(100 * statistics.median(loads), 2) if loads else None,
        }
    return found


def _figures(document: Document, folder: Path) -> list[Path]:
    path = folder / "commit-window.png"
    with figure(path, columns=3, size=(4.4, 3.4)) as (left, middle, right):
        pair = document["intervals"]
        most = max([lost(kill) for one in pair for kill in one["kills"]] + [1])
        for at, one in enumerate(pair):
            label = f"poll interval {one['interval']:g} s"
            counts = Counter(lost(kill) for kill in one["kills"])
            spots = [number + (at - 0.5) * 0.4 for number in range(most + 1)]
            left.bar(spots, [counts[number] for number in range(most + 1)], 0.4, label=label)
            middle.plot(
                [kill["after_seconds"] for kill in one["kills"]],
                [lost(kill) + (at - 0.5) * 0.06 for kill in one["kills"]],
                "os"[at],
                color=COLOURS[at],
                label=label,
            )
            middle.axvline(one["interval"], color=COLOURS[at], linewidth=0.8, linestyle=":")
            lags = sorted(one["lags"])
            right.plot(lags, [(number + 1) / len(lags) for number in range(len(lags))], ".-", label=label)
        left.set_xticks(range(most + 1))
        left.set(xlabel="reports lost by a kill", ylabel="kills", title="What a kill costs")
        middle.set_yticks(range(most + 1))
        longest = max([kill["after_seconds"] for one in pair for kill in one["kills"]] + [1.0])
        middle.set_xscale("symlog", linthresh=0.01)
        middle.set_xlim(-0.002, 2 * longest)
        middle.set(
            xlabel="seconds from the report's return to the kill",
            ylabel="reports lost",
            title="Dotted: one interval",
        )
        right.set(
            xlabel="seconds from the report's return to its commit",
            ylabel="share of reports",
            ylim=(0, 1.05),
            title="The window",
        )
        left.yaxis.get_major_locator().set_params(integer=True)
        right.legend(loc="lower center")
    return [path]


LESSON = Lesson(
    name="commit-window",
    title="what a kill right after report() costs",
    idea=(
        "report() returns once its checkpoint is uploaded, but the controller learns of it only at its next poll, 2 s "
        "apart by default. Until it has written its snapshot the checkpoint is not committed: a kill in that window "
        "loses it, and its folder stays behind as an orphan. A shorter interval narrows the window."
    ),
    needs=Needs("head"),
    observe="commit_window",
    params=CommitWindow,
    default_storage="s3",
    check=_check,
    quick={"workers": 1, "kills": 2, "awaited": 1},
    claims=(
        Claim(
            "first-epoch",
            "the first epoch after each restart is 1 + the newest epoch in the snapshot, read beside Ray",
            _first_epoch,
        ),
        Claim("late", "a kill later than one poll and an upload loses nothing", _late),
        Claim("at-once", "at the longer interval a kill at once loses a report that had returned", _at_once),
        Claim("window", "the shorter interval narrows the time from report to commit", _window),
        Claim(
            "orphans",
            "each lost report leaves its whole folder, which no snapshot names, under a name of its own",
            _orphans,
        ),
        Claim("cleaned", "the cleaner removes these folders and no other (pitfall C3)", _cleaned),
        Claim("price", "the shorter interval costs the controller processor time", _price, UNSEEN),
    ),
    breaks=(
        Break(
            "careless",
            "resumes from the newest folder instead of the snapshot, kills before the commit, and cleans nothing",
            ("first-epoch", "late", "cleaned"),
        ),
    ),
    measurements=_measurements,
    figures=_figures,
    seconds=(50, 120),
)
