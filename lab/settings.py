"""The lab's settings: one frozen object, read once from the environment and `.env`."""

from __future__ import annotations

import difflib
import hashlib
import os
import secrets
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from dotenv import dotenv_values
from dotenv.parser import parse_stream
from pydantic import AliasChoices, BaseModel, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from lab.errors import UserError

CHECKOUT = Path(__file__).resolve().parent.parent
"""Where the code is: the package, `docker-compose.yml`, `images`."""

ROOT = Path(os.environ.get("LAB_ROOT") or CHECKOUT)
"""Where everything that the lab writes on the host lies: `.env`, `.lab`, `results`. The checkout, unless
`LAB_ROOT` names another folder (the tests' own, so that they never touch a user's cluster or data)."""

LOGS = ROOT / ".lab" / "logs"
"""One log a run, by the run's name, and those of the lab's own work."""

RuntimeName = Literal["auto", "embedded", "compose"]
StoreName = Literal["minio", "seaweedfs", "external"]

DEFAULT_PORTS = {"LAB_DASHBOARD_PORT": 8265, "LAB_S3_PORT": 9000}
"""The containers' ports on the host, by setting."""

MIN_SECRET = 8
MAX_SECRET = 40
"""Length of an S3 secret, in characters, that MinIO accepts."""


def _knob(name: str) -> AliasChoices:
    return AliasChoices(f"LAB_{name}")


class StoreAccess(BaseModel, frozen=True):
    """How to reach the object store with the training identity's keys.

    `endpoint` is a URL as this process sees it: `http://host:port` or `https://host:port`.
    """

    endpoint: str
    bucket: str
    access_key_id: str
    secret_access_key: SecretStr
    session_token: SecretStr | None = None
    region: str = "us-east-1"
    ca_bundle: str | None = None

    @classmethod
    def from_environment(cls, environ: dict[str, str] | None = None) -> StoreAccess:
        """Read `S3_*` from a node's environment.

        Raises:
            UserError: a variable that every node needs is missing.
        """
        env = dict(os.environ) if environ is None else environ
        missing = [
            name
            for name in ("S3_ENDPOINT", "S3_BUCKET", "S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY")
            if not env.get(name)
        ]
        if missing:
            raise UserError(
                f"{', '.join(missing)} is not set on this node: the cluster was started without a store; "
                "stop it (make down) and start it again (make up)."
            )
        return cls(
            endpoint=env["S3_ENDPOINT"],
            bucket=env["S3_BUCKET"],
            access_key_id=env["S3_ACCESS_KEY_ID"],
            secret_access_key=SecretStr(env["S3_SECRET_ACCESS_KEY"]),
            session_token=SecretStr(env["S3_SESSION_TOKEN"]) if env.get("S3_SESSION_TOKEN") else None,
            region=env.get("S3_REGION") or "us-east-1",
            ca_bundle=env.get("S3_CA_BUNDLE") or None,
        )

    def environment(self) -> dict[str, str]:
        """The `S3_*` variables that hand this access to a node. Holds secrets: never log it."""
        values = {
            "S3_ENDPOINT": self.endpoint,
            "S3_BUCKET": self.bucket,
            "S3_ACCESS_KEY_ID": self.access_key_id,
            "S3_SECRET_ACCESS_KEY": self.secret_access_key.get_secret_value(),
            "S3_REGION": self.region,
        }
        if self.session_token:
            values["S3_SESSION_TOKEN"] = self.session_token.get_secret_value()
        if self.ca_bundle:
            values["S3_CA_BUNDLE"] = self.ca_bundle
        return values


