"""How each claim of `async-checkpoint` is broken in a document."""

from __future__ import annotations

from typing import Any


def _stall(document: dict[str, Any]) -> None:
    rows = document["phases"]["measure"]["rows"]
    most = max(row["megabytes"] for row in rows)
    sync = {
        row["pair"]: row["stall_seconds"] for row in rows if (row["mode"], row["megabytes"]) == ("sync", most)
    }
    for row in rows:
        if (row["mode"], row["megabytes"]) == ("async", most):
            row["stall_seconds"] = 0.9 * sync[row["pair"]]


def _equal(document: dict[str, Any]) -> None:
    row = next(row for row in document["phases"]["measure"]["rows"] if row["mode"] == "async")
    row["stored"]["model.pt"] = "0" * 16


def _validation(document: dict[str, Any]) -> None:
    known = document["phases"]["validate"]["known"]
    first, second = (document["phases"]["validate"]["reported"][at]["folder"] for at in (0, 1))
    for key in ("validated_epoch", "validated_mark"):
        a, b = known[first]["metrics"], known[second]["metrics"]
        a[key], b[key] = b[key], a[key]


def _beside(document: dict[str, Any]) -> None:
    # the third report waited for the first validation
    seen = document["phases"]["validate"]
    first = seen["known"][seen["reported"][0]["folder"]]["metrics"]["validated_at"]
    seen["reported"][-1]["returned"] = first + 1


def _kept(document: dict[str, Any]) -> None:
    document["phases"]["kept"]["left_on_disk"] = ["lab-upload-abc"]


def _naive(document: dict[str, Any]) -> None:
    document["naive_folder"]["files"] = {"model.pt": 1_000_000}


def _killed(document: dict[str, Any]) -> None:
    document["phases"]["naive"]["first_epoch"] = document["phases"]["held"]["epoch"] + 1


def _found(document: dict[str, Any]) -> None:
    shown = document["cleaning"]["shown"]
    shown["folders"].append({"name": document["snapshot"][0], "files": 6, "bytes": 1})


def _removed(document: dict[str, Any]) -> None:
    document["cleaning"]["folders"].remove(document["snapshot"][0])


def _live(document: dict[str, Any]) -> None:
    seen = document["phases"]["last"]
    seen["cleaner"]["deleted"] = True
    seen["still_there"] = []


TWINS = {
    "stall": _stall,
    "equal": _equal,
    "validation": _validation,
    "beside": _beside,
    "kept": _kept,
    "naive": _naive,
    "killed": _killed,
    "found": _found,
    "removed": _removed,
    "live": _live,
}
