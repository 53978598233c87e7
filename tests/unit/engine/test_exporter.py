# SPDX-License-Identifier: Apache-2.0
"""The worker half without an engine: the exports of a step, lost rows, and ends of captures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from dmi_connector.engine.messages import Accepted, Borrow, Open, Rows, Sample, StepMetadata
from dmi_connector.engine.model.coverage import UNWRITTEN
from dmi_connector.engine.owners.row_cache import CaptureLayer
from dmi_connector.engine.transfer.chunk_layout import chunk_layout
from dmi_connector.engine.transfer.chunk_transfer import CaptureExport
from dmi_connector.engine.transfer.exporter import Exporter
from dmi_connector.engine.transfer.gpu_lane import DeviceLane
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.write.messages import pack_array
from dmi_connector.store.write.ring import Extent, Ring
from tests import storekit as kit
from tests.exporterkit import SMALL, Noted, begin, closing, make_exporter
from tests.lanekit import Event, simulate
from tests.trackerkit import dropped

CHUNK = 4
SLOTS = np.arange(64)
LOGIT_BYTES = SMALL.vocab * 4
Make = Callable[..., Exporter]


def rows(number: int, first: int, count: int = CHUNK) -> Rows:
    """Rows of a capture. The number of each row is also its slot."""
    return Rows(number, first, SLOTS[first : first + count])


def payload(exporter: Exporter, first: int, count: int = CHUNK) -> bytes:
    """The expected payload of a chunk of these rows: all rows of each field, then the headers."""
    [layout] = exporter.layouts.values()
    found = exporter.rows.numpy()[first : first + count]
    return b"".join(found[:, at : at + nbytes].tobytes() for at, nbytes, _ in layout.table)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """make(policy): an exporter of two layers of q without processes. Its ring has room for 8,192 bytes."""
    made: list[Exporter] = []

    def one(policy: str = "block", ring: int = 8192, **options: Any) -> Exporter:
        exporter = make_exporter(
            tmp_path, 64, SMALL, policy=policy, **{"sink": "host", "chunk_tokens": CHUNK, **options}
        )
        exporter.rows[:, 64:] = torch.randint(0, 255, exporter.rows[:, 64:].shape, dtype=torch.uint8)
        exporter.ring.close()
        exporter.ring = Ring(ring)
        made.append(exporter)
        return exporter

    yield one
    for exporter in made:
        exporter.ring.close()


def lost(capture: CaptureExport) -> list[tuple[Cause, tuple[tuple[int, int], ...]]]:
    return [(loss.cause, loss.rows) for loss in capture.losses]


# ---- on a CPU -----------------------------------------------------------------------------------------------------


def test_rows_of_a_step_arrive_with_the_first_row_that_each_chunk_has(make: Make) -> None:
    exporter = make(ring=1 << 20)
    a, b = begin(exporter, 1, 20), begin(exporter, 2, 20)
    exporter.after_forward(StepMetadata(chunks=[rows(1, 4), rows(2, 0), rows(1, 8)]))
    assert a.chunks == [(4, 4, payload(exporter, 4)), (8, 4, payload(exporter, 8))]
    assert b.chunks == [(0, 4, payload(exporter, 0))]
    assert exporter.take_report().gathered == 12


def test_a_store_is_opened_with_what_the_scheduler_and_the_server_say(make: Make) -> None:
    exporter = make(tp=2, rank=1)
    opened: list[tuple[Any, ...]] = []
    exporter.client = SimpleNamespace(  # type: ignore[assignment]
        register=lambda *what: opened.append(what) or 5, open_capture=lambda *what: opened.append(what)
    )
    for number in (1, 2):
        hooks = dict(exporter.context.selection.hooks)
        message = Open(number, f"/x/{number}.zarr", hooks, f"r{number}", "key", 3, 17, {"prompt_len": 20})
        message.borrow = Borrow("/x/1.zarr", "r1", None, np.arange(16, dtype=np.int32)) if number == 2 else None
        exporter.before_forward(StepMetadata(opens=[message]))
    exporter.client = None
    borrow = {"final": "/x/1.zarr", "request_id": "r1", "rows": 16, "token_ids": pack_array(np.arange(16, dtype="<i4"))}
    [layout] = exporter.layouts.values()
    attrs = {"prompt_len": 20, "start": 3}
    assert opened == [
        (layout.payload, exporter.store_attrs),
        (5, "/x/1.zarr", attrs, "r1", "key", 1, 2, 17, None),
        (5, "/x/2.zarr", attrs, "r2", "key", 1, 2, 17, borrow),
    ]
    assert [(c.number, c.start, c.checked) for c in exporter.captures.values()] == [(1, 3, False), (2, 3, False)]


def test_a_report_names_finished_stores_and_what_could_not_be_borrowed(make: Make) -> None:
    exporter = make()
    lost = Loss.of(Cause.NOT_BORROWED, [[0, 16]], store="a.zarr", error="it is gone")
    stored, unborrowed = {"/x/1.zarr": True, "/x/8.zarr": False}, {"/x/2.zarr": [lost], "/x/9.zarr": [lost]}
    for number in (1, 2, 3):
        begin(exporter, number, 20)
        exporter.captures[number].out = SimpleNamespace(path=f"/x/{number}.zarr")  # type: ignore[assignment]
    exporter.ending.append((exporter.captures.pop(2), closing(2, 17)))
    exporter.client = SimpleNamespace(take_news=lambda: (stored, unborrowed))  # type: ignore[assignment]
    report = exporter.take_report()
    exporter.client = None
    exporter.captures.clear()
    exporter.ending.clear()
    assert report.stored == stored and report.lost == {2: [lost]}


def test_only_rank_0_says_that_a_store_is_finished(make: Make) -> None:
    """Other ranks finish before rank 0 has made the store. A borrower of its rows would not find it."""
    exporter = make(rank=1, tp=2)
    exporter.client = SimpleNamespace(take_news=lambda: ({"/x/1.zarr": True}, {}))  # type: ignore[assignment]
    report = exporter.take_report()
    exporter.client = None
    assert report.stored == {}


def test_the_last_rows_are_exported_before_the_capture_is_closed(make: Make) -> None:
    exporter = make()
    a, other = begin(exporter, 1, 20), begin(exporter, 2, 20)
    early = Loss.of(Cause.ENDED_EARLY, [[7, 9]], finish="abort", end=7, expected=9)
    end = closing(1, 7, rows=[rows(1, 4, 3)], attrs={"finish_reason": "stop"}, losses=[early])
    exporter.before_forward(StepMetadata(closes=[end]))
    assert a.chunks == [(4, 3, payload(exporter, 4, 3))]
    assert a.closed == [(7, {}, list(range(7)), {"finish_reason": "stop"}, [early])]
    assert list(exporter.captures) == [2] and other.closed == []


def test_only_rank_0_reports_what_the_request_lacks(make: Make) -> None:
    exporter = make(rank=1, tp=2)
    a = begin(exporter, 1, 20)
    early = Loss.of(Cause.ENDED_EARLY, [[7, 9]], finish="abort", end=7, expected=9)
    exporter.captures[1].lose(4, 4, Cause.FELL_BEHIND)
    exporter.before_forward(StepMetadata(closes=[closing(1, 7, losses=[early])]))
    assert [(loss.cause, loss.rows) for loss in a.closed[0][4]] == [(Cause.FELL_BEHIND, ((4, 7),))]


def test_rows_after_the_end_are_not_a_loss(make: Make) -> None:
    """The engine samples one more token before it learns of a stop."""
    exporter = make()
    a = begin(exporter, 1, 20)
    for first, count in ((2, 1), (6, 4), (8, 1), (9, 1)):
        exporter.captures[1].lose(first, count, Cause.FELL_BEHIND)
    exporter.before_forward(StepMetadata(closes=[closing(1, 8)]))
    assert [loss.rows for loss in a.closed[0][4]] == [((2, 3), (6, 8))]


def test_rows_without_room_are_lost_under_policy_drop_and_reported_once(make: Make) -> None:
    """Two chunks fill the ring. The third one is lost. It counts as gathered, because its blocks are free."""
    exporter = make("drop")
    a = begin(exporter, 1, 20)
    exporter.after_forward(StepMetadata(chunks=[rows(1, 0), rows(1, 4), rows(1, 8)]))
    assert [first for first, *_ in a.chunks] == [0, 4] and lost(exporter.captures[1]) == [
        (Cause.FELL_BEHIND, ((8, 12),))
    ]
    report = exporter.take_report()
    assert (report.gathered, report.lost) == (12, {1: [dropped([8, 12])]})
    again = exporter.take_report()
    assert (again.gathered, again.lost) == (12, {})
    for extent in a.extents:
        exporter.ring.release(extent)
    assert exporter.ring.used == 0
    exporter.after_forward(StepMetadata(chunks=[rows(1, 12)]))
    assert a.chunks[-1] == (12, 4, payload(exporter, 12))


def test_under_policy_block_a_full_ring_is_waited_for_and_the_time_counted(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = make()
    a = begin(exporter, 1, 20)
    exporter.after_forward(StepMetadata(chunks=[rows(1, 0), rows(1, 4)]))
    assert exporter.progress.counts["blocked_seconds"] == 0
    alloc, waits = exporter.ring.alloc, []

    def drained(nbytes: int, timeout: float | None = None) -> Extent | None:
        waits.append(timeout)
        if timeout is None:
            time.sleep(0.01)
            exporter.ring.release(a.extents[0])
        return alloc(nbytes, timeout)

    monkeypatch.setattr(exporter.ring, "alloc", drained)
    exporter.after_forward(StepMetadata(chunks=[rows(1, 8)]))
    assert waits == [0.0, None], "the first try must not wait"
    assert a.chunks[-1] == (8, 4, payload(exporter, 8)) and lost(exporter.captures[1]) == []
    assert 0.01 <= exporter.progress.counts["blocked_seconds"] < kit.PATIENCE


def test_a_sink_without_stores_gives_the_ring_back(make: Make) -> None:
    exporter = make()
    begin(exporter, 1, 20)
    exporter.captures[1].out = None
    for first in range(0, 20, 4):
        exporter.after_forward(StepMetadata(chunks=[rows(1, first)]))
    assert exporter.ring.used == 0 and exporter.progress.counts["bytes_exported"] == 20 * (2 * 32 + 8)
    exporter.before_forward(StepMetadata(closes=[closing(1, 20)]))
    assert exporter.pending() == 0


def test_the_null_sink_only_counts_rows(make: Make) -> None:
    exporter = make(sink="null")
    a = begin(exporter, 1, 20)
    exporter.after_forward(StepMetadata(chunks=[rows(1, 0), rows(1, 4)]))
    assert a.chunks == [] and exporter.take_report().gathered == 8


def test_rows_that_no_tap_wrote_are_lost_under_check_poison(make: Make) -> None:
    exporter = make(check="poison")
    a = begin(exporter, 1, 20)
    [layout] = exporter.layouts.values()
    offset = int(layout.table[1][0])
    exporter.rows[5, offset : offset + 4].view(torch.int16)[:] = UNWRITTEN
    exporter.after_forward(StepMetadata(chunks=[rows(1, 0), rows(1, 4)]))
    assert [first for first, *_ in a.chunks] == [0]
    assert [(loss.words, loss.rows) for loss in exporter.captures[1].losses] == [
        ("no tap wrote q of layer 1 in some row", ((4, 8),))
    ]
    exporter.ring.release(a.extents[0])
    assert exporter.ring.used == 0


@pytest.mark.parametrize("late", [False, True], ids=["V1", "V2"])
def test_rows_of_freed_blocks_leave_before_their_slots_are_poisoned(make: Make, late: bool) -> None:
    """A new request gets the blocks of a preempted one. The V2 runner builds a step's metadata before rows are read."""
    exporter = make()
    a, slots = begin(exporter, 1, 20), torch.arange(4)
    exporter.layer = layer = CaptureLayer.__new__(CaptureLayer)
    torch.nn.Module.__init__(layer)
    layer.head_size, layer.kv_cache = exporter.rows.shape[1], exporter.rows
    layer.poisons, layer.unpoisoned, layer._built_last, exporter.trials = True, None, not late, 1
    exporter.captures[1].checked = True
    given, step = payload(exporter, 0), SimpleNamespace(slot_mapping=slots)
    if late:
        layer.planned(step)  # type: ignore[arg-type]
    exporter.before_forward(StepMetadata(leaving=[rows(1, 0)], preempted=[1]))
    if not late:
        layer.planned(step)  # type: ignore[arg-type]
    assert a.chunks == [(0, 4, given)], "the old rows must be exported"
    assert (exporter.rows[:4].view(torch.int16) == UNWRITTEN).all()
    exporter.rows[:4] = 0  # the forward writes the rows
    exporter.after_forward(StepMetadata())
    exporter.before_forward(StepMetadata())  # a step without a forward
    assert not exporter.rows[:4].any()
    exporter.before_forward(StepMetadata(closes=[closing(1, 0)]))
    assert layer.poisons, "a capture without rows must not end the poisoning"


