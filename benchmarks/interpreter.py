# SPDX-License-Identifier: Apache-2.0
"""What capture takes of the engine's interpreter, without an engine and without a GPU.

    python -m benchmarks.interpreter --out benchmarks/results/cpu-interpreter.json

Requests come and go as under `benchmarks.sustained` (64 in flight, 128 + 384 tokens, a step each 5 ms). Scheduler half,
worker half, coordinator and writers are real; CUDA is played by CPU memory (tests/lanekit.py), and payloads have
random values behind true headers. Measured are the calls that vLLM would make, and the time on a
core of our threads beside them. All stores are checked.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import numpy as np
import pytest
import torch

from benchmarks import common
from dmi_connector.engine.context import CaptureContext
from dmi_connector.engine.model.architectures import ARCHITECTURES
from dmi_connector.engine.owners import OWNERS
from dmi_connector.engine.owners.paged import PagedSlots
from dmi_connector.engine.scheduler.tracker import Tracker
from dmi_connector.engine.transfer import gpu_lane
from dmi_connector.engine.transfer.chunk_transfer import Progress
from dmi_connector.engine.transfer.exporter import Exporter
from dmi_connector.hooks import ModelDims, parse_selection
from dmi_connector.layout import row_layouts
from dmi_connector.settings import ServerOptions
from dmi_connector.store.write.client import StoreClient
from dmi_connector.store.write.settings import WriteSettings
from tests import lanekit
from tests.trackerkit import FakeRequest

MODULE = "benchmarks.interpreter"
FLIGHT, PROMPT, GENERATED, BLOCK, SLOTS = 64, 128, 384, 16, 1 << 16
STEP_S = 0.005
DIMS = ModelDims("Qwen3ForCausalLM", 36, 16, 4, 2, 32, 192, 512)
"""The layers of Qwen3-4B, narrow."""


def _context(store_dir: Path) -> CaptureContext:
    options = ServerOptions.parse({"store_dir": str(store_dir), "hooks": "hidden-states"})
    selection = parse_selection(options.hooks, DIMS)
    layouts = row_layouts(selection, DIMS, "bfloat16")
    arch, owner = ARCHITECTURES["Qwen3ForCausalLM"], OWNERS["target"]
    return CaptureContext(options, arch, DIMS, selection, layouts, "bfloat16", 1, owner)


def _gather_headers(rows: torch.Tensor, index: torch.Tensor, table: torch.Tensor, payload: torch.Tensor) -> None:
    """In the place of the gather kernel."""
    lines, base = index.numpy(), int(table[-1, 2])
    at = lines[:, 1] + base * lines[:, 2] + lines[:, 3] * 8
    payload.numpy()[at[:, None] + np.arange(8)] = rows.numpy()[lines[:, 0], :8]


class Worker:
    """The worker half, with CPU memory for a GPU's."""

    def __init__(self, context: CaptureContext, writers: int) -> None:
        self.client = StoreClient(1 << 29, writers, WriteSettings(nice=19, idle=True))
        rows = torch.zeros(SLOTS, context.layout.row_bytes, dtype=torch.uint8)
        self.headers = rows.numpy()[:, :8].view(np.int32)
        made = Exporter.__new__(Exporter)
        made.context, made.rank, made.rows, made.client, made.ring = context, 0, rows, self.client, self.client.ring
        made.captures, made.layouts, made.registered, made.samples, made.due, made.ending = {}, {}, {}, [], [], []
        made.finished, made.progress = set(), Progress()
        made.store_attrs = {"model": "Qwen3-4B", "dtype": "bfloat16", "num_layers": DIMS.layers, "tp": 1}
        made.lane = gpu_lane.DeviceLane(self.client.ring, 1 << 28, rows)
        made.lane.staging.buffer.view(torch.bfloat16).normal_()
        self.exporter = made


