"""Lesson `article`: the article's programs as one types them from memory, beside one that works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from lab.errors import UserError
from lab.lessons.contract import Break, Claim, Document, Finding, Lesson, Needs, Params, not_shown
from lab.lessons.judging import at_least, equal, refused
from lab.lessons.run import Host
from lab.report.plots import figure
from lab.training.batch import either, nearest_batches

SLOWER = 2.0
"""Times that a report at Ray's own poll interval (2 s) takes at least, against one at the lab's (0.1 s)."""
ONE_RANK = "at one rank every rank is rank 0"
TRAINING = ("ray", "ray.train.torch")
DASHBOARD = ("ray.dashboard.optional_deps", "ray.dashboard.modules.job.job_head")


@dataclass(frozen=True)
class Article(Params):
    """`reports` reports of a folder of `kilobytes` KiB; `rows` rows of data."""

    reports: int = field(default=20, metadata={"help": "times that the checkpoint folder is reported"})
    rows: int = field(default=1000, metadata={"help": "rows of the data set"})
    kilobytes: int = field(default=64, metadata={"help": "size of the checkpoint, in KiB"})


def _check(params: Article) -> None:
    if params.reports < 4:
        raise UserError(
            f"--reports={params.reports} is too few to see what is kept and how long it takes: use 4 or more."
        )
    if params.rows < params.workers or params.rows % params.workers:
        raise UserError(
            f"--rows={params.rows} does not go with LAB_WORKERS={params.workers}, each rank reading as many: "
            f"use {either(nearest_batches(max(params.rows, 1), params.workers))}."
        )
    if params.kilobytes < 1:
        raise UserError(f"--kilobytes={params.kilobytes} is no checkpoint: use 1 or more.")


def _ranks(document: Document, which: str) -> list[Mapping[str, Any]]:
    ranks: list[Mapping[str, Any]] = document[which]["ranks"]
    if not ranks:
        raise ValueError(
            f"no rank of {which} was seen: {document[which]['raised']} {document[which]['message']}"
        )
    return ranks


def _numbers_alone(document: Document) -> Finding:
    without, with_checkpoint = document["numbers"]["result"], document["working"]["result"]
    last = document["params"]["reports"] - 1
    return equal(
        {"numbers alone": {"metrics": None, "rows": 0}, "with a checkpoint: last step": last},
        {
            "numbers alone": {"metrics": without["metrics"], "rows": without["rows"]},
            "with a checkpoint: last step": with_checkpoint["metrics"]["step"],
        },
    )


def _shard_name(document: Document) -> Finding:
    answers = {rank.get("without_name", "works") for rank in _ranks(document, "numbers")}
    ids = [rank["ids"] for rank in _ranks(document, "working")]
    rows = document["params"]["rows"]
    wanted = "Dataset shard for 'None' not found"
    raised = all(answer.startswith(f"KeyError: {wanted}") for answer in answers)
    return equal(
        {"without a name": wanted, "'train'": {"rows": rows, "read": rows}},
        {
            "without a name": wanted if raised else sorted(answers),
            "'train'": {"rows": len(set().union(*ids)), "read": sum(map(len, ids))},
        },
    )


def _missing_folder(document: Document) -> Finding:
    folder = document["folder"]
    return equal(
        {"fit raises": "WorkerGroupError", "because of": "FileNotFoundError"},
        {"fit raises": folder["raised"], "because of": folder["cause"] or None},
    )


def _kept(document: Document, which: str) -> int:
    # what a failed upload leaves on a local disk is an empty folder, no checkpoint
    return sum(files > 0 for files in document[which]["folders"].values())


def _keeps_all(document: Document) -> Finding:
    reports, keep = document["params"]["reports"], document["keep"]
    return equal(
        {"by default": reports, f"num_to_keep={keep}": keep},
        {"by default": _kept(document, "folder"), f"num_to_keep={keep}": _kept(document, "working")},
    )


def _uploads(document: Document, which: str) -> dict[int, int]:
    return {rank["world_rank"]: len(rank["uploads"]) for rank in _ranks(document, which)}


def _every_rank(document: Document) -> Finding:
    reports, workers = document["params"]["reports"], document["params"]["workers"]
    if workers == 1:
        return not_shown(ONE_RANK)
    return equal(
        {
            "as typed": dict.fromkeys(range(workers), reports),
            "working": {rank: reports if rank == 0 else 0 for rank in range(workers)},
        },
        {"as typed": _uploads(document, "folder"), "working": _uploads(document, "working")},
    )


def _per_report(document: Document, which: str) -> float:
    # the first report waits for nobody: the queue of one is still empty
    return float(median(second for rank in _ranks(document, which) for second in rank["seconds"][1:]))


def _slow(document: Document) -> Finding:
    ratio = _per_report(document, "folder") / _per_report(document, "working")
    return at_least(SLOWER, round(ratio, 2))


def _raised(document: Document) -> Finding:
    runs = {which: document[which] for which in ("numbers", "working", "folder", "crowd")}
    returned = {which: run["result"]["error"] for which, run in runs.items() if run["result"]}
    raised = sorted(which for which, run in runs.items() if run["raised"] and run["training_failed"])
    return equal(
        {"returned, result.error": {"numbers": None, "working": None}, "raised": ["crowd", "folder"]},
        {"returned, result.error": returned, "raised": raised},
    )


def _driver_context(document: Document) -> Finding:
    found = document["driver_context"]
    wanted = "RuntimeError: `get_context` cannot be used outside of a Ray Train training function"
    return Finding(wanted, found, found == wanted)


def _crowd(document: Document) -> Finding:
    crowd = document["crowd"]
    twice = 2 * crowd["start_timeout_s"]
    gave_up = crowd["raised"] == "ControllerError"
    limit = document["default_start_limit"]
    return Finding(
        {"ranks started": 0, "the controller gave up": f"after >= {twice:g} s", "Ray's own limit": -1},
        {
            "ranks started": len(crowd["ranks"]),
            "the controller gave up": f"after {crowd['seconds']:.1f} s" if gave_up else "no",
            "Ray's own limit": limit,
        },
        not crowd["ranks"] and gave_up and crowd["seconds"] >= twice and limit == -1,
    )


def _crowd_refused(document: Document) -> Finding:
    answer = document["host"]["crowd"]
    return refused(answer, "LAB_WORKERS", f"have {answer['have']} CPUs", f"need {answer['need']}")


def _train_extra(document: Document) -> Finding:
    extra = document["train_extra"]

    def shown(imports: Mapping[str, str]) -> dict[str, str]:
        works = {name: imports[name] == "works" for name in (*TRAINING, *DASHBOARD)}
        return {
            "training": "works" if all(works[name] for name in TRAINING) else "fails",
            "dashboard and jobs": "work" if any(works[name] for name in DASHBOARD) else "fail",
        }

    with_default, without = shown(extra["with"]), shown(extra["without"])
    return Finding(
        {
            "with": {"training": "works", "dashboard and jobs": "work"},
            "without": {"training": "works", "dashboard and jobs": "fail"},
        },
        {"with": with_default, "without": without, "packages": len(extra["packages"])},
        len(extra["packages"]) > 0
        and with_default == {"training": "works", "dashboard and jobs": "work"}
        and without == {"training": "works", "dashboard and jobs": "fail"},
    )


def _look(host: Host, document: dict[str, Any]) -> dict[str, Any]:
    have = host.access.node_cpus
    return {"crowd": host.refusal(workers=have + 1) | {"have": have, "need": have + 1}}


def _measurements(document: Document) -> dict[str, Any]:
    return {
        "seconds_per_report": {
            "as typed, Ray's poll interval": round(_per_report(document, "folder"), 3),
            "working, the lab's": round(_per_report(document, "working"), 3),
        },
        "seconds_of_all_reports": {
            "as typed": round(max(sum(rank["seconds"]) for rank in _ranks(document, "folder")), 1),
            "working": round(max(sum(rank["seconds"]) for rank in _ranks(document, "working")), 1),
        },
        "seconds_until_the_crowd_gave_up": round(document["crowd"]["seconds"], 1),
        "only_in_ray_default": document["train_extra"]["packages"],
    }


def _figures(document: Document, folder: Path) -> list[Path]:
    path = folder / "as-typed.png"
    programs = (("folder", "as typed"), ("working", "working"))
    with figure(path, columns=2) as (left, right):
        for which, label in programs:
            seconds = _ranks(document, which)[0]["seconds"]
            elapsed = [sum(seconds[:count]) for count in range(len(seconds) + 1)]
            left.step(elapsed, range(len(elapsed)), where="post", label=label)
        left.set(
            xlabel="seconds since the first report",
            ylabel="reports that returned",
            title="What reporting costs",
        )
        left.legend()
        workers = document["params"]["workers"]
        for index, (which, label) in enumerate(programs):
            uploads = _uploads(document, which)
            heights = [_kept(document, which), *(uploads.get(rank, 0) for rank in range(workers))]
            places = [place + 0.4 * index for place in range(len(heights))]
            bars = right.bar(places, heights, 0.36, label=label)
            right.bar_label(bars)
        names = ["checkpoints\nkept", *(f"uploads by\nrank {rank}" for rank in range(workers))]
        right.set_xticks([place + 0.2 for place in range(len(names))], names)
        right.set(title=f"{document['params']['reports']} reports: what is kept, who uploads")
        right.set_ylim(0, 1.2 * document["params"]["reports"])
        right.legend(loc="upper right", ncols=2)
    return [path]


LESSON = Lesson(
    name="article",
    title="The article's programs, as one types them and as they work",
    idea=(
        "Four small programs typed from memory of the article, each run as it stands: two end at once, one prints None, "
        "one never starts, and one takes a minute and keeps everything twenty times. Beside them, one that works."
    ),
    needs=Needs("head", spare_cpus=1),
    observe="article",
    params=Article,
    check=_check,
    quick={"reports": 5, "rows": 200},
    host=_look,
    claims=(
        Claim(
            "numbers-alone",
            "reports without a checkpoint leave result.metrics None; with one, it is the last of those",
            _numbers_alone,
        ),
        Claim(
            "shard-name",
            "get_dataset_shard() without a name raises KeyError; by its name each rank reads rows of its own, all in all",
            _shard_name,
        ),
        Claim(
            "missing-folder",
            "a checkpoint folder that nobody made ends the run: FileNotFoundError",
            _missing_folder,
        ),
        Claim(
            "keeps-all", "by default every reported checkpoint is kept; num_to_keep keeps so many", _keeps_all
        ),
        Claim(
            "every-rank",
            "every rank that hands over a folder uploads it; one rank is enough",
            _every_rank,
            ONE_RANK,
        ),
        Claim(
            "slow",
            "a report takes several times longer at Ray's own poll interval than at a short one",
            _slow,
        ),
        Claim(
            "raised",
            "fit() raises what went wrong; result.error of a returned result is always None",
            _raised,
        ),
        Claim("driver-context", "get_context() on the driver raises", _driver_context),
        Claim(
            "crowd",
            "more ranks than CPUs never start, and Ray tries again without end unless it is told a limit",
            _crowd,
        ),
        Claim(
            "crowd-refused", "the lab refuses them with have and need, before anything starts", _crowd_refused
        ),
        Claim(
            "train-extra",
            "ray[train] alone trains, but has neither the dashboard nor jobs: ray[default] does",
            _train_extra,
        ),
    ),
    breaks=(
        Break(
            "careful",
            "types the programs as the working one is: a shard by name, one rank's folder, which exists, enough CPUs",
            ("numbers-alone", "shard-name", "missing-folder", "keeps-all", "every-rank", "raised", "crowd"),
        ),
    ),
    measurements=_measurements,
    figures=_figures,
    seconds=(45, 80),
)
