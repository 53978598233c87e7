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
from dmi_connector.store.process import Child
from dmi_connector.store.ring import Extent
from dmi_connector.store.schema import ArraySpec

if TYPE_CHECKING:
    from dmi_connector.store.persist import Persistence

# A chunk of this many bytes is worth the messages it costs to spread it over several processes.
SPREAD_BYTES = 16 << 20
_UNKNOWN_BYTES = 1 << 60


@dataclass(frozen=True)
class CaptureSpec:
    """What to write.

    final: path of the store, NAME.zarr. arrays: those this rank writes. bases: byte offset of each array
    for one token of a chunk payload (per-sample arrays: any number); None packs token arrays in order
    without gaps. attrs: facts for the root attribute (docs/FORMAT.md, section 5); `prompt_len` is
    required on rank 0, `start` defaults to 0. rank, ranks: tensor-parallel rank and size. header_base: where
    chunk payloads carry a header a token (int32 token id, int32 position), as the offset for one token; None:
    they do not. Positions are then checked as chunks come, token ids at `close`. most_rows: how many rows may come
    (None: unknown). The rest defaults to the settings of Persistence.
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
    header_base: int | None = None
    most_rows: int | None = None

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

    @property
    def most_bytes(self) -> int:
        """Payload bytes that may come to this rank; far too many where that is unknown, as where rows of logits come:
        those of all requests of a step travel together.
        """
        known = self.most_rows is not None and not any(a.per_sample for a in self.arrays)
        return (self.most_rows or 0) * self.token_bytes if known else _UNKNOWN_BYTES

    def hooks(self) -> dict[str, dict[str, Any]]:
        """The `hooks` attribute these arrays give."""
        return {
            a.name: {
                "array": a.name,
                "layers": list(a.layers),
                "width": a.width,
                "dtype": a.dtype,
                "shards": a.shards,
                **({"reduce": dict(a.reduce)} if a.reduce else {}),
            }
            for a in self.arrays
        }


def assign(arrays: Sequence[ArraySpec], loads: list[int], spread: bool) -> dict[int, list[int]]:
    """Share out `arrays` to writers: {writer: indexes of its arrays}. loads: bytes a token that each writer has
    already; what is given out is added. spread: over as many writers as it takes, else all to the one with the least.
    """
    parts: dict[int, list[int]] = {}
    for i in sorted(range(len(arrays)), key=lambda i: -arrays[i].token_bytes):
        writer = loads.index(min(loads)) if spread or not parts else next(iter(parts))
        loads[writer] += arrays[i].token_bytes
        parts.setdefault(writer, []).append(i)
    return {writer: sorted(part) for writer, part in parts.items()} or {loads.index(min(loads)): []}


@dataclass(eq=False)
class Group:
    """The arrays of a capture that one writer process has. writer: its number. load: their bytes a token."""

    process: Child
    arrays: list[int]
    takes_chunks: bool
    takes_rows: frozenset[str]
    writer: int
    load: int
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
        self.to_come = spec.most_bytes
        self.final_message: dict[str, Any] = {}
        self.final_process: Child | None = None
        self.retried = False  # whether the commit died with its process once
        self._headers: list[tuple[int, np.ndarray]] = []  # (first row, token ids its rows carry)
        self._problems: list[str] = []
        self._samples: dict[str, int] = {}  # rows sent of each per-sample array
        self._owner = owner

    @property
    def path(self) -> str:
        """Where the store will be."""
        return self.spec.final

    @property
    def error(self) -> str | None:
        """The first thing that went wrong, if any."""
        return self.errors[0] if self.errors else None

    def generated(self, stop: int) -> bool:
        """Whether there are rows of generated tokens before row `stop`."""
        attrs = self.spec.attrs
        return int(attrs.get("start", 0)) + stop > int(attrs.get("prompt_len", 0))

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
        self._samples[name] = max(self._samples.get(name, 0), first + count)
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
        override those of the spec; `complete=False`, `reason` and `missing` say what was not captured (on other
        ranks: what this rank lacks).
        Raises ValueError when lengths differ or attributes are lacking, and the capture stays open.
        """
        message: dict[str, Any] = {"length": int(length), "samples": dict(samples or {})}
        final = {} if self.spec.rank else self._final(int(length), token_ids, positions, dict(attrs or {}))
        if self.spec.rank and attrs and attrs.get("missing"):
            self.failed += attrs["missing"]
            self.errors.append(attrs["reason"])
        self._owner._post_close(self, message, final)

    def abandon(self, reason: str) -> bool:
        """Close a capture whose end nobody will announce with the rows that came. Returns False where that cannot be:
        without headers, or with parts on other ranks.
        """
        if self.spec.header_base is None or self.spec.ranks > 1:
            return False
        ends = [(first, first + len(ids)) for first, ids in self._headers]
        length = max((stop for _, stop in ends), default=0)
        token_ids, have = np.zeros(length, np.int32), np.zeros(length + 1, bool)
        for first, ids in self._headers:
            token_ids[first : first + len(ids)] = ids
            have[first : first + len(ids)] = True
        start = int(self.spec.attrs.get("start", 0))
        missing = [[int(i), int(i) + 1] for i in np.flatnonzero(~have[:length])]
        if start + length < int(self.spec.attrs["prompt_len"]):
            missing.append([length, int(self.spec.attrs["prompt_len"]) - start])
        attrs = {"complete": False, "reason": reason, "missing": missing, "finish_reason": None}
        per_sample = {a.name: self._samples.get(a.name, 0) for a in self.spec.arrays if a.per_sample}
        self.close(length, per_sample, token_ids, attrs=attrs)
        return True

    def check_positions(self, payload: np.ndarray, first: int, count: int) -> np.ndarray:
        """Look at the headers of a chunk payload: its rows must carry their own positions. Returns their token ids,
        int32 [count].
        """
        assert self.spec.header_base is not None
        at = self.spec.header_base * count
        header = payload[at : at + 8 * count].view("<i4").reshape(count, 2)
        ids = header[:, 0].copy()
        self._headers.append((first, ids))
        begin = int(self.spec.attrs.get("start", 0)) + first
        if not np.array_equal(header[:, 1], np.arange(begin, begin + count, dtype=np.int32)):
            self._problems.append(f"the rows of positions {begin} to {begin + count - 1} carry other positions")
        return ids

    def _check_tokens(self, token_ids: np.ndarray, start: int) -> list[str]:
        """Compare the ids that rows carry with those of the request: a row of another request cannot pass."""
        for first, ids in self._headers:
            expected = token_ids[first : first + len(ids)]
            wrong = np.flatnonzero(ids[: len(expected)] != expected)
            if len(wrong):
                at = int(wrong[0])
                return [f"the row at position {start + first + at} holds token {ids[at]}, not {expected[at]}"]
        return []

    def about(self) -> dict[str, Any]:
        """What a salvage of this capture has to know (docs/FORMAT.md, section on partial stores)."""
        spec = self.spec
        facts: dict[str, Any] = {"request_id": spec.request_id, "key": spec.key, "created": self.created}
        facts |= {"rank": spec.rank, "ranks": spec.ranks, "arrays": [a.to_json() for a in spec.arrays]}
        return {**facts, "attrs": dict(spec.attrs)}

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
        problems = self._problems + self._check_tokens(ids, start)
        if problems:
            merged["complete"] = False
            merged["reason"] = "; ".join(([merged["reason"]] if merged["reason"] else []) + problems)
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
