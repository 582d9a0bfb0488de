"""Lesson `iterable`: an IterableDataset is not sharded for you; Ray Data reads the same stream once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.errors import UserError
from lab.lessons.contract import Break, Claim, Document, Finding, Lesson, Needs, Params
from lab.lessons.judging import equal, refused
from lab.lessons.run import Host
from lab.report.plots import figure

EPOCHS = 2
NAMES = {
    "bare": "IterableDataset\nin a DataLoader",
    "shared": "the same, sharing\nitself out",
    "ray-data": "Ray Data",
}


@dataclass(frozen=True)
class Iterable(Params):
    """A stream of `numbers` numbers, and an endless one that is cut into epochs of `steps` batches."""

    numbers: int = field(default=10, metadata={"help": "length of the stream"})
    loader_workers: int = field(
        default=2, metadata={"help": "loader workers (processes) per rank, 1 or more"}
    )
    steps: int = field(default=5, metadata={"help": "steps that end an epoch of the endless stream"})
    worker_batch: int = field(default=4, metadata={"help": "items of the endless stream per rank and step"})


def _check(params: Iterable) -> None:
    if params.steps < 1:
        raise UserError(
            f"--steps={params.steps}: an endless stream never ends an epoch by itself; use --steps with 1 or more."
        )
    if params.loader_workers < 1:
        raise UserError(f"--loader-workers={params.loader_workers} shows nothing here: use 1 or more.")
    if params.worker_batch < 1:
        raise UserError(f"--worker-batch={params.worker_batch} holds no item: use 1 or more.")
    readers = params.workers * params.loader_workers
    if params.numbers < readers:
        raise UserError(
            f"--numbers={params.numbers} is too short for {readers} readers ({params.workers} ranks x "
            f"{params.loader_workers} loader workers): use {readers} or more."
        )


def _ranks(document: Document) -> list[Mapping[str, Any]]:
    ranks: list[Mapping[str, Any]] = document["ranks"]
    if not ranks:
        error = document["outcome"]["error"]
        raise ValueError(f"no rank finished: {error and error['message']}")
    return ranks


def reads(document: Document, stream: str) -> dict[str, int]:
    """How often items of a stream were read, by how many passes, and how often each one."""
    rows = [tuple(row) for rank in _ranks(document) for row in rank["streams"][stream]]
    each = Counter(number for number, _ in rows)
    return {
        "reads": len(rows),
        "passes": len({reading for _, reading in rows}),
        "numbers": len(each),
        "fewest reads of a number": min(each.values(), default=0),
        "most reads of a number": max(each.values(), default=0),
    }


def _expected(document: Document, passes: int, times: int) -> dict[str, int]:
    numbers = document["params"]["numbers"]
    return {
        "reads": times * numbers,
        "passes": passes,
        "numbers": numbers,
        "fewest reads of a number": times,
        "most reads of a number": times,
    }


def _readers(document: Document) -> int:
    return int(document["params"]["workers"]) * int(document["params"]["loader_workers"])


def _bare(document: Document) -> Finding:
    readers = _readers(document)
    return equal(_expected(document, readers, readers), reads(document, "bare"))


def _shared(document: Document) -> Finding:
    return equal(_expected(document, _readers(document), 1), reads(document, "shared"))


def _ray_data(document: Document) -> Finding:
    return equal(_expected(document, 1, 1), reads(document, "ray-data"))


def _steps(document: Document) -> Finding:
    workers, steps = document["params"]["workers"], document["params"]["steps"]
    ranks = _ranks(document)
    return equal(
        {"agreed": [[steps] * workers] * workers, "steps of each epoch": [[steps] * EPOCHS] * workers},
        {
            "agreed": [rank["endless"]["agreed"] for rank in ranks],
            "steps of each epoch": [[len(epoch) for epoch in rank["endless"]["epochs"]] for rank in ranks],
        },
    )


def _goes_on(document: Document) -> Finding:
    workers = document["params"]["workers"]
    each = document["params"]["steps"] * document["params"]["worker_batch"]
    measured = []
    for rank in _ranks(document):
        epochs = [[number for batch in epoch for number in batch] for epoch in rank["endless"]["epochs"]]
        measured.append([[epoch[0], epoch[-1]] for epoch in epochs])
    # rank r of W takes r, r + W, r + 2 W, ...: the k-th item of its part is r + k W
    expected = [
        [
            [rank + epoch * each * workers, rank + ((epoch + 1) * each - 1) * workers]
            for epoch in range(EPOCHS)
        ]
        for rank in range(workers)
    ]
    return equal(
        {"first and last of each epoch, by rank": expected},
        {"first and last of each epoch, by rank": measured},
    )


def _refused(document: Document) -> Finding:
    answer = document["host"]["no_steps"]
    found = refused(answer, "--steps=0", "endless")
    inside = {rank["endless"]["without_steps"] for rank in _ranks(document)}
    return Finding(
        "refused before the job and, on each rank, in it",
        {"host": found.measured, "ranks": sorted(inside)},
        bool(found.holds) and all("--steps" in message for message in inside),
    )


def _look(host: Host, document: dict[str, Any]) -> dict[str, Any]:
    return {"no_steps": host.refusal(steps=0)}


def _measurements(document: Document) -> dict[str, Any]:
    return {
        "reads": {name: reads(document, name)["reads"] for name in NAMES},
        "passes": {name: reads(document, name)["passes"] for name in NAMES},
        "fit_seconds": document["outcome"]["seconds"],
    }


def _figures(document: Document, folder: Path) -> list[Path]:
    path = folder / "reads.png"
    numbers = document["params"]["numbers"]
    with figure(path, columns=2) as (left, right):
        for place, name in enumerate(NAMES):
            start = 0
            for rank in _ranks(document):
                for reading in dict.fromkeys(row[1] for row in rank["streams"][name]):
                    count = sum(row[1] == reading for row in rank["streams"][name])
                    left.bar(place, count, bottom=start, color=f"C{rank['rank']}", edgecolor="white")
                    left.text(place, start + count / 2, str(count), ha="center", va="center", color="white")
                    start += count
            left.text(place, start, f"{start} reads", ha="center", va="bottom")
        left.axhline(numbers, color="#bbbbbb", linewidth=0.8)
        left.set_xticks(range(len(NAMES)), list(NAMES.values()))
        left.set(ylabel="items read (a colour a rank, a box a pass)", title=f"One stream of {numbers} items")
        for rank in _ranks(document):
            step = 0
            for epoch in rank["endless"]["epochs"]:
                for batch in epoch:
                    right.plot([step] * len(batch), batch, ".", color=f"C{rank['rank']}")
                    step += 1
        for epoch in range(1, EPOCHS):
            right.axvline(epoch * document["params"]["steps"] - 0.5, color="#bbbbbb", linewidth=0.8)
        right.set(
            xlabel="step (a line ends an epoch)", ylabel="item", title="An endless stream, ended by steps"
        )
    return [path]


LESSON = Lesson(
    name="iterable",
    title="an IterableDataset is not sharded for you",
    idea=(
        "prepare_data_loader can give each rank a part of a data set with indices. A stream has none: each rank, and "
        "each loader worker of each rank, reads all of it. Ray Data reads it once and hands out the rows; or the stream "
        "shares itself out. One that never ends is cut into epochs by steps."
    ),
    needs=Needs("worker", spare_cpus=1),
    observe="iterable",
    params=Iterable,
    default_storage="s3",
    check=_check,
    host=_look,
    claims=(
        Claim("bare", "every loader worker of every rank reads the whole stream", _bare),
        Claim(
            "shared", "a stream that asks for rank and loader worker is read once by all together", _shared
        ),
        Claim("ray-data", "the same stream through Ray Data is read once, in one pass", _ray_data),
        Claim("steps", "an endless stream ends each epoch after the agreed steps, on all ranks", _steps),
        Claim("goes-on", "the next epoch goes on where the last one ended", _goes_on),
        Claim("no-steps", "an endless stream without steps is refused", _refused),
    ),
    breaks=(
        Break(
            "not-split", "leaves the stream out of datasets_to_split: every rank gets it all", ("ray-data",)
        ),
        Break("new-iterator", "starts each epoch with a new iterator of the endless stream", ("goes-on",)),
    ),
    measurements=_measurements,
    figures=_figures,
    seconds=(20, 20),
)
