# SPDX-License-Identifier: Apache-2.0
"""`Capture.activation_cache` compared with TransformerLens' own cache for the same weights: `make types`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmi_connector import capture_args, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.captures import lens_names
from dmi_connector.captures.capture import Capture
from tests import oraclestore, snippets
from tests.engine.harness import ALL_HOOKS, SMALL, Ask, Run, engine, generate, prompt

lens = pytest.importorskip(
    "transformer_lens", reason="transformer_lens is not installed; run make types TYPES=transformer-lens"
)
from transformer_lens.model_bridge import TransformerBridge  # noqa: E402

from dmi_connector.captures.activation_cache import StoreActivations  # noqa: E402

TOKENS = np.random.default_rng(0).integers(5, 512, 40).tolist()
ATTENTION: dict[str, dict[str, Any]] = {
    "granite": {"scale": 0.2},
    "gemma2": {"scale": 24**-0.5, "soft_cap": 20.0, "windows": [32, None, 32, None]},
    "gemma3_text": {"scale": 24**-0.5, "windows": [32, None, 32, None]},
    "gpt_oss": {"scale": 32**-0.5, "sinks": True},
}
"""{family: attention attributes}, for families other than full attention with the default scale."""
ARCHS = ("qwen3", "qwen2", "llama", "mistral", "qwen3_moe", "gpt2", "phi3", "olmoe", "glm4", "glm4_moe", "opt")
ARCHS += ("llama4_text", *ATTENTION)
Made = tuple[Capture, Any, Any]


@pytest.fixture(scope="module")
def made(
    tiny_model: Callable[..., Path], oracle: Callable[..., Oracle], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Made]:
    """made(arch): a store, TransformerLens' model with the same weights, and its cache."""
    done: dict[str, Made] = {}

    def get(arch: str) -> Made:
        if arch not in done:
            path = tmp_path_factory.mktemp(arch) / "a.zarr"
            capture = oraclestore.write(oracle(arch), path, TOKENS, ATTENTION.get(arch), segment=128)
            model = TransformerBridge.boot_transformers(str(tiny_model(arch)), device="cpu", dtype=torch.float32)
            with torch.no_grad():
                done[arch] = capture, model, model.run_with_cache(torch.tensor([TOKENS]))[1]
        return done[arch]

    return get


def check(found: StoreActivations, own: Any) -> set[str]:
    """Fail unless each tensor of a cache equals that of the store's cache, or the store's cache says that it is absent.
    Returns the absent names.
    """
    absent = set()
    for name, want in own.cache_dict.items():
        if name not in found.cache_dict:
            assert len(found.why_absent(name)) > 10
            absent.add(lens_names.split_name(name)[0])
            continue
        have = found[name]
        if want.shape == have.shape[1:] and own.model.cfg.architecture == "OPTForCausalLM":
            want = want[None]  # in transformers, the MLP of OPT has no batch dimension
        assert have.shape == want.shape and have.dtype == want.dtype, (
            f"{name}: {have.shape}, in TransformerLens {want.shape}"
        )
        error = float((have - want).abs().max())
        assert error <= 2e-5 * max(1.0, float(want.abs().max())), f"{name} is off by {error:.1e}"
    return absent


@pytest.mark.parametrize("arch", ARCHS)
def test_each_tensor_is_that_of_the_bridge_or_absent_with_a_reason(made: Callable[[str], Made], arch: str) -> None:
    capture, model, own = made(arch)
    found = capture.activation_cache(model)
    assert isinstance(found, lens.ActivationCache)
    absent = check(found, own)
    usual = {"hook_resid_pre", "hook_resid_post", "hook_attn_out", "hook_mlp_out", "attn.hook_z", "attn.hook_v"}
    usual |= {"ln1.hook_out", "ln1.hook_scale", "ln2.hook_out", "ln2.hook_normalized", "hook_resid_mid"}
    usual |= {"ln_final.hook_out", "ln_final.hook_scale"}
    usual |= set() if arch == "granite" else {"hook_embed"}
    usual |= set() if arch == "gpt_oss" else {"attn.hook_pattern"}
    assert not usual & absent, usual & absent
    assert {lens_names.split_name(name)[0] for name in own.cache_dict} - absent >= usual


