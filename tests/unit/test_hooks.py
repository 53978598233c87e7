# SPDX-License-Identifier: Apache-2.0
"""Hook names: selections, refusals, and the row layout that results."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmi_connector.hooks import (
    ALIASES,
    HOOKS,
    PRESETS,
    USUAL,
    ModelDims,
    Selection,
    SelectionError,
    hook_dtype,
    narrow,
    parse_selection,
)
from dmi_connector.layout import (
    AXES,
    HEADER_BYTES,
    ROW_ALIGN,
    ROW_BYTES_ALIGN,
    hook_reductions,
    row_layouts,
)
from dmi_connector.ranks import shard_of
from dmi_connector.reduce import ReduceError, from_settings, parse
from dmi_connector.settings import ServerOptions
from dmi_connector.wording import suggest

DENSE = ModelDims("Dense", 8, hidden=64, heads=4, kv_heads=2, head_dim=32, intermediate=96, vocab=512)
MIXED = ModelDims("Mixed", 4, 64, 4, 2, head_dim=32, intermediate=96, vocab=512, experts=5, top_k=3, moe_layers=(1, 3))
LEARNED = ModelDims("Learned", 3, 128, 4, 4, head_dim=32, intermediate=512, vocab=512, features=USUAL - {"rotary"})
LATENT = ModelDims(
    "Latent",
    3,
    hidden=64,
    heads=4,
    kv_heads=4,
    head_dim=24,
    intermediate=96,
    vocab=512,
    features=USUAL | {"latent"},
    v_head_dim=20,
    kv_lora_rank=40,
    qk_rope_head_dim=8,
)
HYBRID = ModelDims(
    "Hybrid",
    4,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate=96,
    vocab=512,
    experts=5,
    top_k=3,
    moe_layers=(0,),
    features=USUAL | {"gated_mixer"},
    attn_layers=(1,),
    mixer_layers=(0, 2),
    mlp_layers=(0, 1, 3),
    mixer_proj=48,
    mixer_inner=40,
)
ALL = tuple(range(8))
ROOT = Path(__file__).parents[2]


def chosen(spec: str | list[str], dims: ModelDims = DENSE, only: Selection | None = None) -> dict[str, tuple]:
    return dict(parse_selection(spec, dims, only).hooks)


@pytest.mark.parametrize(
    ("spec", "hooks"),
    [
        ("q", {"q": ALL}),
        ("q@3", {"q": (3,)}),
        ("q@-1", {"q": (7,)}),
        ("q@2-4", {"q": (2, 3, 4)}),
        ("q@-3--1", {"q": (5, 6, 7)}),
        ("q@0-7", {"q": ALL}),
        ("q@-8--1", {"q": ALL}),
        ("q@0--1", {"q": ALL}),
        ("q@3-3", {"q": (3,)}),
        ("q@0-7:3", {"q": (0, 3, 6)}),
        ("q@0+5+2-3", {"q": (0, 2, 3, 5)}),
        ("q@1,q@2", {"q": (1, 2)}),
        (" k , q@0 ", {"q": (0,), "k": ALL}),
        ("hidden-states", {"resid_pre": ALL, "resid_final": (0,)}),
        ("hidden-states,mlp_post@1-2", {"resid_pre": ALL, "mlp_post": (1, 2), "resid_final": (0,)}),
        ("hidden-states,-resid_final", {"resid_pre": ALL}),
        ("q,-q@0-6", {"q": (7,)}),
        ("mlp_in@1", {"ln2": (1,)}),
        ("mlp_in@1,ln2@2", {"ln2": (1, 2)}),
        ("resid_post@0-1", {"resid_pre": (1, 2)}),
        ("resid_post@7", {"resid_final": (0,)}),
        ("resid_post", {"resid_pre": ALL[1:], "resid_final": (0,)}),
        ("*_rot@0", {"q_rot": (0,), "k_rot": (0,)}),
        ("token_ids,positions,q@0", {"q": (0,)}),
        ("logits", {"logits": (0,)}),
    ],
)
def test_a_selection_gives_the_hooks_and_layers_that_it_names(spec: str, hooks: dict[str, tuple[int, ...]]) -> None:
    assert chosen(spec) == hooks
    assert chosen(spec.split(",")) == hooks, "a list must mean the same as the string"


@pytest.mark.parametrize("spec", ["q@1", "q@1,mrope_positions", "q@1,-mrope_positions", "logits", "*,-*,q@0"])
def test_positions_on_the_axes_of_m_rope_are_always_selected(spec: str) -> None:
    """Models without these positions never have them. No selection changes that."""
    with_axes = replace(DENSE, rope_axes=3)
    served = parse_selection(spec, with_axes)
    assert served.hooks["mrope_positions"] == (0,) and len(served.hooks) == 2
    assert "mrope_positions" not in chosen(spec)
    own = [layer for name, layers in served.hooks.items() if HOOKS[name].scope == "layer" for layer in layers]
    assert narrow(served, None, own or None, with_axes).hooks["mrope_positions"] == (0,)
    with pytest.raises(SelectionError, match="selects nothing"):
        parse_selection("mrope_positions", with_axes)
    field = row_layouts(served, with_axes, "bfloat16")[0].find("mrope_positions", 0)
    assert field is not None and (field.dtype, field.width) == ("int32", 3)


def test_a_request_for_positions_that_the_model_lacks_says_so() -> None:
    served = parse_selection("q", DENSE)
    with pytest.raises(SelectionError, match="'mrope_positions' does not exist in Dense"):
        narrow(served, ["mrope_positions"], None, DENSE)


def test_selection_keeps_the_order_of_the_vocabulary() -> None:
    assert list(chosen("logits,mlp_out,embed,q")) == ["embed", "q", "mlp_out", "logits"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mlp_pots", "did you mean 'mlp_post'"),
        ("hiden-states", "did you mean 'hidden-states'"),
        ("xyzzy", "known names: embed"),
        ("q@8", "layers 0 to 7"),
        ("q@-9", "layers 0 to 7"),
        ("q@4-2", "empty range"),
        ("q@a", "layer range"),
        ("q@0-7:0", "layer range"),
        ("q@", "cannot read"),
        ("", "cannot read"),
        ("embed@0", "exists once"),
        ("topk_ids", "no experts"),
        ("q,-q", "selects nothing"),
        (
            "mrope_positions",
            r"'mrope_positions' does not exist in Dense, whose tokens have one position each .no M-RoPE.;",
        ),
        ("token_ids,mrope_positions@0", "'mrope_positions@0' does not exist in Dense"),
        ("-mrope_positions", "selects nothing"),
        ("token_ids", "selects nothing"),
        (["q", 3], "strings"),
    ],
)
def test_a_bad_selection_is_refused_with_what_to_write(spec: str, message: str) -> None:
    with pytest.raises(SelectionError, match=message) as caught:
        parse_selection(spec, DENSE)
    assert str(caught.value).startswith("hooks: ")


def test_a_preset_skips_what_a_model_lacks_but_a_name_does_not() -> None:
    assert "topk_ids" not in chosen("vllm-full")
    assert chosen("vllm-full", MIXED)["topk_ids"] == (1, 3)
    assert chosen("mlp_post", MIXED) == {"mlp_post": (0, 2)}
    assert set(chosen("attention", LEARNED)) == {"v", "z"}
    with pytest.raises(SelectionError, match="no rotary"):
        parse_selection("q_rot", LEARNED)
    with pytest.raises(SelectionError, match="mixtures of experts"):
        parse_selection("mlp_post@1", MIXED)


def test_latent_attention_has_a_latent_in_the_place_of_keys_and_values() -> None:
    assert set(chosen("attention", LATENT)) == {"q_rot", "kv_c", "k_pe", "z"}
    assert set(chosen("attention")) == {"q_rot", "k_rot", "v", "z"}
    widths = {name: LATENT.width(HOOKS[name]) for name in ("q", "q_rot", "kv_c", "k_pe", "z")}
    assert widths == {"q": 4 * 24, "q_rot": 4 * 24, "kv_c": 40, "k_pe": 8, "z": 4 * 20}
    for name in ("k", "v", "k_rot@1", "pattern"):
        with pytest.raises(SelectionError, match=rf"{name!r} does not exist in Latent, whose attention has kv_c and"):
            parse_selection(name, LATENT)
    with pytest.raises(SelectionError, match="'kv_c' does not exist in Dense, which has no latent attention"):
        parse_selection("kv_c", DENSE)


def test_the_choice_of_an_indexer_exists_in_layers_with_an_indexer() -> None:
    indexed = replace(LATENT, features=LATENT.features | {"indexer"}, index_topk=48, indexer_layers=(0, 2))
    assert chosen("indexer_topk", indexed) == {"indexer_topk": (0, 2)}
    assert indexed.width(HOOKS["indexer_topk"]) == 48 and not HOOKS["indexer_topk"].sharded
    with pytest.raises(SelectionError, match="'indexer_topk' does not exist in Latent, which has no indexer"):
        parse_selection("indexer_topk", LATENT)
    with pytest.raises(SelectionError, match="indexer_topk"):
        parse_selection("indexer_topk@1", indexed)


def test_presets_are_what_the_pages_promise() -> None:
    assert set(PRESETS["vllm-full"]) == set(HOOKS) - {
        *("q_rot", "k_rot", "pattern", "indexer_topk", "mlp_pre", "mlp_pre_linear")
    }
    assert PRESETS["hidden-states"] == ("resid_pre", "resid_final")
    assert PRESETS["attention"] == ("q_rot", "k_rot", "v", "kv_c", "k_pe", "z")
    usual = [name for name, hook in HOOKS.items() if hook.only not in ("post_norms", "mixer", "gated_mixer")]
    pages = {"README.md": [*usual, *PRESETS], "docs/HOOKS.md": [*HOOKS, *PRESETS, *ALIASES]}
    for page, names in pages.items():
        text = (ROOT / page).read_text()
        missing = [name for name in names if f"`{name}`" not in text]
        assert not missing, f"{page} does not name {missing}"


def test_a_request_can_select_only_what_the_server_captures() -> None:
    served = parse_selection("q@0-3,mlp", DENSE)
    assert chosen("q", only=served) == {"q": (0, 1, 2, 3)}
    assert chosen("vllm-full,-mlp_out", only=served) == {
        "q": (0, 1, 2, 3),
        "ln2": ALL,
        "mlp_post": ALL,
    }
    with pytest.raises(SelectionError, match=r"'z' is not captured by this server; it captures q, ln2"):
        parse_selection("z", DENSE, only=served)
    assert chosen("q@1+3,mlp_out@-1", only=served) == {"q": (1, 3), "mlp_out": (7,)}
    assert chosen("q,-q@2-7", only=served) == {"q": (0, 1)}, "excluded layers need not be captured"
    assert chosen("mlp@7,q*@5,embed*,q", only=served).keys() == {"q", "ln2", "mlp_post", "mlp_out"}
    for item, needs in (("q@7", "q@7"), ("q@0-5", "q@4+5"), ("q@-1+0", "q@7")):
        with pytest.raises(SelectionError) as caught:
            parse_selection(item, DENSE, only=served)
        assert str(caught.value) == (
            f"hooks: {item!r} needs {needs}, which this server does not capture; it captures q@0+1+2+3"
        )
    served = parse_selection("resid_pre@0+2", DENSE)
    assert chosen("resid_pre", only=served) == {"resid_pre": (0, 2)}
    assert chosen("resid_post@1", only=served) == {"resid_pre": (2,)}
    with pytest.raises(SelectionError, match=r"'resid_post@0-1' needs resid_pre@1, .* it captures resid_pre@0\+2"):
        parse_selection("resid_post@0-1", DENSE, only=served)
    assert chosen("resid_post", only=served) == {"resid_pre": (2,)}, (
        "without @, the layers that the server captures must be selected"
    )
    last = parse_selection("resid_post@-1", DENSE)
    assert chosen("resid_post", only=last) == {"resid_final": (0,)}
    for others in ("q", "resid_pre@0"):
        with pytest.raises(
            SelectionError, match=r"'resid_post' (is not captured|needs resid_pre@1.* does not capture)"
        ):
            parse_selection("resid_post", DENSE, only=parse_selection(others, DENSE))


@given(
    st.lists(st.sampled_from(sorted(HOOKS)), min_size=1, unique=True),
    st.sampled_from([DENSE, MIXED, LEARNED]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from([1, 2, 4]),
)
def test_row_layout_packs_without_overlap(names: list[str], dims: ModelDims, dtype: str, tp: int) -> None:
    hooks = {n: dims.layers_of(HOOKS[n]) for n in HOOKS if n in names and dims.layers_of(HOOKS[n])}
    layouts = row_layouts(Selection(hooks), dims, dtype, tp)
    selected = {(n, layer) for n, layers in hooks.items() if n != "logits" for layer in layers}
    for rank, layout in enumerate(layouts):
        end = HEADER_BYTES
        for field in layout.fields:
            assert field.offset % ROW_ALIGN == 0 and field.offset >= end, field
            assert field.dtype == hook_dtype(HOOKS[field.hook], dtype)
            end = field.offset + field.nbytes
            assert layout.find(field.hook, field.layer) == field
        assert layout.row_bytes >= end and layout.row_bytes % ROW_BYTES_ALIGN == 0
        assert layout.row_bytes == layouts[0].row_bytes and layout.writer == layouts[0].writer
        held = {(f.hook, f.layer) for f in layout.fields}
        owns = {name: shard_of(HOOKS[name], dims, tp, rank).owner for name in hooks}
        own = {at for at in selected if layout.writer.get(at, rank if owns[at[0]] else None) == rank}
        assert held == own | {at for at in selected if at[0] == AXES}
    assert {(f.hook, f.layer) for layout in layouts for f in layout.fields} == selected


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", sorted(HOOKS))
def test_the_owners_of_a_hook_hold_each_column_once(name: str, tp: int) -> None:
    dims = ModelDims("Wide", 2, 64, 8, 2, head_dim=32, intermediate=96, vocab=512, experts=4, top_k=2)
    dims = replace(dims, v_head_dim=20, kv_lora_rank=40, qk_rope_head_dim=8)
    shards = [shard_of(HOOKS[name], dims, tp, rank) for rank in range(tp)]
    owned = [s.shard for s in shards if s.owner]
    assert sorted(owned) == list(range(shards[0].shards)), "each slice must have one owner"
    assert shards[0].width * shards[0].shards == dims.width(HOOKS[name])
    if not HOOKS[name].sharded:
        assert owned == [0]


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("hooks", ["vllm-full", "hidden-states,logits", "resid_pre@0-4,q", "embed,resid_final,ln1@2"])
def test_ranks_share_whole_hooks_out_by_bytes(tp: int, hooks: str) -> None:
    """Rows of ranks differ in length by at most a hook that cannot be divided, or its longest part."""
    dims = ModelDims("Qwen3ForCausalLM", 12, 64, 24, 24, head_dim=8, intermediate=96, vocab=512)
    selection = parse_selection(hooks, dims)
    layouts = row_layouts(selection, dims, "float32", tp)
    writer = layouts[0].writer
    places = {(n, at) for n, layers in selection.row_hooks.items() for at in layers if not HOOKS[n].sharded or tp == 1}
    assert set(writer) == places and set(writer.values()) <= set(range(tp))
    held = [sum(f.nbytes for f in layout.fields) for layout in layouts]
    alone = [0]
    for name in {name for name, _ in places}:
        mine = [f for layout in layouts for f in layout.fields if f.hook == name]
        runs = {rank: [f.nbytes for f in mine if writer[name, f.layer] == rank] for rank in range(tp)}
        alone.append(max(sum(run) for run in runs.values()))
        numbers = [writer[name, f.layer] for f in sorted(mine, key=lambda f: f.layer)]
        assert sum(a != b for a, b in pairwise(numbers)) == len({*numbers}) - 1, "each rank must have one run of layers"
    assert max(held) - min(held) <= max(alone)


def test_the_layers_of_one_large_hook_are_shared_out() -> None:
    dims = ModelDims("Qwen3ForCausalLM", 36, 2560, 32, 8, 128, 9728, 151936)
    layouts = row_layouts(parse_selection("hidden-states", dims), dims, "bfloat16", 4)
    assert [len([f for f in layout.fields if f.hook == "resid_pre"]) for layout in layouts] == [9] * 4
    one = row_layouts(parse_selection("hidden-states", dims), dims, "bfloat16", 1)
    assert layouts[0].row_bytes < 0.29 * one[0].row_bytes


@pytest.mark.parametrize(
    ("hooks", "tp"),
    [("resid_pre,resid_mid", 4), ("attn_out,mlp_out,resid_pre", 4), ("mlp", 8), ("vllm-full,-logits", 8)],
)
def test_hooks_of_one_size_are_shared_out_although_one_alone_shortens_no_row(hooks: str, tp: int) -> None:
    """Several ranks have the longest row, until hooks of all of them are assigned to other ranks."""
    dims = ModelDims("Qwen3ForCausalLM", 36, 4096, 32, 8, 128, 12288, 151936)
    layouts = row_layouts(parse_selection(hooks, dims), dims, "bfloat16", tp)
    held = [sum(f.nbytes for f in layout.fields) for layout in layouts]
    assert max(held) <= 1.12 * sum(held) / tp


@pytest.mark.parametrize("tp", [4, 8])
def test_copies_of_a_key_head_take_no_room_on_the_ranks_that_do_not_write_them(tp: int) -> None:
    dims = ModelDims("Qwen3ForCausalLM", 2, 64, 8, 2, head_dim=8, intermediate=96, vocab=512)
    layouts = row_layouts(parse_selection("k,v", dims), dims, "float32", tp)
    owners = [rank for rank in range(tp) if shard_of(HOOKS["k"], dims, tp, rank).owner]
    assert len(owners) == 2
    assert [len(layout.fields) for layout in layouts] == [4 * (rank in owners) for rank in range(tp)]


def test_the_first_rule_that_matches_a_hook_gives_its_reduction() -> None:
    selection = parse_selection("vllm-full,q_rot,k_rot", DENSE)
    rules = [("resid_*", "rp(8)"), ("q,k", "int8"), ("mlp_in", "topk(4)"), ("mlp_post", "none"), ("*", "fp8")]
    found = hook_reductions(rules, selection, DENSE, 1)
    kinds = {name: reduction.kind for name, reduction in found.items()}
    assert kinds["resid_pre"] == kinds["resid_final"] == "rp" and kinds["q"] == "int8" and kinds["ln2"] == "topk"
    assert "mlp_post" not in kinds and "logits" not in kinds and kinds["z"] == "fp8"
    layout = row_layouts(selection, DENSE, "bfloat16", 1, found)[0]
    field = layout.find("q", 0)
    assert field is not None and field.nbytes == found["q"].stored_width(field.width, "bfloat16")
    assert layout.row_bytes < row_layouts(selection, DENSE, "bfloat16")[0].row_bytes


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("residd", "int8")], "'residd' is not captured: did you mean 'resid_"),
        ([("resid_x*", "int8")], r"pattern 'resid_x\*' matches no hook"),
        ([(" ,", "int8")], "reduce: ' ,' names no hook; give a pattern of hooks"),
        ([("logits", "int8")], "logits cannot have the reduction"),
        ([("topk_ids", "topk(1)")], "topk_ids cannot have the reduction"),
        ([("q", "topk(100000)")], "keeps more than the"),
        ([("k_rot", "int8")], "'k_rot' is not captured"),
        ([("q", "attn(8)")], r"q cannot have the reduction 'attn\(8\)'; leave it out"),
    ],
)
def test_reductions_that_cannot_be_applied_are_refused(rules: list[tuple[str, str]], message: str) -> None:
    selection = parse_selection("vllm-full", MIXED)
    with pytest.raises(ReduceError, match=message):
        hook_reductions(rules, selection, MIXED, 1)


WIDE = ModelDims("Wide", 2, hidden=1024, heads=8, kv_heads=2, head_dim=32, intermediate=2048, vocab=512)


@pytest.mark.parametrize(
    ("mode", "chosen_for"),
    [
        ("full8", {"resid_pre": "int8(32)", "k": "int8(32)", "mlp_post": "int8(32)"}),
        ("rp8", {"resid_pre": "rp(512)", "k": "int8(32)", "mlp_post": "rp(512)"}),
        ("topk8", {"resid_pre": "topk(64)", "k": "topk(64)", "mlp_post": "topk(64)"}),
        ("summary", {"resid_pre": "rp(512)", "k": "int8(32)", "mlp_post": "topk(64)"}),
        ("compact", {"resid_pre": "rp(512)", "k": "int8(32)", "mlp_post": "topk(64,sample=0)", "z": "rp(256)"}),
    ],
)
def test_a_mode_chooses_by_the_name_and_the_width_of_a_hook(mode: str, chosen_for: dict[str, str]) -> None:
    """Stores name the chosen reduction. `pattern` gets its summary if it is captured."""
    options = ServerOptions.parse({"store_dir": "/x", "reduce": mode})
    selection = parse_selection("vllm-full,pattern", WIDE)
    found = hook_reductions(options.reduce, selection, WIDE, 1)
    assert {name: found[name] for name in chosen_for} == {name: parse(spec) for name, spec in chosen_for.items()}
    assert found["pattern"] == parse("attn(4,half)" if mode == "compact" else "attn(8)") and "logits" not in found
    assert set(found) == set(selection.hooks) - {"logits"}
    for reduction in found.values():
        assert from_settings(reduction.settings()) == reduction
    narrow_slices = hook_reductions(options.reduce, selection, WIDE, 8)
    narrow = {"topk8": "topk(64)", "summary": "topk(64)", "compact": "topk(64,sample=0)"}
    assert narrow_slices["mlp_post"] == parse(narrow.get(mode, "int8(32)"))
    without = parse_selection("resid_pre", WIDE)
    assert set(hook_reductions(options.reduce, without, WIDE, 1)) == {"resid_pre"}
    own = hook_reductions([("resid_pre", "fp8"), ("*", mode)], parse_selection("resid_*", WIDE), WIDE, 1)
    assert own["resid_pre"] == parse("fp8") and own["resid_mid"] == found["resid_mid"]


def test_the_hook_pattern_must_be_named_and_reduced_to_a_summary() -> None:
    assert "pattern" not in chosen("*") and "pattern" not in chosen("vllm-full,*t*")
    selection = parse_selection("pattern@1-2,q", DENSE)
    found = hook_reductions([("*", "int8"), ("pat*", "attn(4)")], selection, DENSE, 2)
    assert [found[name].kind for name in ("pattern", "q")] == ["attn", "int8"]
    field = row_layouts(selection, DENSE, "bfloat16", 2, found)[0].find("pattern", 2)
    assert field is not None and field.nbytes == 2 * (4 * 4 + 4 * 4 + 4), "each of two ranks must have two heads"
    for rules, message in (
        ([], r"pattern can only be captured with a reduction; give one in reduce, as in \{'pattern': 'attn\(8\)'\}"),
        ([("*", "int8")], "pattern can only be captured with a reduction"),
        ([("pattern", "int8")], r"pattern cannot have the reduction 'int8'; give it attn\(m\)"),
        ([("pattern", "none")], r"pattern cannot have the reduction 'none'; give it attn\(m\)"),
        ([("pattern", "attn(65)")], "keep 1 to 64 positions"),
    ):
        with pytest.raises(ReduceError, match=message):
            hook_reductions(rules, selection, DENSE, 1)


def test_a_hook_that_cannot_be_reduced_may_be_named_with_none() -> None:
    selection = parse_selection("q,topk_ids,logits", MIXED)
    for rules in ([("topk_ids,logits", "none"), ("*", "int8")], [("*", "int8"), ("topk_ids,logits", "none")]):
        assert {name: one.kind for name, one in hook_reductions(rules, selection, MIXED, 1).items()} == {"q": "int8"}
    for name in ("topk_ids", "logits"):
        with pytest.raises(
            ReduceError, match=f"{name} cannot have the reduction 'int8'; leave it out or give it 'none'"
        ):
            hook_reductions([("*", "none"), (name, "int8")], selection, MIXED, 1)


def test_a_request_narrows_layers_and_keeps_hooks_that_exist_once() -> None:
    served = parse_selection("q@1-6,mlp_post,embed,logits", DENSE)
    assert narrow(served, None, None, DENSE) is served
    once = {"embed": (0,), "logits": (0,)}
    assert narrow(served, None, [1, -1], DENSE).hooks == {"q": (1,), "mlp_post": (1, 7), **once}
    assert narrow(served, None, [0, -8, 7], DENSE).hooks == {"mlp_post": (0, 7), **once}
    assert narrow(served, ["q", "embed"], [6, 5], DENSE).hooks == {"q": (5, 6), "embed": (0,)}
    for layer in (8, -9):
        with pytest.raises(SelectionError, match=f"dmi.layers: {layer} is outside this model; it has layers 0 to 7"):
            narrow(served, None, [0, layer], DENSE)
    for hooks, layers, lacking in ((["q"], [7], [7]), (["q"], [0, 1, -1], [0, -1]), (["embed"], [0], [0])):
        with pytest.raises(SelectionError) as caught:
            narrow(served, hooks, layers, DENSE)
        captured = "embed@0" if hooks == ["embed"] else "q@1+2+3+4+5+6"
        says = f"dmi.layers: {lacking} is in none of the chosen hooks; captured: {captured}"
        assert str(caught.value) == says, "a missing layer must be refused"


def test_only_a_near_name_is_suggested() -> None:
    assert suggest("mlp_pots", HOOKS) == ": did you mean 'mlp_post'?"
    assert suggest("q_rot", ["resid_pre", "mlp_out"]) == ""
    assert suggest("q@3", ["q_rot", "q"]) == ": did you mean 'q'?", "some commands take the layer as another option"


def test_layers_of_hybrid_models_have_the_hooks_of_their_blocks() -> None:
    """Layer 1 has attention, layers 0 and 2 have a mixer, and layer 3 only has an MLP. Layer 2 has no MLP."""
    of_attention = ("q", "k", "v", "q_rot", "k_rot", "z")
    assert chosen(",".join(of_attention), HYBRID) == dict.fromkeys(of_attention, (1,))
    assert chosen("mix_*", HYBRID) == dict.fromkeys(("mix_proj", "mix_core", "mix_z"), (0, 2))
    assert chosen("attn_out,mlp_out,mlp_post,topk_ids", HYBRID) == {
        "attn_out": (0, 1, 2),
        "topk_ids": (0,),
        "mlp_post": (1, 3),
        "mlp_out": (0, 1, 3),
    }
    assert chosen("resid_pre,ln1", HYBRID) == dict.fromkeys(("resid_pre", "ln1"), (0, 1, 2, 3))
    assert [HYBRID.width(HOOKS[name]) for name in ("mix_proj", "mix_core", "mix_z")] == [48, 40, 40]
    assert not chosen("vllm-full,attention").keys() & {"mix_proj", "mix_core", "mix_z"}


@pytest.mark.parametrize(
    ("spec", "dims", "why"),
    [
        ("q@0", HYBRID, "does not exist in Hybrid in those layers, which have no attention"),
        (
            "q",
            replace(DENSE, only=("embed", "mlp_out")),
            "in Dense, of which these hooks are known: embed, mlp_out",
        ),
        ("mix_z@1", HYBRID, "does not exist in Hybrid in those layers, which have no mixer"),
        ("attn_out@3", HYBRID, "in those layers, which have neither attention nor a mixer"),
        ("mlp_out@2", HYBRID, "in those layers, which have no MLP"),
        ("mix_core", replace(HYBRID, features=USUAL), "Hybrid, which has no norm after the core of its mixers"),
        ("mix_proj", DENSE, "Dense, which has attention in every layer"),
        ("mix_core", DENSE, "Dense, which has attention in every layer"),
    ],
)
def test_a_hook_of_another_kind_of_layer_is_refused_with_the_reason(spec: str, dims: ModelDims, why: str) -> None:
    with pytest.raises(SelectionError, match=why):
        parse_selection(spec, dims)
