# SPDX-License-Identifier: Apache-2.0
"""Coverage: checks that the first forward of a model writes every selected hook.

A feature of vLLM may replace a tapped module, and a fused kernel may skip the module. The tap then never runs, and the
bytes of its hook in a row would keep the previous contents of the memory. So in the first forward each selected hook of
each layer must be written once, with one row per token. vLLM runs this forward before it serves requests, to measure
memory. If it runs none, first_forward.py runs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dmi_connector.hooks import HOOKS
from dmi_connector.layout import RowField

TOKEN_IDS = RowField("token_ids", 0, "int32", 1, 0)
POSITIONS = RowField("positions", 0, "int32", 1, 4)
"""The fields of the row header: token id and position, as the model got them."""

UNWRITTEN = 0x7FC1
"""The 16-bit word with which `check="poison"` fills rows. Such bytes are NaN in bfloat16, float16 and float32. In int32
they are a number that no hook has.
"""


def poison(rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Fill rows with UNWRITTEN before a forward writes them, so that values that no tap writes can be detected.

    rows: uint8 [slots, row_bytes]. slots: int64 [tokens]. Padding tokens have negative slots. Row 0 is filled for them,
    because no token has this row.
    """
    rows.view(torch.int16).index_fill_(0, slots.clamp(min=0), UNWRITTEN)


class Coverage:
    """Records which fields the taps of one model write in its first forward.

    fields: the fields of a row. poison: whether rows are filled with UNWRITTEN before each forward. header_first:
    whether the row header is written before `embed`.

    first_at: byte offset in a row that the first tap of a forward writes. poisons: the argument `poison`. tokens:
    number of tokens of the running forward, from its row headers; None before the first forward. checked: whether
    `check` was called. logits: whether `compute_logits` has run. model: the tapped model, a weak reference.
    """

    def __init__(self, fields: Iterable[RowField] = (), poison: bool = False, header_first: bool = False) -> None:
        self._fields = {f.offset: f for f in (TOKEN_IDS, POSITIONS, *fields)}
        self._modules: dict[int, str] = {}
        self._written: dict[int, list[int]] = {}
        embed = next((f for f in self._fields.values() if f.tapped == "embed"), TOKEN_IDS)
        first = TOKEN_IDS if header_first else embed
        self._begins = frozenset((TOKEN_IDS.offset, first.offset))
        self.first_at, self.poisons = first.offset, poison
        self.tokens: int | None = None
        self._forward: Callable[[], object | None] = lambda: None
        self.checked = False
        self.logits = False
        self.model: weakref.ref[Any] | None = None

    @property
    def begun(self) -> bool:
        """Whether a forward has begun."""
        return self.checked or bool(self._written)

    def expect(self, field: RowField, module: str) -> None:
        """Record where a field is tapped, for messages. module: path of the module in the model."""
        self._modules[field.offset] = module

    def wrote(self, start: int, offsets: Sequence[int], tokens: int, forward: object) -> None:
        """Record that values of `tokens` tokens are written at bytes `start + offsets[i]` of their rows.

        forward: vLLM's context of the forward.

        After the first forward was checked, raises RuntimeError if the header of the same forward has another number of
        tokens. When a piecewise CUDA graph is replayed, only the taps inside attention run in Python. Nothing is
        compared then, because no header of this forward is recorded.
        """
        first = start + offsets[0]
        if first in self._begins:
            self.tokens, self._forward = tokens, weakref.ref(forward)
            if not self.checked and first in self._written:  # the header again: another forward has begun
                self._written.clear()
        if not self.checked:
            for offset in offsets:
                self._written.setdefault(start + offset, []).append(tokens)
        elif tokens != self.tokens and self._forward() is forward:
            names = ", ".join(_name([self._fields[start + offset]]) for offset in offsets)
            raise RuntimeError(
                f"hooks: {names} got values of {tokens} tokens in a forward of {self.tokens} tokens; "
                "leave these hooks out, or turn off the feature that splits the batch"
            )

    def check(self, tokens: int | None = None) -> None:
        """Check the first forward. Further calls do nothing.

        tokens: number of tokens of the first forward; None: the number of its row headers.

        Raises ValueError if a field was not written exactly once, for `tokens` tokens. The message names the hooks,
        their modules and the fix.
        """
        if self.checked:
            return
        self.checked = True
        count = self.tokens if tokens is None else tokens
        wrong: dict[tuple[str, tuple[int, ...]], list[RowField]] = {}
        for offset, row_field in self._fields.items():
            seen = self._written.get(offset, [])
            if seen != [count]:
                wrong.setdefault((row_field.hook, tuple(seen)), []).append(row_field)
        self._written.clear()
        if wrong:
            raise ValueError(
                "; ".join(self._words(fields, seen, count) for (_, seen), fields in wrong.items())
                + ". Leave these hooks out (as in hooks='vllm-full,-topk_ids'), or turn off the feature of the engine "
                "that replaces or skips the module. docs/COMPATIBILITY.md lists the features"
            )

    def check_logits(self) -> None:
        """Raise ValueError if `compute_logits` has not run. Call it after the first forward."""
        if not self.logits:
            raise ValueError(
                "hooks: logits are not captured: compute_logits did not run in the model's first forward; leave "
                "logits out, or turn off the feature that samples without it"
            )

    def _words(self, fields: Sequence[RowField], seen: tuple[int, ...], tokens: int | None) -> str:
        module = self._modules.get(fields[0].offset, "no module of this model")
        if not seen:
            what = "was not written"
        elif len(seen) > 1:
            what = f"was written {len(seen)} times"
        else:
            what = f"got values of {seen[0]} tokens"
        return f"hooks: {_name(fields)} {what} in a forward of {tokens} tokens; it is tapped at {module}"


def _name(fields: Sequence[RowField]) -> str:
    """The name of a hook, with the layers of `fields` unless the hook exists once in the model."""
    hook = HOOKS.get(fields[0].tapped)
    if hook is None or hook.scope == "once":
        return fields[0].hook
    return f"{fields[0].hook} of layer {', '.join(str(layer) for layer in sorted({f.layer for f in fields}))}"
