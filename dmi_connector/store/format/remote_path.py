# SPDX-License-Identifier: Apache-2.0
"""Locations of stores: local paths, and paths in an object store."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dmi_connector.urls import is_url, parse_url


@dataclass(frozen=True, order=True)
class RemotePath:
    """A path in an S3 bucket, with the attributes of `pathlib.Path` that need no request.

    key: the key without leading or trailing slashes; "" for the bucket itself.
    """

    bucket: str
    key: str = ""

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.bucket, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """The last part; "" for the bucket itself."""
        return PurePosixPath(self.key).name

    @property
    def stem(self) -> str:
        """`name` without its suffix."""
        return PurePosixPath(self.key).stem

    @property
    def suffix(self) -> str:
        """The part of `name` from its last dot on, with the dot."""
        return PurePosixPath(self.key).suffix

    @property
    def parent(self) -> RemotePath:
        """The path without its last part."""
        return RemotePath(self.bucket, self.key.rpartition("/")[0])

    def absolute(self) -> RemotePath:
        """The path itself."""
        return self


Place = Path | RemotePath
Given = str | os.PathLike[str] | RemotePath
"""Types that public functions accept as the location of a store."""


def local_path(path: str | os.PathLike[str]) -> Path:
    """A local path, with `~` expanded to the user's home."""
    return Path(os.path.expanduser(path))


def place_of(path: Given, option: str = "path") -> Place:
    """The location that a path or URL names. option: name in error messages. Raises ValueError for an invalid URL."""
    if isinstance(path, RemotePath):
        return path
    text = os.fspath(path)
    return RemotePath(*parse_url(option, text)) if is_url(text) else local_path(text)


def is_gone(place: Place) -> bool:
    """Whether a local path does not exist. False for a path in an object store."""
    return isinstance(place, Path) and not place.exists()
