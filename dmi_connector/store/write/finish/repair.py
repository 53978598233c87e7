# SPDX-License-Identifier: Apache-2.0
"""Repairs partial stores, and finishes interrupted uploads."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dmi_connector.store.format import schema
from dmi_connector.store.format.completeness import OWN_ENDS
from dmi_connector.store.format.linux import check_linux
from dmi_connector.store.format.locks import claim, is_to_be_uploaded
from dmi_connector.store.format.paths import umask_of
from dmi_connector.store.format.remote_path import RemotePath
from dmi_connector.store.read.index import CaptureInfo, indexed_captures, unrecorded_stores
from dmi_connector.store.read.journal import JOURNAL_PREFIX
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.read.verify import damaged_files
from dmi_connector.store.write.finish.commit import (
    append_finish,
    append_index,
    publish,
    raw_bytes,
    remove_partial,
    written_attrs,
)
from dmi_connector.store.write.finish.salvage import Salvage
from dmi_connector.store.write.finish.upload import RemoteIndexPart, finish_upload, leave_upload
from dmi_connector.store.write.settings import UploadSettings
from dmi_connector.urls import parse_url

PARTIAL = ".zarr" + schema.PARTIAL_SUFFIX
LOCKED_WITHIN_S = 60.0
"""Maximum time from the end of a store until a server's uploader locks it. The uploader may have to start first."""


@dataclass
class Outcome:
    """The outcome of the repair of one store.

    state: one of these.
      - A partial store: "salvaged" (it is now an incomplete store), "published" (it was complete but not yet renamed),
        "written" (skipped, because a process still writes it), "empty" (nothing can be salvaged), "removed" (it was
        empty), "refused" (a store already has its name) or "failed".
      - A finished store: "recorded" (its last line was missing in the index, and was added) or "failed".
      - An interrupted upload: "uploaded", "not uploaded", or "waits" (a running server will upload it).

    store: path of the finished store. notes: losses and problems. url: the upload's destination.
    """

    partial: str
    state: str
    store: str | None = None
    num_tokens: int = 0
    missing: list[list[int]] = field(default_factory=list)
    hooks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    url: str | None = None

    def __str__(self) -> str:
        if self.url:
            return "\n  ".join([f"{self.store}: {self.state} to {self.url}", *self.notes])
        text = f"{self.store or self.partial}: {self.state}"
        if self.store:
            lost = sum(stop - start for start, stop in self.missing)
            text += f", {self.num_tokens - lost} of {self.num_tokens} rows of {', '.join(self.hooks)}"
        return "\n  ".join([text, *self.notes])


def repair(path: str | os.PathLike[str], remove_empty: bool = False) -> list[Outcome]:
    """Repair a partial store, or all partial stores of a directory. Finished stores are never changed.

    For a directory, it also adds missing last lines of stores to the index, and uploads the stores that the index lists
    as not uploaded.

    remove_empty: remove partial stores from which nothing can be salvaged. An error in one partial store becomes its
    outcome, and the others are still repaired. Raises NeedsLinux.
    """
    check_linux("repair")
    root = Path(os.path.abspath(path))
    outcomes = []
    for partial in [root] if root.name.endswith(PARTIAL) else sorted(root.glob("*" + PARTIAL)):
        try:
            with claim(partial) as alone, umask_of(partial):
                outcomes.append(_repair(partial, remove_empty) if alone else Outcome(str(partial), "written"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, FileNotFoundError) and not partial.exists():
                continue  # it was finished or aborted meanwhile
            outcomes.append(Outcome(str(partial), "failed", notes=[f"{type(error).__name__}: {error}"]))
    if not root.name.endswith(PARTIAL):
        for what, step in (("index", record_ends), ("uploads", finish_uploads)):
            try:
                outcomes += step(root)
            except (OSError, ValueError, KeyError) as error:
                outcomes.append(Outcome(str(root), "failed", notes=[f"{what}: {error}"]))
    return outcomes


def record_ends(directory: Path) -> list[Outcome]:
    """Append the missing last lines of finished stores to the index.

    A store that a process has open is skipped: the process may be the writer, which then appends the line itself.
    Readers also find a store without the line. A damaged store becomes a failed outcome. Raises OSError.
    """
    outcomes = []
    for store in unrecorded_stores(directory):
        try:
            with claim(store) as alone, umask_of(directory):
                if alone:
                    outcomes.append(_record_end(store))
        except FileNotFoundError:
            if store.exists():
                raise  # otherwise it was just removed
    return outcomes


def _record_end(store: Path) -> Outcome:
    try:
        attrs = read_attrs(store)
        raw = raw_bytes(str(store), attrs)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError) as error:
        return Outcome(str(store), "failed", notes=[f"index: {type(error).__name__}: {error}"])
    append_finish(str(store), attrs, raw)
    return _outcome(store, "recorded", attrs)


