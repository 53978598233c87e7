# SPDX-License-Identifier: Apache-2.0
"""Values put aside until the end of a step land as if they had been reduced at once."""

from __future__ import annotations

import pytest
import torch

from dmi_connector.engine import at_end
from dmi_connector.engine.at_end import AtEnd
from dmi_connector.engine.kernels import RowWriter
from dmi_connector.layout import Segment
from dmi_connector.reduce import parse

TOPK, RP, INT8 = parse("topk(3)"), parse("rp(4)"), parse("int8")
SEGMENTS = [
    Segment("mlp_post", 1, "float32", 10, 64, TOPK),
    Segment("q", 1, "float32", 8, 128, INT8),
    Segment("resid_pre", 1, "bfloat16", 6, 160, RP),
    Segment("mlp_post", 4, "float32", 10, 192, TOPK),
    Segment("resid_pre", 4, "bfloat16", 6, 256, RP),
    Segment("resid_pre", 5, "bfloat16", 6, 320, RP),
    Segment("ln1", 5, "float32", 8, 384, None),
]
LATER = [s for s in SEGMENTS if s.reduction in (TOPK, RP)]
CPU = torch.device("cpu")


@pytest.mark.parametrize("tokens", [1, 5, at_end.MOST_TOKENS])
def test_rows_are_those_of_reducing_at_once(tokens: int) -> None:
    torch.manual_seed(tokens)
    aside = AtEnd(SEGMENTS, CPU)
    slots = torch.randperm(400)[:tokens] + 1
    mine = torch.full((401, 512), 7, dtype=torch.uint8)
    want = mine.clone()
    for step in range(2):  # the second step's values take the place of the first's
        for segment in LATER:
            places = aside.places([segment.offset])
            values = torch.randn(tokens, segment.width).to(getattr(torch, segment.dtype)) * (step + 1)
            segment.reduction.prepare(segment.width, CPU, segment.layer, 0)
            one = ([segment.width], values.dtype, [segment.offset], [segment.reduction], segment.layer)
            RowWriter(*one, places)(mine, slots, [values], aside.buffer)
            RowWriter(*one)(want, slots, [values])
        assert step or (mine == 7).all(), "not before the end"
        aside.reduce(mine, slots, tokens)
    assert torch.equal(mine, want)
    assert (mine[slots] != 7).any()


def test_large_steps_and_other_reductions_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    aside = AtEnd(SEGMENTS, CPU)
    assert not aside.takes(at_end.MOST_TOKENS + 1) and not aside.takes(0) and aside.takes(at_end.MOST_TOKENS)
    assert aside.places([64, 128, 384, 192]) == [0, None, None, 40]
    rows = torch.full((3, 512), 7, dtype=torch.uint8)
    for tokens in (0, at_end.MOST_TOKENS + 1):
        aside.reduce(rows, torch.zeros(600, dtype=torch.int64), tokens)
    assert (rows == 7).all()
    assert AtEnd([s for s in SEGMENTS if s.reduction is INT8], CPU).tokens == 0
    row_bytes = 128  # 2 * 10 * 4 + 3 * 6 * 2, filled up to a multiple of 64
    monkeypatch.setattr(at_end, "MOST_BYTES", 9 * row_bytes + 1)
    assert AtEnd(SEGMENTS, CPU).tokens == 9


def test_projections_of_many_layers_are_done_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(at_end, "reduce_layers", lambda *args: calls.append((args[4], args[5], args[2].shape)))
    aside = AtEnd(SEGMENTS, CPU)
    scratch = RP.scratch(6, "bfloat16")
    monkeypatch.setattr(at_end, "SCRATCH", 2 * 5 * scratch)
    aside.reduce(torch.zeros(3, 512, dtype=torch.uint8), torch.zeros(5, dtype=torch.int64), 5)
    assert calls == [(TOPK, (1, 4), (5, 2, 10)), (RP, (1, 4), (5, 2, 6)), (RP, (5,), (5, 1, 6))]
