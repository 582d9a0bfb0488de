"""The proof that a store works with these keys: a real put, get, list and delete, each with a short limit.

Runs on the host with the `minio` package alone. Every failure is one sentence that names the setting to blame.
A small GET or PUT tells keys, secrets and buckets apart; a HEAD does not (measured).
"""

from __future__ import annotations

import io
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable
from urllib.parse import urlsplit

import certifi
import urllib3
from minio import Minio
from minio.error import InvalidResponseError, S3Error, ServerError

from lab.errors import UserError
from lab.settings import StoreAccess
from lab.storage import check_endpoint

LIMIT_S = 5.0
"""Seconds for all of a probe."""

_PREFIX = ".lab-probe"
_UNKNOWN_KEY = {"InvalidAccessKeyId", "InvalidAccessKey"}
_NO_BUCKET = {"NoSuchBucket", "AccessDenied", "AllAccessDisabled", "PermanentRedirect", "InvalidBucketName"}
_SKEWED = {"RequestTimeTooSkewed", "RequestExpired"}


def client(access: StoreAccess, timeout_s: float = 2.0) -> Minio:
    """A client without retries: connecting and each answer may take `timeout_s` at most."""
    parts = urlsplit(access.endpoint)
    secure = parts.scheme == "https"
    pool = urllib3.PoolManager(
        timeout=urllib3.Timeout(connect=timeout_s, read=timeout_s),
        retries=False,
        cert_reqs="CERT_REQUIRED",
        ca_certs=access.ca_bundle or certifi.where(),
    )
    return Minio(
        endpoint=parts.netloc,
        access_key=access.access_key_id,
        secret_key=access.secret_access_key.get_secret_value(),
        session_token=access.session_token.get_secret_value() if access.session_token else None,
        secure=secure,
        region=access.region,
        http_client=pool,
    )


def probe(access: StoreAccess, *, setting: str = "S3_ENDPOINT", limit_s: float = LIMIT_S) -> None:
    """Put, get, list and delete one small key below `.lab-probe/`.

    Args:
        access: endpoint and keys to try.
        setting: the setting that the endpoint came from, for the message.
        limit_s: seconds for everything.

    Raises:
        UserError: one sentence with the setting that is wrong.
    """
    check_endpoint(access.endpoint, setting)
    begin = time.monotonic()
    parts = urlsplit(access.endpoint)
    host = parts.hostname or ""
    try:
        _within(limit_s * 0.6, lambda: socket.getaddrinfo(host, parts.port or 443, type=socket.SOCK_STREAM))
    except OSError:
        raise UserError(
            f"{setting}={access.endpoint} names the unknown host {host!r}: correct the host name."
        ) from None
    left = begin + limit_s - time.monotonic()
    try:
        _within(left, lambda: _exchange(access, setting, limit_s))
    except TimeoutError:
        raise _too_slow(access, setting, limit_s) from None


def _exchange(access: StoreAccess, setting: str, limit_s: float) -> None:
    # Less than half the limit an answer: a frozen server is named by the first of them.
    store = client(access, timeout_s=min(2.0, limit_s * 0.4))
    key = f"{_PREFIX}/{uuid.uuid4().hex}"
    content = key.encode()
    try:
        try:
            store.put_object(access.bucket, key, io.BytesIO(content), len(content))
        except S3Error as error:
            raise _write_refused(store, access, setting, error) from None
        response = store.get_object(access.bucket, key)
        try:
            read = response.read()
        finally:
            response.close()
            response.release_conn()
        listed = [
            item.object_name for item in store.list_objects(access.bucket, f"{_PREFIX}/", recursive=True)
        ]
        store.remove_object(access.bucket, key)
    except S3Error as error:
        raise _s3_sentence(access, setting, error) from None
    except (InvalidResponseError, ServerError, urllib3.exceptions.HTTPError, ValueError, OSError) as error:
        raise _transport_sentence(access, setting, error, limit_s) from None
    if read != content or key not in listed:
        raise UserError(
            f"{setting}={access.endpoint} does not give back what was written to S3_BUCKET={access.bucket}: "
            "point it at an S3 server with consistent reads."
        )


def _within(limit_s: float, call: Callable[[], object]) -> None:
    """Call with a limit that the resolver, or a server that drips a byte a second, would not keep.

    Raises:
        TimeoutError: the limit has passed; the call's thread ends by itself some time.
        Exception: what the call raised.
    """
    raised: list[Exception] = []
    done = threading.Event()

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  handed to the caller's thread, which raises it
            raised.append(error)
        done.set()

    threading.Thread(target=run, daemon=True).start()
    if not done.wait(max(0.0, limit_s)):
        raise TimeoutError
    if raised:
        raise raised[0]


def _too_slow(access: StoreAccess, setting: str, limit_s: float) -> UserError:
    return UserError(
        f"{setting}={access.endpoint} did not answer within {limit_s:g} s: check that the store there runs, "
        "or correct the address."
    )


