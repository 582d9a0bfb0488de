"""What the doctor says of a host and its settings before anything is up."""

from __future__ import annotations

import socket

import pytest

from lab.doctor import examine
from lab.runtimes.compose import ComposeRuntime
from lab.runtimes.embedded import EmbeddedRuntime
from lab.settings import DEFAULT_PORTS, Settings, load_settings


@pytest.fixture(autouse=True)
def nothing_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever cluster the session shares by now, on ports of its own."""
    for name in DEFAULT_PORTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(EmbeddedRuntime, "access", lambda self: None)
    monkeypatch.setattr(ComposeRuntime, "access", lambda self: None)


@pytest.fixture
def settings() -> Settings:
    return load_settings()


def said(settings: Settings, name: str) -> list[tuple[str, str]]:
    checks = examine(settings, EmbeddedRuntime(settings))
    return [(check.level, check.text) for check in checks if check.name == name]


def test_without_a_cluster_the_host_is_looked_at(settings: Settings) -> None:
    checks = list(examine(settings, EmbeddedRuntime(settings)))
    assert {"python", "secrets", "engine", "cluster", "ports", "cpus", "shm"} <= {
        each.name for each in checks
    }
    assert not [each for each in checks if each.level == "fault"]


def test_a_port_that_is_taken_is_a_fault_with_its_setting(settings: Settings) -> None:
    assert said(settings, "ports") == [("ok", "any free ones will be taken")]
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ((level, text),) = said(settings.model_copy(update={"s3_port": port}), "ports")
    assert level == "fault"
    assert text.startswith(f"LAB_S3_PORT={port} is taken")
    assert said(settings.model_copy(update={"s3_port": port}), "ports") == [
        ("ok", f"LAB_S3_PORT={port} is free")
    ]


def test_containers_need_both_ports_and_an_external_store_one(settings: Settings) -> None:
    for store, count in (("minio", 2), ("external", 1)):
        runtime = ComposeRuntime(settings)
        checks = examine(settings.model_copy(update={"store": store}), runtime)
        assert len([check for check in checks if check.name == "ports"]) == count
