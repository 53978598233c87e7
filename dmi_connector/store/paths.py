# SPDX-License-Identifier: Apache-2.0
"""Where stores may go and with which modes: names made of what clients send, directories, files (docs/SECURITY.md)."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator, Sequence

from dmi_connector.settings import OptionError

UMASKS = {"private": 0o077, "group": 0o027, "world": 0o022}
"""What `file_mode` takes away from 0777 (directories) and 0666 (files). Processes that write set it as their umask."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_STEM_LENGTH = 160  # with the suffixes it stays below the 255 bytes of a file name


def store_name(key: str | None, request_id: str) -> str:
    """A new name for the store of a request: one path component, at most 182 bytes with its suffixes, never that of
    another request.
    """
    stem = _UNSAFE.sub("_", f"{key}--{request_id}" if key else request_id)[:_STEM_LENGTH].lstrip(".-")
    return f"{stem or 'request'}-{uuid.uuid4().hex[:12]}.zarr"


def no_follow(path: str, flags: int) -> int:
    """An opener for `open()`: it creates files with what the umask leaves of 0666, and raises OSError for a link."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def make_directory(path: str, file_mode: str) -> None:
    """Create a directory with the mode of `file_mode`; one that is there keeps its own. Raises OSError.

    Data-parallel engines may all do so at once.
    """
    try:
        os.makedirs(path)
    except FileExistsError:
        if os.path.isdir(path):
            return
        raise
    os.chmod(path, 0o777 & ~UMASKS[file_mode])


@contextlib.contextmanager
def umask_of(directory: str | os.PathLike[str]) -> Iterator[None]:
    """While it lasts this process makes its files and directories no more open than `directory` is."""
    old = os.umask(~os.stat(directory).st_mode & 0o777)
    try:
        yield
    finally:
        os.umask(old)


def custom_directory(path: str, roots: Sequence[str], file_mode: str) -> str:
    """The directory a request asked for, created where missing. It lies beneath one of `roots`, and no component below
    the root may be a link. path: absolute, without "." and "..". Raises OptionError.
    """

    def refuse(why: str) -> OptionError:
        allowed = f"give a directory below one of {', '.join(roots)}" if roots else "leave it out"
        return OptionError(f"dmi.save_path: {path!r} {why}; {allowed}")

    root = next((r for r in roots if f"{path}/".startswith(f"{r.rstrip('/')}/")), None)
    if root is None:
        raise refuse("is not allowed by this server (options allow_custom_save_path, save_path_roots)")
    real = os.path.realpath(root)
    parts = [part for part in path[len(root) :].split("/") if part]
    if any(".zarr" in part for part in parts):
        raise refuse("lies inside a store")
    try:
        fd = os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts:
                inner = _descend(fd, part, 0o777 & ~UMASKS[file_mode])
                os.close(fd)
                fd = inner
        finally:
            os.close(fd)
    except OSError as error:
        raise refuse(f"cannot be used: {error.strerror}") from error
    return os.path.join(real, *parts)


def _descend(parent: int, name: str, mode: int) -> int:
    """Descriptor of a directory in the directory `parent`, created where missing. Raises OSError for a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another request's, just now
            os.mkdir(name, mode, dir_fd=parent)
    fd = os.open(name, flags, dir_fd=parent)
    os.fchmod(fd, mode)  # whatever the umask
    return fd
