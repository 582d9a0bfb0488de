"""The README's script, submitted as the README says, twice: it trains on two nodes, then goes on where it was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from lab.settings import CHECKOUT
from tests.conftest import Cluster

LIMIT_S = 240
README = (CHECKOUT / "README.md").read_text()


def submit(cluster: Cluster, folder: Path) -> str:
    """The README's command, with the values that its shell would have put in."""
    (command,) = re.findall(r"bin/(ray job submit .*)\)\n```", README)
    words = command.replace('"$address"', cluster.access.dashboard).replace("my-folder", str(folder)).split()
    done = subprocess.run(
        [str(Path(sys.executable).parent / words[0]), *words[1:]],
        env=os.environ
        | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": cluster.settings.ray_auth_token.get_secret_value()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_readme_s_script_trains_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(# my-folder/train\.py\n.*?)```", README, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    losses = []
    for last in (3, 7):
        said = submit(cluster, tmp_path)
        (found,) = re.findall(rf"done: {{'epoch': {last}, 'loss': ([0-9.e-]+)", said)
        losses.append(float(found))
        nodes = set(re.findall(r"\(RayTrainWorker pid=\d+, ip=([0-9.]+)\)", said))
        assert len(nodes) == 2, said
    assert losses[1] < losses[0] / 2
