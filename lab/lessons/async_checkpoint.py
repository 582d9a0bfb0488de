"""Lesson `async-checkpoint`: uploads in the background, and what is left when one is cut off."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.errors import UserError
from lab.lessons.contract import Break, Claim, Document, Finding, Lesson, Needs, Params
from lab.lessons.judging import equal
from lab.report.plots import COLOURS, figure

JUDGED_MB = 100
"""Below it a stall is too short to tell from the work of reporting itself."""
MOST_RATIO = 0.5


@dataclass(frozen=True)
class AsyncCheckpoint(Params):
    """Checkpoints of `megabytes` each (1 MB = 1,000,000 bytes), `pairs` of them by each way and size."""

    megabytes: str = field(
        default="1,10,100",
        metadata={"help": "sizes of the checkpoint's weights, with commas; the last is judged"},
    )
    pairs: int = field(default=7, metadata={"help": "sync and async reports of each size"})


def sizes(text: str) -> list[int]:
    """Read "1,10,100".

    Raises:
        UserError: something in it is no size, or the last one is too small to judge.
    """
    found = []
    for word in text.split(","):
        if not word.strip().isdigit() or not 1 <= int(word) <= 1000:
            raise UserError(
                f"--megabytes={text!r} has {word.strip()!r}: give whole sizes of 1 to 1000 with commas."
            )
        found.append(int(word))
    if sorted(set(found)) != found:
        raise UserError(f"--megabytes={text!r} is not ascending: give each size once, the smallest first.")
    if found[-1] < JUDGED_MB:
        raise UserError(
            f"--megabytes={text!r} ends in {found[-1]}, too small to judge a stall by: end in {JUDGED_MB} or more."
        )
    return found


def _check(params: AsyncCheckpoint) -> None:
    sizes(params.megabytes)
    if not 1 <= params.pairs <= 50:
        raise UserError(f"--pairs={params.pairs} is out of range: use 1 to 50.")


def _phase(document: Document, name: str) -> Mapping[str, Any]:
    if name not in document["phases"]:
        error = document["outcome"]["error"]
        raise ValueError(f"phase {name} was never begun: {error and error['message']}")
    found: Mapping[str, Any] = document["phases"][name]
    return found


def paired(document: Document, key: str) -> dict[int, list[tuple[float, float]]]:
    """(sync, async) of each pair in seconds, by size in MB."""
    rows = _phase(document, "measure")["rows"]
    found: dict[int, list[tuple[float, float]]] = {}
    for size in sorted({row["megabytes"] for row in rows}):
        by = {(row["pair"], row["mode"]): row[key] for row in rows if row["megabytes"] == size}
        pairs = sorted({pair for pair, _ in by})
        found[size] = [(by[pair, "sync"], by[pair, "async"]) for pair in pairs]
    return found


def _stall(document: Document) -> Finding:
    size, pairs = max(paired(document, "stall_seconds").items())
    if len(pairs) != document["params"]["pairs"]:
        raise ValueError(f"{len(pairs)} pairs")
    ratio = statistics.median(other / sync for sync, other in pairs)
    sync, other = (statistics.median(times) for times in zip(*pairs, strict=True))
    return Finding(
        f"<= {MOST_RATIO:g} of the sync one at {size} MB",
        f"{ratio:.3f} ({other:.3f} s and {sync:.3f} s)",
        ratio <= MOST_RATIO,
    )


def _equal(document: Document) -> Finding:
    rows = _phase(document, "measure")["rows"]
    reports = 2 * document["params"]["pairs"] * len(document["params"]["megabytes"].split(","))
    wrong = [
        f"{row['mode']} {row['megabytes']} MB"
        for row in rows
        if not row["saved"] or row["stored"] != row["saved"]
    ]
    # each report has weights of its own: the same bytes twice would mean that one overwrote another
    different = len({row["stored"].get("model.pt") for row in rows})
    return equal(
        {"stored as saved": reports, "different weights": reports, "wrong": []},
        {"stored as saved": len(rows) - len(wrong), "different weights": different, "wrong": wrong[:4]},
    )


def _validation(document: Document) -> Finding:
    seen = _phase(document, "validate")
    expected, measured = {}, {}
    for one in seen["reported"]:
        expected[one["folder"]] = ["VALIDATED", one["epoch"], float(one["epoch"])]
        known = seen["known"].get(one["folder"], {"status": "not there", "metrics": {}})
        metrics = known["metrics"]
        measured[one["folder"]] = [
            known["status"],
            metrics.get("validated_epoch"),
            metrics.get("validated_mark"),
        ]
    found = equal(expected, measured)
    return Finding(found.expected, found.measured, bool(found.holds) and len(expected) > 1)


def _beside(document: Document) -> Finding:
    seen = _phase(document, "validate")
    last = max(one["returned"] for one in seen["reported"])
    first = seen["known"][seen["reported"][0]["folder"]]["metrics"]["validated_at"]
    return Finding(
        "every report had returned before the first validation ended",
        f"the last report returned {first - last:.2f} s before it",
        first > last,
    )


def _kept(document: Document) -> Finding:
    seen = _phase(document, "kept")
    if "stored" not in seen:
        return Finding("the folder stored whole", "the upload failed, and with it the worker group", False)
    return equal(
        {"folder there": True, "stored": seen["saved"], "left on disk": []},
        {
            "folder there": seen["folder_there_when_upload_began"],
            "stored": seen["stored"],
            "left on disk": seen["left_on_disk"],
        },
    )


def _naive(document: Document) -> Finding:
    seen, after = _phase(document, "naive"), _phase(document, "last")
    found = document["naive_folder"]
    return equal(
        {"files stored": 0, "committed": False, "attempts it cost": 1},
        {
            "files stored": len(found["files"]),
            "committed": found["name"] in document["snapshot"],
            "attempts it cost": after["attempt"] - seen["attempt"],
        },
    )


def _killed(document: Document) -> Finding:
    held, after = _phase(document, "held"), _phase(document, "naive")
    found = document["held_folder"]
    partly = bool(found["files"])
    return Finding(
        {
            "went on at epoch": held["committed"] + 1,
            "in the snapshot": False,
            "the run's checkpoint": False,
            "the loader": "checkpoint damaged",
        },
        {
            "went on at epoch": after["first_epoch"],
            "in the snapshot": found["name"] in document["snapshot"],
            "the run's checkpoint": document["outcome"]["checkpoint"] == found["name"],
            "the loader": found["loader_says"] or "loads it",
        },
        partly
        and after["attempt"] == held["attempt"] + 1
        and after["first_epoch"] == held["committed"] + 1
        and found["name"] not in document["snapshot"]
        and document["outcome"]["checkpoint"] not in (None, found["name"])
        and "checkpoint damaged" in found["loader_says"],
    )


def _left(document: Document) -> tuple[list[str], list[str]]:
    """What the two failures must have left: folders, and the end of each unfinished upload's key."""
    held, naive = document["held_folder"], document["naive_folder"]
    folders = sorted(one["name"] for one in (held, naive) if one["there"])
    # on S3 a file that was never closed is no object, but an unfinished upload
    s3 = str(document["storage"]).startswith("s3://")
    return folders, [f"{held['name']}/model.pt"] if s3 else []


