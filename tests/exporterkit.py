# SPDX-License-Identifier: Apache-2.0
"""An Exporter over rows in main memory, without an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.messages import Close, Open, StepMetadata
from dmi_connector.engine.model.architectures import ARCHITECTURES
from dmi_connector.engine.owners import OWNERS
from dmi_connector.engine.transfer.exporter import Exporter
from dmi_connector.hooks import ModelDims, parse_selection
from dmi_connector.layout import hook_reductions, row_layouts
from dmi_connector.probes import with_probes
from dmi_connector.settings import ServerOptions
from dmi_connector.store.write.ring import Extent, Ring

DIMS = ModelDims("Qwen3ForCausalLM", 4, 512, 16, 16, 64, 512, 512)
SMALL = ModelDims("Qwen3ForCausalLM", 2, 8, 2, 2, 4, 16, 33)


def make_exporter(
    store_dir: object, tokens: int, dims: ModelDims = DIMS, rank: int = 0, tp: int = 1, **options: Any
) -> Exporter:
    """Make an exporter over `tokens` slots. The token id and position of each row are its slot number."""
    extra = {"store_dir": str(store_dir), "hooks": "q", "codec": "none", "writers": 1, **options}
    parsed = ServerOptions.parse(extra)
    dims, probes = with_probes(dims, parsed.probes, tp)
    selection = parse_selection(parsed.hooks, dims)
    reductions = {**hook_reductions(parsed.reduce, selection, dims, tp), **probes}
    layouts = row_layouts(selection, dims, "float32", tp, reductions)
    arch = ARCHITECTURES[dims.architecture]
    context = CaptureContext(parsed, arch, dims, selection, layouts, "float32", tp, OWNERS["target"], rank)
    rows = torch.zeros(tokens, layouts[rank].row_bytes, dtype=torch.uint8)
    rows.view(torch.int32)[:, :2] = torch.arange(tokens, dtype=torch.int32)[:, None]
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        model_config=SimpleNamespace(model="tiny"),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    layer: Any = SimpleNamespace(
        rows=rows,
        row_dtype=torch.float32,
        step=None,
        poisons=False,
        pages=0,
        cache_slots=tokens,
        step_tokens=0,
        scores=None,
    )
    return Exporter(context, layer, rank, config)


@dataclass
class Noted:
    """Fake `OpenCapture` that records its calls and does not release ring memory.

    chunks: (first row, number of rows, payload).
    """

    ring: Ring
    token_bytes: int
    chunks: list[tuple[int, int, bytes]] = field(default_factory=list)
    extents: list[Extent] = field(default_factory=list)
    closed: list[tuple[Any, ...]] = field(default_factory=list)

    def parcel(self, extent: Extent, parts: list[tuple[Noted, int, int, int]]) -> None:
        self.extents.append(extent)
        for noted, first, count, offset in parts:
            payload = self.ring.view(extent)[offset : offset + noted.token_bytes * count]
            noted.chunks.append((first, count, payload.tobytes()))

    def close(self, *what: Any, **_more: Any) -> None:
        self.closed.append(what)


def begin(exporter: Exporter, number: int, prompt: int, start: int = 0) -> Noted:
    """Open a capture of all hooks whose rows go to a `Noted`."""
    hooks = dict(exporter.context.selection.hooks)
    opened = Open(number, f"/x/{number}.zarr", hooks, f"r{number}", None, start, prompt, {"prompt_len": prompt})
    exporter.before_forward(StepMetadata(opens=[opened]))
    capture = exporter.captures[number]
    noted = Noted(exporter.ring, capture.layout.payload.token_bytes)
    capture.out = noted  # type: ignore[assignment]
    return noted


def closing(number: int, length: int, **more: Any) -> Close:
    """The end message of a capture of `length` rows."""
    given = {"rows": [], "samples": 0, "token_ids": list(range(length)), "attrs": {}, "losses": [], **more}
    return Close(capture=number, length=length, **given)
