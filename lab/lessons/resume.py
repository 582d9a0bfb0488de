"""Lesson `resume`: a run that stopped and went on is bit for bit the run that never stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.errors import UserError
from lab.lessons.contract import Break, Claim, Document, Finding, Lesson, Needs, Params, not_shown
from lab.lessons.judging import divides, equal
from lab.report.plots import COLOURS, figure

SAMPLES = 1536
COMPARED = {
    "weights": "parameters_sha256",
    "optimizer": "optimizer_sha256",
    "scheduler": "scheduler_sha256",
    "generators": "rng_sha256",
    "sample order": "order",
    "history": "history",
}
"""What two runs are compared by, and its key in a rank's observation."""

WITHOUT: dict[str, dict[str, bool]] = {
    "model": {"weights": False},
    "optimizer": {"weights": False, "generators": True, "sample order": True},
    "scheduler": {"weights": False, "generators": True, "sample order": True},
    "epoch": {"weights": False, "sample order": False},
    "rng": {"weights": False, "generators": False},
    "sampler": {"weights": False, "sample order": False},
    "history": {"history": False, "weights": True, "optimizer": True, "sample order": True},
}
"""Part left out of the saved state -> what is then still the same as in the straight run (True) and what not."""

WHY = {
    "model": "training goes on from fresh weights",
    "optimizer": "Adam's moments start at zero",
    "scheduler": "the learning rate is halved at other epochs",
    "epoch": "all epochs are done again",
    "rng": "other units are dropped",
    "sampler": "the first epochs' order comes again",
    "history": "the same model, and the metrics of the first epochs are gone",
}
ONE_RANK = "one rank has no DistributedSampler, so no set_epoch"


@dataclass(frozen=True)
class Resume(Params):
    """`epochs` in one go against two halves and a crash; Adam, StepLR and dropout."""

    epochs: int = field(default=6, metadata={"help": "epochs of the whole run, an even number"})
    global_batch: int = field(default=64, metadata={"help": "samples per step, over all ranks"})
    s3_client: str = field(
        default="pyarrow",
        metadata={"help": "who talks to S3: Arrow's own client or s3fs", "choices": ("pyarrow", "s3fs")},
    )
    all_storages: bool = field(
        default=True, metadata={"help": "the two halves on a local path, S3 by pyarrow and S3 by s3fs"}
    )
    leave_out: str = field(
        default="",
        metadata={
            "help": "leave one part out of every saved state: the lesson must fail",
            "choices": tuple(WITHOUT),
        },
    )


def _check(params: Resume) -> None:
    if params.epochs < 4 or params.epochs % 2:
        raise UserError(f"--epochs={params.epochs} cannot be halved here: use an even number, 4 or more.")
    divides(params.global_batch, params.workers)
    divides(params.global_batch, 1 if params.workers > 1 else 2)
    if SAMPLES // params.global_batch < 2:
        raise UserError(
            f"--global-batch={params.global_batch} leaves no middle of an epoch to crash in: use {SAMPLES // 2} or less."
        )


def _same(
    ranks: Sequence[Mapping[str, Any]], straight: Sequence[Mapping[str, Any]], begun_at: int
) -> dict[str, bool]:
    """Whether each thing compared is the same on every rank; the order, from epoch `begun_at` on."""
    if len(ranks) != len(straight) or not ranks:
        raise ValueError(f"{len(ranks)} ranks finished, of {len(straight)}")

    def one(name: str, rank: Mapping[str, Any], whole: Mapping[str, Any]) -> bool:
        if name == "sample order":
            expected = [seen for seen in whole["order"] if seen["epoch"] >= begun_at]
            return bool(expected) and rank["order"] == expected
        return bool(rank[COMPARED[name]] == whole[COMPARED[name]])

    return {
        name: all(one(name, rank, whole) for rank, whole in zip(ranks, straight, strict=True))
        for name in COMPARED
    }


