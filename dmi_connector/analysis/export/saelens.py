# SPDX-License-Identifier: Apache-2.0
"""Export of one hook as a data set of cached activations, which SAELens reads with `use_cached_activations`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

try:
    import datasets
    import pyarrow as pa  # datasets needs it
except ImportError as error:
    raise ImportError("saelens: datasets is not installed; install dmi_connector[saelens]") from error

from dmi_connector.analysis.export.packed import PackedRows
from dmi_connector.analysis.export.progress import PARTIAL, Done, Progress, fix_stores, note_not_finite, whole
from dmi_connector.captures.captures import Captures
from dmi_connector.captures.finite import FiniteCheck

_BATCHES = 32
"""Number of batches per file. A killed run loses at most one file."""


def export(
    captures: Captures,
    out: Path,
    progress: Progress,
    finite: FiniteCheck,
    hook: str,
    context_size: int = 128,
    skip: int = 0,
) -> Done:
    """Write a Hugging Face data set to `out`. Each example is a context, cut from the concatenated rows of all stores.

    The column with TransformerLens' name of the hook is `Array2D(shape=(context_size, width))`, float32. The column
    `token_ids` is int32 [context_size].

    hook: such as "resid_pre@3". skip: rows left out at the start of each store. finite: what happens to contexts with
    values that are not finite. Raises ValueError as `PackedRows` does.
    """
    rows = PackedRows(captures, hook, context_size, skip, finite)
    settings = {"to": "saelens", "hook": rows.hook, "context_size": context_size, "skip": skip}
    fix_stores(out, settings, captures, finite, "data-*.arrow")
    size = rows.step * _BATCHES
    starts = range(0, rows.contexts, size)
    names = [f"data-{i:05d}-of-{len(starts):05d}.arrow" for i in range(len(starts))]
    written = 0
    for first, name in zip(starts, names, strict=True):
        stop = min(first + size, rows.contexts)
        if (out / name).exists():
            progress(stop, rows.contexts)
            continue
        with whole(out / name) as partial:
            _write_part(rows, first, stop, partial, progress)
            note_not_finite(out, finite)
        written += 1
    contexts = sum(_contexts_in(out / name) for name in names)
    warnings = rows.warnings(contexts)
    _write_state(rows, out, names, {**settings, "contexts": contexts})
    note = f"{contexts} contexts of {context_size} tokens, column {rows.name}; {rows.left} tokens left over"
    return Done(out, written, len(starts) - written, (note,), warnings)


def _features(rows: PackedRows) -> datasets.Features:
    ids = datasets.Sequence(datasets.Value("int32"), length=rows.context_size)
    return datasets.Features(
        {rows.name: datasets.Array2D((rows.context_size, rows.width), "float32"), "token_ids": ids}
    )


def _write_part(rows: PackedRows, first: int, stop: int, path: Path, progress: Progress) -> None:
    """Write contexts [first, stop) as an Arrow stream, as `save_to_disk` does.

    `Dataset.from_dict` is not used: it pickles all values for a fingerprint, which takes ten times as long.
    """
    schema = _features(rows).arrow_schema
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for end, values, ids in rows.batches(first, stop):
            columns = [
                pa.ExtensionArray.from_storage(schema.field(rows.name).type, _nested(values)),
                pa.FixedSizeListArray.from_arrays(pa.array(ids.reshape(-1)), rows.context_size),
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
            progress(end, rows.contexts)


def _contexts_in(path: Path) -> int:
    """The number of contexts in a file, without reading their values."""
    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as batches:
        return sum(batch.num_rows for batch in batches)


def _nested(values: np.ndarray) -> pa.Array:
    """float32 [n, rows, width] as an Arrow array of n lists of `rows` lists of `width` values, without a copy."""
    contexts, rows, width = values.shape
    inner = pa.array(np.arange(0, contexts * rows * width + 1, width, dtype=np.int32))
    outer = pa.array(np.arange(0, contexts * rows + 1, rows, dtype=np.int32))
    return pa.ListArray.from_arrays(outer, pa.ListArray.from_arrays(inner, pa.array(values.reshape(-1))))


def _write_state(rows: PackedRows, out: Path, names: list[str], settings: dict[str, Any]) -> None:
    """Write `dataset_info.json`, then `state.json`. With both, the Arrow files `names` are a data set."""
    none = {rows.name: np.empty((0, rows.context_size, rows.width), np.float32), "token_ids": []}
    with _saved(none, rows, out) as saved:
        state = json.loads((saved / "state.json").read_bytes())
        os.replace(saved / "dataset_info.json", out / "dataset_info.json")
    state["_data_files"] = [{"filename": name} for name in names]
    state["_fingerprint"] = hashlib.sha256(repr((settings, names)).encode()).hexdigest()[:16]
    with whole(out / "state.json") as partial:
        partial.write_bytes(json.dumps(state, indent=2, sort_keys=True).encode())


@contextmanager
def _saved(columns: dict[str, Any], rows: PackedRows, out: Path) -> Iterator[Path]:
    """Yield a temporary directory that holds columns as a data set in one file."""
    partial = out / f".part{PARTIAL}"
    shutil.rmtree(partial, ignore_errors=True)
    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        datasets.Dataset.from_dict(columns, features=_features(rows)).save_to_disk(partial, num_shards=1)
        yield partial
    finally:
        if not shown:
            datasets.enable_progress_bars()
        shutil.rmtree(partial, ignore_errors=True)
