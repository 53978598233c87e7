# SPDX-License-Identifier: Apache-2.0
"""Makes the metadata documents of a store, as docs/FORMAT.md defines them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dmi_connector.codecs import CODECS
from dmi_connector.dtypes import FLOATS, ITEMSIZE
from dmi_connector.layout import ALL_TOKEN_ARRAYS, DRAFT_INDEX, TOKEN_ARRAYS, ArraySpec

FORMAT_VERSION = "1.5"
PARTIAL_SUFFIX = ".partial"
INDEX_NAME = "index.jsonl"
INDEX_FOLDER = "index"
"""Folder of indexes in an object store. Each process writes its own index."""
ATTR_KEY = "dmi"
SAMPLES_PER_SHARD = 64
"""Number of rows of a per-sample array (logits) per shard file. An inner chunk has one row."""
SAMPLES_AGAIN = 8
"""Number of later samples after which a sample is final. Before that, an engine that discards a step replaces it."""


@dataclass(frozen=True)
class Grid:
    """The chunks of a finished store. chunk: tokens per inner chunk. segment: tokens per shard file."""

    chunk: int
    segment: int

    @property
    def chunks(self) -> int:
        """Number of inner chunks along the token axis of a shard."""
        return self.segment // self.chunk


def effective_grid(length: int, chunk_tokens: int, segment_tokens: int) -> Grid:
    """The grid of a store of `length` tokens.

    If `length` is below `chunk_tokens`, the store has one chunk of `length` tokens. If all chunks together have fewer
    than `segment_tokens` tokens, they form one segment. So a short store is not padded to a whole chunk or segment.
    """
    chunk = max(1, min(chunk_tokens, length))
    whole = max(1, -(-length // chunk)) * chunk
    return Grid(chunk, max(chunk, min(segment_tokens // chunk * chunk, whole)))


def inner_codecs(codec: str, itemsize: int, chunk_bytes: int) -> list[dict[str, Any]]:
    """The Zarr codecs of one inner chunk. codec: a name in CODECS. chunk_bytes: bytes of a decoded chunk."""
    return [_bytes_codec(itemsize), *CODECS[codec].metadata(itemsize, chunk_bytes), {"name": "crc32c"}]


def _bytes_codec(itemsize: int) -> dict[str, Any]:
    # zarr-python writes and expects no endian for one-byte types, and little-endian for others.
    return {"name": "bytes"} if itemsize == 1 else {"name": "bytes", "configuration": {"endian": "little"}}


def array_document(
    dtype: str,
    shape: list[int],
    chunk_shape: list[int],
    codecs: list[dict[str, Any]],
    dimension_names: list[str],
    attributes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A Zarr v3 array document with the fill value 0."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": codecs,
        "fill_value": 0.0 if dtype in FLOATS else 0,
        "dimension_names": dimension_names,
        "attributes": attributes or {},
        "storage_transformers": [],
    }


def layer_numbers(layers: Sequence[int]) -> str:
    """Layer numbers as ranges: [0, 1, 2, 5] gives "0-2+5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return "+".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def dimension_names(spec: ArraySpec, version: str = FORMAT_VERSION) -> list[str]:
    """The names of an array's dimensions in a format version.

    Since 1.2, dimensions of the same name have the same length in all arrays of a store, as xarray requires.
    """
    if version in ("1.0", "1.1"):
        return ["sample", spec.name] if spec.per_sample else ["layer", "token", spec.name]
    width = f"{spec.name}_width"
    if spec.per_sample:
        return ["sample", width]
    return [f"layer_{layer_numbers(spec.layers)}" if spec.layers else "once", "token", width]


def hook_document(
    spec: ArraySpec, length: int, grid: Grid, codec: str, version: str = FORMAT_VERSION
) -> dict[str, Any]:
    """The zarr.json of a hook's array with `length` tokens, or of a per-sample array with `length` samples."""
    if spec.per_sample:
        shape, inner = [length, spec.width], [1, spec.local_width]
        shard = [SAMPLES_PER_SHARD, spec.local_width]
    else:
        shape, inner = [spec.n_layers, length, spec.width], [1, grid.chunk, spec.local_width]
        shard = [spec.shard_layers, grid.segment, spec.local_width]
    chunk_bytes = inner[-1] * inner[-2] * spec.itemsize
    sharding = {
        "chunk_shape": inner,
        "codecs": inner_codecs(codec, spec.itemsize, chunk_bytes),
        "index_codecs": [_bytes_codec(8), {"name": "crc32c"}],
        "index_location": "end",
    }
    codecs = [{"name": "sharding_indexed", "configuration": sharding}]
    attributes: dict[str, Any] = {"layers": list(spec.layers)}
    if spec.reduce:
        attributes["reduce"] = {**spec.reduce, "shards": spec.slices}
    return array_document(spec.dtype, shape, shard, codecs, dimension_names(spec, version), attributes)


def plain_document(dtype: str, length: int, dimension: str) -> dict[str, Any]:
    """The zarr.json of a 1-D array, which is stored as one chunk with a checksum."""
    codecs = [_bytes_codec(ITEMSIZE[dtype]), {"name": "crc32c"}]
    return array_document(dtype, [length], [max(1, length)], codecs, [dimension])


def token_arrays(attrs: dict[str, Any]) -> dict[str, str]:
    """{name: dtype} of the token arrays of a store. attrs: its root attributes."""
    files = attrs.get("files")
    drafts = isinstance(files, dict) and f"{DRAFT_INDEX}/zarr.json" in files
    return ALL_TOKEN_ARRAYS if drafts else TOKEN_ARRAYS


def shard_path(spec: ArraySpec, segment: int) -> str:
    """Path of a shard file in the store."""
    if spec.per_sample:
        return f"{spec.name}/c/{segment}/{spec.rank}"
    if spec.part_layers:
        return f"{spec.name}/c/{spec.rank}/{segment}/0"
    return f"{spec.name}/c/0/{segment}/{spec.rank}"


def hooks_attribute(arrays: Sequence[ArraySpec]) -> dict[str, dict[str, Any]]:
    """The attribute `hooks` of a store with these arrays (docs/FORMAT.md, section 5)."""
    return {
        a.name: {
            "array": a.name,
            "layers": list(a.layers),
            "width": a.width,
            "dtype": a.dtype,
            "shards": a.slices,
            **({"part_layers": a.part_layers} if a.part_layers else {}),
            **({"reduce": dict(a.reduce)} if a.reduce else {}),
        }
        for a in arrays
    }


def media_positions(attrs: Mapping[str, Any]) -> list[list[int]]:
    """The [start, stop) positions of a request's media, ascending."""
    return sorted(span for item in attrs.get("media", ()) for span in item["positions"])


def root_document(attrs: dict[str, Any]) -> dict[str, Any]:
    """The document of the root group. All attributes of this format are under ATTR_KEY."""
    return {"zarr_format": 3, "node_type": "group", "attributes": {ATTR_KEY: attrs}}


def dump(document: dict[str, Any]) -> bytes:
    """The bytes of a metadata file. All documents are serialized this way, so that verify can compare bytes."""
    return json.dumps(document, indent=1, allow_nan=False).encode()


def canonical(attrs: dict[str, Any]) -> bytes:
    """The bytes that the attribute `checksum` covers: all other attributes as sorted, compact JSON."""
    rest = {k: v for k, v in attrs.items() if k != "checksum"}
    return json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def listed_bytes(attrs: dict[str, Any]) -> int:
    """Number of bytes of the files that a store lists, which are all but its root document."""
    return sum(size for size, _ in attrs["files"].values())
