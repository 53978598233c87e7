# SPDX-License-Identifier: Apache-2.0
"""Switches one mechanism off, to measure what it is worth.

vLLM's option `worker_extension_cls` names `benchmarks.without.NAME`. Each worker then looks the name up here before it
builds the model, on any start method, and that switches the mechanism off. Those of the scheduler need an engine with
one rank, whose worker shares its process. Those in IN_ENGINE are for several ranks: `scheduler_cls` names them, and the
engine's process looks the name up before it makes the connector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any


def _branch() -> None:
    """Taps write in line, not on a branch of the CUDA graph."""
    from dmi_connector.engine.taps import op

    vars(op)["captured_branch"] = lambda _device: None


def _joins() -> None:
    """Taps that reduce run on beside attention, as others do."""
    from dmi_connector.engine.taps import install

    vars(install)["joined_before_attention"] = lambda _fields: set()


def _idle() -> None:
    """Writers run at nice level 19, not in the scheduling class for idle time."""
    from dmi_connector.engine import sizing

    settings = sizing.write_settings
    vars(sizing)["write_settings"] = lambda *args: replace(settings(*args), idle=False)


def _plain() -> None:
    """Writers that fall behind compress nevertheless."""
    from dmi_connector.engine import sizing

    settings = sizing.write_settings
    vars(sizing)["write_settings"] = lambda *args: replace(settings(*args), always_compress=True)


def _pace() -> None:
    """Writers never rest."""
    from dmi_connector.engine import sizing

    vars(sizing)["LEAST_SHARE"] = 1.0


def _reports() -> None:
    """Workers report in each step."""
    from dmi_connector.engine.scheduler.tracker import Tracker

    plan = Tracker._plan

    def each(self: Tracker, metadata: Any) -> None:
        plan(self, metadata)
        metadata.report = True

    setattr(Tracker, "_plan", each)  # noqa: B010


def _answers() -> None:
    """The executor of several ranks waits for all of them in each step."""
    from dmi_connector.engine import replaced

    vars(replaced)["ask_one_rank"] = lambda: None


def _held() -> None:
    """Blocks of ended requests are not kept: their last rows leave before the next forward."""
    from dmi_connector.engine.owners import paged

    vars(paged)["HELD"] = 0.0


IN_ENGINE = ("answers", "held")
MECHANISMS: dict[str, Callable[[], None]] = {
    "branch": _branch,
    "joins": _joins,
    "idle": _idle,
    "pace": _pace,
    "plain": _plain,
    "reports": _reports,
    "answers": _answers,
    "held": _held,
}


def __getattr__(name: str) -> Any:
    if name not in MECHANISMS:
        raise AttributeError(name)
    MECHANISMS[name]()
    if name not in IN_ENGINE:
        return type(name, (), {})
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    return AsyncScheduler
