# SPDX-License-Identifier: Apache-2.0
"""The backend for speculators, with fakes of speculators' classes. tests/types uses the real ones."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dmi_connector.captures.capture import open_capture
from dmi_connector.captures.finite import NotFinite
from dmi_connector.layout import ArraySpec
from tests import storekit as kit

MODULE = "dmi_connector.analysis.training.speculators_backend"
ROWS = 5
SPECS = [ArraySpec("resid_pre", "float32", (0, 1), 8), ArraySpec("resid_final", "float32", (), 8)]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the backend. Its `registered` is {name: class}."""
    known: dict[str, type] = {}

    class Backend:
        @staticmethod
        def register(name: str) -> Any:
            return lambda made: known.setdefault(name, made)

    def module(name: str, **names: Any) -> None:
        found = ModuleType(name)
        vars(found).update(names)
        monkeypatch.setitem(sys.modules, name, found)

    module("hs_connectors", HiddenStatesBackend=Backend, HiddenStatesTransfer=object)
    for name in ("speculators", "speculators.train"):
        module(name)
    module("speculators.train.recovery", SampleUnavailable=SimpleNamespace)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    import importlib

    found = importlib.import_module(MODULE)
    found.registered = known  # type: ignore[attr-defined]
    yield found
    del sys.modules[MODULE]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores with keys 7, 3 and 5, in order of their beginning. Row 2 of key 5 is not finite."""
    root, owner = tmp_path_factory.mktemp("stores"), kit.Store(1 << 20)
    for key in ("7", "3", "5"):
        values = {"resid_pre": np.full((2, ROWS, 8), int(key), "f4"), "resid_final": np.ones((1, ROWS, 8), "f4")}
        values["resid_pre"][1, 2, 4] = np.nan if key == "5" else 0
        stored = {name: kit.bits(array) for name, array in values.items()}
        ids = np.arange(ROWS, dtype="<i4") + 10 * int(key)
        about = {"num_layers": 2}
        owner.write(root / f"{key}.zarr", SPECS, ROWS, values=stored, ids=ids, attrs=about, key=key)
    assert owner.shutdown()
    return root


def test_stores_of_several_models_are_refused(backend: Any, tmp_path: Path) -> None:
    owner = kit.Store(1 << 20)
    for model in ("one", "two"):
        owner.write(tmp_path / f"{model}.zarr", SPECS, ROWS, attrs={"num_layers": 2, "model": model})
    assert owner.shutdown()
    with pytest.raises(
        ValueError, match=r"two.zarr is of the model two, .*one.zarr of one: their rows cannot be mixed"
    ):
        backend.StoreTransfer(str(tmp_path)).get_cached(0)


def test_messages_about_numbers_name_the_option_of_the_backend(
    backend: Any, stores: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"^--dmi-number-by row: no manifest.* or use --dmi-number-by key$"):
        backend.StoreTransfer(str(stores), number_by="row").setup()
    monkeypatch.setattr(backend, "order_is_no_row", lambda _captures: "file 0 is of row 5; use --number-by row")
    backend.StoreTransfer(str(stores)).setup()
    assert caplog.messages == [
        f"dmi: --dmi-number-by order of {stores}: file 0 is of row 5; use --dmi-number-by row",
    ]


def test_samples_are_found_by_their_number(backend: Any, stores: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Numbers are keys or positions. Layers are in the order of training, with the last hidden state at the end."""
    by_key = backend.StoreTransfer(str(stores), number_by="key")
    found = by_key.get_cached(3)
    with open_capture(stores / "3.zarr") as capture:
        wanted = np.stack([capture.numpy("resid_pre", 0), capture.numpy("resid_pre", 1), capture.numpy("resid_final")])
        assert np.array_equal(found["hidden_states"].numpy(), wanted.transpose(1, 0, 2))
        assert (
            found["token_ids"].tolist() == capture.token_ids.tolist() and str(found["token_ids"].dtype) == "torch.int64"
        )
    assert by_key.get_cached(4) is None
    chosen = backend.StoreTransfer(str(stores), layers=[1, 0])
    assert chosen.get_cached(1)["hidden_states"].shape == (ROWS, 3, 8)
    assert chosen.get_cached(0)["hidden_states"][0, :2, 0].tolist() == [7, 7]
    assert chosen.get_cached(0)["hidden_states"][2, :2, 4].tolist() == [0, 7], "layer 1 must come first"
    assert caplog.text == ""


