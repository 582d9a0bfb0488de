"""Reporting with an upload in the background, from a folder that lives until it is uploaded (pitfall C7).

`report(checkpoint_upload_mode=ASYNC)` returns before anything is uploaded, and uploads wait for one another. A
`with TemporaryDirectory()` around it deletes the folder first; what is then stored is empty, and the run fails.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.train

from lab.training.report import Rank, report

UPLOADING = "lab-upload-"
"""How the names of folders begin that wait for their upload."""


class NothingToUpload(ValueError):
    """A checkpoint's folder is missing or empty. Nothing was reported."""


def report_async(
    rank: Rank,
    metrics: dict[str, Any],
    checkpoint_dir: Path | str,
    *,
    epoch: int,
    required: Sequence[str] = ("loss",),
    sharded: bool = False,
    **options: Any,
) -> None:
    """Report once, uploading in the background; every rank must call it, equally often. See `report.report`.

    Takes the files out of `checkpoint_dir`, which may then be deleted or filled anew at once: they are moved into a
    folder beside it, without copying, and that is deleted once it is uploaded.

    Raises:
        NothingToUpload: rank 0's folder (every rank's, if `sharded`) is missing or empty.
        lab.training.report.*: as `report` does.
    """
    uploads = rank.first or sharded
    folder = take_over(Path(checkpoint_dir)) if uploads else Path(checkpoint_dir)
    try:
        report(
            rank,
            metrics,
            folder,
            epoch=epoch,
            required=required,
            sharded=sharded,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=uploads,
            **options,
        )
    except Exception:
        if uploads:  # nothing was sent, so nobody else deletes it
            shutil.rmtree(folder, ignore_errors=True)
        raise


def take_over(folder: Path) -> Path:
    """Move a folder's files into a new one beside it, which nobody but the upload deletes.

    Raises:
        NothingToUpload: there is no such folder, or nothing in it.
    """
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    if not inside:
        raise NothingToUpload(
            f"the checkpoint's folder {folder} is {'empty' if folder.is_dir() else 'not there'}: save into it before "
            "you report, and do not delete it before report_async has returned."
        )
    # beside it, so that moving is renaming: no byte is copied and the training loop does not wait
    kept = Path(tempfile.mkdtemp(prefix=UPLOADING, dir=folder.parent))
    for path in inside:
        os.rename(path, kept / path.name)
    return kept