# ---- logits -------------------------------------------------------------------------------------------------------


class Client:
    """A fake `StoreClient` that records rows of logits."""

    def __init__(self, exporter: Exporter) -> None:
        self.ring = exporter.ring
        self.rows_given: list[list[tuple[Any, ...]]] = []
        self.take_news = lambda: ({}, {})
        self.bytes_given: list[bytes] = []

    def rows(self, extent: Any, found: list[tuple[Any, ...]]) -> None:
        self.rows_given.append(found)
        self.bytes_given.append(self.ring.view(extent).tobytes())
        self.ring.release(extent)


def sampled(exporter: Exporter, slots: list[list[int]]) -> torch.Tensor:
    """Simulate a step that computes these slots, one list per request. Returns its logits, one row per request."""
    ends = np.cumsum([0] + [len(each) for each in slots])
    exporter.layer.step = SimpleNamespace(  # type: ignore[assignment]
        slot_mapping=torch.tensor([s for each in slots for s in each]), query_start_loc=torch.tensor(ends)
    )
    return torch.arange(len(slots) * SMALL.vocab, dtype=torch.float32).view(len(slots), -1)


def with_logits(make: Make, policy: str = "block") -> tuple[Exporter, Client]:
    exporter = make(policy, hooks="q,logits")
    client = Client(exporter)
    exporter.client = client  # type: ignore[assignment]
    exporter.logits.post = client.rows  # type: ignore[assignment]
    return exporter, client