def _words(same: Mapping[str, bool]) -> dict[str, str]:
    return {name: "same" if value else "differs" for name, value in same.items()}


def _halves(document: Document) -> Finding:
    epochs, half = document["params"]["epochs"], document["half"]
    storages = 3 if document["params"]["all_storages"] else 1
    found: dict[str, Any] = {}
    for one in document["halves"]:
        first, second = one["first"]["ranks"], one["second"]["ranks"]
        differs = [name for name, same in _same(second, document["straight"], half).items() if not same]
        if {rank["pid"] for rank in first} & {rank["pid"] for rank in second}:
            differs.append("the processes are the same")
        if one["log"] != [[int(epoch >= half), epoch] for epoch in range(epochs)]:
            differs.append("the epochs done")
        found[f"{one['storage']} by {one['client']}"] = differs or "bit-identical"
    clients = {one["client"] for one in document["halves"]}
    return Finding(
        f"bit-identical in new processes, on {storages} kind(s) of storage",
        found,
        len(clients) == storages and set(map(str, found.values())) == {"bit-identical"},
    )


def _crash(document: Document) -> Finding:
    crash = document["crash"]
    if crash["outcome"]["error"]:
        raise ValueError(crash["outcome"]["error"]["message"])
    epoch = document["crash_at"][0]
    again = crash["ranks"][0]["resumed_from"] if crash["ranks"] else -1
    differs = [name for name, same in _same(crash["ranks"], document["straight"], again).items() if not same]
    finished_before = sorted(row[1] for row in crash["log"] if row[0] == 0)
    return Finding(
        {"starts": 2, "finished before the crash": list(range(epoch)), "differs": []},
        {
            "starts": crash["outcome"]["attempts"],
            "finished before the crash": finished_before,
            "went on at epoch": again,
            "differs": differs,
        },
        crash["outcome"]["attempts"] == 2
        and finished_before == list(range(epoch))
        and 0 < again <= epoch
        and not differs,
    )


def _part(part: str) -> Callable[[Document], Finding]:
    def judge(document: Document) -> Finding:
        if part == "sampler" and document["params"]["workers"] == 1:
            return not_shown(ONE_RANK)
        half = document["half"]
        straight = document["straight"]
        whole = _same([rank["nothing"] for rank in document["parts"]], straight, half)
        without = _same([rank[part] for rank in document["parts"]], straight, half)
        chosen = {name: without[name] for name in WITHOUT[part]}
        return Finding(
            {"with every part": "same", **_words(WITHOUT[part])},
            {"with every part": "same" if all(whole.values()) else "differs", **_words(chosen)},
            all(whole.values()) and chosen == WITHOUT[part],
        )

    return judge


def _name(document: Document) -> Finding:
    run, half = document["run"], document["half"]
    one = document["halves"][0]
    sentence = f"resuming {run} at epoch {half}"
    said = [line for line in one["second"]["said"] if line.startswith("resuming")]
    return equal(
        {"said": [sentence], "first epoch done": half, "next time": document["params"]["epochs"]},
        {
            "said": said,
            "first epoch done": min(epoch for attempt, epoch in one["log"] if attempt == 1),
            "next time": document["resume_point_after"],
        },
    )


def _fresh(document: Document) -> Finding:
    said = document["crash"]["said"]
    deleted = [line for line in said if line.startswith(f"deleted run {document['run']}-crash ")]
    begun = document["crash"]["log"][0]
    return Finding(
        {"said": "deleted run ... (--fresh)", "first row of the log": [0, 0]},
        {"said": said, "first row of the log": begun},
        len(deleted) == 1
        and "--fresh" in deleted[0]
        and begun == [0, 0]
        and not any("resuming" in line for line in said),
    )


