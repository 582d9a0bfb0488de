"""Lesson `v1-v2`: what a program written for Ray Train V1 meets on the installed Ray."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.errors import UserError
from lab.lessons.contract import Break, Claim, Document, Finding, Lesson, Needs, Params
from lab.lessons.judging import equal
from lab.lessons.v1_v2_table import IDIOMS, RAY, Idiom
from lab.report.plots import COLOURS, figure

RANKS = 2
"""The probe's programs are written for two ranks (`lab.observe.v1_idioms.WORKERS`)."""
V2_SETTINGS = ("unset", "1")
KINDS = ("works", "works, another value", "warns and does nothing", "raises")


def _check(params: Params) -> None:
    if params.workers != RANKS:
        raise UserError(
            f"LAB_WORKERS={params.workers} does not go with lesson v1-v2, whose table is of {RANKS} ranks: leave it out."
        )


def _expected(idiom: Idiom, setting: str) -> str:
    return idiom.v2 if setting in V2_SETTINGS else idiom.v1


def _seen(document: Document, setting: str) -> Mapping[str, Any]:
    seen: Mapping[str, Any] = document["settings"][setting]
    return seen


def _due(seen: Mapping[str, Any]) -> list[Idiom]:
    return [idiom for idiom in IDIOMS if seen["with_fit"] or not idiom.needs_fit]


def differences(document: Document) -> list[str]:
    """Each outcome that is not the table's: setting, idiom, the table's, the installed Ray's."""
    found = []
    for setting in ("unset", "1", "0"):
        seen = _seen(document, setting)
        known = {idiom.id: _expected(idiom, setting) for idiom in _due(seen)}
        for name in sorted(known.keys() | seen["idioms"].keys()):
            table, now = known.get(name, "no such row"), seen["idioms"].get(name, "not run")
            if table != now:
                found.append(f"{setting}: {name}: table {table!r}, now {now!r}")
    return found


def _pinned(document: Document) -> Finding:
    return equal([RAY], sorted({seen["ray"] for seen in document["settings"].values()}))


def _table(document: Document) -> Finding:
    different = differences(document)
    run = sum(len(seen["idioms"]) for seen in document["settings"].values())
    return Finding("no difference", different or f"no difference in {run} outcomes", not different)


def _default(document: Document) -> Finding:
    unset, one, zero = (_seen(document, setting) for setting in ("unset", "1", "0"))
    shared = unset["idioms"].keys() & one["idioms"].keys()
    same = {name for name in shared if unset["idioms"][name] == one["idioms"][name]}
    as_zero = {name for name in shared if unset["idioms"][name] == zero["idioms"][name]}
    return Finding(
        "unset: V2's trainer, each outcome as with 1, some not as with 0",
        f"unset: {'V2' if unset['v2'] else 'V1'}'s trainer, {len(same)} of {len(shared)} as with 1, "
        f"{len(as_zero)} as with 0",
        unset["v2"] and one["v2"] and same == shared and as_zero < shared,
    )


def _still_there(document: Document) -> Finding:
    zero = _seen(document, "0")
    fit = zero["idioms"].get("result-metrics", "no fit")
    return Finding(
        {"trainer": "V1", "fit": "ends with metrics", "words about V2": 0},
        {"trainer": "V2" if zero["v2"] else "V1", "fit": fit, "words about V2": len(zero["said"])},
        not zero["v2"] and fit.startswith("works") and not zero["said"],
    )


def _ways(document: Document) -> Finding:
    wrong, ran = [], 0
    for setting in V2_SETTINGS:
        seen = _seen(document, setting)
        for idiom in IDIOMS:
            if not idiom.tried or (idiom.id not in seen["ways"] and not seen["with_fit"]):
                continue
            now = seen["ways"].get(idiom.id, "not run")
            ran += 1
            if now != idiom.tried:
                wrong.append(f"{setting}: {idiom.id}: {now}")
    return Finding("each works", wrong or f"{ran} of {ran} work", ran > 0 and not wrong)


def _outcome(document: Document, name: str) -> dict[str, Any]:
    return {"V1": _seen(document, "0")["idioms"][name], "V2": _seen(document, "unset")["idioms"][name]}


def _rank_zero(document: Document) -> Finding:
    return equal({"V1": "works: of-rank-0", "V2": "works: of-rank-0"}, _outcome(document, "other-rank"))


