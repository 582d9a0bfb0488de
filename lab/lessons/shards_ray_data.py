"""Lesson `shards-ray-data`: Ray Data streams each rank a shard of its own, and what an equal split costs."""

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
from lab.report.plots import COLOURS, figure
from lab.storage import parse_location
from lab.training.steps import plan_steps

SMALL_WORKERS = 3
SMALL = {"odd": 17, "few": 2}
RAGGED = ("ragged-a", "ragged-b")
RAGGED_BATCH = 8
EVALUATION_ROWS = 50
SECOND_RUN = ("rest",)
"""Read in the second run alone; "ordered" is in both."""


@dataclass(frozen=True)
class ShardsRayData(Params):
    """`rows` of Parquet in the object store, in batches of `worker_batch` rows a rank."""

    workers: int = field(default=4, metadata={"help": "ranks (worker processes), 3 or more"})
    rows: int = field(default=1000, metadata={"help": "rows of the lesson's own Parquet files"})
    worker_batch: int = field(default=32, metadata={"help": "rows per rank and step"})
    parquet: str = field(
        default="",
        metadata={
            "help": "read these Parquet files (s3://BUCKET/PREFIX or a folder on the head) with a column id"
        },
    )
    column: str = field(default="x", metadata={"help": "the column that becomes a tensor, beside id"})


def _check(params: ShardsRayData) -> None:
    if params.workers < SMALL_WORKERS:
        raise UserError(
            f"LAB_WORKERS={params.workers} is too few for lesson shards-ray-data, which splits 17 rows on 3 ranks: "
            "use 3 or more."
        )
    if params.parquet:
        parse_location(params.parquet, "--parquet")
    elif params.worker_batch < 1:
        raise UserError(f"--worker-batch={params.worker_batch} holds no row: use 1 or more.")
    else:
        plan_steps(params.rows, params.workers, params.worker_batch, "--rows")


def _ranks(document: Document, case: str, run: int = 0) -> list[Mapping[str, Any]]:
    """What each rank saw of a case."""
    part = document["small"] if case in SMALL else document["runs"][1 if case in SECOND_RUN else run]
    if not part["ranks"]:
        error = part["outcome"]["error"]
        raise ValueError(f"no rank finished: {error and error['message']}")
    return [rank["cases"][case] for rank in part["ranks"]]


def _workers(document: Document, case: str) -> int:
    return SMALL_WORKERS if case in SMALL else int(document["params"]["workers"])


def _rows(document: Document, case: str) -> int:
    found: int = {"train": len(document["source"]["ids"]), "rest": document["source"]["rest"], **SMALL}[case]
    return found


def _disjoint(document: Document) -> Finding:
    expected, measured = {}, {}
    for case in ("train", "rest", "odd"):
        shards = [set(rank["epochs"][0]["ids"]) for rank in _ranks(document, case)]
        owners = Counter(row for shard in shards for row in shard)
        expected[case] = {"ranks with rows": _workers(document, case), "rows on several ranks": 0}
        measured[case] = {
            "ranks with rows": sum(bool(shard) for shard in shards),
            "rows on several ranks": sum(count > 1 for count in owners.values()),
        }
    return equal(expected, measured)


