# SPDX-License-Identifier: Apache-2.0
"""What a store is made of: array specifications and the metadata documents they give (docs/FORMAT.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dmi_connector.hooks import HOOKS

FORMAT_VERSION = "1.0"
PARTIAL_SUFFIX = ".partial"
INDEX_NAME = "index.jsonl"
ATTR_KEY = "dmi"
CODECS = ("none", "lz4", "zstd")
# Rows of a per-sample array (logits) in one shard file; one inner chunk holds one row.
SAMPLES_PER_SHARD = 64
# Zarr data type names and their sizes. bfloat16 is the name in the zarr-extensions registry.
ITEMSIZE = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
}
FLOATS = ("bfloat16", "float16", "float32", "float64")
# The 1-D arrays every store has beside its hooks.
TOKEN_ARRAYS = {"token_ids": "int32", "positions": "int32", "phase": "uint8"}
RESERVED = (*TOKEN_ARRAYS, "logits_positions")
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")


@dataclass(frozen=True)
class ArraySpec:
    """One array of a store, as one tensor-parallel rank writes it.

    A hook array is `[layers, tokens, width]`; with `layers=()` the hook exists once and its layer axis
    has length 1. A per-sample array (`per_sample=True`, logits) is `[samples, width]`. For names in
    `hooks.HOOKS` the scope given there decides: the layers of a hook that exists once, or per sample,
    become `()`.

    `reduce` describes the reduction whose output this is (docs/FORMAT.md, section 11), None if there is none.
    `width` is the global width; a rank holds `width / shards` columns, starting at `rank * width / shards`.
    Raises ValueError for a name, dtype or split the format cannot hold.
    """

    name: str
    dtype: str
    layers: tuple[int, ...]
    width: int
    shards: int = 1
    rank: int = 0
    per_sample: bool = False
    reduce: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        scope = HOOKS[self.name].scope if self.name in HOOKS else None
        object.__setattr__(self, "layers", () if scope in ("once", "sampled") else tuple(map(int, self.layers)))
        object.__setattr__(self, "per_sample", self.per_sample or scope == "sampled")
        if not _NAME.match(self.name) or self.name in RESERVED:
            raise ValueError(f"array name {self.name!r} cannot be stored: use letters, digits, '_', '-', '.'")
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"array {self.name!r}: dtype {self.dtype!r} is unknown: use one of {', '.join(ITEMSIZE)}")
        if self.width < 1 or self.shards < 1 or self.width % self.shards:
            raise ValueError(f"array {self.name!r}: width {self.width} does not split into {self.shards} shards")
        if not 0 <= self.rank < self.shards:
            raise ValueError(
                f"array {self.name!r}: rank {self.rank} is outside its {self.shards} shards;"
                " an unsharded array is written by rank 0 alone"
            )
        if self.per_sample and self.layers:
            raise ValueError(f"array {self.name!r}: a per-sample array has no layers, got {self.layers}")
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"array {self.name!r}: layers must ascend without repeats, got {self.layers}")

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def n_layers(self) -> int:
        """Length of the layer axis (1 for a hook that exists once)."""
        return max(1, len(self.layers))

    @property
    def local_width(self) -> int:
        """Columns this rank holds."""
        return self.width // self.shards

    @property
    def token_bytes(self) -> int:
        """Bytes one token (or one sample) takes on this rank."""
        return self.n_layers * self.local_width * self.itemsize

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; `ArraySpec(**d)` rebuilds it."""
        return {**asdict(self), "layers": list(self.layers)}


@dataclass(frozen=True)
class Grid:
    """Effective chunking of a finished store, in tokens: `chunk` per inner chunk, `segment` per shard
    file.
    """

    chunk: int
    segment: int

    @property
    def chunks(self) -> int:
        """Inner chunks along the token axis of one shard."""
        return self.segment // self.chunk


