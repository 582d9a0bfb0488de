"""The README's script, started as the README says, twice: it trains on two nodes, then goes on where it was."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from lab.settings import CHECKOUT
from tests.conftest import Cluster

LIMIT_S = 240
README = (CHECKOUT / "README.md").read_text()


def lab(cluster: Cluster, *words: str, ends: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "lab", *words],
        cwd=CHECKOUT,
        env=os.environ | {"LAB_RUNTIME": cluster.runtime.name},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == ends, done.stdout
    return done.stdout


def test_the_readme_s_script_trains_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(# my-folder/train\.py\n.*?)```", README, re.DOTALL)
    (command,) = re.findall(r"\.venv/bin/lab (submit my-folder .*)\n", README)
    (tmp_path / "train.py").write_text(script)
    losses = []
    for last in (3, 7):
        said = lab(cluster, *shlex.split(command.replace("my-folder", str(tmp_path))))
        (found,) = re.findall(rf"done: {{'epoch': {last}, 'loss': ([0-9.e-]+)", said)
        losses.append(float(found))
        nodes = set(re.findall(r"\(RayTrainWorker pid=\d+, ip=([0-9.]+)\)", said))
        assert len(nodes) == 2, said
        assert "Traceback" not in said
    assert losses[1] < losses[0] / 2


TALK = """\
import os, sys
from ray import train
from ray.train.torch import TorchTrainer

def loop():
    print("the same line of every rank")
    print("cluster", os.environ.get("RAY_ADDRESS"))
    print("beside the program:", open("data/beside.txt").read())
    train.report({"x": 1})

TorchTrainer(
    loop,
    scaling_config=train.ScalingConfig(num_workers=2, label_selector={"lab-role": "worker"}),
    run_config=train.RunConfig(storage_path="/tmp/talk"),
).fit()
print("driver", os.environ["RAY_ADDRESS"])
sys.stdout.flush()
sys.stdout.buffer.write(b"no UTF-8: \\xff\\n")
sys.stdout.flush()
sys.exit(5)
"""


def test_each_rank_s_line_comes_once_and_a_failed_program_is_told(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(TALK)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "beside.txt").write_text("found")
    said = lab(cluster, "submit", str(tmp_path), "python", "talk.py", ends=1)
    assert said.count("the same line of every rank") == 2, said
    assert said.count("beside the program: found") == 2
    assert "no UTF-8: \ufffd\n" in said
    (address,) = re.findall(r"^driver (\S+)$", said, re.MULTILINE)
    if cluster.runtime.name == "embedded":
        # a part of Ray that looks for "the" cluster of a host must not find another checkout's
        assert re.findall(r"cluster (\S+)$", said, re.MULTILINE) == [address] * 2
    (job,) = re.findall(r"^job: (own-\S+)", said, re.MULTILINE)
    assert f"job {job}: FAILED: Job entrypoint command failed with exit code 5\n" in said
    assert "the same line of every rank" in lab(cluster, "logs", job)
