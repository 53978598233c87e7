# SPDX-License-Identifier: Apache-2.0
"""attn(m): the m largest attention weights of each head. Stores have them instead of all weights (hook `pattern`),
which fused kernels do not write.

A row has for each head: m positions (int32), m weights (float32), and the entropy of all weights in nats (float32).
Positions are in descending order of weight; those of equal weights are in ascending order. If a token attends to fewer
than m positions, the remaining entries have position -1 and weight 0.

With `half`, positions are uint16 (65,535 stands for -1) and weights are float16. The entropy stays float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dmi_connector.reduce.base import Keeps, Reduction, unpack
from dmi_connector.reduce.errors import ReduceError
from dmi_connector.reduce.statistic import Statistic

if TYPE_CHECKING:
    import torch

LARGEST = 64
"""Maximum of m. The kernel keeps m scores per head in registers."""
NOWHERE = (1 << 16) - 1
"""The 16-bit value that stands for position -1."""


@dataclass(frozen=True)
class AttentionSummary(Reduction):
    """The m largest weights of every head.

    A kernel computes them after attention (engine/kernels/attention.py), so `encode` is not used. Decoded rows have m
    positions, m weights and one entropy per head; `split` separates them.
    """

    m: int = 8
    half: bool = False
    kind: ClassVar[str] = "attn"
    forms: ClassVar[tuple[str, ...]] = ("attn(m)", "attn(m,half)")
    example: ClassVar[str] = "attn(8)"
    flags: ClassVar[Mapping[str, tuple[str, Any]]] = {"half": ("half", True)}
    number: ClassVar[str] = "m"
    only: ClassVar[frozenset[str]] = frozenset({"pattern"})
    keeps: ClassVar[Keeps] = Keeps.NOTHING

    def __post_init__(self) -> None:
        if not 1 <= self.m <= LARGEST:
            raise ReduceError(f"reduce: attn({self.m}) is not valid; keep 1 to {LARGEST} positions of each head")

    @property
    def words(self) -> int:
        """Number of decoded values per head."""
        return 2 * self.m + 1

    @property
    def stored_words(self) -> int:
        """Number of stored 4-byte words per head."""
        return (self.m if self.half else 2 * self.m) + 1

    def settings(self) -> dict[str, Any]:
        return super().settings() if self.half else {"kind": self.kind, "m": self.m}

    def check_context(self, tokens: int) -> None:
        if self.half and tokens > NOWHERE:
            raise ReduceError(
                f"reduce: attn({self.m},half) has room for positions below {NOWHERE}, but max_model_len is {tokens};"
                f" use attn({self.m}), or lower max_model_len"
            )

    def stored_width(self, width: int, dtype: str) -> int:
        return 4 * self.stored_words * width

    def encode(self, values: torch.Tensor, layer: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
        raise ReduceError("reduce: attn(m) is computed in the forward pass only; stored values cannot be reduced by it")

    def decode(self, stored: np.ndarray, width: int, dtype: str) -> np.ndarray:
        heads = (*stored.shape[:-1], width)
        if self.half:
            halves = unpack(stored, 0, 2 * self.stored_words * width, "uint16")
            halves = halves.reshape(*heads, 2 * self.stored_words)
            parts = [halves[..., : self.m].astype(np.float32), halves[..., self.m : -2].view("<f2").astype(np.float32)]
            parts[0][parts[0] == NOWHERE] = -1
            entropy = np.ascontiguousarray(halves[..., -2:]).view("<f4")
            return np.concatenate([*parts, entropy], -1).reshape(*stored.shape[:-1], width * self.words)
        words = unpack(stored, 0, self.words * width, "int32").reshape(*heads, self.words)
        values = words.view("<f4").copy()
        values[..., : self.m] = words[..., : self.m]  # exact up to 2**24
        return values.reshape(*stored.shape[:-1], width * self.words)

    def split(self, decoded: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Split decoded rows [..., heads x words].

        Returns positions int32 [..., heads, m], weights float32 [..., heads, m], and entropy float32 [..., heads].
        """
        heads = decoded.reshape(*decoded.shape[:-1], decoded.shape[-1] // self.words, self.words)
        return heads[..., : self.m].astype(np.int32), heads[..., self.m : -1], heads[..., -1]

    def statistics(self) -> tuple[Statistic, ...]:
        entropy = Statistic(
            "entropy", lambda rows, head: self.split(rows)[2][:, head], "head", unit="nats", values_each=self.words
        )
        largest = Statistic(
            "largest weight", lambda rows, head: self.split(rows)[1][:, head, 0], "head", values_each=self.words
        )
        return entropy, largest