def test_a_capture_of_an_engine_has_the_same_tensors(
    made: Callable[[str], Made], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, run = made("qwen3")[1], Run(tmp_path)
    args: dict[str, Any] = capture_args(ALL_HOOKS, tmp_path, "target", **SMALL)
    with engine(tiny_model("qwen3"), enforce_eager=True, **args) as llm:
        generate(llm, run, {"one": Ask(prompt(40))})
    capture = open_capture(run.store("one"), timeout=300)
    with torch.no_grad():
        own = model.run_with_cache(torch.tensor([capture.token_ids.tolist()]))[1]
    assert "attn.hook_pattern" not in check(capture.activation_cache(model), own)


def test_tensors_that_a_dense_model_lacks_are_absent_from_its_cache(made: Callable[[str], Made]) -> None:
    capture, model, own = made("llama")
    absent = check(capture.activation_cache(model), own)
    inner = {"attn.hook_cos", "attn.hook_sin", "rotary_emb.hook_in", "rotary_emb.hook_cos", "rotary_emb.hook_sin"}
    ids = {"embed.hook_in", "embed.hook_out"}
    mlp = {"mlp.gate.hook_in", "mlp.gate.hook_out", "mlp.in.hook_in", "mlp.in.hook_out", "mlp.out.hook_out"}
    mlp |= {"mlp.hook_out"}
    attn = {"attn.hook_attn_scores", "attn.o.hook_out", "attn.hook_out"}
    assert absent == inner | ids | mlp | attn | {"unembed.hook_out", "hook_unembed"}


def test_methods_of_the_cache_work_on_stored_tensors(made: Callable[[str], Made]) -> None:
    capture, model, own = made("gpt2")
    found = capture.activation_cache(model)
    for call in (
        lambda cache: cache.accumulated_resid(apply_ln=True),
        lambda cache: cache.stack_head_results(layer=2),
        lambda cache: cache.apply_ln_to_stack(cache.accumulated_resid()),
        lambda cache: cache["pattern", -1],
    ):
        with torch.no_grad():
            torch.testing.assert_close(call(found), call(own), atol=2e-5, rtol=0)
    flat = capture.activation_cache(batch_dim=False)
    assert flat["z", 0].shape == (len(TOKENS), 4, 32) and flat["pattern", 0].shape == (4, len(TOKENS), len(TOKENS))
    torch.testing.assert_close(found.remove_batch_dim()["resid_post", 1], flat["resid_post", 1])


def test_a_missing_tensor_is_named_with_the_reason(made: Callable[[str], Made]) -> None:
    found = made("qwen3")[0].activation_cache()
    with pytest.raises(KeyError, match=r"'blocks.1.attn.hook_q' is not in the cache: .*after the norm"):
        found["q", 1]
    with pytest.raises(KeyError, match=r"hook_scale' is not in the cache: .*give the model"):
        found["blocks.0.ln1.hook_scale"]
    with pytest.raises(KeyError, match="is in the cache"):
        found.why_absent("hook_embed")
    assert found.absent["attn.hook_q"].startswith("not captured") and "hook_embed" not in found.absent
    assert "sinks" in made("gpt_oss")[0].activation_cache().why_absent("blocks.0.attn.hook_pattern")


def test_tensors_are_read_when_they_are_asked_for(made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch) -> None:
    capture = made("qwen3")[0]
    read: list[tuple[Any, ...]] = []
    numpy = Capture.numpy
    monkeypatch.setattr(Capture, "numpy", lambda self, *args, **kw: read.append(args) or numpy(self, *args, **kw))
    found = capture.activation_cache()
    assert not read
    assert found["resid_mid", 1] is found["blocks.1.ln2.hook_in"] and read == [("resid_mid", 1)]


def test_narrow_stores_say_what_was_not_captured(oracle: Callable[..., Oracle], tmp_path: Path) -> None:
    capture = oraclestore.write(oracle("qwen3"), tmp_path / "a.zarr", TOKENS, hooks=("resid_pre", "q_rot"))
    found = capture.activation_cache()
    assert "blocks.0.hook_resid_post" in found.cache_dict and "blocks.2.hook_resid_post" not in found.cache_dict
    assert found.why_absent("blocks.2.hook_resid_post") == "resid_post of layer 2 was not captured"
    assert "which were not both captured" in found.why_absent("blocks.0.attn.hook_pattern")
    capture.missing.append([3, 4])
    assert found.why_absent("blocks.0.hook_mlp_out") == "mlp_out of layer 0 was not captured"


def test_an_unprocessed_hooked_transformer_has_the_same_tensors(
    made: Callable[[str], Made], tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TransformerLens 3 still has `HookedTransformer`. It gets the config of a known name, which is built offline."""
    hooked = pytest.importorskip(
        "transformer_lens.HookedTransformer",
        reason="TransformerLens 4 has no HookedTransformer; make types TYPES=sae-lens brings version 3",
    )
    from transformer_lens import loading_from_pretrained
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = tiny_model("qwen2")
    twin = AutoModelForCausalLM.from_pretrained(directory)
    monkeypatch.setattr(loading_from_pretrained.AutoConfig, "from_pretrained", lambda *_, **__: twin.config)
    own = hooked.HookedTransformer.from_pretrained_no_processing(
        "Qwen/Qwen2-0.5B", hf_model=twin, tokenizer=AutoTokenizer.from_pretrained(directory), device="cpu"
    )
    with torch.no_grad():
        absent = check(made("qwen2")[0].activation_cache(own), own.run_with_cache(torch.tensor([TOKENS]))[1])
    assert absent == {"attn.hook_attn_scores", "unembed.hook_out"}


def test_the_page_shows_code_that_runs(made: Callable[[str], Made]) -> None:
    capture, model, _ = made("qwen3")
    names = snippets.run("TransformerLens", {"store": capture.path, "model": model})
    assert names["attribution"].shape[1:] == (1, len(TOKENS), 64)


def test_the_page_lists_available_and_absent_tensors() -> None:
    page = (snippets.DOCS / "TYPES.md").read_text()
    section = page[page.index("## TransformerLens") :].split("\n## ")[0]
    tables = (lens_names.TL_NAMES, *lens_names.QK_NAMES.values(), lens_names.POST_NORM_NAMES, lens_names.ABSENT)
    known = {name for table in tables for name in table}
    lacking = {name for name in known if f"`{name}`" not in section}
    assert not lacking, f"docs/TYPES.md lacks {sorted(lacking)}"
