"""Small judges that many claims share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lab.errors import UserError
from lab.lessons.contract import Finding
from lab.training.batch import worker_batch_size


def equal(expected: Any, measured: Any) -> Finding:
    """Holds when the two are equal."""
    return Finding(expected, measured, expected == measured)


def at_least(least: float, measured: float) -> Finding:
    """Holds when the measured number is at least `least`."""
    return Finding(f">= {least:g}", measured, measured >= least)


def one_value(digests: Iterable[str]) -> Finding:
    """Holds when all digests (at least two) are the same."""
    found = list(digests)
    return Finding(
        f"1 value on {len(found)} ranks",
        f"{len(set(found))} value(s) on {len(found)} ranks",
        len(found) > 1 and len(set(found)) == 1,
    )


def refused(answer: Mapping[str, Any], *words: str) -> Finding:
    """Holds when the lab refused with exit code 2, within 5 s, and the sentence has each of the words."""
    good = (
        answer["refused"]
        and answer["exit"] == UserError.exit_code
        and answer["seconds"] < 5
        and all(word in answer["message"] for word in words)
    )
    return Finding(f"refused, naming {', '.join(words)}", answer["message"] or "not refused", bool(good))


def divides(global_batch: int, workers: int) -> None:
    """Refuse a global batch that the ranks do not divide.

    Raises:
        UserError: it does not; the sentence proposes the nearest that do.
    """
    try:
        worker_batch_size(global_batch, workers)
    except UserError as error:
        raise UserError(
            f"--global-batch={global_batch} does not go with LAB_WORKERS={workers}: {error}"
        ) from None
