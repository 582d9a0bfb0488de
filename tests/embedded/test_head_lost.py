"""C10: the head is killed in the middle of a run; a new head and driver go on from S3 under the run's own name."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from minio.error import S3Error

from lab.lessons.first_run import FirstRun
from lab.runtimes import _processes, _state
from lab.runtimes.embedded import EmbeddedRuntime
from lab.settings import Settings, load_settings
from lab.store import probe

pytestmark = pytest.mark.embedded

RUN = "c10"
LIMIT_S = 120.0


@dataclass(frozen=True)
class Lab:
    """A root of its own."""

    root: Path
    settings: Settings
    runtime: EmbeddedRuntime

    def start(self, epochs: int) -> str:
        """Submit lesson `first-run` under the name c10 with its storage in the bucket; the job's URL."""
        access = self.runtime.up(print)
        params = asdict(replace(FirstRun(), epochs=epochs, name=RUN))
        request = json.dumps({"run": RUN, "storage": "s3://lab/runs", "params": params})
        made = requests.post(
            f"{access.dashboard}/api/jobs/",
            headers=self._headers,
            json={"entrypoint": f"{sys.executable} -m lab.observe first_run '{request}'"},
            timeout=30,
        )
        made.raise_for_status()
        return f"{access.dashboard}/api/jobs/{made.json()['submission_id']}"

    def ended(self, job: str) -> bool:
        status = requests.get(job, headers=self._headers, timeout=10).json()["status"]
        return status in ("SUCCEEDED", "FAILED", "STOPPED")

    def log(self, job: str) -> str:
        return str(requests.get(f"{job}/logs", headers=self._headers, timeout=10).json()["logs"])

    def committed(self) -> int:
        """The number of epochs that the snapshot in the bucket knows of, read by the store's own client."""
        access = self.runtime.access() or self.runtime.up(print)
        store = probe.client(self.settings.store_access(access.store))
        try:
            response = store.get_object("lab", f"runs/{RUN}/checkpoint_manager_snapshot.json")
        except S3Error as error:
            if error.code == "NoSuchKey":
                return 0
            raise
        try:
            latest: dict[str, Any] | None = json.loads(response.read())["latest_checkpoint_result"]
        finally:
            response.close()
            response.release_conn()
        return latest["metrics"]["epoch"] + 1 if latest else 0

    def kill_head(self) -> None:
        found = _state.load(self.root / ".lab" / "embedded.json")
        assert found is not None
        head = next(record for record in found.records if record.name == "head").process()
        assert head is not None
        for process in [*head.children(recursive=True), head]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.settings.ray_auth_token.get_secret_value()}"}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    for name in ("LAB_DASHBOARD_PORT", "LAB_S3_PORT"):  # the session's own cluster, of another root, has them
        monkeypatch.delenv(name, raising=False)
    settings = load_settings(tmp_path / ".env", nodes=1, node_cpus=2, store="seaweedfs")
    runtime = EmbeddedRuntime(settings, tmp_path)
    try:
        yield Lab(tmp_path, settings, runtime)
    finally:
        runtime.down(print)


def test_c10_after_the_heads_death_a_new_driver_resumes_from_the_store(lab: Lab) -> None:
    lab.start(epochs=500)
    assert _processes.wait_until(lambda: lab.committed() >= 3, LIMIT_S, pause_s=0.5)
    lab.kill_head()
    assert _processes.wait_until(lambda: lab.runtime.access() is None, 20)
    committed = lab.committed()  # starts a new head, on the same bucket
    assert 3 <= committed < 500
    job = lab.start(epochs=committed + 1)
    assert _processes.wait_until(lambda: lab.ended(job), LIMIT_S, pause_s=0.5)
    log = lab.log(job)
    assert f"resuming {RUN} at epoch {committed}" in log, log[-3000:]
    assert lab.committed() == committed + 1
