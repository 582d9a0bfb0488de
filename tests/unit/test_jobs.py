"""Jobs over HTTP, against a stand-in for Ray's dashboard."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lab import jobs
from lab.channel import Receiver, frame
from lab.errors import EnvironmentBroken, UserError
from lab.jobs import OWN, JobsClient, run_job, run_own

TOKEN = "t0ken-of-the-cluster"
DOCUMENT = {"text": "".join(chr(33 + i * 7919 % 9000) for i in range(9000))}


class Dashboard:
    """Answers the Jobs API from a script: each poll of the log shows one more stage of it."""

    def __init__(self, *stages: str, status: str = "SUCCEEDED", endless: bool = False) -> None:
        self.stages = stages
        self.status = status
        self.endless = endless
        self.polls = 0
        self.file = b""
        """The log as a file, for whoever cannot have it as text."""
        self.fails: list[int] = []
        """Status codes for the next requests, instead of an answer."""
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        self.url = ""

    @property
    def calls(self) -> list[str]:
        return [f"{method} {path}" for method, path, _, _ in self.requests]

    def answer(self, method: str, path: str) -> Any:
        if method == "POST" and path == "/api/jobs/":
            return {"submission_id": self.requests[-1][3]["submission_id"]}
        if path.endswith("/stop"):
            return {"stopped": True}
        last = len(self.stages) - 1
        if path.endswith("/logs"):
            shown = self.stages[: self.polls + 1]
            self.polls += 1
            return {"logs": "".join(shown)}
        done = self.polls >= last and not self.endless
        return {
            "status": self.status if done else "RUNNING",
            "message": "its end",
            "driver_node_id": "node-1",
        }


@contextmanager
def serving(dashboard: Dashboard) -> Iterator[Dashboard]:
    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            content = self.rfile.read(size)
            body = json.loads(content) if self.headers.get_content_type() == "application/json" else content
            dashboard.requests.append((self.command, self.path, dict(self.headers), body))
            code = dashboard.fails.pop(0) if dashboard.fails else 200
            self.send_response(code)
            self.end_headers()
            if code >= 400:
                self.wfile.write(b"it broke")
            elif self.path.startswith("/api/v0/logs/file"):
                self.wfile.write(dashboard.file)
            else:
                self.wfile.write(json.dumps(dashboard.answer(self.command, self.path)).encode())

        do_GET = do_POST = do_PUT = handle_any

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the test looks at `requests`."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    dashboard.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield dashboard
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "POLL_S", 0.01)
    monkeypatch.setattr(jobs, "UNREACHABLE_LIMIT_S", 0.3)


def framed(document: dict[str, Any]) -> str:
    return "".join(line + "\n" for line in frame(document))


def run(
    dashboard: Dashboard, log: Path, say: Callable[[str], Any] = print, limit_s: float = 5
) -> dict[str, Any]:
    client = JobsClient(dashboard.url, TOKEN)
    return run_job(client, "first_run", {"run": "mine"}, log=log, say=say, limit_s=limit_s)


def test_a_job_is_submitted_followed_and_its_document_returned(tmp_path: Path) -> None:
    text = "one\ntwo\n" + framed(DOCUMENT) + "three\n"
    stages = [text[start : start + 1000] for start in range(0, len(text), 1000)]  # cut inside lines
    lines: list[str] = []
    with serving(Dashboard(*stages)) as dashboard:
        assert run(dashboard, tmp_path / "logs" / "mine.log", lines.append) == DOCUMENT
    assert len(stages) > 5
    assert lines == ["one", "two", "three"]
    assert (tmp_path / "logs" / "mine.log").read_text() == "one\ntwo\nthree\n"


def test_the_last_line_counts_without_a_line_end(tmp_path: Path) -> None:
    lines: list[str] = []
    with serving(Dashboard(framed({"a": 1}), "la", "st")) as dashboard:
        assert run(dashboard, tmp_path / "log", lines.append) == {"a": 1}
    assert lines == ["last"]


def test_the_token_travels_in_a_header_alone_and_the_request_is_quoted(tmp_path: Path) -> None:
    request = {"run": "it's $HOME; `id`"}
    with serving(Dashboard(framed({"a": 1}))) as dashboard:
        client = JobsClient(dashboard.url, TOKEN)
        run_job(client, "first_run", request, log=tmp_path / "log", say=print, limit_s=5)
    for _, path, headers, body in dashboard.requests:
        assert headers["Authorization"] == f"Bearer {TOKEN}"
        assert TOKEN not in f"{path}{body}"
    words = shlex.split(dashboard.requests[0][3]["entrypoint"])
    assert words[-3:-1] == ["lab.observe", "first_run"]
    assert json.loads(words[-1]) == request


@pytest.mark.parametrize("code", [401, 403])
def test_a_foreign_token_is_the_user_s_to_mend_and_is_not_shown(tmp_path: Path, code: int) -> None:
    with serving(Dashboard()) as dashboard:
        dashboard.fails = [code]
        with pytest.raises(UserError, match=r"^RAY_AUTH_TOKEN in \.env is not the token") as caught:
            run(dashboard, tmp_path / "log")
    assert TOKEN not in str(caught.value)


def test_a_server_error_at_submission_is_told_with_what_it_said(tmp_path: Path) -> None:
    with serving(Dashboard()) as dashboard:
        dashboard.fails = [500]
        with pytest.raises(EnvironmentBroken, match="answered 500 to POST /api/jobs/: it broke"):
            run(dashboard, tmp_path / "log")


def test_a_cluster_that_is_gone_is_told(tmp_path: Path) -> None:
    with serving(Dashboard()) as dashboard:
        pass
    with pytest.raises(EnvironmentBroken, match=f"Jobs API at {dashboard.url} does not answer"):
        run(dashboard, tmp_path / "log")


def test_a_short_outage_while_a_job_runs_is_survived(tmp_path: Path) -> None:
    with serving(Dashboard("one\n", framed({"a": 1}))) as dashboard:
        client = JobsClient(dashboard.url, TOKEN)
        client.observe(job := "job-1", "first_run", {})
        dashboard.fails = [500, 503, 500]
        outcome = client.follow(job, tmp_path / "log", print, 5, Receiver())
    assert (outcome.status, outcome.document) == ("SUCCEEDED", {"a": 1})


def test_a_long_outage_while_a_job_runs_ends_within_its_limit(tmp_path: Path) -> None:
    with serving(Dashboard("one\n", endless=True)) as dashboard:
        client = JobsClient(dashboard.url, TOKEN)
        client.observe(job := "job-1", "first_run", {})
        dashboard.fails = [500] * 10_000
        began = time.monotonic()
        with pytest.raises(EnvironmentBroken, match=r"did not answer for .* while job job-1 ran"):
            client.follow(job, tmp_path / "log", print, 60)
    assert time.monotonic() - began < 5


def test_a_job_that_never_ends_is_stopped_at_its_limit(tmp_path: Path) -> None:
    with (
        serving(Dashboard("one\n", endless=True)) as dashboard,
        pytest.raises(
            EnvironmentBroken, match=r"job lab-[0-9a-f-]+ did not end within 0 s and was stopped; see .*log"
        ),
    ):
        run(dashboard, tmp_path / "log", limit_s=0.2)
    assert re.fullmatch(r"POST /api/jobs/lab-[0-9a-f-]+/stop", dashboard.calls[-1])
    assert (tmp_path / "log").read_text() == "one\n"


def interrupt(line: str) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_stops_the_job(tmp_path: Path) -> None:
    with serving(Dashboard("one\n", endless=True)) as dashboard, pytest.raises(KeyboardInterrupt):
        run(dashboard, tmp_path / "log", interrupt)
    assert re.fullmatch(r"POST /api/jobs/lab-[0-9a-f-]+/stop", dashboard.calls[-1])


@pytest.mark.parametrize(
    ("kind", "error"),
    [("user", UserError), ("environment", EnvironmentBroken), ("broken", EnvironmentBroken)],
)
def test_an_error_document_becomes_its_error(tmp_path: Path, kind: str, error: type[Exception]) -> None:
    text = framed({"error": {"kind": kind, "message": "the store is closed"}})
    with (
        serving(Dashboard(text, status="FAILED")) as dashboard,
        pytest.raises(error, match=r"^the store is closed") as caught,
    ):
        run(dashboard, tmp_path / "log")
    assert type(caught.value) is error
    assert (str(tmp_path / "log") in str(caught.value)) == (kind != "user")


@pytest.mark.parametrize("status", ["FAILED", "STOPPED", "SUCCEEDED"])
def test_a_job_without_a_document_is_an_error_whatever_its_status(tmp_path: Path, status: str) -> None:
    torn = framed(DOCUMENT)[:-10]
    with (
        serving(Dashboard("Killed\n", torn, status=status)) as dashboard,
        pytest.raises(EnvironmentBroken, match=f"ended as {status} without handing back what it saw; see "),
    ):
        run(dashboard, tmp_path / "log")


def own(dashboard: Dashboard, logs: Path, line: Callable[[str], object] = print) -> jobs.JobOutcome:
    client = JobsClient(dashboard.url, TOKEN)
    return run_own(client, "python a.py 'b c'", b"zip", {"A": "1"}, logs=logs, say=print, line=line)


def test_a_program_of_the_user_s_travels_once_and_starts_in_its_folder(tmp_path: Path) -> None:
    lines: list[str] = []
    with serving(Dashboard("one\n", "two\n")) as dashboard:
        dashboard.fails = [404]
        outcome = own(dashboard, tmp_path / "new", lines.append)
        again = own(dashboard, tmp_path / "new")
    place = f"/api/packages/gcs/_ray_pkg_{hashlib.sha256(b'zip').hexdigest()[:16]}.zip"
    packages = [(method, body) for method, path, _, body in dashboard.requests if path == place]
    assert packages == [("GET", b""), ("PUT", b"zip"), ("GET", b"")]
    started = [
        body for method, path, _, body in dashboard.requests if (method, path) == ("POST", "/api/jobs/")
    ]
    assert [job["submission_id"] for job in started] == [outcome.id, again.id]
    assert outcome.id.startswith(OWN)
    assert outcome.id != again.id
    for job in started:
        assert job["entrypoint"] == "python a.py 'b c'"
        assert job["runtime_env"] == {
            "working_dir": place.replace("/api/packages/gcs/", "gcs://"),
            "env_vars": {"A": "1"},
        }
    assert lines == ["one", "two"]
    assert (tmp_path / "new" / f"{outcome.id}.log").read_text() == "one\ntwo\n"
    assert (outcome.status, outcome.message) == ("SUCCEEDED", "its end")


def test_a_log_that_is_no_text_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    lines: list[str] = []
    with serving(Dashboard("")) as dashboard:
        dashboard.file = b"a\xffb\r\nlast"
        # the package asked for and sent, the job, its status; then the log
        dashboard.fails = [404, 200, 200, 200, 500]
        outcome = own(dashboard, tmp_path, lines.append)
    assert lines == ["a\ufffdb", "last"]
    place = f"node_id=node-1&filename=job-driver-{outcome.id}.log"
    assert f"GET /api/v0/logs/file?{place}&lines=-1" in dashboard.calls


def test_a_cluster_that_knows_no_such_job_any_more_is_told_at_once(tmp_path: Path) -> None:
    with serving(Dashboard("one\n", endless=True)) as dashboard:
        dashboard.fails = [200, 200, 404]  # the package, the job; then its status
        with pytest.raises(
            EnvironmentBroken, match=rf"knows no job {OWN}.* any more: it was ended, or started anew"
        ):
            own(dashboard, tmp_path)


def test_every_line_of_a_program_of_the_user_s_is_shown_even_the_labs_own_kind(tmp_path: Path) -> None:
    lines: list[str] = []
    with serving(Dashboard(framed({"a": 1}) + "note: LAB-DOCUMENT ² ² x y\n")) as dashboard:
        own(dashboard, tmp_path, lines.append)
    assert lines == [*framed({"a": 1}).splitlines(), "note: LAB-DOCUMENT ² ² x y"]


def test_an_interrupt_while_the_job_is_on_its_way_in_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Late(Dashboard):
        def answer(self, method: str, path: str) -> Any:
            if path.endswith("/stop"):
                return {"stopped": len([call for call in self.calls if call.endswith("/stop")]) > 1}
            return super().answer(method, path)

    client_start = JobsClient._start

    def start(self: JobsClient, job: dict[str, Any]) -> None:
        client_start(self, job)
        raise KeyboardInterrupt

    monkeypatch.setattr(JobsClient, "_start", start)
    with serving(Late("one\n", endless=True)) as dashboard, pytest.raises(KeyboardInterrupt):
        own(dashboard, tmp_path)
    stops = [call for call in dashboard.calls if call.endswith("/stop")]
    assert len(stops) == 2
    assert re.search(rf"job {OWN}\S+: stopped", capsys.readouterr().out)


def test_an_interrupt_while_the_cluster_is_gone_says_that_the_job_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "STOP_LIMIT_S", 0.1)

    def lose_and_interrupt(line: str) -> None:
        dashboard.fails = [500] * 1000
        raise KeyboardInterrupt

    with serving(Dashboard("one\n", endless=True)) as dashboard, pytest.raises(KeyboardInterrupt):
        own(dashboard, tmp_path, lose_and_interrupt)
    assert "could not be stopped: it may still run" in capsys.readouterr().out


def test_an_interrupt_stops_the_program_of_the_user_s(tmp_path: Path) -> None:
    with serving(Dashboard("one\n", endless=True)) as dashboard, pytest.raises(KeyboardInterrupt):
        own(dashboard, tmp_path, interrupt)
    assert re.fullmatch(rf"POST /api/jobs/{OWN}[0-9a-f-]+/stop", dashboard.calls[-1])
