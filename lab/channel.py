"""How a job hands its document to the host: framed lines in the job's own log.

Every runtime has the job's log; none needs a shared folder. A document is compressed, cut into lines of a few
kilobytes and checked by its digest, so a torn or mixed-up log is noticed and never judged.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable
from typing import Any

MARK = "LAB-DOCUMENT"
_CHUNK = 3000


def frame(document: dict[str, Any]) -> list[str]:
    """The document as lines for a log. NaN and infinity are refused: JSON has none.

    Raises:
        ValueError: the document holds a number that JSON cannot carry.
    """
    packed = zlib.compress(json.dumps(document, allow_nan=False, separators=(",", ":")).encode())
    digest = hashlib.sha256(packed).hexdigest()[:16]
    text = base64.b64encode(packed).decode()
    chunks = [text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK)]
    return [f"{MARK} {digest} {index} {len(chunks)} {chunk}" for index, chunk in enumerate(chunks)]


def send(document: dict[str, Any], write: Callable[[str], object]) -> None:
    """Write the framed document, a whole line a call."""
    for line in frame(document):
        write(line + "\n")


class Receiver:
    """Collects a document's lines from a log."""

    def __init__(self) -> None:
        self._chunks: dict[str, dict[int, str]] = {}
        self._document: dict[str, Any] | None = None

    def takes(self, line: str) -> bool:
        """Whether the line was a part of a document (then it is kept out of what a person sees)."""
        at = line.find(MARK + " ")
        if at < 0:
            return False
        fields = line[at:].split()
        if len(fields) != 5 or not fields[2].isdecimal() or not fields[3].isdecimal():
            return True
        _, digest, index, total, chunk = fields
        chunks = self._chunks.setdefault(digest, {})
        chunks[int(index)] = chunk
        if len(chunks) == int(total):
            try:
                packed = base64.b64decode("".join(chunks[i] for i in sorted(chunks)))
            except ValueError:  # a torn line; a later one may yet replace it
                return True
            if hashlib.sha256(packed).hexdigest()[:16] == digest:
                self._document = json.loads(zlib.decompress(packed))
        return True

    @property
    def document(self) -> dict[str, Any] | None:
        """The last whole document seen, or None."""
        return self._document
