# SPDX-License-Identifier: Apache-2.0
"""Codecs of inner chunks. CODECS is the one table: settings, writers, readers and checks look codecs up here.

To add a codec, write a subclass of `Codec` in a module of this package, and name an instance in CODECS.
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
"""The codecs by name. Those of one `zarr_name` decode each other's chunks. Speeds: docs/PERFORMANCE.md."""


def zarr_names() -> list[str]:
    """The Zarr v3 codecs that the metadata of a store may name for compression, each once."""
    return list(dict.fromkeys(name for codec in CODECS.values() for name in codec.zarr_names))


def decoder_of(names: list[str]) -> Codec | None:
    """The codec that decodes inner chunks with these Zarr v3 codecs, such as ["bytes", "blosc", "crc32c"].

    None for a list that this format does not have.
    """
    return next((codec for codec in CODECS.values() if names == ["bytes", *codec.zarr_names, "crc32c"]), None)
