# SPDX-License-Identifier: Apache-2.0
"""A scheduler that notes how fast the engine's own process is. With several ranks no worker shares that process."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from benchmarks.common import ENGINE_CLOCK, python_us


class ClockedScheduler(AsyncScheduler):
    """Each second it notes `python_us`, and means of its own `schedule` and `update_from_output` in us."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._due, self._seconds, self._calls = 0.0, [0.0, 0.0], 0

    def schedule(self, *args: Any, **named: Any) -> Any:
        if (begin := time.perf_counter()) > self._due:
            self._note()
            self._due = (begin := time.perf_counter()) + 1
        result = super().schedule(*args, **named)
        self._seconds[0] += time.perf_counter() - begin
        self._calls += 1
        return result

    def update_from_output(self, *args: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        result = super().update_from_output(*args, **named)
        self._seconds[1] += time.perf_counter() - begin
        return result

    def _note(self) -> None:
        schedule, update = (round(1e6 * seconds / max(1, self._calls), 1) for seconds in self._seconds)
        line = {"python_us": python_us(), "schedule_us": schedule, "update_us": update, "steps": self._calls}
        with open(os.environ[ENGINE_CLOCK], "a") as file:
            print(json.dumps(line), file=file)
        self._seconds, self._calls = [0.0, 0.0], 0
