# SPDX-License-Identifier: Apache-2.0
"""Compares two captures of the same tokens: which hook differs first in the forward, at which token, and how much."""

from __future__ import annotations

import fnmatch
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmi_connector.analysis.training.rows import BLOCK, known_tokens, present_rows
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.captures import Captures
from dmi_connector.hooks import HOOKS, SAMPLED
from dmi_connector.reduce import Keeps
from dmi_connector.wording import suggest

TOLERANCES = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""{dtype of the model: largest relative error at which two rows agree}. Other batches and kernels round differently,
and the differences grow from layer to layer.
"""
ROUNDED = 5e-2
"""The smallest tolerance for a hook that was reduced in one of the captures."""
_CHOICES = ("topk_ids", "indexer_topk")
"""Hooks whose values have no order: experts of equal weight may change places, and so may positions of an indexer."""
_BEFORE = ("mrope_positions", "embed")
"""Hooks outside the layers that the forward computes first."""


class NothingToCompare(ValueError):
    """Two captures have no row, or no hook, that can be compared."""


@dataclass(frozen=True)
class HookDiff:
    """How one hook, or one layer of it, differs between two captures.

    tolerance: the largest error at which two rows agree. rows: the number of rows compared. unlike: the number of rows
    whose error is above the tolerance. position: the position of the first of these rows; None if there is none. worst:
    the largest error of a row. worst_position: the position of that row; None if every error is 0.

    The error of a row is |a - b| / max(|a|, |b|), with L2 norms. Equal rows have the error 0, also if they hold NaN or
    infinities. If rows differ and one of them is not finite, the error is inf. For integer hooks the error is the
    fraction of values that differ. For `topk_ids` and `indexer_topk` it is the fraction of values of one row that are
    not in the other row: the larger of the fractions of both rows.
    """

    hook: str
    layer: int | None
    tolerance: float
    rows: int
    unlike: int
    position: int | None
    worst: float
    worst_position: int | None

    @property
    def name(self) -> str:
        """The hook and its layer as a selection names them, such as "q@3"."""
        return self.hook if self.layer is None else f"{self.hook}@{self.layer}"


@dataclass(frozen=True)
class CaptureDiff:
    """How two captures differ.

    positions: the number of rows that both captures have before the first token that differs. tokens_differ: the
    position of that token; None if no token differs. hooks: in the order of the forward. left_out: {hook: why the hook,
    or some of its layers, are not compared}. It also has names and wildcards that match no hook of the captures.
    """

    a: str
    b: str
    positions: int
    tokens_differ: int | None
    hooks: tuple[HookDiff, ...]
    left_out: dict[str, str]

    @property
    def first(self) -> HookDiff | None:
        """The first hook in the order of the forward that has a row above its tolerance."""
        return next((hook for hook in self.hooks if hook.unlike), None)

    @property
    def alike(self) -> bool:
        """Whether tokens agree and no row is above its tolerance."""
        return self.first is None and self.tokens_differ is None


def diff(a: Capture, b: Capture, hooks: str = "*", tolerance: float | None = None) -> CaptureDiff:
    """Compare two captures row by row, up to the first position where their tokens differ.

    hooks: names or wildcards, separated by commas. tolerance: largest relative error at which two rows agree. By
    default it depends on the dtype of the models (TOLERANCES).

    Raises ValueError for a tolerance below 0 and for a name that no hook has. Raises NothingToCompare if there is no
    hook or no row to compare.
    """
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance: {tolerance} is not valid; give a number of at least 0, as in 0.01")
    positions, differ = _common(a, b)
    if not len(positions):
        where = "their first tokens differ" if differ is not None else "no position is in both"
        raise NothingToCompare(
            f"{a.path} and {b.path} have no rows to compare: {where}; give captures of the same tokens"
        )
    found: list[HookDiff] = []
    left_out: dict[str, str] = {}
    patterns = [pattern.strip() for pattern in hooks.split(",")]
    for pattern in patterns:
        _check_pattern(pattern, a, b, left_out)
    for hook, layer in _in_order(a, b, patterns, left_out):
        why = _unlike_forms(a, b, hook, layer)
        if why:
            left_out[hook] = why
            continue
        own = _tolerance(a, b, hook, layer) if tolerance is None else tolerance
        compared = _compare(a, b, hook, layer, positions, own)
        if not compared.rows:  # logits that were sampled at other positions
            left_out[hook] = "no position has a row in both"
            continue
        found.append(compared)
    if not found:
        why = "; ".join(f"{hook}: {reason}" for hook, reason in left_out.items()) or f"none of {hooks!r} is in both"
        raise NothingToCompare(
            f"{a.path} and {b.path} have no hook to compare ({why}); name other hooks, or give captures with the same"
            " hooks"
        )
    return CaptureDiff(str(a.path), str(b.path), len(positions), differ, tuple(found), left_out)


def pairs(a: Captures, b: Captures) -> tuple[list[tuple[int, int]], int]:
    """Pair the captures of two sets: first by key, then by prompt.

    If several captures share a key, those with the same prompt are paired first, since concurrent requests start in any
    order. Captures that are still ambiguous are paired in the order of their sets.

    Returns (pairs of indexes in `a` and `b`, the number of captures without a partner).
    """
    found: dict[int, int] = {}
    left, right = range(len(a.infos)), range(len(b.infos))
    shared = {key for c in (a, b) for key, count in Counter(info.key for info in c.infos).items() if count > 1} - {None}
    _match(
        found,
        (((a.infos[n].key, _prompt(a, n)), n) for n in left if a.infos[n].key in shared),
        (((b.infos[n].key, _prompt(b, n)), n) for n in right if b.infos[n].key in shared),
    )
    left_over = [n for n in left if n not in found]
    right_over = sorted({*right} - {*found.values()})
    _match(found, ((a.infos[n].key, n) for n in left_over), ((b.infos[n].key, n) for n in right_over))
    left_over = [n for n in left if n not in found]
    right_over = sorted({*right} - {*found.values()})
    # A capture that begins after its prompt has no prompt to compare.
    _match(found, ((_prompt(a, n) or None, n) for n in left_over), ((_prompt(b, n) or None, n) for n in right_over))
    return sorted(found.items()), len(left) + len(right) - 2 * len(found)


def _match(found: dict[int, int], left: Iterable[tuple[Any, int]], right: Iterable[tuple[Any, int]]) -> None:
    """Pair the items of `left` and `right` that have equal marks, in order. Add {number in left: number in right} to
    `found`.

    Items are (mark, number). An item with the mark None is not paired.
    """
    waiting: defaultdict[Any, deque[int]] = defaultdict(deque)
    for mark, number in right:
        waiting[mark].append(number)
    for mark, number in left:
        if mark is not None and waiting[mark]:
            found[number] = waiting[mark].popleft()


def _prompt(captures: Captures, number: int) -> tuple[int, ...]:
    """The prompt tokens that a capture has."""
    with captures[number] as capture:
        return tuple(capture.token_ids[: max(0, capture.prompt_len - capture.attrs["start"])].tolist())


def _common(a: Capture, b: Capture) -> tuple[np.ndarray, int | None]:
    """(positions of the rows that both have before the first token that differs, position of that token or None)."""
    positions, at_a, at_b = np.intersect1d(a.positions, b.positions, assume_unique=True, return_indices=True)
    other = a.token_ids[at_a] != b.token_ids[at_b]
    other &= known_tokens(a)[at_a] & known_tokens(b)[at_b]
    differ = int(positions[other.argmax()]) if other.any() else None
    there = present_rows(a)[at_a] & present_rows(b)[at_b]
    return positions[there & (positions < (np.inf if differ is None else differ))], differ


def _in_order(
    a: Capture, b: Capture, patterns: Sequence[str], left_out: dict[str, str]
) -> Iterable[tuple[str, int | None]]:
    """(hook, layer) of the hooks in both captures, in the order of the forward. Adds the others to `left_out`."""
    held = {**a.attrs["hooks"], **b.attrs["hooks"]}
    names = [n for n in dict.fromkeys((*HOOKS, *held)) if n in held and _named(n, patterns)]  # probes last
    keys: list[tuple[int, int, int, str, int | None]] = []
    for number, name in enumerate(names):
        if name not in a.hooks or name not in b.hooks:
            left_out[name] = f"it is not in {(b if name in a.hooks else a).path}"
            continue
        mine, theirs = a.layers[name], b.layers[name]
        if lacking := sorted({*mine} ^ {*theirs}):
            left_out[name] = f"layers {', '.join(map(str, lacking))} are in only one of the captures"
        if mine or theirs:
            keys += [(1, layer, number, name, layer) for layer in mine if layer in theirs]
        else:
            keys.append((0 if name in _BEFORE else 2, 0, number, name, None))
    return [(name, layer) for *_, name, layer in sorted(keys, key=lambda key: key[:3])]


def _check_pattern(pattern: str, a: Capture, b: Capture, left_out: dict[str, str]) -> None:
    """Add a pattern that matches no hook of either capture to `left_out`.

    Raises ValueError for a name or wildcard that matches no known hook.
    """
    held = {**a.attrs["hooks"], **b.attrs["hooks"]}
    if fnmatch.filter(held, pattern):
        return
    if not fnmatch.filter(HOOKS, pattern):
        near = suggest(pattern, HOOKS) or ";"
        raise ValueError(f"diff: no hook is called {pattern!r}{near} the captures hold {', '.join(held)}")
    left_out[pattern] = "it is in neither capture"


def _named(hook: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(hook, pattern) for pattern in patterns)


def _unlike_forms(a: Capture, b: Capture, hook: str, layer: int | None) -> str:
    """Why the values of a hook cannot be compared; "" if they can."""
    if hook == "pattern":
        return "it holds only the largest weights"
    one, other = (c.attrs["hooks"][c.sources(hook, layer)[0].array].get("reduce") for c in (a, b))
    reductions = [c.reduction(hook, layer) for c in (a, b)]
    if one != other and any(r is not None and Keeps.EVERY_VALUE not in r.keeps for r in reductions):
        kinds = [form["kind"] if form else "full rows" for form in (one, other)]
        return f"it is stored as {kinds[0]} in one and as {kinds[1]} in the other, or with other settings"
    widths = [capture.shape(hook)[-1] for capture in (a, b)]
    return "" if widths[0] == widths[1] else f"its rows have {widths[0]} and {widths[1]} values"


def _tolerance(a: Capture, b: Capture, hook: str, layer: int | None) -> float:
    if hook in HOOKS and HOOKS[hook].dtype == "int32":
        return 0.0
    dtypes = [TOLERANCES.get(capture.attrs.get("dtype", ""), max(TOLERANCES.values())) for capture in (a, b)]
    reduced = any(capture.reduction(hook, layer) is not None for capture in (a, b))
    return max(*dtypes, ROUNDED if reduced else 0.0)


def _compare(a: Capture, b: Capture, hook: str, layer: int | None, positions: np.ndarray, tolerance: float) -> HookDiff:
    """Compare the rows of a hook at `positions`, in blocks."""
    sampled = hook in SAMPLED
    mine, theirs = (c.logits_positions if sampled else c.positions for c in (a, b))
    shared = np.intersect1d(np.intersect1d(mine, theirs), positions)
    at_a, at_b = (_rows_of(own, shared) for own in (mine, theirs))
    unlike, first, worst, worst_at = 0, None, 0.0, None
    for begin in range(0, len(shared), BLOCK):
        block = slice(begin, begin + BLOCK)
        errors = _errors(_read(a, hook, layer, at_a[block]), _read(b, hook, layer, at_b[block]), hook)
        above = errors > tolerance
        if above.any() and first is None:
            first = int(shared[block][above.argmax()])
        unlike += int(above.sum())
        if errors.max() > worst:
            worst, worst_at = float(errors.max()), int(shared[block][errors.argmax()])
    return HookDiff(hook, layer, tolerance, len(shared), unlike, first, worst, worst_at)


def _rows_of(positions: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The indexes in `positions` of the positions `wanted`, int64 [n]."""
    order = np.argsort(positions, kind="stable")
    return np.asarray(order[np.searchsorted(positions, wanted, sorter=order)])


