# SPDX-License-Identifier: Apache-2.0
"""Logit lens, uncertainty, attribution and attention patterns, compared with transformers for the same tiny weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from dmi_connector import Capture, open_capture
from dmi_connector.analysis import attribution, lens, unembedding
from dmi_connector.analysis.attribution import logit_attribution
from dmi_connector.analysis.lens import logit_lens, uncertainty
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.analysis.patterns import attention_pattern, pattern_hooks
from dmi_connector.analysis.training.rows import known_tokens
from dmi_connector.analysis.unembedding import Unembedding, entropy_of, log_softmax
from dmi_connector.cli import tiny_models
from dmi_connector.cli.tiny_hybrids import HYBRIDS
from dmi_connector.cli.tiny_models import make_model
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Cause
from tests import analysiskit
from tests import storekit as kit
from tests.engine.test_models import MODELS, make, oracle
from tests.engine.wrapped import ALL as RENAMED
from tests.recorded import check_recorded

TOKENS, PROMPT = 24, 10
IDS = np.random.default_rng(0).integers(5, 512, TOKENS)
FAMILIES = ("qwen3", "llama", "gpt2", "gemma2", "granite", "cohere2", "glm4", "opt", "bloom", "phi")
"""Families with RMSNorm, LayerNorm, tied and untied heads, a head bias, gains of 1 + weight, scaled and capped
logits.
"""


@dataclass(frozen=True)
class Case:
    """A capture, its model in transformers, and the output of transformers for the same tokens, in float64."""

    capture: Capture
    oracle: Oracle
    unembedding: Unembedding
    streams: list[torch.Tensor]
    logits: torch.Tensor

    def predicted(self, stream: torch.Tensor) -> torch.Tensor:
        """The model's log-probabilities [tokens, vocabulary] for a residual stream."""
        base, model = self.oracle._base, self.oracle.model
        norm = base.get_submodule(self.oracle.twin.once[-1].module)
        with torch.no_grad():
            logits = model.lm_head(norm(stream))
            logits = logits / getattr(model.config, "logits_scaling", 1)
            logits = logits * (getattr(model.config, "logit_scale", None) or 1)
            if cap := getattr(model.config, "final_logit_softcapping", None):
                logits = torch.tanh(logits / cap) * cap
        return logits.double().log_softmax(-1)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    oracle = Oracle(make_model(request.param, folder / "model"))
    store = analysiskit.write_store(folder / "one.zarr", oracle, IDS.tolist(), PROMPT)
    seen: list[torch.Tensor] = []
    norm = oracle._base.get_submodule(oracle.twin.once[-1].module)
    norm_in = norm.register_forward_hook(lambda _m, args, _o: seen.append(args[0][0]))
    with torch.no_grad():
        out = oracle.model(torch.tensor(IDS)[None], output_hidden_states=True, use_cache=False)
    norm_in.remove()
    # transformers returns the stream after each layer, but after the last layer the output of the final norm.
    streams = [stream[0] for stream in out.hidden_states[:-1]] + [seen[0]]
    return Case(open_capture(store, 0), oracle, Unembedding.load(folder / "model"), streams, out.logits[0].double())


def test_the_lens_equals_that_of_transformers_for_each_stream(case: Case) -> None:
    found = logit_lens(case.capture, case.unembedding, top=3)
    assert found.layers == [*map(str, range(len(case.streams) - 1)), "final"]
    final = case.predicted(case.streams[-1])
    torch.testing.assert_close(final, case.logits.log_softmax(-1), atol=1e-5, rtol=0)
    for i, stream in enumerate(case.streams):
        own = case.predicted(stream)
        best, ids = own.topk(3)
        assert np.array_equal(found.ids[i], ids.numpy()), found.layers[i]
        np.testing.assert_allclose(found.probabilities[i], best.exp(), rtol=1e-4)
        chance = own.gather(-1, final.argmax(-1, keepdim=True)).exp()[:, 0]
        np.testing.assert_allclose(found.chance[i], chance, rtol=1e-4)
        np.testing.assert_allclose(found.entropy[i], torch.distributions.Categorical(logits=own).entropy(), rtol=1e-4)
        kl = torch.nn.functional.kl_div(own, final, reduction="none", log_target=True).sum(-1)
        np.testing.assert_allclose(found.divergence[i], kl, rtol=1e-3, atol=2e-6)


