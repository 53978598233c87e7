# SPDX-License-Identifier: Apache-2.0
"""TransformerLens' names of hooks. tests/types compares the tensors with those of TransformerLens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dmi_connector.captures import lens_names as names
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Cause, Loss
from tests import storekit as kit

SPECS = tuple(ArraySpec(name, "float32", (0, 1), 8) for name in ("resid_pre", "q", "k", "attn_out"))
SPECS += (ArraySpec("embed", "float32", (), 8),)
Attrs = dict[str, Any]


def capture(path: Path, **attrs: Any) -> Capture:
    owner = kit.Store(1 << 20)
    owner.write(path / "a.zarr", SPECS, 10, attrs={"num_layers": 2, **attrs})
    assert owner.shutdown()
    return open_capture(path / "a.zarr", timeout=0)


def test_names_are_split_and_joined() -> None:
    assert names.split_name("blocks.13.attn.hook_z") == ("attn.hook_z", 13)
    assert names.split_name("ln_final.hook_out") == ("ln_final.hook_out", None)
    assert names.split_name("blocks.x.hook_in") == ("blocks.x.hook_in", None)
    assert names.full_name("attn.hook_z", 13) == "blocks.13.attn.hook_z"
    assert names.full_name("hook_embed", None) == "hook_embed"


@pytest.mark.parametrize(
    ("hook", "layer", "name"),
    [
        ("resid_pre", 3, "blocks.3.hook_resid_pre"),
        ("resid_post", 3, "blocks.3.hook_resid_post"),
        ("z", 0, "blocks.0.attn.hook_z"),
        ("mlp_post", 1, "blocks.1.mlp.hook_post"),
        ("embed", None, "hook_embed"),
        ("q", 3, None),
    ],
)
def test_a_hook_has_the_name_that_the_hooked_transformer_gives_it(
    hook: str, layer: int | None, name: str | None
) -> None:
    assert names.lens_name(hook, layer) == name


@pytest.mark.parametrize(
    ("attrs", "there", "absent"),
    [
        ({}, {"hook_embed", "attn.hook_v"}, {"attn.hook_q", "attn.hook_q_normed", "attn.hook_out"}),
        ({"qk_norm": False}, {"attn.hook_q", "attn.k.hook_out"}, {"attn.hook_q_normed"}),
        ({"qk_norm": True}, {"attn.hook_q_normed", "attn.k_norm.hook_out"}, {"attn.hook_q"}),
        ({"hooks": {"attn_proj": {}}}, {"attn.hook_out", "ln1_post.hook_out", "ln2_post.hook_in"}, set()),
        ({"architecture": "GraniteForCausalLM"}, {"hook_attn_out"}, {"hook_embed"}),
        (
            {"architecture": "Llama4ForCausalLM", "qk_norm": False},
            {"hook_embed", "attn.hook_v"},
            {"attn.hook_q", "attn.hook_rot_k"},
        ),
    ],
)
def test_names_depend_on_the_model(attrs: Attrs, there: set[str], absent: set[str]) -> None:
    found = {name for name, _ in names.equal_hooks({"hooks": {}, **attrs})}
    assert there <= found and not absent & found
    why = {name: names.why_not_equal(name, {"hooks": {}, **attrs}) for name in there | absent}
    assert {name for name, reason in why.items() if reason} == absent - {"attn.hook_out"}


def test_reasons_say_what_to_take_instead() -> None:
    old, normed, plain = {"hooks": {}}, {"hooks": {}, "qk_norm": True}, {"hooks": {}, "qk_norm": False}
    assert "too old" in (names.why_not_equal("attn.hook_q", old) or "")
    assert "after the norm" in (names.why_not_equal("attn.q.hook_out", normed) or "")
    assert "no norm" in (names.why_not_equal("attn.hook_k_normed", plain) or "")
    bloom, llama4 = {"architecture": "BloomForCausalLM"}, {"architecture": "Llama4ForCausalLM"}
    assert "resid_pre of layer 0" in (names.why_not_equal("hook_embed", bloom) or "")
    assert "another order" in (names.why_not_equal("attn.hook_rot_q", llama4) or "")
    assert "cap.numpy('logits')" in (names.why_not_equal("unembed.hook_out", old) or "")
    assert names.why_not_equal("hook_resid_pre", old) is None and names.why_not_equal("nothing", old) is None


def test_a_capture_reads_by_these_names(tmp_path: Path) -> None:
    cap = capture(tmp_path, qk_norm=False)
    for name, hook in (("attn.hook_q", "q"), ("attn.k.hook_out", "k"), ("hook_in", "resid_pre")):
        np.testing.assert_array_equal(cap[f"blocks.1.{name}"], cap.numpy(hook, 1))
    np.testing.assert_array_equal(cap["hook_embed"], cap.numpy("embed"))
    np.testing.assert_array_equal(cap["hook_resid_pre"], cap.numpy("resid_pre"))
    np.testing.assert_array_equal(cap["q"], cap.numpy("q"))


@pytest.mark.parametrize("architecture", ["GraniteForCausalLM", "GraniteMoeHybridForCausalLM"])
def test_a_name_of_another_tensor_is_refused_with_the_reason(architecture: str, tmp_path: Path) -> None:
    cap = capture(tmp_path, qk_norm=True, architecture=architecture)
    with pytest.raises(KeyError, match=r"'blocks.1.attn.hook_q' has no equivalent here: .*after the norm"):
        cap["blocks.1.attn.hook_q"]
    with pytest.raises(KeyError, match=r"'hook_embed' has no equivalent here: embed is the value before"):
        cap["hook_embed"]
    with pytest.raises(KeyError, match="suffixes that have"):
        cap["blocks.1.hook_nothing"]


# ---- the cache, without TransformerLens: tests/types has it with ---------------------------------------------------


@pytest.fixture
def cache_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """cache_of(specs, rows=10, **options): the activation cache of a store, with a fake of TransformerLens' class."""

    class ActivationCache:
        def __init__(self, cache_dict: Any, model: Any, has_batch_dim: bool) -> None:
            self.cache_dict = cache_dict

        def __getitem__(self, name: str) -> Any:
            return self.cache_dict[name]

    module = "dmi_connector.captures.activation_cache"
    monkeypatch.setitem(sys.modules, "transformer_lens", SimpleNamespace(ActivationCache=ActivationCache))
    monkeypatch.delitem(sys.modules, module, raising=False)

    def make(specs: list[ArraySpec], rows: int = 10, more: Attrs | None = None, **options: Any) -> Any:
        owner = kit.Store(1 << 20)
        attrs = {"num_layers": 2, "dims": {"heads": 2, "kv_heads": 1, "head_dim": 8}, **(more or {})}
        owner.write(tmp_path / "a.zarr", specs, rows, attrs=attrs, **options)
        assert owner.shutdown()
        return open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True).activation_cache()

    yield make
    sys.modules.pop(module, None)


