# SPDX-License-Identifier: Apache-2.0
"""Codecs compress the inner chunks of shards. Settings, writers, readers and checks find a codec in CODECS.

To add a codec, write a subclass of `Codec` in a module of this package, and add an instance to CODECS.
"""

from __future__ import annotations

from dmi_connector.codecs.base import Codec
from dmi_connector.codecs.blosc import Blosc
from dmi_connector.codecs.none import Uncompressed

__all__ = ["CODECS", "Codec", "decoder_of", "zarr_names"]

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Uncompressed("none", None, gb_per_s=1.6, plain_gb_per_s=1.6),
        Blosc("lz4", "blosc", gb_per_s=0.7, plain_gb_per_s=1.4, shuffle="bitshuffle"),
        Blosc("zstd", "blosc", gb_per_s=0.4, plain_gb_per_s=1.4, shuffle="shuffle", own_frames=True),
    )
}
"""name -> codec. Codecs with the same `zarr_name` decode each other's chunks. Speeds: see docs/PERFORMANCE.md."""


def zarr_names() -> list[str]:
    """The Zarr v3 codecs for compression that the metadata of a store may name, without duplicates."""
    return list(dict.fromkeys(name for codec in CODECS.values() for name in codec.zarr_names))


def decoder_of(names: list[str]) -> Codec | None:
    """The codec that decodes inner chunks with these Zarr v3 codecs, such as ["bytes", "blosc", "crc32c"].

    None if no store of this format has these codecs.
    """
    return next((codec for codec in CODECS.values() if names == ["bytes", *codec.zarr_names, "crc32c"]), None)
