# SPDX-License-Identifier: Apache-2.0
"""Engine tests compare with the oracle, so these tests compare the oracle with the equations of the models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING, AutoTokenizer, DeepseekV3Config

from dmi_connector.analysis.oracle.oracle_twins import ONCE
from dmi_connector.analysis.oracle.recorder import Recorder
from dmi_connector.analysis.oracle.transformers_oracle import Oracle, compare, largest
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.cli import demo
from dmi_connector.cli.tiny_models import ARCHS, CHAT_TEMPLATE, EOS, VOCAB, make_model
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce import parse
from dmi_connector.store.format.completeness import Cause, Loss
from tests import oraclestore
from tests import storekit as kit
from tests.vision import IMAGE, image, processed

IDS = [7, 300, 41, 41, 500, 260, 8, 99, 130, 64, 12, 345]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    root = tmp_path_factory.mktemp("models")
    return {arch: Oracle(make_model(arch, root / arch)) for arch in ARCHS}


@pytest.fixture(scope="module")
def hooks(oracles: dict[str, Oracle]) -> dict[str, dict[str, np.ndarray]]:
    return {arch: oracle.run(IDS) for arch, oracle in oracles.items()}


def close(a: np.ndarray | torch.Tensor, b: np.ndarray | torch.Tensor) -> None:
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * max(1.0, float(np.abs(b).max())))


@pytest.mark.parametrize("arch", ARCHS)
def test_every_hook_has_its_shape_and_dtype(
    arch: str, oracles: dict[str, Oracle], hooks: dict[str, dict[str, np.ndarray]]
) -> None:
    cfg, got = oracles[arch].config, hooks[arch]
    h, t, layers = cfg.hidden_size, len(IDS), cfg.num_hidden_layers
    head_dim = getattr(cfg, "head_dim", None) or h // cfg.num_attention_heads
    q, kv = (
        cfg.num_attention_heads * head_dim,
        getattr(cfg, "num_key_value_heads", cfg.num_attention_heads) * head_dim,
    )
    widths = dict.fromkeys(("resid_pre", "ln1", "attn_out", "resid_mid", "ln2", "mlp_out"), h)
    widths |= {"q": q, "k": kv, "v": kv, "z": q}
    if arch != "gpt2":
        widths |= {"q_rot": q, "k_rot": kv}
    if arch == "qwen3_moe":
        widths |= {"router_logits": cfg.num_experts, "topk_ids": 2, "topk_weights": 2}
    else:
        neurons = ("mlp_pre", "mlp_post") if arch == "gpt2" else ("mlp_pre", "mlp_pre_linear", "mlp_post")
        widths |= dict.fromkeys(neurons, 4 * h if arch == "gpt2" else cfg.intermediate_size)
    shapes = {name: (layers, t, width) for name, width in widths.items()}
    shapes |= {name: (1, t, h) for name in ONCE}
    shapes |= {"logits": (t, VOCAB), "token_ids": (t,), "positions": (t,)}
    assert {name: value.shape for name, value in got.items()} == shapes
    ints = {name for name, value in got.items() if value.dtype == np.int32}
    assert ints == {"token_ids", "positions"} | ({"topk_ids"} if arch == "qwen3_moe" else set())
    assert all(v.dtype == np.float32 for n, v in got.items() if n not in ints)
    assert got["token_ids"].tolist() == IDS and got["positions"].tolist() == list(range(t))
    assert head_dim % 32 == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_the_residual_stream_adds_up(arch: str, hooks: dict[str, dict[str, np.ndarray]]) -> None:
    got = hooks[arch]
    close(got["resid_mid"], got["resid_pre"] + got["attn_out"])
    close(got["resid_pre"][1:], (got["resid_mid"] + got["mlp_out"])[:-1])
    close(got["resid_final"][0], got["resid_mid"][-1] + got["mlp_out"][-1])


@pytest.mark.parametrize("arch", ARCHS)
def test_every_hook_follows_from_the_ones_before_it(
    arch: str, oracles: dict[str, Oracle], hooks: dict[str, dict[str, np.ndarray]]
) -> None:
    model, got = oracles[arch].model, {n: torch.from_numpy(v) for n, v in hooks[arch].items()}
    base, ids = model.base_model, torch.tensor(IDS)
    with torch.no_grad():
        if arch == "gpt2":
            close(got["embed"][0], base.wte.weight[ids])
            close(got["resid_pre"][0], (base.wte.weight[ids] + base.wpe.weight[: len(IDS)]))
            final = base.ln_f
        else:
            close(got["embed"][0], base.embed_tokens.weight[ids])
            close(got["resid_pre"][0], got["embed"][0])
            final = base.norm
        close(got["final_ln"][0], final(got["resid_final"][0]))
        close(got["logits"], model.lm_head(got["final_ln"][0]))
        for i, layer in enumerate(base.h if arch == "gpt2" else base.layers):
            row = {n: v[i] for n, v in got.items() if v.dim() == 3 and n not in ONCE}
            check_layer_gpt2(layer, row) if arch == "gpt2" else check_layer(layer, row)


def check_layer(layer: torch.nn.Module, row: dict[str, torch.Tensor]) -> None:
    attn, d = layer.self_attn, layer.self_attn.head_dim
    close(row["ln1"], layer.input_layernorm(row["resid_pre"]))
    close(row["ln2"], layer.post_attention_layernorm(row["resid_mid"]))
    for name, project in (("q", attn.q_proj), ("k", attn.k_proj)):
        want = project(row["ln1"]).unflatten(-1, (-1, d))
        norm = getattr(attn, f"{name}_norm", None)
        close(row[name], (want if norm is None else norm(want)).flatten(1))
        rotated, plain = row[f"{name}_rot"], row[name]
        close(rotated[0], plain[0])  # rotary does not change position 0
        close(rotated.unflatten(-1, (-1, d)).norm(dim=-1), plain.unflatten(-1, (-1, d)).norm(dim=-1))
        assert not np.allclose(rotated[1:], plain[1:], atol=1e-2)
    close(row["v"], attn.v_proj(row["ln1"]))
    check_attention(row["q_rot"], row["k_rot"], row["v"], row["z"], d)
    close(row["attn_out"], attn.o_proj(row["z"]))
    if "mlp_post" in row:
        mlp = layer.mlp
        close(row["mlp_pre"], mlp.gate_proj(row["ln2"]))
        close(row["mlp_pre_linear"], mlp.up_proj(row["ln2"]))
        close(row["mlp_post"], F.silu(row["mlp_pre"]) * row["mlp_pre_linear"])
        close(row["mlp_out"], mlp.down_proj(row["mlp_post"]))
        return
    experts = layer.mlp.experts
    close(row["router_logits"], F.linear(row["ln2"], layer.mlp.gate.weight))
    want = torch.zeros_like(row["mlp_out"])
    for t, x in enumerate(row["ln2"]):
        for e, weight in zip(row["topk_ids"][t].tolist(), row["topk_weights"][t], strict=True):
            gate, up = (experts.gate_up_proj[e] @ x).chunk(2)
            want[t] += weight * (experts.down_proj[e] @ (F.silu(gate) * up))
    close(row["mlp_out"], want)


def check_layer_gpt2(layer: torch.nn.Module, row: dict[str, torch.Tensor]) -> None:
    close(row["ln1"], layer.ln_1(row["resid_pre"]))
    close(row["ln2"], layer.ln_2(row["resid_mid"]))
    close(torch.cat([row["q"], row["k"], row["v"]], -1), layer.attn.c_attn(row["ln1"]))
    check_attention(row["q"], row["k"], row["v"], row["z"], layer.attn.head_dim)
    close(row["attn_out"], layer.attn.c_proj(row["z"]))
    close(row["mlp_pre"], layer.mlp.c_fc(row["ln2"]))
    close(row["mlp_post"], F.gelu(row["mlp_pre"], approximate="tanh"))
    close(row["mlp_out"], layer.mlp.c_proj(row["mlp_post"]))


@pytest.mark.parametrize("arch", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_latent_attention_follows_from_the_latent_and_the_rotary_key(arch: str, tmp_path: Path) -> None:
    """The latent, the rotary key and the weights of kv_b_proj give attention, as docs/HOOKS.md says."""
    oracle = Oracle(make_model(arch, tmp_path, kv_lora_rank=24, qk_rope_head_dim=16))
    got, cfg = {name: torch.from_numpy(value) for name, value in oracle.run(IDS).items()}, oracle.config
    nope, values = cfg.qk_nope_head_dim, cfg.v_head_dim
    assert not {"k", "v", "k_rot"} & set(got) and got["kv_c"].shape[-1] == 24 and got["k_pe"].shape[-1] == 16
    for i, layer in enumerate(oracle.model.model.layers):
        attn = layer.self_attn
        weight = attn.kv_b_proj.weight.detach().unflatten(0, (-1, nope + values))
        made = torch.einsum("tc,hdc->htd", got["kv_c"][i], weight)
        shared = got["k_pe"][i].expand(len(made), -1, -1)
        keys = torch.cat([made[..., :nope], shared], -1).transpose(0, 1).flatten(1)
        # `check_attention` divides by the square root of the head size. yarn scales further.
        queries = got["q_rot"][i] * (attn.scaling * (nope + 16) ** 0.5)
        check_attention(queries, keys, made[..., nope:].transpose(0, 1).flatten(1), got["z"][i], nope + 16)
        close(got["attn_out"][i], attn.o_proj(got["z"][i]).detach())
        plain, rotated = (got[name][i].unflatten(-1, (-1, nope + 16)) for name in ("q", "q_rot"))
        close(plain[..., :nope], rotated[..., :nope])
        plain, rotated = plain[..., nope:], rotated[..., nope:]
        # yarn may scale, but does not rotate position 0
        close(rotated[0], plain[0] * rotated[0].norm() / plain[0].norm())
        assert not np.allclose(plain[1:], rotated[1:], atol=1e-2)


@pytest.mark.parametrize("name", ["deepseek_v32", "kimi_k2"])
def test_a_v3_that_vllm_renames_keeps_its_latent_attention(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM changes the type of transformers' class for the whole process when it reads a config of V3.2 or Kimi K2."""
    monkeypatch.setattr(DeepseekV3Config, "model_type", name)
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, name, DeepseekV3Config)  # as AutoConfig.register does
    model = make_model("deepseek_v3", tmp_path)
    assert {"kv_c", "k_pe"} <= set(got := Oracle(model).run(IDS)) and not {"k_rot", "indexer_topk"} & set(got)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_an_indexer_chooses_some_earlier_tokens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds for a V3.2 for which vLLM has registered the class of V3, which has no indexer."""
    model = make_model(name, tmp_path, index_topk=5)
    monkeypatch.setattr(DeepseekV3Config, "model_type", "deepseek_v32")
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "deepseek_v32", DeepseekV3Config)
    got = Oracle(model).run(IDS)
    assert got["indexer_topk"].shape == (3, len(IDS), 5) and got["indexer_topk"].dtype == np.int32
    for rows in got["indexer_topk"]:
        for token, row in enumerate(rows.tolist()):
            chosen = [position for position in row if position >= 0]
            assert row == [*sorted({*chosen}, reverse=True), *[-1] * (4 - token)], "missing tokens must be -1"
            assert max(chosen) <= token
    assert len({str(row) for row in got["indexer_topk"][:, -1].tolist()}) > 1, "layers must choose different tokens"
    close(got["q_rot"][0, 0], Oracle(model).run(IDS[:1])["q_rot"][0, 0])


def check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, d: int) -> None:
    """Check that z is causal attention over q, k, v. Uniform weights could hide a wrong mask, so they fail."""
    q, k = (x.unflatten(-1, (-1, d)).transpose(0, 1) for x in (q, k))
    v = v.unflatten(-1, (k.shape[0], -1)).transpose(0, 1)
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    scores = q @ k.mT / d**0.5
    weights = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    close(z, (weights @ v).transpose(0, 1).flatten(1))
    assert weights[:, -1].amax(-1).mean() > 2 / q.shape[1]


@pytest.mark.parametrize("arch", ARCHS)
def test_activations_are_of_order_one(arch: str, hooks: dict[str, dict[str, np.ndarray]]) -> None:
    stds = {n: v.std(axis=(-2, -1)) for n, v in hooks[arch].items() if v.dtype == np.float32 and n != "topk_weights"}
    assert {n: s for n, s in stds.items() if s.min() < 0.1 or s.max() > 10} == {}


def test_experts_are_ordered_by_weight_and_ties_by_number(hooks: dict[str, dict[str, np.ndarray]]) -> None:
    got = hooks["qwen3_moe"]
    assert np.all(got["topk_weights"][..., 0] >= got["topk_weights"][..., 1])
    np.testing.assert_allclose(got["topk_weights"].sum(-1), 1, atol=1e-6)
    assert len(np.unique(got["topk_ids"])) == 4
    router = torch.nn.Identity()
    with Recorder(1) as recorder:
        recorder.watch_router(router, 3)
        router((torch.zeros(1, 4), torch.tensor([[0.25, 0.25, 0.5]]), torch.tensor([[3, 1, 2]])))
    assert recorder.rows["topk_ids"][0].tolist() == [[2, 1, 3]]
    assert recorder.rows["topk_weights"][0].tolist() == [[0.5, 0.25, 0.25]]


def test_dense_layers_of_a_moe_model_have_no_router(tmp_path: Path) -> None:
    oracle = Oracle(make_model("qwen3_moe", tmp_path / "model", mlp_only_layers=[1]))
    got = oracle.run(IDS)
    assert got["mlp_out"].shape[0] == 3
    assert got["router_logits"].shape[0] == 2 and got["mlp_post"].shape[0] == 1
    layers = {name: oracle.layers[name] for name in ("mlp_out", "q_rot", "router_logits", "topk_ids", "mlp_post")}
    assert layers == {
        "mlp_out": [0, 1, 2],
        "q_rot": [0, 1, 2],
        "router_logits": [0, 2],
        "topk_ids": [0, 2],
        "mlp_post": [1],
    }


def test_projections_before_a_norm_are_hooks_only_where_a_model_has_that_norm(tmp_path: Path) -> None:
    for norms in (True, False):
        model = make_model("hyperclovax", tmp_path / str(norms), num_hidden_layers=1, use_post_norm=norms)
        assert ({"attn_proj", "mlp_proj"} <= Oracle(model).run(IDS[:2]).keys()) is norms


def test_greedy_matches_the_teacher_forced_logits(oracles: dict[str, Oracle]) -> None:
    for oracle in oracles.values():
        new = oracle.greedy(IDS, 8)
        logits = oracle.run([*IDS, *new])["logits"]
        assert new == logits[len(IDS) - 1 : -1].argmax(-1).tolist()
        assert EOS not in new and len(set(new)) > 2


def test_run_leaves_no_hooks_behind(oracles: dict[str, Oracle]) -> None:
    oracle = oracles["qwen3"]
    oracle.run(IDS)
    assert all(not module._forward_hooks for module in oracle.model.modules())


def test_models_are_reproducible_and_bf16_is_rounded_float32(tmp_path: Path) -> None:
    a = Oracle(make_model("qwen3", tmp_path / "a")).model.state_dict()
    b = Oracle(make_model("qwen3", tmp_path / "b")).model.state_dict()
    c = Oracle(make_model("qwen3", tmp_path / "c", dtype="bfloat16"), dtype=torch.bfloat16).model.state_dict()
    d = Oracle(make_model("qwen3", tmp_path / "d", seed=1)).model.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert all(torch.equal(a[name].bfloat16(), c[name]) for name in a)
    assert not any(torch.equal(a[name], d[name]) for name in a)


def test_an_unknown_architecture_is_refused_and_known_ones_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'qwen9' is unknown.*qwen3_moe"):
        make_model("qwen9", tmp_path)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_saved_tokenizer_decodes_what_it_encodes(arch: str, tmp_path: Path) -> None:
    make_model(arch, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert len(tokenizer) == VOCAB and tokenizer.eos_token_id == EOS
    for text in ("Hello, world!", "  naïve café 42\n\ttabs", "日本語 🙂"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and max(ids) < VOCAB
    assert len(tokenizer.encode("the model reads a prompt")) <= 8  # the text has 24 bytes, so merges are used
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(chat))[0] == "<|im_start|>"


# ---- comparing captures ---------------------------------------------------------------------------------------------


def store_of(path: Path, arrays: dict[str, np.ndarray], oracle: Oracle, *more: ArraySpec, **options: Any) -> Capture:
    """A store of IDS with float32 values [layers, tokens, width] of layers 0, 1, ... more: reduced arrays."""
    owner = kit.Store(1 << 22)
    reduced = {spec.name: spec for spec in more}
    specs = [reduced.get(n) or ArraySpec(n, "float32", tuple(range(len(v))), v.shape[-1]) for n, v in arrays.items()]
    raw = {name: kit.bits(value) for name, value in arrays.items()}
    attrs = oraclestore.attributes(oracle, None)
    owner.write(path, specs, len(IDS), values=raw, ids=np.asarray(IDS), attrs=attrs, **options)
    assert owner.shutdown()
    return open_capture(path, timeout=0, allow_incomplete=True)


def test_missing_rows_are_not_compared(oracles: dict[str, Oracle], tmp_path: Path) -> None:
    """They are read as zeros. A wrong row that is not missing is found."""
    oracle, values = oracles["qwen3"], {name: oracles["qwen3"].run(IDS)[name].copy() for name in ("q", "resid_pre")}
    for value in values.values():
        value[:, 4:9] = 0
    losses = [Loss.of(Cause.FELL_BEHIND, [[4, 9]])]
    errors = compare(store_of(tmp_path / "a.zarr", values, oracle, losses=losses), oracle)
    assert errors == {"q": 0, "resid_pre": 0}
    values["q"][1, 9] = 0
    errors = compare(store_of(tmp_path / "b.zarr", values, oracle, losses=losses), oracle)
    assert errors["q"] > 0.01 and errors["resid_pre"] == 0


def test_a_store_without_present_rows_or_token_ids_is_refused(oracles: dict[str, Oracle], tmp_path: Path) -> None:
    oracle, values = oracles["qwen3"], {"q": oracles["qwen3"].run(IDS)["q"]}
    losses = [Loss.of(Cause.FELL_BEHIND, [[0, len(IDS)]])]
    with pytest.raises(ValueError, match="holds no rows to compare; give a store with rows"):
        compare(store_of(tmp_path / "lost.zarr", values, oracle, losses=losses), oracle)
    losses = [Loss.of(Cause.TOKEN_IDS_UNKNOWN), Loss.of(Cause.FELL_BEHIND, [[3, 4]])]
    with pytest.raises(ValueError, match="lacks token ids"):
        compare(store_of(tmp_path / "ids.zarr", values, oracle, losses=losses), oracle)


def reduced(name: str, rows: np.ndarray, spec: str) -> tuple[np.ndarray, ArraySpec]:
    """Rows [layers, tokens, width] as a reduction stores them, and their array."""
    reduction = parse(spec)
    assert reduction is not None
    stored = np.stack([reduction.encode(torch.from_numpy(layer)).numpy() for layer in rows])
    settings = {**reduction.settings(), "dtype": "float32", "width": rows.shape[-1]}
    return stored, ArraySpec(name, "uint8", tuple(range(len(rows))), stored.shape[-1], reduce=settings)


def test_reduced_hooks_are_decoded_and_other_values_left_out(
    oracles: dict[str, Oracle], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    oracle, want = oracles["qwen3"], oracles["qwen3"].run(IDS)
    (int8, q), (rp, k) = reduced("q", want["q"], "int8"), reduced("k", want["k"], "rp(16)")
    words = ArraySpec("pattern", "uint8", (0, 1, 2), 4 * 4 * 3, reduce={
        "kind": "attn", "m": 1, "dtype": "float32", "width": 4
    })  # fmt: skip
    pattern = np.zeros((3, len(IDS), words.width), "u1")
    capture = store_of(tmp_path / "a.zarr", {"q": int8, "k": rp, "pattern": pattern}, oracle, q, k, words)
    errors = compare(capture, oracle)
    assert set(errors) == {"q"} and 0 < errors["q"] < np.abs(want["q"]).max() / 127
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == [
        "k holds rows of rp, not its values; it is not compared",
        "pattern holds rows of attn, not its values; it is not compared",
    ]
    capture = store_of(tmp_path / "b.zarr", {"k": rp}, oracle, k)
    with pytest.raises(ValueError, match="no hook can be compared; capture hooks in full, or as int8"):
        compare(capture, oracle)


def test_a_hook_that_the_oracle_lacks_is_named(oracles: dict[str, Oracle], tmp_path: Path) -> None:
    oracle, want = oracles["qwen3"], oracles["qwen3"].run(IDS)
    capture = store_of(tmp_path / "a.zarr", {"q": want["q"], "kv_c": want["k"]}, oracle)
    with pytest.raises(ValueError, match=r"the oracle computes no kv_c, only .*; give Oracle without=\['kv_c'\]"):
        compare(capture, oracle)


def test_nan_is_the_largest_difference(oracles: dict[str, Oracle], tmp_path: Path) -> None:
    """NaN counts in either store, so that `dmi demo` cannot report that all hooks agree."""
    assert largest([{"q": 1e-7, "k": 2.0}, {"q": 3e-7, "k": 1.0}]) == {"q": 3e-7, "k": 2.0}
    assert np.isnan(largest([{"q": 1e-7}, {"q": np.nan}, {"q": 2e-7}])["q"])
    oracle, values = oracles["qwen3"], oracles["qwen3"].run(IDS)["q"]
    good = store_of(tmp_path / "good.zarr", {"q": values}, oracle)
    values = values.copy()
    values[1, 3, 5] = np.nan
    bad = store_of(tmp_path / "bad.zarr", {"q": values}, oracle)
    model = Path(oracle.config.name_or_path)
    for captures in ([good, bad], [bad, good]):
        assert demo.judge([], demo.compare_all(captures, model)) == 1


def test_images_go_into_the_model_in_its_dtype_with_the_places_of_their_tokens() -> None:
    """Models like Qwen's, which have a grid, also get the positions of image tokens."""
    model = SimpleNamespace(dtype=torch.bfloat16, config=SimpleNamespace(image_token_id=9))
    ids, pixels, grid = torch.tensor([[1, 9, 9, 2]]), torch.ones(2, 3), torch.tensor([[1, 2, 3]])
    oracle: Any = SimpleNamespace(model=model)
    assert Oracle._with_images(oracle, ids, None, True) == {} == Oracle._with_images(oracle, ids, {}, True)
    found = Oracle._with_images(oracle, ids, {"pixel_values": pixels, "image_grid_thw": grid}, False)
    assert found["pixel_values"].dtype == torch.bfloat16 and found["image_grid_thw"] is grid
    assert found["mm_token_type_ids"].tolist() == [[0, 1, 1, 0]] and found["mm_token_type_ids"].dtype == torch.int32
    assert Oracle._with_images(oracle, ids, {"pixel_values": pixels}, False).keys() == {"pixel_values"}


