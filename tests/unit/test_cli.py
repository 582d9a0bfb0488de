"""The command's answers to mistakes: one sentence, exit 2, within 5 s, nothing started."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lab.errors import INTERRUPTED
from lab.lessons import lessons
from lab.settings import CHECKOUT, make_env_file
from tests.commands import SECRET, assert_refused, lab, left


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


REFUSED: list[tuple[list[str], Mapping[str, str], tuple[str, ...]]] = [
    (["run", "frist-run"], {}, ("LESSON='frist-run'", "did you mean 'first-run'?")),
    (["run", "first-run,zzz"], {}, ("LESSON='zzz'", "make list")),
    (["list", "multinode"], {}, ("LESSON='multinode'", "multi-node")),
    (["run", "first-run", "--workers", "0"], {}, ("LAB_WORKERS='0'", "greater than or equal to 1")),
    (["run", "first-run"], {"LAB_WORKERS": "-2"}, ("LAB_WORKERS='-2'", "greater than or equal to 1")),
    (["run", "first-run", "--workers", "many"], {}, ("LAB_WORKERS='many'", "whole number")),
    (["run", "first-run", "--workers", "5"], {}, ("LAB_WORKERS=5", "have 4 CPUs", "need 5")),
    (["run", "multi-node", "--workers", "9"], {}, ("LAB_WORKERS=9", "have 8 CPUs", "need 9")),
    (["run", "multi-node", "--workers", "1"], {}, ("LAB_WORKERS=1", "2 nodes")),
    (["run", "multi-node"], {"LAB_NODES": "1"}, ("LAB_NODES=1", "needs 2")),
    (["run", "first-run"], {"LAB_NODE_CPUS": "0"}, ("LAB_NODE_CPUS='0'", "greater than or equal to 1")),
    (["run", "first-run", "--workers", "3"], {}, ("LAB_WORKERS=3", "--global-batch=64", "2 or 4 workers")),
    (
        ["run", "multi-node", "--storage", "/data/runs"],
        {},
        ("LAB_STORAGE=/data/runs", "s3://", "S3_ENDPOINT"),
    ),
    (["run", "first-run", "--storage", "s3:/lab/x"], {}, ("LAB_STORAGE='s3:/lab/x'", "s3://bucket/prefix")),
    (["run", "first-run", "--storage", "s3://lab/my runs"], {}, ("LAB_STORAGE=", "space")),
    (["run", "multi-node", "--storage", "s3://"], {}, ("LAB_STORAGE='s3://'", "no bucket")),
    (["run", "first-run"], {"LAB_STORAGE": "runs"}, ("LAB_STORAGE='runs'", "not absolute")),
    (["run", "first-run", "--name", "../x"], {}, ("LAB_NAME='../x'", "letters")),
    (["run", "first-run", "--name", "a/b"], {}, ("LAB_NAME='a/b'", "letters")),
    (["run", "first-run", "--fresh"], {}, ("LAB_FRESH", "LAB_NAME")),
    (["run", "first-run,multi-node", "--name", "mine"], {}, ("LAB_NAME='mine'", "one lesson")),
    (["run", "first-run", "--epoch", "3"], {}, ("'--epoch'", "did you mean --epochs?")),
    (["run", "first-run", "--epochs", "x"], {}, ("--epochs='x'", "whole number")),
    (["run", "first-run", "--break", "everything"], {}, ("--break='everything'", "can break")),
    (["run", "first-run", "--epochs", "9999999999"], {}, ("--epochs=9999999999", "1000000 at most")),
    (["run", "first-run", "--broken", "x"], {}, ("'--broken'", "did you mean --break?")),
    (["run", "article", "--rows", "-1"], {}, ("--rows=-1", "use 2.")),
    (["run", "shards-sampler", "--rows", "7"], {}, ("--rows=7", "use 4 or 8.")),
    (["run", "shards-ray-data", "--worker-batch", "0"], {}, ("--worker-batch=0", "1 or more")),
    (["run", "multi-node", "--storage", "s3://other/x"], {}, ("s3://other/x", "'lab' alone", "S3_BUCKET")),
    (
        ["run", "first-run", "--storage", "/etc/passwd/runs"],
        {"LAB_RUNTIME": "embedded"},
        ("LAB_STORAGE=/etc/passwd/runs", "/etc/passwd is a file"),
    ),
    (["run", "first-run"], {"S3_ENDPOINT": "http://x:1"}, ("S3_ENDPOINT=http://x:1", "LAB_STORE=external")),
    (["run", "first-run"], {"LAB_S3_PORT": "8265"}, ("LAB_S3_PORT=8265", "LAB_DASHBOARD_PORT")),
    (["up"], {"LAB_STORE": "external", "LAB_RUNTIME": "embedded"}, ("LAB_STORE=external", "S3_ENDPOINT")),
    (["status"], {"LAB_WORKER": "3"}, ("LAB_WORKER", "did you mean LAB_WORKERS?")),
    (["run", "first-run"], {"LAB_RUNTIME": "podman"}, ("LAB_RUNTIME='podman'", "embedded, compose")),
    (["up"], {"LAB_STORE": "ceph"}, ("LAB_STORE='ceph'", "minio, seaweedfs, external")),
    (
        ["run", "first-run"],
        {"LAB_RUNTIME": "compose"},
        ("LAB_RUNTIME=compose", "Docker", "LAB_RUNTIME=embedded"),
    ),
    (["up"], {"LAB_DASHBOARD_PORT": "70000"}, ("LAB_DASHBOARD_PORT='70000'", "65535")),
    (["results", "no-such-run"], {}, ("RUN='no-such-run'", "make results")),
    (["logs", "../.env"], {}, ("RUN='../.env'",)),
    (["submit", "no-such-folder", "python", "x.py"], {}, ("FOLDER='no-such-folder'", "no folder")),
    (["submit", "docs"], {}, ("'COMMAND...'", "lab --help")),
    (["submit", "", "true"], {}, ("FOLDER=''", "name the folder")),
    (["submit", "docs", " "], {}, ("COMMAND=' '", "is no program")),
    (["submit", "docs", "--help"], {}, ("COMMAND='--help'", "is no program")),
    (["submit", "docs", "--", "-c", "x"], {}, ("COMMAND='-c x'", "is no program")),
    (["submit", "docs", "echo \udcff"], {}, ("COMMAND='echo \\udcff'", "UTF-8")),
    (["submit", "/proc/self", "true"], {}, ("FOLDER='/proc/self' cannot be sent",)),
    (["submit", "docs", "python", "x.py"], {}, ("no cluster is up", "make up")),
    (["checkpoints", "clean"], {}, ("NAME is missing", "--all")),
    (["checkpoints", "clean", "mine", "--all"], {}, ("--all", "NAME='mine'")),
    (["checkpoints", "clean", "--all", "--whole", "--yes"], {}, ("--whole", "by name")),
    (["checkpoints", "clean", "../x"], {}, ("NAME='../x'", "letters")),
    (["run"], {}, ("'lesson'", "lab --help")),
    (["run", ""], {}, ("LESSON is missing", "make list")),
    (["rnu", "first-run"], {}, ("rnu", "lab --help")),
]


@pytest.mark.parametrize(
    ("words", "variables", "parts"), REFUSED, ids=[" ".join(case[0]) for case in REFUSED]
)
def test_a_mistake_is_one_sentence_and_nothing_is_started(
    root: Path, words: list[str], variables: Mapping[str, str], parts: tuple[str, ...]
) -> None:
    assert_refused(root, words, variables, parts)
    assert left(root) == set()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"RAY_AUTH_TOKEN": None}, ("RAY_AUTH_TOKEN is missing", "make setup")),
        ({"S3_ACCESS_KEY_ID": None}, ("S3_ACCESS_KEY_ID is missing", "make setup")),
        ({"S3_SECRET_ACCESS_KEY": SECRET}, ("S3_SECRET_ACCESS_KEY=***", "length")),
        ({"STORE_ROOT_PASSWORD": SECRET * 7}, ("STORE_ROOT_PASSWORD=***", "length")),
    ],
)
def test_a_damaged_env_file_is_one_sentence_and_left_alone(
    root: Path, change: dict[str, str | None], parts: tuple[str, ...]
) -> None:
    path = root / ".env"
    make_env_file(path)
    lines = [line for line in path.read_text().splitlines() if line.partition("=")[0] not in change]
    path.write_text("\n".join([*lines, *(f"{key}={value}" for key, value in change.items() if value)]) + "\n")
    before = path.read_text()
    assert_refused(root, ["run", "first-run"], {}, (*parts, str(path)))
    assert path.read_text() == before
    assert left(root) == set()


def test_a_line_of_the_env_file_that_is_no_assignment_is_named(root: Path) -> None:
    path = root / ".env"
    make_env_file(path)
    number = len(path.read_text().splitlines()) + 1
    with path.open("a") as file:
        file.write("this is = no\"t: an 'assignment\n")
    assert_refused(root, ["status"], {}, (str(path), f"line {number}", "NAME=value"))


def test_every_variable_that_the_compose_file_names_may_be_set(root: Path) -> None:
    names = set(re.findall(r"\bLAB_[A-Z_]+\b", (CHECKOUT / "docker-compose.yml").read_text()))
    assert len(names) > 8
    unset = dict.fromkeys(names, "") | {"LAB_ROOT": str(root)}
    assert lab(root, "status", **unset).code == 0


def test_secrets_that_others_may_read_are_a_warning(root: Path) -> None:
    assert "warning" not in lab(root, "setup").out
    (root / ".env").chmod(0o644)
    assert "chmod 600" in lab(root, "setup").out


def test_a_reader_that_goes_away_is_no_failed_claim(root: Path) -> None:
    program = "from lab.__main__ import main; main()"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program, "list"],
        env=os.environ | {"LAB_ROOT": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=CHECKOUT,
    ) as command:
        assert command.stdout
        command.stdout.close()
        assert command.stderr
        said = command.stderr.read().decode()
        assert command.wait(20) == INTERRUPTED
    assert "Traceback" not in said


def test_the_help_of_run_shows_a_lesson_s_own_options(root: Path) -> None:
    assert "--global-batch" in lab(root, "run", "first-run", "--help").out
    assert "--global-batch" not in lab(root, "run", "--help").out


def test_data_behind_a_link_is_left_alone(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("mine")
    (root / "results").symlink_to(elsewhere)
    (root / ".lab" / "logs").mkdir(parents=True)
    answer = lab(root, "clean-data", "--yes")
    assert answer.code == 0, answer
    assert f"leaving alone link {root / 'results'} to {elsewhere}" in answer.out
    assert (elsewhere / "kept").read_text() == "mine"
    assert not (root / ".lab" / "logs").exists()


def test_setup_makes_the_env_file_once_and_prints_no_secret(root: Path) -> None:
    first = lab(root, "setup")
    content = (root / ".env").read_text()
    second = lab(root, "setup")
    assert (first.code, second.code) == (0, 0)
    assert "mode 600" in first.out
    assert "left as it is" in second.out
    assert (root / ".env").read_text() == content
    for line in content.splitlines():
        key, _, value = line.partition("=")
        if key.endswith(("PASSWORD", "SECRET_ACCESS_KEY", "TOKEN")):
            assert value not in first.out + first.err + second.out + second.err


def test_list_names_are_the_registry(root: Path) -> None:
    answer = lab(root, "list", "--names")
    assert (answer.code, answer.out.split()) == (0, list(lessons()))
    assert left(root) == set()


def test_without_a_cluster_status_down_and_results_are_calm(root: Path) -> None:
    for words, said in (
        (["status"], "nothing is up"),
        (["down"], "nothing is up"),
        (["results"], "no results yet"),
    ):
        answer = lab(root, *words)
        assert answer.code == 0, answer
        assert said in answer.out


def test_choose_prints_the_runtime_alone_and_the_reason_beside_it(root: Path) -> None:
    answer = lab(root, "choose", LAB_RUNTIME="auto")
    assert (answer.code, answer.out) == (0, "embedded\n")
    assert "no containers here" in answer.err


def _catches(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), 16)
    return bool(caught >> (number - 1) & 1)


@pytest.fixture
def silent_store() -> Iterator[str]:
    """An endpoint that takes every connection and answers none: a command that asks it is at work for seconds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc when the command listens")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("later_s", [0.0, 0.3, 1.0])
