"""Lesson `shards-sampler`: `prepare_data_loader` gives each rank its shard of the data, and changes the loader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.errors import UserError
from lab.lessons.contract import Break, Claim, Document, Finding, Lesson, Needs, Params, not_shown
from lab.lessons.judging import equal, refused
from lab.lessons.run import Host
from lab.report.plots import COLOURS, figure
from lab.training.batch import either, nearest_batches

MEASURED_WITH = "2.60.0"
"""The Ray whose `prepare_data_loader` the table below describes."""

_OPTIONS: dict[str, Any] = {
    "drop_last": True,
    "num_workers": 2,
    "persistent_workers": True,
    "prefetch_factor": 5,
    "multiprocessing_context": "spawn",
    "generator": "yours",
    "pin_memory": True,
    "timeout": 30,
    "worker_init_fn": "yours",
}
_NOTHING: dict[str, Any] = {
    "drop_last": False,
    "num_workers": 0,
    "persistent_workers": False,
    "prefetch_factor": None,
    "multiprocessing_context": None,
    "generator": None,
    "pin_memory": False,
    "timeout": 0,
    "worker_init_fn": None,
}
_BATCHES = {"batch_sampler": "BatchSampler", "batch_size": 8}

BEFORE: dict[str, dict[str, Any]] = {
    "plain": {"sampler": "RandomSampler", **_BATCHES, **_OPTIONS},
    "weighted sampler": {"sampler": "WeightedRandomSampler", **_BATCHES, **_NOTHING},
    "batch sampler": {
        "sampler": "SequentialSampler",
        "batch_sampler": "OwnBatches",
        "batch_size": None,
        **_NOTHING,
    },
    "own DistributedSampler": {"sampler": "DistributedSampler", **_BATCHES, **_OPTIONS},
}
"""Four loaders as a user writes them."""

CHANGED: dict[str, dict[str, Any]] = {
    "plain": {
        "sampler": "DistributedSampler",
        "persistent_workers": False,
        "prefetch_factor": 2,
        "multiprocessing_context": None,
    },
    "weighted sampler": {"sampler": "DistributedSampler"},
    "batch sampler": {"sampler": "DistributedSampler", "batch_sampler": None},
    "own DistributedSampler": {},
}
"""What `prepare_data_loader` of Ray 2.60.0 makes another of, above one rank; at one rank it changes nothing (D1)."""


@dataclass(frozen=True)
class ShardsSampler(Params):
    """`rows` numbered samples; the uneven case has one more."""

    workers: int = field(default=4, metadata={"help": "ranks (worker processes)"})
    rows: int = field(default=1000, metadata={"help": "samples, a multiple of the workers"})
    epochs: int = field(default=3, metadata={"help": "passes with set_epoch, 2 or more"})
    repeats: int = field(default=3, metadata={"help": "how often 20 epochs run with loader processes"})


def _check(params: ShardsSampler) -> None:
    if params.workers < 2:
        raise UserError(f"LAB_WORKERS={params.workers} shares nothing out: use 2 or more.")
    if params.rows < params.workers:
        raise UserError(
            f"--rows={params.rows} is fewer samples than the {params.workers} workers: DistributedSampler would give some "
            f"ranks another rank's; use {params.workers} rows or more, or fewer WORKERS."
        )
    if params.rows % params.workers:
        raise UserError(
            f"--rows={params.rows} is no multiple of the {params.workers} workers, which the even case needs: "
            f"use {either(nearest_batches(params.rows, params.workers))}."
        )
    if params.epochs < 2:
        raise UserError(f"--epochs={params.epochs} shows no change of order: use 2 or more.")
    if params.repeats < 1:
        raise UserError(f"--repeats={params.repeats} tries nothing: use 1 or more.")


def padding(rows: int, ranks: int) -> int:
    """How many samples DistributedSampler repeats so that every rank has equally many."""
    return -(-rows // ranks) * ranks - rows


def dealt(shards: Sequence[Sequence[int]]) -> list[int]:
    """The order from which samples were dealt to the ranks in turn."""
    return [sample for turn in zip(*shards, strict=True) for sample in turn]


def _ranks(document: Document, part: str = "ranks") -> list[Mapping[str, Any]]:
    ranks: list[Mapping[str, Any]] = document[part]["ranks"]
    wanted = document["params"]["workers"] if part == "ranks" else 1
    if len(ranks) != wanted:
        error = document[part]["outcome"]["error"]
        raise ValueError(f"{len(ranks)} of {wanted} ranks finished: {error and error['message']}")
    return ranks


def _repeated(samples: Sequence[int]) -> dict[int, int]:
    return {sample: times for sample, times in Counter(samples).items() if times > 1}


def _even(document: Document) -> Finding:
    rows, workers = document["params"]["rows"], document["params"]["workers"]
    found = []
    for epoch in range(document["params"]["epochs"]):
        shards = [rank["even"][epoch] for rank in _ranks(document)]
        everything = [sample for shard in shards for sample in shard]
        found.append(
            {
                "per rank": sorted({len(shard) for shard in shards}),
                "samples": len(set(everything) & set(range(rows))),
                "read twice": len(_repeated(everything)),
            }
        )
    wanted = {"per rank": [rows // workers], "samples": rows, "read twice": 0}
    worst = next((one for one in found if one != wanted), wanted)
    return equal({"epochs": len(found), **wanted}, {"epochs": len(found), **worst})


def _uneven(document: Document) -> Finding:
    rows, workers = document["params"]["rows"] + 1, document["params"]["workers"]
    order = dealt([rank["uneven"] for rank in _ranks(document)])
    extra = padding(rows, workers)
    return equal(
        {"samples": rows, "repeated": extra, "which": sorted(order[:extra])},
        {
            "samples": len(set(order)),
            "repeated": len(order) - len(set(order)),
            "which": sorted(_repeated(order)),
        },
    )


def _set_epoch(document: Document) -> Finding:
    ranks = _ranks(document)
    epochs = document["params"]["epochs"]
    moved = {tuple(dealt([rank["even"][epoch] for rank in ranks])) for epoch in range(epochs)}
    still = {tuple(dealt([rank["still"][epoch] for rank in ranks])) for epoch in range(2)}
    return equal(
        {f"orders in {epochs} epochs with set_epoch": epochs, "in 2 epochs without": 1},
        {f"orders in {epochs} epochs with set_epoch": len(moved), "in 2 epochs without": len(still)},
    )


def _one_rank(document: Document) -> Finding:
    (rank,) = _ranks(document, "one")
    rows = document["params"]["rows"]
    return equal(
        {"sampler": "RandomSampler", "set_epoch": False, "samples an epoch": [rows, rows], "orders": 2},
        {
            "sampler": rank["sampler"],
            "set_epoch": rank["set_epoch"],
            "samples an epoch": [len(set(reads)) for reads in rank["reads"]],
            "orders": len({tuple(reads) for reads in rank["reads"]}),
        },
    )


def _striped(document: Document) -> Finding:
    rows, workers = document["params"]["rows"], document["params"]["workers"]
    expected = {f"rank {rank}": list(range(rank, rows, workers)) for rank in range(workers)}
    measured = {f"rank {rank['world_rank']}": rank["striped"] for rank in _ranks(document)}
    return Finding(
        {name: [*ids[:3], "..."] for name, ids in expected.items()},
        {name: [*ids[:3], "..."] for name, ids in measured.items()},
        expected == measured,
    )


def _drop_last(document: Document) -> Finding:
    rows, workers = document["params"]["rows"], document["params"]["workers"]
    batch, small = document["constants"]["batch"], document["constants"]["small_batch"]
    ranks = _ranks(document)
    few = [sample for rank in ranks for sample in rank["dropped_small"]]
    return equal(
        {
            f"of {rows}, read by each rank": [rows // workers // batch * batch],
            f"of {small * workers - 1}, reads": small * workers,
            "repeated all the same": [0],
        },
        {
            f"of {rows}, read by each rank": sorted({len(rank["dropped"]) for rank in ranks}),
            f"of {small * workers - 1}, reads": len(few),
            "repeated all the same": sorted(_repeated(few)),
        },
    )


def _evaluation(document: Document) -> Finding:
    ranks = _ranks(document)
    (alone,) = _ranks(document, "one")
    rows = document["constants"]["eval_rows"]
    if padding(rows, len(ranks)) == 0:
        return not_shown(f"{len(ranks)} ranks divide {rows} samples, so nothing is padded")
    exact = [tuple(rank["exact"]) for rank in ranks]
    padded = tuple(sum(rank["padded"][place] for rank in ranks) for place in (0, 1))
    mean = sum(rank["padded"][0] / rank["padded"][1] for rank in ranks) / len(ranks)
    correct, total = alone["exact"]
    return Finding(
        {"(correct, total)": [correct, total], "accuracy": round(correct / total, 4)},
        {
            "(correct, total)": sorted([list(one) for one in set(exact)]),
            "padded": list(padded),
            "mean of the ranks' accuracies": round(mean, 4),
        },
        set(exact) == {(correct, total)}
        and total == rows
        and padded[1] == rows + padding(rows, len(ranks))
        and abs(mean - correct / total) > 1e-9,
    )


def _table(document: Document) -> Finding:
    expected = {
        way: {"before": before, "after": {**before, **CHANGED[way]}} for way, before in BEFORE.items()
    }
    alone = {way: {"before": before, "after": before} for way, before in BEFORE.items()}
    version = document["environment"]["versions"]["ray"]
    found = [
        *(difference for rank in _ranks(document) for difference in _differences(expected, rank["settings"])),
        *(f"one rank: {text}" for text in _differences(alone, _ranks(document, "one")[0]["settings"])),
    ]
    return Finding(
        f"the committed table, of Ray {MEASURED_WITH}",
        f"Ray {version}: {'; '.join(sorted(set(found))) or 'as in the table'}",
        not found,
    )


def _differences(expected: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    return [
        f"{way}, {when}: {name} is {measured[way][when].get(name)}, not {value}"
        for way, moments in expected.items()
        for when, settings in moments.items()
        for name, value in settings.items()
        if measured[way][when].get(name) != value
    ]


def _generator(document: Document) -> Finding:
    ranks = _ranks(document)
    (alone,) = _ranks(document, "one")
    return equal(
        {"2 generators": 1, "2 generators at one rank": 2, "2 seeds of your own DistributedSampler": 2},
        {
            "2 generators": len({tuple(dealt([rank["generators"][i] for rank in ranks])) for i in (0, 1)}),
            "2 generators at one rank": len({tuple(reads) for reads in alone["generators"]}),
            "2 seeds of your own DistributedSampler": len(
                {tuple(dealt([rank["own_seeds"][i] for rank in ranks])) for i in (0, 1)}
            ),
        },
    )


def _loader_workers(document: Document) -> Finding:
    ranks = _ranks(document)
    rows, epochs = document["constants"]["loader_rows"], document["constants"]["loader_epochs"]
    whole = []
    for repeat in range(document["params"]["repeats"]):
        reads = [rank["loader_workers"][repeat]["reads"] for rank in ranks]
        whole.append(
            sum(
                len(samples := [sample for shard in epoch for sample in shard]) - padding(rows, len(ranks))
                == rows
                and set(samples) == set(range(rows))
                for epoch in zip(*reads, strict=True)
            )
        )
    return equal([epochs] * len(whole), whole)


def _too_few(document: Document) -> Finding:
    answer = document["host"]["too_few"]
    return refused(answer, f"--rows={answer['rows']}", f"{document['params']['workers']} workers", "use")


def _look(host: Host, document: dict[str, Any]) -> dict[str, Any]:
    rows = host.params.workers - 1
    return {"too_few": host.refusal(rows=rows) | {"rows": rows}}


def _measurements(document: Document) -> dict[str, Any]:
    ranks = document["ranks"]["ranks"]
    return {
        "seconds of 20 epochs with loader processes": [
            one["seconds"] for rank in ranks for one in rank["loader_workers"]
        ],
        "the same, forked by Ray's own loader": [rank["fork"] for rank in ranks if "fork" in rank],
    }


SHOWN = 96
"""Samples in the figure's map."""


