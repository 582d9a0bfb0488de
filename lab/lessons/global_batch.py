"""Lesson `global-batch`: what counts for training is the global batch, worker batch times world size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.errors import UserError
from lab.lessons.contract import Break, Claim, Document, Finding, Lesson, Needs, Params
from lab.lessons.judging import divides, equal, refused
from lab.lessons.run import Host
from lab.report.plots import COLOURS, figure

ROWS = 1536
TOLERANCE = 1e-6
"""For float64, as an absolute difference: far above its rounding (1e-16), far below what another batch changes (1e-2)."""

ROUNDING = 2.0**-53
"""Unit roundoff of float64; of float32 it is 2**29 times that."""
PRECISION_RATIO = 2.0**29
MARGIN = 16.0
"""Rounding errors of single operations may fall together in one precision and cancel in the other."""
NO_LONGER_ROUNDING = 1e-3
"""No derived tolerance may be larger: from here on it would let another batch pass."""

NEARER = 0.9
"""Largest ratio of gaps, of loss over the epochs, with and without scaling; seeds 0 to 3 gave 0.3 to 0.8."""


@dataclass(frozen=True)
class GlobalBatch(Params):
    """World sizes 1, 2 and `workers`, one after the other."""

    workers: int = field(default=4, metadata={"help": "ranks of the largest world; 1 and 2 are run as well"})
    epochs: int = field(default=4, metadata={"help": "passes over the 1,536 training images"})
    global_batch: int = field(default=128, metadata={"help": "samples per step, over all ranks"})
    worker_batch: int = field(
        default=32, metadata={"help": "samples per step and rank, in the trainings that keep it fixed"}
    )
    largest: int = field(default=16, metadata={"help": "largest micro-batch of the accumulated training"})
    lr: float = field(default=0.02, metadata={"help": "learning rate of SGD with momentum 0.9"})


def _worlds(params: Any) -> list[int]:
    return sorted({1, 2, int(params["workers"] if isinstance(params, Mapping) else params.workers)})


def _check(params: GlobalBatch) -> None:
    if params.workers < 2:
        raise UserError(f"LAB_WORKERS={params.workers} has no second world size to compare: use 2 or more.")
    if params.epochs < 2:
        raise UserError(
            f"--epochs={params.epochs} is too short for the learning rates to part: use 2 or more."
        )
    if params.global_batch > ROWS:
        raise UserError(
            f"--global-batch={params.global_batch} is more than the {ROWS} training images: use {ROWS} or fewer."
        )
    if not 1 <= params.worker_batch * params.workers <= ROWS:
        raise UserError(
            f"--worker-batch={params.worker_batch} on {params.workers} workers is no batch of {ROWS} training images: "
            f"use 1 to {ROWS // params.workers}."
        )
    for world in reversed(_worlds(params)):
        divides(params.global_batch, world)
    if not 1 <= params.largest < params.global_batch:
        raise UserError(
            f"--largest={params.largest} accumulates nothing: use 1 to {params.global_batch - 1}, below the global batch."
        )
    if not 0 < params.lr < 1:
        raise UserError(f"--lr={params.lr:g} is no learning rate for this lesson: use one between 0 and 1.")


def _cases(document: Document) -> dict[int, Mapping[str, Any]]:
    found = {}
    for world in _worlds(document["params"]):
        one = document["worlds"][str(world)]
        if not one["cases"]:
            error = one["outcome"]["error"]
            raise ValueError(f"{world} rank(s) did not finish: {error and error['message']}")
        found[world] = one["cases"]
    return found


def _product(document: Document) -> Finding:
    params = document["params"]
    cases = _cases(document)
    kept = params["worker_batch"]
    expected, measured = {}, {}
    for world, found in cases.items():
        for name, worker, total in (
            ("float64", params["global_batch"] // world, params["global_batch"]),
            ("worker batch", kept, kept * world),
        ):
            key = (
                f"{'fixed worker batch' if name == 'worker batch' else 'fixed global batch'}, {world} rank(s)"
            )
            expected[key] = {"worker batch": [worker], "steps an epoch": ROWS // total}
            measured[key] = {
                "worker batch": found[name]["sizes"],
                "steps an epoch": len(found[name]["losses"]) / params["epochs"],
            }
    return equal(expected, measured)


def batches(ids: list[list[list[int]]]) -> list[frozenset[int]]:
    """Each step's global batch as a set, from the ids of each rank and step."""
    return [frozenset(sample for part in step for sample in part) for step in zip(*ids, strict=True)]


