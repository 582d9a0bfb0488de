"""Settings: one frozen object, secrets that stay secret, one sentence for each mistake."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
from pydantic import ValidationError

from lab.errors import UserError
from lab.settings import REQUIRED, StoreAccess, load_settings, make_env_file

SECRETS = (
    "STORE_ROOT_PASSWORD",
    "S3_SECRET_ACCESS_KEY",
    "RAY_AUTH_TOKEN",
    "S3_ACCESS_KEY_ID",
    "STORE_ROOT_USER",
)


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("S3_", "STORE_", "RAY_AUTH", "COMPOSE_")) or (
            name.startswith("LAB_") and name != "LAB_ROOT"
        ):
            monkeypatch.delenv(name)


@pytest.fixture
def env_file(tmp_path: Path) -> Path:
    path = tmp_path / ".env"
    assert make_env_file(path)
    return path


def values(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def write(path: Path, content: dict[str, str]) -> None:
    path.write_text("".join(f"{key}={value}\n" for key, value in content.items()))


def test_a_made_env_file_is_private_complete_and_accepted(env_file: Path) -> None:
    assert stat.S_IMODE(env_file.stat().st_mode) == 0o600
    assert set(values(env_file)) >= REQUIRED
    assert load_settings(env_file).s3_bucket == "lab"


def test_an_existing_env_file_is_never_touched(env_file: Path) -> None:
    before = (env_file.read_bytes(), env_file.stat().st_mtime_ns, env_file.stat().st_ino)
    assert not make_env_file(env_file)
    load_settings(env_file)
    assert (env_file.read_bytes(), env_file.stat().st_mtime_ns, env_file.stat().st_ino) == before


def test_two_checkouts_get_different_secrets_and_projects(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        make_env_file(tmp_path / name / ".env")
        found.append(values(tmp_path / name / ".env"))
    for name in (*SECRETS, "COMPOSE_PROJECT_NAME"):
        assert found[0][name] != found[1][name]


def test_secrets_are_in_neither_repr_nor_public(env_file: Path) -> None:
    settings = load_settings(env_file)
    secret = values(env_file)
    public = repr(settings.public())
    for name in SECRETS:
        assert secret[name] not in public
    access = settings.store_access("http://127.0.0.1:9000")
    for name in ("STORE_ROOT_PASSWORD", "S3_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN"):
        for text in (repr(settings), str(settings), repr(access), access.model_dump_json()):
            assert secret[name] not in text


def test_settings_cannot_be_changed(env_file: Path) -> None:
    with pytest.raises(ValidationError):
        load_settings(env_file).nodes = 3  # type: ignore[misc]


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    env_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_settings(env_file).nodes == 2
    with env_file.open("a") as file:
        file.write("LAB_NODES=3\nLAB_SEED=7\n")
    assert load_settings(env_file).nodes == 3
    monkeypatch.setenv("LAB_NODES", "4")
    assert load_settings(env_file).nodes == 4
    settings = load_settings(env_file, nodes=5, workers=None)
    assert (settings.nodes, settings.seed, settings.workers) == (5, 7, None)


def test_another_checkouts_project_in_the_environment_is_not_taken(
    env_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = values(env_file)["COMPOSE_PROJECT_NAME"]
    monkeypatch.setenv("COMPOSE_PROJECT_NAME", "somebody-elses")
    assert load_settings(env_file).project == own
    assert load_settings(env_file, workers=3).project == own
    write(env_file, values(env_file) | {"COMPOSE_PROJECT_NAME": "My Lab"})
    with pytest.raises(UserError, match="COMPOSE_PROJECT_NAME='My Lab'"):
        load_settings(env_file)


def test_a_variable_without_the_labs_prefix_is_somebody_elses(
    env_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NAME", "STORE", "WORKERS", "SEED", "FRESH", "PROJECT", "RUNTIME"):
        monkeypatch.setenv(name, "theirs")
    assert load_settings(env_file) == load_settings(env_file, workers=None)
    assert load_settings(env_file).name is None


def test_an_empty_variable_counts_as_unset(env_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_WORKERS", "")
    assert load_settings(env_file).workers is None


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_a_missing_key_is_named_with_its_file(env_file: Path, name: str) -> None:
    content = values(env_file)
    del content[name]
    write(env_file, content)
    with pytest.raises(UserError, match=f"^{name} is missing from {re.escape(str(env_file))}: .*make setup"):
        load_settings(env_file)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("S3_SECRET_ACCESS_KEY", "sh0rt"),
        ("STORE_ROOT_PASSWORD", "sh0rt"),
        ("STORE_ROOT_PASSWORD", "l0ng" * 11),
        ("RAY_AUTH_TOKEN", "sh0rt"),
        ("S3_ACCESS_KEY_ID", "k0"),
    ],
)
def test_a_secret_of_the_wrong_length_is_refused_without_being_shown(
    env_file: Path, name: str, value: str
) -> None:
    write(env_file, values(env_file) | {name: value})
    with pytest.raises(UserError) as caught:
        load_settings(env_file)
    sentence = str(caught.value)
    assert sentence.startswith(f"{name}=*** in {env_file}")
    assert "length" in sentence
    assert value not in sentence


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("LAB_RUNTIME", "podman", "auto, embedded, compose"),
        ("LAB_STORE", "ceph", "minio, seaweedfs, external"),
        ("LAB_NODES", "0", "greater than or equal to 1"),
        ("LAB_NODES", "two", "whole number"),
        ("LAB_NODES", "1000", "less than or equal to 16"),
        ("LAB_NODE_CPUS", "0", "greater than or equal to 1"),
        ("LAB_NODE_CPUS", "0.5", "whole number"),
        ("LAB_WORKERS", "0", "greater than or equal to 1"),
        ("LAB_WORKERS", "-2", "greater than or equal to 1"),
        ("LAB_SEED", "-1", "greater than or equal to 0"),
        ("LAB_SEED", str(2**31), "less than"),
        ("LAB_FRESH", "maybe", "use 1 or 0"),
        ("LAB_DASHBOARD_PORT", "65536", "less than or equal to 65535"),
        ("LAB_S3_PORT", "http", "whole number"),
        ("S3_BUCKET", "BAD_bucket", "pattern"),
    ],
)
def test_a_wrong_value_is_named_with_its_setting_and_a_fix(
    env_file: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, fix: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        load_settings(env_file)
    sentence = str(caught.value)
    assert sentence.startswith(f"{name}={value!r} is not valid: ")
    assert fix in sentence
    assert "\n" not in sentence


def test_a_wrong_value_from_the_command_line_is_named_like_the_variable(env_file: Path) -> None:
    with pytest.raises(UserError, match=r"^LAB_WORKERS=0 is not valid: "):
        load_settings(env_file, workers=0)


def test_a_binary_env_file_is_refused(env_file: Path) -> None:
    env_file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a text file"):
        load_settings(env_file)


def test_store_access_survives_a_node_s_environment() -> None:
    environ = {
        "S3_ENDPOINT": "https://store:9000",
        "S3_BUCKET": "bucket",
        "S3_ACCESS_KEY_ID": "key",
        "S3_SECRET_ACCESS_KEY": "a secret",
        "S3_SESSION_TOKEN": "a token",
        "S3_REGION": "eu-west-1",
        "S3_CA_BUNDLE": "/ca.pem",
    }
    assert StoreAccess.from_environment(environ).environment() == environ


def test_a_node_without_a_store_says_what_is_missing() -> None:
    with pytest.raises(UserError, match=r"^S3_BUCKET, S3_SECRET_ACCESS_KEY is not set on this node"):
        StoreAccess.from_environment({"S3_ENDPOINT": "http://store", "S3_ACCESS_KEY_ID": "key"})
