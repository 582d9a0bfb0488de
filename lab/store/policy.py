"""The training identity's least policy: one bucket, and what Ray Train does in it (measured)."""

from __future__ import annotations

import json
from pathlib import Path

from lab.errors import EnvironmentBroken

PLACEHOLDER = "BUCKET"


def bucket_policy(template: Path, bucket: str) -> str:
    """The policy document of `images/minio/policy.json`, for one bucket.

    Args:
        template: JSON whose resources name the bucket as `BUCKET`.

    Raises:
        EnvironmentBroken: the file cannot be read or names no bucket.
    """
    try:
        document = json.loads(template.read_text())
        for statement in document["Statement"]:
            statement["Resource"] = [_resource(name, bucket) for name in statement["Resource"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EnvironmentBroken(f"the policy {template} cannot be used: {error}.") from None
    return json.dumps(document)


def _resource(name: str, bucket: str) -> str:
    prefix, found, rest = name.partition(PLACEHOLDER)
    if not found or not prefix.endswith(":::") or rest not in ("", "/*"):
        raise ValueError(f"its resource {name!r} does not name the bucket")
    return f"{prefix}{bucket}{rest}"
