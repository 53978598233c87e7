# SPDX-License-Identifier: Apache-2.0
"""Rows of projections and summaries are not mistaken for those of the hook, even if they have the same width."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector.analysis.attribution import logit_attribution
from dmi_connector.analysis.directions import mean_difference
from dmi_connector.analysis.export import specforge
from dmi_connector.analysis.export.packed import PackedRows
from dmi_connector.analysis.export.safetensors import export_safetensors
from dmi_connector.analysis.heat import hook_heat
from dmi_connector.analysis.lens import logit_lens, uncertainty
from dmi_connector.analysis.patterns import attention_pattern, pattern_hooks
from dmi_connector.analysis.residual import drift, residual_norms
from dmi_connector.analysis.sketch import Sketch, sketch
from dmi_connector.analysis.training.token_dataset import TokenDataset
from dmi_connector.analysis.unembedding import Unembedding
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.captures.captures import captures_of
from dmi_connector.captures.finite import FiniteCheck
from dmi_connector.captures.own_values import check_own_values
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce import parse
from tests import storekit as kit

TOKENS, WIDTH, HEADS, LAYERS = 20, 16, 2, 2
DIMS = {"heads": HEADS, "kv_heads": HEADS, "head_dim": WIDTH // HEADS, "hidden": WIDTH}
ATTRS = {"dims": DIMS, "num_layers": LAYERS, "rotary": True}


def spec(hook: str, reduction: str | None, layers: tuple[int, ...] = (0, 1), width: int = WIDTH) -> ArraySpec:
    made = parse(reduction) if reduction else None
    if made is None:
        return ArraySpec(hook, "float32", layers, width)
    settings = {**made.settings(), "dtype": "float32", "width": width}
    stored = made.stored_width(width, "float32")
    return ArraySpec(hook, made.stored_dtype("float32"), layers, stored, reduce=settings)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Capture]:
    """make(specs, **attrs): a store with random bytes."""

    def made(*specs: ArraySpec, **attrs: Any) -> Capture:
        owner, path = kit.Store(4 << 20), tmp_path / f"{len(list(tmp_path.iterdir()))}.zarr"
        owner.write(path, list(specs), TOKENS, attrs={**ATTRS, **attrs})
        assert owner.shutdown(kit.PATIENCE)
        return open_capture(path, 0)

    return made


@pytest.fixture
def unembedding() -> Unembedding:
    rng = np.random.default_rng(0)
    return Unembedding(
        rng.random((30, WIDTH), np.float32), np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32), 1e-5
    )


def refuses(call: Callable[[], Any], hook: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"'{hook}' was stored as {kind}, from which this cannot be computed"):
        call()


def test_a_projection_as_wide_as_the_stream_gives_no_lens_no_attribution_and_no_export(
    make: Callable[..., Capture], unembedding: Unembedding, tmp_path: Path
) -> None:
    rest = [spec(hook, None) for hook in ("attn_out", "mlp_out")]
    final = spec("resid_final", f"rp({WIDTH})", ())
    one = make(spec("resid_pre", f"rp({WIDTH})"), final, *rest)
    assert one.numpy("resid_pre", 0).shape == (TOKENS, WIDTH), "the projection must be as wide as the hook"
    refuses(lambda: logit_lens(one, unembedding), "resid_pre", "rp")
    refuses(lambda: uncertainty(one, unembedding), "resid_final", "rp")
    refuses(lambda: logit_attribution(one, unembedding), "resid_pre", "rp")
    for ids, hook in (([0], "resid_pre"), ([LAYERS], "resid_final")):
        refuses(lambda ids=ids: export_safetensors(one.path, tmp_path / "x.safetensors", ids), hook, "rp")
    refuses(lambda: PackedRows(captures_of([one.path]), "resid_pre@0", 4), "resid_pre", "rp")
    for name, hook in (("blocks.0.hook_resid_pre", "resid_pre"), ("blocks.1.hook_resid_post", "resid_post")):
        refuses(lambda name=name: one[name], hook, "rp")
        refuses(lambda name=name: TokenDataset(captures_of([one.path]), name, 4), hook, "rp")
    np.testing.assert_array_equal(one["resid_pre"], one.numpy("resid_pre"))
    assert next(iter(TokenDataset(captures_of([one.path]), "resid_pre@0", 4))).shape == (4, WIDTH)
    draft = make(spec("resid_pre", None), spec("final_ln", f"rp({WIDTH})", ()))
    refuses(lambda: specforge.features(draft, None, "all", FiniteCheck()), "final_ln", "rp")
    assert residual_norms(one)[0].shape == (LAYERS + 1, TOKENS), "projections keep norms approximately"
    topk = make(spec("resid_pre", None), spec("resid_final", None, ()), rest[0], spec("mlp_out", "topk(4)"))
    refuses(lambda: logit_attribution(topk, unembedding), "mlp_out", "topk")
    assert logit_lens(topk, unembedding).ids.shape == (LAYERS + 1, TOKENS, 5)


def test_projected_queries_give_no_attention_and_a_summary_is_taken_instead(make: Callable[..., Capture]) -> None:
    keys = spec("k_rot", None)
    for width in (WIDTH, 4):
        one = make(spec("q_rot", f"rp({width})"), keys)
        refuses(lambda one=one: one.attention(0), "q_rot", "rp")
        refuses(lambda one=one: attention_pattern(one, 0), "q_rot", "rp")
    summary = spec("pattern", "attn(3)", width=HEADS)
    assert pattern_hooks(make(spec("q_rot", "rp(4)"), keys, summary)) == ("pattern",)
    assert pattern_hooks(make(spec("q_rot", "int8"), keys, summary)) == ("q_rot", "k_rot")
    assert pattern_hooks(make(spec("q_rot", None), keys, summary, start=3)) == ("pattern",), "earlier keys are missing"
    one = make(spec("q_rot", None, (0,)), spec("k_rot", None, (0,)), spec("pattern", "attn(3)", (1,), HEADS))
    assert [pattern_hooks(one, layer) for layer in (0, 1, -1)] == [("q_rot", "k_rot"), ("pattern",), ("pattern",)]


@pytest.mark.parametrize("pre", ["rp(4)", f"rp({WIDTH})"])
def test_a_hook_in_arrays_of_different_kinds_asks_for_one_layer(make: Callable[..., Capture], pre: str) -> None:
    one = make(spec("resid_pre", pre), spec("resid_final", None, ()))
    reads: list[Callable[[], Any]] = [
        lambda: one.numpy("resid_post"),
        lambda: one.shape("resid_post"),
        lambda: one.reduction("resid_post"),
        lambda: one.xarray(["resid_post"]),
    ]
    for read in reads:
        with pytest.raises(ValueError, match="layers of 'resid_post' were reduced in different ways; name one layer"):
            read()
    assert one.numpy("resid_post", -1).shape == (TOKENS, WIDTH) and one.reduction("resid_post", -1) is None
    assert str(getattr(one.reduction("resid_post", 0), "kind", None)) == "rp"
    refuses(lambda: check_own_values(one, "resid_post"), "resid_post", "rp")
    same = make(spec("resid_pre", "int8"), spec("resid_final", None, ()))
    check_own_values(same, "resid_post")
    assert same.numpy("resid_post").shape == same.shape("resid_post") == (LAYERS, TOKENS, WIDTH)


def test_norms_and_directions_of_summaries_components_and_integers_are_refused(make: Callable[..., Capture]) -> None:
    one = make(spec("pattern", "attn(3)", width=HEADS), ArraySpec("topk_ids", "int32", (0, 1), 2))
    refuses(lambda: hook_heat(one, "pattern"), "pattern", "attn")
    refuses(lambda: drift(one, "pattern", 0), "pattern", "attn")
    refuses(lambda: mean_difference(one, one, "pattern", 0), "pattern", "attn")
    for since in ("previous", "prompt"):
        with pytest.raises(ValueError, match="'topk_ids' holds integers, which have no direction"):
            drift(one, "topk_ids", 0, since)


def test_rows_of_different_projections_are_not_compared_or_merged(make: Callable[..., Capture], tmp_path: Path) -> None:
    """int8 keeps the values of the hook, so it may be compared."""
    one, other = (make(spec("resid_pre", f"rp({WIDTH},seed={seed})")) for seed in (1, 2))
    full, int8 = make(spec("resid_pre", None)), make(spec("resid_pre", "int8"))
    for first, second in ((one, other), (full, one)):
        for sets in ((first, second), ([first, second], first)):
            with pytest.raises(
                ValueError, match=f"{second.path.name} holds 'resid_pre' in another projection than oth"
            ):
                mean_difference(*sets, "resid_pre", 0)
        sketch(second, "resid_pre", 4).save(tmp_path / "second")
        with pytest.raises(
            ValueError, match="hooks that differ: resid_pre@0, resid_pre@1; sketch both with the same k"
        ):
            sketch(first, "resid_pre", 4).merge(Sketch.load(tmp_path / "second"))
    mean_difference(full, int8, "resid_pre", 0)
    for first, second in ((full, int8), (one, one)):
        sketch(first, "resid_pre", 4).merge(sketch(second, "resid_pre", 4))
