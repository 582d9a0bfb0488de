"""Lesson `first-run`: N worker processes train one model on one node, with a local storage path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.errors import UserError
from lab.lessons.contract import Break, Claim, Document, Finding, Lesson, Needs, Params, not_shown
from lab.lessons.judging import at_least, divides, equal, one_value, refused
from lab.lessons.run import Host
from lab.report.plots import figure

ACCURACY = 0.95
STATE_FILES = ("manifest.json", "model.pt", "optimizer.pt", "progress.json", "rng.pt", "scheduler.pt")
NOTHING_LEFT = "the run was resumed and had no epoch left to train"


@dataclass(frozen=True)
class FirstRun(Params):
    """`epochs` passes over 1,536 images, `global_batch` samples a step over all ranks."""

    epochs: int = field(default=8, metadata={"help": "passes over the training set"})
    global_batch: int = field(default=64, metadata={"help": "samples per step, over all ranks"})


def _check(params: FirstRun) -> None:
    if params.epochs < 1:
        raise UserError(f"--epochs={params.epochs} trains nothing: use 1 or more.")
    divides(params.global_batch, params.workers)


SHOWN = 200
"""Samples of a rank in the figure: more would be a grey area."""


def _ranks(document: Document) -> list[Mapping[str, Any]]:
    ranks: list[Mapping[str, Any]] = document["train"]["ranks"]
    if not ranks:
        error = document["train"]["outcome"]["error"]
        raise ValueError(f"no rank finished: {error and error['message']}")
    return ranks


def _processes(document: Document) -> Finding:
    ranks = _ranks(document)
    workers = document["params"]["workers"]
    return equal(
        {"processes": workers, "ranks": list(range(workers)), "world size": [workers]},
        {
            "processes": len({rank["pid"] for rank in ranks}),
            "ranks": sorted(rank["world_rank"] for rank in ranks),
            "world size": sorted({rank["world_size"] for rank in ranks}),
        },
    )


def _data(document: Document) -> Finding:
    first = [rank["ids"][0]["ids"] for rank in _ranks(document) if rank["ids"]]
    if not first:
        return not_shown(NOTHING_LEFT)
    everything = [sample for ids in first for sample in ids]
    return equal(
        {"samples": 1536, "seen by one rank alone": 1536},
        {
            "samples": len(set(everything)),
            "seen by one rank alone": sum(everything.count(i) == 1 for i in set(everything)),
        },
    )


def _gradients(document: Document) -> Finding:
    digests = [rank["local_gradient_sha256"] for rank in _ranks(document)]
    if None in digests:
        return not_shown(NOTHING_LEFT)
    if len(digests) == 1:
        return not_shown("one rank has nobody to differ from")
    return Finding(f"{len(digests)} values", f"{len(set(digests))} values", len(set(digests)) == len(digests))


def _parameters(document: Document) -> Finding:
    digests = [rank["parameters_sha256"] for rank in _ranks(document)]
    return not_shown("one rank has nobody to agree with") if len(digests) == 1 else one_value(digests)


def _accuracy(document: Document) -> Finding:
    return at_least(ACCURACY, document["train"]["outcome"]["metrics"]["accuracy"])


def _result_metrics(document: Document) -> Finding:
    metrics = document["train"]["outcome"]["metrics"]
    last = max(document["train"]["epochs"], key=lambda row: (row["attempt"], row["epoch"]))
    return equal(
        {"epoch": last["epoch"], "checkpoint": last["checkpoint"], "late": None},
        {
            "epoch": metrics["epoch"],
            "checkpoint": document["train"]["outcome"]["checkpoint"],
            "late": metrics.get("late"),
        },
    )


def expected_tree(epochs: list[Mapping[str, Any]], attempts: int, ranks: int) -> list[str]:
    """The files of a run that keeps every checkpoint, relative to the run's folder, sorted."""
    paths = [".validate_storage_marker", "checkpoint_manager_snapshot.json"]
    for row in epochs:
        if row["checkpoint"]:
            paths += [f"{row['checkpoint']}/{name}" for name in STATE_FILES]
        paths.append(f"epoch-log/attempt-{row['attempt']:03d}-epoch-{row['epoch']:04d}.json")
    for attempt in range(attempts):
        paths.append(f"attempts/attempt-{attempt:03d}.json")
        paths += [f"observations/rank-{rank}-attempt-{attempt}.json" for rank in range(ranks)]
    return sorted(paths)


def _tree(document: Document) -> Finding:
    train = document["train"]
    expected = expected_tree(train["epochs"], train["outcome"]["attempts"], document["params"]["workers"])
    found = [entry["path"] for entry in train["files"]]
    epochs_saved = {path.partition("/")[0] for path in found if path.startswith("checkpoint_epoch-")}
    missing, surplus = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    whole = not missing and not surplus and len(epochs_saved) >= document["params"]["epochs"]
    return Finding(
        f"{len(expected)} files, a checkpoint for each of {document['params']['epochs']} epochs",
        f"{len(found)} files, {len(epochs_saved)} checkpoints, missing {missing[:3]}, surplus {surplus[:3]}",
        whole,
    )