def _short(keys: list[str]) -> list[str]:
    return ["/".join(key.split("/")[-2:]) for key in keys]


def _found(document: Document) -> Finding:
    folders, uploads = _left(document)
    shown = document["cleaning"]["shown"]
    found = equal(
        {"folders": folders, "uploads": uploads, "deleted by showing": []},
        {
            "folders": sorted(one["name"] for one in shown["folders"]),
            "uploads": _short(shown["uploads"]),
            "deleted by showing": document["cleaning"]["showing_deleted"],
        },
    )
    return Finding(
        found.expected, found.measured, bool(found.holds) and document["held_folder"]["name"] in folders
    )


def _removed(document: Document) -> Finding:
    cleaning = document["cleaning"]
    again = cleaning["again"]
    return equal(
        {"left": [], "folders": sorted(document["snapshot"])},
        {
            "left": [*(one["name"] for one in again["folders"]), *_short(again["uploads"])],
            "folders": sorted(cleaning["folders"]),
        },
    )


def _live(document: Document) -> Finding:
    seen = _phase(document, "last")
    answer = seen["cleaner"]
    asked = sorted(one["name"] for one in answer["folders"])
    return Finding(
        "nothing deleted, for the run trains",
        {"deleted": answer["deleted"], "because": answer["held"], "still there": seen["still_there"]},
        bool(asked)
        and not answer["deleted"]
        and "training now" in answer["held"]
        and sorted(seen["still_there"]) == asked,
    )