def _write_refused(store: Minio, access: StoreAccess, setting: str, error: S3Error) -> UserError:
    """Tell a bucket that may only be read from one that is not there or belongs to others."""
    if error.code == "AccessDenied":
        try:
            next(iter(store.list_objects(access.bucket, prefix=f"{_PREFIX}/")), None)
        except S3Error:
            return _s3_sentence(access, setting, error)
        return UserError(
            f"S3_ACCESS_KEY_ID may read S3_BUCKET={access.bucket} at {access.endpoint} but not write to it: "
            "give the key write access or set another."
        )
    return _s3_sentence(access, setting, error)


def _s3_sentence(access: StoreAccess, setting: str, error: S3Error) -> UserError:
    code = error.code or ""
    where = f"the store at {access.endpoint}"
    if code in _UNKNOWN_KEY:
        return UserError(f"S3_ACCESS_KEY_ID is not known to {where}: set a key of that store.")
    if code == "SignatureDoesNotMatch":
        return UserError(
            f"S3_SECRET_ACCESS_KEY is not the secret of S3_ACCESS_KEY_ID at {where}: correct it."
        )
    if code in {"InvalidToken", "ExpiredToken", "InvalidTokenId"}:
        return UserError(f"S3_SESSION_TOKEN is not valid (any more) at {where}: fetch a new one or unset it.")
    if code == "AuthorizationHeaderMalformed":
        return UserError(f"S3_REGION={access.region} is not the region of {where}: set the one it names.")
    if code in _SKEWED:
        return UserError(
            f"the clocks of this machine and of {where} ({setting}) differ too much: set the clock (NTP)."
        )
    if code in _NO_BUCKET:
        return UserError(
            f"S3_BUCKET={access.bucket} is missing at {access.endpoint} or closed to S3_ACCESS_KEY_ID: "
            "make the bucket, or set one that the key may use."
        )
    return UserError(
        f"{setting}={access.endpoint} answered {code or 'an error without a code'}: check the store."
    )


def _transport_sentence(
    access: StoreAccess, setting: str, error: Exception, limit_s: float = LIMIT_S
) -> UserError:
    parts = urlsplit(access.endpoint)
    shown = f"{setting}={access.endpoint}"
    chain = list(_causes(error))
    text = " ".join(str(each) for each in chain)
    if any(isinstance(each, ssl.SSLCertVerificationError) for each in chain) or "CERTIFICATE_VERIFY" in text:
        return UserError(
            f"{shown} has a certificate that is not trusted: set S3_CA_BUNDLE to its authority's file."
        )
    # Before the time-outs, among which urllib3 counts a refused connection.
    if any(_is(each, urllib3.exceptions.NewConnectionError, ConnectionRefusedError) for each in chain):
        return UserError(f"{shown} is refused, nothing listens there: correct the port or start the store.")
    if any(_is(each, urllib3.exceptions.TimeoutError, TimeoutError) for each in chain):
        return _too_slow(access, setting, limit_s)
    if any(_is(each, urllib3.exceptions.SSLError, ssl.SSLError) for each in chain):
        return UserError(f"{shown} is not an https port: write http://{parts.netloc} or give the https port.")
    if parts.scheme == "http" and _speaks_tls(parts.hostname or "", parts.port or 80):
        return UserError(f"{shown} is an https port: write https://{parts.netloc}.")
    return UserError(
        f"{shown} does not speak S3 ({type(error).__name__}): correct the address or the scheme."
    )


def _is(error: BaseException, *kinds: type[BaseException]) -> bool:
    return isinstance(error, kinds)


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        reason = getattr(error, "reason", None)
        error = reason if isinstance(reason, BaseException) else (error.__cause__ or error.__context__)
    return found


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), timeout=1) as plain, context.wrap_socket(plain):
            return True
    except OSError:
        return False


def ensure_bucket(root: StoreAccess) -> None:
    """Make `root.bucket` with the store's own account; nothing happens when it is there.

    Raises:
        UserError: the store refuses, in one sentence.
    """
    store = client(root)
    try:
        if not store.bucket_exists(root.bucket):
            store.make_bucket(root.bucket)
    except S3Error as error:
        raise _s3_sentence(root, "the store's endpoint", error) from None
    except (InvalidResponseError, ServerError, urllib3.exceptions.HTTPError, OSError) as error:
        raise _transport_sentence(root, "the store's endpoint", error) from None


def refuses_other_buckets(access: StoreAccess, other: str) -> bool:
    """Whether the store keeps these keys out of the bucket `other`: it may neither be written nor listed."""
    store = client(access)
    attempts = (
        lambda: store.put_object(other, f"{_PREFIX}/intruder", io.BytesIO(b"x"), 1),
        lambda: list(store.list_objects(other)),
    )
    for attempt in attempts:
        try:
            attempt()
        except S3Error as error:
            if error.code != "AccessDenied":
                return False
        else:
            return False
    return True
