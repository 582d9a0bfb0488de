"""Lesson `threads`: ranks x OMP threads on one node, and what too many threads cost."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lab.errors import UserError
from lab.lessons.contract import Break, Claim, Document, Finding, Lesson, Needs, Params, not_shown
from lab.lessons.judging import equal, refused
from lab.lessons.run import Host
from lab.report.plots import figure
from lab.training.threads import MANY, default_threads, multiples

RATIO = 0.6
TOO_MANY = "8"
"""A multiple beyond `MANY`, which the lab refuses without --oversubscribe."""
NO_PROC = "the system has no /proc to count a process's threads in"


@dataclass(frozen=True)
class Threads(Params):
    """`workers` is the largest number of ranks in the grid; `threads` are per rank, in multiples of the cores."""

    threads: str = field(
        default="0.5,1,2,3.5", metadata={"help": "threads per rank in the grid, in multiples of the cores"}
    )
    pairs: int = field(default=11, metadata={"help": "pairs of one thread against too many"})
    rounds: int = field(default=5, metadata={"help": "windows for each cell of the grid"})
    window: float = field(default=0.5, metadata={"help": "seconds that each window takes"})
    oversubscribe: bool = field(
        default=False,
        metadata={"help": f"let the grid go beyond one rank a core and {MANY} x the cores in threads"},
    )


def _check(params: Threads) -> None:
    if params.workers < 2:
        raise UserError(
            f"LAB_WORKERS={params.workers} is too few for lesson threads: its claim is about 2 ranks."
        )
    for name in ("pairs", "rounds"):
        if getattr(params, name) < 1:
            raise UserError(f"--{name}={getattr(params, name)} measures nothing: use 1 or more.")
    if not 0 < params.window <= 10:
        raise UserError(
            f"--window={params.window:g} is no length of a window: use seconds above 0, 10 at most."
        )
    most = max(multiples(params.threads))
    if params.oversubscribe:
        return
    cores = os.cpu_count() or 1
    if params.workers > max(2, cores):  # two ranks are the lesson's least, on any host
        raise UserError(
            f"LAB_WORKERS={params.workers} is beyond the {cores} cores of this host, which slows every rank: "
            f"use at most {max(2, cores)}, or add --oversubscribe."
        )
    if most > MANY:
        raise UserError(
            f"--threads={params.threads} goes to {most:g} x the cores, beyond {MANY}, which slows every rank: "
            "use less, or add --oversubscribe."
        )


def _ranks(document: Document) -> list[Mapping[str, Any]]:
    ranks: list[Mapping[str, Any]] = document["ranks"]
    if not ranks:
        error = document["outcome"]["error"]
        raise ValueError(f"no rank finished: {error and error['message']}")
    return ranks


def _rate(window: Mapping[str, Any]) -> float:
    return float(window["samples"]) / float(window["seconds"])


def pair_rates(document: Document) -> list[tuple[float, float]]:
    """Samples per second of both ranks together, (one thread, too many), pair by pair."""
    active = [rank["pairs"] for rank in _ranks(document) if rank["pairs"]]
    return [
        (sum(_rate(pair["one"]) for pair in pairs), sum(_rate(pair["many"]) for pair in pairs))
        for pairs in zip(*active, strict=True)
    ]


def grid_rates(document: Document) -> dict[tuple[int, int], float]:
    """Median samples per second of all active ranks together, by (ranks, threads)."""
    windows: dict[tuple[int, int], list[list[float]]] = {}
    for rank in _ranks(document):
        mine: dict[tuple[int, int], list[float]] = {}
        for cell in rank["grid"]:
            mine.setdefault((cell["ranks"], cell["threads"]), []).append(_rate(cell))
        for key, rates in mine.items():
            windows.setdefault(key, []).append(rates)
    return {key: median(map(sum, zip(*rates, strict=True))) for key, rates in sorted(windows.items())}


def _oversubscribed(document: Document) -> Finding:
    rates = pair_rates(document)
    ratio = median(many / one for one, many in rates)
    return Finding(f"< {RATIO} in the median of {len(rates)} pairs", round(ratio, 3), ratio < RATIO)


def _default(document: Document) -> Finding:
    seen, node = document["default"], document["default"]["node"]
    asked = {"0.25": 0.25, "2": 2.0}
    expected = {name: node or str(default_threads(cpus)) for name, cpus in asked.items()}
    ranks = _ranks(document)
    return equal(
        {
            "ranks of 1 CPU": [node or str(default_threads(1))],
            "torch in them": [int(node or default_threads(1))],
            "tasks": expected | {"2, set to 7": "7"},
        },
        {
            "ranks of 1 CPU": sorted({rank["omp"] for rank in ranks}, key=str),
            "torch in them": sorted({rank["torch_threads"] for rank in ranks}),
            "tasks": seen["tasks"],
        },
    )


def _real(document: Document) -> Finding:
    ranks = [rank for rank in _ranks(document) if rank["pairs"]]
    if any(rank["os_threads_before"] is None for rank in ranks):
        return not_shown(NO_PROC)
    more = [rank["os_threads_after"] - rank["os_threads_before"] for rank in ranks]
    least = document["many"] - 1
    return Finding(f">= {least} more threads in each rank", more, min(more) >= least)


def _refused(document: Document) -> Finding:
    return refused(document["host"]["too_many"], f"--threads={TOO_MANY}", str(MANY), "--oversubscribe")


def _look(host: Host, document: dict[str, Any]) -> dict[str, Any]:
    return {"too_many": host.refusal(threads=TOO_MANY, workers=2, oversubscribe=False)}


def _measurements(document: Document) -> dict[str, Any]:
    rates = pair_rates(document)
    return {
        "cores": document["cores"],
        "ray_default_omp_threads_per_rank": _ranks(document)[0]["omp"],
        "one_thread_samples_per_second": round(median(one for one, _ in rates)),
        f"{document['many']}_threads_samples_per_second": round(median(many for _, many in rates)),
        "ratio": round(median(many / one for one, many in rates), 3),
        "grid_samples_per_second": {
            f"{ranks} ranks x {threads} threads": round(rate)
            for (ranks, threads), rate in grid_rates(document).items()
        },
    }


def _figures(document: Document, folder: Path) -> list[Path]:
    path = folder / "throughput.png"
    cores, rates = document["cores"], grid_rates(document)
    with figure(path, columns=2) as (left, right):
        for count in sorted({ranks for ranks, _ in rates}):
            line = {threads: rate for (ranks, threads), rate in rates.items() if ranks == count}
            left.plot(
                [threads / cores for threads in line],
                list(line.values()),
                "o-",
                label=f"{count} rank{'s' if count > 1 else ''}",
            )
        left.set(
            xlabel=f"threads per rank, in multiples of the {cores} cores",
            ylabel="samples/s, all ranks (median)",
            title="Throughput of one step that only computes",
            ylim=(0, None),
        )
        left.legend()
        ratios = [many / one for one, many in pair_rates(document)]
        right.plot(range(1, len(ratios) + 1), ratios, "o", label="one pair")
        right.axhline(median(ratios), label=f"median {median(ratios):.2f}")
        right.axhline(RATIO, color="#ee6677", linestyle="--", label=f"claimed: below {RATIO}")
        right.set(
            xlabel="pair",
            ylabel=f"throughput, {document['many']} threads / 1 thread",
            title="2 ranks: too many threads against one each",
            ylim=(0, max(1.05, *ratios)),
        )
        right.xaxis.get_major_locator().set_params(integer=True)
        right.legend()
    return [path]


LESSON = Lesson(
    name="threads",
    title="ranks x threads: more threads than cores cost more than half the speed",
    idea=(
        "Every rank is a process with threads of its own. Ray gives each as many OpenMP threads as the rank has CPUs. "
        "A rank that takes all cores for itself, as torch does alone, fights the other ranks for them: each operation "
        "waits for the last of its threads, and that one waits for a core."
    ),
    needs=Needs("head"),
    observe="threads",
    params=Threads,
    check=_check,
    quick={"threads": "0.5,1,3.5", "pairs": 7, "rounds": 2, "window": 0.3},
    host=_look,
    claims=(
        Claim(
            "oversubscribed",
            f"at 2 ranks, threads of {MANY} x the cores give less than {RATIO} of the throughput of one thread each",
            _oversubscribed,
        ),
        Claim("real-threads", "those threads are really there in each rank", _real, NO_PROC),
        Claim(
            "default",
            "Ray sets OMP_NUM_THREADS to a worker's CPUs, rounded down, at least 1; a value set before wins",
            _default,
        ),
        Claim("refused", "a grid further beyond the cores is refused without --oversubscribe", _refused),
    ),
    breaks=(
        Break(
            "one-thread",
            "leaves the ranks at one thread in both halves of a pair",
            ("oversubscribed", "real-threads"),
        ),
    ),
    measurements=_measurements,
    figures=_figures,
    seconds=(25, 60),
)