def effective_grid(length: int, chunk_tokens: int, segment_tokens: int) -> Grid:
    """The grid of a store of `length` tokens: settings, narrowed so that a short store needs no padding.

    With fewer rows than `chunk_tokens` the one chunk is as long as the store; with fewer rows than
    `segment_tokens` the one segment is as long as its chunks.
    """
    chunk = max(1, min(chunk_tokens, length))
    whole = max(1, -(-length // chunk)) * chunk
    return Grid(chunk, max(chunk, min(segment_tokens // chunk * chunk, whole)))


def check_chunking(chunk_tokens: int, segment_tokens: int, codec: str) -> None:
    """Raise ValueError unless the settings can be stored."""
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens {chunk_tokens} is too small: use 1 or more, 128 by default")
    if segment_tokens < chunk_tokens or segment_tokens % chunk_tokens:
        raise ValueError(f"segment_tokens {segment_tokens} must be a multiple of chunk_tokens {chunk_tokens}")
    if codec not in CODECS:
        raise ValueError(f"codec {codec!r} is unknown: use one of {', '.join(CODECS)}")


def blosc_settings(codec: str, itemsize: int) -> tuple[str, int, str]:
    """`(cname, clevel, shuffle)` of a compressing codec for elements of `itemsize` bytes.

    bf16 gains from splitting its bytes (zstd) or bits (lz4); single bytes have nothing to split.
    """
    shuffle = "noshuffle" if itemsize == 1 else {"lz4": "bitshuffle", "zstd": "shuffle"}[codec]
    return codec, 1, shuffle


def inner_codecs(codec: str, itemsize: int, chunk_bytes: int) -> list[dict[str, Any]]:
    """The codec list of one inner chunk. `blocksize` is the whole chunk: Blosc's own choice loses ratio."""
    codecs: list[dict[str, Any]] = [_bytes_codec(itemsize)]
    if codec != "none":
        cname, clevel, shuffle = blosc_settings(codec, itemsize)
        config = {
            "cname": cname,
            "clevel": clevel,
            "shuffle": shuffle,
            "typesize": itemsize,
            "blocksize": chunk_bytes,
        }
        codecs.append({"name": "blosc", "configuration": config})
    codecs.append({"name": "crc32c"})
    return codecs


def _bytes_codec(itemsize: int) -> dict[str, Any]:
    # zarr-python writes and expects no endian for single bytes, and little elsewhere.
    return {"name": "bytes"} if itemsize == 1 else {"name": "bytes", "configuration": {"endian": "little"}}


def array_document(
    dtype: str,
    shape: list[int],
    chunk_shape: list[int],
    codecs: list[dict[str, Any]],
    dimension_names: list[str],
    attributes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A Zarr v3 array document with fill value 0."""
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


def hook_document(spec: ArraySpec, length: int, grid: Grid, codec: str) -> dict[str, Any]:
    """The zarr.json of a hook array of `length` tokens, or of a per-sample array of `length` samples."""
    if spec.per_sample:
        shape, inner = [length, spec.width], [1, spec.local_width]
        shard, names = [SAMPLES_PER_SHARD, spec.local_width], ["sample", spec.name]
    else:
        shape, inner = [spec.n_layers, length, spec.width], [1, grid.chunk, spec.local_width]
        shard, names = [spec.n_layers, grid.segment, spec.local_width], ["layer", "token", spec.name]
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
        attributes["reduce"] = {**spec.reduce, "shards": spec.shards}
    return array_document(spec.dtype, shape, shard, codecs, names, attributes)


def plain_document(dtype: str, length: int, dimension: str) -> dict[str, Any]:
    """The zarr.json of a 1-D array stored as one checksummed chunk."""
    codecs = [_bytes_codec(ITEMSIZE[dtype]), {"name": "crc32c"}]
    return array_document(dtype, [length], [max(1, length)], codecs, [dimension])


def shard_path(spec: ArraySpec, segment: int) -> str:
    """Path of a shard file inside the store."""
    if spec.per_sample:
        return f"{spec.name}/c/{segment}/{spec.rank}"
    return f"{spec.name}/c/0/{segment}/{spec.rank}"


def root_document(attrs: dict[str, Any]) -> dict[str, Any]:
    """The group document: everything this format says lies under one attribute."""
    return {"zarr_format": 3, "node_type": "group", "attributes": {ATTR_KEY: attrs}}


def dump(document: dict[str, Any]) -> bytes:
    """The bytes of a metadata file: one way to write a document, so that verify can compare bytes."""
    return json.dumps(document, indent=1, allow_nan=False).encode()


def canonical(attrs: dict[str, Any]) -> bytes:
    """The bytes that the `checksum` attribute covers: all but itself, sorted and compact."""
    rest = {k: v for k, v in attrs.items() if k != "checksum"}
    return json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
