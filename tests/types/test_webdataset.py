# SPDX-License-Identifier: Apache-2.0
"""Shards of `dmi export --to webdataset`, read with WebDataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dmi_connector import open_capture
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from tests import snippets
from tests import storekit as kit

webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed; run make types TYPES=webdataset")


def test_samples_are_the_rows_of_stores(tmp_path: Path) -> None:
    owner = kit.Store(1 << 22)
    for number, length in enumerate((300, 40, 7)):
        specs = [ArraySpec("resid_pre", "bfloat16", (12,), 16), ArraySpec("q", "float32", (12,), 8)]
        owner.write(tmp_path / f"captures/r.{number}.zarr", specs, length, key=f"k{number}")
    assert owner.shutdown()
    argv = ["export", str(tmp_path / "captures"), "--to", "webdataset", "--hook", "resid_pre@12,q@12"]
    assert main([*argv, "--shard-size", "20k", "-o", str(tmp_path / "out")]) == 0
    shards = [str(path) for path in sorted((tmp_path / "out").glob("*.tar"))]
    assert len(shards) == 2
    found = list(webdataset.WebDataset(shards, shardshuffle=False).decode())
    assert [sample["__key__"] for sample in found] == ["r_0", "r_1", "r_2"]
    for number, sample in enumerate(found):
        assert sample["json"]["key"] == f"k{number}"
        with open_capture(tmp_path / f"captures/r.{number}.zarr") as cap:
            assert np.array_equal(sample["token_ids.npy"], cap.token_ids)
            assert np.array_equal(sample["phase.npy"], cap.phase)
            for hook in ("resid_pre@12", "q@12"):
                assert np.array_equal(sample[f"{hook}.npy"], cap[hook]), hook
    names = snippets.run("WebDataset", {"shards": shards})
    assert names["sample"]["json"]["store"].endswith("r.2.zarr")