def test_tokens_of_an_image_attend_to_each_other_where_the_capture_did(tmp_path: Path) -> None:
    """As in Gemma 3 on a GPU. Rows before the image are the same."""
    model = make_model("gemma3", tmp_path / "model")
    oracle, images = Oracle(model), processed(model, "gemma3", [image(2, 2)])
    ids = [7, 300, *[IMAGE] * 4, 41, 500]
    causal, blocks = (oracle.run(ids, images, image_blocks) for image_blocks in (False, True))
    difference = np.abs(causal["resid_final"][0] - blocks["resid_final"][0]).max(-1)
    assert (difference[:2] == 0).all() and (difference[2:5] > 0.01).all()
    for facts, expected in (({}, causal), ({"attention": {"image_blocks": True}}, blocks)):
        capture: Any = SimpleNamespace(
            path="a.zarr",
            attrs={"hooks": {"resid_final": {"layers": []}}, "start": 0, **facts},
            reason=None,
            token_ids=np.array(ids),
            runs=lambda most: [slice(0, len(ids))],
            reduction=lambda hook: None,
            numpy=lambda hook, expected=expected: expected[hook][0],
        )
        assert compare(capture, oracle, images) == {"resid_final": 0}


def test_stored_layers_are_compared_with_layers_of_the_same_number() -> None:
    """A hook without layers is compared as a whole, also in a model with one layer."""
    values = np.arange(24, dtype="f4").reshape(4, 3, 2)
    expected = {"q": values, "resid_final": values[:1], "few": values[:2]}
    layers = {"q": [0, 1, 2, 3], "few": [2, 3]}
    oracle: Any = SimpleNamespace(run=lambda ids, images, image_blocks: expected, without=(), layers=layers)

    def differences(num_layers: int, **hooks: tuple[list[int], np.ndarray]) -> dict[str, float]:
        capture: Any = SimpleNamespace(
            path="a.zarr",
            attrs={
                "hooks": {name: {"layers": layers} for name, (layers, _) in hooks.items()},
                "num_layers": num_layers,
                "start": 0,
            },
            reason=None,
            token_ids=np.arange(3),
            runs=lambda most: [slice(0, 3)],
            reduction=lambda hook: None,
            numpy=lambda hook: hooks[hook][1],
        )
        return compare(capture, oracle)

    assert differences(4, q=([1, 3], values[[1, 3]] + 2)) == {"q": 2.0}
    assert differences(1, resid_final=([], values[0] + 1)) == {"resid_final": 1.0}
    assert differences(4, few=([2, 3], values[:2])) == {"few": 0.0}
    assert differences(4, few=([3], values[1:2] + 1)) == {"few": 1.0}
    with pytest.raises(ValueError, match=r"few has shape \(2, 3, 2\), the oracle's model gives \(1, 3, 2\)"):
        differences(4, few=([1, 2], values[:2]))