class Settings(BaseSettings):
    """Every knob of the lab. Environment variables win over `.env`, which wins over defaults."""

    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", env_ignore_empty=True, hide_input_in_errors=True
    )

    runtime: Annotated[RuntimeName, Field(validation_alias=_knob("RUNTIME"))] = "auto"
    nodes: Annotated[int, Field(validation_alias=_knob("NODES"), ge=1, le=16)] = 2
    node_cpus: Annotated[int, Field(validation_alias=_knob("NODE_CPUS"), ge=1, le=256)] = 4
    workers: Annotated[int | None, Field(validation_alias=_knob("WORKERS"), ge=1)] = None
    store: Annotated[StoreName, Field(validation_alias=_knob("STORE"))] = "minio"
    storage: Annotated[str | None, Field(validation_alias=_knob("STORAGE"))] = None
    seed: Annotated[int, Field(validation_alias=_knob("SEED"), ge=0, lt=2**31)] = 0
    name: Annotated[str | None, Field(validation_alias=_knob("NAME"))] = None
    fresh: Annotated[bool, Field(validation_alias=_knob("FRESH"))] = False
    keep: Annotated[bool, Field(validation_alias=_knob("KEEP"))] = False
    quick: Annotated[bool, Field(validation_alias=_knob("QUICK"))] = False

    dashboard_port: Annotated[int, Field(validation_alias=_knob("DASHBOARD_PORT"), ge=1, le=65535)] = (
        DEFAULT_PORTS["LAB_DASHBOARD_PORT"]
    )
    s3_port: Annotated[int, Field(validation_alias=_knob("S3_PORT"), ge=1, le=65535)] = DEFAULT_PORTS[
        "LAB_S3_PORT"
    ]

    s3_endpoint: Annotated[str | None, Field(validation_alias="S3_ENDPOINT")] = None
    s3_public_endpoint: Annotated[str | None, Field(validation_alias="S3_PUBLIC_ENDPOINT")] = None
    s3_bucket: Annotated[
        str, Field(validation_alias="S3_BUCKET", pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")
    ] = "lab"
    s3_access_key_id: Annotated[str, Field(validation_alias="S3_ACCESS_KEY_ID", min_length=3)]
    s3_secret_access_key: Annotated[
        SecretStr, Field(validation_alias="S3_SECRET_ACCESS_KEY", min_length=MIN_SECRET)
    ]
    s3_session_token: Annotated[SecretStr | None, Field(validation_alias="S3_SESSION_TOKEN")] = None
    s3_region: Annotated[str, Field(validation_alias="S3_REGION")] = "us-east-1"
    s3_ca_bundle: Annotated[str | None, Field(validation_alias="S3_CA_BUNDLE")] = None

    store_root_user: Annotated[str, Field(validation_alias="STORE_ROOT_USER", min_length=3)]
    store_root_password: Annotated[
        SecretStr, Field(validation_alias="STORE_ROOT_PASSWORD", min_length=MIN_SECRET, max_length=MAX_SECRET)
    ]
    ray_auth_token: Annotated[SecretStr, Field(validation_alias="RAY_AUTH_TOKEN", min_length=32)]
    project: Annotated[str, Field(validation_alias="COMPOSE_PROJECT_NAME", pattern=r"^[a-z0-9][a-z0-9_-]*$")]

    def asks_for(self, **cluster: Any) -> dict[str, Any]:
        """Of a cluster's traits, by field, those that were set otherwise: defaults ask for nothing that is not up."""
        return {
            _alias(type(self).model_fields[name]): getattr(self, name)
            for name, value in cluster.items()
            if name in self.model_fields_set and getattr(self, name) != value
        }

    def ports(self) -> dict[str, int]:
        """The ports on the host's loopback that a cluster opens, by setting."""
        store = {} if self.store == "external" else {"LAB_S3_PORT": self.s3_port}
        return {"LAB_DASHBOARD_PORT": self.dashboard_port, **store}

    def chosen_ports(self) -> dict[str, int]:
        """Of `ports`, those that are no default: the embedded runtime takes any free port in place of a default."""
        return {name: port for name, port in self.ports().items() if port != DEFAULT_PORTS[name]}

    def store_access(self, endpoint: str) -> StoreAccess:
        """The training identity at `endpoint` (the nodes' or the host's view of the store)."""
        return StoreAccess(
            endpoint=endpoint,
            bucket=self.s3_bucket,
            access_key_id=self.s3_access_key_id,
            secret_access_key=self.s3_secret_access_key,
            session_token=self.s3_session_token,
            region=self.s3_region,
            ca_bundle=self.s3_ca_bundle,
        )

    def secrets(self) -> dict[str, str]:
        """The values that nobody may see, by setting."""
        return {
            _alias(field): value.get_secret_value()
            for name, field in type(self).model_fields.items()
            if isinstance(value := getattr(self, name), SecretStr)
        }

    def public(self) -> dict[str, Any]:
        """The settings that may be written to a result: no secret, no key."""
        hidden = {
            "s3_access_key_id",
            "s3_secret_access_key",
            "s3_session_token",
            "store_root_user",
            "store_root_password",
            "ray_auth_token",
        }
        return self.model_dump(exclude=hidden)


REQUIRED = {
    "S3_ACCESS_KEY_ID",
    "S3_SECRET_ACCESS_KEY",
    "STORE_ROOT_USER",
    "STORE_ROOT_PASSWORD",
    "RAY_AUTH_TOKEN",
    "COMPOSE_PROJECT_NAME",
}


def make_env_file(path: Path) -> bool:
    """Write a `.env` with fresh secrets, mode 600, unless one is there.

    Returns:
        Whether a file was made. An existing one is never touched.
    """
    checkout = hashlib.sha256(str(path.resolve().parent).encode()).hexdigest()[:8]
    text = f"""\
# Made by `make setup` for this checkout. Secrets: never commit, never share.
COMPOSE_PROJECT_NAME=raylab-{checkout}
RAY_AUTH_TOKEN={secrets.token_hex(32)}
# The store's own account: used by the store and its bucket job alone.
STORE_ROOT_USER=root-{secrets.token_hex(4)}
STORE_ROOT_PASSWORD={secrets.token_hex(16)}
# The training code's keys: one bucket, nothing else.
S3_BUCKET=lab
S3_ACCESS_KEY_ID=lab-{secrets.token_hex(4)}
S3_SECRET_ACCESS_KEY={secrets.token_hex(16)}
"""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return True


def readable_by_others(path: Path) -> bool:
    """Whether a file of secrets may be read by more than its owner."""
    return bool(path.stat().st_mode & 0o077)


_KINDS = {"int_parsing": "give a whole number", "bool_parsing": "use 1 or 0"}
_FIX = {
    "LAB_RUNTIME": f"choose one of {', '.join(get_args(RuntimeName))}",
    "LAB_STORE": f"choose one of {', '.join(get_args(StoreName))}",
}


def _sentence(error: ValidationError, env_file: Path) -> str:
    """One sentence for the first thing wrong: the setting, its value, what to do."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "a setting"
    if first["type"] == "missing":
        return f"{name} is missing from {env_file}: add it, or move the file away and run `make setup`."
    secret = name in REQUIRED - {"COMPOSE_PROJECT_NAME"}
    where = "" if name in os.environ or not _in_file(name, env_file) else f" in {env_file}"
    shown = f"{name}={'***' if secret else repr(first['input'])}{where}"
    fix = (
        _FIX.get(name) or _KINDS.get(first["type"]) or str(first["msg"]).replace("Input should", "it should")
    )
    if secret:
        bound = first.get("ctx", {}).get("min_length") or first.get("ctx", {}).get("max_length")
        fix = f"it has the wrong length (limit {bound} characters); set another or run `make setup` afresh"
    return f"{shown} is not valid: {fix}."


def _in_file(name: str, env_file: Path) -> bool:
    return name in dotenv_values(env_file)


def load_settings(env_file: Path | None = None, **overrides: Any) -> Settings:
    """Read the settings; make `.env` when there is none.

    Args:
        env_file: the file of settings; default `.env` in the checkout.
        overrides: values from the command line, by field name; None means "not given".

    Raises:
        UserError: a setting is wrong or missing, in one sentence.
    """
    path = env_file or ROOT / ".env"
    make_env_file(path)
    try:
        _check_lines(path)
        written = dotenv_values(path)
        _check_knobs({*written, *os.environ})
        # the project from this file alone: one exported for another checkout would aim `down` and `clean-data` at it
        own = {key: value for key, value in written.items() if key == "COMPOSE_PROJECT_NAME"}
        base = Settings(_env_file=path, **own)  # type: ignore[arg-type,call-arg]
        given = {key: value for key, value in overrides.items() if value is not None}
        if not given:
            return base
        fields = type(base).model_fields
        return Settings.model_validate(
            {
                str(_alias(fields[key])): given.get(key, getattr(base, key))
                for key in {*base.model_fields_set, *given}
            }
        )
    except ValidationError as error:
        raise UserError(_sentence(error, path)) from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file: move it away and run `make setup`.") from None


def _check_lines(path: Path) -> None:
    """Raises: UserError: a line of the file is no assignment; a reader would pass over it without a word."""
    with path.open() as stream:
        for found in parse_stream(stream):
            if found.error:
                raise UserError(
                    f"{path}, line {found.original.line}, is not NAME=value: correct it, or put a # before it."
                )


def _check_knobs(names: set[str]) -> None:
    """Refuse a misspelt knob, which would otherwise have no effect at all.

    Raises:
        UserError: one of the names, those of the file and the environment, is no knob, but nearly one.
    """
    knobs = [alias for field in Settings.model_fields.values() if (alias := _alias(field)).startswith("LAB_")]
    for name in sorted(names - {*knobs}):
        near = difflib.get_close_matches(name, knobs, n=1, cutoff=0.85) if name.startswith("LAB_") else []
        if near:
            raise UserError(f"{name} is set, but the lab has no such knob: did you mean {near[0]}?")


def check_store(settings: Settings) -> None:
    """Refuse a store that contradicts its endpoint.

    Raises:
        UserError: no endpoint for a store of the user's own, or one beside the lab's own store.
    """
    if settings.store == "external" and not settings.s3_endpoint:
        raise UserError("LAB_STORE=external needs S3_ENDPOINT: set it to your store, http://host:port.")
    if settings.store != "external" and settings.s3_endpoint:
        raise UserError(
            f"S3_ENDPOINT={settings.s3_endpoint} is set, but LAB_STORE={settings.store} starts a store of its own: "
            "set LAB_STORE=external, or unset S3_ENDPOINT."
        )


def check_together(settings: Settings) -> None:
    """Refuse settings that no cluster can be started with, because they contradict each other.

    Raises:
        UserError: the first contradiction.
    """
    check_store(settings)
    ports = settings.ports()
    if len(set(ports.values())) < len(ports):
        raise UserError(
            f"LAB_S3_PORT={settings.s3_port} is LAB_DASHBOARD_PORT too: set one of them to another port."
        )


def _alias(field: Any) -> str:
    alias = field.validation_alias
    return str(alias.choices[0]) if isinstance(alias, AliasChoices) else str(alias)