def test_an_interrupted_command_says_so_from_its_first_moment_on(
    root: Path, number: signal.Signals, later_s: float, silent_store: str
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "lab", "up"],
        cwd=root,
        env={
            **os.environ,
            "LAB_ROOT": str(root),
            "PYTHONPATH": str(CHECKOUT),
            "LAB_RUNTIME": "embedded",
            "LAB_STORE": "external",
            "S3_ENDPOINT": silent_store,
            "S3_ACCESS_KEY_ID": "training",
            "S3_SECRET_ACCESS_KEY": "not-asked-for",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        limit = time.monotonic() + 10
        while not _catches(process, signal.SIGHUP) and time.monotonic() < limit:
            time.sleep(0.005)
        time.sleep(later_s)
        process.send_signal(number)
        _, said = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "interrupted." in said
    assert "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_after_the_answer_changes_nothing(root: Path, number: signal.Signals) -> None:
    """Python's own end takes tens of milliseconds: a signal in it killed the process (-2) after a whole answer."""
    program = f"import atexit, os, lab.__main__; atexit.register(os.kill, os.getpid(), {number.value}); lab.__main__.main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "status"],
        cwd=root,
        env={**os.environ, "LAB_ROOT": str(root), "PYTHONPATH": str(CHECKOUT), "LAB_RUNTIME": "embedded"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "nothing is up" in ended.stdout


def test_an_interrupt_in_code_made_from_text_ends_as_any_other(root: Path) -> None:
    """CPython marks it in `run_eval_code_obj`, and killed the process (-2) though it was answered."""
    (root / "program.py").write_text(
        "import lab.__main__, lab.cli\n"
        "lab.cli.app = lambda **_: exec('raise KeyboardInterrupt')\n"
        "lab.__main__.main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "program"],  # with -c, Python does not look for the mark
        cwd=root,
        env={**os.environ, "LAB_ROOT": str(root), "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (INTERRUPTED, "interrupted.\n")
