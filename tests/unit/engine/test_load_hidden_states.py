# SPDX-License-Identifier: Apache-2.0
"""`dmi export --to safetensors`: vLLM's own reader of hidden states accepts the files."""

from __future__ import annotations

import fcntl
from pathlib import Path

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    cleanup_hidden_states,
    load_hidden_states,
)

from dmi_connector import open_capture
from dmi_connector.analysis.export.safetensors import export_safetensors
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from tests import storekit as kit


def test_vllms_reader_takes_exported_files(tmp_path: Path) -> None:
    owner = kit.Store(1 << 20)
    specs = [ArraySpec("resid_pre", "bfloat16", (0, 1), 8), ArraySpec("resid_final", "bfloat16", (), 8)]
    for name in "ab":
        owner.write(tmp_path / f"in/{name}.zarr", specs, 20, attrs={"num_layers": 2})
    assert owner.shutdown()
    assert main(["export", str(tmp_path / "in"), "--to", "safetensors", "-o", str(tmp_path / "out")]) == 0
    one = tmp_path / "one.safetensors"
    assert main(["export", str(tmp_path / "in/a.zarr"), "--to", "safetensors", "-o", str(one)]) == 0
    export_safetensors(tmp_path / "in/a.zarr", tmp_path / "called.safetensors")
    for path in (tmp_path / "out/a.safetensors", tmp_path / "out/b.safetensors", one, tmp_path / "called.safetensors"):
        found = load_hidden_states(str(path))
        with open_capture(tmp_path / "in/a.zarr") as capture:
            assert found["token_ids"].tolist() == capture.token_ids.tolist()
            want = [capture.torch("resid_pre", 0), capture.torch("resid_pre", 1), capture.torch("resid_final")]
        assert path.stem == "b" or torch.equal(found["hidden_states"], torch.stack(want, 1))
        with open(f"{path}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no process holds the lock
        cleanup_hidden_states(str(path))
    assert [path.name for path in tmp_path.rglob("*.safetensors*")] == []