def test_logits_go_to_the_captures_whose_last_slot_they_belong_to(make: Make) -> None:
    """The batch has another order than the samples, and one request is not captured."""
    exporter, client = with_logits(make)
    exporter.client = None
    a, b = begin(exporter, 1, 20), begin(exporter, 2, 20)
    exporter.client = client  # type: ignore[assignment]
    exporter.logits.post = client.rows  # type: ignore[assignment]
    exporter.before_forward(StepMetadata(samples=[Sample(1, 3, 22, 40), Sample(2, 0, 19, 7)]))
    logits = sampled(exporter, [[5, 6, 7], [30, 31], [40]])
    exporter.logits.export(logits)
    exporter.logits.export(logits)  # a second call in the same step, as with prompt logprobs
    assert client.rows_given == [[(b, "logits", 0, 19, 0), (a, "logits", 3, 22, 2 * LOGIT_BYTES)]]
    assert client.bytes_given[0][: 3 * LOGIT_BYTES] == logits.numpy().tobytes()
    assert exporter.ring.used == 0


def test_logits_that_belong_to_no_request_are_lost_with_their_reason(make: Make) -> None:
    """With more rows than requests, it is not known which row is whose."""
    exporter, client = with_logits(make)
    exporter.client = None
    begin(exporter, 1, 20, start=15)
    exporter.client = client  # type: ignore[assignment]
    exporter.logits.post = client.rows  # type: ignore[assignment]
    exporter.before_forward(StepMetadata(samples=[Sample(1, 0, 19, 7)]))
    logits = sampled(exporter, [[5], [6, 7]])
    exporter.logits.export(torch.cat([logits, logits[:1]]))
    [loss] = exporter.captures[1].losses
    assert client.rows_given == [] and exporter.ring.used == 0 and loss.rows == ((4, 5),)
    assert loss.words == "rows could not be gathered (the step has 3 rows of logits for 2 requests)"


