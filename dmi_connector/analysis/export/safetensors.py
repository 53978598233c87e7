# SPDX-License-Identifier: Apache-2.0
"""Export of stores to safetensors, in the layout of vLLM's ExampleHiddenStatesConnector."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from dmi_connector.analysis.export.progress import (
    PARTIAL,
    Done,
    Progress,
    export_by_name,
    refuse_existing,
    row_blocks,
    whole,
)
from dmi_connector.analysis.export.residual_stream import chosen_ids, stream_rows
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.captures.captures import Captures
from dmi_connector.captures.finite import FiniteCheck
from dmi_connector.store.format.remote_path import Given, local_path

_NAMES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
}
"""{name of a numpy dtype: name in safetensors}."""
Blocks = tuple[np.dtype, tuple[int, ...], Iterable[np.ndarray]]
"""A tensor to write: (dtype, shape, blocks of its values in C order)."""


def write_file(path: Path, tensors: Mapping[str, Blocks]) -> None:
    """Write a safetensors file block by block. tensors: {name: tensor}.

    Raises ValueError for a dtype that safetensors does not have.
    """
    # The safetensors library also writes tensors of wider dtypes first.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0]))
    header, offset = {}, 0
    for name, (dtype, shape, _) in ordered:
        if dtype.name not in _NAMES:
            raise ValueError(f"safetensors has no {dtype.name}; export another hook")
        end = offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype.name], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as f:
        f.write(len(head).to_bytes(8, "little") + head)
        for _, (dtype, _, blocks) in ordered:
            for block in blocks:
                f.write(np.ascontiguousarray(block, dtype).tobytes())


def write_hidden_states(
    capture: Capture,
    path: Path,
    ids: Sequence[int],
    finite: FiniteCheck,
    progress: Progress = lambda _done, _total: None,
) -> None:
    """Write a file with `hidden_states` [tokens, layers, hidden] in the stored dtype, and `token_ids` int64 [tokens].

    ids: layer ids of `hidden_states`, see `residual_stream`. progress: called with (rows written, total rows).

    Raises NotFinite for a NaN or an infinity, unless `finite` keeps them.
    """
    tokens = capture.token_ids.astype("<i8")
    first = stream_rows(capture, ids, slice(0, 0))

    def blocks() -> Iterator[np.ndarray]:
        for rows in row_blocks(len(tokens)):
            yield finite.check(capture.path, stream_rows(capture, ids, rows), rows.start)
            progress(rows.stop, len(tokens))

    hidden = (first.dtype, (len(tokens), *first.shape[1:]), blocks())
    write_file(path, {"token_ids": (tokens.dtype, tokens.shape, [tokens]), "hidden_states": hidden})


def export_safetensors(
    store: Given, out: str | os.PathLike[str], layer_ids: Sequence[int] | None = None, finite: str = "fail"
) -> list[int]:
    """Write one store to a new file, as vLLM's ExampleHiddenStatesConnector would have written the request.

    The file holds `hidden_states` [tokens, layers, hidden] in the stored dtype and `token_ids` int64 [tokens]. It is
    written under a temporary name and renamed at the end. The empty file `OUT.lock` is created too, because vLLM's
    `load_hidden_states` locks it.

    layer_ids: vLLM's auxiliary layer ids (see `residual_stream`); None: all captured ids. They are written in ascending
    order. finite: "keep" writes a NaN or an infinity, "fail" raises NotFinite. Returns the ids written.

    Raises ValueError if the store has no residual stream or lacks an id, CaptureIncomplete for an incomplete store, and
    FileExistsError if `out` exists.
    """
    return _write_one(local_path(out), store, layer_ids, FiniteCheck(finite), lambda _done, _total: None)


def _write_one(
    out: Path, store: Given, layer_ids: Sequence[int] | None, finite: FiniteCheck, progress: Progress
) -> list[int]:
    """Write one store to the file `out`. Returns the layer ids written."""
    refuse_existing(out)
    with open_capture(store, timeout=0) as capture:
        ids = sorted(chosen_ids(capture, layer_ids))
        with whole(out) as partial:
            write_hidden_states(capture, partial, ids, finite, progress)
            _lock_file(out)
    return ids


def _lock_file(path: Path) -> None:
    """Create the empty lock file of `path`, on which vLLM's `load_hidden_states` takes a shared lock."""
    path.with_name(path.name + ".lock").touch()


def export(
    captures: Captures, out: Path, progress: Progress, finite: FiniteCheck, layers: Sequence[int] | None = None
) -> Done:
    """Write `out/NAME.safetensors` and its lock file for each store. layers: layer ids; None: those of each store."""

    def write(capture: Capture, path: Path) -> None:
        write_hidden_states(capture, path, sorted(chosen_ids(capture, layers)), finite)
        _lock_file(path.with_name(path.name.removesuffix(PARTIAL)))

    settings = {"to": "safetensors", "layers": layers}
    return export_by_name(captures, out, ".safetensors", write, progress, settings, finite)


def export_file(
    captures: Captures, out: Path, progress: Progress, finite: FiniteCheck, layers: Sequence[int] | None = None
) -> Done:
    """Write the only store of `captures` to the new file `out`. layers: layer ids; None: those of the store."""
    ids = _write_one(out, captures.infos[0].store, layers, finite, progress)
    return Done(out, 1, notes=(f"layer ids {', '.join(map(str, ids))}",))