def _other_size(document: Document) -> Finding:
    other, batch = document["other_size"], document["params"]["global_batch"]
    saved = document["halves"][0]["first"]["ranks"][0]["parameters_sha256"]
    ranks = other["ranks"]
    if not ranks:
        raise ValueError(f"no rank finished: {other['outcome']['error']}")
    return equal(
        {
            "ranks": other["workers"],
            "steps an epoch": [SAMPLES // batch],
            "samples an epoch": SAMPLES,
            "weights it began with": [saved[:12]],
            "epoch it began with": [document["half"]],
        },
        {
            "ranks": len(ranks),
            "steps an epoch": sorted({rank["steps"] for rank in ranks}),
            "samples an epoch": sum(rank["order"][0]["samples"] for rank in ranks),
            "weights it began with": sorted({rank["loaded_sha256"][:12] for rank in ranks}),
            "epoch it began with": sorted({rank["resumed_from"] for rank in ranks}),
        },
    )


def _other_size_refused(document: Document) -> Finding:
    other, workers = document["other_size"], document["params"]["workers"]
    said = [rank["refused"] for rank in other["ranks"]]
    words = (f"workers={other['workers']}", f"the {workers} with which", f"use {workers}")
    good = bool(said) and all(word in sentence for sentence in said for word in words)
    return Finding(f"every rank refuses, naming {', '.join(words)}", said, good)


def _plain(document: Document) -> Finding:
    plain = document["plain"]
    first = document["halves"][0]["first"]
    return equal(
        {
            "weights": first["ranks"][0]["parameters_sha256"][:12],
            "accuracy": first["outcome"]["metrics"]["accuracy"],
            "weights_only=True reads": ["model.pt", "optimizer.pt", "rng.pt", "scheduler.pt"],
            "keys with a prefix": [],
            "Ray imported": False,
        },
        {
            "weights": plain["parameters_sha256"][:12],
            "accuracy": plain["accuracy"],
            "weights_only=True reads": plain["loaded"],
            "keys with a prefix": [key for key in plain["keys"] if key.startswith("module.")],
            "Ray imported": plain["ray_imported"],
        },
    )


def _damaged(document: Document) -> Finding:
    run = f"{document['run']}-damaged"
    wrong = [
        f"{one['case']}: {one['message'] or 'no refusal'}"
        for one in document["damage"]
        if not all(word in one["message"] for word in (run, one["names"], "--fresh")) or one["started"]
    ]
    wrong += [
        f"a byte has changed: {said or 'it loads'}"
        for said in document["flipped"]
        if not ("CHECKPOINT/" in said and ".pt is not what was saved" in said and "--fresh" in said)
    ]
    cases = len(document["damage"]) + bool(document["flipped"])
    return Finding(
        "6 kinds of damage, each refused by a sentence that names the file and the fix",
        wrong or f"{cases} kinds, each refused so",
        not wrong and cases == 6,
    )


def _measurements(document: Document) -> dict[str, Any]:
    return {
        "fit_seconds": {
            "first half and the straight run": document["halves"][0]["first"]["outcome"]["seconds"],
            "second half and eight replays": document["halves"][0]["second"]["outcome"]["seconds"],
            "with a crash and a restart": document["crash"]["outcome"]["seconds"],
            "other world size": document["other_size"]["outcome"]["seconds"],
        },
        "final_loss": {
            "straight": document["straight"][0]["history"][-1]["loss"],
            **{
                f"without {part}": rank[part]["history"][-1]["loss"]
                for rank in document["parts"][:1]
                for part in WITHOUT
            },
        },
        "damage": {one["case"]: one["message"] for one in document["damage"]},
    }


def _curves(axes: Any, document: Document) -> None:
    half, history = document["half"], document["straight"][0]["history"]
    axes.plot(
        [row["epoch"] for row in history],
        [row["loss"] for row in history],
        linewidth=5,
        color=COLOURS[6],
        label="in one go",
    )
    curves = [
        ("two halves", document["halves"][0]["second"]["ranks"], "o"),
        ("crash and restart", document["crash"]["ranks"], "x"),
    ]
    curves += [
        (f"without {part}", [rank[part] for rank in document["parts"]], "--")
        for part in ("optimizer", "scheduler", "model")
    ]
    for label, ranks, style in curves:
        rows = [row for rank in ranks[:1] for row in rank["history"] if style != "--" or row["epoch"] >= half]
        axes.plot([row["epoch"] for row in rows], [row["loss"] for row in rows], style, label=label)
    axes.set_yscale("log")
    axes.axvline(half - 0.5, color=COLOURS[6], linewidth=0.8)
    axes.set(xlabel="epoch", ylabel="training loss", title="Going on from the saved state, and from less")
    axes.legend()


def _table(axes: Any, document: Document) -> None:
    half, straight = document["half"], document["straight"]
    left_out = ["nothing", *WITHOUT] if document["parts"] else []
    same = [
        list(_same([rank[part] for rank in document["parts"]], straight, half).values()) for part in left_out
    ]
    for y, line in enumerate(same):
        for x, value in enumerate(line):
            axes.text(
                x, y, "same" if value else "differs", ha="center", va="center", color="white", fontsize=7
            )
    if same:
        shades = [[0.15 if value else 0.8 for value in line] for line in same]
        axes.imshow(shades, cmap="RdBu_r", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(COMPARED)), list(COMPARED), fontsize=7)
    axes.set_yticks(range(len(left_out)), left_out)
    axes.set(ylabel="left out of the saved state", title="Compared with the run in one go")


