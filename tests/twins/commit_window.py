"""How each claim of `commit-window` is broken in a document."""

from __future__ import annotations

from typing import Any


def _first_epoch(document: dict[str, Any]) -> None:
    # the restart went on from the lost report's folder
    kill = document["intervals"][0]["kills"][0]
    kill["first_epochs"] = [kill["epoch"] + 1 for _ in kill["first_epochs"]]


def _late(document: dict[str, Any]) -> None:
    kill = document["intervals"][1]["kills"][-1]
    kill["committed"] -= 1


def _at_once(document: dict[str, Any]) -> None:
    for kill in document["intervals"][0]["kills"]:
        if kill["kind"] == "at once":
            kill["committed"] = kill["epoch"]


def _window(document: dict[str, Any]) -> None:
    document["intervals"][1]["lags"] = [1.9 for _ in document["intervals"][1]["lags"]]


def _orphans(document: dict[str, Any]) -> None:
    # the epoch done again went into the same folder
    document["intervals"][0]["leftovers"].pop()


def _cleaned(document: dict[str, Any]) -> None:
    one = document["intervals"][0]
    one["folders"].remove(one["named"][-1])


def _price(document: dict[str, Any]) -> None:
    for kill in document["intervals"][1]["kills"]:
        kill["controller_load"] = kill["controller_load"] and 0.0001


TWINS = {
    "first-epoch": _first_epoch,
    "late": _late,
    "at-once": _at_once,
    "window": _window,
    "orphans": _orphans,
    "cleaned": _cleaned,
    "price": _price,
}
