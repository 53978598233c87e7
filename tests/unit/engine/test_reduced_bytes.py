# SPDX-License-Identifier: Apache-2.0
"""Bytes of reduced rows in the cache, on the link and on disk match the reductions, for the sizes of Qwen3-4B."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.model.architectures import ARCHITECTURES
from dmi_connector.engine.owners import OWNERS
from dmi_connector.engine.transfer.chunk_layout import ChunkLayout, chunk_layout
from dmi_connector.hooks import HOOKS, ModelDims, parse_selection
from dmi_connector.layout import hook_reductions, row_layouts
from dmi_connector.settings import ServerOptions
from tests import storekit as kit

DIMS = ModelDims("Qwen3ForCausalLM", 36, 2560, 32, 8, 128, 9728, 151936)
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "int8": ("vllm-full,-logits", {"*": "int8"}),
    "fp8": ("vllm-full,-logits", {"*": "fp8"}),
    "rp": ("resid_pre,resid_mid", {"*": "rp(512)"}),
    "topk": ("mlp_post", {"*": "topk(64)"}),
    "mixed": ("vllm-full,-logits", {"resid_*": "rp(512)", "mlp_post": "topk(64)", "*": "int8"}),
}
SAMPLE = 4 + 16 + 4
"""Bytes of the sample of topk(64): its start, its values, and their scale."""
TOKENS = 256


def layouts(hooks: str, reduce: dict[str, str]) -> tuple[int, ChunkLayout]:
    """(bytes of a row in the cache, layout of a chunk) of a bfloat16 model."""
    options = ServerOptions.parse({"store_dir": "s", "hooks": hooks, "reduce": reduce})
    selection = parse_selection(options.hooks, DIMS)
    layouts = row_layouts(selection, DIMS, "bfloat16", 1, hook_reductions(options.reduce, selection, DIMS, 1))
    arch = ARCHITECTURES["Qwen3ForCausalLM"]
    context = CaptureContext(options, arch, DIMS, selection, layouts, "bfloat16", 1, OWNERS["draft"])
    return layouts[0].row_bytes, chunk_layout(context, dict(selection.hooks), 0)


def file_bytes(folder: Path, layout: ChunkLayout) -> int:
    """Bytes of the files of the arrays, with codec none. Only two layers of each array are written."""
    arrays = [type(a)(**{**vars(a), "layers": a.layers[:2]}) for a in layout.payload.arrays]
    stores = kit.Store(64 << 20)
    stores.write(folder / "a.zarr", arrays, TOKENS, codec="none")
    assert stores.shutdown(kit.PATIENCE)
    files = [p for a in arrays for p in (folder / "a.zarr" / a.name / "c").rglob("*") if p.is_file()]
    return sum(p.stat().st_size for p in files)


def nominal(hooks: str, reduce: dict[str, str]) -> float:
    """Raw bytes divided by those of the table in docs/REDUCTIONS.md."""
    selection = parse_selection(hooks, DIMS)
    rules = hook_reductions(tuple(reduce.items()), selection, DIMS, 1)
    raw = kept = 0
    for hook, layers in selection.row_hooks.items():
        width = DIMS.width(HOOKS[hook])
        sizes = {"int8": width + 4, "fp8": width + 4, "rp": 512 + 4, "topk": 64 * (2 + 1) + 4 + SAMPLE}
        after = sizes[rules[hook].kind]
        raw, kept = raw + 2 * width * len(layers), kept + after * len(layers)
    return raw / kept


@pytest.mark.parametrize("case", CASES)
def test_reduced_bytes_fall_by_the_nominal_factor(case: str, tmp_path: Path) -> None:
    hooks, reduce = CASES[case]
    (row, plain), (reduced_row, reduced) = layouts(hooks, {}), layouts(hooks, reduce)
    factor = nominal(hooks, reduce)
    assert row / reduced_row == pytest.approx(factor, rel=0.03), "bytes in the cache"
    assert plain.payload.token_bytes / reduced.payload.token_bytes == pytest.approx(factor, rel=0.03), (
        "bytes on the link"
    )
    small = "resid_pre,q,mlp_post" if "vllm-full" in hooks else hooks
    (_, plain), (_, reduced) = layouts(small, {}), layouts(small, reduce)
    for name in ("raw", "reduced"):
        (tmp_path / name).mkdir()
    found = file_bytes(tmp_path / "raw", plain) / file_bytes(tmp_path / "reduced", reduced)
    assert found == pytest.approx(nominal(small, reduce), rel=0.03), "bytes on disk"