def _last_report(document: Document) -> Finding:
    # of two reports, the first has a checkpoint
    return equal(
        {"V1": "works: report 2 of 2", "V2": "works: report 1 of 2"}, _outcome(document, "result-metrics")
    )


def _cpus(document: Document) -> Finding:
    ranks = document["params"]["workers"]
    return equal({"V1": f"works: {ranks + 1}", "V2": f"works: {ranks}"}, _outcome(document, "cpus"))


def kind_of(outcome: str, other: str = "") -> str:
    """Which of `KINDS` an outcome is; `other` is the other generation's."""
    if outcome.startswith("warns"):
        return KINDS[2]
    if not outcome.startswith("works"):
        return KINDS[3]
    return KINDS[1] if other.startswith("works") and other != outcome else KINDS[0]


def _measurements(document: Document) -> dict[str, Any]:
    zero, unset = _seen(document, "0")["idioms"], _seen(document, "unset")["idioms"]
    return {
        "idioms": len(zero),
        "work_in_v1_raise_in_v2": sum(
            kind_of(zero[name]) == KINDS[0] and kind_of(unset[name]) == KINDS[3]
            for name in zero.keys() & unset.keys()
        ),
        "silent_changes": sorted(
            name for name in zero.keys() & unset.keys() if kind_of(unset[name], zero[name]) in KINDS[1:3]
        ),
        "seconds": {setting: seen["seconds"] for setting, seen in document["settings"].items()},
    }


def _figures(document: Document, folder: Path) -> list[Path]:
    path = folder / "idioms.png"
    settings = ("0", "unset", "1")
    colours = dict(zip(KINDS, (COLOURS[2], COLOURS[3], COLOURS[5], COLOURS[1]), strict=True))
    with figure(path, size=(6.4, 8.2)) as axes:
        for row, idiom in enumerate(IDIOMS):
            for column, setting in enumerate(settings):
                seen = _seen(document, setting)["idioms"]
                if idiom.id in seen:
                    other = idiom.v1 if setting != "0" else ""
                    axes.plot(column, row, "s", markersize=11, color=colours[kind_of(seen[idiom.id], other)])
        axes.set_yticks(range(len(IDIOMS)), [idiom.code for idiom in IDIOMS], family="monospace", fontsize=7)
        axes.set_xticks(range(3), ["0 (V1)", "unset", "1 (V2)"])
        axes.set(xlim=(-0.5, 2.5), ylim=(len(IDIOMS) - 0.5, -0.5), xlabel="RAY_TRAIN_V2_ENABLED")
        axes.set_title(f"V1 idioms on Ray {_seen(document, 'unset')['ray']}")
        for kind, colour in colours.items():
            axes.plot([], [], "s", color=colour, label=kind)
        axes.legend(loc="upper center", bbox_to_anchor=(0.3, -0.07), ncols=2)
    return [path]


LESSON = Lesson(
    name="v1-v2",
    title="What a program written for Ray Train V1 meets today",
    idea=(
        "Ray Train was rewritten: V2 is the default and V1 is one environment variable away. Most idioms of V1 raise, "
        "and say so; a few go on without an error and do something else, which is worse."
    ),
    needs=Needs("worker", nodes=1, spare_cpus=1),
    observe="v1_v2",
    default_storage="s3",
    check=_check,
    claims=(
        Claim("pinned", "the installed Ray is the one that the committed table was measured on", _pinned),
        Claim("table", "every idiom does what the table says, whatever RAY_TRAIN_V2_ENABLED is", _table),
        Claim("default", "with the variable unset a program gets V2", _default),
        Claim("v1-silent", "with the variable at 0 V1 still trains, without a word about V2", _still_there),
        Claim("ways", "what V2 has instead works, wherever the lesson can try it", _ways),
        Claim("rank-0", "a metric that another rank reports reaches the result in neither", _rank_zero),
        Claim(
            "last-report",
            "V1's result.metrics is the last report; V2's is the last that had a checkpoint",
            _last_report,
        ),
        Claim("cpus", "V1 reserves one CPU more than there are ranks, V2 none beside theirs", _cpus),
    ),
    breaks=(
        Break(
            "v1-default",
            "sets the variable to 0 where it should be unset, as an older Ray would behave",
            ("table", "default", "ways", "last-report", "cpus"),
        ),
    ),
    measurements=_measurements,
    figures=_figures,
    seconds=(40, 50),
)
