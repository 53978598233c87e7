# SPDX-License-Identifier: Apache-2.0
"""The probe notebook as a user runs it: its own engine, 200 captures, and baselines that lose."""

from __future__ import annotations

import re

import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell

from dmi_connector import open_captures
from tests import notebookkit


def test_the_probe_beats_its_baselines_and_shuffled_keys_are_found(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path_factory.mktemp("p")  # a short name: vLLM puts sockets there, whose paths have 107 characters
    text, pictures = notebookkit.execute(notebookkit.read("linear_probe"), monkeypatch, TMPDIR=str(directory))
    (stores,) = directory.glob("*/captures")
    assert len(open_captures(stores)) == 200 and "200 captures, 100 of them of 'answer'" in text, text
    right, embedding, shuffled = map(float, re.findall(r"(\d\.\d\d) right; embedding (\S+), shuffled (\S+)", text)[0])
    assert right > 0.75 and embedding < 0.65 and shuffled < 0.65 and pictures == 1, text
    assert re.search(r"separation \d\.\d\d", text), text

    notebook = notebookkit.read("linear_probe")
    place = next(i for i, cell in enumerate(notebook.cells) if "def fit" in cell.source)
    notebook.cells.insert(place, new_code_cell("labels = np.random.default_rng(1).permutation(labels)"))
    with pytest.raises(CellExecutionError, match="AssertionError"):
        notebookkit.execute(notebook, monkeypatch, DMI_CAPTURES=str(stores))