def _counted(document: Document) -> Finding:
    expected, measured = {}, {}
    for case in ("train", "rest", "odd", "few"):
        rows, workers = _rows(document, case), _workers(document, case)
        each = [len(rank["epochs"][0]["ids"]) for rank in _ranks(document, case)]
        name = f"{rows} on {workers}"
        expected[name] = {"each rank": [rows // workers] * workers, "dropped": rows % workers}
        measured[name] = {"each rank": each, "dropped": rows - sum(each)}
    return equal(expected, measured)


def _union(document: Document) -> Finding:
    source = set(document["source"]["ids"])
    workers = _workers(document, "train")
    ranks = _ranks(document, "train")
    epochs = []
    for epoch in range(len(ranks[0]["epochs"])):
        ids = [row for rank in ranks for row in rank["epochs"][epoch]["ids"]]
        epochs.append(
            {
                "read": len(ids),
                "read twice": len(ids) - len(set(ids)),
                "never read": len(source - set(ids)),
                "foreign": len(set(ids) - source),
            }
        )
    one = {
        "read": len(source) // workers * workers,
        "read twice": 0,
        "never read": len(source) % workers,
        "foreign": 0,
    }
    return equal([one, one], epochs)


def _empty(document: Document) -> Finding:
    few = _ranks(document, "few")
    silent = document["small"]["outcome"]["error"] is None and not any(
        rank["epochs"][0]["ids"] for rank in few
    )
    answers = [document["refusals"]["few"], document["host"]["few"]]
    found = [
        refused(answer, "2 rows", f"{workers} workers")
        for answer, workers in zip(answers, (SMALL_WORKERS, document["params"]["workers"]), strict=True)
    ]
    return Finding(
        "Ray trains on nothing without a word; the lab refuses, before the job and in it",
        {
            "Ray": "no row, no error" if silent else "something else",
            "the lab": [one.measured for one in found],
        },
        silent and all(one.holds for one in found),
    )


def _order(document: Document) -> Finding:
    pairs = zip(_ranks(document, "ordered", 0), _ranks(document, "ordered", 1), strict=True)
    ids = [(first["epochs"][0]["ids"], second["epochs"][0]["ids"]) for first, second in pairs]
    same = sum(bool(first) and first == second for first, second in ids)
    return equal(f"{len(ids)} of {len(ids)} ranks", f"{same} of {len(ids)} ranks")


def _ragged(document: Document) -> Finding:
    expected, measured = {}, {}
    for case in RAGGED:
        epochs = [rank["epochs"][0]["sizes"] for rank in _ranks(document, case)]
        expected[case] = {"batch counts differ": True, "short in mid-stream": True}
        measured[case] = {
            "batch counts differ": len({len(sizes) for sizes in epochs}) > 1,
            "short in mid-stream": any(size < RAGGED_BATCH for sizes in epochs for size in sizes[:-1]),
        }
    return equal(expected, measured)


def _steps(document: Document) -> Finding:
    expected, measured = {}, {}
    for case in RAGGED:
        ranks = _ranks(document, case)
        rows = sum(len(rank["epochs"][0]["ids"]) for rank in ranks)
        # theory: the equal split rounds down, and so does each rank's number of full batches
        steps = rows // len(ranks) // RAGGED_BATCH
        expected[case] = {
            "agreed on each rank": [[steps] * len(ranks)] * len(ranks),
            "batches": [[RAGGED_BATCH] * steps] * len(ranks),
            "rows left out, as said": document["plans"][case]["left_out"],
        }
        seen = {row for rank in ranks for row in rank["steps"]["ids"]}
        measured[case] = {
            "agreed on each rank": [rank["agreed"] for rank in ranks],
            "batches": [rank["steps"]["sizes"] for rank in ranks],
            "rows left out, as said": document["plans"][case]["rows"] - len(seen),
        }
    good = expected == measured
    return Finding(_brief(expected), _brief(measured), good)


def _brief(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {
        case: f"steps {[len(sizes) for sizes in found['batches']]}, "
        f"batch sizes {sorted({size for sizes in found['batches'] for size in sizes})}, "
        f"agreed {found['agreed on each rank'][0]}, {found['rows left out, as said']} rows left out"
        for case, found in cases.items()
    }


def _evaluation(document: Document) -> Finding:
    found = [sorted(rank["epochs"][0]["ids"]) for rank in _ranks(document, "evaluation")]
    whole = sum(ids == list(range(EVALUATION_ROWS)) for ids in found)
    workers = _workers(document, "evaluation")
    return equal(f"{EVALUATION_ROWS} rows on {workers} ranks", f"{EVALUATION_ROWS} rows on {whole} ranks")


def _words(document: Document) -> Finding:
    errors = [rank.get("error") or "no error" for rank in _ranks(document, "words")]
    answer, missing = document["refusals"]["words"], document["refusals"]["missing"]
    found = [refused(answer, "'word'", "string", "id, x"), refused(missing, "'label'", "id, x, word")]
    return Finding(
        "TypeError on every rank; the lab refuses before, naming column, type and the columns there are",
        {"Ray": errors[0].removeprefix("TypeError: "), "the lab": [one.measured for one in found]},
        all(error.startswith("TypeError") for error in errors) and all(one.holds for one in found),
    )


def _streaming(document: Document) -> Finding:
    ranks = _ranks(document, "train")
    first = min(rank["epochs"][0]["first_at"] for rank in ranks)
    last = max(rank["epochs"][0]["last_made"] for rank in ranks)
    return Finding(
        "the first batch is on a rank before the last block is made",
        f"{last - first:.2f} s before",
        first < last,
    )


def _parquet(document: Document) -> Finding:
    source = document["source"]
    stored = set(source["ids"])
    read = {row for rank in _ranks(document, "train") for row in rank["epochs"][0]["ids"]}
    local = {row for rank in _ranks(document, "rest") for row in rank["epochs"][0]["ids"]}
    workers = _workers(document, "train")
    where = {"given": document["params"]["parquet"], "s3": source["parquet"].startswith("s3://")}
    return Finding(
        {
            "from the object store": len(stored) - len(stored) % workers,
            "from local files": source["rest"] - source["rest"] % workers,
            "foreign": 0,
        },
        {
            "from the object store": len(read & stored),
            "from local files": len(local),
            "foreign": len(read - stored),
        },
        (bool(where["given"]) or where["s3"])
        and len(read & stored) == len(stored) - len(stored) % workers
        and read <= stored
        and len(local & set(range(source["rest"]))) == source["rest"] - source["rest"] % workers,
    )


def _spare(document: Document) -> Finding:
    answer = document["host"]["no_spare"]
    return refused(
        answer, "LAB_WORKERS", "data pipeline", f"have {answer['have']} CPUs", f"need {answer['have'] + 1}"
    )


def _look(host: Host, document: dict[str, Any]) -> dict[str, Any]:
    have = host.access.nodes * host.access.node_cpus
    return {
        "few": host.refusal(rows=2, parquet=""),
        "no_spare": host.refusal(workers=have) | {"have": have},
    }


def _measurements(document: Document) -> dict[str, Any]:
    raw = {case: [len(rank["epochs"][0]["sizes"]) for rank in _ranks(document, case)] for case in RAGGED}
    first, second = (
        [set(rank["epochs"][epoch]["ids"]) for rank in _ranks(document, "train")] for epoch in (0, 1)
    )
    moved = sum(len(after - before) for before, after in zip(first, second, strict=True))
    return {
        "rows that changed rank between epochs": moved,
        "batches a rank with local shuffle": raw,
        "rows left out by full batches": {case: plan["left_out"] for case, plan in document["plans"].items()},
        "fit_seconds": [part["outcome"]["seconds"] for part in (*document["runs"], document["small"])],
    }


def _figures(document: Document, folder: Path) -> list[Path]:
    path = folder / "shards.png"
    with figure(path, columns=2) as (left, right):
        for number, rank in enumerate(_ranks(document, "train")):
            for epoch, seen in enumerate(rank["epochs"]):
                left.plot(
                    seen["ids"],
                    [epoch + (number - 1.5) * 0.18] * len(seen["ids"]),
                    "|",
                    color=COLOURS[number % len(COLOURS)],
                    label=f"rank {number}" if epoch == 0 else None,
                )
        left.set_yticks([0, 1], ["epoch 0", "epoch 1"])
        left.set(xlabel="row id", title="Which rank got which row", ylim=(-0.5, 2.0))
        left.legend(loc="upper center", ncols=4)
        ticks = []
        ragged = _ranks(document, RAGGED[0])
        for number, rank in enumerate(ragged):
            for row, sizes in ((0, rank["epochs"][0]["sizes"]), (1, rank["steps"]["sizes"])):
                place = row * (len(ragged) + 1) + number
                start = 0
                for size in sizes:
                    short = size < RAGGED_BATCH
                    right.barh(place, size, left=start, color=COLOURS[1 if short else 0], edgecolor="white")
                    right.text(
                        start + size / 2, place, str(size), ha="center", va="center", color="white", size=7
                    )
                    start += size
                ticks.append((place, f"rank {number}, {'full batches' if row else 'as Ray gives'}"))
        right.set_yticks(*zip(*ticks, strict=True))
        right.invert_yaxis()
        right.set(xlabel="rows of the shard", title="Batches with local shuffle (short ones red)")
    return [path]


LESSON = Lesson(
    name="shards-ray-data",
    title="Ray Data streams each rank a shard of its own",
    idea=(
        "datasets={'train': ds} and get_dataset_shard('train') give each rank an equal, disjoint part of a stream that "
        "is read once for all. Equal means that rows are dropped; and rows are not steps: the steps of an epoch have to "
        "be agreed before the first one."
    ),
    needs=Needs("worker", spare_cpus=1),
    observe="shards_ray_data",
    params=ShardsRayData,
    default_storage="s3",
    check=_check,
    host=_look,
    claims=(
        Claim("disjoint", "no row is on two ranks", _disjoint),
        Claim("rows", "each of W ranks gets floor(n / W) rows; n mod W rows are dropped", _counted),
        Claim("union", "in each epoch the shards together are the whole set, less what is dropped", _union),
        Claim("empty-shard", "fewer rows than ranks: Ray trains on nothing, the lab refuses", _empty),
        Claim(
            "order",
            "with preserve_order each rank's rows come in the same order in two runs",
            _order,
        ),
        Claim(
            "ragged",
            "a local shuffle on uneven blocks gives short batches in mid-stream, and ranks different numbers of them",
            _ragged,
        ),
        Claim(
            "steps",
            "planned steps are the same on all ranks before the first one, all batches full, the rows left out as said",
            _steps,
        ),
        Claim("evaluation", "a data set that is not split is whole on each rank", _evaluation),
        Claim("words", "a column of strings ends in a clear error", _words),
        Claim("parquet", "Parquet is read from the object store and from local files", _parquet),
        Claim("streaming", "training starts before the data are all read", _streaming),
        Claim("spare-cpu", "ranks on every CPU are refused: the data pipeline needs one", _spare),
    ),
    breaks=(
        Break(
            "ray-defaults",
            "leaves out preserve_order and the planned steps: what Ray does when not told otherwise",
            ("order", "steps"),
        ),
        Break("not-split", "leaves the training set out of datasets_to_split", ("disjoint", "rows")),
    ),
    measurements=_measurements,
    figures=_figures,
    seconds=(40, 60),
)
