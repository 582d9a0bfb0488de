"""Where runs are kept: a local path or an `s3://` URI, opened as one explicit filesystem.

Everything that reads or writes a run gets the same `(path, filesystem)` pair, so nothing depends on which
process has which environment variable (pitfalls S3, S4).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from lab.errors import UserError
from lab.settings import StoreAccess

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

Kind = Literal["local", "s3"]
Client = Literal["pyarrow", "s3fs"]

_BUCKET = re.compile(r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")

CONNECT_TIMEOUT_S = 3.0
REQUEST_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Location:
    """A place for runs. `path` is an absolute local path, or `bucket/prefix` without a scheme."""

    kind: Kind
    path: str

    def __str__(self) -> str:
        return f"s3://{self.path}" if self.kind == "s3" else self.path

    @property
    def bucket(self) -> str:
        """The bucket of an S3 location."""
        return self.path.partition("/")[0]


def parse_location(uri: str, setting: str = "LAB_STORAGE") -> Location:
    """Read a storage setting.

    Raises:
        UserError: it is not an absolute local path or an `s3://bucket/prefix` URI.
    """

    def wrong(why: str) -> UserError:
        return UserError(f"{setting}={_without_keys(uri)!r} {why}")

    if uri != uri.strip() or any(character.isspace() for character in uri):
        raise wrong("contains a space: use a path or URI without one.")
    if not uri.isprintable():
        raise wrong("contains a control character: use a plain path or URI.")
    if "://" not in uri:
        if uri.startswith("s3:"):
            raise wrong("is malformed: write s3://bucket/prefix.")
        if not uri.startswith("/"):
            raise wrong("is not absolute: give a path that starts with / or a URI s3://bucket/prefix.")
        if ".." in PurePosixPath(uri).parts:
            raise wrong("contains '..': give the path without it.")
        return Location("local", str(PurePosixPath(uri)))
    try:
        parts = urlsplit(uri)
    except ValueError:
        raise wrong("is malformed: write s3://bucket/prefix.") from None
    if parts.scheme != "s3":
        raise wrong(f"has the unknown scheme {parts.scheme!r}: use a local path or s3://bucket/prefix.")
    if "?" in uri or "#" in uri or "@" in uri:
        raise wrong(
            "carries options or keys: give s3://bucket/prefix alone; S3_ENDPOINT and S3_* hold the rest."
        )
    if not parts.netloc:
        raise wrong("names no bucket: write s3://bucket/prefix.")
    if not _BUCKET.match(parts.netloc):
        raise wrong(
            f"names the bucket {parts.netloc!r}, which S3 does not allow: 3 to 63 of a-z, 0-9, '.', '-'."
        )
    prefix = parts.path.strip("/")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise wrong("has an empty, '.' or '..' part: write s3://bucket/prefix.")
    return Location("s3", f"{parts.netloc}/{prefix}" if prefix else parts.netloc)


def _without_keys(uri: str) -> str:
    return re.sub(r"//[^/]*@", "//***@", uri)


def check_name(name: str, setting: str = "LAB_NAME") -> str:
    """A run name that is safe as one folder and one key.

    Raises:
        UserError: it holds a slash, `..` or anything but letters, digits, `_`, `.`, `-` (100 at most).
    """
    if not _NAME.fullmatch(name) or ".." in name:
        raise UserError(
            f"{setting}={name!r} cannot name a run: use letters, digits, '_', '.', '-' (100 at most), "
            "first a letter or digit, and no '/' or '..'."
        )
    return name


def check_endpoint(endpoint: str, setting: str = "S3_ENDPOINT") -> str:
    """An endpoint as every client needs it: `http://host[:port]`, without a path.

    Raises:
        UserError: no scheme, no host, a bad port, or more than scheme, host and port.
    """
    shown = _without_keys(endpoint)
    if any(character.isspace() for character in endpoint):
        raise UserError(f"{setting}={shown!r} contains a space: write http://host:port.")
    try:
        parts = urlsplit(endpoint)
    except ValueError:
        raise UserError(f"{setting}={shown!r} is malformed: write http://host:port.") from None
    if parts.scheme not in ("http", "https"):
        raise UserError(f"{setting}={shown!r} has no scheme: write http://host:port or https://host:port.")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if not parts.hostname or port in (-1, 0):
        raise UserError(
            f"{setting}={shown!r} names no host or no valid port: write {parts.scheme}://host:port."
        )
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        raise UserError(
            f"{setting}={shown!r} carries more than host and port: write {parts.scheme}://host:port."
        )
    return endpoint.rstrip("/")


@dataclass(frozen=True)
class Entry:
    """One object or file: path relative to the storage root, size in bytes."""

    path: str
    size: int


@dataclass(frozen=True)
class Storage:
    """An open location: pass `path` and `filesystem` to `RunConfig(storage_path, storage_filesystem)`."""

    location: Location
    filesystem: FileSystem

    @property
    def path(self) -> str:
        """The root without a scheme, as Ray wants it beside an explicit filesystem."""
        return self.location.path

    def at(self, relative: str) -> str:
        """The filesystem's path of `relative` below the root."""
        return f"{self.path}/{relative}" if relative else self.path

    def files(self, relative: str = "") -> list[Entry]:
        """All files below `relative`, sorted by path; folders and zero-byte folder keys are left out (S5)."""
        from pyarrow.fs import FileSelector, FileType

        selector = FileSelector(self.at(relative), recursive=True, allow_not_found=True)
        prefix = self.path.rstrip("/") + "/"
        return sorted(
            (
                Entry(info.path.removeprefix(prefix), int(info.size or 0))
                for info in self.filesystem.get_file_info(selector)
                if info.type == FileType.File and not info.path.endswith("/")
            ),
            key=lambda entry: entry.path,
        )

    def folders(self, relative: str = "") -> list[str]:
        """Names of the folders directly below `relative`, sorted."""
        from pyarrow.fs import FileSelector, FileType

        selector = FileSelector(self.at(relative), recursive=False, allow_not_found=True)
        return sorted(
            info.base_name
            for info in self.filesystem.get_file_info(selector)
            if info.type == FileType.Directory
        )

    def read(self, relative: str) -> bytes:
        """The bytes of one file.

        Raises:
            FileNotFoundError: there is none.
        """
        with self.filesystem.open_input_stream(self.at(relative)) as stream:
            return bytes(stream.read())

    def write(self, relative: str, content: bytes) -> None:
        """Write one file, making its folder."""
        target = self.at(relative)
        if self.location.kind == "local":
            self.filesystem.create_dir(str(PurePosixPath(target).parent), recursive=True)
        with self.filesystem.open_output_stream(target) as stream:
            stream.write(content)

    def delete_tree(self, relative: str) -> None:
        """Delete the folder `relative` and all below it; nothing happens when it is not there.

        Raises:
            ValueError: `relative` is empty: the root is never deleted.
        """
        if not relative.strip("/"):
            raise ValueError("the storage root is never deleted")
        from pyarrow.fs import FileType

        if self.filesystem.get_file_info(self.at(relative)).type != FileType.NotFound:
            self.filesystem.delete_dir(self.at(relative))