def _figures(document: Document, folder: Path) -> list[Path]:
    ranks = document["ranks"]["ranks"]
    rows: list[tuple[str, list[Sequence[int]]]] = [
        ("shuffle=False", [rank["striped"] for rank in ranks]),
        *((f"without set_epoch, epoch {e}", [rank["still"][e] for rank in ranks]) for e in range(2)),
        *(
            (f"with set_epoch, epoch {e}", [rank["even"][e] for rank in ranks])
            for e in range(min(3, document["params"]["epochs"]))
        ),
    ]
    uneven = [rank["uneven"] for rank in ranks]
    twice = sorted(_repeated(dealt(uneven)))
    who, order = folder / "who-saw-which.png", folder / "order.png"
    with figure(who, size=(10.0, 3.2)) as axes:
        for line, (_, shards) in enumerate(rows):
            for rank, shard in enumerate(shards):
                axes.broken_barh(
                    [(sample - 0.5, 1) for sample in shard if sample < SHOWN],
                    (line - 0.35, 0.7),
                    color=COLOURS[rank % len(COLOURS)],
                    linewidth=0,
                    label=f"rank {rank}" if line == 0 else None,
                )
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.invert_yaxis()
        axes.set(xlabel="sample id", title=f"Who saw which of the first {SHOWN} samples")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    with figure(order, columns=3, size=(4.2, 3.0)) as (left, right, last):
        for axes, key, title in ((left, "still", "without set_epoch"), (right, "even", "with set_epoch")):
            for epoch in range(2):
                ids = ranks[0][key][epoch][:40]
                axes.plot(ids, "o" if epoch == 0 else "x", markersize=6 - epoch, label=f"epoch {epoch}")
            axes.set(xlabel="order in which rank 0 read it", ylabel="sample id", title=title)
            axes.legend(loc="upper right", frameon=True)
        turns = range(len(uneven[0]) - 6, len(uneven[0]))
        for rank, shard in enumerate(uneven):
            for place in turns:
                again = shard[place] in twice
                last.text(
                    place,
                    rank,
                    shard[place],
                    ha="center",
                    va="center",
                    weight="bold" if again else "normal",
                    color=COLOURS[1] if again else "black",
                )
        last.set(
            xlim=(turns[0] - 0.7, turns[-1] + 0.7),
            ylim=(len(uneven) - 0.5, -0.5),
            yticks=range(len(uneven)),
            xlabel="place in the rank's order",
            ylabel="rank",
            title=f"{document['params']['rows'] + 1} samples: {twice} again",
        )
    return [who, order]


