# SPDX-License-Identifier: Apache-2.0
"""One capture on the engine's side: what it consists of, and the handle that feeds it to the writers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dmi_connector.store import schema
from dmi_connector.store.group import FileList
from dmi_connector.store.process import WriterProcess
from dmi_connector.store.ring import Extent
from dmi_connector.store.schema import ArraySpec

if TYPE_CHECKING:
    from dmi_connector.store.persist import Persistence

# A chunk of this many bytes is worth the messages it costs to spread it over several processes.
SPREAD_BYTES = 16 << 20


@dataclass(frozen=True)
class CaptureSpec:
    """What to write.

    final: path of the store, NAME.zarr. arrays: those this rank writes. bases: byte offset of each array
    for one token of a chunk payload (per-sample arrays: any number); None packs token arrays in order
    without gaps. attrs: facts for the root attribute (docs/FORMAT.md, section 5); `prompt_len` is
    required on rank 0, `start` defaults to 0. rank, ranks: tensor-parallel rank and size. The rest
    defaults to the settings of Persistence.
    """

    final: str
    arrays: tuple[ArraySpec, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    bases: tuple[int, ...] | None = None
    request_id: str | None = None
    key: str | None = None
    rank: int = 0
    ranks: int = 1
    chunk_tokens: int | None = None
    segment_tokens: int | None = None
    codec: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "final", os.path.abspath(self.final))
        if not self.final.endswith(".zarr"):
            raise ValueError(f"store path {self.final!r} must end in .zarr")
        names = [a.name for a in self.arrays]
        if len(set(names)) != len(names):
            raise ValueError(f"array names repeat: {names}")
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} is outside {self.ranks} ranks")
        if self.bases is None:
            bases, at = [], 0
            for spec in self.arrays:
                bases.append(at)
                at += 0 if spec.per_sample else spec.token_bytes
            object.__setattr__(self, "bases", tuple(bases))
        elif len(self.bases) != len(self.arrays):
            raise ValueError(f"{len(self.bases)} bases were given for {len(self.arrays)} arrays")

    @property
    def partial(self) -> str:
        """Where the store is written until it is whole."""
        return self.final + schema.PARTIAL_SUFFIX

    @property
    def token_bytes(self) -> int:
        """Payload bytes of one token on this rank."""
        return sum(a.token_bytes for a in self.arrays if not a.per_sample)

    def hooks(self) -> dict[str, dict[str, Any]]:
        """The `hooks` attribute these arrays give."""
        return {
            a.name: {
                "array": a.name,
                "layers": list(a.layers),
                "width": a.width,
                "dtype": a.dtype,
                "shards": a.shards,
            }
            for a in self.arrays
        }


def balance(arrays: Sequence[ArraySpec], groups: int) -> list[list[int]]:
    """Indexes of `arrays` split into at most `groups` lists of about equal bytes per token, the largest
    first.
    """
    loads = [0] * max(1, min(groups, len(arrays)))
    parts: list[list[int]] = [[] for _ in loads]
    for i in sorted(range(len(arrays)), key=lambda i: -arrays[i].token_bytes):
        lightest = loads.index(min(loads))
        loads[lightest] += arrays[i].token_bytes
        parts[lightest].append(i)
    return [sorted(p) for p in parts]


@dataclass(eq=False)
class Group:
    """The arrays of a capture that one writer process has."""

    process: WriterProcess
    arrays: list[int]
    takes_chunks: bool
    takes_rows: frozenset[str]
    open: bool = True


class CaptureHandle:
    """Feeds one capture to its writers. Made by `Persistence.open_capture`; no method blocks on I/O.

    state: "open", "closing", "complete", "incomplete", "failed" or "aborted"; for ranks above 0
    "complete" means that this rank's part is. error: the first trouble, or None.
    """

    def __init__(self, owner: Persistence, number: int, spec: CaptureSpec, groups: list[Group], created: str) -> None:
        self.spec, self.id, self.groups, self.created = spec, number, groups, created
        self.state = "open"
        self.errors: list[str] = []
        self.failed: list[list[int]] = []
        self.files: FileList = {}
        self.bytes_raw = 0
        self.bytes_stored = 0
        self.final_message: dict[str, Any] = {}
        self.final_process: WriterProcess | None = None
        self.retried = False  # whether the commit died with its process once
        self._owner = owner

    @property
    def path(self) -> str:
        """Where the store will be."""
        return self.spec.final

    @property
    def error(self) -> str | None:
        """The first thing that went wrong, if any."""
        return self.errors[0] if self.errors else None

    def chunk(self, extent: Extent, first: int, count: int, offset: int = 0, keep: bool = False) -> None:
        """Write token rows [first, first + count), counted from the start of the store.

        first: a multiple of chunk_tokens; count: chunk_tokens, less only for the last chunk. The payload
        lies `offset` bytes into `extent`: array j as a C-order [layers, count, local_width] block at
        `bases[j] * count`. The extent is released when the writers are done with it, unless `keep`: then
        it is the caller's to release.
        """
        self._owner._post_chunk(self, extent, {"first": first, "count": count}, offset, keep, None)

    def rows(
        self,
        name: str,
        extent: Extent,
        first: int,
        count: int,
        positions: Sequence[int],
        offset: int = 0,
        keep: bool = False,
    ) -> None:
        """Write samples [first, first + count) of a per-sample array: C-order [count, local_width] at
        `offset`.

        positions: the token position of each. Extents are handled as in `chunk`.
        """
        message = {"name": name, "first": first, "count": count, "positions": [int(p) for p in positions]}
        self._owner._post_chunk(self, extent, message, offset, keep, name)

    def close(
        self,
        length: int,
        samples: Mapping[str, int] | None = None,
        token_ids: Sequence[int] | np.ndarray | None = None,
        positions: Sequence[int] | np.ndarray | None = None,
        attrs: Mapping[str, Any] | None = None,
    ) -> None:
        """Finish a capture of `length` token rows and of `samples` rows per per-sample array.

        token_ids: required on rank 0, `length` ids. positions: default `start`, `start + 1`, ... attrs:
        override those of the spec; `complete=False`, `reason` and `missing` say what was not captured.
        Raises ValueError when lengths differ or attributes are lacking, and the capture stays open.
        """
        message: dict[str, Any] = {"length": int(length), "samples": dict(samples or {})}
        final = {} if self.spec.rank else self._final(int(length), token_ids, positions, dict(attrs or {}))
        self._owner._post_close(self, message, final)

    def abort(self) -> None:
        """Forget the capture and remove what was written of it."""
        self._owner._post_abort(self)

    def _final(
        self,
        length: int,
        token_ids: Sequence[int] | np.ndarray | None,
        positions: Sequence[int] | np.ndarray | None,
        attrs: dict[str, Any],
    ) -> dict[str, Any]:
        merged: dict[str, Any] = {"format_version": schema.FORMAT_VERSION, "start": 0, "complete": True}
        merged |= {"reason": None, "missing": [], **self.spec.attrs, **attrs}
        if "prompt_len" not in merged:
            raise ValueError("attribute prompt_len is missing: give it in CaptureSpec.attrs or to close()")
        start = int(merged["start"])
        where = np.arange(start, start + length) if positions is None else np.asarray(positions)
        ids = np.asarray([] if token_ids is None else token_ids)
        if len(ids) != length or len(where) != length:
            raise ValueError(f"{len(ids)} token_ids and {len(where)} positions were given for length {length}")
        merged["hooks"] = self.spec.hooks() | dict(merged.get("hooks", {}))
        merged |= {"num_tokens": length, "tp": self.spec.ranks, "created": self.created}
        merged |= {"request_id": self.spec.request_id, "key": self.spec.key}
        phase = where >= int(merged["prompt_len"])
        arrays = {
            "token_ids": ids.astype("<i4"),
            "positions": where.astype("<i4"),
            "phase": phase.astype("u1"),
        }
        return {"attrs": merged, "arrays": arrays}
