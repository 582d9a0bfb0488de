"""What killed attempts leave in a run's folder: checkpoint folders that the snapshot does not name, unfinished uploads.

A report that had returned may not be committed when its rank dies (pitfall C3), and an upload may be cut off. Neither
is ever loaded, because a run resumes from its snapshot alone; but nobody removes them either: `num_to_keep` prunes
only what the snapshot knows. No Ray, no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lab.errors import UserError
from lab.settings import StoreAccess
from lab.storage import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S, Storage, check_endpoint

SNAPSHOT = "checkpoint_manager_snapshot.json"
MARKER = ".validate_storage_marker"
"""Ray writes it when a run starts: what makes a folder a run, before its first commit."""
PREFIX = "checkpoint_"
"""What a folder's name must begin with to be taken for a checkpoint; others are never touched."""
MOST_KEYS = 200
"""Keys asked for one by one, where a store lists unfinished uploads by exact key alone (MinIO)."""


@dataclass(frozen=True)
class Folder:
    """A checkpoint folder of a run that its snapshot does not name."""

    name: str
    files: int
    bytes: int


@dataclass(frozen=True)
class Upload:
    """An unfinished multipart upload: parts that are stored, and paid for, and that no listing shows."""

    key: str
    id: str


@dataclass(frozen=True)
class Leftovers:
    """What nothing refers to in one run. `kept` are the folders that the snapshot names."""

    run: str
    folders: tuple[Folder, ...]
    uploads: tuple[Upload, ...]
    kept: tuple[str, ...]

    @property
    def none(self) -> bool:
        """Whether there is nothing to remove."""
        return not self.folders and not self.uploads


class Uploads(Protocol):
    """The unfinished multipart uploads of one bucket."""

    def find(self, prefix: str, keys: Iterable[str]) -> list[Upload]:
        """Those below `prefix`, and those of exactly one of `keys`; both without the bucket."""
        ...

    def abort(self, upload: Upload) -> None:
        """Drop one and its parts."""
        ...


class NoUploads:
    """A local path: a cut-off file there is a file."""

    def find(self, prefix: str, keys: Iterable[str]) -> list[Upload]:
        """None."""
        return []

    def abort(self, upload: Upload) -> None:
        """Nothing to do."""


class S3Uploads:
    """Through s3fs, since Arrow's filesystem neither lists nor aborts them."""

    def __init__(self, bucket: str, access: StoreAccess) -> None:
        import s3fs

        check_endpoint(access.endpoint)
        self._bucket = bucket
        self._s3: Any = s3fs.S3FileSystem(
            key=access.access_key_id,
            secret=access.secret_access_key.get_secret_value(),
            token=access.session_token.get_secret_value() if access.session_token else None,
            endpoint_url=access.endpoint,
            client_kwargs={"region_name": access.region, "verify": access.ca_bundle or True},
            config_kwargs={
                "s3": {"addressing_style": "path"},
                "connect_timeout": CONNECT_TIMEOUT_S,
                "read_timeout": REQUEST_TIMEOUT_S,
            },
        )

    def find(self, prefix: str, keys: Iterable[str]) -> list[Upload]:
        """AWS and SeaweedFS list by prefix; MinIO answers for an exact key alone, so likely keys are asked for too."""
        found = {upload.id: upload for asked in [prefix, *keys] for upload in self._below(asked)}
        return sorted(found.values(), key=lambda upload: (upload.key, upload.id))

    def _below(self, prefix: str) -> list[Upload]:
        found: list[Upload] = []
        marks: dict[str, str] = {}
        while True:
            answer = self._s3.call_s3("list_multipart_uploads", Bucket=self._bucket, Prefix=prefix, **marks)
            # a store may overlook the prefix
            found += [
                Upload(one["Key"], one["UploadId"])
                for one in answer.get("Uploads", [])
                if one["Key"].startswith(prefix)
            ]
            if not answer.get("IsTruncated"):
                return found
            marks = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def abort(self, upload: Upload) -> None:
        """Drop one and its parts."""
        self._s3.call_s3("abort_multipart_upload", Bucket=self._bucket, Key=upload.key, UploadId=upload.id)


