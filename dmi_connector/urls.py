# SPDX-License-Identifier: Apache-2.0
"""Parses URLs of object stores. Nothing here connects to a server."""

from __future__ import annotations

import re

from dmi_connector.wording import show

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_LONGEST_KEY = 1024
"""Maximum bytes of an object's key in S3."""


def is_url(value: object) -> bool:
    """Whether a value is a URL and not a path. A single letter before ":/" is a Windows drive, as in C:/captures."""
    return isinstance(value, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", value) is not None


def parse_url(option: str, value: object) -> tuple[str, str]:
    """Parse s3://BUCKET/PREFIX as (bucket, prefix). The prefix has no slash at either end.

    option: name of the option, for messages. Raises ValueError. Its message leaves out a value that may hold a secret.
    """
    match = re.fullmatch(r"([A-Za-z][A-Za-z0-9+.-]+):/+([^/]*)(/.*)?", value) if isinstance(value, str) else None
    fix = "give a URL as in s3://bucket/prefix"
    if match is None:
        raise ValueError(f"{option}: {show(value)} is not a URL; {fix}")
    scheme, bucket, path = match[1], match[2], (match[3] or "").strip("/")
    if "@" in bucket or "?" in bucket + path:
        raise ValueError(
            f"{option}: the URL holds a user name or a query (not shown); {fix}, with credentials in the environment"
        )
    if scheme.lower() != "s3":
        raise ValueError(f"{option}: {show(value)} has the scheme {scheme!r}, which is not supported; {fix}")
    if _BUCKET.fullmatch(bucket) is None:
        raise ValueError(f"{option}: {show(value)} names no bucket of S3; {fix}")
    parts = path.split("/") if path else []
    if {"", ".", ".."} & set(parts) or not path.isprintable() or len(path.encode()) > _LONGEST_KEY:
        raise ValueError(f"{option}: {show(value)} has a prefix that is not valid; {fix}")
    return bucket, path
