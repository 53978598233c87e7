# SPDX-License-Identifier: Apache-2.0
"""Removes old stores, and measures the size of all stores (docs/OPERATIONS.md lists the guarantees).

A store is removed only under an exclusive lock, taken without waiting (locks.py). The store is first renamed, so that
no reader finds a part of it. Then a line in the index records the removal, and the files are deleted.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dmi_connector.store.format.linux import check_linux
from dmi_connector.store.format.locks import claim, is_abandoned
from dmi_connector.store.format.paths import no_follow
from dmi_connector.store.format.schema import ATTR_KEY, INDEX_NAME, PARTIAL_SUFFIX
from dmi_connector.store.write.finish.commit import append_index, now
from dmi_connector.store.write.finish.ended import EndedCaptures

logger = logging.getLogger(__name__)

REMOVING_SUFFIX = ".removing"
"""Suffix of the name of a store that is being removed."""
RECENT_S = 60.0
"""`Usage.over` lists the stores that were finished within this many seconds before the measurement."""
USAGE_NAME = ".usage.json"
"""JSON file with the fields of a `Usage`, and "measured", the time in ISO 8601. `Keeper` writes the file, and
engine/scheduler/quota.py reads it.
"""


class Usage(NamedTuple):
    """The disk space of stores.

    nbytes: bytes of all stores, including unfinished ones. unfinished: bytes of each store that is being written, by
    its final path. over: final paths of stores that were finished in the last RECENT_S seconds, including removed ones,
    and of abandoned stores. began: when the measurement began (seconds since the epoch).
    """

    nbytes: int
    unfinished: dict[str, int]
    over: list[str]
    began: float


@dataclass(frozen=True)
class StoredCapture:
    """A finished store. finished: when its root document was written, in seconds since the epoch. nbytes: size."""

    path: Path
    finished: float
    nbytes: int


class StoreSizes:
    """Sizes of stores. A finished store is measured once, because it does not change."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[int, float]] = {}
        self._captures: dict[tuple[str, int], bool] = {}

    def of(self, entry: os.DirEntry[str]) -> int:
        """Bytes of the files of a store, finished or not."""
        return self.look(entry)[0]

    def forget_others(self, paths: Container[str]) -> None:
        """Forget stores whose path is not in `paths`: they were removed."""
        self._known = {key: found for key, found in self._known.items() if key[0] in paths}
        self._captures = {key: found for key, found in self._captures.items() if key[0] in paths}

    def is_capture(self, entry: os.DirEntry[str]) -> bool:
        """Whether the root document of a store is that of a capture. It is read once."""
        key = (entry.path, entry.inode())
        if key not in self._captures:
            self._captures[key] = _is_capture(entry.path)
        return self._captures[key]

    def look(self, entry: os.DirEntry[str]) -> tuple[int, float]:
        """(bytes, when the root document was written in seconds since the epoch; 0 without a root document)."""
        key = (entry.path, entry.inode())
        if key not in self._known:
            found = _tree_bytes(entry.path), _finished(entry.path) or 0.0
            if not entry.name.endswith(".zarr") or not found[1]:  # unfinished, or a copy that is not complete yet
                return found
            self._known[key] = found
        return self._known[key]


def _finished(store: str) -> float | None:
    """When the root document of a store was written, in seconds since the epoch; None without a root document."""
    try:
        return os.lstat(os.path.join(store, "zarr.json")).st_mtime
    except FileNotFoundError:
        return None
    except PermissionError as error:
        _tell(store, str(error))
        return None


def _is_capture(store: str) -> bool:
    """Whether a Zarr store is a capture. False if its root document cannot be read."""
    try:
        with open(os.path.join(store, "zarr.json"), opener=no_follow) as f:
            return ATTR_KEY in json.load(f)["attributes"]
    except FileNotFoundError:
        return False  # it has just been removed
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _tell(store, f"its zarr.json cannot be read: {error!r}")
        return False


@functools.lru_cache(maxsize=1024)
def _tell(path: str, why: str) -> None:
    """Log that a directory is skipped, once."""
    logger.warning("dmi: retention and measuring skip %s: %s", path, why)