def test_a_rank_that_does_not_write_logits_takes_no_room_for_them(tmp_path: Path) -> None:
    """Every rank has all logits, but the ring of this rank has no room for them."""
    exporter = make_exporter(tmp_path, 64, SMALL, rank=1, tp=2, hooks="q,logits", sink="host")
    client = Client(exporter)
    begin(exporter, 1, 20)
    exporter.client = client  # type: ignore[assignment]
    exporter.logits.post = client.rows  # type: ignore[assignment]
    full = exporter.ring.alloc(exporter.ring.nbytes, 0)
    assert full is not None
    exporter.before_forward(StepMetadata(samples=[Sample(1, 0, 19, 7)]))
    exporter.logits.export(sampled(exporter, [[6, 7]]))  # would wait forever for room
    assert client.rows_given == [] and lost(exporter.captures[1]) == []


def test_logits_without_room_are_lost_at_their_row_under_policy_drop(make: Make) -> None:
    exporter, client = with_logits(make, "drop")
    exporter.client = None
    begin(exporter, 1, 20, start=15)
    exporter.client = client  # type: ignore[assignment]
    exporter.logits.post = client.rows  # type: ignore[assignment]
    full = exporter.ring.alloc(exporter.ring.nbytes, 0)
    assert full is not None
    exporter.before_forward(StepMetadata(samples=[Sample(1, 0, 19, 7)]))
    exporter.logits.export(sampled(exporter, [[6, 7]]))
    assert client.rows_given == [] and lost(exporter.captures[1]) == [(Cause.FELL_BEHIND, ((4, 5),))]
    assert exporter.take_report().lost == {1: [dropped([4, 5])]}


def drafted(make: Make, policy: str = "block") -> tuple[Exporter, Client, Noted]:
    """An exporter with speculative decoding. Capture 1 has logits, capture 2 only has q.

    Step 1 has run with tokens in slots 5, 6, 7 and 30. The logits of slots 5, 6 and 7 are kept.
    """
    exporter, client = with_logits(make, policy)
    exporter.client = None
    noted = begin(exporter, 1, 20, start=15)
    hooks = {"q": exporter.context.selection.hooks["q"]}
    opened = Open(2, "/x/2.zarr", hooks, "r2", None, 0, 20, {"prompt_len": 20})
    exporter.before_forward(StepMetadata(opens=[opened]))
    exporter.client, exporter.logits.post, exporter.logits._drafts = client, client.rows, True  # type: ignore[assignment]
    exporter.before_forward(StepMetadata(logits_step=1, logits_slots=[5, 6, 7]))
    sampled(exporter, [[5, 6, 7], [30]])
    exporter.logits.of_tokens(torch.arange(4))
    exporter.logits.export(torch.arange(4 * SMALL.vocab, dtype=torch.float32).view(4, -1))
    assert client.rows_given == [], "no token is accepted yet"
    return exporter, client, noted


def test_logits_of_accepted_tokens_leave_once_they_are_known(make: Make) -> None:
    """Only captures with logits get them. A capture that ends in the step gets its last ones first."""
    exporter, client, noted = drafted(make)
    first = Accepted(1, 4, 22, np.array([5, 6]), 1)
    other = Accepted(2, 0, 19, np.array([7]), 1)
    last = closing(1, 9, accepted=[Accepted(1, 6, 24, np.array([7]), 1)])
    exporter.before_forward(StepMetadata(accepted=[first, other], closes=[last], decided=1))
    assert client.rows_given == [[(noted, "logits", 4 + n, 22 + n, n * LOGIT_BYTES) for n in range(3)]]
    values = np.frombuffer(client.bytes_given[0][: 3 * LOGIT_BYTES], np.float32)
    assert values.tolist() == list(range(3 * SMALL.vocab))
    assert exporter.progress.counts["lost_rows"] == 0 and len(noted.closed) == 1
    assert exporter.logits.draft_logits._steps == [], "the logits of the step must be dropped"


