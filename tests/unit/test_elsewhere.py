# SPDX-License-Identifier: Apache-2.0
"""Reading on systems other than Linux: processes from which modules and functions were removed read everything."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dmi_connector.cli import main as cli
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format import linux
from dmi_connector.store.format.paths import leaves_store
from dmi_connector.store.read.files import store_files
from dmi_connector.urls import is_url
from tests import storekit as kit

ROOT = Path(__file__).parents[2]
LAYERS, WIDTH, HEADS, EXPERTS, VOCABULARY = 3, 16, 2, 4, 120
SPECS = (
    *(ArraySpec(name, "bfloat16", tuple(range(LAYERS)), WIDTH) for name in ("resid_pre", "attn_out", "mlp_out")),
    *(ArraySpec(name, "float32", tuple(range(LAYERS)), WIDTH) for name in ("q_rot", "k_rot")),
    *(ArraySpec(name, "bfloat16", (), WIDTH) for name in ("resid_final", "final_ln")),
    ArraySpec("topk_ids", "int32", tuple(range(LAYERS)), 2),
)
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "vocab_size": VOCABULARY,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model, with the files that the logit lens reads, and of an autoencoder."""
    folder, rng = tmp_path_factory.mktemp("model"), np.random.default_rng(0)
    (folder / "config.json").write_text(json.dumps(MODEL))
    table = rng.standard_normal((VOCABULARY, WIDTH), dtype=np.float32)
    save_file(
        {"model.embed_tokens.weight": table, "model.norm.weight": np.ones(WIDTH, "f4")}, folder / "model.safetensors"
    )
    (folder / "sae").mkdir()
    weights = {"W_enc": table[:20].T.copy(), "b_enc": table[0, :1].repeat(20), "b_dec": table[1], "W_dec": table[:20]}
    save_file(weights, folder / "sae/sae_weights.safetensors")
    # Text with other characters than ASCII: without a given encoding, Windows does not read it as UTF-8.
    (folder / "sae/cfg.json").write_text(
        json.dumps({"architecture": "standard", "name": "Ünïcode 模型"}, ensure_ascii=False), "utf-8"
    )
    return folder


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """Three stores with an index, and the values of one."""
    root, owner = tmp_path_factory.mktemp("stores"), kit.Store(1 << 22)
    dims = {"heads": HEADS, "kv_heads": HEADS, "head_dim": WIDTH // HEADS}
    attrs = {"model": str(model), "architecture": "Qwen3ForCausalLM", "dtype": "bfloat16", "num_layers": LAYERS}
    attrs |= {"dims": dims, "versions": {"vllm": "0.32.0"}, "experts": {"count": EXPERTS, "layers": [0, 1, 2]}}
    rng = np.random.default_rng(0)
    for number, length in enumerate((300, 40, 30)):
        values = {spec.name: kit.random_bits(spec, length) for spec in SPECS}
        values["topk_ids"] = rng.permuted(np.tile(np.arange(EXPERTS, dtype="u4"), (LAYERS, length, 1)), axis=-1)[
            ..., :2
        ]
        path, options = root / f"{'abc'[number]}.zarr", {"key": str(number), "chunk": 32, "segment": 64}
        owner.write(path, SPECS, length, values=values, attrs=attrs, **options)
        if number == 0:
            rows = kit.to_float(values["resid_pre"], "bfloat16")
            np.savez(root / "expected.npz", resid_pre=rows, token_ids=np.arange(length) % 97)
    assert owner.shutdown()
    return root


def test_everything_is_read_without_what_a_system_lacks(stores: Path, model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-X", "warn_default_encoding", "-m", "tests.elsewhere", stores, model, tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=kit.PATIENCE)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    systems = re.findall(r"^all of it was read as on (\w+)$", done.stdout, re.M)
    assert systems == ["windows", "macos"]
    refused = re.findall(r"dmi: (\w+) needs Linux \(no .*os\.memfd_create.*\); here stores can be read", done.stderr)
    assert refused == ["repair", "prune", "run", "serve", "demo"] * 2


def test_files_are_read_by_position_where_the_system_has_no_call_for_it(tmp_path: Path) -> None:
    path, data = tmp_path / "file", bytes(range(256))
    path.write_bytes(data)
    with store_files.LocalFile(str(path)) as file:
        assert store_files._seek_and_read(file._fd, 10, 250) == data[250:]
        assert store_files._seek_and_read(file._fd, 10, 0) == data[:10]
        parts = [memoryview(bytearray(4)), memoryview(bytearray(8))]
        assert store_files._read_and_copy(file._fd, parts, 100) == 12
        assert b"".join(parts) == data[100:112]
        assert store_files._read_and_copy(file._fd, parts, 250) == 6
        assert bytes(parts[0]) + bytes(parts[1])[:2] == data[250:]


def test_the_command_line_says_what_needs_linux(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(linux.sys, "platform", "darwin")
    for command in cli._ON_LINUX:
        assert cli.main([command, str(tmp_path)]) == 2
        assert capsys.readouterr().err == (
            f"dmi: {command} needs Linux; here stores can be read, exported, plotted and viewed\n"
        )


@pytest.mark.parametrize("path", ["/q/c/0", "../q/c/0", "q/../../c", "q\\..\\..\\c", "C:q", "C:/q"])
def test_paths_outside_a_store_are_recognised_on_every_system(path: str) -> None:
    assert leaves_store(path) and not leaves_store("q/c/0/0/0")


def test_a_windows_drive_is_not_a_url() -> None:
    assert not is_url("C:/captures") and not is_url("C:\\captures") and is_url("s3://bucket")