LESSON = Lesson(
    name="shards-sampler",
    title="Each rank reads its own shard: DistributedSampler through prepare_data_loader",
    idea=(
        "prepare_data_loader puts a DistributedSampler into your DataLoader. Each epoch it deals one order of the samples "
        "to the ranks in turn, like cards; when they do not come out even, it deals the first ones again. The order changes "
        "only if you call set_epoch, and on the way some settings of your loader are lost."
    ),
    needs=Needs("head"),
    observe="shards_sampler",
    params=ShardsSampler,
    check=_check,
    quick={"workers": 2, "repeats": 1},
    host=_look,
    claims=(
        Claim(
            "even", "when the ranks divide the samples, shards are disjoint and together the whole set", _even
        ),
        Claim(
            "uneven",
            "otherwise ceil(n/W)*W - n samples are read twice: the first ones of the epoch's order",
            _uneven,
        ),
        Claim(
            "set-epoch",
            "with set_epoch every epoch has another order; without it the order repeats",
            _set_epoch,
        ),
        Claim(
            "one-rank",
            "at one rank there is no DistributedSampler and no set_epoch, and the order changes by itself",
            _one_rank,
        ),
        Claim("striped", "without shuffling, rank r reads r, r + W, r + 2W, ...", _striped),
        Claim(
            "drop-last",
            "drop_last drops each rank's incomplete last batch; it does not stop the padding",
            _drop_last,
        ),
        Claim(
            "evaluation",
            "7 samples over the ranks evaluate exactly as in a single process; averaging padded shards does not",
            _evaluation,
            "the ranks divide 7",
        ),
        Claim(
            "settings",
            "prepare_data_loader loses a batch sampler, persistent workers, prefetching and the start method; a loader with a "
            "DistributedSampler of its own keeps everything",
            _table,
        ),
        Claim(
            "generator",
            "your generator decides the order at one rank alone; above, the DistributedSampler's seed does",
            _generator,
        ),
        Claim(
            "loader-workers",
            "20 epochs with two loader processes a rank, from a fork server, end with every sample read in each",
            _loader_workers,
        ),
        Claim("too-few", "fewer samples than ranks is refused", _too_few),
    ),
    breaks=(
        Break("no-set-epoch", "never calls set_epoch: every epoch has the same order", ("set-epoch",)),
        Break("padded-evaluation", "evaluates through the padded loader and adds up", ("evaluation",)),
    ),
    measurements=_measurements,
    figures=_figures,
    seconds=(30, 40),
)
