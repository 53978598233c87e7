# SPDX-License-Identifier: Apache-2.0
"""Notebooks as a user runs them, each with its own engine, and baselines that lose."""

from __future__ import annotations

import re

import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell

from dmi_connector import open_captures
from tests import notebookkit
from tests.notebookkit import Mistake


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


@pytest.mark.soak
def test_vllm_accepts_more_guesses_of_a_head_that_was_trained(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the same head in PyTorch on the captures of the run, which does not hold of another head."""
    directory = tmp_path_factory.mktemp("d")
    other = "saved = save_head; save_head = lambda one, folder: saved(after, folder)"  # vLLM has the trained one twice
    mistake = Mistake("def accepted_by_vllm", other, r"AssertionError\S*: the head in vLLM is another one")
    text, _ = notebookkit.execute(notebookkit.read("train_drafter"), monkeypatch, [mistake], TMPDIR=str(directory))
    found = re.findall(r"vLLM accepts (\d+) of (\d+) guesses, \S+; from the captures (\d+) of (\d+)", text)
    before, after = [[int(number) for number in row] for row in found]
    assert before[:2] == before[2:] and after[:2] == after[2:], text
    assert after[0] / after[1] > before[0] / before[1] + 0.5, text
