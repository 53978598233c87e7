# SPDX-License-Identifier: Apache-2.0
"""Requests with many selections: the worker keeps few of their layouts, and every capture has its own rows."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from dmi_connector.captures.capture import open_capture
from dmi_connector.engine.messages import Open, Rows, StepMetadata
from dmi_connector.engine.transfer import exporter as module
from dmi_connector.engine.transfer.exporter import LAYOUTS_KEPT, Exporter
from dmi_connector.engine.transfer.gpu_lane import DeviceLane
from dmi_connector.hooks import HOOKS
from dmi_connector.store.read.verify import verify_store
from tests import storekit as kit
from tests.exporterkit import DIMS, closing, make_exporter
from tests.lanekit import ROW_BYTES, Event, Lane, simulate

ROWS = 4
SLOTS = np.arange(64)
FIELD_BYTES = ROW_BYTES // 4


def selections(exporter: Exporter, count: int) -> list[dict[str, tuple[int, ...]]]:
    """Different selections: hooks of some layers."""
    every = [(name, layer) for name, layers in exporter.context.selection.hooks.items() for layer in layers]
    found = []
    for places in itertools.islice(itertools.combinations(every, 2), count):
        hooks: dict[str, tuple[int, ...]] = {}
        for name, layer in places:
            hooks[name] = (*hooks.get(name, ()), layer)
        found.append(hooks)
    assert len(found) == count
    return found


def opening(number: int, hooks: dict[str, tuple[int, ...]], path: Path | str = "/x") -> StepMetadata:
    opened = Open(number, f"{path}/{number}.zarr", hooks, f"r{number}", None, 0, ROWS, {"prompt_len": ROWS})
    return StepMetadata(opens=[opened])


class Known:
    """A fake `StoreClient` that records the registered layouts."""

    def __init__(self) -> None:
        self.layouts: dict[int, object] = {}
        self.opened: list[object] = []
        self.count = self.most = 0

    def register(self, layout: object, _attrs: object) -> int:
        self.count += 1
        self.layouts[self.count] = layout
        self.most = max(self.most, len(self.layouts))
        return self.count

    def forget(self, number: int) -> None:
        del self.layouts[number]

    def open_capture(self, number: int, *_: object) -> Any:
        self.opened.append(self.layouts[number])
        return SimpleNamespace(close=lambda *_, **_more: None)


def test_layouts_that_were_opened_last_are_kept_and_that_of_all_hooks(tmp_path: Path) -> None:
    exporter = make_exporter(tmp_path, 8, hooks="resid_pre,q,k,v,z", sink="host")
    exporter.client = known = Known()  # type: ignore[assignment]
    [whole] = exporter.layouts.values()
    chosen = selections(exporter, 150)
    often = dict(exporter.context.selection.hooks), chosen[0]
    for number, hooks in enumerate(chosen):
        for hooks_of_one in (*often, hooks):
            exporter.before_forward(opening(number, hooks_of_one))
            assert known.opened[-1] is exporter.captures[number].layout.payload
            exporter.before_forward(StepMetadata(closes=[closing(number, 0)]))
    layouts = list(exporter.layouts.values())
    assert len(layouts) == LAYOUTS_KEPT and layouts[0] is whole
    assert {id(each) for each in exporter.registered} == {id(each) for each in layouts}
    assert {number: layout.payload for layout, number in exporter.registered.items()} == known.layouts
    assert known.most == LAYOUTS_KEPT and known.count == 151, "layouts of many captures must be registered once"
    exporter.before_forward(opening(0, chosen[1]))
    assert known.count == 152, "a forgotten layout must be registered again"
    exporter.client = None
    exporter.ring.close()


def test_without_stores_few_layouts_are_kept_too(tmp_path: Path) -> None:
    exporter = make_exporter(tmp_path, 8, hooks="resid_pre,q,k,v,z", sink="null")
    for number, hooks in enumerate(selections(exporter, 100)):
        exporter.before_forward(opening(number, hooks))
    assert len(exporter.layouts) == LAYOUTS_KEPT and len(exporter.captures) == 100
    exporter.ring.close()


@pytest.mark.parametrize("lane", [False, True])
def test_captures_whose_layouts_are_forgotten_meanwhile_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lane: bool
) -> None:
    """Ten captures are in progress at a time, and four layouts are kept."""
    monkeypatch.setattr(module, "LAYOUTS_KEPT", 4)
    exporter = make_exporter(tmp_path, 64, DIMS, hooks="q,k,v,z", chunk_tokens=ROWS, segment_tokens=ROWS)
    fields = exporter.rows[:, 64:].view(torch.float32)
    fields.copy_(torch.randn(fields.shape))
    assert exporter.client is not None
    if lane:
        simulate(monkeypatch)
        exporter.lane = DeviceLane(exporter.ring, 1 << 20, exporter.rows)
    chosen = selections(exporter, 90)
    for number in range(len(chosen) + 10):
        if number < len(chosen):
            exporter.before_forward(opening(number, chosen[number], tmp_path))
            exporter.after_forward(StepMetadata())
        if number >= 10:
            last = [Rows(number - 10, 0, SLOTS[:ROWS])]
            exporter.before_forward(StepMetadata(closes=[closing(number - 10, ROWS, rows=last)]))
        assert len(exporter.layouts) <= 4 and len(exporter.client._layouts) <= 4
    kit.until(lambda: not exporter.pending())
    stats = exporter.client.stats()
    assert stats["complete"] == len(chosen) and stats["errors"] == []
    for number, hooks in enumerate(chosen):
        path = tmp_path / f"{number}.zarr"
        assert verify_store(path) == []
        with open_capture(path, timeout=0) as found:
            assert {name: tuple(found.layers[name]) for name in found.hooks} == hooks
            for name, layers in hooks.items():
                np.testing.assert_array_equal(found.numpy(name), in_rows(exporter, name, layers))
    if exporter.lane is not None:
        gc.collect()
        assert len(exporter.lane._tables) <= 4
    exporter.shutdown()


def in_rows(exporter: Exporter, name: str, layers: tuple[int, ...]) -> np.ndarray:
    """The values in the rows, float32 [layers, ROWS, width]."""
    assert HOOKS[name].scope == "layer"
    fields = [exporter.context.layout.find(name, layer) for layer in layers]
    rows = exporter.rows.numpy()[:ROWS]
    parts = [rows[:, f.offset : f.offset + f.nbytes].copy().view("f4") for f in fields if f is not None]
    return np.stack(parts)


# ---- the lane's tables ----------------------------------------------------------------------------------------------


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lane]:
    simulate(monkeypatch)
    made = Lane(1, 1024)
    yield made
    Event.link.set()
    made.lane.finish_gathers(kit.PATIENCE)
    made.lane.shutdown(kit.PATIENCE)
    made.ring.close()


def part(lane: Lane, number: int, at: int) -> bytes:
    """The bytes that a table of one field at byte `at` gathers for chunk `number`."""
    return lane.rows[2 * number : 2 * number + 2, at : at + FIELD_BYTES].contiguous().numpy().tobytes()


def test_tables_of_layouts_that_are_gone_leave_the_lane(lane: Lane) -> None:
    """New tables may have the address of old ones. Their chunks must still be gathered with the right tables."""
    seen: set[int] = set()
    for number in range(150):
        at = 4 * (number % 100)
        table = np.array([[at, FIELD_BYTES, 0]])
        seen.add(id(table))
        lane.lane.send([lane.chunk(number % 32, lane.capture(table))])
        del table
        kit.until(lambda number=number: len(lane.delivered) == number + 1)
        assert lane.delivered[-1] == (number % 32, part(lane, number % 32, at))
        lane.ring.release(lane.extents.pop())
    assert len(seen) < 150, "some tables must have had the same address"
    gc.collect()
    kit.until(lambda: len(lane.lane._tables) <= 1)


def test_tables_stay_while_their_chunks_wait(lane: Lane) -> None:
    """Only the chunks refer to the layouts."""
    Event.link.clear()
    tables = 12
    for number in range(tables):
        lane.lane.send([lane.chunk(number, lane.capture(np.array([[4 * number, FIELD_BYTES, 0]])))])
    assert lane.lane.waiting
    gc.collect()
    Event.link.set()
    kit.until(lambda: len(lane.delivered) == tables)
    assert lane.delivered == [(number, part(lane, number, 4 * number)) for number in range(tables)]
