# SPDX-License-Identifier: Apache-2.0
"""The layers that each rank writes for a request, for every choice of layers and several numbers of ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

pytest.importorskip("vllm")
from dmi_connector.engine.context import CaptureContext, Drafting
from dmi_connector.engine.model.architectures import ARCHITECTURES
from dmi_connector.engine.owners import OWNERS
from dmi_connector.engine.scheduler.quota import row_bytes
from dmi_connector.engine.transfer.chunk_layout import ChunkLayout, chunk_layout, sent_bytes
from dmi_connector.hooks import ModelDims, parse_selection
from dmi_connector.layout import row_layouts
from dmi_connector.option_values import OptionError
from dmi_connector.reduce.int8 import Int8
from dmi_connector.settings import ServerOptions

KV_HEADS = 2
"""With 4 or 8 ranks, several ranks share a key/value head."""


def make_context(directory: Path, hooks: str, layers: int, tp: int, stages: tuple[range, ...] = ()) -> CaptureContext:
    dims = ModelDims("Qwen3ForCausalLM", layers, 256, 8, KV_HEADS, 32, 512, 512)
    options = ServerOptions.parse({"store_dir": str(directory), "hooks": hooks})
    selection = parse_selection(options.hooks, dims)
    layouts = row_layouts(selection, dims, "float32", tp, None, stages)
    arch = ARCHITECTURES["Qwen3ForCausalLM"]
    return CaptureContext(options, arch, dims, selection, layouts, "float32", tp, OWNERS["target"], stages=stages)


def written(layout: ChunkLayout, hook: str) -> list[int]:
    """The layers of a hook that a rank writes."""
    parts = [spec for spec in layout.payload.arrays if spec.name == hook]
    return [layer for spec in parts for layer in spec.layers[spec.first_layer :][: spec.local_layers]]


def test_chunks_that_no_decoder_could_read_are_refused(tmp_path: Path) -> None:
    """8,192 rows of 65,536 float32 logits have 2 GiB, more than a Blosc frame can hold."""
    dims = ModelDims("Qwen3ForCausalLM", 2, 256, 8, KV_HEADS, 32, 512, 65536)
    for chunk, codec, refused in (
        (8192, "zstd", True),
        (8192, "lz4", True),
        (8191, "zstd", False),
        (8192, "none", False),
    ):
        given = {"store_dir": str(tmp_path), "hooks": "logits,q", "chunk_tokens": chunk, "codec": codec}
        options = ServerOptions.parse(given)
        context = replace(make_context(tmp_path, "logits,q", 2, 1), options=options, dims=dims)
        if not refused:
            assert sent_bytes(context)[0] > 0
            continue
        said = (
            f"chunk_tokens: 8192 rows of logits are too large for a chunk with codec '{codec}'; give at most 8191, or"
        )
        with pytest.raises(OptionError, match=said):
            sent_bytes(context)


def test_an_odd_number_of_16_bit_values_is_refused(tmp_path: Path) -> None:
    """Rows are gathered in words of 4 bytes."""
    context = make_context(tmp_path, "mlp_post", 2, 1)
    odd = replace(context.dims, intermediate=97)
    for dtype, reductions in (("float32", {}), ("bfloat16", {"mlp_post": Int8()}), ("bfloat16", {})):
        layouts = row_layouts(context.selection, odd, dtype, 1, reductions)
        context = replace(context, dims=odd, dtype=dtype, layouts=layouts)
        if dtype == "float32" or reductions:
            assert sent_bytes(context)[0] > 0
            continue
        with pytest.raises(OptionError, match=r"hooks: mlp_post has 97 values .* reduce it to int8, or set dtype to"):
            sent_bytes(context)


@pytest.mark.parametrize(("tp", "layers"), [(4, 6), (8, 10)])
def test_each_choice_of_layers_is_written_once_by_its_owner(tp: int, layers: int, tmp_path: Path) -> None:
    """Each rank owns runs of two layers, and a request may choose any layers."""
    context = make_context(tmp_path, "resid_pre", layers, tp)
    owner = context.layout.writer
    assert len(set(owner.values())) == layers // 2, owner
    for count in range(1, layers + 1):
        for chosen in combinations(range(layers), count):
            found: Counter[int] = Counter()
            for rank in range(tp):
                layout = chunk_layout(context, {"resid_pre": chosen}, rank)
                mine = written(layout, "resid_pre")
                assert all(owner["resid_pre", layer] == rank for layer in mine), (chosen, rank, mine)
                fields = [context.layouts[rank].find("resid_pre", layer) for layer in mine]
                copied = [(int(at), int(size)) for at, size, _ in layout.table[:-1]]
                assert copied == [(f.offset, f.nbytes) for f in fields if f is not None], (chosen, rank)
                found.update(mine)
            assert found == Counter(chosen), f"layers {chosen}: written {dict(found)}"


STAGES = {"even": (range(3, 6), range(3)), "uneven": (range(5, 6), range(2, 5), range(2))}
"""The layers of each pipeline stage, of six layers, the last stage first."""


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_each_stage_writes_its_layers(stages: tuple[range, ...], tmp_path: Path) -> None:
    """A request may choose any layers. Rank 0 writes the logits."""
    context = make_context(tmp_path, "embed,resid_pre,q,resid_final,logits", 6, 1, stages)
    assert context.ranks == len(stages)
    for count in range(1, 7):
        for chosen in combinations(range(6), count):
            hooks = {"embed": (0,), "resid_pre": chosen, "q": chosen, "resid_final": (0,), "logits": ()}
            for rank, layers in enumerate(stages):
                layout = chunk_layout(context, hooks, rank)
                mine = [layer for layer in chosen if layer in layers]
                assert written(layout, "resid_pre") == written(layout, "q") == mine, (chosen, rank)
                first, last = rank == len(stages) - 1, rank == 0
                names = {spec.name for spec in layout.payload.arrays}
                assert ("embed" in names, "resid_final" in names, "logits" in names) == (first, last, last)
                fields = [f for hook in hooks for layer in mine if (f := context.layouts[rank].find(hook, layer))]
                copied = {(int(at), int(size)) for at, size, _ in layout.table[:-1]}
                assert copied >= {(f.offset, f.nbytes) for f in fields if f.hook in ("resid_pre", "q")}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_each_slice_of_a_hook_is_written_once(tp: int, tmp_path: Path) -> None:
    context = make_context(tmp_path, "resid_pre,q,k,mlp_post,logits", 3, tp)
    layouts = [chunk_layout(context, context.selection.hooks, rank).payload for rank in range(tp)]
    for hook, slices in {"q": tp, "mlp_post": tp, "k": min(tp, KV_HEADS), "logits": 1}.items():
        specs = [spec for layout in layouts for spec in layout.arrays if spec.name == hook]
        assert sorted(spec.rank for spec in specs) == list(range(slices)), hook
        assert all(spec.shards == slices for spec in specs), hook
    known = {spec.name for spec in (*layouts[0].arrays, *layouts[0].elsewhere)}
    assert known == set(context.selection.hooks), "rank 0 must know all arrays, because it writes their documents"


HOOKS = "embed,resid_pre,q,k,mlp_post,logits"


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_limits_count_the_bytes_of_all_ranks(tp: int, tmp_path: Path) -> None:
    """Values per row: embed once, and for each of 3 layers resid_pre 256, q 8 heads of 32, k 2 heads of 32, mlp_post
    512. Token arrays have 9 bytes.
    """
    context = make_context(tmp_path, HOOKS, 3, tp)
    row = 4 * (256 + 3 * (256 + 8 * 32 + 2 * 32 + 512)) + 9
    assert row_bytes(context, context.selection) == (row, 4 * 512)
    drafting = replace(context, drafting=Drafting("ngram", 3, False))
    assert row_bytes(drafting, context.selection) == (row + 1, 4 * 512), "draft_index takes one more byte"
