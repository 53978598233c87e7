# SPDX-License-Identifier: Apache-2.0
"""Notebooks of examples/ that need no engine: they run on stores of what transformers computes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell

from dmi_connector.analysis.transformers_oracle import Oracle
from dmi_connector.cli.tiny_models import make_model
from tests import notebookkit, oraclestore

TOKENS = np.random.default_rng(0).integers(10, 500, 40).tolist()


def run(name: str, store: Path, monkeypatch: pytest.MonkeyPatch, after: str = "", wrong: str = "") -> tuple[str, int]:
    """What a notebook prints, and its pictures. wrong: code behind the cell that holds `after`."""
    notebook = notebookkit.read(name)
    if wrong:
        place = next(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code" and after in cell.source)
        notebook.cells.insert(place + 1, new_code_cell(wrong))
    return notebookkit.execute(notebook, monkeypatch, DMI_STORE=str(store))


def test_attention_is_that_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle(make_model("qwen3", tmp_path / "model"))
    store = oraclestore.write(oracle, tmp_path / "a.zarr", TOKENS, hooks=("q_rot", "k_rot")).path
    text, pictures = run("attention", store, monkeypatch)
    assert float(re.findall(r"from transformers: (\S+)", text)[0]) < 1e-5 and pictures == 2, text
    assert re.search(r"head \d of layer \d looks most at the token before: 0\.\d\d", text), text
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run("attention", store, monkeypatch, "attention_pattern(cap", "weights = weights[:, ::-1]")


def test_routing_follows_from_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle(make_model("qwen3_moe", tmp_path / "model"))
    store = oraclestore.write(oracle, tmp_path / "a.zarr", TOKENS).path
    text, pictures = run("routing", store, monkeypatch)
    assert "choices that follow from the logits: 100.0%" in text and pictures == 2, text
    assert re.search(r"\(40, \d+, \d+\) uint8", text), text
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run("routing", store, monkeypatch, "experts = cap.numpy", "chosen = chosen[::-1]")
