"""Unit tests see no cluster: the ports of the session's own are not in their environment."""

from __future__ import annotations

import pytest

from lab.settings import DEFAULT_PORTS


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take out what the `cluster` fixture has set for the tests that share it, when it came first."""
    for name in DEFAULT_PORTS:
        monkeypatch.delenv(name, raising=False)