def uploads_of(storage: Storage, access: StoreAccess | None) -> Uploads:
    """The unfinished uploads in a location's bucket; none on a local path.

    Raises:
        UserError: an S3 location without access.
    """
    if storage.location.kind == "local":
        return NoUploads()
    if access is None:
        raise UserError(
            f"LAB_STORAGE={storage.location}: S3_ENDPOINT and the S3_* keys are needed to open it."
        )
    return S3Uploads(storage.location.bucket, access)


def is_run(storage: Storage, run: str) -> bool:
    """Whether the folder is one of Ray Train's: it has a snapshot, or the marker that Ray leaves before the first one."""
    files = {entry.path for entry in storage.files(run)}
    return bool(files & {f"{run}/{SNAPSHOT}", f"{run}/{MARKER}"})


def referred(storage: Storage, run: str) -> tuple[str, ...] | None:
    """The checkpoint folders that a run's snapshot names, sorted; None when the folder is no run.

    Raises:
        UserError: the snapshot cannot be read, so nothing can be told to be a leftover.
    """
    files = {entry.path for entry in storage.files(run)}
    snapshot = f"{run}/{SNAPSHOT}"
    if snapshot not in files:
        if f"{run}/{MARKER}" not in files:
            return None
        if any(path.startswith(f"{run}/{PREFIX}") for path in files):
            raise UserError(
                f"NAME={run!r}: {storage.location}/{snapshot} is missing, so nothing there can be told to be a "
                "leftover; restore it from a copy, or delete the run with --whole."
            )
        return ()
    try:
        return named_by(storage.read(snapshot))
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"NAME={run!r}: {storage.location}/{snapshot} is damaged, so nothing there can be told to be a leftover; "
            "restore it from a copy, or delete the run with --whole."
        ) from None


def named_by(snapshot: bytes) -> tuple[str, ...]:
    """The folders that a snapshot's content names, sorted.

    Raises:
        ValueError, KeyError, TypeError: it is no snapshot.
    """
    content = json.loads(snapshot)
    latest = content["latest_checkpoint_result"]
    results = [*content["checkpoint_results"], *content.get("pending_training_results", [])]
    return tuple(sorted({one["checkpoint_dir_name"] for one in [*results, *([latest] if latest else [])]}))


def find(storage: Storage, run: str, uploads: Uploads) -> Leftovers | None:
    """Look for leftovers in one run, deleting nothing; None when the folder is no run.

    Tell a live run apart first: in one, the newest folders are not named *yet*.

    Raises:
        UserError: the snapshot cannot be read.
    """
    kept = referred(storage, run)
    if kept is None:
        return None
    files = storage.files(run)
    folders = []
    # by folders, not by files: an upload that found nothing leaves an empty one
    for name in storage.folders(run):
        if name.startswith(PREFIX) and name not in kept:
            inside = [entry.size for entry in files if entry.path.startswith(f"{run}/{name}/")]
            folders.append(Folder(name, len(inside), sum(inside)))
    _, _, root = storage.path.partition("/")
    below = f"{root}/{run}/" if root else f"{run}/"
    file_names = sorted(
        {entry.path.partition("/")[2].partition("/")[2] for entry in files if f"{run}/{PREFIX}" in entry.path}
    )
    likely = [f"{below}{folder.name}/{file}" for folder in folders for file in file_names if file][:MOST_KEYS]
    return Leftovers(run, tuple(folders), tuple(uploads.find(below, likely)), kept)


def remove(storage: Storage, found: Leftovers, uploads: Uploads) -> None:
    """Delete exactly what was found: uploads first, so that no part outlives the folder that names it."""
    for upload in found.uploads:
        uploads.abort(upload)
    for folder in found.folders:
        storage.delete_tree(f"{found.run}/{folder.name}")


def runs(storage: Storage) -> Sequence[str]:
    """Every folder at the root that a run may be."""
    return [name for name in storage.folders() if not name.startswith(".")]
