"""The stream of lesson `iterable`, in a module without Ray: each worker of a loader and of a pipeline imports it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info


class Numbers(IterableDataset):  # type: ignore[misc]
    """0, 1, 2, ... below `end`, or for ever; every pass over it has a name of its own, which its items carry.

    With `share` (a rank, the number of ranks) a reader takes its part alone: every k-th number of k readers.
    """

    def __init__(self, end: int | None, share: tuple[int, int] | None = None) -> None:
        self.end = end
        self.share = share

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Numbers with the reading process and the pass; a pass that skips a number has not read it."""
        reading = uuid.uuid4().hex[:8]
        number, step = 0, 1
        if self.share is not None:
            rank, ranks = self.share
            info = get_worker_info()
            workers, worker = (info.num_workers, info.id) if info is not None else (1, 0)
            number, step = rank * workers + worker, ranks * workers
        while self.end is None or number < self.end:
            yield {"number": number, "reading": reading, "pid": os.getpid()}
            number += step


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """One item of the stream as a row of numbers, which Ray Data can make tensors of."""
    item = row["item"]
    return {"number": item["number"], "reading": int(item["reading"], 16), "pid": item["pid"]}