def _tree_bytes(path: str) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue  # it has just been renamed or removed
    return total


def _stores(directory: str | os.PathLike[str], deep: bool = False) -> Iterator[os.DirEntry[str]]:
    """Directories of stores, finished or not. deep: also search subdirectories. Links are not followed."""
    try:
        with os.scandir(directory) as found:
            entries = [entry for entry in found if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return
    except PermissionError as error:
        if not deep:
            raise
        _tell(os.fspath(directory), str(error))  # such as lost+found
        return
    for entry in entries:
        if ".zarr" in entry.name:
            yield entry
        elif deep and not entry.name.startswith("."):  # such directories hold links to sources of borrowed rows
            yield from _stores(entry.path, True)


def measure(directory: str, roots: Sequence[str] = (), sizes: StoreSizes | None = None) -> Usage:
    """The disk space of all stores directly in `directory`, and of those at any depth below `roots`.

    sizes: known sizes, which are updated.
    """
    sizes, began = sizes or StoreSizes(), time.time()
    entries = [*_stores(os.path.realpath(directory))]
    entries += [entry for root in roots for entry in _stores(os.path.realpath(root), True)]
    found = {entry.path: sizes.look(entry) for entry in entries}
    sizes.forget_others(found)
    unfinished: dict[str, int] = {}
    over = [path for path, (_, when) in found.items() if path.endswith(".zarr") and when > began - RECENT_S]
    for path, (nbytes, _) in found.items():
        if path.endswith(PARTIAL_SUFFIX):
            final = path.removesuffix(PARTIAL_SUFFIX)
            if is_abandoned(path):
                over.append(final)
            else:
                unfinished[final] = nbytes
    return Usage(sum(nbytes for nbytes, _ in found.values()), unfinished, over, began)


def finished_stores(directory: str | os.PathLike[str], sizes: StoreSizes | None = None) -> list[StoredCapture]:
    """The finished captures directly in a directory, oldest first. Other Zarr stores are left out.

    sizes: as in `measure`.
    """
    sizes = sizes or StoreSizes()
    found = []
    for entry in _stores(directory):
        if entry.name.endswith(".zarr"):
            finished = _finished(entry.path)
            if finished is not None and sizes.is_capture(entry):  # else it is not a capture, or was just removed
                found.append(StoredCapture(Path(entry.path), finished, sizes.of(entry)))
    return sorted(found, key=lambda store: store.finished)


def prune(
    directory: str | os.PathLike[str],
    older_than: float | None = None,
    keep_bytes: int | None = None,
    sizes: StoreSizes | None = None,
    dry_run: bool = False,
) -> list[StoredCapture]:
    """Remove finished stores, oldest first. Stores that a process reads or writes are not removed.

    older_than: remove stores that were finished more than this many seconds ago. keep_bytes: remove stores while the
    finished stores have more bytes than this. None: no such limit. sizes: as in `measure`. Returns the removed stores
    (with dry_run: those that it would try to remove).

    Raises NeedsLinux. Raises OSError if locks fail or stores cannot be removed, after all other stores were tried.
    """
    check_linux("prune")
    errors = [] if dry_run else _remove_leftovers(directory)
    stores = finished_stores(directory, sizes)
    total, moment, removed = sum(store.nbytes for store in stores), time.time(), []
    for store in stores:
        old = older_than is not None and moment - store.finished > older_than
        if not old and (keep_bytes is None or total <= keep_bytes):
            break
        try:
            if dry_run or remove_store(store.path):
                removed.append(store)
                total -= store.nbytes
        except OSError as error:
            errors.append(f"{store.path.name}: {error}")
    if errors:
        raise OSError(f"{len(errors)} stores cannot be removed: {'; '.join(errors)}")
    return removed


def remove_store(path: Path, line: dict[str, Any] | None = None) -> bool:
    """Remove a store unless a process reads or writes it. Returns whether the store is gone. Raises OSError.

    line: the line to append to the index; None for a line with the event "remove". A directory without an index gets no
    line.
    """
    try:
        with claim(path) as alone:
            if not alone:
                return False
            condemned = path.with_name(path.name + REMOVING_SUFFIX)
            if condemned.exists():  # of an earlier store of this name, whose removal was interrupted
                shutil.rmtree(condemned, ignore_errors=True)
            os.rename(path, condemned)
            if path.with_name(INDEX_NAME).exists():
                removed = {"event": "remove", "store": path.name, "state": "removed", "removed": now()}
                append_index(str(path.parent), line or removed)
            shutil.rmtree(condemned)
    except FileNotFoundError:
        if path.exists():
            raise
    return True  # removed here, or by another process just before


def _remove_leftovers(directory: str | os.PathLike[str]) -> list[str]:
    """Finish interrupted removals. Returns the messages of errors."""
    errors = []
    for entry in _stores(directory):
        if entry.name.endswith(".zarr" + REMOVING_SUFFIX):
            try:
                with claim(entry.path) as alone:
                    if alone:
                        shutil.rmtree(entry.path)
            except FileNotFoundError:
                continue  # another process has just finished this removal
            except OSError as error:
                errors.append(f"{entry.name}: {error}")
    return errors


@dataclass
class Keeper:
    """Measures and prunes a directory of stores every `interval_s` seconds, on a thread of the coordinator.

    roots: more directories to measure. measure: whether to keep USAGE_NAME up to date, for `max_total_bytes` and
    `min_free_bytes`. retain_seconds, retain_bytes: `older_than` and `keep_bytes` of `prune`; 0 for no limit.
    interval_s: minimum seconds between two rounds. A long round is followed by a pause of ten times its length.
    """

    directory: str
    roots: Sequence[str] = ()
    measure: bool = False
    retain_seconds: int = 0
    retain_bytes: int = 0
    interval_s: float = 5.0
    sizes: StoreSizes = field(default_factory=StoreSizes)
    _ended: EndedCaptures = field(init=False)

    def __post_init__(self) -> None:
        self._ended = EndedCaptures(self.directory)

    def start(self) -> None:
        """Start the thread, unless there is nothing to do."""
        if self.measure or self.retain_seconds or self.retain_bytes:
            threading.Thread(target=self._run, name="dmi-keeper", daemon=True).start()

    def round(self) -> None:
        """Prune, then measure, once. Measures also if pruning fails. Raises OSError."""
        try:
            if self.retain_seconds or self.retain_bytes:
                prune(self.directory, self.retain_seconds or None, self.retain_bytes or None, self.sizes)
        finally:
            if self.measure:
                ended = self._ended.of_last(RECENT_S)  # read before measuring, so that their bytes are measured
                usage = measure(self.directory, self.roots, self.sizes)
                write_usage(self.directory, usage._replace(over=list(dict.fromkeys((*usage.over, *ended)))))

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                self.round()
            except OSError as error:
                logger.error("dmi: retention or measuring of %s failed: %s", self.directory, error)
            time.sleep(max(self.interval_s, 10 * (time.monotonic() - began)))  # at most a tenth of a core


def write_usage(directory: str, usage: Usage) -> None:
    """Replace USAGE_NAME atomically. Raises OSError."""
    path = os.path.join(directory, USAGE_NAME)
    own = f"{path}.{os.getpid()}"
    with open(own, "w", opener=no_follow) as f:
        json.dump({**usage._asdict(), "measured": now()}, f)
    os.rename(own, path)


def usage_stamp(directory: str) -> tuple[int, int] | None:
    """(inode, modification time in ns) of USAGE_NAME, which each measurement changes; None without a measurement."""
    try:
        found = os.lstat(os.path.join(directory, USAGE_NAME))
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def read_usage(directory: str) -> Usage | None:
    """The keeper's last measurement; None if there is none, if it is damaged, or if another version wrote it.

    Raises OSError.
    """
    try:
        with open(os.path.join(directory, USAGE_NAME), opener=no_follow) as f:
            found = json.load(f)
            return Usage(*(found[name] for name in Usage._fields))
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None  # the keeper's next measurement replaces the file
