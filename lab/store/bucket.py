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
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import urllib3
from minio.credentials import StaticProvider
from minio.error import MinioAdminException
from minio.minioadmin import MinioAdmin

from lab.errors import EnvironmentBroken, LabError, UserError
from lab.settings import StoreAccess
from lab.store import probe
from lab.store.policy import bucket_policy

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


class Work(Protocol):
    """What the job does to a store, step by step; a test puts a fake here."""

    def answers(self) -> bool: ...

    def make_bucket(self) -> None: ...

    def admin(self) -> AbstractContextManager[Admin]: ...

    def prove_keys(self) -> None: ...

    def refuses_others(self) -> bool: ...


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