def finish_uploads(directory: Path, retry_seconds: float = UploadSettings.retry_seconds) -> list[Outcome]:
    """Upload the stores of a directory whose upload was interrupted or failed.

    Stores that a running server will upload are skipped. retry_seconds: how long a failing upload is retried. After one
    upload has failed in spite of retries, each later store is tried only once.
    """
    unfinished = [i for i in indexed_captures(directory) if i.upload in ("pending", "failed") and i.finished]
    waiting = [info for info in unfinished if info.url and isinstance(info.store, Path) and info.store.is_dir()]
    if not waiting:
        return []
    parts: dict[RemotePath, RemoteIndexPart] = {}
    with claim(os.path.realpath(directory)) as alone, umask_of(directory):  # the path may be a link
        outcomes = []
        for info in waiting:
            if info.only_complete and isinstance(info.store, Path) and _lacks_something(info.store):
                leave_upload(info.store)
                continue
            began = time.monotonic()
            outcomes.append(_finish_upload(info, alone, retry_seconds, parts))
            # A permanent error is not retried. Other errors are retried for more than a quarter of `retry_seconds`,
            # because a pause is at most twice the previous one.
            if outcomes[-1].state == "not uploaded" and time.monotonic() - began > retry_seconds / 4:
                retry_seconds = 0
        for part in parts.values():
            with contextlib.suppress(OSError):  # without the index, readers open each store once
                part.write()
    return outcomes


def _is_new(info: CaptureInfo) -> bool:
    """Whether a store was finished just now, so that its uploader may not have locked it yet."""
    ended = datetime.datetime.fromisoformat(info.finished or info.started).astimezone(datetime.UTC)
    return (datetime.datetime.now(datetime.UTC) - ended).total_seconds() < LOCKED_WITHIN_S


def _lacks_something(store: Path) -> bool:
    """Whether a store lacks rows, or its request was aborted. False for a damaged store."""
    try:
        attrs = read_attrs(store)
    except ValueError:
        return False  # its upload fails with the reason
    return not attrs["complete"] or attrs.get("finish_reason") not in OWN_ENDS


def _finish_upload(
    info: CaptureInfo, alone: bool, retry_seconds: float, parts: dict[RemotePath, RemoteIndexPart]
) -> Outcome:
    assert isinstance(info.store, Path) and info.url is not None
    outcome = Outcome(str(info.store), "waits", str(info.store), info.num_tokens or 0, url=info.url)
    try:
        if info.upload == "pending" and not alone and (_is_new(info) or is_to_be_uploaded(info.store)):
            return outcome
        to = RemotePath(*parse_url("url in the index", info.url))
        result = finish_upload(info.store, to, retry_seconds, info.remove_local)
    except (OSError, ValueError, ImportError) as error:
        outcome.state, outcome.notes = "not uploaded", [str(error)]
        return outcome
    outcome.state = "uploaded" if result.reason is None else "not uploaded"
    outcome.notes = [] if result.reason is None else [result.reason]
    if result.line is not None:
        parts.setdefault(to.parent, RemoteIndexPart(to.parent, uuid.uuid4().hex[:12])).add(result.line)
    return outcome


def _repair(partial: Path, remove_empty: bool) -> Outcome:
    final = partial.with_suffix("")
    outcome = Outcome(str(partial), "refused")
    if os.path.lexists(final):
        outcome.notes.append(f"{final.name} exists already; remove or rename one of the two")
        return outcome
    if _is_whole(partial):
        attrs = read_attrs(partial)
        publish(str(partial), str(final), attrs, fsync=True)
        append_finish(str(final), attrs, raw_bytes(str(final), attrs))
        outcome.state = "published"
    else:
        salvage = Salvage(partial, final)
        whole = salvage.run()
        outcome.notes = [loss.words for loss in salvage.losses]
        if not whole:
            outcome.state = "empty"
            if remove_empty:
                outcome.state = "removed"
                _remove(partial, final)
            return outcome
        outcome.state = "salvaged"
    return _outcome(final, outcome.state, read_attrs(final), outcome.notes)


def _outcome(store: Path, state: str, attrs: dict[str, Any], notes: Sequence[str] = ()) -> Outcome:
    rows, missing, hooks = attrs["num_tokens"], attrs["missing"], list(attrs["hooks"])
    partial = f"{store}{schema.PARTIAL_SUFFIX}"
    return Outcome(partial, state, str(store), rows, missing, hooks, list(notes))


def _is_whole(partial: Path) -> bool:
    """Whether the root document and all files that it lists are written, so that only the rename is left.

    Raises ValueError if the root document is intact but a file is not, and no journal is left.
    """
    attrs = written_attrs(str(partial))
    if attrs is None:
        return False
    damaged = damaged_files(partial, attrs)
    if damaged and not any(partial.glob(JOURNAL_PREFIX + "*")):
        where = damaged[0].where
        raise ValueError(f"{where} is not what the root document says: fix or remove the partial store by hand")
    return not damaged


def _remove(partial: Path, final: Path) -> None:
    remove_partial(str(partial))
    if (final.parent / schema.INDEX_NAME).exists():
        append_index(str(final.parent), {"event": "abort", "store": final.name, "state": "aborted"})
