# SPDX-License-Identifier: Apache-2.0
"""The kernel that gathers rows into payloads equals its torch twin."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")
from dmi_connector.engine.kernels import gather
from dmi_connector.engine.kernels.gather import gather_index, gather_rows_torch, gather_rows_triton
from tests import kernelkit as kit

CASES = [
    (2, [64, 128, 32], 1),
    (2, [2560, 33, 1024, 16, 8, 4, 2, 640, 1, 96, 12, 24, 48, 2049, 6], 5),
    (4, [1030, 7], 9),
    (4, [1, 1], 3),
    (2, [1500, 20], 17),
]


@pytest.mark.parametrize(("itemsize", "widths", "tokens"), CASES, ids=lambda part: str(part).replace(" ", ""))
def test_gathered_payloads_equal_those_of_the_torch_twin(itemsize: int, widths: list[int], tokens: int) -> None:
    """One launch gathers two payloads. Bytes between and after them do not change."""
    torch.manual_seed(0)
    offsets, row_bytes = kit.side_by_side([width * itemsize for width in widths])
    rows = torch.randint(0, 256, (kit.ROWS, row_bytes), dtype=torch.uint8, device=kit.DEVICE)
    lines, base = [], 0
    for width, offset in zip(widths, offsets, strict=True):
        if nbytes := width * itemsize // 4 * 4:
            lines.append((offset, nbytes, base))
            base += nbytes
    lines.append((0, 8, base))
    token_bytes = base + 8
    table = torch.tensor(lines, device=kit.DEVICE)
    slots = kit.random_slots(tokens)
    if tokens > 2:
        slots[1] = 0
    cut = tokens // 2
    second = -(-token_bytes * cut // 16) * 16 + 48
    payloads = {0: slots[:cut], second: slots[cut:]}
    index = gather_index([(start, picked.cpu().numpy()) for start, picked in payloads.items()])
    entries = torch.from_numpy(index).to(kit.DEVICE)
    size = second + token_bytes * (tokens - cut) + 64
    twin = torch.full((size,), 9, dtype=torch.uint8, device=kit.DEVICE)
    found = twin.clone()
    gather_rows_torch(rows, entries, table, twin)
    gather_rows_triton(rows, entries, table, found)
    assert torch.equal(found, twin)
    for start, picked in payloads.items():
        for source, nbytes, at in lines:
            block = found[start + at * len(picked) :][: nbytes * len(picked)].view(len(picked), nbytes)
            assert torch.equal(block, rows[picked, source : source + nbytes])
    assert (found[token_bytes * cut : second] == 9).all() and (found[-64:] == 9).all()


def test_a_launch_has_no_more_programs_on_an_axis_than_cuda_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of rows with a few bytes each, such as scores of a probe, may be gathered."""
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *_arguments, **_options: None

    monkeypatch.setattr(gather, "gather_rows_kernel", Kernel())
    index, table = torch.zeros(1 << 20, 4, dtype=torch.int64), torch.tensor([[64, 4, 0], [0, 8, 4]])
    rows, payload = torch.zeros(1, 128, dtype=torch.uint8), torch.zeros(12, dtype=torch.uint8)
    gather_rows_triton(rows, index, table, payload)
    [grid] = grids
    assert math.prod(grid) == 2 * (1 << 20) // 8
    assert all(programs <= most for programs, most in zip(grid, (2**31 - 1, 65535, 65535), strict=False))