def test_missing_logits_of_accepted_tokens_are_lost_at_their_rows(make: Make) -> None:
    """Slot 30 was not kept, and there are no logits of step 0."""
    exporter, client, noted = drafted(make)
    exporter.before_forward(StepMetadata(accepted=[Accepted(1, 4, 22, np.array([6, 30]), 1)]))
    assert client.rows_given == [[(noted, "logits", 4, 22, 0)]]
    assert lost(exporter.captures[1]) == [(Cause.FELL_BEHIND, ((8, 9),))]
    exporter.before_forward(StepMetadata(accepted=[Accepted(1, 6, 24, np.array([6]), 0)], decided=1))
    exporter.before_forward(StepMetadata(accepted=[Accepted(1, 7, 25, np.array([6]), 1)]))
    assert [rows for _, rows in lost(exporter.captures[1])] == [((8, 9), (9, 10), (10, 11))]


def test_accepted_logits_without_room_are_lost_under_policy_drop(make: Make) -> None:
    exporter, client, _ = drafted(make, "drop")
    assert exporter.ring.alloc(exporter.ring.nbytes, 0) is not None
    exporter.before_forward(StepMetadata(accepted=[Accepted(1, 4, 22, np.array([5, 6]), 1)]))
    assert client.rows_given == [] and [rows for _, rows in lost(exporter.captures[1])] == [((7, 8), (8, 9))]


def test_a_step_whose_tokens_are_unknown_is_an_error(make: Make) -> None:
    exporter, _, _ = drafted(make)
    for tokens, known in ((None, "unknown"), (torch.arange(3), "3")):
        exporter.logits._tokens = tokens
        exporter.before_forward(StepMetadata(logits_step=2, logits_slots=[5]))
        with pytest.raises(RuntimeError, match=f"has 2 rows of logits, but {known} token indices"):
            exporter.logits.export(sampled(exporter, [[5], [6]]))


# ---- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(make: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """gpu(policy): an exporter with a lane whose staging memory has room for two chunks. The link is blocked."""
    simulate(monkeypatch)
    Event.link.clear()
    made: list[DeviceLane] = []

    def one(policy: str = "block", staging: int = 1024, hooks: str = "q") -> Exporter:
        exporter = make(policy, 1 << 20, hooks=hooks)
        exporter.lane = DeviceLane(exporter.ring, staging, exporter.rows)
        made.append(exporter.lane)
        return exporter

    yield one
    Event.link.set()
    for lane in made:
        lane.finish_gathers(kit.PATIENCE)
        lane.shutdown(kit.PATIENCE)
        assert not lane._thread.is_alive()


def fill(exporter: Exporter, *numbers: int) -> list[Noted]:
    """Open captures and export a chunk of each, after two chunks of the first one that fill staging memory."""
    found = [begin(exporter, number, 20) for number in numbers]
    exporter.after_forward(StepMetadata(chunks=[rows(numbers[0], 0), rows(numbers[0], 4)], gather=True))
    exporter.after_forward(StepMetadata(chunks=[rows(number, 8) for number in numbers], gather=True))
    assert [len(exporter.captures[number].waiting) for number in numbers] == [1] * len(numbers)
    return found


@pytest.fixture
def roomy(gpu: Any) -> Exporter:
    """An exporter whose staging memory has room for many chunks. The link is not blocked."""
    exporter = gpu("block", staging=1 << 16)
    Event.link.set()
    return exporter


def kept(number: int, first: int) -> StepMetadata:
    """The end of a capture with one chunk whose blocks are kept."""
    end = closing(number, first + CHUNK, rows=[rows(number, first)], keeps_blocks=f"r{number}")
    return StepMetadata(closes=[end])


def step(exporter: Exporter, metadata: StepMetadata) -> None:
    exporter.before_forward(metadata)
    exporter.after_forward(metadata)


def test_rows_of_some_steps_leave_together(roomy: Exporter) -> None:
    """The scheduler decides when they leave. The rows of that step leave too."""
    a, b, c = (begin(roomy, number, 20) for number in (1, 2, 3))
    for metadata in (kept(1, 0), kept(2, 4), StepMetadata()):
        step(roomy, metadata)
    assert len(roomy.due) == 2 and roomy.progress.report().gathered == 0 and roomy.take_finished() == set()
    step(roomy, StepMetadata(chunks=[rows(3, 8)], gather=True))
    assert roomy.due == [] and roomy.progress.report().gathered == 12 and roomy.take_finished() == {"r1", "r2"}
    kit.until(lambda: c.chunks and a.closed and b.closed)
    assert (a.chunks, b.chunks) == ([(0, 4, payload(roomy, 0))], [(4, 4, payload(roomy, 4))])
    assert len(a.extents) == 1 and b.extents == [] and c.closed == [], (
        "all chunks must be in one parcel of the first capture"
    )
    step(roomy, StepMetadata(chunks=[rows(3, 4)]))
    assert len(roomy.due) == 1, "the chunk must wait for the next gather"


def test_a_capture_without_last_rows_ends_at_once(roomy: Exporter) -> None:
    """The rows of other captures keep waiting."""
    begin(roomy, 1, 20), begin(roomy, 2, 20)
    step(roomy, kept(1, 0))
    step(roomy, StepMetadata(closes=[closing(2, 0, keeps_blocks="r2")]))
    assert roomy.take_finished() == {"r2"} and len(roomy.due) == 1


