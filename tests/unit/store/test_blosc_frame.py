# SPDX-License-Identifier: Apache-2.0
"""Frames of compressed planes: Blosc decodes them. They are shorter than its own, and no longer than plain frames."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import blosc

from dmi_connector.codecs import CODECS
from dmi_connector.codecs.blosc_frame import LEAST_PLANE, recurs, zstd_frame

HEADER_BYTES = 16


def decoded(frame: bytes, dtype: str) -> np.ndarray:
    return np.frombuffer(blosc.decompress(frame), dtype)


@given(
    dtype=st.sampled_from(["u1", "u2", "u4", "u8"]),
    count=st.integers(1, 3000),
    spread=st.sampled_from([0, 1, 40, 2**63]),
    seed=st.integers(0, 2**32 - 1),
)
def test_blosc_decodes_every_frame(dtype: str, count: int, spread: int, seed: int) -> None:
    most = min(spread, int(np.iinfo(dtype).max))
    chunk = np.random.default_rng(seed).integers(0, most, count, dtype=dtype, endpoint=True)
    frame = CODECS["zstd"].encode(chunk)
    assert len(frame) <= chunk.nbytes + HEADER_BYTES
    np.testing.assert_array_equal(decoded(frame, dtype), chunk)


@pytest.mark.parametrize("count", [127, 128, 65536, 65537, 200_000])
def test_frames_at_the_edges_of_plane_and_split_sizes_are_decoded(count: int) -> None:
    chunk = np.arange(count, dtype="u2") * 7
    np.testing.assert_array_equal(decoded(CODECS["zstd"].encode(chunk), "u2"), chunk)


def test_frames_of_different_sizes_do_not_overwrite_each_other() -> None:
    rng = np.random.default_rng(1)
    chunks = [rng.integers(0, 99, count, dtype="u2") for count in (5000, 70_000, 300, 70_000)]
    frames = [CODECS["zstd"].encode(chunk) for chunk in chunks]
    for chunk, frame in zip(chunks, frames, strict=True):
        np.testing.assert_array_equal(decoded(frame, "u2"), chunk)


def as_bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype("f4").view("u4") >> 16).astype("u2")


@pytest.mark.parametrize("rows", ["every 7th", "every 64th", "a text's embeddings"])
def test_recurring_rows_shrink_about_as_much_as_with_blosc(rows: str) -> None:
    rng = np.random.default_rng(3)
    table = as_bf16(rng.standard_normal((500, 2560)))
    number = {"every 7th": np.arange(128) % 7, "every 64th": np.arange(128) % 64}.get(rows, rng.zipf(1.3, 128) % 500)
    chunk = table[number]
    own = blosc.compress(chunk, b"zstd", 1, blosc.SHUFFLE, chunk.nbytes)
    assert len(CODECS["zstd"].encode(chunk)) < 1.02 * len(own) < chunk.nbytes / 2


def test_recurs_needs_more_than_a_sixteenth_of_the_rows_to_begin_alike() -> None:
    rng = np.random.default_rng(4)
    rows = rng.integers(1, 2**16, (64, 100), dtype="u2")
    assert not recurs(rows)
    rows[:4] = rows[4]
    assert not recurs(rows), "4 of 64 rows are not more than a sixteenth"
    rows[5] = rows[4]
    assert recurs(rows)
    rows[:] = 0
    assert not recurs(rows), "padding must not count"
    assert recurs(rows[:, :3]), "rows of this width must count, because they are too short to decide"


def test_a_frame_of_bfloat16_is_shorter_than_bloscs_own() -> None:
    bits = as_bf16(np.random.default_rng(2).standard_normal((128, 2560)))
    own = blosc.compress(bits, b"zstd", 1, blosc.SHUFFLE, bits.nbytes)
    assert bits.nbytes / len(CODECS["zstd"].encode(bits)) > 1.48 > bits.nbytes / len(own)
    assert len(CODECS["zstd"].encode(np.zeros_like(bits))) < 200


@pytest.mark.parametrize(("count", "own"), [(LEAST_PLANE - 1, False), (LEAST_PLANE, True), (LEAST_PLANE + 1, True)])
def test_chunks_of_a_plane_or_more_have_our_frames(count: int, own: bool) -> None:
    chunk = np.arange(count, dtype="u2") * 7
    assert (CODECS["zstd"].encode(chunk) == zstd_frame(chunk)) == own


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_chunk_that_no_decoder_could_read_is_refused(codec: str) -> None:
    most = CODECS[codec].most_bytes
    chunk = np.broadcast_to(np.zeros(1, "u2"), (1, most // 2 + 1))  # a view that takes no memory
    with pytest.raises(ValueError, match=r"a chunk of \d+ bytes is larger than a Blosc frame; reduce chunk_tokens"):
        CODECS[codec].encode(chunk)
