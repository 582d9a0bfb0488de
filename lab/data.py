"""What the lab has written on this machine, for `clean-data`: named first, deleted only when asked."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lab.errors import EnvironmentBroken

DOCKER_LIMIT_S = 60


@dataclass(frozen=True)
class Holding:
    """A folder (bytes known), a link to one, or a container volume (both: bytes None) with the user's data."""

    kind: str
    name: str
    bytes: int | None


def holdings(root: Path, project: str) -> list[Holding]:
    """Results, storage and logs below `root`, and the project's container volumes where Docker answers."""
    folders = [root / "results", root / ".lab" / "storage", root / ".lab" / "logs"]
    found = [
        Holding("link", f"{folder} to {folder.resolve()}", None)
        if folder.is_symlink()
        else Holding("folder", str(folder), _size(folder))
        for folder in folders
        if folder.is_dir()
    ]
    return found + [Holding("volume", name, None) for name in _volumes(project)]


def delete(holding: Holding) -> None:
    """Delete one holding. A link is left alone, and so is what it leads to: that was not asked for by its own name.

    Raises:
        EnvironmentBroken: a volume is still in use.
    """
    if holding.kind == "link":
        return
    if holding.kind == "folder":
        shutil.rmtree(holding.name)
        return
    done = _docker("volume", "rm", holding.name)
    if done is None or done.returncode != 0:
        reason = done.stderr.strip() if done else "Docker does not answer"
        raise EnvironmentBroken(f"volume {holding.name} could not be deleted: {reason}; `make down` first.")


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def _volumes(project: str) -> list[str]:
    done = _docker("volume", "ls", "-q", "--filter", f"label=com.docker.compose.project={project}")
    return done.stdout.split() if done and done.returncode == 0 else []


def _docker(*arguments: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            ["docker", *arguments], capture_output=True, text=True, timeout=DOCKER_LIMIT_S, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
