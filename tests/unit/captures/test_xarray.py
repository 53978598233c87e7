# SPDX-License-Identifier: Apache-2.0
"""Stores as xarray Datasets, opened by xarray itself and by `Capture.xarray`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import dask
import numpy as np
import pytest
import xarray

from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.captures.captures import open_captures
from dmi_connector.captures.xarray_view import LazyHook
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.format.schema import dimension_names
from tests import storekit as kit

ARRAYS = (
    ArraySpec("embed", "bfloat16", (), 8),
    ArraySpec("resid_pre", "bfloat16", (0, 1, 2), 8),
    ArraySpec("attn_out", "bfloat16", (0, 1, 2), 8),
    ArraySpec("mlp_post", "float32", (1,), 12),
    ArraySpec("topk_ids", "int32", (0, 2), 2),
    ArraySpec("logits", "float32", (), 20),
)
LENGTH = 100


@pytest.fixture(scope="module")
def stores() -> Iterator[kit.Store]:
    made = kit.Store(4 << 20)
    yield made
    assert made.shutdown()


@pytest.fixture(scope="module", params=["none", "zstd"])
def written(
    request: pytest.FixtureRequest, stores: kit.Store, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Capture, kit.Values]:
    path = tmp_path_factory.mktemp("xarray") / "a.zarr"
    attrs = {"num_layers": 3, "dims": {"hidden": 8}}
    options = {"codec": request.param, "chunk": 16, "segment": 32, "key": "mine"}
    values = stores.write(path, ARRAYS, LENGTH, 4, attrs=attrs, **options)
    return open_capture(path, timeout=0), values


def test_dimension_names_have_the_layers_of_the_array() -> None:
    assert dimension_names(ArraySpec("q", "float32", (0, 1, 2, 5, 7, 8), 4)) == ["layer_0-2+5+7-8", "token", "q_width"]
    assert dimension_names(ArraySpec("embed", "float32", (), 4)) == ["once", "token", "embed_width"]
    assert dimension_names(ArraySpec("logits", "float32", (), 4)) == ["sample", "logits_width"]
    assert dimension_names(ArraySpec("q", "float32", (0,), 4), "1.1") == ["layer", "token", "q"]


def test_xarray_opens_a_store_by_itself(written: tuple[Capture, kit.Values]) -> None:
    capture, values = written
    with xarray.open_zarr(capture.path, consolidated=False) as found:
        assert set(found.data_vars) >= {s.name for s in ARRAYS} | {"token_ids", "positions", "phase"}
        assert found.sizes["token"] == LENGTH and found.sizes["layer_0-2"] == 3
        for spec in ARRAYS:
            np.testing.assert_array_equal(kit.bits(found[spec.name].values), values[spec.name])


def test_a_dataset_has_the_values_of_each_hook(written: tuple[Capture, kit.Values]) -> None:
    capture, _ = written
    found = capture.xarray()
    assert list(found.data_vars) == [s.name for s in ARRAYS]
    for spec in ARRAYS:
        np.testing.assert_array_equal(found[spec.name].values, capture.numpy(spec.name))
    assert found["resid_pre"].dims == found["attn_out"].dims == ("layer", "token", "hidden")
    assert found["embed"].dims == ("token", "hidden") and found["mlp_post"].dims == (
        "layer_1",
        "token",
        "mlp_post_width",
    )
    assert found["topk_ids"].dtype == np.int32 and found["logits"].dims == ("sample", "logits_width")
    assert found.attrs["key"] == "mine" and found.attrs["prompt_len"] == 50


def test_coordinates_select_layers_and_positions(written: tuple[Capture, kit.Values]) -> None:
    capture, _ = written
    found = capture.xarray()
    np.testing.assert_array_equal(found["token_id"], capture.token_ids)
    np.testing.assert_array_equal(found["phase"], capture.phase)
    np.testing.assert_array_equal(found["sample_position"], capture.logits_positions)
    assert all(found[name].dims == ("token",) for name in ("position", "token_id", "phase"))
    assert found["layer_0+2"].values.tolist() == [0, 2]
    np.testing.assert_array_equal(found["topk_ids"].sel({"layer_0+2": 2}), capture.numpy("topk_ids", 2))
    some = found["resid_pre"].sel(layer=2, position=slice(90, 95))
    np.testing.assert_array_equal(some, capture.numpy("resid_pre", 2, slice(90, 96)))
    generated = found.isel(token=np.flatnonzero(found["phase"].values == 1))
    np.testing.assert_array_equal(generated["embed"], capture.numpy("embed", tokens=slice(50, None)))


@pytest.mark.parametrize(
    "index",
    [(slice(None, None, 2), slice(5, 60, 7), slice(1, 3)), (1, 5, slice(None)), (-1, slice(30, 34), 3), (0, 3, 2)],
)
def test_parts_of_a_dataset_are_parts_of_the_hook(
    written: tuple[Capture, kit.Values], index: tuple[slice | int, ...]
) -> None:
    capture, _ = written
    np.testing.assert_array_equal(capture.xarray()["resid_pre"][index], capture.numpy("resid_pre")[index])


def test_nothing_is_read_before_it_is_needed(
    written: tuple[Capture, kit.Values], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture, _ = written
    read: list[tuple[object, ...]] = []
    numpy = Capture.numpy
    monkeypatch.setattr(Capture, "numpy", lambda self, *args: read.append(args) or numpy(self, *args))
    found = capture.xarray()
    total = (found["resid_pre"] + found["attn_out"]).sel(layer=1).isel(token=slice(32, 64)).sum("hidden")
    assert not read and total.dtype == np.float32
    with dask.config.set(scheduler="synchronous"):
        total.compute()
    assert sorted(read) == [("attn_out", 1, slice(32, 64)), ("resid_pre", 1, slice(32, 64))]


def test_aliases_and_single_hooks_can_be_asked_for(written: tuple[Capture, kit.Values]) -> None:
    capture, _ = written
    found = capture.xarray(["resid_post", "mlp_post"])
    assert found["resid_post"].dims == ("layer", "token", "hidden") and found["layer"].values.tolist() == [0, 1]
    np.testing.assert_array_equal(found["resid_post"], capture.numpy("resid_post"))
    with pytest.raises(KeyError, match="zz"):
        capture.xarray(["zz"])


def test_a_dataset_takes_the_names_that_a_capture_takes(written: tuple[Capture, kit.Values]) -> None:
    capture, _ = written
    names = ["resid_pre@2", "resid_post@0", "embed@0", "blocks.1.hook_attn_out", "topk_ids@-1", "logits", "resid_pre"]
    found = capture.xarray(names)
    assert list(found.data_vars) == names
    for name in names:
        np.testing.assert_array_equal(found[name].values, capture[name])
        np.testing.assert_array_equal(found[name][5:7, 1], capture[name][5:7, 1])
        assert "@" not in name or found[name].values.shape == capture.shape(name)
    assert found["resid_pre@2"].dims == found["blocks.1.hook_attn_out"].dims == ("token", "hidden")
    assert found["topk_ids@-1"].dims == ("token", "topk_ids_width") and found["topk_ids@-1"].dtype == np.int32
    assert list(capture.xarray("embed").data_vars) == ["embed"], "a single name is no list of letters"
    with pytest.raises(KeyError, match=r"resid_pre.* has no layer 3"):
        capture.xarray(["resid_pre@3"])
    with pytest.raises(ValueError, match="'resid_pre@two' names no layer"):
        capture.xarray(["resid_pre@two"])


@pytest.mark.parametrize("name", ["resid_pre@2", "resid_post@-2", "embed", "hook_embed", "blocks.1.hook_attn_out"])
def test_each_reader_takes_each_spelling_of_a_name(written: tuple[Capture, kit.Values], name: str) -> None:
    capture, _ = written
    captures, wanted = open_captures(capture.path.parent), capture[name]
    readers = {
        "numpy": capture.numpy(name),
        "torch": capture.torch(name).float().numpy(),
        "shape": np.empty(capture.shape(name)),
        "rows": np.asarray(captures.rows(name)),
        "xarray": capture.xarray(name)[name].values,
        "xarray of many": captures.xarray(name)[name].values,
    }
    for reader, found in readers.items():
        assert found.shape == wanted.shape, reader
        assert reader == "shape" or np.array_equal(found, wanted, equal_nan=True), reader
    assert name in capture and len(captures.filter(hooks=name)) == 1
    if wanted.ndim == 2 and "embed" not in name:
        for read in (capture.numpy, captures.rows):
            with pytest.raises(ValueError, match=f"'{name}' names its layer; leave layer=1 out"):
                read(name, 1)


def test_missing_rows_of_an_incomplete_store_are_marked(stores: kit.Store, tmp_path: Path) -> None:
    loss = Loss.of(Cause.FELL_BEHIND, [[3, 5], [8, 9]])
    stores.write(tmp_path / "a.zarr", [ARRAYS[0]], 10, losses=[loss])
    found = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True).xarray()
    assert np.flatnonzero(found["missing"].values).tolist() == [3, 4, 8]
    assert not found.attrs["complete"]


def test_an_absent_xarray_is_named_with_its_extra(
    written: tuple[Capture, kit.Values], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(ImportError, match=r"install dmi_connector\[xarray\]"):
        written[0].xarray()


def test_a_lazy_hook_is_indexed_as_an_array_of_numpy_is(written: tuple[Capture, kit.Values]) -> None:
    capture, _ = written
    found = capture.xarray()
    for name, dimensions in (("resid_pre", 3), ("embed", 2)):
        whole, lazy = capture.numpy(name), LazyHook(capture, name)
        layers = [slice(None)] * (dimensions - 2)
        for index in (
            (*layers, [5, 1, 99], slice(None)),
            (*layers, slice(0, 0), slice(None)),
            (*layers, slice(90, 10, -7), 3),
            (*layers, np.arange(LENGTH) % 9 == 0, slice(1, 3)),
            (..., 2),
            (slice(0, 0),),
            ([0, 1],),
            1,
            -1,
        ):
            np.testing.assert_array_equal(lazy[index], whole[index])
        rows = found[name].isel(token=[7, 3, 7]).compute(scheduler="sync")
        np.testing.assert_array_equal(rows, whole[..., [7, 3, 7], :])
    with pytest.raises(IndexError, match="'embed' has 100 rows, row 100 does not exist"):
        LazyHook(capture, "embed")[100]
