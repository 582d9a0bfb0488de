"""The doctor on a cluster that is well, and on a store that refuses."""

from __future__ import annotations

import time
from collections import Counter

from pydantic import SecretStr

from lab.doctor import examine
from tests.conftest import Cluster

LIMIT_S = 60
"""It takes about 5 s; a busy machine may take several times as long."""


def test_a_cluster_that_is_well_has_no_fault(cluster: Cluster) -> None:
    began = time.monotonic()
    checks = list(examine(cluster.settings, cluster.runtime))
    assert time.monotonic() - began < LIMIT_S
    assert [check for check in checks if check.level == "fault"] == []
    names = Counter(check.name for check in checks)
    assert {"python", "secrets", "engine", "cluster", "store", "clock", "shm"} <= names.keys()
    nodes = [check.text for check in checks if check.name == "node"]
    assert len(nodes) == 3
    assert all(f"{cluster.access.node_cpus} CPUs" in text and "ray 2.60.0" in text for text in nodes)


def test_wrong_keys_are_a_fault_with_their_setting(cluster: Cluster) -> None:
    wrong = cluster.settings.model_copy(update={"s3_secret_access_key": SecretStr("not-the-secret")})
    faults = [check for check in examine(wrong, cluster.runtime) if check.level == "fault"]
    assert [check.name for check in faults] == ["store"]
    assert "S3_SECRET_ACCESS_KEY" in faults[0].text
    assert "not-the-secret" not in faults[0].text
