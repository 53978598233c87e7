# SPDX-License-Identifier: Apache-2.0
"""Export of the latents of a sparse autoencoder as Delphi caches them: `MODULE/START_END.safetensors`."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.analysis.export.packed import PackedRows
from dmi_connector.analysis.export.progress import PARTIAL, Done, Progress, fix_stores, note_not_finite, whole
from dmi_connector.analysis.export.safetensors import write_file
from dmi_connector.analysis.sparse_encoder import SparseEncoder
from dmi_connector.captures.captures import Captures
from dmi_connector.captures.finite import FiniteCheck, not_finite

_LEAST = 1e-5
"""Latents up to this value are left out, as in Delphi."""
_STEP_VALUES = 1 << 24
"""Number of latents to compute at a time."""
_COUNT = "count.json"
"""File with the number of finished contexts and of the entries of each file."""
_ENTRIES = 1 << 20
"""Number of entries to copy at a time. An entry is one active latent: its location and its activation."""


def export(
    captures: Captures,
    out: Path,
    progress: Progress,
    finite: FiniteCheck,
    hook: str,
    sae: str,
    context_size: int = 256,
    skip: int = 0,
    splits: int = 5,
) -> Done:
    """Write `out/HOOK/START_END.safetensors` for each range of latents, and `out/HOOK/config.json`.

    HOOK is TransformerLens' name of the hook. START and END are the first and the last latent of the file. A file holds
    the tensors `locations`, uint16 or uint32 [n, 3], (context, row in the context, latent - START); `activations`,
    float16 [n]; and `tokens`, int32 [contexts, context_size].

    hook: such as "resid_pre@3". sae: directory or file of the autoencoder. context_size: rows per context. skip: rows
    left out at the start of each store. splits: number of files. finite: what happens to contexts whose rows or float16
    activations are not finite.

    Raises ValueError if rows have another width than the autoencoder takes, and for an invalid number of splits. Raises
    ValueError as `PackedRows` does.
    """
    rows, encoder = PackedRows(captures, hook, context_size, skip, finite), SparseEncoder.load(sae)
    if not 1 <= splits <= encoder.latents:
        raise ValueError(f"--splits {splits} is not valid; use 1 to {encoder.latents}, the latents of the autoencoder")
    settings = {"to": "delphi", "hook": rows.hook, "context_size": context_size}
    settings |= {"sae": os.path.abspath(sae), "sae_digest": encoder.digest}
    module = out / rows.name  # the only directory: Delphi reads each entry of `out` as a module
    fix_stores(module, {**settings, "skip": skip, "splits": splits}, captures, finite, "*.safetensors")
    note = f"contexts of {context_size} tokens, {encoder.latents} latents; {rows.left} tokens left over"
    if (module / "config.json").exists():
        there = int(json.loads((module / "config.json").read_bytes())["n_tokens"]) // context_size
        return Done(out, 0, splits, (f"{there} {note}",), rows.warnings(there))
    most = max(rows.contexts, context_size)
    parts = _Parts(module / f".parts{PARTIAL}", most, _bounds(encoder.latents, splits), finite)
    step = max(1, min(rows.step, _STEP_VALUES // (context_size * encoder.latents)))
    for first in range(parts.contexts, rows.contexts, step):
        stop = min(first + step, rows.contexts)
        _encode(rows, encoder, parts, first, stop)
        progress(stop, rows.contexts)
    warnings = rows.warnings(parts.written)
    note_not_finite(module, finite)
    parts.write(module, rows)
    with whole(module / "config.json") as partial:
        partial.write_bytes(json.dumps(_config(captures, rows, splits, parts.written), indent=4).encode() + b"\n")
    parts.remove()
    return Done(out, splits, 0, (f"{parts.written} {note}",), warnings)


def _bounds(latents: int, splits: int) -> list[tuple[int, int]]:
    """(first, last) latent of each file, as Delphi splits the latents.

    Delphi truncates the float32 values of torch.linspace to integers. torch.linspace computes the second half of the
    values backwards from the end, with a fused multiply-add, which rounds once. On a processor without that
    instruction, Delphi's ranges differ from these.
    """
    end, numbers = np.float32(latents), np.arange(splits + 1)
    step = end / np.float32(splits)
    back = np.float64(end) - np.float64(step) * (splits - numbers)  # exact product, one rounding
    floats = np.where(numbers < (splits + 1) // 2, step * numbers.astype(np.float32), back.astype(np.float32))
    return [(start, stop - 1) for start, stop in itertools.pairwise(floats.astype(np.int64).tolist())]


def _encode(rows: PackedRows, encoder: SparseEncoder, parts: _Parts, first: int, stop: int) -> None:
    """Add the entries of contexts [first, stop), without contexts that `finite` skips."""
    values = rows.read(first, stop).reshape(-1, rows.width)
    with np.errstate(over="ignore", invalid="ignore"):  # `not_finite` finds values that overflow
        found = encoder.encode(values)
        halves = found.astype("<f2")
    wanted = rows.wanted(first, stop, np.union1d(not_finite(values), not_finite(halves)))
    active = (found > _LEAST).reshape(stop - first, rows.context_size, -1) & wanted[:, None, None]
    context, row, latent = np.nonzero(active)
    number = parts.written + np.cumsum(wanted) - 1
    parts.add(np.stack([number[context], row, latent], axis=1), halves.reshape(active.shape)[active], first, wanted)


class _Parts:
    """The temporary files of an export: locations and activations for each output file, and a count.

    A killed run may leave more entries than the count says. The next run truncates the files to the count.

    most: number of contexts, or of rows of a context if that is larger. contexts: number of contexts that were encoded,
    including those left out.
    """

    def __init__(self, folder: Path, most: int, bounds: list[tuple[int, int]], finite: FiniteCheck) -> None:
        self._folder, self._bounds, self._finite = folder, bounds, finite
        width = max(last - first for first, last in bounds)
        self._dtype = np.dtype("<u2" if max(width, most) < 1 << 16 else "<u4")
        folder.mkdir(exist_ok=True)
        noted = folder / _COUNT
        known: dict[str, Any] = json.loads(noted.read_bytes()) if noted.exists() else {}
        self.contexts: int = known.get("contexts", 0)
        self._left: list[int] = known.get("left", [])
        finite.recall(known.get("not_finite", {}))
        self._entries: list[int] = known.get("entries", [0] * len(bounds))
        for i, entries in enumerate(self._entries):
            for name, size in ((f"{i}.locations", 3 * self._dtype.itemsize), (f"{i}.activations", 2)):
                with open(folder / name, "ab") as file:
                    file.truncate(entries * size)

    @property
    def written(self) -> int:
        """Number of encoded contexts, without those left out."""
        return self.contexts - len(self._left)

    def add(self, locations: np.ndarray, activations: np.ndarray, begin: int, wanted: np.ndarray) -> None:
        """Add the entries of contexts starting at `begin`, and update the count.

        locations: int64 [n, 3], with numbers of latents in the whole autoencoder. activations: float16 [n]. wanted:
        which contexts are not left out, bool [contexts].
        """
        for i, (first, last) in enumerate(self._bounds):
            here = (locations[:, 2] >= first) & (locations[:, 2] <= last)
            found = locations[here] - [0, 0, first]
            self._append(f"{i}.locations", found.astype(self._dtype))
            self._append(f"{i}.activations", activations[here])
            self._entries[i] += len(found)
        self.contexts = begin + len(wanted)
        self._left += (begin + np.flatnonzero(~wanted)).tolist()
        known = {"contexts": self.contexts, "entries": self._entries, "left": self._left}
        with whole(self._folder / _COUNT) as partial:
            partial.write_bytes(json.dumps({**known, "not_finite": self._finite.first}).encode())

    def _append(self, name: str, values: np.ndarray) -> None:
        with open(self._folder / name, "ab") as file:
            file.write(values.tobytes())

    def write(self, module: Path, rows: PackedRows) -> None:
        """Write the output files to `module`. rows: gives the tokens of the contexts."""
        for i, (first, last) in enumerate(self._bounds):
            count = self._entries[i]
            tensors = {
                "locations": (self._dtype, (count, 3), self._blocks(f"{i}.locations", self._dtype)),
                "activations": (np.dtype("<f2"), (count,), self._blocks(f"{i}.activations", np.dtype("<f2"))),
                "tokens": (np.dtype("<i4"), (self.written, rows.context_size), self._tokens(rows)),
            }
            with whole(module / f"{first}_{last}.safetensors") as partial:
                write_file(partial, tensors)

    def _tokens(self, rows: PackedRows) -> Iterator[np.ndarray]:
        """Yield the token ids of the contexts that are not left out, int32 [n, context_size]."""
        for first in range(0, rows.contexts, rows.step):
            stop = min(first + rows.step, rows.contexts)
            yield rows.token_ids(first, stop)[~np.isin(np.arange(first, stop), self._left)]

    def _blocks(self, name: str, dtype: np.dtype) -> Iterator[np.ndarray]:
        with open(self._folder / name, "rb") as file:
            while block := file.read(_ENTRIES * 6 * dtype.itemsize):
                yield np.frombuffer(block, dtype)

    def remove(self) -> None:
        """Remove the temporary files."""
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()


def _config(captures: Captures, rows: PackedRows, splits: int, contexts: int) -> dict[str, Any]:
    """Delphi's config of a cache, with the directory of the stores as its data set."""
    with captures[0] as capture:
        model = capture.attrs.get("model", "")
    store = captures.infos[0].store
    return {
        "dataset_repo": str(store.absolute().parent),
        "dataset_split": "",
        "dataset_name": "",
        "dataset_column": "token_ids",
        "batch_size": 1,
        "cache_ctx_len": rows.context_size,
        "n_tokens": contexts * rows.context_size,
        "n_splits": splits,
        "model_name": model,
    }
