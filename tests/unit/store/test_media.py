# SPDX-License-Identifier: Apache-2.0
"""Stores of prompts with images: the rows of images, and the checks of these rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector import open_capture
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format import schema
from dmi_connector.store.format.checksum import crc32c
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.write.arrays.row_check import RowCheck
from tests import storekit as kit

LENGTH, FIRST, SECOND = 60, [4, 9], [12, 20]
MEDIA = [
    {"modality": "image", "hash": "a", "positions": [FIRST]},
    {"modality": "image", "hash": "b", "positions": [SECOND]},
]
AXES = ArraySpec("mrope_positions", "int32", (), 3)
STREAM = ("resid_pre", "attn_out", "resid_mid", "mlp_out")


@pytest.fixture(scope="module")
def stores() -> Iterator[kit.Store]:
    made = kit.Store()
    yield made
    assert made.shutdown()


def axes(length: int = LENGTH) -> np.ndarray:
    """Positions on three axes [length, 3], as in Qwen2.5-VL: an image of 1 x 5, then one of 2 x 4 embeddings."""
    found: list[list[int]] = []
    at = 0
    for rows, columns, stop in ((1, 5, 9), (2, 4, 20), (0, 0, length)):
        text = stop - rows * columns - len(found)
        found += [[at + i] * 3 for i in range(text)]
        at += text
        found += [[at, at + row, at + column] for row in range(rows) for column in range(columns)]
        at += max(rows, columns)
    return np.array(found, np.int32)


def write(stores: kit.Store, path: Path, positions: np.ndarray, media: Sequence[Any] = MEDIA, **attrs: Any) -> None:
    values = {"mrope_positions": positions[None].view("u4")}
    stores.write(path, [AXES], len(positions), values=values, attrs={"media": media, **attrs})


def test_a_reader_says_which_image_a_row_belongs_to(stores: kit.Store, tmp_path: Path) -> None:
    want = np.full(LENGTH, -1)
    want[slice(*FIRST)], want[slice(*SECOND)] = 0, 1
    write(stores, tmp_path / "a.zarr", axes())
    capture = open_capture(tmp_path / "a.zarr")
    assert verify_store(tmp_path / "a.zarr") == []
    np.testing.assert_array_equal(capture.media, want)
    np.testing.assert_array_equal(capture.mrope_positions, axes())
    assert capture.mrope_positions.dtype == np.int32
    write(stores, tmp_path / "late.zarr", axes()[6:], start=6)
    np.testing.assert_array_equal(open_capture(tmp_path / "late.zarr").media, want[6:])


def test_a_store_of_text_has_no_media(stores: kit.Store, tmp_path: Path) -> None:
    stores.write(tmp_path / "a.zarr", [ArraySpec("q", "float32", (0,), 8)], 20)
    assert (open_capture(tmp_path / "a.zarr").media == -1).all()


@pytest.mark.parametrize("length", [1, 3])
def test_positions_of_a_short_prompt_are_sound(stores: kit.Store, tmp_path: Path, length: int) -> None:
    """The positions of its first token are 0 on every axis."""
    write(stores, tmp_path / "a.zarr", axes()[:length], [])
    assert verify_store(tmp_path / "a.zarr") == []


@pytest.mark.parametrize(
    ("row", "wrong", "found"),
    [
        (2, [2, 2, 3], True),  # text has equal positions on all axes
        (2, [3, 3, 3], True),  # before the first image, it is the position in the request
        (6, [9, 1, 0], False),  # the positions of an image are not known
        (10, [8, 8, 9], True),  # between images
        (25, [7, 7, 7], True),  # after the last image, it is smaller by a constant
        (50, [51, 51, 51], True),
    ],
)
def test_positions_that_are_not_those_of_the_request_are_found(row: int, wrong: list[int], found: bool) -> None:
    for start, chunk in ((0, 16), (0, 64), (2, 7)):
        check, values = RowCheck(start), axes()
        values[row] = wrong
        for first in range(0, LENGTH - start, chunk):
            check.axes(values[start + first : start + first + chunk], first)
        assert bool(check.losses(np.zeros(0), [FIRST, SECOND])) == found, (start, chunk)


def test_positions_of_a_request_are_not_a_fault() -> None:
    for start in (0, 5, 15, 30):
        check = RowCheck(start)
        for first in range(0, LENGTH - start, 8):
            check.axes(axes()[start + first : start + first + 8], first)
        assert check.losses(np.zeros(0), [FIRST, SECOND]) == []
    text = RowCheck(0)
    text.axes(np.arange(20, dtype=np.int32)[:, None].repeat(3, 1), 0)
    assert text.losses(np.zeros(0)) == []


@pytest.mark.parametrize("known", [0, 1])
def test_images_of_a_later_turn_make_no_row_wrong(stores: kit.Store, tmp_path: Path, known: int) -> None:
    """The images are reported at the end. Rows after them arrive earlier, with other positions on the axes."""
    path, values = tmp_path / "a.zarr", {"mrope_positions": axes()[None].view("u4")}
    first = {"media": MEDIA[:known]} if known else {}
    record = stores.open(path, AXES, attrs={"prompt_len": 10, **first})
    stores.feed(record, values, LENGTH)
    later = {"media": MEDIA, "last_prompt_len": 25}
    stores.captures.close(record, LENGTH, {}, np.arange(LENGTH), later)
    assert stores.flush(kit.PATIENCE)
    capture = open_capture(path)
    assert capture.attrs["complete"] and (capture.media[slice(*SECOND)] == 1).all()
    assert verify_store(path) == []


def test_a_store_with_wrong_positions_says_so(stores: kit.Store, tmp_path: Path) -> None:
    values = axes()
    values[30] += 1
    write(stores, tmp_path / "a.zarr", values)
    assert "carry other positions" in str(open_capture(tmp_path / "a.zarr", allow_incomplete=True).reason)


def stream() -> tuple[list[ArraySpec], dict[str, np.ndarray]]:
    """The residual stream of three layers. After the first two, visual features are added to rows of images."""
    rng = np.random.default_rng(0)
    specs = [ArraySpec(name, "float32", (0, 1, 2), 16) for name in STREAM]
    values = {name: np.zeros((3, LENGTH, 16), np.float32) for name in STREAM}
    x = rng.standard_normal((LENGTH, 16), np.float32)
    for layer in range(3):
        attn, mlp = rng.standard_normal((2, LENGTH, 16), np.float32)
        for name, value in zip(STREAM, (x, attn, x + attn, mlp), strict=True):
            values[name][layer] = value
        x = x + attn + mlp
        if layer < 2:
            x[slice(*FIRST)] += 1
            x[slice(*SECOND)] -= 2
    specs.append(ArraySpec("resid_final", "float32", (), 16))
    return specs, {**values, "resid_final": x[None]}


@pytest.mark.parametrize(
    ("hook", "layer", "row", "found"),
    [
        ("resid_pre", 1, 30, True),  # text
        # an image, after a layer with visual features: the sum for the text rows does not apply
        ("resid_pre", 1, 5, False),
        ("resid_mid", 0, 5, True),
        ("resid_final", 0, 14, True),  # an image, after a layer without visual features
    ],
)
def test_sums_after_visual_layers_are_checked_only_for_text(
    stores: kit.Store, tmp_path: Path, hook: str, layer: int, row: int, found: bool
) -> None:
    specs, values = stream()
    attrs = {"identities": False, "visual_layers": 2, "media": MEDIA, "num_layers": 3}

    def problems(name: str, values: dict[str, np.ndarray], **changes: Any) -> list[str]:
        bits = {key: kit.bits(value) for key, value in values.items()}
        stores.write(tmp_path / name, specs, LENGTH, values=bits, attrs={**attrs, **changes})
        return [problem.what for problem in verify_store(tmp_path / name)]

    assert problems("good.zarr", values) == []
    assert problems("whole.zarr", values, identities=True, visual_layers=0), "the sums must not hold for all rows"
    values[hook][layer, row] += 1
    if hook == "resid_pre":  # keep the sums after it correct
        values["resid_mid"][layer, row] += 1
        values["mlp_out"][layer, row] -= 1
    assert bool(problems("wrong.zarr", values)) == found


@pytest.mark.parametrize("positions", [[[9, 4]], [[4, 9], [8, 12]], [[4, 40]]])
def test_media_outside_the_prompt_or_out_of_order_are_found(
    stores: kit.Store, tmp_path: Path, positions: list[list[int]]
) -> None:
    path = tmp_path / "a.zarr"
    stores.write(path, [ArraySpec("q", "float32", (0,), 8)], LENGTH)
    attrs = json.loads((path / "zarr.json").read_bytes())["attributes"]["dmi"]
    attrs["media"] = [{"modality": "image", "hash": "a", "positions": positions}]
    attrs["checksum"] = crc32c(schema.canonical(attrs))
    (path / "zarr.json").write_bytes(schema.dump(schema.root_document(attrs)))
    assert ["are not in order in the prompt" in problem.what for problem in verify_store(path)] == [True]


def test_attention_of_image_tokens_that_see_later_ones_is_refused(stores: kit.Store, tmp_path: Path) -> None:
    specs = [ArraySpec(name, "float32", (0,), 16) for name in ("q_rot", "k_rot")]
    attrs = {"media": MEDIA, "num_layers": 1, "dims": {"heads": 2, "kv_heads": 2, "head_dim": 8}}
    stores.write(tmp_path / "a.zarr", specs, LENGTH, attrs={**attrs, "attention": {"image_blocks": True}})
    capture = open_capture(tmp_path / "a.zarr")
    with pytest.raises(ValueError, match="attention of image tokens cannot be computed"):
        capture.attention(0)
    assert capture.attention(0, queries=slice(20, 30)).shape == (2, 10, 30)
    stores.write(tmp_path / "b.zarr", specs, LENGTH, attrs=attrs)
    assert open_capture(tmp_path / "b.zarr").attention(0).shape == (2, LENGTH, LENGTH)


@pytest.mark.parametrize("start", [0, 3, 4, 6, 9, 10, 14, 20, 25])
def test_sums_for_text_are_right_wherever_a_store_begins(stores: kit.Store, tmp_path: Path, start: int) -> None:
    specs, whole = stream()
    attrs = {"identities": False, "visual_layers": 2, "media": MEDIA, "num_layers": 3}

    def problems(name: str, values: dict[str, np.ndarray]) -> list[str]:
        bits = {key: kit.bits(value[:, start:]) for key, value in values.items()}
        options = {"attrs": {**attrs, "prompt_len": 40, "start": start}, "chunk": 8, "segment": 16}
        stores.write(tmp_path / name, specs, LENGTH - start, values=bits, **options)
        return [problem.where for problem in verify_store(tmp_path / name)]

    assert problems("good.zarr", whole) == []
    for position in (max(start, 20), 59):  # text after the images
        whole["resid_mid"][1, position] += 1
        whole["attn_out"][1, position] += 1
        row = position - start
        assert problems(f"{position}.zarr", whole) == [f"resid_pre layer 2 token {row}"]
        whole["resid_mid"][1, position] -= 1
        whole["attn_out"][1, position] -= 1


@pytest.mark.parametrize("layer", [0, 2])
def test_sums_are_checked_in_layers_of_every_rank(stores: kit.Store, tmp_path: Path, layer: int) -> None:
    """Two ranks wrote attn_out: one wrote layers 0 and 1, the other one layer 2."""
    specs, values = stream()
    wide = [replace(spec, shards=2, part_layers=2) if spec.name == "attn_out" else spec for spec in specs]
    values["attn_out"][layer, 30] += 1
    other, bits = kit.Store(), {key: kit.bits(value) for key, value in values.items()}
    options = {"attrs": {"identities": False, "visual_layers": 2, "media": MEDIA, "num_layers": 3}, "ranks": 2}
    for rank, owner in ((1, other), (0, stores)):
        own = kit.shard_specs(wide, 2, rank)
        owner.write(tmp_path / "a.zarr", own, LENGTH, values=bits, wait=False, rank=rank, **options)
    assert other.flush(kit.PATIENCE) and stores.flush(kit.PATIENCE) and other.shutdown()
    problems = [problem.where for problem in verify_store(tmp_path / "a.zarr")]
    assert problems == [f"resid_mid layer {layer} token 30"]


@pytest.mark.parametrize("wrong", [None, ("attn_out", 0), ("mlp_out", 1), ("attn_out", 2)])
def test_sums_of_layers_with_one_block(stores: kit.Store, tmp_path: Path, wrong: tuple[str, int] | None) -> None:
    """Layer 1 has an MLP, the other layers have a mixer."""
    rng = np.random.default_rng(0)
    stream = rng.standard_normal((LENGTH, 8)).astype(np.float32)
    values = {hook: np.zeros((3, LENGTH, 8), np.float32) for hook in ("resid_pre", "attn_out", "mlp_out")}
    for layer, hook in enumerate(("attn_out", "mlp_out", "attn_out")):
        values["resid_pre"][layer] = stream
        values[hook][layer] = rng.standard_normal((LENGTH, 8))
        stream = stream + values[hook][layer]
    blocks = {"resid_pre": (0, 1, 2), "attn_out": (0, 2), "mlp_out": (1,)}
    specs = [ArraySpec(hook, "float32", layers, 8) for hook, layers in blocks.items()]
    specs += [ArraySpec("resid_final", "float32", (), 8)]
    if wrong is not None:
        values[wrong[0]][wrong[1], 30] += 1
    bits = {hook: kit.bits(values[hook][list(layers)]) for hook, layers in blocks.items()}
    bits["resid_final"] = kit.bits(stream[None])
    attrs = {"identities": True, "num_layers": 3, "mlp_layers": [1]}
    stores.write(tmp_path / "a.zarr", specs, LENGTH, values=bits, attrs=attrs)
    found = [problem.where for problem in verify_store(tmp_path / "a.zarr")]
    after = {0: "resid_pre layer 1", 1: "resid_pre layer 2", 2: "resid_final layer 0"}
    assert found == ([] if wrong is None else [f"{after[wrong[1]]} token 30"])


def test_sums_of_parallel_blocks_leave_the_stream_between_them_out(stores: kit.Store, tmp_path: Path) -> None:
    specs, values = stream()
    bits = {key: kit.bits(value) for key, value in values.items()}
    attrs = {"identities": True, "num_layers": 3, "parallel": True}
    stores.write(tmp_path / "a.zarr", specs, LENGTH, values=bits, attrs=attrs)
    wrong = {problem.where for problem in verify_store(tmp_path / "a.zarr")}
    assert wrong == {"resid_pre layer 1 token 4", "resid_pre layer 2 token 4"}, (
        "visual features are added to rows of images"
    )
    values["resid_mid"] += 1
    bits["resid_mid"] = kit.bits(values["resid_mid"])
    stores.write(tmp_path / "b.zarr", specs, LENGTH, values=bits, attrs=attrs)
    assert {problem.where for problem in verify_store(tmp_path / "b.zarr")} == wrong