def of_attention(*layers: int, keys: tuple[int, ...] = ()) -> list[ArraySpec]:
    return [ArraySpec("q_rot", "float32", layers, 16), ArraySpec("k_rot", "float32", keys or layers, 8)]


def test_the_reason_for_an_absent_pattern_is_that_of_its_layer(cache_of: Callable[..., Any]) -> None:
    cache = cache_of(of_attention(1))
    assert "blocks.1.attn.hook_pattern" in cache.cache_dict
    why = "it is computed from q_rot and k_rot of layer 0, which were not both captured"
    assert cache.why_absent("blocks.0.attn.hook_pattern") == why
    with pytest.raises(KeyError, match=f"'blocks.0.attn.hook_pattern' is not in the cache: {why}"):
        cache["blocks.0.attn.hook_pattern"]
    assert cache.why_absent("attn.hook_pattern").endswith("needs a block, as in blocks.1.attn.hook_pattern")
    assert cache.why_absent("attn.hook_rot_q").endswith("needs a block, as in blocks.1.attn.hook_rot_q")
    assert all(cache.absent.values())


def test_the_output_of_a_block_before_an_absent_post_norm_is_absent(cache_of: Callable[..., Any]) -> None:
    absent = cache_of([ArraySpec("attn_proj", "float32", (0,), 16)]).absent
    assert absent["mlp.hook_out"] == absent["ln2_post.hook_in"] == "mlp_proj was not captured"
    assert "attn.hook_out" not in absent and absent["ln1_post.hook_out"] == "attn_out was not captured"


def test_a_model_without_post_norms_has_no_names_of_them(cache_of: Callable[..., Any]) -> None:
    assert "mlp.hook_out" not in cache_of([ArraySpec("attn_out", "float32", (0,), 16)]).absent


def test_a_pattern_that_an_image_does_not_have_is_absent(cache_of: Callable[..., Any]) -> None:
    cache = cache_of(of_attention(1), more={"attention": {"image_blocks": True}, "media": [{"positions": [[3, 7]]}]})
    assert "blocks.1.attn.hook_pattern" not in cache.cache_dict
    assert "image tokens see later tokens" in cache.absent["attn.hook_pattern"]


def test_queries_and_keys_of_different_layers_give_no_pattern(cache_of: Callable[..., Any]) -> None:
    cache = cache_of(of_attention(0, keys=(1,)))
    assert cache.absent["attn.hook_pattern"].endswith("q_rot and k_rot of one layer, which were not both captured")


@pytest.mark.parametrize(("lost", "there"), [([16, 24], True), ([15, 24], False)])
def test_missing_rows_after_the_end_are_not_keys_of_a_pattern(
    cache_of: Callable[..., Any], lost: list[int], there: bool
) -> None:
    loss = Loss.of(Cause.ENDED_EARLY, [lost], finish="abort", end=16, expected=24)
    cache = cache_of(of_attention(1), 16, losses=[loss])
    assert ("blocks.1.attn.hook_pattern" in cache.cache_dict) is there
    if there:
        torch = pytest.importorskip("torch")
        assert cache["blocks.1.attn.hook_pattern"].shape == torch.Size((1, 2, 16, 16))
    else:
        assert "the store lacks some" in cache.why_absent("blocks.1.attn.hook_pattern")
