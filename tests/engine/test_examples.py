# SPDX-License-Identifier: Apache-2.0
"""Notebooks as a user runs them, each with its own engine, and baselines that lose."""

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


@pytest.mark.soak
def test_the_autoencoder_and_the_draft_head_learn_from_their_own_serving_run(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tests/unit/test_notebooks.py` has what must fail."""
    for name, captures, best, words in (
        ("sae", 150, "SAE", r"^(.+?) +explains (-?\d\.\d+)$"),
        ("drafter_data", 200, "draft head", r"^(.+?) +guesses (\d\.\d+) of the tokens$"),
    ):
        directory = tmp_path_factory.mktemp("n")
        text, _ = notebookkit.execute(notebookkit.read(name), monkeypatch, TMPDIR=str(directory))
        (stores,) = directory.glob("*/captures")
        assert len(open_captures(stores)) == captures, text
        scores = {name: float(score) for name, score in re.findall(words, text, re.M)}
        assert len(scores) == 4 and max(scores, key=scores.__getitem__) == best, text