class Engine:
    """Requests in flight, and the calls that vLLM makes. us: of each step, by call."""

    def __init__(self, store_dir: Path, writers: int) -> None:
        context = _context(store_dir)
        self.tracker = Tracker(context, PagedSlots(context, BLOCK, SLOTS // BLOCK), 1 << 20)
        self.worker = Worker(context, writers)
        self.us: dict[str, list[float]] = defaultdict(list)
        self.gathers: list[bool] = []
        self._free = list(range(1, SLOTS // BLOCK))
        self._kept: dict[str, list[int]] = {}
        self._live: dict[str, Any] = {}
        self._count = 0
        self._waiting = [self._new(6 * (n + 1)) for n in range(FLIGHT)]

    def _new(self, generated: int) -> Any:
        self._count += 1
        made: Any = FakeRequest(
            f"cmpl-{self._count}-0", {"include_output_tokens": True}, list(range(PROMPT)), PROMPT, max_tokens=generated
        )
        made.blocks, made.ends = [], PROMPT + generated
        return made

    def _take(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]

    def step(self, arrivals: bool = True) -> None:
        """One step. arrivals: new requests take the places of ended ones."""
        spent = dict.fromkeys(("on_new_request", "build_meta", "before_forward", "after_forward", "finish"), 0.0)

        def timed(name: str, call: Any, *args: Any) -> Any:
            begin = time.perf_counter()
            result = call(*args)
            spent[name] += (time.perf_counter() - begin) * 1e6
            return result

        scheduled: dict[str, int] = {}
        new: list[Any] = []
        ids, given, computed = [], [], []
        for one in self._live.values():
            blocks = self._take(1) if one.num_computed_tokens == len(one.blocks) * BLOCK else []
            one.blocks += blocks
            ids.append(one.request_id)
            given.append((blocks,) if blocks else None)
            computed.append(one.num_computed_tokens)
            scheduled[one.request_id] = 1
        while arrivals and self._waiting and len(self._live) < FLIGHT and len(new) < 4:
            one = self._waiting.pop(0)
            timed("on_new_request", self.tracker.on_new_request, one)
            one.blocks = self._take(PROMPT // BLOCK)
            self._live[one.request_id] = one
            scheduled[one.request_id] = PROMPT
            new.append(SimpleNamespace(req_id=one.request_id, block_ids=([*one.blocks],), num_computed_tokens=0))
        cached = SimpleNamespace(req_ids=ids, new_block_ids=given, resumed_req_ids=set(), num_computed_tokens=computed)
        output = SimpleNamespace(
            preempted_req_ids=None,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
        )
        message = timed("build_meta", self.tracker.step, output)
        exporter = self.worker.exporter
        timed("before_forward", exporter.before_forward, message)
        for name, count in scheduled.items():
            one = self._live[name]
            first = one.num_computed_tokens
            positions = np.arange(first, first + count)
            slots = np.asarray(one.blocks)[positions // BLOCK] * BLOCK + positions % BLOCK
            self.worker.headers[slots, 0] = one.tokens[first : first + count]
            self.worker.headers[slots, 1] = positions
        timed("after_forward", exporter.after_forward, message)
        freed = exporter.take_finished()
        if message.report:
            self.tracker.on_report(exporter.take_report())
        self.tracker.slots.freed(freed)
        for name in freed:
            self._free += self._kept.pop(name)
        for name, count in scheduled.items():
            one = self._live[name]
            one.num_computed_tokens += count
            one.tokens.append(7)
            if len(one.tokens) >= one.ends:
                del self._live[name]
                keep, _ = timed("finish", self.tracker.finish, one, one.blocks)
                if keep:
                    self._kept[name] = one.blocks
                else:
                    self._free += one.blocks
                self._waiting.append(self._new(GENERATED))
        for name, us in spent.items():
            self.us[name].append(us)
        self.gathers.append(message.gather)

    def run(self, steps: int) -> None:
        """Steps at their times. In between the interpreter is free, as while vLLM waits for a GPU."""
        at = time.perf_counter()
        for _ in range(steps):
            self.step()
            at += STEP_S
            while (left := at - time.perf_counter()) > 0:
                time.sleep(left)

    def finish(self) -> None:
        """End all requests, and wait for their stores."""
        while self._live or self._kept:
            self.step(arrivals=False)
        assert self.worker.client.flush(600)


def _threads() -> dict[str, float]:
    """Seconds on a core of our threads."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("dmi-") and thread.ident]
    return {t.name: time.clock_gettime(time.pthread_getcpuclockid(t.ident or 0)) for t in ours}


def measure(steps: int, writers: int) -> dict[str, Any]:
    """us of a step: means of the calls, and of our threads. `gathering`: mean of the steps in which rows leave."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as store_dir, pytest.MonkeyPatch.context() as patch:
        lanekit.simulate(patch)
        patch.setattr(gpu_lane, "SliceCopier", lanekit.Copier)
        patch.setattr(gpu_lane, "gather_rows", _gather_headers)
        lanekit.Event.link.set()
        engine = Engine(Path(store_dir), writers)
        with torch.inference_mode():
            engine.run(200)
            engine.us.clear()
            engine.gathers.clear()
            before = _threads()
            engine.run(steps)
            after = _threads()
            calls = {name: np.array(values) for name, values in engine.us.items()}
            gathers = np.array(engine.gathers)
            engine.finish()
        problems = [text for path in Path(store_dir).glob("*.zarr") for text in common.store_problems(path)]
        stores = engine.worker.client.stats()["complete"]
        engine.worker.client.shutdown(60)
    threads = {name: (after[name] - before[name]) / steps * 1e6 for name in after}
    result: dict[str, Any] = {name: round(float(values.mean()), 1) for name, values in calls.items()}
    result["engine's thread"] = round(sum(float(values.mean()) for values in calls.values()), 1)
    result["gathering"] = round(sum(float(values[gathers].mean()) for values in calls.values()), 1)
    result |= {name: round(us, 1) for name, us in threads.items()}
    result["our threads"] = round(sum(threads.values()), 1)
    return {**result, "stores": stores, "problems": problems[:5]}


def main(argv: list[str]) -> None:
    """Entry point."""
    parser = common.parser(MODULE, __doc__)
    parser.add_argument("--out", required=True, help="the result, JSON")
    parser.add_argument("--steps", type=int, default=1500, help="of a round")
    parser.add_argument("--rounds", type=int, default=3, help="each with new processes")
    parser.add_argument("--writers", type=int, default=2, help="writer processes")
    args = parser.parse_args(argv)
    header = common.header(MODULE, argv)
    rounds = [measure(args.steps, args.writers) for _ in range(args.rounds)]
    common.save(args.out, {"header": header, "us_of_a_step": rounds})
    for one in rounds:
        print(one)


if __name__ == "__main__":
    main(sys.argv[1:])
