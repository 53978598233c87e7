# SPDX-License-Identifier: Apache-2.0
"""Export as tar shards for WebDataset, with one sample per store."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dmi_connector.analysis.export.columns import TOKENS, Column, columns_of
from dmi_connector.analysis.export.progress import Done, Progress, fix_stores, note_not_finite, whole
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.captures import Captures
from dmi_connector.captures.finite import WHAT, FiniteCheck, NotFinite

_SHARD_BYTES = 10**9
"""Default of the approximate size of a tar shard, in bytes."""
_TOKEN_BYTES = 9
"""Bytes of the arrays of `TOKENS` per row."""
_OF_STORE = ("key", "request_id", "model", "prompt_len", "finish_reason")


def export(
    captures: Captures,
    out: Path,
    progress: Progress,
    finite: FiniteCheck,
    hook: str,
    shard_size: int = _SHARD_BYTES,
) -> Done:
    """Write `out/shard-NNNNNN.tar`. Each store is one sample of a shard.

    A sample has the files NAME.json, NAME.token_ids.npy, NAME.positions.npy, NAME.phase.npy, and NAME.HOOK.npy [tokens,
    width] for each hook. NAME is the name of the store with "_" instead of dots, because WebDataset ends a sample's
    name at the first dot. Only the files of one sample are in memory at a time.

    hook: comma-separated hooks, each with one layer, such as "resid_pre@3,q@3". shard_size: approximate bytes per tar
    shard. A sample is never split.

    Raises ValueError if two stores have the same name.
    """
    if shard_size < 1:
        raise ValueError(f"--shard-size {shard_size} is not valid; use 1 or more")
    columns = columns_of(captures, hook)
    names = [info.store.stem.replace(".", "_") for info in captures.infos]
    if len(set(names)) < len(names):
        raise ValueError("export: several stores have the same name; export their directories one by one")
    fix_stores(out, {"to": "webdataset", "hook": hook, "shard_size": shard_size}, captures, finite, "shard-*.tar")
    written, kept, left = 0, 0, 0
    last: NotFinite | None = None
    for number, samples in enumerate(_shards(captures, columns, shard_size)):
        path = out / f"shard-{number:06d}.tar"
        if path.exists():
            kept += 1
            progress(samples.stop, len(names))
            continue
        before = left
        with whole(path) as partial:
            with tarfile.open(partial, "w") as shard:
                for i in samples:
                    try:
                        with captures[i] as capture:
                            files = _files(capture, columns, finite)
                    except NotFinite as error:
                        if finite.policy == "fail":
                            raise
                        left, last = left + 1, error
                    else:
                        _add(shard, names[i], files)
                    progress(i + 1, len(names))
            note_not_finite(out, finite)
        if left - before == len(samples):
            path.unlink()  # the shard holds no sample
        else:
            written += 1
    if last is not None and not written + kept:
        raise NotFinite(f"export: no store is left: {last}")
    done = "kept" if finite.policy == "keep" else "left out"
    warnings = (f"{len(finite.first)} {done}: {WHAT}",) if finite.first else ()
    note = f"{written} shards written" + (f", {kept} already existed" if kept else "")
    return Done(out, written, kept, (note,), warnings)


def _shards(captures: Captures, columns: Sequence[Column], most: int) -> Iterator[range]:
    """Yield the indexes of the stores of each tar shard.

    The shards depend only on the lengths of the stores, so that a second run can continue. most: approximate bytes per
    shard.
    """
    row_bytes = _TOKEN_BYTES + 4 * sum(column.width for column in columns)
    first, size = 0, 0
    for i, info in enumerate(captures.infos):
        nbytes = (info.num_tokens or 0) * row_bytes
        if i > first and size + nbytes > most:
            yield range(first, i)
            first, size = i, 0
        size += nbytes
    yield range(first, len(captures))


def _files(capture: Capture, columns: Sequence[Column], finite: FiniteCheck) -> dict[str, bytes]:
    """{extension: content} of the files of one sample. Raises NotFinite unless `finite` keeps such values."""
    about = {"store": str(capture.path), **{name: capture.attrs.get(name) for name in _OF_STORE}}
    arrays = {name: getattr(capture, name) for name in TOKENS}
    arrays |= {column.name: np.concatenate([*column.blocks(capture, finite)]) for column in columns}
    return {"json": json.dumps(about).encode(), **{f"{name}.npy": _npy(values) for name, values in arrays.items()}}


def _npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, values, allow_pickle=False)
    return file.getvalue()


def _add(shard: tarfile.TarFile, name: str, files: dict[str, bytes]) -> None:
    """Add the files of one sample. They are adjacent in the tar file, as WebDataset requires."""
    for extension, data in files.items():
        member = tarfile.TarInfo(f"{name}.{extension}")
        member.size, member.mode = len(data), 0o644
        shard.addfile(member, io.BytesIO(data))