@pytest.mark.parametrize("policy", ["skip", "keep", "fail"])
def test_samples_that_are_not_finite(policy: str, backend: Any, stores: Path, caplog: pytest.LogCaptureFixture) -> None:
    transfer = backend.StoreTransfer(str(stores), number_by="key", finite=policy)
    if policy == "fail":
        with pytest.raises(NotFinite, match="row 2"):
            transfer.get_cached(5)
        return
    first, again, good = transfer.get_cached(5), transfer.get_cached(5), transfer.get_cached(7)
    assert good["hidden_states"].isfinite().all()
    lines = [record.getMessage() for record in caplog.records]
    if policy == "skip":
        assert "row 2" in first.reason and again.reason == first.reason and len(lines) == 2
        assert lines[0] == f"dmi: {first.reason}; sample left out, 1 so far"
    else:
        assert first["hidden_states"].isnan().sum() == 1
        assert lines == [f"dmi: {stores}/5.zarr, with values that are not finite, is kept; 1 so far"]


def test_a_response_names_its_store(backend: Any, stores: Path) -> None:
    transfer = backend.StoreTransfer(str(stores))
    assert transfer.get_generated({"dmi_store": str(stores / "7.zarr")})["token_ids"].tolist() == list(range(70, 75))
    with pytest.raises(ValueError, match="names no store: no room"):
        transfer.get_generated({"dmi_error": "no room"})
    with pytest.raises(ValueError, match=r"names no store: \{'other': 1\}"):
        transfer.get_generated({"other": 1})


def test_stores_of_other_layers_are_refused(backend: Any, stores: Path, tmp_path: Path) -> None:
    owner = kit.Store(1 << 20)
    specs = [ArraySpec("resid_pre", "float32", (0,), 8), SPECS[1]]
    owner.write(tmp_path / "a.zarr", specs, ROWS, attrs={"num_layers": 2})
    owner.write(tmp_path / "later.zarr", SPECS, ROWS, attrs={"num_layers": 2, "start": 3})
    assert owner.shutdown()
    transfer = backend.StoreTransfer(str(stores))
    transfer.get_cached(0)
    with pytest.raises(ValueError, match=r"has the layer ids \[0, 2\], others have \[0, 1, 2\]; give --dmi-layers"):
        transfer.get_generated({"dmi_store": str(tmp_path / "a.zarr")})
    with pytest.raises(ValueError, match="no rows of the first tokens"):
        transfer.get_generated({"dmi_store": str(tmp_path / "later.zarr")})


def test_options_of_training_and_serving(backend: Any, stores: Path) -> None:
    made = backend.registered["dmi"]
    assert made is backend.StoreBackend and backend.NAME == "dmi"
    train, launch = argparse.ArgumentParser(), argparse.ArgumentParser()
    made.add_train_args(train)
    made.add_launch_args(launch)
    with pytest.raises(ValueError, match="--dmi-store-dir is missing"):
        made.from_train_args(train.parse_args([]), "x")
    plain = made.from_train_args(train.parse_args(["--dmi-store-dir", str(stores)]), "x")
    assert (plain.store_dir, plain.layers, plain.number_by, plain.finite.policy) == (str(stores), None, "order", "skip")
    given = ["--dmi-store-dir", "d", "--dmi-layers", "3", "1", "--dmi-number-by", "row", "--dmi-finite", "keep"]
    full = made.from_train_args(train.parse_args(given), "x")
    assert (full.store_dir, full.layers, full.number_by, full.finite.policy) == ("d", [3, 1], "row", "keep")
    config = made.build_kv_transfer_config(launch.parse_args([]))
    assert config["kv_connector_extra_config"]["store_dir"].endswith("captures")
    assert config["kv_connector_extra_config"]["hooks"] == "hidden-states"
