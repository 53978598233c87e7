# SPDX-License-Identifier: Apache-2.0
"""docs/ANALYSIS.md: its snippets run in order, and its table of pictures equals that of `dmi plot`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from safetensors.numpy import load_file, save_file

from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.cli.main import main
from dmi_connector.cli.plots import KINDS
from dmi_connector.cli.tiny_models import make_model
from tests import analysiskit

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/ANALYSIS.md").read_text()


def snippets(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with captures of three questions and three statements, and an autoencoder."""
    root = tmp_path_factory.mktemp("made")
    oracle = Oracle(make_model("qwen3", root.with_name("model")))
    (root / "captures").mkdir()
    for i in range(6):
        ids = np.random.default_rng(i).integers(5, 512, 16).tolist()
        key = "question" if i < 3 else "statement"
        analysiskit.write_store(root / f"captures/{i}.zarr", oracle, ids, 8, key=key)
    write_sae(root / "sae", oracle.config.hidden_size)
    return root


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of this directory, as the current directory."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(made, tmp_path, dirs_exist_ok=True))


def write_sae(folder: Path, width: int) -> None:
    """Write a random autoencoder in SAELens's format."""
    rng = np.random.default_rng(0)
    tensors = {"W_enc": rng.standard_normal((width, 40)), "b_enc": rng.standard_normal(40), "b_dec": np.ones(width)}
    folder.mkdir()
    save_file({name: value.astype(np.float32) for name, value in tensors.items()}, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text('{"architecture": "standard"}')


def test_the_snippets_run_in_order_and_give_what_their_comments_say(folder: Path) -> None:
    given: dict[str, Any] = {}
    for snippet in snippets("python"):
        exec(compile(snippet, "docs/ANALYSIS.md", "exec"), given)
    drawn = re.findall(r'"(\w+\.(?:png|svg))"', "".join(snippets("python")))
    assert len(drawn) == 10
    for name in drawn:
        assert imread(name).std() > 0.01 if name.endswith("png") else "<svg" in Path(name).read_text(), name
    logits = given["end"].logits(given["cap"].numpy("resid_final"))
    np.testing.assert_allclose(given["shares"].sum(0)[-1], logits[-1].max(), rtol=1e-4)
    np.testing.assert_allclose(given["pair"].sum(0), logits[:, 11] - logits[:, 12], rtol=1e-3, atol=1e-5)
    settled = given["settled"]
    best = given["lens"].ids[:, :, 0]
    assert all(
        best[settled[i], i] == best[-1, i] and not (best[: settled[i], i] == best[-1, i]).any() for i in range(16)
    )
    np.testing.assert_allclose(given["previous"][0], np.mean([given["weights"][0, i, i - 1] for i in range(1, 16)]))
    np.testing.assert_array_equal(given["seventh"], given["cap"].numpy("mlp_post", 1)[:, 7])
    np.testing.assert_allclose(given["unsure"][7:], given["sampled"].entropy, rtol=1e-5)
    tensors, found = load_file("sae/sae_weights.safetensors"), given["cap"].numpy("resid_pre", 1)
    exact = np.maximum((found - 1) @ tensors["W_enc"] + tensors["b_enc"], 0)
    np.testing.assert_allclose(given["latents"], exact, atol=1e-4)
    assert given["strongest"][0] == exact[-1].argmax()
    active = [(given["sae"].encode(capture.numpy("resid_pre", 1)) > 0) for capture in given["captures"]]
    np.testing.assert_allclose(given["share"], np.concatenate(active).mean(0))
    assert given["sketched"].shape == (3, 8, given["cap"].shape("resid_pre")[-1]) and 0 < given["worst"] <= 1 / 9
    assert given["both"].tokens == 32 and given["own"].count == 16
    assert given["doubtful"][0] == given["every"].entropy.argmax()
    assert [len(scores) for scores in given["train"].scores] == [2, 2] and len(given["held_out"]) == 16


def test_the_commands_run(folder: Path) -> None:
    commands = [line for block in snippets("sh") for line in block.splitlines()]
    assert len(commands) == 4
    for line in commands:
        program, *arguments = shlex.split(line.replace("STORE", "captures/0.zarr"))
        assert program == "dmi" and main(arguments) == 0, line
        assert Path(arguments[arguments.index("-o") + 1]).is_file()


def test_the_table_of_pictures_is_that_of_the_command() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (many|1)[^|]* \| ([^|]*)\| ([^|]*)\|$", PAGE, re.MULTILINE)
    table = {
        name: (many == "many", *(set(re.findall(r"--(\w+)", cell)) for cell in cells)) for name, many, *cells in rows
    }
    assert table == {name: (kind.many, set(kind.needs), set(kind.takes)) for name, kind in KINDS.items()}


def test_the_snippets_need_no_torch_no_vllm_no_transformers(folder: Path) -> None:
    """Pictures are made and not written, because the other test writes them."""
    lines = ["import sys", "sys.modules |= dict.fromkeys(['torch', 'vllm', 'transformers'])"]
    lines += ["from matplotlib.figure import Figure", "Figure.savefig = lambda self, path, **_: print(path)"]
    (folder / "page.py").write_text("\n".join([*lines, *snippets("python")]))
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "page.py"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^\S+\.(?:png|svg)$", done.stdout, re.MULTILINE)) == 10, done.stdout
