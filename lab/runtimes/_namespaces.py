"""A mount namespace for a node, so that another node's disk really is another disk (Linux)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

# "$1" is the node's own folder, "$2" the path that it appears at; the mount ends with the node's last process.
_SCRIPT = 'mount --bind "$1" "$2" || exit 97; shift 2; exec "$@"'


def prefix() -> list[str] | None:
    """The command that gives what follows a mount namespace of its own, or None where that is not allowed."""
    if sys.platform != "linux" or not shutil.which("unshare") or not shutil.which("mount"):
        return None
    options = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *options, "--mount", "--propagation", "private"]
    try:
        # A real mount: unshare alone may be allowed where mounting is not (containers, AppArmor).
        trial = subprocess.run(
            [*command, "mount", "--bind", "/tmp", "/tmp"], capture_output=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return command if trial.returncode == 0 else None


def with_own_disk(prefix: list[str], own: Path, at: Path, command: list[str]) -> list[str]:
    """The command, run with the folder `own` mounted over `at`."""
    return [*prefix, "sh", "-c", _SCRIPT, "sh", str(own), str(at), *command]
