# SPDX-License-Identifier: Apache-2.0
"""Notebooks that start engines, and baselines that their methods must beat.

`make soak` runs the notebooks as a user does. Otherwise kernels and engines are forked (programs.py).
"""

from __future__ import annotations

import re

import pytest

from dmi_connector import open_captures
from tests import notebookkit
from tests.notebookkit import Mistake


@pytest.mark.soak
def test_the_probe_beats_its_baselines_and_keeps_what_it_finds(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last mistake gives the existing captures random labels."""
    # short, because vLLM creates sockets there, and their paths are limited to 107 characters
    directory = tmp_path_factory.mktemp("p")
    here, labels = 'os.environ["DMI_CAPTURES"] = str(folder / "captures")', 'CLASSES.index(cap.attrs["key"]) * 2 - 1'
    mistakes = (
        Mistake("answers = serve", "everything = everything[::-1]"),
        Mistake("response = np.array", "offline = 1 - offline"),
        Mistake("CLASSES = (", f"random.seed(1); {here}", quick=(labels, "random.choice([-1, 1])")),
    )
    notebookkit.fork_kernels(monkeypatch)
    text, pictures = notebookkit.execute(notebookkit.read("probes"), monkeypatch, mistakes, TMPDIR=str(directory))
    (stores,) = directory.glob("*/captures")
    assert len(open_captures(stores)) == 200 and "200 captures, 100 of them of 'answer'" in text, text
    right, embedding, shuffled = map(float, re.findall(r"(\d\.\d\d) right; embedding (\S+), shuffled (\S+)", text)[0])
    assert right > 0.75 and embedding < 0.65 and shuffled < 0.65 and pictures == 2, text
    assert float(re.findall(r"100 requests: the scores differ by (\S+) at most", text)[0]) < 1e-5, text
    kept, as_expected = map(int, re.findall(r"kept (\d+) of 100 requests, (\d+) as the scores say", text)[0])
    wanted, others = map(int, re.findall(r"(\d+) of 50 with 'answer', (\d+) of the others", text)[0])
    assert kept == wanted + others and as_expected == 100 and wanted > 30 > 20 > others, text
    assert len(open_captures(stores.parent / "served", key="found")) == kept, text


@pytest.mark.soak
def test_the_autoencoder_and_the_draft_head_learn_from_their_own_serving_run(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tests/unit/test_notebooks.py` tests that wrong code is detected."""
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
def test_vllm_accepts_more_guesses_of_a_trained_head(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM must accept as many guesses as the same head in PyTorch does on the run's captures. Another head gives
    another number.
    """
    directory = tmp_path_factory.mktemp("d")
    # vLLM gets the trained head both times
    other = "saved = save_head; save_head = lambda one, folder: saved(after, folder)"
    mistake = Mistake("def accepted_by_vllm", other, r"AssertionError\S*: the head in vLLM is another one")
    text, _ = notebookkit.execute(notebookkit.read("train_drafter"), monkeypatch, [mistake], TMPDIR=str(directory))
    found = re.findall(r"vLLM accepts (\d+) of (\d+) guesses, \S+; from the captures (\d+) of (\d+)", text)
    before, after = [[int(number) for number in row] for row in found]
    assert before[:2] == before[2:] and after[:2] == after[2:], text
    assert after[0] / after[1] > before[0] / before[1] + 0.5, text