def _figures(document: Document, folder: Path) -> list[Path]:
    path = folder / "resume.png"
    with figure(path, columns=2) as (left, right):
        _curves(left, document)
        _table(right, document)
    return [path]


LESSON = Lesson(
    name="resume",
    title="a resumed run is bit for bit the run that never stopped",
    idea=(
        "The weights alone do not continue a run. What comes back must be all that the next step depends on: model, "
        "optimizer, scheduler, epoch, each rank's random generators, the sampler's epoch; and the history, so that the "
        "record is whole. Ray hands the checkpoint back to a run of the same name; what is in it is up to you."
    ),
    needs=Needs("head"),
    observe="resume",
    params=Resume,
    default_storage="s3",
    check=_check,
    quick={"all_storages": False},
    claims=(
        Claim(
            "halves",
            "two halves under one name are bit-identical to the epochs in one go: weights, optimizer, scheduler, "
            "generators of each rank, sample order, metric history",
            _halves,
        ),
        Claim("crash", "so is a run that crashed in the middle of an epoch and was restarted", _crash),
        *(
            Claim(
                f"without-{part}",
                f"without {part} in the saved state it is another run: {WHY[part]}",
                _part(part),
                ONE_RANK if part == "sampler" else "",
            )
            for part in WITHOUT
        ),
        Claim("name", "a name used again resumes, and the lab says at which epoch", _name),
        Claim("fresh", "--fresh deletes the run of that name, says so, and starts at epoch 0", _fresh),
        Claim(
            "other-size",
            "another number of ranks goes on from the saved weights with the same global batch",
            _other_size,
        ),
        Claim("other-size-refused", "or refuses, when told to", _other_size_refused),
        Claim(
            "plain",
            "a plain script without Ray reads every file with weights_only=True; no key carries the prefix module.",
            _plain,
        ),
        Claim(
            "damaged",
            "a damaged snapshot or checkpoint is refused before a step is done, naming the file and the fix",
            _damaged,
        ),
    ),
    breaks=(
        Break("no-optimizer", "leaves the optimizer out of every saved state", ("halves", "crash")),
        Break(
            "nothing-left-out",
            "replays the second half with every part in its place",
            tuple(f"without-{part}" for part in WITHOUT),
        ),
    ),
    measurements=_measurements,
    figures=_figures,
    seconds=(55, 90),
)
