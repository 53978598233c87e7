# SPDX-License-Identifier: Apache-2.0
"""`Head`: the captured request that waits for pages of the pool and is admitted next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """A request that is not admitted. most: number of pages that it needs."""

    most: int


R = TypeVar("R", bound=Waiting)


@dataclass
class Head(Generic[R]):
    """The request that is admitted next; `request` is None if any request may be.

    Requests that need few pages could overtake a larger request forever. So when the pool has too few pages for a
    larger request, this request becomes the head, and the others wait.

    vLLM does not ask for a head that waits for something else, such as a slot of its LoRA adapter. The others would
    then wait without need. So a request is no longer the head after a scheduling pass in which vLLM asked only for
    others.

    smallest: number of pages of the smallest request that has arrived. own: whether vLLM asked for the head in this
    pass. others: whether vLLM asked for other waiting requests in this pass.
    """

    smallest: int
    request: R | None = None
    own: bool = False
    others: bool = False

    def allows(self, rows: R) -> bool:
        """Whether a request that vLLM asks for may be admitted now."""
        if self.request is None:
            return True
        own = rows is self.request
        self.own, self.others = self.own or own, self.others or not own
        return own

    def refused(self, rows: R) -> None:
        """The pool has too few pages for a request."""
        if rows.most > self.smallest:
            self.request, self.own = rows, True

    def left(self, rows: R) -> None:
        """A request was admitted, or has ended."""
        if self.request is rows:
            self.request = None

    def end_pass(self) -> None:
        """vLLM has asked for all requests that it wants in this step."""
        if self.others and not self.own:
            self.request = None
        self.own = self.others = False