def _too_many(document: Document) -> Finding:
    answer = document["host"]["too_many"]
    return refused(answer, "LAB_WORKERS", f"have {answer['have']} CPUs", f"need {answer['need']}")


def _look(host: Host, document: dict[str, Any]) -> dict[str, Any]:
    have = host.access.node_cpus
    return {"too_many": host.refusal(workers=have + 1) | {"have": have, "need": have + 1}}


def _measurements(document: Document) -> dict[str, Any]:
    train = document["train"]
    steps = [rank["first_step_at"] for rank in train["ranks"] if rank["first_step_at"]]
    return {
        "accuracy": train["outcome"]["metrics"]["accuracy"],
        "fit_seconds": train["outcome"]["seconds"],
        "job_start_to_first_step_seconds": round(max(steps) - document["job"]["began"], 2) if steps else None,
        "epoch_seconds": [row["metrics"]["seconds"] for row in train["epochs"]],
    }


def _figures(document: Document, folder: Path) -> list[Path]:
    path = folder / "training.png"
    rows = document["train"]["epochs"]
    with figure(path, columns=2) as (left, right):
        epochs = [row["epoch"] for row in rows]
        left.plot(epochs, [row["metrics"]["loss"] for row in rows], "o-", label="training loss")
        left.plot(epochs, [row["metrics"]["eval_loss"] for row in rows], "s-", label="held-out loss")
        accuracy = left.twinx()
        accuracy.plot(
            epochs, [row["metrics"]["accuracy"] for row in rows], "^--", color="#228833", label="accuracy"
        )
        accuracy.axhline(ACCURACY, color="#bbbbbb", linewidth=0.8)
        accuracy.text(
            1,
            ACCURACY,
            f"{ACCURACY:.0%} ",
            va="top",
            ha="right",
            color="#777777",
            transform=(accuracy.get_yaxis_transform()),
        )
        accuracy.set_ylim(0, 1.02)
        accuracy.set_ylabel("held-out accuracy")
        lines = [*left.get_lines(), accuracy.get_lines()[0]]
        left.legend(lines, [line.get_label() for line in lines], loc="center right")
        left.set(xlabel="epoch", ylabel="loss", title=f"{document['params']['workers']} ranks, one model")
        for rank in document["train"]["ranks"]:
            if rank["ids"]:
                ids = rank["ids"][0]["ids"][:SHOWN]
                right.plot(range(len(ids)), ids, ".", markersize=3, label=f"rank {rank['world_rank']}")
        right.set(
            xlabel="order in which the rank saw it",
            ylabel="sample id",
            title=f"First epoch: each rank's first {SHOWN} samples",
        )
        if right.get_lines():
            right.legend(loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=8, markerscale=2)
        else:
            right.text(
                0.5, 0.5, "nothing was trained:\nthe run was complete", ha="center", transform=right.transAxes
            )
    return [path]


LESSON = Lesson(
    name="first-run",
    title="N worker processes train one model on one node",
    idea=(
        "ScalingConfig(num_workers=N) starts N processes. Each sees its own part of the data and computes its own "
        "gradient; DDP averages the gradients, so every process holds the same model after every step. One node "
        "needs no shared storage: a local path will do."
    ),
    needs=Needs("head"),
    observe="first_run",
    params=FirstRun,
    check=_check,
    quick={"epochs": 6},
    host=_look,
    claims=(
        Claim("processes", "N workers are N processes with ranks 0..N-1", _processes),
        Claim(
            "data", "the ranks' samples are disjoint and together the whole training set", _data, NOTHING_LEFT
        ),
        Claim(
            "gradients",
            "each rank computes a local gradient of its own",
            _gradients,
            f"{NOTHING_LEFT}; or one rank",
        ),
        Claim(
            "parameters",
            "after training the parameters are bit-identical on all ranks",
            _parameters,
            "one rank",
        ),
        Claim("accuracy", "held-out accuracy is at least 95 %", _accuracy),
        Claim(
            "result-metrics",
            "result.metrics is the last report with a checkpoint; a later one without leaves it unchanged",
            _result_metrics,
        ),
        Claim("tree", "the storage path holds exactly the expected files", _tree),
        Claim("too-many", "more ranks than CPUs is refused with have and need", _too_many),
    ),
    breaks=(
        Break("no-prepare-model", "leaves out prepare_model: each rank trains alone", ("parameters",)),
        Break("no-prepare-loader", "leaves out prepare_data_loader: every rank sees every sample", ("data",)),
        Break("shuffled-labels", "shuffles the labels: there is nothing to learn", ("accuracy",)),
    ),
    measurements=_measurements,
    figures=_figures,
    seconds=(20, 25),
)
