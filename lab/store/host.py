"""What the host can do with the training identity's keys: read the lab's bucket, and nothing else."""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Any

from minio.error import S3Error

from lab.settings import StoreAccess
from lab.store.probe import client


def read_checkpoint(access: StoreAccess, path: str) -> dict[str, Any]:
    """Read a checkpoint's folder and compare every file with its manifest.

    Args:
        path: `bucket/prefix/.../checkpoint_...`, without a scheme.

    Returns:
        `{"files": n, "bytes": n, "wrong": [name, ...]}`: `wrong` are files that are not what was saved.
    """
    bucket, _, prefix = path.partition("/")
    minio = client(access)

    def get(name: str) -> bytes:
        response = minio.get_object(bucket, f"{prefix}/{name}")
        try:
            return bytes(response.read())
        finally:
            response.close()
            response.release_conn()

    manifest = json.loads(get("manifest.json"))["files"]
    contents = {name: get(name) for name in manifest}
    wrong = [
        name
        for name, content in contents.items()
        if hashlib.sha256(content).hexdigest() != manifest[name]["sha256"]
    ]
    return {"files": len(contents), "bytes": sum(map(len, contents.values())), "wrong": wrong}


def reach(access: StoreAccess) -> dict[str, str]:
    """What these keys are answered outside their bucket: the S3 error code of each attempt, or "allowed"."""
    minio = client(access)
    other = f"lab-other-{secrets.token_hex(4)}"

    def answer(attempt: Any) -> str:
        try:
            attempt()
        except S3Error as error:
            return str(error.code)
        return "allowed"

    return {
        "list another bucket": answer(lambda: list(minio.list_objects(other))),
        "make a bucket": answer(lambda: minio.make_bucket(other)),
        "read another bucket": answer(lambda: minio.get_object(other, "x")),
    }
