"""`python -m lab.observe.restore STORAGE RUN CHECKPOINT`: read a checkpoint in a fresh process, without Ray.

Prints one JSON line: `{"epoch": e, "parameters_sha256": d, "accuracy": a, "keys": [...], "loaded": [...],
"ray_imported": false}`; `keys` are the model's, `loaded` the files that `weights_only=True` reads.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lab.errors import EnvironmentBroken
from lab.settings import StoreAccess
from lab.storage import Storage, open_storage, parse_location

LIMIT_S = 60.0


def download(storage: Storage, relative: str, target: Path) -> None:
    """Copy all files below `relative` into the folder `target`."""
    for entry in storage.files(relative):
        path = target / entry.path.removeprefix(f"{relative}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(storage.read(entry.path))


def restored(storage: Storage, run: str, checkpoint: str) -> dict[str, Any]:
    """Run this module in a process of its own and return what it printed.

    Raises:
        EnvironmentBroken: it did not end well within the limit; its last line says why.
    """
    command = [sys.executable, "-m", "lab.observe.restore", str(storage.location), run, checkpoint]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise EnvironmentBroken(f"restoring {checkpoint} of {run} took more than {LIMIT_S:.0f} s.") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EnvironmentBroken(f"restoring {checkpoint} of {run} in a fresh process failed: {last}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Load the model as a plain torch script would, and evaluate it on the held-out digits."""
    import torch

    from lab.training.data import digits
    from lab.training.models import build_model
    from lab.training.state import tensors_sha256

    uri, run, checkpoint = sys.argv[1:4]
    location = parse_location(uri)
    storage = open_storage(location, StoreAccess.from_environment() if location.kind == "s3" else None)
    with tempfile.TemporaryDirectory() as folder:
        download(storage, f"{run}/{checkpoint}", Path(folder))
        files = sorted(Path(folder).glob("*.pt"))
        loaded = {path.name: torch.load(path, weights_only=True) for path in files}
        weights = loaded["model.pt"]
        epoch = json.loads(Path(folder, "progress.json").read_text())["epoch"]
    model = build_model("small-cnn", seed=12345)
    model.load_state_dict(weights)
    model.eval()
    images, labels, _ = digits("held-out").tensors
    with torch.no_grad():
        correct = int((model(images).argmax(1) == labels).sum())
    print(
        json.dumps(
            {
                "epoch": epoch,
                "parameters_sha256": tensors_sha256(model.state_dict()),
                "accuracy": correct / len(labels),
                "keys": list(weights),
                "loaded": list(loaded),
                "ray_imported": "ray" in sys.modules,
            }
        )
    )


if __name__ == "__main__":
    main()
