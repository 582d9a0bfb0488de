"""The one-shot job that readies the store: bucket, training identity, and the proof of both.

    python -m lab.store.bucket

May be repeated. Fails with one sentence and the exit code of its error. Settings come from the environment:
`S3_*` (the training keys), `STORE_ROOT_USER` and `STORE_ROOT_PASSWORD` (the store's own account), `LAB_POLICY` (the
policy's file) and `LAB_STORE`, which says how a training identity is made:

    minio        by the admin API, with the measured least policy
    seaweedfs    by the store's own configuration file, before it starts: nothing to do here
    external     by the user: this job only proves the keys
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import urllib3
from minio.credentials import StaticProvider
from minio.error import MinioAdminException
from minio.minioadmin import MinioAdmin

from lab.errors import EnvironmentBroken, LabError, UserError
from lab.settings import StoreAccess
from lab.store.policy import bucket_policy
from lab.store.probe import ensure_bucket, probe, refuses_other_buckets

WAIT_S = 60.0
"""Seconds for the store to answer at all."""
SETTLE_S = 20.0
"""Seconds for one step to succeed once the store answers: a store that has just started may refuse at first."""
PAUSE_S = 0.5

T = TypeVar("T")


class Admin(Protocol):
    """The part of MinIO's admin API that the job needs; each call may be repeated."""

    def policy_add(self, policy_name: str, policy_file: str) -> Any: ...

    def user_add(self, access_key: str, secret_key: str) -> Any: ...

    def policy_set(self, policy_name: str, user: str) -> Any: ...


def make_training_user(admin: Admin, policy: Path, access: StoreAccess) -> None:
    """The policy first, then the user, then the bond between them: each needs the one before."""
    name = f"lab-{access.bucket}"
    admin.policy_add(name, str(policy))
    admin.user_add(access.access_key_id, access.secret_access_key.get_secret_value())
    admin.policy_set(name, user=access.access_key_id)


def retry(step: Callable[[], T], limit_s: float) -> T:
    """Repeat a step until it succeeds or its time is up; the last error is the one that counts."""
    end = time.monotonic() + limit_s
    while True:
        try:
            return step()
        except LabError:
            if time.monotonic() + PAUSE_S > end:
                raise
        time.sleep(PAUSE_S)


def answers(endpoint: str) -> None:
    """One HTTP answer of any kind but a server error, within 3 s.

    Raises:
        EnvironmentBroken: none came.
    """
    try:
        with urllib3.PoolManager(timeout=3.0, retries=False) as pool:
            status = pool.request("GET", f"{endpoint}/").status
    except urllib3.exceptions.HTTPError as error:
        raise EnvironmentBroken(
            f"the store at {endpoint} does not answer ({type(error).__name__})."
        ) from None
    if status >= 500:
        raise EnvironmentBroken(f"the store at {endpoint} answers {status}: see `docker compose logs minio`.")


def admin_of(root: StoreAccess) -> Admin:
    """MinIO's admin API with the store's own account."""
    parts = urlsplit(root.endpoint)
    admin: Admin = MinioAdmin(
        endpoint=parts.netloc,
        credentials=StaticProvider(root.access_key_id, root.secret_access_key.get_secret_value()),
        secure=parts.scheme == "https",
        http_client=urllib3.PoolManager(timeout=5.0, retries=False),
    )
    return admin


@dataclass(frozen=True)
class Tools:
    """How the job reaches the store; a test puts fakes here."""

    answers: Callable[[str], None] = answers
    ensure_bucket: Callable[[StoreAccess], None] = ensure_bucket
    admin_of: Callable[[StoreAccess], Admin] = admin_of
    probe: Callable[[StoreAccess], None] = probe
    refuses: Callable[[StoreAccess, str], bool] = refuses_other_buckets


@dataclass(frozen=True)
class Job:
    """What the job is told. `root` and `policy` are None for a store that the user brings."""

    store: str
    access: StoreAccess
    root: StoreAccess | None = None
    policy: Path | None = None
    wait_s: float = WAIT_S
    settle_s: float = SETTLE_S

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Job:
        """Read a job from a container's environment.

        Raises:
            UserError: a variable is missing, or the store has an unknown name.
        """
        store = environ.get("LAB_STORE", "")
        if store not in ("minio", "seaweedfs", "external"):
            raise UserError(f"LAB_STORE={store!r} is unknown: choose one of minio, seaweedfs, external.")
        access = StoreAccess.from_environment(dict(environ))
        if store == "external":
            return cls(store, access)
        missing = [name for name in ("STORE_ROOT_USER", "STORE_ROOT_PASSWORD") if not environ.get(name)]
        if missing:
            raise UserError(f"{', '.join(missing)} is not set: run `make setup`.")
        account = {
            "access_key_id": environ["STORE_ROOT_USER"],
            "secret_access_key": environ["STORE_ROOT_PASSWORD"],
            "session_token": None,
        }
        root = StoreAccess.model_validate({**access.model_dump(), **account})
        policy = Path(environ.get("LAB_POLICY") or "images/minio/policy.json")
        return cls(store, access, root, policy if store == "minio" else None)


def ready(job: Job, tools: Tools | None = None) -> None:
    """Bring the store to the state that the lab needs, and prove it.

    Raises:
        UserError: a key, secret, bucket or endpoint is wrong.
        EnvironmentBroken: the store does not answer, or gives the training keys more than their bucket.
    """
    use = tools or Tools()
    if job.root is None:
        # The user's own store runs already: nothing to wait for, and a wrong key is said at once.
        use.probe(job.access)
        return
    root = job.root
    retry(lambda: use.answers(root.endpoint), job.wait_s)
    retry(lambda: use.ensure_bucket(root), job.settle_s)
    if job.policy is not None:
        _make_user(job.policy, root, job.access, use.admin_of, job.settle_s)
    retry(lambda: use.probe(job.access), job.settle_s)
    # The bucket need not exist: a key limited to its own is refused either way, and must not make one.
    if not use.refuses(job.access, f"{job.access.bucket}-not-yours"):
        raise EnvironmentBroken(
            f"the store at {job.access.endpoint} lets S3_ACCESS_KEY_ID beyond S3_BUCKET={job.access.bucket}: "
            "the training identity was not limited; check the store's configuration."
        )


def _make_user(
    template: Path,
    root: StoreAccess,
    access: StoreAccess,
    connect: Callable[[StoreAccess], Admin],
    settle_s: float,
) -> None:
    def step() -> None:
        try:
            make_training_user(connect(root), policy, access)
        except (MinioAdminException, urllib3.exceptions.HTTPError, OSError) as error:
            # The body of an admin error may be long; its first line says what matters.
            reason = str(error).splitlines()[0][:200]
            raise EnvironmentBroken(
                f"making the training identity at {root.endpoint} failed ({type(error).__name__}: {reason}); "
                "check STORE_ROOT_USER and STORE_ROOT_PASSWORD."
            ) from None

    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy.json"
        policy.write_text(bucket_policy(template, access.bucket))
        retry(step, settle_s)


def main(environ: Mapping[str, str] | None = None, tools: Tools | None = None) -> int:
    """Run the job; one line says how it ended."""
    try:
        job = Job.from_environment(os.environ if environ is None else environ)
        ready(job, tools)
    except LabError as error:
        print(f"bucket: {error}", file=sys.stderr)
        return error.exit_code
    print(
        f"bucket: {job.access.bucket} at {job.access.endpoint} is proven with the training keys ({job.store})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
