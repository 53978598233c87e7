# SPDX-License-Identifier: Apache-2.0
"""Export of stores to safetensors, as vLLM's own connector writes hidden states."""

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
"""numpy's names of dtypes -> those of safetensors."""
Blocks = tuple[np.dtype, tuple[int, ...], Iterable[np.ndarray]]
"""(dtype, shape, values in C order, in parts)."""


def write_file(path: Path, tensors: Mapping[str, Blocks]) -> None:
    """Write a safetensors file part by part. Raises ValueError for a dtype that the format lacks."""
    # safetensors puts wider types first.
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
    """Write `hidden_states` [tokens, layers, hidden] of these layer ids and `token_ids` int64 [tokens].

    progress: called with (rows that were read, all of them). Raises NotFinite as `finite` says.
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
    """Write the file that vLLM's ExampleHiddenStatesConnector would have written for this request, a new file.

    The file holds `hidden_states` [tokens, layers, hidden] in the stored dtype and `token_ids` int64 [tokens]. It gets
    its name when it is whole. Beside it lies the empty `OUT.lock` that vLLM's `load_hidden_states` locks.

    layer_ids: vLLM's auxiliary layer ids (see `residual_stream`), written in ascending order. None: all that were
    captured. finite: "keep" writes values that are not finite, "fail" raises NotFinite. Returns the ids written.

    Raises ValueError if the store has no residual stream or lacks an id; CaptureIncomplete for an incomplete store;
    FileExistsError.
    """
    return _write_one(local_path(out), store, layer_ids, FiniteCheck(finite), lambda _done, _total: None)


def _write_one(
    out: Path, store: Given, layer_ids: Sequence[int] | None, finite: FiniteCheck, progress: Progress
) -> list[int]:
    refuse_existing(out)
    with open_capture(store, timeout=0) as capture:
        ids = sorted(chosen_ids(capture, layer_ids))
        with whole(out) as partial:
            write_hidden_states(capture, partial, ids, finite, progress)
            _lock_file(out)
    return ids


def _lock_file(path: Path) -> None:
    """The file that vLLM's `load_hidden_states(path)` takes a shared lock of. It is empty, and nobody holds it here."""
    path.with_name(path.name + ".lock").touch()


def export(
    captures: Captures, out: Path, progress: Progress, finite: FiniteCheck, layers: Sequence[int] | None = None
) -> Done:
    """Write `NAME.safetensors` for each store, in the directory `out`, and the lock file of each."""

    def write(capture: Capture, path: Path) -> None:
        write_hidden_states(capture, path, sorted(chosen_ids(capture, layers)), finite)
        _lock_file(path.with_name(path.name.removesuffix(PARTIAL)))

    settings = {"to": "safetensors", "layers": layers}
    return export_by_name(captures, out, ".safetensors", write, progress, settings, finite)


def export_file(
    captures: Captures, out: Path, progress: Progress, finite: FiniteCheck, layers: Sequence[int] | None = None
) -> Done:
    """Write the one store of `captures` as the file `out`, which must be new."""
    ids = _write_one(out, captures.infos[0].store, layers, finite, progress)
    return Done(out, 1, notes=(f"layer ids {', '.join(map(str, ids))}",))
