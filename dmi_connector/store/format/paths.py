# SPDX-License-Identifier: Apache-2.0
"""Names, directories and modes of stores. Clients influence names, so no name is trusted (docs/OPERATIONS.md)."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence

from dmi_connector.option_values import OptionError
from dmi_connector.settings import FILE_MODES

UMASKS = dict(zip(FILE_MODES, (0o077, 0o027, 0o022), strict=True))
"""{file_mode: umask}. Processes that write stores set the umask."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_STEM_LENGTH = 160
"""Maximum length of a store's name without suffixes, so that with suffixes it has less than 255 bytes."""


def safe(text: str) -> str:
    """`text` with "_" for each run of characters that store names do not allow. text: a key or request id."""
    return _UNSAFE.sub("_", text)


def leaves_store(path: str) -> bool:
    """Whether a path that a store lists may lead out of the store, on any operating system."""
    return path.startswith("/") or ".." in path.split("/") or "\\" in path or ":" in path  # C: is a drive of Windows


def store_name(key: str | None, request_id: str) -> str:
    """A new, unique name for the store of a request: one path component of at most 178 bytes."""
    stem = safe(f"{key}--{request_id}" if key else request_id)[:_STEM_LENGTH].lstrip(".-")
    return f"{stem or 'request'}-{os.urandom(6).hex()}.zarr"


def may_be_named(name: str, word: str) -> bool:
    """Whether `word` may be the key or request id of a store with this name. A long one is truncated in a name."""
    return safe(word).lstrip(".-") in name or len(name) > _STEM_LENGTH


def no_follow(path: str, flags: int) -> int:
    """An opener for `open()` that raises OSError for a symbolic link. New files get mode 0666 minus the umask."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def make_directory(path: str, file_mode: str) -> None:
    """Create a directory with the mode of `file_mode`. An existing directory keeps its mode. Raises OSError.

    Data-parallel engines may call this at the same time.
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
    """Within the block, new files and directories have no more permissions than `directory`."""
    old = os.umask(~os.stat(directory).st_mode & 0o777)
    try:
        yield
    finally:
        os.umask(old)


def custom_directory(path: str, roots: Sequence[str], file_mode: str) -> str:
    """The directory that a request names, created if missing.

    path: an absolute path without "." and "..". It must lie below one of `roots`, with no link below the root. Raises
    OptionError.
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
    """Descriptor of the directory `name` in `parent`, created if missing. Raises OSError for a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another request has just made it
            os.mkdir(name, mode, dir_fd=parent)
    fd = os.open(name, flags, dir_fd=parent)
    os.fchmod(fd, mode)  # independent of the umask
    return fd
