# SPDX-License-Identifier: Apache-2.0
"""Which request a pool admits next, beside a scheduler that skips those that it cannot run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from dmi_connector.engine.messages import StepMetadata
from dmi_connector.engine.owners.pool_limits import StepLimits
from dmi_connector.engine.owners.pool_pages import PoolSlots
from dmi_connector.engine.scheduler.tracker import Tracker
from tests.probekit import save_probe
from tests.trackerkit import DIMS, FakeRequest, make_tracker

STEPS = 5
"""Steps in which a request runs."""
IDLE: Any = SimpleNamespace(num_scheduled_tokens={})


@dataclass
class Life(FakeRequest):
    """A request. adapter: its LoRA adapter. left: number of steps until it ends."""

    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    adapter: str = ""
    left: int = STEPS

    def get_finished_reason(self) -> str:
        return "abort"


class Queue:
    """A scheduler that begins requests in the order of arrival. It skips those whose LoRA adapter has no slot."""

    def __init__(self, root: Path, pages: int) -> None:
        risk = str(save_probe(root / "risk.safetensors", "mlp_out", (1,), DIMS.hidden, 1))
        context = make_tracker(root, "q,probe.risk", probes={"risk": risk}, sink="host").context
        self.limits = StepLimits(SimpleNamespace(max_num_batched_tokens=512), 512, 8)
        self.slots = PoolSlots(context, 0, 16, 1000, self.limits)
        self.step_pages = self.limits.pages_of_step(self.limits.floor(8))
        self.slots.sized(self.step_pages + pages)
        self.tracker = Tracker(context, self.slots, 1 << 60)
        self.waiting: list[Life] = []
        self.running: list[Life] = []
        self.begun: list[str] = []

    def add(self, name: str, tokens: int, kept: bool = False, adapter: str = "", start: int = 0) -> Life:
        """Add a request. tokens: of its prompt and its answer. kept: whether it has a `keep_if`."""
        dmi = {"tokens": [start, None], **({"keep_if": "max(risk) > 0"} if kept else {})}
        life = Life(name, {"include_output_tokens": True, "dmi": dmi}, [1] * (tokens - 2), tokens - 2, adapter=adapter)
        life.max_tokens = 0
        self.tracker.on_new_request(life)  # type: ignore[arg-type]
        assert name in self.tracker.tracked, self.tracker.refused
        self.waiting.append(life)
        return life

    def step(self, adapters: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        """Run a step. adapters: those that other requests, which are not captured, have in the slot of this step."""
        for life in [*self.running]:
            life.left -= 1
            if not life.left:
                self.running.remove(life)
                self.tracker.finish(life, [])  # type: ignore[arg-type]
        used = {*adapters, *(life.adapter for life in self.running if life.adapter)}
        for life in [*self.waiting]:
            if life.adapter and used - {life.adapter}:
                continue
            if self.slots.matched(life, 0)[0] is not None:  # type: ignore[arg-type]
                self.waiting.remove(life)
                self.running.append(life)
                self.begun.append(life.request_id)
                used |= {life.adapter} - {""}
        self.slots.plan(IDLE, StepMetadata())


@pytest.mark.parametrize("kind", ["usual", "unaligned", "kept"])
def test_a_request_is_not_passed_for_ever_by_smaller_ones(tmp_path: Path, kind: str) -> None:
    """This holds for any difference in size."""
    queue = Queue(tmp_path, pages=4)
    for number in range(4):  # they end one after the other, and so do those that follow them
        queue.add(f"first {number}", 16, kept=True).left += number
    for number in range(4):
        queue.add(f"waiting {number}", 16, kept=True)
    queue.step()
    queue.add("large", 48 if kind == "kept" else 200, kept=kind == "kept", start=8 if kind == "unaligned" else 0)
    for number in range(40):
        queue.add(f"small {number}", 16, kept=True)
        queue.step()
    assert "large" in queue.begun[:12], queue.begun
    assert len(queue.begun) > 20


def test_what_waits_for_its_adapter_holds_up_no_others(tmp_path: Path) -> None:
    """Requests that are not captured have the only slot of an adapter."""
    queue = Queue(tmp_path, pages=8)
    for number in range(8):
        queue.add(f"first {number}", 16, kept=True)
    queue.step()
    queue.add("large", 100, kept=True, adapter="a")
    queue.step()
    assert queue.slots.head.request is not None, "it was refused for room"
    for number in range(20):
        queue.add(f"small {number}", 16, kept=True)
        queue.step(adapters={"b"})
    assert len(queue.begun) > 20 and "large" not in queue.begun
    for _ in range(3 * STEPS):
        queue.step()
    assert "large" in queue.begun


def test_a_request_that_waited_for_its_adapter_is_the_next(tmp_path: Path) -> None:
    """Once vLLM asks for it, smaller ones wait, also those of another adapter."""
    queue = Queue(tmp_path, pages=8)
    for number in range(4):
        queue.add(f"first {number}", 16, kept=True, adapter="b")
        queue.add(f"plain {number}", 16, kept=True)
    queue.step()
    queue.add("large", 100, kept=True, adapter="a")
    for number in range(3):
        queue.step()
        queue.add(f"early {number}", 16, kept=True)
    for number in range(20):
        queue.add(f"small {number}", 16, kept=True, adapter="b" if number % 2 else "")
        queue.step()
    before = queue.begun[: queue.begun.index("large")]
    assert not [name for name in before if name.startswith("small")][4:], before