def test_the_lens_of_a_row_that_is_not_finite_has_no_token(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row is in a layer's input. Another one is in the last stream, so the model's prediction is unknown there."""
    read = Capture.numpy
    streams = ("resid_pre", "resid_final")

    def spoilt(self: Capture, hook: str, layer: int | None = None, tokens: Any = None, **more: Any) -> np.ndarray:
        values = read(self, hook, layer, tokens, **more).copy()
        if hook in streams and layer in (1, None):
            values[4 if layer == 1 else 7, 3] = np.nan
        return values

    monkeypatch.setattr(Capture, "numpy", spoilt)
    found = logit_lens(case.capture, case.unembedding, top=3)
    lost = np.zeros(found.ids.shape[:2], bool)
    lost[1, 4] = lost[-1, 7] = True
    assert ((found.ids == -1).all(-1) == lost).all() and (np.isnan(found.probabilities).all(-1) == lost).all()
    lost[:, 7] = True
    assert (np.isnan(found.chance) == lost).all()


def test_uncertainty_is_that_of_transformers_from_logits_and_from_the_stream(case: Case) -> None:
    own = case.logits.log_softmax(-1)
    entropy = -(own.exp() * own).sum(-1).numpy()
    surprisal = torch.nn.functional.cross_entropy(case.logits[:-1], torch.tensor(IDS)[1:], reduction="none").numpy()
    for end, rows in ((None, range(PROMPT - 1, TOKENS)), (case.unembedding, range(TOKENS))):
        found = uncertainty(case.capture, end)
        assert found.rows.tolist() == list(rows)
        np.testing.assert_allclose(found.entropy, entropy[rows], rtol=1e-4)
        np.testing.assert_allclose(found.surprisal[:-1], surprisal[rows[:-1]], rtol=1e-4)
        assert np.isnan(found.surprisal[-1]), "the last row has no next token"


def test_blocks_of_any_size_give_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 rows in blocks of 5 and 512 tokens of the vocabulary in blocks of 100, so the last block is short."""
    calls = (
        lambda: vars(logit_lens(case.capture, case.unembedding, top=2)),
        lambda: vars(uncertainty(case.capture)),
        lambda: vars(uncertainty(case.capture, case.unembedding)),
        lambda: {"shares": logit_attribution(case.capture, case.unembedding, targets=3)[0]},
    )
    whole = [call() for call in calls]
    monkeypatch.setattr(unembedding, "_LOGITS", 5 * len(case.unembedding.weight))
    monkeypatch.setattr(unembedding, "_BLOCK", 100)
    monkeypatch.setattr(lens, "_SAMPLES", 4)
    monkeypatch.setattr(attribution, "BLOCK", 7)
    for before, call in zip(whole, calls, strict=True):
        for name, value in call().items():
            if name == "layers":
                assert value == before[name]
            else:
                np.testing.assert_allclose(value, before[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_attribution_sums_to_the_logit_of_the_next_token(case: Case) -> None:
    uncapped = replace(case.unembedding, soft_cap=None).logits(case.capture.numpy("resid_final"))
    following = np.append(IDS[1:], uncapped[-1].argmax())
    shares, labels = logit_attribution(case.capture, case.unembedding)
    assert labels[:3] == ["embed", "0.attn", "0.mlp"] and labels[-1] == "bias"
    assert len(labels) == 2 * (len(case.streams) - 1) + 2
    expected = np.take_along_axis(uncapped, following[:, None], -1)[:, 0]
    np.testing.assert_allclose(shares.sum(0), expected, atol=2e-5 * np.abs(uncapped).max())
    difference, _ = logit_attribution(case.capture, case.unembedding, targets=7, against=9)
    np.testing.assert_allclose(difference.sum(0), uncapped[:, 7] - uncapped[:, 9], atol=2e-5 * np.abs(uncapped).max())


def test_the_output_of_layers_is_not_split_if_they_scale_the_stream(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(case.capture.attrs, "identities", False)
    with pytest.raises(ValueError, match=r"layers also scale the residual stream.*; use the logit lens"):
        logit_attribution(case.capture, case.unembedding)


def test_attribution_scales_the_norms_bias_too(case: Case) -> None:
    """No family here has both a bias and a scale."""
    scaled = replace(case.unembedding, soft_cap=None, scale=0.25)
    shares, _ = logit_attribution(case.capture, scaled, targets=7)
    logits = scaled.logits(case.capture.numpy("resid_final"))
    np.testing.assert_allclose(shares.sum(0), logits[:, 7], atol=2e-5 * np.abs(logits).max())


def test_attribution_of_a_block_is_its_product_with_the_weights_of_transformers(case: Case) -> None:
    model, norm = case.oracle.model, case.oracle._base.get_submodule(case.oracle.twin.once[-1].module)
    shares, labels = logit_attribution(case.capture, case.unembedding, targets=11)
    stream = case.streams[-1].double()
    if isinstance(norm, torch.nn.LayerNorm) or case.oracle.config.model_type == "cohere2":
        divisor = (stream.var(-1, unbiased=False, keepdim=True) + case.unembedding.eps).sqrt()
        read = model.lm_head.weight[11] * norm.weight
        read = read - read.mean()  # subtract the mean from the direction instead of from each part, which is equivalent
    else:
        divisor = (stream.square().mean(-1, keepdim=True) + case.oracle.config.rms_norm_eps).sqrt()
        read = model.lm_head.weight[11] * (norm.weight + case.oracle.config.model_type.startswith("gemma"))
    read = read * getattr(model.config, "logit_scale", 1) / getattr(model.config, "logits_scaling", 1)
    for label in ("0.attn", "1.mlp"):
        layer, block = label.split(".")
        part = torch.from_numpy(case.capture.numpy(f"{block}_out", int(layer))).double()
        expected = (part @ read.double().detach() / divisor[:, 0]).numpy()
        np.testing.assert_allclose(shares[labels.index(label)], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", ["qwen3", "llama", "gpt2", "glm4", "opt"], indirect=True)
def test_patterns_are_those_of_transformers(case: Case) -> None:
    with torch.no_grad():
        out = case.oracle.model(torch.tensor(IDS)[None], output_attentions=True, use_cache=False)
    for layer, weights in enumerate(out.attentions):
        np.testing.assert_allclose(attention_pattern(case.capture, layer), weights[0], atol=1e-5)
        np.testing.assert_allclose(attention_pattern(case.capture, layer, 1), weights[0, 1], atol=1e-5)


def test_bad_input_is_refused_with_the_fix(tmp_path: Path) -> None:
    oracle = Oracle(make_model("qwen3", tmp_path / "model"))
    with open_capture(analysiskit.write_store(tmp_path / "one.zarr", oracle, IDS.tolist(), PROMPT), 0) as capture:
        end = Unembedding.of(capture)
        for top in (0, 513):
            with pytest.raises(ValueError, match=f"top {top} is not valid; use 1 to 512"):
                logit_lens(capture, end, top)
        with pytest.raises(ValueError, match="rows have 96 values, the model's final norm 64"):
            end.logits(capture.numpy("mlp_post", 0))
        with pytest.raises(ValueError, match="token 512 does not exist"):
            logit_attribution(capture, end, targets=512)
        for against in (-1, 512):
            with pytest.raises(ValueError, match=f"token {against} does not exist"):
                logit_attribution(capture, end, targets=3, against=against)
        with pytest.raises(ValueError, match=r"targets have shape \(3,\), the store has 24 rows"):
            logit_attribution(capture, end, targets=[1, 2, 3])


def test_a_directory_that_lacks_something_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no readable config\.json \(.*No such file"):
        Unembedding.load(tmp_path)
    for text in ("{", "[]", "null", '{"text_config": [3]}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"has no readable config\.json"):
            Unembedding.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="lack an embedding"):
        Unembedding.load(tmp_path)
    save_file({"lm_head.weight": np.ones((3, 2), "f4")}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="lack a final norm"):
        Unembedding.load(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"b\.safetensors cannot be read"):
        Unembedding.load(tmp_path)


@pytest.mark.parametrize(("dtype", "name"), [("int8", "I8"), (ml_dtypes.float8_e4m3fn, "F8_E4M3")])
@pytest.mark.parametrize("quantised", ["lm_head.weight", "model.norm.weight"])
def test_quantised_weights_are_refused(dtype: type, name: str, quantised: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    tensors = {"lm_head.weight": np.ones((3, 2), "f4"), "model.norm.weight": np.ones(2, "f4")}
    save_file({**tensors, quantised: tensors[quantised].astype(dtype)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=rf"{quantised} in .*a\.safetensors has the dtype {name}, not one of BF16"):
        Unembedding.load(tmp_path)


@pytest.mark.parametrize("family", {**tiny_models.ARCHS, **tiny_models.FAMILIES, **HYBRIDS})
def test_the_end_of_every_family_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    oracle = Oracle(make_model(family, tmp_path))
    expected = oracle.run(IDS.tolist())
    logits = Unembedding.load(tmp_path).logits(expected["resid_final"][0])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-5)
    sizes = {name: [*value.shape, float(np.abs(value).mean().round(6))] for name, value in expected.items()}
    check_recorded("hooks_of_families.json", family, sizes)


@pytest.mark.parametrize("name", [name for name in RENAMED if name in MODELS])
def test_the_end_of_models_that_transformers_does_not_have_is_found(name: str, tmp_path: Path) -> None:
    expected = oracle(name, make(name, tmp_path / "model")).run(IDS.tolist())
    logits = Unembedding.load(tmp_path / "model").logits(expected["resid_final"][0])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-5)


@pytest.mark.parametrize(
    ("config", "norm", "gain"),
    [
        ({"model_type": "exaone", "layer_norm_epsilon": 0.25}, "transformer.ln_f", 0.5),
        ({"model_type": "mimo_v2_flash", "layernorm_epsilon": 0.25}, "model.norm", 0.5),
        ({"model_type": "plamo3", "rms_norm_eps": 0.25}, "model.norm", 1.5),
        (
            {"llm_config": {"model_type": "nemotron_h", "layer_norm_epsilon": 0.25}},
            "language_model.backbone.norm_f",
            0.5,
        ),
    ],
)
def test_configs_of_published_models_give_the_norm_of_vllm(
    config: dict[str, Any], norm: str, gain: float, tmp_path: Path
) -> None:
    """Tiny models of these families are made from others, whose configs name epsilon and type differently."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(
        {"lm_head.weight": np.eye(3, dtype="f4"), f"{norm}.weight": np.full(3, 0.5, "f4")}, tmp_path / "a.safetensors"
    )
    row = np.array([[1, 2, 4]], "f4")
    expected = gain * row / np.sqrt(np.square(row).mean() + 0.25)
    np.testing.assert_allclose(Unembedding.load(tmp_path).logits(row), expected, rtol=1e-6)


def test_a_logit_of_minus_infinity_adds_nothing_to_the_entropy() -> None:
    """Models mask tokens in this way, and engines mask a padded vocabulary."""
    logits = np.random.default_rng(0).standard_normal((4, 9)).astype("f4")
    masked = np.insert(logits, [0, 3, 9], -np.inf, axis=-1)
    with np.errstate(all="raise", under="ignore"):
        found = entropy_of(log_softmax(masked))
    shares = torch.from_numpy(logits).double().softmax(-1)
    np.testing.assert_allclose(found, torch.distributions.Categorical(shares).entropy(), rtol=1e-5)
    assert found.dtype == np.float32
    assert entropy_of(log_softmax(np.array([[-np.inf, 3.0]], "f4"))) == 0


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_outcomes_are_those_of_all_logits(soft_cap: float | None) -> None:
    """bfloat16 weights in several blocks, one without a likely token, and rows that are not finite."""
    rng, width, block = np.random.default_rng(0), 16, unembedding._BLOCK
    offset = rng.standard_normal(2 * block + 452).astype("f4")
    if soft_cap is None:
        offset[:block] = -np.inf  # no token of the first block is possible
    weight = rng.standard_normal((len(offset), width)).astype(ml_dtypes.bfloat16)
    end = Unembedding(weight, np.ones(width, "f4"), np.zeros(width, "f4"), 1e-6, offset=offset, soft_cap=soft_cap)
    rows = rng.standard_normal((6, width)).astype("f4")
    rows[2, 3], rows[4, 1] = np.nan, np.inf
    came = np.array([block + 5, 2 * block + 9, 3, -1, 7, len(offset)])
    with np.errstate(invalid="ignore"):
        found, own = end.outcomes(rows, came), log_softmax(end.logits(rows))
    finite = np.array([0, 1, 3, 5])
    assert np.isnan([found.logprobs[[2, 4]], found.entropy[[2, 4]]]).all() and np.isnan(found.logprobs[[3, 5]]).all()
    assert found.best[[2, 4]].tolist() == [-1, -1]
    np.testing.assert_allclose(found.logprobs[:2], own[[0, 1], came[:2]], rtol=1e-5)
    np.testing.assert_allclose(found.entropy[finite], entropy_of(own[finite]), rtol=1e-5)
    assert found.best[finite].tolist() == own[finite].argmax(-1).tolist()
    plain = unembedding.outcomes_of(own, came)
    for one, other in zip(vars(found).values(), vars(plain).values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_bfloat16_weights_and_sharded_files_are_read(tmp_path: Path) -> None:
    whole = Unembedding.load(make_model("llama", tmp_path / "whole", "bfloat16"))
    assert whole.weight.dtype == ml_dtypes.bfloat16, "weights must not be copied to float32"
    assert whole.gain.dtype == np.float32
    model = Oracle(tmp_path / "whole", torch.bfloat16).model
    model.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    assert np.array_equal(whole.weights_of(slice(None)), model.lm_head.weight.detach().float().numpy())
    stream = np.random.default_rng(0).standard_normal((3, len(whole.gain))).astype("f4")
    wide = replace(whole, weight=whole.weight.astype(np.float32))
    np.testing.assert_array_equal(whole.logits(stream), wide.logits(stream))
    for i, token in enumerate((5, 511)):
        assert np.array_equal(whole.weights_of(np.array([5, 511]))[i], wide.weight[token])
    assert np.array_equal(Unembedding.load(tmp_path / "parts").weight, whole.weight)


def test_the_row_before_a_lost_token_has_no_next_token(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    known = np.arange(TOKENS) != 16
    monkeypatch.setattr(lens, "known_tokens", lambda _capture: known)
    monkeypatch.setattr(attribution, "known_tokens", lambda _capture: known)
    found = uncertainty(case.capture, case.unembedding)
    assert found.rows[np.isnan(found.surprisal)].tolist() == [15, TOKENS - 1]
    shares, _ = logit_attribution(case.capture, case.unembedding)
    assert np.flatnonzero(np.isnan(shares).any(0)).tolist() == [15]
    assert not np.isnan(logit_attribution(case.capture, case.unembedding, targets=3)[0]).any()


def test_a_salvaged_store_has_0_where_a_token_is_lost() -> None:
    capture: Any = SimpleNamespace(token_ids=np.array([4, 0, 0, 0, 7]))
    for sentence, known in (
        (Cause.TOKEN_IDS_UNKNOWN.value[1], [True, False, False, True, True]),
        ("rows did not find room", [True] * 5),
    ):
        capture.attrs = {"reason": f"salvaged; {sentence}; and more", "num_tokens": 5, "missing": [[1, 3]]}
        assert known_tokens(capture).tolist() == known
    capture.attrs = {"reason": None, "num_tokens": 5, "missing": []}
    assert known_tokens(capture).all()


@pytest.mark.parametrize("queries", [0, 3, [], [1, 2], slice(0, 4, 2)])
def test_queries_are_a_slice_with_step_1(case: Case, queries: Any) -> None:
    with pytest.raises(ValueError, match="queries"):
        attention_pattern(case.capture, 0, queries=queries)


def test_queries_of_a_store_that_does_not_say_rotary_are_the_second_choice(tmp_path: Path) -> None:
    specs = [ArraySpec("q", "float32", (0,), 8), ArraySpec("k", "float32", (0,), 8)]
    summary = {"kind": "attn", "m": 2, "dtype": "float32", "width": 1}
    specs.append(ArraySpec("pattern", "uint8", (0,), 20, reduce=summary))
    owner, chosen = kit.Store(1 << 20), []
    for number, about in enumerate(({"rotary": False}, {})):
        owner.write(tmp_path / f"{number}.zarr", specs, 4, attrs={"num_layers": 1, **about})
    assert owner.shutdown(kit.PATIENCE)
    for number in range(2):
        with open_capture(tmp_path / f"{number}.zarr", 0) as capture:
            chosen.append(pattern_hooks(capture, 0))
    assert chosen == [("q", "k"), ("pattern",)]


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (1, 1)])
def test_distributions_lie_along_the_last_axis(shape: tuple[int, ...]) -> None:
    """Logits may be too large for exp."""
    logits = torch.randn(shape, dtype=torch.float64) * 400
    torch.testing.assert_close(torch.from_numpy(log_softmax(logits.numpy())), logits.log_softmax(-1))
