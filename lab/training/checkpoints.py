"""Reading a checkpoint on a rank."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyarrow.fs import LocalFileSystem
from ray.train import Checkpoint


@contextmanager
def own_directory(checkpoint: Checkpoint) -> Iterator[Path]:
    """The checkpoint's files, to be read: where they lie on a local disk, else downloaded for this process alone.

    `Checkpoint.as_directory()` downloads once a node, into a folder that its ranks share; but a rank that comes when
    that download is done downloads again into the same folder, and the others read files that are half written
    (seen on Ray 2.60, two ranks on one busy node).
    """
    if isinstance(checkpoint.filesystem, LocalFileSystem):
        yield Path(checkpoint.path)
        return
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        yield Path(checkpoint.to_directory(folder))
