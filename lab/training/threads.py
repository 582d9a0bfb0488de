"""Thread arithmetic: counts in multiples of a host's cores. No torch: the host checks with it too."""

from __future__ import annotations

import math

from lab.errors import UserError

MANY = 3.5
"""The multiple of the cores at which the lesson `threads` shows what too many threads cost."""


def multiples(text: str) -> tuple[float, ...]:
    """Read "0.5,1,3.5".

    Raises:
        UserError: something in it is no positive number.
    """
    found: list[float] = []
    for word in text.split(","):
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise UserError(
                f"--threads={text!r} has {word.strip()!r}, which is no multiple of the cores: "
                "give positive numbers with commas, as in 0.5,1,3.5."
            )
        found.append(value)
    return tuple(found)


def thread_count(multiple: float, cores: int) -> int:
    """Threads for a multiple of the cores: rounded, at least 1."""
    return max(1, round(multiple * cores))


def rank_counts(workers: int) -> list[int]:
    """1, 2, 4, ... up to `workers`, and `workers` itself."""
    return sorted({2**power for power in range(workers.bit_length()) if 2**power <= workers} | {workers})


def default_threads(cpus: float) -> int:
    """What Ray sets `OMP_NUM_THREADS` to for a worker of `cpus` logical CPUs, where nobody set it: floor, at least 1."""
    return max(1, math.floor(cpus))
