"""A step of a data pipeline, in a module without torch or Ray: each process of the pipeline imports it."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np

JITTER_S = 0.1


def jitter(rows: dict[str, Any]) -> dict[str, Any]:
    """A step of the pipeline that takes 0 to 0.1 s a block, as real decoding does, and stamps its rows."""
    time.sleep(random.random() * JITTER_S)
    return {**rows, "made": np.full(len(rows["id"]), time.time())}
