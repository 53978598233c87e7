# SPDX-License-Identifier: Apache-2.0
"""The kernel of linear heads and its torch twin write the head's outputs into their rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from dmi_connector.engine.kernels import linear
from dmi_connector.engine.kernels.linear import linear_rows
from dmi_connector.engine.kernels.row_writer import RowWriter
from dmi_connector.reduce.probe import MOST_OUTPUTS, Probe
from tests import kernelkit as kit
from tests.probekit import save_probe, scores

CASES = [
    (1, 1, "none"),
    (2560, 16, "none"),
    (2561, 1, "sigmoid"),
    (300, 3, "softmax"),
    (640, 5, "sigmoid"),
    (9000, 2, "softmax"),
    (33, MOST_OUTPUTS, "softmax"),
    (48, MOST_OUTPUTS - 1, "none"),
]
"""(width, outputs, output function). The widest head loads its weights in several pieces."""


@pytest.mark.parametrize("dtype", ["float32", kit.NARROW])
@pytest.mark.parametrize(("width", "outputs", "output"), CASES, ids=lambda part: str(part))
def test_the_outputs_are_those_of_the_head(tmp_path: Path, width: int, outputs: int, output: str, dtype: str) -> None:
    """Outputs are within 1e-5 of the head in float64. Other bytes of the row and other rows do not change."""
    path = save_probe(tmp_path / "risk.safetensors", "resid_pre", (3,), width, outputs, output=output)
    probe, tokens = Probe.load(str(path)), 5
    assert probe.one_kernel
    probe.prepare(width, kit.DEVICE, 3, 0)
    torch.manual_seed(outputs)
    kind = getattr(torch, dtype)
    values = torch.randn(tokens, width + 7, device=kit.DEVICE).to(kind)[:, :width]  # rows are not adjacent
    slots = kit.random_slots(tokens)
    slots[1] = -1
    offset = 16
    row_bytes = 64 + 4 * MOST_OUTPUTS
    rows, twin = kit.untouched(kit.ROWS, row_bytes), kit.untouched(kit.ROWS, row_bytes)
    writer = RowWriter([width], kind, [offset], [probe], 3)
    writer.in_triton(rows, slots, [values])
    writer.in_torch(twin, slots, [values])
    twin[0] = kit.UNTOUCHED  # the twin writes padding there
    exact = scores(path, values.cpu().float().numpy(), 3)
    for token in (0, 2, 3, 4):
        for found in (rows, twin):
            got = found[slots[token], offset : offset + 4 * outputs].view(torch.float32).cpu().numpy()
            np.testing.assert_allclose(got, exact[token], rtol=0, atol=1e-5)
    for found in (rows, twin):
        for token in (0, 2, 3, 4):
            found[slots[token], offset : offset + 4 * outputs] = kit.UNTOUCHED
        assert (found == kit.UNTOUCHED).all()


@pytest.mark.parametrize("output", ["none", "sigmoid", "softmax"])
def test_nan_and_infinity_give_the_same_results_as_in_torch(tmp_path: Path, output: str) -> None:
    """Other rows of the step have correct scores."""
    path = save_probe(tmp_path / "risk.safetensors", "resid_pre", (), 40, 3, output=output)
    probe = Probe.load(str(path))
    probe = probe.bind("resid_pre", (0,), 40, 1)
    probe.prepare(40, kit.DEVICE, 0, 0)
    values = torch.ones(5, 40, device=kit.DEVICE)
    values[0, 3], values[1, 3], values[2, :2], values[3] = torch.nan, torch.inf, torch.inf, -1e30
    slots = torch.arange(1, 6, device=kit.DEVICE)
    rows = kit.untouched(kit.ROWS, 64)
    linear_rows(rows, slots, values, probe.head(0, kit.DEVICE), 0)
    found, twin = rows[1:6, :12].contiguous().view(torch.float32), probe.before(values)
    torch.testing.assert_close(found, twin, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found[0].isnan().all() and found[4].isfinite().all()


def test_many_outputs_and_heads_with_a_norm_are_left_to_a_library(tmp_path: Path) -> None:
    more = save_probe(tmp_path / "more.safetensors", "resid_pre", (3,), 8, MOST_OUTPUTS + 1)
    normed = save_probe(tmp_path / "normed.safetensors", "resid_pre", (3,), 8, 1, norm="unit")
    deep = save_probe(tmp_path / "deep.safetensors", "resid_pre", (3,), 8, 4, 1)
    for probe in (*map(Probe.load, map(str, (more, normed, deep))), Probe.norm_of("resid_pre", "norm(resid_pre)")):
        assert not probe.one_kernel and probe.scratch(8, "float32") > 0


def test_a_rank_leaves_the_parts_of_a_sum_as_they_are(tmp_path: Path) -> None:
    """The output function applies to the sum over all ranks."""
    path = save_probe(tmp_path / "risk.safetensors", "z", (3,), 12, 2, output="sigmoid")
    probe, parts = Probe.load(str(path)).bind("z", (3,), 6, 2), []
    values = torch.randn(4, 12, device=kit.DEVICE)
    for shard in range(2):
        probe.prepare(6, kit.DEVICE, 3, shard)
        rows = kit.untouched(kit.ROWS, 64)
        mine = values[:, 6 * shard : 6 * shard + 6]
        linear_rows(rows, torch.arange(4, device=kit.DEVICE), mine, probe.head(3, kit.DEVICE), 8)
        parts.append(rows[:4, 8:16].contiguous().view(torch.float32).cpu().numpy())
    np.testing.assert_allclose(probe.merge(parts), scores(path, values.cpu().numpy(), 3), rtol=0, atol=1e-5)


def test_weights_are_read_in_pieces_that_fit() -> None:
    """The cases above cover each path through the kernel."""
    pieces = []
    for width, outputs, output in CASES:
        launch, _ = linear._launch(width, outputs, output, torch.float32, torch.device("cpu"))
        *_, block = launch._fixed
        pieces.append(-(-width // block))
    most = int(linear._UNROLLED.value)
    assert min(pieces) == 1 and max(pieces) > most and any(1 < count <= most for count in pieces)