def open_storage(
    location: Location, access: StoreAccess | None = None, client: Client = "pyarrow"
) -> Storage:
    """Open a location as one explicit filesystem; nothing is sent yet.

    Args:
        location: from `parse_location`.
        access: endpoint and keys; needed for S3 alone.
        client: the S3 client: Arrow's native one, or s3fs behind `FSSpecHandler`.

    Raises:
        UserError: an S3 location without access.
    """
    from pyarrow import fs

    if location.kind == "local":
        return Storage(location, fs.LocalFileSystem())
    if access is None:
        raise UserError(f"LAB_STORAGE={location}: S3_ENDPOINT and the S3_* keys are needed to open it.")
    endpoint = urlsplit(check_endpoint(access.endpoint))
    token = access.session_token.get_secret_value() if access.session_token else None
    if client == "s3fs":
        import s3fs

        handler = s3fs.S3FileSystem(
            key=access.access_key_id,
            secret=access.secret_access_key.get_secret_value(),
            token=token,
            endpoint_url=access.endpoint,
            client_kwargs={"region_name": access.region, "verify": access.ca_bundle or True},
            config_kwargs={
                "s3": {"addressing_style": "path"},
                "connect_timeout": CONNECT_TIMEOUT_S,
                "read_timeout": REQUEST_TIMEOUT_S,
            },
            use_listings_cache=False,  # a stale listing hides keys that another client wrote (S8)
        )
        return Storage(location, fs.PyFileSystem(fs.FSSpecHandler(handler)))
    options = {"tls_ca_file_path": access.ca_bundle} if access.ca_bundle else {}
    return Storage(
        location,
        fs.S3FileSystem(
            access_key=access.access_key_id,
            secret_key=access.secret_access_key.get_secret_value(),
            session_token=token,
            region=access.region,
            scheme=endpoint.scheme,
            endpoint_override=endpoint.netloc,
            force_virtual_addressing=False,  # path style: no DNS name per bucket (S11)
            connect_timeout=CONNECT_TIMEOUT_S,
            request_timeout=REQUEST_TIMEOUT_S,
            **options,
        ),
    )
