# SPDX-License-Identifier: Apache-2.0
"""The state of a prompt from its submission to its line in the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dmi_connector.bulk.engines import Answer
from dmi_connector.bulk.order import Placed
from dmi_connector.bulk.prompts import Prompt
from dmi_connector.store.format.locks import is_abandoned
from dmi_connector.store.read.index import CaptureInfo

_GONE_S = 120.0
"""Seconds after an answer. If the capture then has neither a line in the index nor a store, it has failed."""


@dataclass
class Flight:
    """A submitted prompt.

    answer: the result from the engine. answered_at: when it arrived, by time.monotonic(). captured: how the capture of
    the prompt ended. tries: how often it was submitted for a capture. abandoned: whether the last check found an
    unfinished store that no process writes.
    """

    placed: Placed
    prompt: Prompt
    answer: Answer | None = None
    answered_at: float = 0.0
    captured: CaptureInfo | None = None
    tries: int = 1
    abandoned: bool = False

    def anew(self, tries: int | None = None) -> Flight:
        """A flight that submits the prompt again. tries: None keeps the number of tries, if the engine died."""
        return Flight(self.placed, self.prompt, tries=tries or self.tries)


def failed(store: Path, reason: str) -> CaptureInfo:
    """The information of a failed capture that has no line in the index."""
    return CaptureInfo(store, None, None, "failed", reason, "", None, None, None)


def why_abandoned(path: Path | None, age: float) -> str:
    """Why the store at `path`, which is not finished, will not be finished; "" if it may be.

    path: None if no store exists. age: seconds since the answer.
    """
    if path is not None and is_abandoned(f"{path}.partial"):
        return "its writers ended before it was finished"
    if age > _GONE_S and (path is None or not Path(f"{path}.partial").exists()):
        return "it has no store and no line in the index, as after a full disk"
    return ""
