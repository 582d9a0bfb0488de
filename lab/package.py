"""A user's folder as one zip file, as it travels to the cluster with a program of theirs."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from lab.errors import UserError

LIMIT_BYTES = 64 * 2**20
LEFT_OUT = frozenset({".git", ".venv", "__pycache__", ".lab", ".env"})
"""Names that are no part of a program, at any depth. Secrets stay on the host: the nodes have the keys that they may have."""


def pack(folder: Path) -> bytes:
    """The files below `folder`, without `LEFT_OUT`, as a zip file: the same bytes for the same files.

    Raises:
        UserError: it is no folder, or holds no file, or more than `LIMIT_BYTES`.
    """
    if not folder.is_dir():
        raise UserError(f"FOLDER={str(folder)!r} is no folder: name the one that holds your program.")
    size = 0
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in _files(folder):
            size += path.stat().st_size
            if size > LIMIT_BYTES:
                raise UserError(
                    f"FOLDER={str(folder)!r} holds more than {LIMIT_BYTES // 2**20} MiB, and all of it would go to every "
                    "node: leave the program alone in it, and put data into the store."
                )
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix())
            entry.external_attr = (path.stat().st_mode & 0o777) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
        if not archive.namelist():
            raise UserError(f"FOLDER={str(folder)!r} holds no file: name the one that holds your program.")
    return packed.getvalue()


def _files(folder: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - LEFT_OUT)
        yield from (path for name in sorted(set(names) - LEFT_OUT) if (path := Path(here, name)).is_file())
