# SPDX-License-Identifier: Apache-2.0
"""The kernel that looks up slots in a table of pages equals its torch twin, and both equal plain arithmetic."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from dmi_connector.engine.kernels.lookup import Lookup
from tests import kernelkit as kit


@pytest.mark.parametrize(("tokens", "size", "entries"), [(1, 16, 1), (300, 16, 64), (256, 8, 5), (513, 1, 700)])
def test_slots_are_found_where_the_table_has_a_page(tokens: int, size: int, entries: int) -> None:
    """Padding, entries without a page, and slots beyond the table have no slot."""
    torch.manual_seed(tokens)
    slots = torch.randint(-3, entries * size + 40, (tokens,), device=kit.DEVICE)
    table = torch.randint(-1, 90, (entries,), device=kit.DEVICE)
    found, twin = (torch.full((tokens + 7,), -9, device=kit.DEVICE) for _ in range(2))
    lookup = Lookup(size)
    lookup.in_torch(slots, table, twin)
    for _ in range(2):  # the second launch uses the compiled kernel of the first
        found.fill_(-9)
        lookup.in_triton(slots, table, found)
    pages = table.tolist()
    wanted = []
    for slot in slots.tolist():
        page = pages[slot // size] if 0 <= slot < entries * size else -1
        wanted.append(page * size + slot % size if page >= 0 else -1)
    assert found[:tokens].tolist() == twin[:tokens].tolist() == wanted
    assert (found[tokens:] == -9).all() and (twin[tokens:] == -9).all(), "only the slots of tokens may be written"


def test_a_step_without_tokens_looks_nothing_up() -> None:
    none = torch.empty(0, dtype=torch.int64, device=kit.DEVICE)
    found = torch.full((4,), -9, device=kit.DEVICE)
    Lookup(16).in_triton(none, torch.zeros(1, dtype=torch.int64, device=kit.DEVICE), found)
    assert (found == -9).all()
