# SPDX-License-Identifier: Apache-2.0
"""Sends requests to S3, by obstore. Credentials come only from the environment, and no message contains them.

The text of a service's error may contain an access key or the string that was signed. So messages contain only the
HTTP status and the service's error code.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dmi_connector.store.format.remote_path import RemotePath

if TYPE_CHECKING:
    from obstore.store import S3Store

_RETRIES, _RETRY_S, _TIMEOUT_S = 8, 180, 60
"""Maximum number of retries of a request, seconds until the last retry, and timeout of one attempt in seconds."""
_FIRST_PAUSE, _LONGEST_PAUSE = timedelta(milliseconds=100), timedelta(seconds=5)
_LONGEST_WORDS = 80
_VARIABLES = {"AccessKeyId": "AWS_ACCESS_KEY_ID", "SecretAccessKey": "AWS_SECRET_ACCESS_KEY"}
"""{obstore's name of a credential: its environment variable}."""
_READ = (
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_ACCESS_KEY_ID"),
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SKIP_SIGNATURE"),
)
_SECRET = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
"""Variables of _READ and _SECRET are read when a client is created. If one changes, a new client is created."""


class RemoteError(OSError):
    """Raised for a failed request to an object store. lasting: whether the error is permanent."""

    def __init__(self, text: str, lasting: bool = False) -> None:
        super().__init__(text)
        self.lasting = lasting


class RemoteDenied(RemoteError, PermissionError):
    """Raised if the object store refuses the credentials, or if there are none."""


class _Used:
    """Whether this process may use the client. A fork does not copy its threads, so a request would wait forever.

    here: whether this process has used it. before_fork: whether the parent had used it before the fork.
    """

    def __init__(self) -> None:
        self.here = self.before_fork = False
        if hasattr(os, "register_at_fork"):  # Windows has no fork
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.before_fork |= self.here


_used = _Used()


def check_installed(option: str, value: object) -> None:
    """Raises ImportError that names the extra if obstore is not installed."""
    if importlib.util.find_spec("obstore") is None:
        raise ImportError(f"{option}: {value} needs obstore, which is not installed; install dmi_connector[remote]")


def bucket_store(place: RemotePath) -> S3Store:
    """The client of a bucket.

    Raises ImportError if AWS_PROFILE is set and boto3 is not installed, RemoteDenied for an invalid profile, and
    RemoteError for an invalid AWS_ENDPOINT_URL.
    """
    return _client(place.bucket, None, _environment())


def _environment() -> tuple[object, ...]:
    """The values of _READ, and a hash of the secrets, because a traceback may show arguments."""
    secrets = tuple(os.environ.get(name) for name in _SECRET)
    return (*(os.environ.get(name) for name in _READ), hash(secrets))


@functools.lru_cache(maxsize=16)
def _client(bucket: str, prefix: str | None, _environment: tuple[object, ...]) -> S3Store:
    from obstore.store import S3Store

    options: Any = {"timeout": timedelta(seconds=_TIMEOUT_S)}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    if endpoint and not re.match(r"https?://[^/]", endpoint):  # obstore panics
        raise RemoteError(
            f"AWS_ENDPOINT_URL: {endpoint!r} is not a URL; write it as in http://localhost:9000", lasting=True
        )
    config: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    if endpoint.startswith("http://"):
        options["allow_http"] = True
    if os.environ.get("AWS_PROFILE") and not os.environ.get("AWS_ACCESS_KEY_ID"):
        config["credential_provider"] = _profile()
    retry: Any = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=_RETRY_S),
        "backoff": {"init_backoff": _FIRST_PAUSE, "max_backoff": _LONGEST_PAUSE, "base": 2},
    }
    return S3Store(bucket, prefix=prefix, client_options=options, retry_config=retry, **config)


def zarr_store(place: RemotePath) -> Any:
    """A prefix as a read-only ObjectStore of zarr-python."""
    from zarr.storage import ObjectStore

    check_installed("path", place)
    client = _client(place.bucket, place.key, _environment())
    return ObjectStore(client, read_only=True)


def _profile() -> Any:
    """Credentials of AWS_PROFILE, by boto3. Raises ImportError without boto3, RemoteDenied for an invalid profile."""
    try:
        from botocore.exceptions import BotoCoreError  # type: ignore[import-not-found]
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise ImportError(
            "AWS_PROFILE: a profile needs boto3; install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error
    try:
        return Boto3CredentialProvider()
    except (BotoCoreError, ValueError) as error:
        raise RemoteDenied(
            f"AWS_PROFILE: the profile {os.environ['AWS_PROFILE']!r} gives no credentials ({type(error).__name__});"
            " name a profile of ~/.aws, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            lasting=True,
        ) from None


@contextlib.contextmanager
def requests_for(place: RemotePath) -> Iterator[ModuleType]:
    """Yield obstore. In the block, its errors become FileNotFoundError, RemoteDenied or RemoteError, with the URL.

    Raises ImportError that names the extra if obstore is not installed, and RuntimeError in a process that was forked
    after the first request.
    """
    check_installed("path", place)
    if _used.before_fork:
        raise RuntimeError(
            f"{place} cannot be read in a process that was forked after the first request; start it by the method"
            " 'spawn', as in DataLoader(..., multiprocessing_context='spawn')"
        )
    _used.here = True
    import obstore
    from obstore import exceptions

    try:
        yield obstore
    except FileNotFoundError:
        raise FileNotFoundError(f"{place} does not exist") from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise _denied(place, _words(error)) from None
    except exceptions.BaseError as error:
        words = _words(error)
        if missing := re.search(r"\bMissing (AccessKeyId|SecretAccessKey)\b", str(error)):
            raise _denied(place, f"{_VARIABLES[missing[1]]} is not set") from None
        if re.search(r"status 40[13]\b", words):  # the status of a listing
            raise _denied(place, words) from None
        if "NoSuchBucket" in words:
            raise FileNotFoundError(
                f"{place} was not found: the bucket does not exist, or AWS_REGION is not its region"
            ) from None
        told = re.sub(r"https?://\S+", "", str(error)).lower()  # the name of a bucket may contain "credential"
        # 169.254.* are the addresses of AWS's metadata services, which give the credentials of a role.
        if "169.254." in str(error) or ("credential" in told and "status" not in words):
            raise _denied(place, "no credentials were found") from None
        lasting = re.search(r"status 4(?!08|09|29)\d\d", words) is not None
        raise RemoteError(f"{place}: unexpected response of the object store ({words})", lasting) from None


def _denied(place: RemotePath, words: str) -> RemoteDenied:
    return RemoteDenied(
        f"{place}: access denied ({words}); check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and the rights"
        " of that key, or set AWS_SKIP_SIGNATURE=true for a public bucket",
        lasting=True,
    )


def _words(error: Exception) -> str:
    """The HTTP status and error code of an error, without the parts of the request that a service repeats."""
    text = str(error).replace("retry_timeout", "")  # a setting that obstore repeats
    status, code = re.search(r"\b([345]\d\d) [A-Z]\w+", text), re.search(r"<Code>(\w{1,64})</Code>", text)
    found = [f"status {status[1]}" if status else "", code[1] if code else ""]
    if not any(found):
        known = ("timed out", "timeout", "connection refused", "connection reset", "connection closed", "dns error")
        found = [next((words for words in known if words in text.lower()), type(error).__name__)]
    return ", ".join(filter(None, found))[:_LONGEST_WORDS]