@pytest.mark.parametrize("what", [{"closes": [closing(2, 4)]}, {"preempted": [2]}])
def test_rows_leave_before_their_blocks_may_be_overwritten(roomy: Exporter, what: dict[str, Any]) -> None:
    a, b = begin(roomy, 1, 20), begin(roomy, 2, 20)
    step(roomy, kept(1, 0))
    assert len(roomy.due) == 1
    roomy.before_forward(StepMetadata(**what))
    assert roomy.due == [] and roomy.progress.report().gathered == 4
    kit.until(lambda: a.chunks)
    kit.until(lambda: bool(b.closed) == ("closes" in what))


def test_a_shutdown_exports_the_rows_that_wait_for_others(roomy: Exporter) -> None:
    a = begin(roomy, 1, 20)
    step(roomy, kept(1, 0))
    roomy.shutdown()
    assert a.chunks == [(0, 4, payload(roomy, 0))] and len(a.closed) == 1


@pytest.fixture
def broken(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Exporter]:
    """An exporter with capture 1, whose lane has failed as after a GPU error. Its ring is full."""
    exporter = gpu(hooks="q,logits")
    begin(exporter, 1, 20)
    monkeypatch.setattr(exporter.lane.copier, "copy", lambda *_: (_ for _ in ()).throw(RuntimeError("no GPU")))
    exporter.after_forward(StepMetadata(chunks=[rows(1, n) for n in (0, 4, 8)], gather=True))
    exporter.lane._thread.join(kit.PATIENCE)
    assert exporter.ring.alloc(exporter.ring.nbytes - exporter.ring.used, 0) is not None
    yield exporter
    exporter.lane.waiting.clear()


