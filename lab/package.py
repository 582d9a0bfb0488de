"""A user's folder as one zip file, as it travels to the cluster with a program of theirs."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from lab.errors import UserError

LIMIT_BYTES = 64 * 2**20
LEFT_OUT = frozenset({".git", ".venv", "__pycache__", ".lab", ".env"})
"""Names that are no part of a program, at any depth. Secrets stay on the host: the nodes have the keys that they may have."""


def pack(folder: Path, secrets: Mapping[str, str]) -> bytes:
    """The files below `folder`, without `LEFT_OUT`, as a zip file: the same bytes for the same files.

    Args:
        folder: links to files in it travel as the files.
        secrets: values by name, which no file may hold.

    Raises:
        UserError: it is no folder, holds no file, more than `LIMIT_BYTES`, a secret, or something that cannot travel.
    """
    if not folder.is_dir():
        raise UserError(f"FOLDER={str(folder)!r} is no folder: name the one that holds your program.")
    try:
        return _packed(folder, secrets)
    except OSError as error:
        raise _cannot_travel(folder, error.filename or folder, str(error.strerror)) from None


def _packed(folder: Path, secrets: Mapping[str, str]) -> bytes:
    size = 0
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in _files(folder):
            found = path.stat()
            size += found.st_size
            if size > LIMIT_BYTES:
                raise UserError(
                    f"FOLDER={str(folder)!r} holds more than {LIMIT_BYTES // 2**20} MiB, and all of it would go to every "
                    "node: leave the program alone in it, and put data into the store."
                )
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix())
            entry.external_attr = (found.st_mode & 0o777) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            content = path.read_bytes()
            for name, value in secrets.items():
                if value.encode() in content:
                    raise _cannot_travel(folder, path, f"holds the lab's {name}, a secret")
            archive.writestr(entry, content)
        if not archive.namelist():
            raise UserError(f"FOLDER={str(folder)!r} holds no file: name the one that holds your program.")
    return packed.getvalue()


def _files(folder: Path) -> Iterator[Path]:
    """Every file that travels. What would be lost on the way, without a word, is refused."""

    def refuse(error: OSError) -> None:
        raise error

    for here, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(set(folders) - LEFT_OUT)
        for name in [*folders, *sorted(set(names) - LEFT_OUT)]:
            path = Path(here, name)
            if "\\" in name or not name.isprintable():
                raise _cannot_travel(folder, path, "has a name that not every system can hold")
            if path.is_dir():
                if path.is_symlink():
                    raise _cannot_travel(folder, path, "is a link to a folder")
            elif path.is_file():
                yield path
            else:
                raise _cannot_travel(folder, path, "is no file, or a link to none")


def _cannot_travel(folder: Path, path: Path | str, why: str) -> UserError:
    shown = os.fsencode(path).decode(errors="backslashreplace")
    return UserError(
        f"FOLDER={str(folder)!r} cannot be sent: {shown}: {why}; put a plain file there, or take it out."
    )
