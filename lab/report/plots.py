"""One look for every figure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""Paul Tol's bright scheme: distinct for colour-blind readers."""


@contextmanager
def figure(
    path: Path, columns: int = 1, rows: int = 1, size: tuple[float, float] = (6.0, 3.6)
) -> Iterator[Any]:
    """A figure whose axes are yielded (one, or an array) and which is saved as PNG at the end.

    Args:
        size: width and height of one panel, in inches.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(
        {
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": pyplot.cycler(color=list(COLOURS)),
            "axes.titlesize": "medium",
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "figure.dpi": 130,
            "font.size": 9,
            "legend.frameon": False,
        }
    ):
        drawn, axes = pyplot.subplots(
            rows, columns, figsize=(size[0] * columns, size[1] * rows), layout="constrained"
        )
        yield axes
        drawn.savefig(path)
        pyplot.close(drawn)