def _read(capture: Capture, hook: str, layer: int | None, rows: np.ndarray) -> np.ndarray:
    values = capture.numpy(hook, layer, rows)
    return values[0] if values.ndim == 3 else values


def _errors(a: np.ndarray, b: np.ndarray, hook: str) -> np.ndarray:
    """The error of each row, float64 [rows]."""
    if a.dtype.kind in "iu":
        if hook in _CHOICES:
            return np.array([_unlike_choices(one, other) for one, other in zip(a, b, strict=True)])
        return np.asarray((a != b).mean(1))
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        scale = np.maximum(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))
        errors = np.linalg.norm(a - b, axis=1) / np.where(scale == 0, 1, scale)
    finite = np.isfinite(a).all(1) & np.isfinite(b).all(1)
    same = ((a == b) | (np.isnan(a) & np.isnan(b))).all(1)
    return np.where(same, 0.0, np.where(finite, errors, np.inf))


def _unlike_choices(one: np.ndarray, other: np.ndarray) -> float:
    """The fraction of values of one row that are not in the other row: the larger of the fractions of both rows.

    Both are needed: a row with fewer positions than `index_topk` is filled up with -1.
    """
    return max(float(np.isin(x, y, invert=True).mean()) for x, y in ((one, other), (other, one)))
