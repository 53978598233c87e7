# SPDX-License-Identifier: Apache-2.0
"""Probes at the end of a step give the same rows as immediate ones, and keep within their memory limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dmi_connector.engine.kernels.reduce import reduce_layers_torch, reduce_layers_triton
from dmi_connector.engine.kernels.row_writer import RowWriter
from dmi_connector.engine.taps import deferred, op
from dmi_connector.engine.taps.deferred import DeferredReductions
from dmi_connector.layout import RowField
from dmi_connector.reduce import Reduction
from dmi_connector.reduce.latents import Latents
from dmi_connector.reduce.probe import Probe
from tests import kernelkit as kit
from tests.probekit import save_encoder, save_probe

CPU = torch.device("cpu")
WIDTH = 16


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> list[RowField]:
    folder = tmp_path_factory.mktemp("probes")
    many = Probe.load(str(save_probe(folder / "many.safetensors", "resid_pre", (1, 4), WIDTH, 3)))
    deep = Probe.load(str(save_probe(folder / "deep.safetensors", "q", (1,), WIDTH, 8, 1, norm="unit")))
    top = replace(Probe.top_of("mlp_post", 3, "top(mlp_post,3)"), layers=(1, 4))
    sae = Latents.load(str(save_encoder(folder / "sae", WIDTH, 90)), "resid_pre", 4, 7)

    def field(name: str, layer: int, offset: int, probe: Probe | Latents) -> RowField:
        return RowField(f"probe.{name}", layer, "bfloat16", WIDTH, offset, probe, probe.source)

    return [
        field("many", 1, 64, many),
        field("deep", 1, 80, deep),
        field("many", 4, 96, many),
        field("sae", 4, 128, sae),
        field("top", 4, 192, top),
    ]


@pytest.mark.parametrize("tokens", [1, 9])
def test_probes_at_the_end_of_a_step_equal_those_at_once(fields: list[RowField], tokens: int) -> None:
    torch.manual_seed(tokens)
    buffered = DeferredReductions(fields, CPU)
    slots = torch.randperm(20)[:tokens] + 1
    mine = torch.full((21, 256), 7, dtype=torch.uint8)
    want = mine.clone()
    for layer in (1, 4):
        here = [f for f in fields if f.layer == layer]
        reductions: list[Reduction | None] = [f.reduction for f in here]
        offsets = [f.offset for f in here]
        values = [torch.randn(tokens, WIDTH).to(torch.bfloat16) for _ in here]
        for f in here:
            assert f.reduction is not None
            f.reduction.prepare(WIDTH, CPU, layer, 0)
        one = ([WIDTH] * len(here), torch.bfloat16, offsets, reductions, layer)
        RowWriter(*one, buffered.places(offsets))(mine, slots, values, buffered.buffer)
        RowWriter(*one)(want, slots, values)
    buffered.reduce(mine, slots, tokens)
    assert torch.equal(mine, want) and (mine[slots] != 7).any()
    waiting = [place is not None for place in buffered.places([f.offset for f in fields])]
    assert waiting == [False, True, False, True, True], "a linear head must run at once in its own kernel"


@pytest.mark.parametrize("number", range(5))
def test_kernels_write_what_torch_does(fields: list[RowField], number: int) -> None:
    """Several layers run at the end of a step, and one layer runs at once."""
    probe, layer, tokens = fields[number].reduction, fields[number].layer, 5
    assert probe is not None
    probe.prepare(WIDTH, kit.DEVICE, layer, 0)
    torch.manual_seed(number)
    values = torch.randn(tokens, 2, WIDTH, device=kit.DEVICE).to(torch.bfloat16)
    step = -(-probe.stored_width(WIDTH, "bfloat16") * 4 // 16) * 16
    offsets = torch.tensor([64 + step, 64], device=kit.DEVICE)
    slots = kit.random_slots(tokens)
    slots[2] = -1
    twin, rows = kit.untouched(kit.ROWS, 64 + 2 * step), kit.untouched(kit.ROWS, 64 + 2 * step)
    reduce_layers_torch(twin, slots, values, offsets, probe, (layer, layer))
    reduce_layers_triton(rows, slots, values, offsets, probe, (layer, layer))
    twin[0] = kit.UNTOUCHED
    check_same(rows, twin, probe)
    assert (rows[slots[0]] != kit.UNTOUCHED).any()
    writer = RowWriter([WIDTH], torch.bfloat16, [64], [probe], layer)
    for write, out in ((writer.in_torch, twin), (writer.in_triton, rows)):
        out.fill_(kit.UNTOUCHED)
        write(out, slots, [values[:, 0].contiguous()])
    twin[0] = kit.UNTOUCHED
    check_same(rows, twin, probe)


def check_same(rows: torch.Tensor, twin: torch.Tensor, probe: Reduction) -> None:
    """Fail unless rows are equal. Our kernels add in another order than a library, so scores may differ by rounding."""
    if probe.one_kernel:
        torch.testing.assert_close(rows.view(torch.float32), twin.view(torch.float32), rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(rows, twin)


def test_a_large_encoder_takes_few_tokens_at_a_time(fields: list[RowField], monkeypatch: pytest.MonkeyPatch) -> None:
    sae = Latents("resid_pre", (4,), 1 << 17, 32, "0" * 64)
    scratch = sae.scratch(4096, "bfloat16")
    assert scratch > 1 << 20
    row = RowField("probe.sae", 4, "bfloat16", 4096, 64, sae, "resid_pre")
    assert DeferredReductions([row], CPU).tokens == deferred.SCRATCH // scratch < 64
    assert op.tokens_at_once([torch.zeros(2, 4096)], [sae]) == 64
    assert DeferredReductions(fields, CPU).tokens == deferred.MOST_TOKENS