def test_nothing_waits_for_a_ring_that_a_failed_lane_will_not_empty(
    broken: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    alloc = broken.ring.alloc

    def bounded(nbytes: int, timeout: float | None = None) -> Extent | None:
        assert timeout is not None, "the call must have a timeout"
        return alloc(nbytes, timeout)

    monkeypatch.setattr(broken.ring, "alloc", bounded)
    with pytest.raises(RuntimeError, match=r"^rows can no longer be copied off cpu: no GPU$"):
        broken.room(100)


def test_after_a_failure_a_shutdown_ends_the_writers_at_once(
    broken: Exporter, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[float] = []
    broken.client = SimpleNamespace(shutdown=ended.append)  # type: ignore[assignment]
    broken.after_forward(StepMetadata(chunks=[rows(1, 12)]))
    began = time.monotonic()
    broken.shutdown()
    assert len(ended) == 1 and ended[0] > broken.context.options.shutdown_seconds / 2
    assert time.monotonic() - began < broken.context.options.shutdown_seconds / 2, (
        "the shutdown must not wait for copies"
    )
    assert "rows can no longer be copied off cpu" in caplog.text and broken.ring.fd < 0


@pytest.mark.parametrize("preempted", [[2], [3], [3, 2], [9, 3]])
def test_waiting_rows_of_preempted_captures_are_moved_first(gpu: Any, preempted: list[int]) -> None:
    """The next forward overwrites their blocks. Captures that are not preempted keep waiting."""
    exporter = gpu("drop")
    fill(exporter, 1, 2, 3)
    exporter.before_forward(StepMetadata(preempted=preempted))
    for number in (1, 2, 3):
        capture, moved = exporter.captures[number], number in preempted
        assert lost(capture) == ([(Cause.FELL_BEHIND, ((8, 12),))] if moved else []), number
        assert len(capture.waiting) == (not moved), number
    kept = [t.capture.number for t in exporter.lane.waiting]
    assert kept == [number for number in (1, 2, 3) if number not in preempted]


def test_a_preemption_under_policy_block_waits_for_its_rows_alone(gpu: Any) -> None:
    exporter = gpu()
    noted = fill(exporter, 1, 2, 3)
    waiting = {number: exporter.captures[number].waiting[0] for number in (1, 2, 3)}
    order: list[int] = []
    gather = exporter.lane._gather

    def note(room: Any) -> Any:
        order.extend(transfer.capture.number for parcel, _ in room for transfer in parcel.transfers)
        return gather(room)

    exporter.lane._gather = note
    timer = threading.Timer(0.02, Event.link.set)
    timer.start()
    exporter.before_forward(StepMetadata(preempted=[3]))
    timer.join()
    assert not waiting[3].waits and exporter.captures[3].waiting == []
    kit.until(lambda: not any(transfer.waits for transfer in waiting.values()))
    assert sorted(order) == [1, 2, 3] and all(lost(exporter.captures[n]) == [] for n in (1, 2, 3))
    kit.until(lambda: [len(each.chunks) for each in noted] == [3, 1, 1])
    assert noted[2].chunks == [(8, 4, payload(exporter, 8))]
    assert exporter.progress.counts["blocked_seconds"] > 0


def test_a_capture_whose_blocks_are_kept_ends_once_its_rows_are_gathered(gpu: Any) -> None:
    exporter = gpu()
    a, b = fill(exporter, 1, 2)
    step(exporter, StepMetadata(closes=[closing(2, 12, keeps_blocks="r2")]))
    assert exporter.take_finished() == set() and exporter.pending() >= 2 and b.closed == []
    Event.link.set()
    kit.until(lambda: not exporter.lane.waiting)
    exporter.after_forward(StepMetadata())
    assert exporter.take_finished() == {"r2"} and exporter.take_finished() == set()
    kit.until(lambda: b.closed)
    assert b.chunks == [(8, 4, payload(exporter, 8))] and exporter.ending == [] and a.closed == []


def test_a_report_says_that_captures_have_not_ended_although_their_rows_are_gathered(gpu: Any) -> None:
    """The lane's thread gathers rows after the step has looked for captures that ended. With a pool, vLLM only runs
    another step if the report asks for it.
    """
    exporter = gpu()
    _, b = fill(exporter, 1, 2)
    step(exporter, StepMetadata(closes=[closing(2, 12, stays=True)]))
    Event.link.set()
    kit.until(lambda: not exporter.lane.waiting)
    report = exporter.take_report()
    assert report.gathered == 4 * CHUNK and report.leaving and len(exporter.ending) == 1
    exporter.after_forward(StepMetadata())
    kit.until(lambda: b.closed)
    assert not exporter.take_report().leaving


def test_a_capture_whose_blocks_are_free_is_gathered_before_the_forward(gpu: Any) -> None:
    exporter = gpu("drop")
    _, b = fill(exporter, 1, 2)
    exporter.before_forward(StepMetadata(closes=[closing(2, 12)]))
    kit.until(lambda: not exporter.lane.waiting or exporter.lane.waiting[0].capture.number == 1)
    Event.link.set()
    kit.until(lambda: b.closed)
    assert [(loss.cause, loss.rows) for loss in b.closed[0][4]] == [(Cause.FELL_BEHIND, ((8, 12),))]


class Table:
    """A fake pool that records the number of gathered rows at each change of its table."""

    def __init__(self, exporter: Exporter) -> None:
        self.exporter, self.changes = exporter, []  # type: ignore[var-annotated]
        self.rows, self.row_dtype, self.step, self.poisons, self.pages = exporter.rows, torch.float32, None, False, 3
        exporter.layer = self  # type: ignore[assignment]

    def place(self, table: np.ndarray) -> None:
        self.changes.append((table.tolist(), self.exporter.progress.count()))


def test_pages_are_given_out_again_once_their_rows_are_gathered(gpu: Any) -> None:
    """Rows of an ended request wait like others. The table changes after the rows that the step needs are gathered."""
    exporter = gpu()
    _, b = fill(exporter, 1, 2)
    table = Table(exporter)
    entries = np.array([[7], [2]])
    exporter.before_forward(StepMetadata(table=entries, closes=[closing(2, 16, rows=[rows(2, 12)], stays=True)]))
    assert table.changes == [([[7], [2]], 8)] and b.closed == [], "without `need`, the step must not wait"
    timer = threading.Timer(0.02, Event.link.set)
    timer.start()
    exporter.before_forward(StepMetadata(table=entries, need=20))
    timer.join()
    assert table.changes[1][1] >= 20 and exporter.progress.counts["blocked_seconds"] > 0
    exporter.after_forward(StepMetadata())
    kit.until(lambda: b.closed)
    assert [first for first, *_ in b.chunks] == [8, 12] and exporter.take_finished() == set()


def test_under_policy_drop_no_step_waits_for_pages(gpu: Any) -> None:
    exporter = gpu("drop")
    fill(exporter, 1, 2)
    table = Table(exporter)
    exporter.before_forward(StepMetadata(table=np.array([[7], [2]]), need=12))
    assert table.changes == [([[7], [2]], 12)] and exporter.progress.counts["blocked_seconds"] == 0
    assert lost(exporter.captures[1]) == [(Cause.FELL_BEHIND, ((8, 12),))] and lost(exporter.captures[2]) == []


def test_pages_are_reused_on_a_cpu_only_after_their_rows_are_copied(make: Make) -> None:
    exporter = make()
    noted = begin(exporter, 1, 20)
    table = Table(exporter)
    exporter.before_forward(StepMetadata(leaving=[rows(1, 0)], table=np.array([[7], [2]]), need=4))
    assert table.changes == [([[7], [2]], 4)] and [first for first, *_ in noted.chunks] == [0]


def test_a_shutdown_ends_captures_whose_blocks_were_kept(gpu: Any) -> None:
    exporter = gpu()
    _, b = fill(exporter, 1, 2)
    step(exporter, StepMetadata(closes=[closing(2, 12, keeps_blocks="r2")]))
    threading.Timer(0.02, Event.link.set).start()
    exporter.shutdown()
    assert [closed[0] for closed in b.closed] == [12] and b.chunks == [(8, 4, payload(exporter, 8))]


def test_logits_are_copied_after_the_rows_of_their_step(gpu: Any) -> None:
    exporter = gpu(hooks="q,logits")
    a = begin(exporter, 1, 20)
    noted = begin(exporter, 2, 20)
    client = Client(exporter)
    exporter.client = client  # type: ignore[assignment]
    exporter.logits.post = client.rows  # type: ignore[assignment]
    exporter.before_forward(StepMetadata(samples=[Sample(1, 0, 19, 7)]))
    exporter.after_forward(StepMetadata(chunks=[rows(1, 0)], gather=True))
    exporter.logits.export(sampled(exporter, [[6, 7]]))
    assert client.rows_given == []
    Event.link.set()
    kit.until(lambda: client.rows_given)
    assert client.rows_given == [[(a, "logits", 0, 19, 0)]] and len(a.chunks) == 1 and noted.chunks == []
    exporter.client = None


@pytest.mark.parametrize(
    ("layers", "part", "mine"),
    [
        ((0, 1, 2, 3), 2, ([0], [1])),
        ((1, 2), 1, ([0], [1])),
        ((1, 2, 3), 1, ([0], [1, 2])),
        ((0, 1), 0, ([0], [])),
        ((3,), 0, ([], [0])),
    ],
)
def test_files_of_a_narrower_capture_have_layers_of_one_rank(
    tmp_path: Path, layers: tuple[int, ...], part: int, mine: tuple[list[int], list[int]]
) -> None:
    """The first rank has layers 0 and 1 of four layers."""
    for rank in (0, 1):
        exporter = make_exporter(tmp_path, 8, rank=rank, tp=2, hooks="resid_pre", sink="null")
        layout = chunk_layout(exporter.context, {"resid_pre": layers}, rank).payload
        assert [spec.rank for spec in layout.arrays] == mine[rank]
        assert {spec.part_layers for spec in layout.arrays} <= {part}
        assert [spec.layers for spec in layout.elsewhere] == ([layers] if rank == 0 and not mine[0] else [])
        exporter.ring.close()


@pytest.mark.parametrize("hooks", ["vllm-full", "resid_pre,q,k,z,logits", "resid_pre"])
def test_two_ranks_export_each_hook_once_and_about_as_many_bytes(tmp_path: Path, hooks: str) -> None:
    ranks = [make_exporter(tmp_path, 8, rank=rank, tp=2, hooks=hooks, sink="null") for rank in (0, 1)]
    [first], [second] = (exporter.layouts.values() for exporter in ranks)
    parts = {"vllm-full": {0}, "resid_pre,q,k,z,logits": {0, 2}, "resid_pre": {2}}
    one, other = first.payload, second.payload
    written = sorted((spec.name, spec.rank) for layout in (one, other) for spec in layout.arrays)
    names = sorted(ranks[0].context.selection.hooks)
    assert [name for name, shard in written if shard == 0] == names and len(set(written)) == len(written)
    assert {spec.name for spec in one.elsewhere} == {s.name for s in other.arrays if s.shards == 1}
    assert other.elsewhere == () and {s.part_layers for s in one.arrays} == parts[hooks]
    loads = [sum(spec.token_bytes for spec in layout.arrays) for layout in (one, other)]
    whole = [spec.token_bytes for layout in (one, other) for spec in layout.arrays if spec.shards == 1]
    assert abs(loads[0] - loads[1]) <= max(whole, default=0)
    for exporter, layout in zip(ranks, (first, second), strict=True):
        assert int(layout.table[:, 1].sum()) == layout.payload.token_bytes
        exporter.ring.close()


@pytest.mark.parametrize(("policy", "waited"), [("block", 0.5), ("drop", 0.0)])
def test_a_flush_counts_the_time_that_it_took_under_policy_block(
    make: Make, monkeypatch: pytest.MonkeyPatch, policy: str, waited: float
) -> None:
    exporter = make(policy)
    begin(exporter, 1, 20)
    capture, flushed = exporter.captures[1], []
    capture.waiting = [SimpleNamespace()]  # type: ignore[list-item]
    exporter.lane = SimpleNamespace(flush=lambda *how: flushed.append(how))  # type: ignore[assignment]
    clock = iter([7.0, 7.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    exporter._flush(capture)
    assert exporter.progress.counts["blocked_seconds"] == waited
    assert flushed == [(capture, policy == "drop")] and not capture.waiting
    exporter._flush(capture)
    assert len(flushed) == 1, "no rows wait"


def test_before_it_sleeps_a_worker_ends_captures_and_lets_their_rows_leave(make: Make) -> None:
    class Lane:
        """A fake lane that gathers its transfers when it is drained."""

        def __init__(self) -> None:
            self.sent: list[Any] = []

        def send(self, transfers: list[Any]) -> None:
            self.sent += transfers

        def drain(self) -> None:
            for transfer in self.sent:
                exporter._export_now(transfer)
                transfer.capture.waiting.clear()

        def flush(self, *_how: Any) -> None: ...

        def then(self, work: Callable[[], None]) -> None:
            work()

    exporter = make()
    a, b = begin(exporter, 1, 8), begin(exporter, 2, 8)
    exporter.lane = Lane()  # type: ignore[assignment]
    exporter.after_forward(StepMetadata(chunks=[rows(2, 8)]))
    exporter.before_sleep([closing(1, 4, rows=[rows(1, 0)])])
    exporter.lane = None
    assert [(first, count) for first, count, _ in (*a.chunks, *b.chunks)] == [(0, 4), (8, 4)]
    assert list(exporter.captures) == [2] and exporter.ending == [] and len(a.closed) == 1 and not b.closed
