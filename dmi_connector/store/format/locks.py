# SPDX-License-Identifier: Apache-2.0
"""Locks on store directories (docs/FORMAT.md, section 10).

Writers and readers hold a shared flock on the directory of a store. Repair and removal take it exclusively, without
waiting. The kernel releases a lock when its process ends for any reason. A process id in a file would not be safe,
because the id could meanwhile belong to another process or container. A lock on a directory stays valid if the
directory is renamed or its files are removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where stores are only read, without a lock
    fcntl = None  # type: ignore[assignment]

from dmi_connector.store.format.linux import check_linux
from dmi_connector.store.format.schema import PARTIAL_SUFFIX

logger = logging.getLogger(__name__)

LIFE_LOCK = "DMI_LIFE_LOCK"
"""Environment variable that `dmi run` sets for its engines: paths of lock files, one per line. Each process of an
engine holds a shared lock on these files. An exclusive lock can be taken only after all these processes have ended.
"""
_life_locks: list[int] = []
"""Descriptors of the files in LIFE_LOCK. They stay open, so that the locks end with the process."""
_LOCKED_WITHIN_S = 10.0
"""Maximum time between the creation of a partial directory and the writer's lock on it."""
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


class PartialLock:
    """The shared lock of a process that writes to a partial directory. The directory is created if missing.

    It waits while a repair has the directory locked. On a file system without flock it logs a warning and continues
    without a lock; `claim` fails there. Raises OSError.
    """

    def __init__(self, partial: str) -> None:
        self._partial = partial
        while True:
            os.makedirs(partial, exist_ok=True)
            try:
                self._fd = os.open(partial, _DIRECTORY | _NO_FOLLOW)
            except FileNotFoundError:
                continue  # a repair has just removed it
            try:
                fcntl.flock(self._fd, fcntl.LOCK_SH)
            except OSError as error:
                logger.warning("dmi: %s cannot be locked: %s", partial, error)
            if not self.release_if_renamed():
                return

    def release_if_renamed(self) -> bool:
        """Release the lock if the directory was renamed or removed. Returns whether it was."""
        if _has_name(self._fd, self._partial):
            return False
        self.release()
        return True

    def release(self) -> None:
        """Release the lock."""
        os.close(self._fd)


def hold_life_lock() -> None:
    """Hold shared locks on the files in LIFE_LOCK until this process ends. Raises OSError."""
    for path in filter(None, os.environ.get(LIFE_LOCK, "").split("\n")):
        fd = os.open(path, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_SH)
        _life_locks.append(fd)


@contextlib.contextmanager
def lock_alone(path: str | os.PathLike[str]) -> Iterator[bool]:
    """Hold an exclusive lock on a file, which is created if missing. Yields False if another process holds a lock.

    Raises OSError if the file system has no such locks.
    """
    with _lock_file(path) as fd:
        yield _lock(fd, path, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def hold_part(path: str | os.PathLike[str]) -> Iterator[None]:
    """Hold a shared lock on a file, which is created if missing. Waits while another process holds an exclusive lock.

    Raises OSError if the file system has no such locks.
    """
    with _lock_file(path) as fd:
        _lock(fd, path, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def _lock_file(path: str | os.PathLike[str]) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | _NO_FOLLOW, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def _lock(fd: int, path: str | os.PathLike[str], how: int) -> bool:
    """Lock an open file. Returns False if another process holds a lock. Raises OSError if locks are not supported."""
    try:
        fcntl.flock(fd, how)
    except BlockingIOError:
        return False
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be locked, so a run is not safe there: {error}") from error
    return True


@contextlib.contextmanager
def claim(directory: str | os.PathLike[str]) -> Iterator[bool]:
    """Hold an exclusive lock on a directory. Yields False if another process holds a lock, or has just renamed it.

    Raises OSError if the file system has no such locks.
    """
    if fcntl is None:
        check_linux("a lock")
    fd = os.open(directory, _DIRECTORY | _NO_FOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = _has_name(fd, directory)
    except BlockingIOError:
        alone = False
    except OSError as error:
        os.close(fd)
        raise OSError(error.errno, f"whether it is still written is unknown, since locks fail: {error}") from error
    try:
        yield alone
    finally:
        os.close(fd)


def is_abandoned(partial: str | os.PathLike[str]) -> bool:
    """Whether a partial directory exists and no process holds its lock. False if this is unknown.

    An empty directory younger than _LOCKED_WITHIN_S counts as held: its writer may not have locked it yet.
    """
    try:
        if not os.listdir(partial) and time.time() - os.stat(partial).st_mtime < _LOCKED_WITHIN_S:
            return False
        with claim(partial) as alone:
            return alone
    except OSError:
        return False


def share(store: str | os.PathLike[str]) -> int | None:
    """A file descriptor with a shared lock on a finished store, which is not removed while the descriptor is open.

    None on a system without such locks: there, this package does not remove stores.

    Raises FileNotFoundError if the store has just been removed.
    """
    if fcntl is None:
        return None
    fd = os.open(store, _DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
    except OSError as error:
        logger.warning("dmi: %s cannot be locked and may be removed while it is read: %s", store, error)
    try:
        if not os.path.samestat(os.stat(store), os.fstat(fd)):
            raise FileNotFoundError(f"{store} was removed just now")
    except OSError:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def hold_shared(store: object) -> Iterator[None]:
    """Hold the lock of `share` within the block if `store` is a directory that can be opened; otherwise no lock."""
    try:
        fd = share(store) if isinstance(store, Path) and store.is_dir() else None
    except OSError:  # it was removed just now, or cannot be read: the reader in the block says so
        fd = None
    try:
        yield
    finally:
        if fd is not None:
            os.close(fd)


def hold_source(final: str) -> int:
    """A file descriptor with a shared lock on the directory of a store, finished or not.

    The store is neither repaired nor removed while the descriptor is open. The descriptor stays valid when the
    directory is renamed. Raises FileNotFoundError if there is no directory, and OSError if it is being removed or
    repaired.
    """
    for path in (final + PARTIAL_SUFFIX, final):
        try:
            fd = os.open(path, _DIRECTORY | _NO_FOLLOW)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise OSError(f"{path} is being removed or repaired") from None
        except OSError as error:
            logger.warning("dmi: %s cannot be locked and may be removed while it is read: %s", path, error)
        return fd
    raise FileNotFoundError("it is gone")


def hold_upload(store: str | os.PathLike[str]) -> int:
    """A file descriptor with the shared lock of a process that will upload a finished store. Raises OSError."""
    fd = _open_document(store)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
    except OSError:
        os.close(fd)
        raise
    return fd


def is_to_be_uploaded(store: str | os.PathLike[str]) -> bool:
    """Whether a running process will upload this finished store. Raises OSError, also without support for locks."""
    fd = _open_document(store)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _open_document(store: str | os.PathLike[str]) -> int:
    """Open the root document of a store. Uploads lock this file; readers and removals lock the directory."""
    return os.open(os.path.join(store, "zarr.json"), os.O_RDONLY | _NO_FOLLOW)


def _has_name(fd: int, path: str | os.PathLike[str]) -> bool:
    """Whether `path` is the directory that is open as `fd`."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False
