"""`lab checkpoints clean` on a real cluster and store: shows, then deletes exactly what nothing refers to."""

from __future__ import annotations

import io
import json

import pytest
from minio import Minio

from lab.cli import main
from lab.leftovers import SNAPSHOT
from lab.store.probe import client
from tests.conftest import Cluster

PREFIX = "clean-test"
RUN = f"{PREFIX}/mine"
CUT = f"{RUN}/checkpoint_cut/model.pt"


def put(store: Minio, bucket: str, key: str, content: bytes = b"x") -> None:
    store.put_object(bucket, key, io.BytesIO(content), len(content))


def unfinished(store: Minio, bucket: str) -> list[str]:
    return [str(one.object_name) for one in store._list_multipart_uploads(bucket, prefix=CUT).uploads]


def clean(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoints", "clean", *words])
    return int(str(ended.value.code)), "".join(capsys.readouterr())


def test_c3_only_what_nothing_refers_to_is_deleted_and_only_with_yes(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAB_RUNTIME", cluster.runtime.name)
    monkeypatch.setenv("COLUMNS", "300")
    bucket = cluster.settings.s3_bucket
    uri = f"s3://{bucket}/{PREFIX}"
    store = client(cluster.settings.store_access(cluster.access.store))
    kept = {"checkpoint_dir_name": "checkpoint_kept", "metrics": {}}
    put(
        store,
        bucket,
        f"{RUN}/{SNAPSHOT}",
        json.dumps({"checkpoint_results": [kept], "latest_checkpoint_result": kept}).encode(),
    )
    put(store, bucket, f"{RUN}/checkpoint_kept/model.pt")
    put(store, bucket, f"{RUN}/checkpoint_cut/manifest.json")
    put(store, bucket, f"{PREFIX}/other/checkpoint_x/model.pt")
    store._create_multipart_upload(bucket, CUT, {})

    def keys() -> list[str]:
        return sorted(
            str(one.object_name) for one in store.list_objects(bucket, f"{PREFIX}/", recursive=True)
        )

    before = keys()
    code, said = clean(capsys, "mine", "--storage", uri)
    assert (code, keys()) == (0, before), said
    assert "would delete" in said
    assert "checkpoint_cut: 1 files" in said
    assert f"unfinished upload of {CUT}" in said
    assert "add --yes" in said
    assert unfinished(store, bucket) == [CUT]

    code, said = clean(capsys, "--all", "--storage", uri, "--yes")
    assert code == 0, said
    assert "other: no run of Ray Train" in said
    left = [key for key in before if "checkpoint_cut" not in key]
    assert [key for key in keys() if not key.endswith("/")] == left
    assert unfinished(store, bucket) == []

    code, said = clean(capsys, "nobody", "--storage", uri)
    assert code == 2
    assert "NAME='nobody' is not a run" in said
    code, said = clean(capsys, "mine", "--whole", "--storage", uri, "--yes")
    assert code == 0, said
    assert not [key for key in keys() if key.startswith(f"{RUN}/")]