def _measurements(document: Document) -> dict[str, Any]:
    found: dict[str, Any] = {"poll_interval_seconds": document["poll_interval"]}
    if "rows" not in document["phases"].get("measure", {}):
        return found
    for key in ("stall_seconds", "commit_seconds", "save_seconds"):
        for size, pairs in paired(document, key).items():
            sync, other = (round(statistics.median(times), 3) for times in zip(*pairs, strict=True))
            found[f"{key} at {size} MB"] = {"sync": sync, "async": other}
    return found


def _figures(document: Document, folder: Path) -> list[Path]:
    path = folder / "async-checkpoint.png"
    if "rows" not in document["phases"].get("measure", {}):
        return []
    with figure(path, columns=2) as axes:
        for axis, key, title in (
            (axes[0], "stall_seconds", "How long report() holds the loop up"),
            (axes[1], "commit_seconds", "How long until it is committed"),
        ):
            for at, name in enumerate(("sync", "async")):
                points = [(size, pair[at]) for size, pairs in paired(document, key).items() for pair in pairs]
                axis.plot(*zip(*points, strict=True), "os"[at], color=COLOURS[at], alpha=0.5)
                middles = [
                    (size, statistics.median(pair[at] for pair in pairs))
                    for size, pairs in paired(document, key).items()
                ]
                axis.plot(*zip(*middles, strict=True), "-", color=COLOURS[at], label=f"{name}, median")
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set(xlabel="MB a checkpoint", ylabel="seconds", title=title)
            axis.legend()
    return [path]


LESSON = Lesson(
    name="async-checkpoint",
    title="uploads in the background, and what is left when one is cut off",
    idea=(
        "With checkpoint_upload_mode=ASYNC report() returns before the upload, and a thread does it beside the training. "
        "The loop stalls less, and the window in which a kill loses the checkpoint grows. The folder must live until "
        "then. What a kill leaves is never loaded, because a run resumes from its snapshot; the lab's cleaner removes it."
    ),
    needs=Needs("head"),
    observe="async_checkpoint",
    params=AsyncCheckpoint,
    default_storage="s3",
    check=_check,
    quick={"pairs": 2},
    claims=(
        Claim(
            "stall", "at 100 MB an async report holds the loop up at most half as long as a sync one", _stall
        ),
        Claim("equal", "both ways store exactly the bytes that were saved", _equal),
        Claim("validation", "a validation's result arrives with the checkpoint that it read", _validation),
        Claim("beside", "validation runs beside the training: it holds no report up", _beside),
        Claim(
            "kept",
            "through the lab's helper a temporary folder lives until it is uploaded, and no longer (pitfall C7)",
            _kept,
        ),
        Claim(
            "naive",
            "past the helper a folder removed too early stores nothing and fails the worker group (pitfall C7)",
            _naive,
        ),
        Claim(
            "killed", "a kill during an upload leaves nothing that anything loads as a checkpoint", _killed
        ),
        Claim(
            "found",
            "the cleaner shows the orphan folders and the unfinished upload, and shows without deleting",
            _found,
        ),
        Claim("removed", "told to delete, it removes these alone: what the snapshot names stays", _removed),
        Claim("live", "while the run trains, it deletes nothing even when told to", _live),
    ),
    breaks=(
        Break(
            "careless",
            "uploads sync for async, keeps no folder, validates another checkpoint, resumes from the newest folder, "
            "and cleans nothing",
            ("stall", "validation", "kept", "killed", "removed"),
        ),
    ),
    measurements=_measurements,
    figures=_figures,
    seconds=(50, 75),
)
