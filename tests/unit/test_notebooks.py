# SPDX-License-Identifier: Apache-2.0
"""Notebooks of examples/ without an engine. They run on stores with the activations of transformers.

Kernels are forked (programs.py). Those of tests/engine/test_demo.py start as for a user. In `make test`, two
of them run here and two in tests/engine/test_demo.py; `make soak` runs all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

pytest.importorskip("vllm")

from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.cli.tiny_models import make_model, make_tokenizer
from dmi_connector.cli.tiny_training import texts, train
from tests import analysiskit, notebookkit, oraclestore
from tests.notebookkit import Mistake

TOKENS = np.random.default_rng(0).integers(10, 500, 40).tolist()


def run(name: str, store: Path, monkeypatch: pytest.MonkeyPatch, *mistakes: Mistake) -> tuple[str, int]:
    """Run a notebook on a store. Returns (its printed text, number of pictures)."""
    return notebookkit.execute(notebookkit.read(name), monkeypatch, mistakes, DMI_STORE=str(store))


def test_attention_is_that_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle(make_model("qwen3", tmp_path / "model"))
    store = oraclestore.write(oracle, tmp_path / "a.zarr", TOKENS, hooks=("q_rot", "k_rot")).path
    mistake = Mistake("attention_pattern(cap", "weights = weights[:, ::-1]")
    text, pictures = run("attention", store, monkeypatch, mistake)
    assert float(re.findall(r"from transformers: (\S+)", text)[0]) < 1e-5 and pictures == 2, text
    assert re.search(r"head \d of layer \d looks most at the token before: 0\.\d\d", text), text


@pytest.mark.soak
def test_routing_follows_from_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle(make_model("qwen3_moe", tmp_path / "model"))
    store = oraclestore.write(oracle, tmp_path / "a.zarr", TOKENS).path
    text, pictures = run("routing", store, monkeypatch, Mistake("experts = cap.numpy", "chosen = chosen[::-1]"))
    assert "choices that follow from the logits: 100.0%" in text and pictures == 2, text
    assert re.search(r"\(40, \d+, \d+\) uint8", text), text


@pytest.mark.soak
@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_the_first_look_supports_norms_and_logits_of_several_families(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The families have gains of 1 + weight, and scaled or capped logits."""
    oracle = Oracle(make_model(family, tmp_path / "model"))
    store = analysiskit.write_store(tmp_path / "a.zarr", oracle, TOKENS, 20)
    wrong = "guesses = 1.2 * guesses; cap.attrs['dtype'] = 'bfloat16'"
    text, pictures = run("first_look", store, monkeypatch, Mistake("end = Unembedding.of", wrong))
    assert float(re.findall(r"from the captured logits: (\S+)", text)[0]) < 1e-3 and pictures == 2, text


# ---- with a model that is trained for some seconds ------------------------------------------------------------------


def many(
    name: str, stores: Path, monkeypatch: pytest.MonkeyPatch, shorter: tuple[str, str], *mistakes: Mistake
) -> tuple[str, int]:
    """Run a notebook on several stores, with fewer steps. Returns (its printed text, number of pictures).

    tests/engine/test_examples.py runs all steps.
    """
    notebook = notebookkit.shorter(notebookkit.read(name), *shorter)
    return notebookkit.execute(notebook, monkeypatch, mistakes, DMI_CAPTURES=str(stores))


