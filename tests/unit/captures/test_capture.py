# SPDX-License-Identifier: Apache-2.0
"""Names, aliases and layers of a capture and its reader, schema rules, and the safetensors export."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmi_connector.analysis.export.safetensors import export_safetensors
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce.int8 import Int8
from dmi_connector.store.format.schema import effective_grid
from dmi_connector.store.read.arrays.hook_values import HookValues
from dmi_connector.store.read.files.open_files import files_of
from dmi_connector.store.read.reader import StoreReader, open_reader
from tests import storekit as kit

ARRAYS = (
    ArraySpec("resid_pre", "bfloat16", (0, 1, 2, 3), 8),
    ArraySpec("ln2", "float32", (1, 3), 8),
    ArraySpec("z", "float32", (0, 2), 4),
    ArraySpec("embed", "float32", (), 8),
    ArraySpec("resid_final", "bfloat16", (), 8),
)
LENGTH = 300


@pytest.fixture(scope="module")
def stores() -> Iterator[kit.Store]:
    p = kit.Store(4 << 20)
    yield p
    assert p.shutdown(kit.PATIENCE)


@pytest.fixture(scope="module")
def written(stores: kit.Store, tmp_path_factory: pytest.TempPathFactory) -> tuple[Capture, kit.Values]:
    path = tmp_path_factory.mktemp("reader") / "a.zarr"
    values = stores.write(path, ARRAYS, LENGTH, attrs={"num_layers": 4})
    cap = open_capture(path, timeout=0)
    return cap, {s.name: kit.to_float(values[s.name], s.dtype) for s in ARRAYS}


def test_a_capture_lists_its_hooks_aliases_and_layers(written: tuple[Capture, kit.Values]) -> None:
    cap, _ = written
    assert cap.hooks == ["resid_pre", "ln2", "z", "embed", "resid_final", "mlp_in", "resid_post"]
    assert cap.layers["mlp_in"] == [1, 3] and cap.layers["embed"] == []
    assert cap.layers["resid_post"] == [0, 1, 2, 3]
    assert "mlp_in" in cap and "q" not in cap and "4 tokens" not in repr(cap)


def test_the_bare_reader_gives_the_same_hooks_without_names_of_other_libraries(
    written: tuple[Capture, kit.Values],
) -> None:
    cap, v = written
    with open_reader(cap.path, timeout=0) as reader:
        assert type(reader) is StoreReader and repr(reader) == repr(cap).replace("Capture", "StoreReader")
        assert list(reader) == list(cap) and "mlp_in" in reader and "q" not in reader
        assert "hook_embed" in cap and "hook_embed" not in reader and 3 not in reader
        for name, values in v.items():
            assert reader.shape(name) == cap.shape(name)
            np.testing.assert_array_equal(reader.numpy(name), cap.numpy(name))
            np.testing.assert_array_equal(reader.numpy(name), values if reader.layers[name] else values[0])
        rows, reduced = reader.stored(reader.sources("z", 2)[0], [299, 0])
        assert reduced is None
        np.testing.assert_array_equal(rows, v["z"][1, [299, 0]])
        with pytest.raises(KeyError, match="hook_embed"):
            reader.numpy("hook_embed")


@pytest.mark.parametrize("opened", [open_reader, open_capture])
def test_a_pickled_reader_opens_the_same_store_as_the_same_class(
    written: tuple[Capture, kit.Values], opened: Callable[..., StoreReader]
) -> None:
    cap, v = written
    with opened(cap.path, timeout=0) as reader, pickle.loads(pickle.dumps(reader)) as copy:
        assert type(copy) is type(reader) and copy.attrs == reader.attrs
        np.testing.assert_array_equal(copy.numpy("ln2", 3), v["ln2"][1])


def test_aliases_read_the_rows_of_the_hooks_they_stand_for(written: tuple[Capture, kit.Values]) -> None:
    cap, v = written
    post = np.concatenate([v["resid_pre"][1:], v["resid_final"]])
    np.testing.assert_array_equal(cap.numpy("resid_post"), post)
    np.testing.assert_array_equal(cap.numpy("resid_post", 2), v["resid_pre"][3])
    np.testing.assert_array_equal(cap.numpy("resid_post", -1, slice(3, 9)), v["resid_final"][0, 3:9])
    np.testing.assert_array_equal(cap.numpy("mlp_in", 3), v["ln2"][1])
    np.testing.assert_array_equal(cap["blocks.2.attn.hook_z"], v["z"][1])
    np.testing.assert_array_equal(cap["blocks.3.hook_resid_post"], v["resid_final"][0])
    np.testing.assert_array_equal(cap["hook_embed"], v["embed"][0])
    np.testing.assert_array_equal(cap["z"], v["z"])
    with pytest.raises(ValueError, match="several arrays"):
        cap.array("resid_post")


def test_a_reduced_array_and_another_are_joined_as_float32(stores: kit.Store, tmp_path: Path) -> None:
    """resid_post has the rows of resid_pre, and those of resid_final after the last layer."""
    settings = {**Int8().settings(), "width": 8, "dtype": "float32"}
    final = ArraySpec("resid_final", "uint8", (), 12, reduce=settings)
    values = {"resid_pre": kit.random_bits(ARRAYS[0], 20), "resid_final": np.full((1, 20, 12), 60, np.uint8)}
    stores.write(tmp_path / "a.zarr", [ARRAYS[0], final], 20, values=values, attrs={"num_layers": 4})
    cap = open_capture(tmp_path / "a.zarr", timeout=0)
    found = cap.numpy("resid_post")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, [*cap.numpy("resid_pre")[1:], cap.numpy("resid_final")])


def test_stored_rows_are_in_the_order_of_their_arrays(stores: kit.Store, tmp_path: Path) -> None:
    values = stores.write(tmp_path / "a.zarr", [ArraySpec(name, "float32", (0, 1), 4) for name in "qkv"], 20)
    cap = open_capture(tmp_path / "a.zarr", timeout=0)
    found = HookValues(files_of(cap.path), cap.attrs, cap.path).stored({"v": [1], "q": [1, 0], "k": [0]}, slice(5, 9))
    wanted = np.concatenate([values["v"][[1]], values["q"][::-1], values["k"][[0]]])[:, 5:9]
    np.testing.assert_array_equal(kit.bits(found), wanted)


def test_layers_and_tokens_can_be_selected(written: tuple[Capture, kit.Values]) -> None:
    cap, v = written
    np.testing.assert_array_equal(cap.numpy("z", -2), v["z"][1])  # -2 is layer 2 of the model's 4 layers
    np.testing.assert_array_equal(cap.numpy("z", 2, [299, 0, -1]), v["z"][1, [299, 0, -1]])
    np.testing.assert_array_equal(cap.numpy("z", 2, [-300, -2]), v["z"][1, [0, 298]])
    np.testing.assert_array_equal(cap.numpy("z", tokens=np.array([130])), v["z"][:, [130]])
    np.testing.assert_array_equal(cap.numpy("embed", 0, slice(-5, None)), v["embed"][0, -5:])
    assert cap.numpy("embed", tokens=slice(0, 0)).shape == (0, 8)


@pytest.mark.parametrize("tokens", [[[0, 1], [2, 3]], 5, np.int64(5), np.zeros((2, 2), int), np.zeros((300, 8), bool)])
def test_tokens_that_are_not_a_list_are_refused(written: tuple[Capture, kit.Values], tokens: Any) -> None:
    cap, _ = written
    for read in (cap.numpy, cap.torch):
        with pytest.raises(
            IndexError, match=r"takes a list of rows, not numbers of shape|the mask of tokens has shape"
        ):
            read("z", 2, tokens)


@pytest.mark.parametrize(
    ("hook", "layer", "message"),
    [
        ("zz", None, "did you mean 'z'"),
        ("z", 1, r"no layer 1 in this store; it has \[0, 2\]"),
        ("z", 4, "no layer 4"),
        ("z", -5, "no layer -5"),
        ("embed", 1, "leave layer out"),
    ],
)
def test_an_unknown_hook_or_layer_is_refused(
    written: tuple[Capture, kit.Values], hook: str, layer: int | None, message: str
) -> None:
    with pytest.raises(KeyError, match=message):
        written[0].numpy(hook, layer)


@pytest.mark.parametrize("layer", [[[0, 2]], slice(0, 2), 0.0, "2", [0.5]])
def test_invalid_layers_are_refused(written: tuple[Capture, kit.Values], layer: Any) -> None:
    cap, _ = written
    named = layer[0] if layer == [0.5] else layer
    for read in (cap.numpy, cap.torch, cap.sources):
        with pytest.raises(ValueError, match=re.escape(f"layer {named!r} is not valid; give layer numbers, or None")):
            read("z", layer)
    with pytest.raises(ValueError, match=r"layer \[\] names no layer"):
        cap.numpy("z", [])
    np.testing.assert_array_equal(cap.numpy("z", np.int64(2)), cap.numpy("z", 2))


def test_a_list_of_layers_gives_them_in_its_order(written: tuple[Capture, kit.Values]) -> None:
    cap, v = written
    np.testing.assert_array_equal(cap.numpy("resid_pre", [3, 0, -1]), v["resid_pre"][[3, 0, 3]])
    np.testing.assert_array_equal(cap.numpy("resid_pre", np.array([2]), [7, 5]), v["resid_pre"][[2], 7:4:-2])
    post = np.concatenate([v["resid_pre"][1:], v["resid_final"]])
    np.testing.assert_array_equal(cap.numpy("resid_post", [0, 3, 2]), post[[0, 3, 2]])
    np.testing.assert_array_equal(cap.torch("z", [2, 0]).numpy(), v["z"][::-1])
    np.testing.assert_array_equal(cap.numpy("embed", [0]), v["embed"][0])
    with pytest.raises(KeyError, match=r"no layer 1 in this store; it has \[0, 2\]"):
        cap.numpy("z", [0, 1])


def test_a_name_may_have_its_layer(written: tuple[Capture, kit.Values]) -> None:
    cap, v = written
    np.testing.assert_array_equal(cap["z@2"], v["z"][1])
    np.testing.assert_array_equal(cap["resid_post@-1"], v["resid_final"][0])
    np.testing.assert_array_equal(cap.numpy("z@2", tokens=slice(3, 5)), v["z"][1, 3:5])
    with pytest.raises(ValueError, match="'z@2' names its layer; leave layer=2 out"):
        cap.numpy("z@2", layer=2)  # the layer is given twice
    assert "z@2" in cap and "z@-2" in cap and "z@1" not in cap and "z@x" not in cap and "zz@1" not in cap
    with pytest.raises(KeyError, match="no layer 1"):
        cap["z@1"]
    for name in ("z@x", "z@0_0", "z@\u0662", "z@ 2"):
        with pytest.raises(ValueError, match=f"'{name}' names no layer"):
            cap[name]


def test_foreign_names_without_a_hook_and_absent_logits_are_refused(written: tuple[Capture, kit.Values]) -> None:
    with pytest.raises(KeyError, match="no equivalent here"):
        written[0]["blocks.0.ln1.hook_normalized"]
    with pytest.raises(KeyError, match="logits"):
        _ = written[0].logits_positions


@given(st.integers(0, 5000), st.integers(1, 300), st.integers(1, 20))
def test_the_effective_grid_shrinks_only_for_short_stores(length: int, chunk: int, per_segment: int) -> None:
    grid = effective_grid(length, chunk, chunk * per_segment)
    assert grid.segment % grid.chunk == 0 and 1 <= grid.chunk <= chunk and grid.segment <= chunk * per_segment
    if length < chunk:
        assert grid.chunk == grid.segment == max(1, length)  # no padding
    else:
        assert grid.chunk == chunk
    if length > grid.segment:
        assert grid.segment == chunk * per_segment  # a full shard is final before the length of the capture is known


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float8"}, "dtype 'float8' is unknown"),
        ({"width": 10, "shards": 4}, "width 10 does not split into 4 shards"),
        ({"rank": 1}, "rank 1 is outside its 1 shards"),
        ({"name": "a/b"}, "cannot be stored"),
        ({"name": "token_ids"}, "cannot be stored"),
        ({"layers": (2, 1)}, "must ascend"),
        ({"per_sample": True}, "has no layers"),
    ],
)
def test_bad_array_specs_are_refused(arguments: dict[str, object], message: str) -> None:
    good = {"name": "q", "dtype": "bfloat16", "layers": (0, 1), "width": 8}
    with pytest.raises(ValueError, match=message):
        ArraySpec(**{**good, **arguments})  # type: ignore[arg-type]


def test_the_scope_of_a_known_hook_overrides_its_spec() -> None:
    assert ArraySpec("resid_final", "float32", (0,), 8).layers == ()
    assert ArraySpec("logits", "float32", (0,), 8).per_sample


@pytest.mark.parametrize("layer_ids", [None, [4, 1]])
def test_export_is_the_file_safetensors_would_write(
    written: tuple[Capture, kit.Values], tmp_path: Path, layer_ids: list[int] | None
) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    cap, _ = written
    ids = export_safetensors(cap.path, tmp_path / "out.safetensors", layer_ids)
    assert ids == ([1, 4] if layer_ids else [0, 1, 2, 3, 4])
    layers = [cap.torch("resid_final") if i == 4 else cap.torch("resid_pre", i) for i in ids]
    tensors = {
        "hidden_states": torch.stack(layers, dim=1).contiguous(),
        "token_ids": torch.tensor(cap.token_ids.tolist()),
    }
    safetensors.save_file(tensors, tmp_path / "theirs.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert not (tmp_path / "out.safetensors.partial").exists()


def test_an_export_of_absent_layers_or_hooks_is_refused(
    stores: kit.Store, written: tuple[Capture, kit.Values], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"layer ids \[7\] are not in"):
        export_safetensors(written[0].path, tmp_path / "out", [1, 7])
    stores.write(tmp_path / "z.zarr", [ARRAYS[2]], 5)
    with pytest.raises(ValueError, match="resid_pre"):
        export_safetensors(tmp_path / "z.zarr", tmp_path / "out")
