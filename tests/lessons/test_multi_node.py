"""`--shared-path`: that nodes share a folder is proved before it is believed (pitfall S1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.errors import UserError
from tests.conftest import Cluster, claims


def test_a_path_that_the_nodes_do_not_share_is_refused(cluster: Cluster) -> None:
    storage = f"{cluster.access.local_root}/not-shared"
    with pytest.raises(UserError) as refused:
        cluster.run("multi-node", "--shared-path", storage=storage)
    assert storage in str(refused.value)
    assert "--shared-path" in str(refused.value)


@pytest.mark.parametrize("cluster", ["embedded"], indirect=True)
def test_a_path_that_they_share_will_do(cluster: Cluster, tmp_path: Path) -> None:
    found = claims(cluster.run("multi-node", "--shared-path", storage=str(tmp_path)))
    verdicts = {key: claim["verdict"] for key, claim in found.items()}
    assert verdicts.pop("from-host") == verdicts.pop("reach") == "not shown"
    assert set(verdicts.values()) == {"holds"}
