"""What `pip install "ray[train]"` alone lacks: the packages that only `ray[default]` brings are hidden from a process.

`python -c "from lab.observe.train_extra import main; main()" MODULE ...` hides those modules, tries four imports and
prints `{import: "works" or "Exception: sentence"}` as one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions, requires
from types import ModuleType
from typing import Any

from lab.errors import EnvironmentBroken

LIMIT_S = 90.0
PROGRAM = "from lab.observe.train_extra import main; main()"
TRIED = ("ray", "ray.train.torch", "ray.dashboard.optional_deps", "ray.dashboard.modules.job.job_head")


class Hidden(MetaPathFinder):
    """Makes modules look as if they were not installed."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Refuse a hidden module, and leave all others to the usual finders.

        Raises:
            ModuleNotFoundError: it is hidden.
        """
        if fullname.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


def only_in_default() -> list[str]:
    """The packages that `ray[default]` asks for and neither `ray` nor `ray[train]` does, by Ray's own metadata."""
    plain, train, default = _asked(""), _asked("train"), _asked("default")
    return sorted(default - train - plain)


def _asked(extra: str) -> set[str]:
    found = set()
    for line in requires("ray") or []:
        named, _, marker = line.partition(";")
        extras = re.findall(r"extra\s*==\s*[\"']([^\"']+)", marker)
        if extras == ([extra] if extra else []):
            match = re.match(r"[A-Za-z0-9_.-]+", named.strip())
            found.add(_canonical(match.group(0)) if match else named)
    return found


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def modules_of(packages: Sequence[str]) -> list[str]:
    """The modules that installed packages bring."""
    wanted = set(packages)
    return sorted(
        module
        for module, owners in packages_distributions().items()
        if any(_canonical(owner) in wanted for owner in owners)
    )


def without_default() -> dict[str, Any]:
    """The packages, and what can be imported with and without them.

    Raises:
        EnvironmentBroken: a process does not end well within its limit.
    """
    packages = only_in_default()
    modules = modules_of(packages)
    return {"packages": packages, "with": _imports([]), "without": _imports(modules)}


def _imports(hidden: Sequence[str]) -> dict[str, str]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *hidden],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentBroken(f"importing Ray took more than {LIMIT_S:.0f} s on the head.") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EnvironmentBroken(f"a process could not import what it should: {last}")
    found: dict[str, str] = json.loads(lines[-1])
    return found


def main() -> None:
    """Hide what the command line names, import, print."""
    sys.meta_path.insert(0, Hidden(sys.argv[1:]))
    found = {}
    for name in TRIED:
        try:
            importlib.import_module(name)
            found[name] = "works"
        except Exception as error:  # noqa: BLE001 - whatever it raises is the observation
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    print(json.dumps(found))
