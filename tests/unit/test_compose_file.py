"""The Compose files and what the runtime reads from the engine. No engine needed."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from lab.errors import UserError
from lab.runtimes import compose as runtime
from lab.runtimes.choice import Choice, choose
from lab.runtimes.compose import ComposeRuntime, port_taken
from lab.runtimes.engine import Output, engine_problem, version_of
from lab.runtimes.images import build_environment, certificate_bundle, pins
from lab.runtimes.node import listed_alive, start_command
from lab.runtimes.project import SOURCE, Container, environment, files, parse_container
from lab.runtimes.protocol import Runtime
from lab.settings import Settings, load_settings

COMPOSE: dict[str, Any] = yaml.safe_load((SOURCE / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
SECRET_NAMES = {"STORE_ROOT_USER", "STORE_ROOT_PASSWORD"}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name in ("S3_ENDPOINT", "LAB_STORE", "COMPOSE_PROJECT_NAME"):
        monkeypatch.delenv(name, raising=False)
    return load_settings(tmp_path / ".env")


class TestFile:
    def test_services(self) -> None:
        assert set(SERVICES) == {"head", "worker", "minio", "bucket"}

    @pytest.mark.parametrize("name", sorted(SERVICES))
    def test_every_service_is_contained(self, name: str) -> None:
        service = SERVICES[name]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["init"] is True
        assert service["networks"] == ["lab"]
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}
        assert "container_name" not in service
        assert "privileged" not in service

    @pytest.mark.parametrize("name", ["head", "worker", "bucket"])
    def test_what_runs_our_code_is_a_normal_user(self, name: str) -> None:
        assert SERVICES[name]["user"] == "1000:1000"

    def test_nothing_is_published_beyond_loopback(self) -> None:
        ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
        assert len(ports) == 2
        assert all(port.startswith("127.0.0.1:") for port in ports)
        assert "ports" not in SERVICES["worker"]

    def test_root_credentials_reach_the_store_and_its_job_alone(self) -> None:
        for name, service in SERVICES.items():
            holds = any(secret in str(service["environment"]) for secret in SECRET_NAMES)
            assert holds == (name in {"minio", "bucket"})

    def test_both_kinds_of_node_share_token_and_store(self) -> None:
        head, worker = SERVICES["head"]["environment"], SERVICES["worker"]["environment"]
        assert head == worker
        assert head["RAY_AUTH_MODE"] == "token"
        assert head["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?")

    def test_every_secret_is_required_with_the_way_to_make_it(self) -> None:
        text = (SOURCE / "docker-compose.yml").read_text() + (
            SOURCE / "images/seaweedfs/compose.yml"
        ).read_text()
        for name in ("S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY", "STORE_ROOT_USER", "STORE_ROOT_PASSWORD"):
            uses = re.findall(rf"\$\{{{name}([^}}]*)\}}", text)
            assert uses
            assert all(use.startswith(":?") and "make setup" in use for use in uses)

    def test_local_storage_is_the_heads_alone(self) -> None:
        assert "local:/lab/storage" in SERVICES["head"]["volumes"]
        assert all("/lab/storage" not in volume for volume in SERVICES["worker"]["volumes"])

    def test_store_is_read_only_but_for_its_volume(self) -> None:
        assert SERVICES["minio"]["read_only"] is True
        assert SERVICES["minio"]["tmpfs"] == ["/tmp"]
        assert SERVICES["minio"]["volumes"] == ["store:/data"]

    def test_order_of_start(self) -> None:
        assert SERVICES["worker"]["depends_on"] == {"head": {"condition": "service_healthy"}}
        assert SERVICES["head"]["depends_on"] == {"bucket": {"condition": "service_completed_successfully"}}
        assert SERVICES["bucket"]["depends_on"] == {"minio": {"condition": "service_healthy"}}

    def test_nodes_have_time_to_drain_and_room_for_objects(self) -> None:
        for name in ("head", "worker"):
            assert SERVICES[name]["stop_grace_period"] == "40s"
            assert SERVICES[name]["shm_size"] == "${LAB_SHM_SIZE:-1gb}"

    def test_every_variable_is_in_the_header_with_its_default(self) -> None:
        text = (SOURCE / "docker-compose.yml").read_text()
        header, _, body = text.partition("\nx-logging")
        for name, default in re.findall(r"\$\{([A-Z0-9_]+)(?::?-([^}]*))?", body):
            line = next(
                (row for row in header.splitlines() if re.match(rf"# ([A-Z0-9_]+, )*{name}\b", row)), ""
            )
            assert line, f"{name} is not in the header"
            if default and "://download" not in default and not default.startswith(("./", "/dev")):
                assert default in line

    def test_no_registry_that_is_gone(self) -> None:
        assert SERVICES["minio"]["image"] == "${MINIO_IMAGE:-pgsty/silo:RELEASE.2026-09-16T00-00-00Z}"


class TestEnvironment:
    def test_settings_win_and_stray_compose_variables_do_not(self, settings: Settings) -> None:
        base = {"COMPOSE_FILE": "other.yml", "COMPOSE_PROFILES": "x", "LAB_NODES": "9", "PATH": "/bin"}
        found = environment(settings, base)
        assert found["LAB_NODES"] == "2"
        assert found["S3_ENDPOINT"] == "http://minio:9000"
        assert found["PATH"] == "/bin"
        assert not {"COMPOSE_FILE", "COMPOSE_PROFILES"} & found.keys()

    def test_external_needs_an_endpoint(self, settings: Settings) -> None:
        with pytest.raises(UserError, match="LAB_STORE=external needs S3_ENDPOINT"):
            environment(settings.model_copy(update={"store": "external"}))

    def test_own_store_refuses_a_foreign_endpoint(self, settings: Settings) -> None:
        with pytest.raises(UserError, match="S3_ENDPOINT=http://elsewhere:1 is set, but LAB_STORE=minio"):
            environment(settings.model_copy(update={"s3_endpoint": "http://elsewhere:1"}))

    @pytest.mark.parametrize(
        ("store", "override"), [("seaweedfs", "images/seaweedfs"), ("external", "images/external")]
    )
    def test_override_of_a_store(self, settings: Settings, store: str, override: str) -> None:
        options = files(settings.model_copy(update={"store": store}))
        assert options[-1] == str(SOURCE / override / "compose.yml")
        assert Path(options[-1]).is_file()
        assert files(settings)[-1] == str(SOURCE / "docker-compose.yml")


class TestImages:
    def test_pins_change_with_the_lock_and_not_with_the_lab(self, tmp_path: Path) -> None:
        for name in ("pyproject.toml", "requirements.lock", "lab/store/seaweedfs.py"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes((SOURCE / name).read_bytes())
        for folder in ("ray", "seaweedfs"):
            (tmp_path / "images" / folder).mkdir(parents=True)
            (tmp_path / "images" / folder / "Dockerfile").write_text("FROM scratch\n")
        first = pins(tmp_path)
        (tmp_path / "lab" / "other.py").write_text("x = 1\n")
        assert pins(tmp_path) == first
        with (tmp_path / "requirements.lock").open("a") as lock:
            lock.write("six==1.17.0\n")
        assert pins(tmp_path) != first

    def test_certificates_come_from_what_pip_was_told(self, tmp_path: Path) -> None:
        bundle = tmp_path / "ca.pem"
        bundle.write_text("certificates")
        assert certificate_bundle({"PIP_CERT": "", "SSL_CERT_FILE": str(bundle)}) == str(bundle)
        assert certificate_bundle({"PIP_CERT": str(tmp_path / "gone")}) is None

    def test_the_users_word_on_torch_wins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        said = subprocess.CompletedProcess([], 0, "LAB_WHEELS=/wheels\nLAB_TORCH_INDEX=\n", "")
        monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: said)
        found = build_environment({"LAB_TORCH_INDEX": "https://mirror.example/cpu", "LAB_CA_FILE": "/x"})
        assert found["LAB_TORCH_INDEX"] == "https://mirror.example/cpu"
        assert found["LAB_CA_FILE"] == "/x"
        assert found["LAB_WHEELS"] == "/wheels"

    def test_lock_pins_what_the_project_pins(self) -> None:
        lock = (SOURCE / "requirements.lock").read_text().splitlines()
        for pin in ("ray==2.60.0", "torch==2.13.0", "pyarrow==26.0.1", "s3fs==2026.9.0", "minio==7.2.20"):
            assert pin in lock


class TestNode:
    @pytest.mark.parametrize("role", ["head", "worker"])
    def test_start_command(self, role: str) -> None:
        environ = {"LAB_NODE_CPUS": "3", "LAB_OBJECT_STORE_MEMORY": "1000", "RAY_AUTH_TOKEN": "token"}
        command = start_command(role, "172.18.0.9", environ)
        assert {"--num-cpus=3", "--node-ip-address=172.18.0.9", f"--labels=lab-role={role}"} <= set(command)
        assert {"--disable-usage-stats", "--block"} <= set(command)
        assert ("--head" in command) == (role == "head")
        assert ("--address=head:6379" in command) == (role == "worker")
        assert not any("token" in argument for argument in command)

    def test_alive_is_by_address_and_state(self) -> None:
        nodes = [{"node_ip": "10.0.0.1", "state": "DEAD"}, {"node_ip": "10.0.0.2", "state": "ALIVE"}]
        document = {"data": {"result": {"result": nodes}}}
        assert listed_alive(document, "10.0.0.2")
        assert not listed_alive(document, "10.0.0.1")
        assert not listed_alive(document, "10.0.0.3")


class TestEngine:
    @pytest.mark.parametrize(
        ("text", "version"),
        [("2.26.1-4", (2, 26)), ("v2.40.3", (2, 40)), ("26.1.5+dfsg1", (26, 1)), ("dev", None)],
    )
    def test_version(self, text: str, version: tuple[int, int] | None) -> None:
        assert version_of(text) == version

    @pytest.mark.parametrize(
        ("server", "plugin", "said"),
        [
            (Output(None, "", "no answer"), Output(0, "2.26.1", ""), "no Docker engine answers"),
            (Output(1, "", "permission denied"), Output(0, "2.26.1", ""), "group docker"),
            (Output(0, "20.10.1", ""), Output(0, "2.26.1", ""), "version 20.10.1, too old"),
            (Output(0, "26.1.5", ""), Output(1, "", "unknown command"), "no Compose plugin"),
            (Output(0, "26.1.5", ""), Output(0, "2.25.0", ""), "version 2.25.0, too old"),
        ],
    )
    def test_problem_is_one_sentence_with_the_way_out(
        self, monkeypatch: pytest.MonkeyPatch, server: Output, plugin: Output, said: str
    ) -> None:
        monkeypatch.delenv("DOCKER_HOST", raising=False)
        monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(
            "lab.runtimes.engine.call", lambda arguments, **_: server if arguments[0] == "version" else plugin
        )
        problem = engine_problem()
        assert problem is not None
        assert said in problem
        assert "LAB_RUNTIME=embedded" in problem

    def test_no_problem(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr("lab.runtimes.engine.call", lambda arguments, **_: Output(0, "26.1.5", ""))
        assert engine_problem() is None

    def test_no_docker_at_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shutil.which", lambda name: None)
        assert "not on the PATH" in (engine_problem() or "")


HEAD = Container(
    "head",
    "x-head-1",
    "running",
    "Up 3 minutes (healthy)",
    {8265: 18265},
    {"lab.node-cpus": "3", "lab.s3-endpoint": "http://minio:9000", "lab.store": "seaweedfs"},
)
STORE = Container("minio", "x-minio-1", "running", "Up 3 minutes (healthy)", {9000: 19000}, {})
WORKER = Container("worker", "x-worker-1", "running", "Up 3 minutes (healthy)", {}, {})
BUCKET = Container("bucket", "x-bucket-1", "exited", "Exited (0) 3 minutes ago", {}, {})


class TestRuntime:
    @pytest.fixture
    def up(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> ComposeRuntime:
        monkeypatch.setattr(runtime, "engine_problem", lambda: None)
        monkeypatch.setattr(runtime, "containers", lambda project: [BUCKET, HEAD, STORE, WORKER, WORKER])
        return ComposeRuntime(settings)

    @pytest.fixture
    def started(self, monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
        """The settings with which Compose was called, in place of the calls."""
        calls: list[Settings] = []

        def start(settings: Settings, *args: object, **kwargs: object) -> Output:
            calls.append(settings)
            return Output(0, "", "")

        monkeypatch.setattr(runtime, "obtain", lambda *args: None)
        monkeypatch.setattr(runtime, "compose", start)
        monkeypatch.setattr(ComposeRuntime, "_need_answer", lambda self, access: None)
        return calls

    def test_is_a_runtime(self, settings: Settings) -> None:
        one: Runtime = ComposeRuntime(settings)
        assert one.verbs == {"up", "down", "status", "submit"}

    def test_access_is_read_from_what_runs(self, up: ComposeRuntime) -> None:
        access = up.access()
        assert access is not None
        assert access.dashboard == "http://127.0.0.1:18265"
        assert access.store == "http://127.0.0.1:19000"
        assert (access.nodes, access.node_cpus, access.shared_disk) == (2, 3, False)

    def test_a_cluster_that_is_up_is_found_and_taken_as_it_is(
        self, up: ComposeRuntime, started: list[Settings], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lab.runtimes.choice.engine_problem", lambda: None)
        monkeypatch.setattr("lab.runtimes.embedded.EmbeddedRuntime.access", lambda self: None)
        assert up.settings.store == "minio"
        assert choose(up.settings) == Choice("compose", "its cluster is up")
        assert up.up(print) == up.access()
        assert started == []
        ComposeRuntime(up.settings.model_copy(update={"nodes": 3})).up(print)
        (asked,) = started
        assert (asked.nodes, asked.node_cpus, asked.store) == (3, 3, "seaweedfs")
        assert (asked.dashboard_port, asked.s3_port) == (18265, 19000)

    def test_a_cluster_with_a_dead_worker_is_started_again_as_it_was(
        self, up: ComposeRuntime, started: list[Settings], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dead = Container("worker", "x-worker-2", "exited", "Exited (137) 3 minutes ago", {}, {})
        monkeypatch.setattr(runtime, "containers", lambda project: [BUCKET, HEAD, STORE, WORKER, dead])
        up.up(print)
        assert [(each.nodes, each.store) for each in started] == [(2, "seaweedfs")]

    def test_no_access_while_the_head_is_not_healthy(
        self, up: ComposeRuntime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        starting = Container("head", "x", "running", "Up 1 second (health: starting)", {8265: 1}, {})
        monkeypatch.setattr(runtime, "containers", lambda project: [starting])
        assert up.access() is None

    def test_status(self, up: ComposeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
        assert [(part.name, part.state) for part in up.status()][:2] == [
            ("x-bucket-1", "done"),
            ("x-head-1", "healthy"),
        ]
        monkeypatch.setattr(runtime, "containers", lambda project: [BUCKET])
        assert up.status() == []

    def test_no_engine_is_the_users_to_mend(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(runtime, "engine_problem", lambda: "no Docker engine answers.")
        one = ComposeRuntime(settings)
        with pytest.raises(UserError, match="LAB_RUNTIME=compose cannot work: no Docker engine answers"):
            one.up(lambda line: None)
        assert one.access() is None
        assert one.status() == []

    def test_a_taken_port_is_refused_before_anything_starts(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[object] = []
        monkeypatch.setattr(runtime, "engine_problem", lambda: None)
        monkeypatch.setattr(runtime, "containers", lambda project: [])
        monkeypatch.setattr(runtime, "obtain", lambda *args: calls.append(args))
        monkeypatch.setattr(runtime, "compose", lambda *args, **kwargs: calls.append(args))
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            assert port_taken(port)
            one = ComposeRuntime(settings.model_copy(update={"s3_port": port, "dashboard_port": port - 1}))
            monkeypatch.setattr(runtime, "port_taken", lambda wanted: wanted == port)
            with pytest.raises(UserError, match=f"LAB_S3_PORT={port} is taken"):
                one.up(lambda line: None)
        assert calls == []

    def test_one_port_for_two_things_is_refused(self, up: ComposeRuntime) -> None:
        both = ComposeRuntime(up.settings.model_copy(update={"s3_port": 8265}))
        with pytest.raises(UserError, match="LAB_S3_PORT=8265 is LAB_DASHBOARD_PORT too"):
            both.up(lambda line: None)

    def test_a_failed_start_takes_down_what_it_began_and_names_the_part(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        state: list[Container] = []
        failed = Container("bucket", "x-bucket-1", "exited", "Exited (2) 1 second ago", {}, {})
        downs: list[object] = []

        def start(*args: object, **kwargs: object) -> Output:
            state.extend([failed, STORE])
            return Output(1, "", "service bucket did not complete")

        def docker(arguments: list[str], **kwargs: object) -> Output:
            if arguments[0] == "logs":
                return Output(0, "", "bucket: S3_BUCKET=lab is closed: do this.\n")
            if "down" in arguments:
                downs.append(arguments)
                state.clear()
            return Output(0, "", "")

        monkeypatch.setattr(runtime, "LOGS", tmp_path)
        monkeypatch.setattr(runtime, "engine_problem", lambda: None)
        monkeypatch.setattr(runtime, "port_taken", lambda port: False)
        monkeypatch.setattr(runtime, "containers", lambda project: list(state))
        monkeypatch.setattr(runtime, "obtain", lambda *args: None)
        monkeypatch.setattr(runtime, "compose", start)
        monkeypatch.setattr(runtime, "call", docker)
        one = ComposeRuntime(settings)
        with pytest.raises(UserError, match="S3_BUCKET=lab is closed: do this"):
            one.up(lambda line: None)
        assert len(downs) == 1
        assert "closed: do this" in one.diagnose()

    def test_down_does_not_wait_for_nodes_that_drain(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        state, calls = [HEAD, WORKER, STORE], list[list[str]]()

        def docker(arguments: list[str], **kwargs: object) -> Output:
            calls.append(arguments)
            if "down" in arguments:
                state.clear()
            return Output(0, "", "")

        monkeypatch.setattr(runtime, "engine_problem", lambda: None)
        monkeypatch.setattr(runtime, "containers", lambda project: list(state))
        monkeypatch.setattr(runtime, "call", docker)
        one = ComposeRuntime(settings)
        one.down(lambda line: None)
        tails = [
            each[each.index(str(runtime.SOURCE / runtime.FILE)) + 1 :]
            for each in calls
            if each[0] == "compose"
        ]
        assert tails == [["stop", "--timeout", "2", "worker", "head"], ["down", "--remove-orphans"]]

    def test_an_interrupt_takes_down_what_was_begun(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        state: list[Container] = []
        downs: list[object] = []

        def start(*args: object, **kwargs: object) -> Output:
            state.append(STORE)
            raise KeyboardInterrupt

        def docker(arguments: list[str], **kwargs: object) -> Output:
            if "down" in arguments:
                downs.append(arguments)
                state.clear()
            return Output(0, "", "")

        monkeypatch.setattr(runtime, "engine_problem", lambda: None)
        monkeypatch.setattr(runtime, "port_taken", lambda port: False)
        monkeypatch.setattr(runtime, "containers", lambda project: list(state))
        monkeypatch.setattr(runtime, "obtain", lambda *args: None)
        monkeypatch.setattr(runtime, "compose", start)
        monkeypatch.setattr(runtime, "call", docker)
        with pytest.raises(KeyboardInterrupt):
            ComposeRuntime(settings).up(lambda line: None)
        assert len(downs) == 1


def test_parse_container() -> None:
    row = "\t".join(
        [
            "head",
            "raylab-head-1",
            "running",
            "Up 2 hours (healthy)",
            "127.0.0.1:18265->8265/tcp",
            "com.docker.compose.service=head,lab.node-cpus=4,lab.s3-endpoint=http://minio:9000",
        ]
    )
    found = parse_container(row)
    assert found.healthy
    assert found.ports == {8265: 18265}
    assert found.labels == {"lab.node-cpus": "4", "lab.s3-endpoint": "http://minio:9000"}
    assert found.exit_code is None
    assert BUCKET.exit_code == 0
