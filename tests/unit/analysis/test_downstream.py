# SPDX-License-Identifier: Apache-2.0
"""`dmi fidelity` with labels, with a model, and with `--bar`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dmi_connector.analysis.autoencoder import Autoencoder
from dmi_connector.analysis.downstream import concepts_of
from dmi_connector.analysis.fidelity import below, fidelity, markdown
from dmi_connector.analysis.unembedding import Unembedding
from dmi_connector.captures.capture import open_capture
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce.tensors import FloatTensors
from tests import storekit as kit

WIDTH, TOKENS, STORES = 48, 60, 8
HOOKS = [ArraySpec("resid_mid", "float32", (0, 1), WIDTH), ArraySpec("mlp_post", "float32", (0,), WIDTH)]
LOUD = 5
"""The dimension with values far larger than those of the others."""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Stores whose rows have directions for their token and for the label of the store, its number modulo 2."""
    folder, owner, rng = tmp_path_factory.mktemp("stores"), kit.Store(4 << 20), np.random.default_rng(0)
    of_token, of_label = rng.normal(size=(5, WIDTH)), rng.normal(size=WIDTH)
    for number in range(STORES):
        ids = rng.integers(0, 5, TOKENS).astype(np.int32)
        rows = rng.normal(size=(2, TOKENS, WIDTH)) + 3 * of_token[ids] + 3 * (number % 2) * of_label
        rows[..., LOUD] *= 300
        values = {"resid_mid": kit.bits(rows.astype("f4")), "mlp_post": kit.bits(rows[:1].astype("f4"))}
        owner.write(folder / f"{number}.zarr", HOOKS, TOKENS, values=values, ids=ids)
    assert owner.shutdown(kit.PATIENCE)
    return [folder / f"{number}.zarr" for number in range(STORES)]


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("labels") / "labels.csv"
    path.write_text("store,label\n" + "\n".join(f"{number}.zarr,{number % 2}" for number in range(STORES)))
    return path


def rows_of(store: Path) -> np.ndarray:
    with open_capture(store, 0) as capture:
        return capture.numpy("resid_mid", 0)


def measured(stores: list[Path], spec: str, hook: str = "mlp_post", **more: object) -> dict[str, float]:
    [one] = fidelity(stores, [spec], hook, [0], **more)  # type: ignore[arg-type]
    return one.measures


