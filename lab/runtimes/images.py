"""The images of the compose runtime: which are there, whether the rest can be had, and getting them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.errors import EnvironmentBroken
from lab.runtimes.engine import ANSWER_S, call, last_line
from lab.runtimes.project import SOURCE, compose, described
from lab.runtimes.protocol import Say
from lab.settings import LOGS, Settings

BUILD_S = 1800.0
PULL_S = 1800.0
OFFER_S = 10.0
"""Seconds for a registry to say whether it has an image."""
PRUNE_S = 60.0
SOURCE_S = 60.0
"""Seconds for pip to say whether its own folders hold torch."""
MAX_CA_BYTES = 500_000
"""BuildKit's limit for a secret."""


@dataclass(frozen=True)
class Image:
    """An image that a service needs. `base` is what it is built on; None for one that is only pulled."""

    name: str
    service: str
    base: str | None

    @property
    def built(self) -> bool:
        return self.base is not None


def needed(settings: Settings) -> list[Image]:
    """The images of every service that the settings ask for, each once."""
    images: dict[str, Image] = {}
    for service, definition in described(settings).items():
        build = definition.get("build")
        base = build["args"]["BASE_IMAGE"] if build else None
        images.setdefault(definition["image"], Image(definition["image"], service, base))
    return list(images.values())


def pins(root: Path = SOURCE) -> str:
    """A digest of what decides an image's content but for the lab's own code, which is mounted."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    digest = hashlib.sha256(
        repr((project["dependencies"], project["optional-dependencies"]["cluster"])).encode()
    )
    paths = [root / "requirements.lock", root / "lab/store/seaweedfs.py"]
    for folder in ("ray", "seaweedfs"):
        paths += [path for path in sorted((root / "images" / folder).iterdir()) if path.suffix != ".yml"]
    for path in paths:
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def missing(settings: Settings) -> list[Image]:
    """The images that are not there, or were built from other pins than this checkout's."""
    wanted = pins()
    absent = []
    for image in needed(settings):
        label = '{{index .Config.Labels "lab.pins"}}' if image.built else "{{.Id}}"
        found = call(["image", "inspect", "--format", label, image.name], limit_s=ANSWER_S)
        if not found.ok or (image.built and found.out.strip() != wanted):
            absent.append(image)
    return absent


def images_missing(settings: Settings) -> list[str]:
    """The names of the images that have to be built or pulled before the lab can start."""
    return [image.name for image in missing(settings)]


def images_problem(settings: Settings, limit_s: float = OFFER_S) -> str | None:
    """Why the missing images cannot be had, as one sentence; None when they can, or none is missing."""
    end = time.monotonic() + limit_s
    for name, base in {(image.base or image.name, image.built) for image in missing(settings)}:
        left = max(end - time.monotonic(), 1.0)
        if _here(name) or call(["manifest", "inspect", name], limit_s=left).ok:
            continue
        if base:
            return (
                f"BASE_IMAGE={name} cannot be pulled within {limit_s:g} s: run `make base-image`, which makes it "
                "from Debian's packages, or set BASE_IMAGE to one that can."
            )
        return (
            f"MINIO_IMAGE={name} cannot be pulled within {limit_s:g} s: set it to one that can, or choose another "
            "store (LAB_STORE=seaweedfs)."
        )
    return None


def obtain(settings: Settings, say: Say, wanted: list[Image] | None = None) -> None:
    """Build or pull what is missing.

    Args:
        wanted: the images to get; default those that are missing.

    Raises:
        EnvironmentBroken: an image cannot be had, in one sentence; the rest is in a log that it names.
    """
    images = missing(settings) if wanted is None else wanted
    if not images:
        return
    problem = images_problem(settings)
    if problem:
        raise EnvironmentBroken(problem)
    log = LOGS / "images.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = build_environment(os.environ) if any(image.built for image in images) else {}
    for image in images:
        began = time.monotonic()
        verb = "building" if image.built else "pulling"
        say(f"{verb} {image.name} (a few minutes the first time; log: {log})")
        arguments = ["build", "--progress", "plain"] if image.built else ["pull", "--quiet"]
        output = compose(
            settings,
            [*arguments, image.service],
            limit_s=BUILD_S if image.built else PULL_S,
            extra=variables,
            log=log,
        )
        if not output.ok:
            why = output.err if output.code is None else last_line(log.read_text(errors="replace"))[:300]
            raise EnvironmentBroken(f"{verb} {image.name} failed: {why}; the whole story is in {log}.")
        say(f"{image.name} is ready after {time.monotonic() - began:.0f} s")
    if any(image.built for image in images):
        # What the new builds replaced: untagged, the lab's own by its label, and in use by no container.
        call(["image", "prune", "--force", "--filter", "label=lab.pins"], limit_s=PRUNE_S)


def build_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What the build is told beyond the Compose files' defaults: where torch is, whom to trust, what it is.

    Raises:
        EnvironmentBroken: where torch comes from cannot be found out.
    """
    values = {"LAB_PINS": pins(), "LAB_REVISION": _revision()}
    try:
        found = subprocess.run(
            [str(SOURCE / "scripts" / "torch-source"), "--image", sys.executable],
            capture_output=True,
            text=True,
            timeout=SOURCE_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentBroken(f"scripts/torch-source failed: {error}.") from None
    pairs = dict(line.split("=", 1) for line in found.stdout.split() if "=" in line)
    # What the user says wins over what was found out.
    values.update({name: environ.get(name, value) for name, value in pairs.items()})
    bundle = environ.get("LAB_CA_FILE") or certificate_bundle(environ)
    return {**values, "LAB_CA_FILE": bundle} if bundle else values


def certificate_bundle(environ: Mapping[str, str]) -> str | None:
    """The bundle of authorities that this host's own pip was told to trust, for the build's pip."""
    for name in ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        path = Path(environ.get(name) or "/nonexistent")
        if path.is_file() and path.stat().st_size < MAX_CA_BYTES:
            return str(path)
    return None


def digests(settings: Settings) -> dict[str, str]:
    """The id of each image in use, for a result's environment."""
    found = {}
    for image in needed(settings):
        output = call(["image", "inspect", "--format", "{{.Id}}", image.name], limit_s=ANSWER_S)
        if output.ok:
            found[image.name] = output.out.strip()
    return found


def _here(name: str) -> bool:
    return call(["image", "inspect", "--format", "{{.Id}}", name], limit_s=ANSWER_S).ok


def _revision() -> str:
    try:
        found = subprocess.run(
            ["git", "-C", str(SOURCE), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip() or "unknown"