@pytest.fixture(autouse=True)
def forked_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    notebookkit.fork_kernels(monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def gradients() -> Iterator[None]:
    """Enable gradients, which an engine in this process has disabled."""
    with torch.enable_grad():
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    model = make_model("qwen3", tmp_path_factory.mktemp("trained"), num_hidden_layers=2, intermediate_size=256)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the notebooks; with more threads, other load makes training many times slower
    losses = train(model, texts()[0], steps=300, batch=4)
    torch.set_num_threads(threads)
    assert np.mean(losses[-10:]) < 0.5 * losses[0], "it learnt nothing"
    return Oracle(model)


def prompts(count: int, tokens: int) -> torch.Tensor:
    """Prompts from the held-out text, int64 [count, tokens]."""
    ids = make_tokenizer()(texts()[1], verbose=False)["input_ids"]
    return torch.tensor(ids[: count * tokens]).reshape(count, tokens)


@pytest.mark.soak
def test_the_autoencoder_explains_more_than_its_baselines(
    trained: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = oraclestore.write_many(trained, tmp_path, prompts(60, 128).tolist(), ["mlp_post"])
    # the neurons in another order than in training
    mixed = "test = test[:, np.random.default_rng(1).permutation(width)]"
    mistake = Mistake("class SAE", mixed, r"AssertionError\S*: every baseline")
    text, pictures = many("sae", stores, monkeypatch, ("STEPS = 512, 8, 500", "STEPS = 512, 8, 160"), mistake)
    explains = dict(re.findall(r"^(.+?) +explains (-?\d\.\d+)$", text, re.M))
    assert len(explains) == 4 and float(explains.pop("SAE")) > 0.8, text
    assert all(float(value) < 0.9 for value in explains.values()) and pictures == 2, text
    assert re.search(r"dead latents: \d+ of 512", text) and len(re.findall(r"^latent +\d+: ", text, re.M)) == 10, text


@pytest.mark.soak
def test_the_draft_head_learns_from_files_that_are_the_captures(
    trained: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 0.7, "top_k": 0, "min_new_tokens": 48, "max_new_tokens": 48}
    with torch.no_grad():
        answers = trained.model.generate(prompts(120, 48), **options)
    stores = oraclestore.write_many(trained, tmp_path, answers.tolist(), ["resid_pre", "resid_final", "final_ln"])
    value = "path = next((folder / 'specforge').glob('rows_*/data_3.ckpt')); one = torch.load(path);"
    value += " one['aux_hidden_state'][0, 5, 7] += 1e-3; torch.save(one, path)"
    others = "for one in features.values(): one['aux_hidden_state'] = one['aux_hidden_state'].roll(40, 1)"
    mistakes = (
        Mistake("def mean_surprisal", others, r"AssertionError\S*: the draft head", ("epochs=10", "epochs=3")),
        Mistake('export("specforge")', value),
    )
    text, pictures = many("drafter_data", stores, monkeypatch, ("epochs=15", "epochs=6"), *mistakes)
    assert "120 requests agree with their captures" in text and pictures == 1, text
    right = {name: float(value) for name, value in re.findall(r"^(.+?) +guesses (\d\.\d+)", text, re.M)}
    assert right["most frequent"] < right["bigram"] < right["draft head"], text


@pytest.mark.soak
def test_the_drafter_is_accepted_more_often_after_some_steps(
    trained: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = oraclestore.write_many(trained, tmp_path, prompts(60, 96).tolist(), ["resid_pre", "resid_final"])
    plain = "Unembedding.logits = lambda end, rows: rows @ end.weights_of(slice(None)).T"  # without the final norm
    mistake = Mistake("def serve", plain)
    text, pictures = many("train_drafter", stores, monkeypatch, ("100, 256, 1", "60, 256, 1"), mistake)
    ((begin, end),) = re.findall(r"loss (\S+) at first, (\S+) at the end", text)
    ((before, after),) = re.findall(r"acceptance (\S+) before, (\S+) after 60 steps", text)
    assert float(end) < 0.7 * float(begin) and float(after) > float(before) + 0.05 and pictures == 1, text
    ((before, after),) = re.findall(r"likeliest token guessed, .*: (\S+) before, (\S+) after 240 steps", text)
    assert float(after) > float(before) + 0.2 and "vLLM accepts" not in text, "there is no engine"


def test_two_checkpoints_differ_from_the_changed_matrix_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = ["resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_final"]
    model = make_model("qwen3", tmp_path / "model", num_hidden_layers=3)
    for name in ("before", "after"):
        oraclestore.write_many(Oracle(model), tmp_path / f"captures/{name}", [TOKENS, TOKENS[::-1]], hooks)
        weights = load_file(model / "model.safetensors")
        weights["model.layers.2.mlp.down_proj.weight"] *= 1.05
        save_file(weights, model / "model.safetensors", {"format": "pt"})
    notebook = notebookkit.read("two_checkpoints")
    mistake = Mistake("before, after = open_captures", "after = before", "AttributeError")
    captures = str(tmp_path / "captures")
    text, pictures = notebookkit.execute(notebook, monkeypatch, [mistake], DMI_CAPTURES=captures)
    assert "40 rows compared, the first hook that differs is mlp_out@2, position 0" in text and pictures == 1, text
    assert "hooks agree, 2 differ, from mlp_out@2 on" in text, text