def _same_batches(document: Document) -> Finding:
    params = document["params"]
    found = {world: batches(document["worlds"][str(world)]["ids"]) for world in _worlds(params)}
    steps = min(2, params["epochs"]) * (ROWS // params["global_batch"])
    reference = found[1]
    return equal(
        {
            "samples a step": [params["global_batch"]],
            "same batches, in order": {f"{world} ranks": steps for world in found if world > 1},
        },
        {
            "samples a step": sorted({len(batch) for steps_of in found.values() for batch in steps_of}),
            "same batches, in order": {
                f"{world} ranks": sum(one == other for one, other in zip(reference, steps_of, strict=False))
                for world, steps_of in found.items()
                if world > 1
            },
        },
    )


def _apart(document: Document, name: str, reference: str) -> dict[str, float]:
    """The largest distance of any world's training from the one-rank `reference`: of losses, of weights."""
    cases = _cases(document)
    alone = cases[1][reference]["losses"]
    others = [case[name] for world, case in cases.items() if world > 1 or name != reference]
    return {
        "loss": max(
            abs(one - other) for case in others for one, other in zip(case["losses"], alone, strict=True)
        ),
        "weights": max(case["weights"]["largest"] for case in others),
        "weights, relative": max(case["weights"]["relative"] for case in others),
    }


def _within(document: Document, name: str) -> Finding:
    found = _apart(document, name, "float64")
    return Finding(
        f"loss and weights within {TOLERANCE:g}",
        {key: f"{value:.1e}" for key, value in found.items()},
        found["loss"] <= TOLERANCE and found["weights"] <= TOLERANCE,
    )


def _float64(document: Document) -> Finding:
    return _within(document, "float64")


def _accumulated(document: Document) -> Finding:
    params = document["params"]
    parts = {world: case["accumulated"]["parts"] for world, case in _cases(document).items()}
    finding = _within(document, "accumulated")
    small = all(params["global_batch"] / world / count <= params["largest"] for world, count in parts.items())
    return Finding(
        {"difference": finding.expected, "micro-batches": f"of at most {params['largest']}"},
        {
            "difference": finding.measured,
            "micro-batches": {f"{world} rank(s)": count for world, count in parts.items()},
        },
        bool(finding.holds) and small and max(parts.values()) > 1,
    )


def float32_tolerance(document: Document) -> dict[str, float]:
    """How far apart float32 trainings may end, derived from how far apart the float64 ones did.

    The world sizes add the same numbers in another order. Each such difference starts at one rounding and grows by the
    training's own dynamics, which are the same in both precisions. So float32's is float64's times 2**29, the ratio of
    their roundings; a difference below one rounding of float64 counts as one.
    """
    double = _apart(document, "float64", "float64")
    size = max(abs(loss) for loss in _cases(document)[1]["float64"]["losses"])
    grown = {
        "loss": max(double["loss"], ROUNDING * size),
        "weights, relative": max(double["weights, relative"], ROUNDING),
    }
    return {key: min(MARGIN * PRECISION_RATIO * value, NO_LONGER_ROUNDING) for key, value in grown.items()}


def _float32(document: Document) -> Finding:
    allowed = float32_tolerance(document)
    found = _apart(document, "float32", "float32")
    return Finding(
        {key: f"<= {value:.1e}" for key, value in allowed.items()},
        {key: f"{found[key]:.1e}" for key in allowed},
        all(found[key] <= value for key, value in allowed.items()),
    )


def _worker_batch(document: Document) -> Finding:
    cases = _cases(document)
    apart = {world: case["worker batch"]["weights"] for world, case in cases.items() if world > 1}
    least = 1000 * TOLERANCE
    return Finding(
        f"weights more than {least:g} apart",
        {
            f"{world} ranks": f"{found['largest']:.2g} (relative {found['relative']:.2g})"
            for world, found in apart.items()
        },
        all(found["largest"] > least for found in apart.values()),
    )


def _mean_gap(losses: list[float], others: list[float]) -> float:
    return sum(abs(one - other) for one, other in zip(losses, others, strict=True)) / len(losses)


def _scaling(document: Document) -> Finding:
    cases = _cases(document)
    alone = cases[1]["worker batch"]["epoch_loss"]
    gaps = {}
    for world, case in cases.items():
        if world > 1:
            unscaled = _mean_gap(case["worker batch"]["epoch_loss"], alone)
            scaled = _mean_gap(case["worker batch, scaled"]["epoch_loss"], alone)
            gaps[f"{world} ranks"] = {
                "scaled": round(scaled, 4),
                "not": round(unscaled, 4),
                "ratio": round(scaled / unscaled, 3),
            }
    return Finding(f"ratio <= {NEARER}", gaps, all(gap["ratio"] <= NEARER for gap in gaps.values()))


def _refuses(document: Document) -> Finding:
    answer = document["host"]["indivisible"]
    batch, world = document["params"]["global_batch"], answer["workers"]
    multiples = [number for number in range(batch, 0, -1) if number % world == 0][:1]
    multiples += [number for number in range(batch, batch + world) if number % world == 0][:1]
    divisors = [number for number in range(world, 0, -1) if batch % number == 0][:1]
    divisors += [number for number in range(world, batch + 1) if batch % number == 0][:1]
    return refused(
        answer,
        f"global batch {batch}",
        f"{world} workers",
        " or ".join(map(str, multiples)),
        " or ".join(map(str, divisors)),
    )


def _look(host: Host, document: dict[str, Any]) -> dict[str, Any]:
    batch = int(document["params"]["global_batch"])
    world = next(number for number in range(2, batch + 2) if batch % number)
    return {"indivisible": host.refusal(workers=world) | {"workers": world}}


def _measurements(document: Document) -> dict[str, Any]:
    cases = _cases(document)
    return {
        "differences from one rank": {
            name: {key: float(f"{value:.3g}") for key, value in _apart(document, name, reference).items()}
            for name, reference in (
                ("float64", "float64"),
                ("float32", "float32"),
                ("accumulated", "float64"),
            )
        },
        "float32 tolerance": {
            key: float(f"{value:.3g}") for key, value in float32_tolerance(document).items()
        },
        "loss at the end, fixed worker batch": {
            str(world): round(case["worker batch"]["epoch_loss"][-1], 4) for world, case in cases.items()
        },
        "loss at the end, learning rate scaled": {
            str(world): round(case["worker batch, scaled"]["epoch_loss"][-1], 4)
            for world, case in cases.items()
        },
    }


def _figures(document: Document, folder: Path) -> list[Path]:
    cases = _cases(document)
    losses, errors = folder / "loss.png", folder / "differences.png"
    with figure(losses, columns=2, size=(5.0, 3.4)) as (left, right):
        for place, (world, case) in enumerate(cases.items()):
            colour = COLOURS[place % len(COLOURS)]
            label = f"{world} rank" if world == 1 else f"{world} ranks"
            left.plot(
                case["float64"]["losses"], color=colour, linewidth=6 - 2 * place, label=label, zorder=place
            )
            epochs = range(1, len(case["worker batch"]["epoch_loss"]) + 1)
            right.plot(epochs, case["worker batch"]["epoch_loss"], "o-", color=colour, label=label)
            if world > 1:
                right.plot(
                    epochs,
                    case["worker batch, scaled"]["epoch_loss"],
                    "^--",
                    color=colour,
                    label=f"{label}, learning rate x {world}",
                )
        left.set(
            xlabel="step", ylabel="loss", title=f"Global batch {document['params']['global_batch']} on all"
        )
        left.legend()
        worker = document["params"]["worker_batch"]
        right.set_xticks(range(1, document["params"]["epochs"] + 1))
        right.set(xlabel="epoch", ylabel="loss over all samples", title=f"Worker batch {worker} on all")
        right.legend(loc="upper right", frameon=True, fontsize="x-small")
    names = (
        ("float64", "float64", "float64"),
        ("accumulated", "float64", "float64, accumulated"),
        ("float32", "float32", "float32"),
    )
    with figure(errors, size=(6.0, 3.4)) as axes:
        for place, (name, reference, label) in enumerate(names):
            alone = cases[1][reference]["losses"]
            worst = [
                max(
                    abs(case[name]["losses"][step] - alone[step])
                    for world, case in cases.items()
                    if world > 1
                )
                for step in range(len(alone))
            ]
            axes.semilogy(
                [max(value, 1e-17) for value in worst], "o", color=COLOURS[place], markersize=4, label=label
            )
        axes.axhline(TOLERANCE, color=COLOURS[0], linestyle=":", label="float64 tolerance")
        axes.axhline(
            float32_tolerance(document)["loss"], color=COLOURS[2], linestyle=":", label="float32 tolerance"
        )
        axes.set(
            xlabel="step",
            ylabel="loss: difference from one rank (0 drawn as 1e-17)",
            title="The same global batches: rounding is all that differs",
        )
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return [losses, errors]


LESSON = Lesson(
    name="global-batch",
    title="The global batch is the worker batch times the world size",
    idea=(
        "DDP averages the ranks' gradients, so a step on W ranks is a step on one batch of W times the worker batch. Keep "
        "that global batch, and the order of samples, and the number of ranks changes nothing but rounding. Keep the worker "
        "batch, and every rank you add makes it another training: fewer steps on larger batches."
    ),
    needs=Needs("head"),
    observe="global_batch",
    params=GlobalBatch,
    check=_check,
    quick={"workers": 2, "epochs": 2},
    host=_look,
    claims=(
        Claim("product", "global batch = worker batch x world size, whichever of them is fixed", _product),
        Claim(
            "same-batches",
            "the lab's sampler gives every world size the same global batches in the same order",
            _same_batches,
        ),
        Claim(
            "float64",
            "with a fixed global batch in float64, losses and final weights agree to 1e-6 at all world sizes",
            _float64,
        ),
        Claim(
            "float32",
            "in float32 they agree to 2^29 times what float64 shows, the ratio of the roundings (margin 16)",
            _float32,
        ),
        Claim(
            "accumulation",
            "gradients added up over micro-batches are those of the whole batch, to the same 1e-6",
            _accumulated,
        ),
        Claim(
            "worker-batch",
            "with a fixed worker batch the final weights differ by more than 1,000 times that",
            _worker_batch,
        ),
        Claim(
            "lr-scaling",
            "with a fixed worker batch, a learning rate scaled by the world size brings the loss nearer to one rank's",
            _scaling,
        ),
        Claim(
            "refused",
            "a batch that the ranks do not divide is refused, with the nearest that they do",
            _refuses,
        ),
    ),
    breaks=(
        Break(
            "ray-sampler",
            "takes the loader that Ray prepares instead of the lab's sampler: other batches at each world size",
            ("same-batches", "float64", "float32", "accumulation"),
        ),
        Break(
            "undivided-accumulation",
            "adds up the micro-batches' mean losses without dividing by their number",
            ("accumulation",),
        ),
    ),
    measurements=_measurements,
    figures=_figures,
    seconds=(30, 60),
)
