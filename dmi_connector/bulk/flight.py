# SPDX-License-Identifier: Apache-2.0
"""A prompt between the input and its line in the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dmi_connector.bulk.engines import Answer
from dmi_connector.bulk.order import Placed
from dmi_connector.bulk.prompts import Prompt
from dmi_connector.store.read.index import CaptureInfo


@dataclass
class Flight:
    """A prompt on its way.

    captured: how its capture ended. answered_at: of time.monotonic(). abandoned: nothing wrote its store when it was
    last looked for.
    """

    placed: Placed
    prompt: Prompt
    answer: Answer | None = None
    answered_at: float = 0.0
    captured: CaptureInfo | None = None
    tries: int = 1
    abandoned: bool = False

    def anew(self, tries: int | None = None) -> Flight:
        """The prompt for another engine. tries: None if the engine was at fault."""
        return Flight(self.placed, self.prompt, tries=tries or self.tries)


def failed(store: Path, reason: str) -> CaptureInfo:
    """A capture that failed without a line in the index."""
    return CaptureInfo(store, None, None, "failed", reason, "", None, None, None)
