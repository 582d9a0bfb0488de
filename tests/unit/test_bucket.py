"""The bucket job: the order of its calls, its repeats, and its one sentence."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from minio.error import MinioAdminException
from pydantic import SecretStr

from lab.errors import EnvironmentBroken, UserError
from lab.runtimes.project import SOURCE
from lab.settings import StoreAccess
from lab.store.bucket import Job, Tools, main, ready, retry
from lab.store.policy import bucket_policy

TEMPLATE = SOURCE / "images" / "minio" / "policy.json"
ENVIRON = {
    "S3_ENDPOINT": "http://minio:9000",
    "S3_BUCKET": "lab",
    "S3_ACCESS_KEY_ID": "training",
    "S3_SECRET_ACCESS_KEY": "training-secret",
    "STORE_ROOT_USER": "root-user",
    "STORE_ROOT_PASSWORD": "root-secret",
    "LAB_POLICY": str(TEMPLATE),
}


@dataclass
class Store:
    """A fake store and MinIO admin in one: it keeps each call, and fails the first ones named in `failures`."""

    failures: dict[str, list[Exception]] = field(default_factory=dict)
    limited: bool = True
    calls: list[tuple[str, ...]] = field(default_factory=list)

    def _call(self, *call: str) -> None:
        self.calls.append(call)
        waiting = self.failures.get(call[0], [])
        if waiting:
            raise waiting.pop(0)

    def policy_add(self, policy_name: str, policy_file: str) -> None:
        self._call("policy_add", policy_name, Path(policy_file).read_text())

    def user_add(self, access_key: str, secret_key: str) -> None:
        self._call("user_add", access_key, secret_key)

    def policy_set(self, policy_name: str, user: str) -> None:
        self._call("policy_set", policy_name, user)

    def refuses(self, access: StoreAccess, bucket: str) -> bool:
        self._call("refuses", access.access_key_id, bucket)
        return self.limited

    def tools(self) -> Tools:
        return Tools(
            answers=lambda endpoint: self._call("answers", endpoint),
            ensure_bucket=lambda root: self._call("ensure_bucket", root.access_key_id, root.bucket),
            admin_of=lambda root: self,
            probe=lambda access: self._call("probe", access.access_key_id),
            refuses=self.refuses,
        )

    @property
    def order(self) -> list[str]:
        return [call[0] for call in self.calls]


def job(store: str, **values: object) -> Job:
    found = Job.from_environment({**ENVIRON, "LAB_STORE": store})
    return Job(**{**found.__dict__, "wait_s": 2.0, "settle_s": 2.0, **values})


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.store.bucket.PAUSE_S", 0.001)


def test_minio_gets_policy_then_user_then_bond_and_the_proof_comes_last() -> None:
    store = Store()
    ready(job("minio"), store.tools())
    assert store.order == [
        "answers",
        "ensure_bucket",
        "policy_add",
        "user_add",
        "policy_set",
        "probe",
        "refuses",
    ]
    assert store.calls[1] == ("ensure_bucket", "root-user", "lab")
    assert store.calls[3] == ("user_add", "training", "training-secret")
    assert store.calls[4] == ("policy_set", "lab-lab", "training")
    assert store.calls[5] == ("probe", "training")
    resources = {
        name for statement in json.loads(store.calls[2][2])["Statement"] for name in statement["Resource"]
    }
    assert resources == {"arn:aws:s3:::lab", "arn:aws:s3:::lab/*"}


def test_may_be_repeated() -> None:
    store = Store()
    ready(job("minio"), store.tools())
    first = list(store.order)
    ready(job("minio"), store.tools())
    assert store.order == first * 2


def test_seaweedfs_has_no_admin_api() -> None:
    store = Store()
    ready(job("seaweedfs"), store.tools())
    assert store.order == ["answers", "ensure_bucket", "probe", "refuses"]


def test_external_only_proves_the_keys_and_needs_no_root_account() -> None:
    environ = {name: value for name, value in ENVIRON.items() if not name.startswith("STORE_ROOT")}
    store = Store()
    assert main({**environ, "LAB_STORE": "external"}, store.tools()) == 0
    assert store.order == ["probe"]


def test_a_step_that_fails_at_first_is_tried_again() -> None:
    store = Store(
        {
            "answers": [EnvironmentBroken("not yet"), EnvironmentBroken("not yet")],
            "policy_set": [MinioAdminException("503", "still starting")],
            "probe": [UserError("unknown key")],
        }
    )
    ready(job("minio"), store.tools())
    assert store.order.count("answers") == 3
    assert store.order.count("policy_set") == 2
    assert store.order.count("probe") == 2
    assert store.order[-1] == "refuses"


def test_retry_has_a_limit_and_keeps_the_last_error() -> None:
    def step() -> None:
        raise UserError("still wrong")

    with pytest.raises(UserError, match="still wrong"):
        retry(step, 0.01)


def test_a_store_that_never_answers_ends_the_job_before_anything_is_made() -> None:
    store = Store({"answers": [EnvironmentBroken("nobody there")] * 100_000})
    with pytest.raises(EnvironmentBroken, match="nobody there"):
        ready(job("minio", wait_s=0.01), store.tools())
    assert set(store.order) == {"answers"}


def test_an_admin_error_is_one_sentence_without_the_secret() -> None:
    store = Store({"user_add": [MinioAdminException("403", "denied\nmore")] * 100_000})
    with pytest.raises(EnvironmentBroken) as caught:
        ready(job("minio", settle_s=0.01), store.tools())
    text = str(caught.value)
    assert "STORE_ROOT_PASSWORD" in text
    assert "\n" not in text
    assert "root-secret" not in text
    assert "probe" not in store.order


def test_keys_that_reach_another_bucket_fail_the_job() -> None:
    store = Store(limited=False)
    with pytest.raises(EnvironmentBroken, match="lets S3_ACCESS_KEY_ID beyond S3_BUCKET=lab"):
        ready(job("seaweedfs"), store.tools())
    assert store.calls[-1] == ("refuses", "training", "lab-not-yours")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({**ENVIRON, "LAB_STORE": "ftp"}, "LAB_STORE='ftp'"),
        ({**ENVIRON, "LAB_STORE": "minio", "STORE_ROOT_PASSWORD": ""}, "STORE_ROOT_PASSWORD is not set"),
        ({"LAB_STORE": "minio"}, "S3_ENDPOINT"),
    ],
)
def test_a_wrong_environment_is_one_sentence_and_exit_2(
    environ: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store()
    assert main(environ, store.tools()) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert store.calls == []


def test_success_is_one_line_without_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main({**ENVIRON, "LAB_STORE": "minio"}, Store().tools()) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "training-secret" not in out


def test_the_policy_is_the_measured_one() -> None:
    statements = json.loads(bucket_policy(TEMPLATE, "b"))["Statement"]
    actions = {statement["Resource"][0]: set(statement["Action"]) for statement in statements}
    assert actions == {
        "arn:aws:s3:::b": {"s3:GetBucketLocation", "s3:ListBucket", "s3:ListBucketMultipartUploads"},
        "arn:aws:s3:::b/*": {
            "s3:GetObject",
            "s3:PutObject",
            "s3:DeleteObject",
            "s3:AbortMultipartUpload",
            "s3:ListMultipartUploadParts",
        },
    }


def test_a_policy_that_names_no_bucket_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "policy.json"
    bad.write_text(json.dumps({"Statement": [{"Resource": ["arn:aws:s3:::*"]}]}))
    with pytest.raises(EnvironmentBroken, match="does not name the bucket"):
        bucket_policy(bad, "b")


def test_root_access_keeps_the_endpoint_and_drops_the_session_token() -> None:
    found = Job.from_environment({**ENVIRON, "LAB_STORE": "minio", "S3_SESSION_TOKEN": "temporary"})
    assert found.root is not None
    assert found.root.endpoint == found.access.endpoint
    assert found.root.session_token is None
    assert found.root.secret_access_key == SecretStr("root-secret")
