# SPDX-License-Identifier: Apache-2.0
"""Defines modes, which choose a reduction for each hook by its name and width. Stores name the chosen reductions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dmi_connector.reduce.attn import AttentionSummary
from dmi_connector.reduce.base import Reduction
from dmi_connector.reduce.errors import ReduceError, refuse_sketch
from dmi_connector.reduce.int8 import Int8
from dmi_connector.reduce.projection import RandomProjection
from dmi_connector.reduce.topk import TopK


@dataclass(frozen=True)
class Mode(Reduction):
    """Stands for several reductions until `bind`, which returns the first of `choices` that fits the rows.

    of_hook: (hook, reduction) pairs, which are tried before `choices` for these hooks. attention: the reduction of
    `pattern` if the option `reduce` is the name of the mode.
    """

    name: str
    choices: tuple[Reduction, ...]
    of_hook: tuple[tuple[str, Reduction], ...] = ()
    attention: str = AttentionSummary.example

    def bind(self, hook: str, layers: Sequence[int], width: int, shards: int) -> Reduction:
        own = [reduction for name, reduction in self.of_hook if name == hook]
        *others, last = [*own, *self.choices]
        for reduction in others:
            try:
                return reduction.bind(hook, layers, width, shards)
            except ReduceError:  # the row is too narrow
                continue
        return last.bind(hook, layers, width, shards)


_ALL, _PROJECTED, _LARGEST = Int8(group=32), RandomProjection(512), TopK(64, sample=16)
_COMPACT = (("mlp_post", TopK(64, sample=0)), ("z", RandomProjection(256)))
MODES: Mapping[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("full8", (_ALL,)),
        Mode("rp8", (_PROJECTED, _ALL)),
        Mode("topk8", (_LARGEST, _ALL)),
        Mode("summary", (_PROJECTED, _ALL), (("mlp_post", _LARGEST),)),
        Mode("compact", (_PROJECTED, _ALL), _COMPACT, "attn(4,half)"),
    )
}
"""{name: mode}. docs/REDUCTIONS.md describes each mode."""


def rules_of(mode: str) -> dict[str, str]:
    """The rules {patterns: reduction} that are equivalent to a mode. Raises ReduceError for an unknown mode."""
    if mode not in MODES:
        refuse_sketch(mode)
        raise ReduceError(
            f"reduce: the mode {mode!r} is unknown; use one of {', '.join(MODES)}, or give {{patterns: reduction}}"
        )
    return {f"{hook}*": MODES[mode].attention for hook in sorted(AttentionSummary.only)} | {"*": mode}