def test_concepts_are_those_of_the_most_frequent_tokens_or_of_labels(stores: list[Path]) -> None:
    found = concepts_of(stores, "tokens")
    assert found.targets.shape == (STORES * TOKENS, 5) and (found.targets.sum(1) == 1).all()
    again = concepts_of(stores, "tokens")
    assert np.array_equal(found.fit, again.fit) and np.array_equal(found.test, again.test), (
        "each call must choose the same halves"
    )
    assert len(np.intersect1d(found.fit, found.test)) == 0 and len(found.fit) + len(found.test) == STORES * TOKENS
    named = concepts_of(stores, {("store", f"{n}.zarr"): bool(n % 2) for n in range(STORES - 1)})
    np.testing.assert_array_equal(
        named.targets[:, 0], np.repeat(np.arange(STORES) % 2 == 1, TOKENS) & (np.arange(STORES * TOKENS) < 7 * TOKENS)
    )
    used = [{*(part // TOKENS).tolist()} for part in (named.fit, named.test)]
    assert not used[0] & used[1] and used[0] | used[1] == set(range(7)), (
        "halves must have whole captures, and one capture has no label"
    )
    with pytest.raises(ValueError, match="--labels: no label has 8 rows with it and 8 rows without it in both halves"):
        concepts_of(stores, {("store", "0.zarr"): True, ("store", "1.zarr"): False})


@pytest.mark.parametrize("by", ["tokens", "labels"])
def test_scores_of_concepts_are_kept_by_accurate_reductions(stores: list[Path], by: str) -> None:
    chosen = "tokens" if by == "tokens" else {("store", f"{n}.zarr"): bool(n % 2) for n in range(STORES)}
    assert measured(stores, "round(23)", labels=chosen)["concepts"] > 0.9999
    assert measured(stores, "int8(16)", labels=chosen)["concepts"] > 0.99
    whole, one = (measured(stores, f"topk({k},exact)", labels=chosen)["concepts"] for k in (48, 1))
    assert whole > 0.9999 > 0.9 > one, "the loud dimension alone must not predict the labels"
    assert "concepts" not in measured(stores, "int8")


def test_the_logit_lens_of_decoded_rows_is_compared(stores: list[Path]) -> None:
    """The expected values are computed with explicit sums. Projections and other hooks have no lens."""
    weight = np.random.default_rng(1).normal(size=(90, WIDTH)).astype(np.float32)
    model = Unembedding(weight=weight, gain=np.ones(WIDTH, "f4"), bias=np.zeros(WIDTH, "f4"), eps=1e-6, centred=False)
    same = measured(stores, "round(23)", "resid_mid", unembedding=model)
    assert same["lens_top"] == 1 and abs(same["lens_kl"]) < 1e-6
    found = measured(stores, "int8", "resid_mid", unembedding=model)
    rows = np.concatenate([rows_of(store) for store in stores])
    scale = np.abs(rows).max(1, keepdims=True) / 127
    decoded = np.round(rows / scale) * scale

    def probabilities(x: np.ndarray) -> np.ndarray:
        logits = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-6) @ weight.T
        powers = np.exp(logits - logits.max(1, keepdims=True))
        return powers / powers.sum(1, keepdims=True)

    full, reduced = probabilities(rows.astype(float)), probabilities(decoded.astype(float))
    assert found["lens_top"] == pytest.approx((full.argmax(1) == reduced.argmax(1)).mean(), abs=0.01)
    assert found["lens_kl"] == pytest.approx((full * np.log(full / reduced)).sum(1).mean(), rel=0.01)
    assert "lens_kl" not in measured(stores, "rp(16)", "resid_mid", unembedding=model)
    assert "lens_kl" not in measured(stores, "int8", unembedding=model)


@pytest.fixture(scope="module")
def sae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An autoencoder of resid_mid in layer 1. It has two latents per dimension of a row, one for each sign."""
    folder = tmp_path_factory.mktemp("sae")
    both = np.concatenate([np.eye(WIDTH), -np.eye(WIDTH)]).astype("f4")
    bias = np.full(2 * WIDTH, -0.5, "f4")
    save_file(
        {"W_enc": np.ascontiguousarray(both.T), "b_enc": bias, "W_dec": both, "b_dec": np.zeros(WIDTH, "f4")},
        folder / "s.safetensors",
    )
    (folder / "cfg.json").write_text(json.dumps({"architecture": "standard"}))
    return folder


def test_latents_and_the_reconstruction_of_restored_rows_are_compared(stores: list[Path], sae: Path) -> None:
    """The expected values are explicit sums. Other layers, other hooks and projections have no such measure."""
    encoder = Autoencoder.load(f"{sae}, hook=resid_mid, layer=1")
    rows = np.concatenate([open_capture(store, 0).numpy("resid_mid", 1) for store in stores])
    scale = np.abs(rows).max(1, keepdims=True) / 127
    restored = np.round(rows / scale) * scale

    def shrunk(x: np.ndarray) -> np.ndarray:
        return np.sign(x) * np.maximum(np.abs(x) - 0.5, 0)

    variance = ((rows - rows.mean(0)) ** 2).sum()
    errors = [((rows - shrunk(x)) ** 2).sum() / variance for x in (rows, restored)]
    active, after = np.abs(rows) > 0.5, (np.abs(restored) > 0.5) & (np.sign(rows) == np.sign(restored))
    found = fidelity(stores, ["int8", "round(23)", "rp(16)"], "resid_mid", autoencoder=encoder)
    of = {(one.reduction, one.layer): one.measures for one in found}
    assert of["int8", 1]["latents"] == pytest.approx((active & after).sum(1).mean() / active.sum(1).mean(), abs=0.02)
    assert of["int8", 1]["latents"] < 0.9 and of["int8", 1]["sae_error"] == pytest.approx(
        errors[1] - errors[0], abs=2e-5
    )
    assert of["round(23)", 1]["latents"] == 1 and of["round(23)", 1]["sae_error"] == 0
    assert "latents" not in of["int8", 0] and "latents" not in of["rp(16)", 1]
    line = next(line for line in markdown(found).splitlines() if "`int8`" in line)
    assert f"{of['int8', 1]['latents']:.5f}" in line, (
        "the table must show the layer that has the measure, although the first layer has none"
    )


def test_an_autoencoder_without_a_decoder_has_no_reconstruction(sae: Path, tmp_path: Path) -> None:
    for name, facts in (("transcoder", {"transcode": True}), ("scaled", {"rescale_acts_by_decoder_norm": True})):
        (tmp_path / name).mkdir()
        tensors = {n: FloatTensors(sae / "s.safetensors").get(n) for n in ("W_enc", "b_enc", "W_dec", "b_dec")}
        tensors["W_dec"] = 3 * tensors["W_dec"]
        save_file(tensors, tmp_path / name / "s.safetensors")
        (tmp_path / name / "cfg.json").write_text(json.dumps({"architecture": "standard", **facts}))
    assert Autoencoder.load(f"{tmp_path / 'transcoder'}, hook=ln2, layer=0").decoder is None
    scaled = Autoencoder.load(f"{tmp_path / 'scaled'}, hook=resid_mid, layer=0")
    rows = np.random.default_rng(0).normal(size=(50, WIDTH)).astype("f4")
    weight, bias = scaled.decoder
    # Latents are multiplied by the norms of the decoder's rows, which are 3 here, and decoded with rows of norm 1.
    np.testing.assert_allclose(np.linalg.norm(weight, axis=1), 1, rtol=1e-6)
    decoded = scaled.encoder.encode(rows) @ weight + bias
    np.testing.assert_allclose(decoded, 3 * np.sign(rows) * np.maximum(np.abs(rows) - 0.5, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("hook=resid_post, layer=0", ("resid_pre", 1)),
        ("hook=resid_post, layer=2", ("resid_final", None)),
        ("hook=mlp_in, layer=2", ("ln2", 2)),
    ],
)
def test_an_autoencoder_is_of_the_rows_that_hold_its_tensor(
    sae: Path, text: str, place: tuple[str, int | None]
) -> None:
    assert Autoencoder.load(f"{sae}, {text}").place(3) == place


def test_the_mean_magnitude_of_neurons_is_ranked(stores: list[Path]) -> None:
    """The expected ranks are counted here. One loud dimension makes the steps of all others coarse."""
    rows = np.concatenate([rows_of(store) for store in stores])
    scale = np.abs(rows).max(1, keepdims=True) / 127
    means = [np.abs(x).mean(0) for x in (rows, np.round(rows / scale) * scale)]
    ranks = [(mean[:, None] > mean).sum(1) for mean in means]
    want = np.corrcoef(*ranks)[0, 1]
    assert want < 0.995 and measured(stores, "int8", "resid_mid")["importance"] == pytest.approx(want, abs=1e-4)
    assert measured(stores, "round(23)")["importance"] == 1


def test_measures_below_a_bar_are_named() -> None:
    measures = {"pairs": 0.95, "probes": 0.9499, "error": 0.5, "lens_kl": 3.0, "importance": math.nan}
    assert below(measures, 0.95) == ["probes", "importance"]


def test_a_bar_has_an_exit_status_and_a_column(
    stores: list[Path], labels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["fidelity", *map(str, stores), "--hooks", "mlp_post", "--labels", str(labels), "--bar", "0.95"]
    assert main([*command, "--reduce", "round(7)"]) == 0
    assert "| bar 0.95 |" in (out := capsys.readouterr().out) and "| pass |" in out and "1 of 1 results" in out
    both = ["--reduce", "round(7)", "--reduce", "topk(1,exact)"]
    assert main([*command, *both]) == 1
    out = capsys.readouterr().out
    assert "| below: importance, concepts |" in out and "1 of 2 results (one per layer and reduction) reach 0.95" in out
    assert main([*command, *both, "--json"]) == 1
    assert [one["below"] for one in json.loads(capsys.readouterr().out)] == [[], ["importance", "concepts"]]
    assert main([*command[:-2], *both]) == 0, "without --bar, the command must not fail"
    assert "bar" not in capsys.readouterr().out
    found = fidelity(stores, ["topk(1,exact)"], "mlp_post")
    assert "below" not in markdown(found) and "below: importance" in markdown(found, 0.95)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bar", "0"], "--bar 0.0 is not valid; give a number above 0, at most 1, as in --bar 0.95"),
        (["--bar", "95"], "--bar 95.0 is not valid"),
        (["--bar", "nan"], "--bar nan is not valid"),
        (
            ["--labels", "nowhere.csv"],
            "--labels nowhere.csv cannot be read (No such file or directory); give a CSV file",
        ),
        (["--model", "nowhere"], "model: nowhere has no readable config.json"),
        (
            ["--sae", "nowhere"],
            "--sae: nowhere cannot be read (No such file or directory); give the file or directory of",
        ),
        (["--sae", "SAE"], "--sae: SAE does not say which hook it encodes; add hook=NAME, layer=NUMBER"),
        (["--sae", "SAE, hook=resid_mid"], "--sae: the autoencoder is of resid_mid and no layer; add layer=NUMBER"),
        (
            ["--sae", "SAE, hook=resid_pre, layer=1"],
            "the autoencoder encodes resid_pre of layer 1, which is not measured; give stores",
        ),
        (
            ["--sae", "SAE, hook=resid_mid, layer=1", "--layer", "0"],
            "the autoencoder encodes resid_mid of layer 1, which is not",
        ),
    ],
)
def test_bad_values_are_refused(
    stores: list[Path], sae: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, message = [word.replace("SAE", str(sae)) for word in words], message.replace("SAE", str(sae))
    assert main(["fidelity", str(stores[0]), "--reduce", "int8", *words]) == 2
    assert message in capsys.readouterr().err
