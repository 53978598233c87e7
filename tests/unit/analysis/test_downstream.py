# SPDX-License-Identifier: Apache-2.0
"""`dmi fidelity` with labels, with a model, and with a bar."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from dmi_connector.analysis.downstream import concepts_of
from dmi_connector.analysis.fidelity import below, fidelity, markdown
from dmi_connector.analysis.unembedding import Unembedding
from dmi_connector.captures.capture import open_capture
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from tests import storekit as kit

WIDTH, TOKENS, STORES = 48, 60, 8
HOOKS = [ArraySpec("resid_mid", "float32", (0, 1), WIDTH), ArraySpec("mlp_post", "float32", (0,), WIDTH)]
LOUD = 5
"""A dimension that is far larger than the others."""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Rows with the directions of their token and of their store's label (of the number of the store, modulo 2)."""
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
    assert len(np.intersect1d(found.fit, found.test)) == 0 and len(found.fit) + len(found.test) == STORES * TOKENS
    named = concepts_of(stores, {("store", f"{n}.zarr"): bool(n % 2) for n in range(STORES - 1)})
    np.testing.assert_array_equal(
        named.targets[:, 0], np.repeat(np.arange(STORES) % 2 == 1, TOKENS) & (np.arange(STORES * TOKENS) < 7 * TOKENS)
    )
    used = [{*(part // TOKENS).tolist()} for part in (named.fit, named.test)]
    assert not used[0] & used[1] and used[0] | used[1] == set(range(7)), "whole captures; one has no label"
    with pytest.raises(ValueError, match="--labels: no label has 8 rows on each side in both halves"):
        concepts_of(stores, {("store", "0.zarr"): True, ("store", "1.zarr"): False})


@pytest.mark.parametrize("by", ["tokens", "labels"])
def test_scores_of_concepts_are_kept_by_what_keeps_the_rows(stores: list[Path], by: str) -> None:
    chosen = "tokens" if by == "tokens" else {("store", f"{n}.zarr"): bool(n % 2) for n in range(STORES)}
    assert measured(stores, "round(23)", labels=chosen)["concepts"] > 0.9999
    assert measured(stores, "int8(16)", labels=chosen)["concepts"] > 0.99
    whole, one = (measured(stores, f"topk({k},exact)", labels=chosen)["concepts"] for k in (48, 1))
    assert whole > 0.9999 > 0.9 > one, "of the loud dimension alone nothing is known"
    assert "concepts" not in measured(stores, "int8")


def test_the_logit_lens_of_decoded_rows_is_compared(stores: list[Path]) -> None:
    """Against sums that are written out here. Projections have no lens, other hooks neither."""
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


def test_the_mean_magnitude_of_neurons_is_ranked(stores: list[Path]) -> None:
    """Against ranks that are counted here. One loud dimension makes coarse steps for all others."""
    rows = np.concatenate([rows_of(store) for store in stores])
    scale = np.abs(rows).max(1, keepdims=True) / 127
    means = [np.abs(x).mean(0) for x in (rows, np.round(rows / scale) * scale)]
    ranks = [(mean[:, None] > mean).sum(1) for mean in means]
    want = np.corrcoef(*ranks)[0, 1]
    assert want < 0.995 and measured(stores, "int8", "resid_mid")["importance"] == pytest.approx(want, abs=1e-4)
    assert measured(stores, "round(23)")["importance"] == 1


def test_what_is_below_a_bar_is_named() -> None:
    measures = {"pairs": 0.95, "probes": 0.9499, "error": 0.5, "lens_kl": 3.0, "importance": math.nan}
    assert below(measures, 0.95) == ["probes", "importance"]


def test_a_bar_has_an_exit_status_and_a_column(
    stores: list[Path], labels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["fidelity", *map(str, stores), "--hooks", "mlp_post", "--labels", str(labels), "--bar", "0.95"]
    assert main([*command, "--reduce", "round(7)"]) == 0
    assert "| bar 0.95 |" in (out := capsys.readouterr().out) and "| pass |" in out and "1 of 1 reductions" in out
    both = ["--reduce", "round(7)", "--reduce", "topk(1,exact)"]
    assert main([*command, *both]) == 1
    out = capsys.readouterr().out
    assert "| below: importance, concepts |" in out and "1 of 2 reductions of a layer reach 0.95" in out
    assert main([*command, *both, "--json"]) == 1
    assert [one["below"] for one in json.loads(capsys.readouterr().out)] == [[], ["importance", "concepts"]]
    assert main([*command[:-2], *both]) == 0, "without a bar nothing fails"
    assert "bar" not in capsys.readouterr().out
    found = fidelity(stores, ["topk(1,exact)"], "mlp_post")
    assert "below" not in markdown(found) and "below: importance" in markdown(found, 0.95)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bar", "0"], "--bar 0.0 is not valid; give a number above 0, at most 1, as in --bar 0.95"),
        (["--bar", "95"], "--bar 95.0 is not valid"),
        (["--bar", "nan"], "--bar nan is not valid"),
        (["--labels", "nowhere.csv"], "nowhere.csv"),
        (["--model", "nowhere"], "model: nowhere has no readable config.json"),
    ],
)
def test_bad_values_are_refused(
    stores: list[Path], words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fidelity", str(stores[0]), "--reduce", "int8", *words]) == 2
    assert message in capsys.readouterr().err
