# SPDX-License-Identifier: Apache-2.0
"""`dmi diff`: compares captures of the same tokens, and says where they differ."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dmi_connector.analysis.diff import CaptureDiff, HookDiff, NothingToCompare, diff, pairs
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.captures import Captures, open_captures
from dmi_connector.cli.tables import format_table
from dmi_connector.store.format.remote_path import place_of
from dmi_connector.store.read.index import CaptureInfo, info_of, is_store
from dmi_connector.wording import cut

_SHOWN = 20
"""Maximum number of hooks in the table of a pair, and maximum number of listed pairs that are not compared."""


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dmi diff`."""
    parser.add_argument("a", metavar="A", help="a store, or a directory of stores")
    parser.add_argument("b", metavar="B", help="as A; stores of two directories are paired by key, else by prompt")
    parser.add_argument("--hooks", default="*", help="names or wildcards, separated by commas (default: all)")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="E",
        help="maximum relative error of a row (default: by dtype; bfloat16: 0.05)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list, one entry per pair")
    parser.set_defaults(run=run_diff)


def run_diff(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 0 if all pairs agree, 1 if a pair differs or cannot be compared.

    Raises ValueError if there is no pair, or if no pair can be compared.
    """
    left, right = _captures(options.a), _captures(options.b)
    matched, alone = pairs(left, right)
    if not matched:
        raise ValueError(
            f"{options.a} and {options.b} share no key and no prompt; give two captures of the same tokens"
        )
    found: list[tuple[CaptureInfo, CaptureDiff]] = []
    not_compared: list[tuple[tuple[int, int], NothingToCompare]] = []
    text = ""
    for one, other in matched:
        with left[one] as a, right[other] as b:
            try:
                found.append((left.infos[one], diff(a, b, options.hooks, options.tolerance)))
            except NothingToCompare as error:
                not_compared.append(((one, other), error))
                continue
            text = _text(a, found[-1][1]) if len(matched) == 1 else ""
    if not found:
        raise not_compared[0][1]
    if options.json:
        lacking = [_json_of_none(left.infos[one], right.infos[other], why) for (one, other), why in not_compared]
        print(json.dumps([*(_json(each) for _, each in found), *lacking], indent=1))
    else:
        print(text or _table(found))
        for _, why in not_compared[:_SHOWN]:
            print(f"not compared: {why}")
        if len(not_compared) > _SHOWN:
            print(f"... and {len(not_compared) - _SHOWN} more are not compared; --json has all")
        if alone:
            print(f"{alone} captures have no partner")
    return 0 if not not_compared and all(each.alike for _, each in found) else 1


def _captures(path: str) -> Captures:
    place = place_of(path)
    found = Captures((info_of(place),)) if is_store(place) else open_captures(place, incomplete=True)
    if not len(found):
        raise ValueError(f"diff: {found.why_empty}; give a store, or a directory of stores")
    return found


def _json(found: CaptureDiff) -> dict[str, Any]:
    """The JSON entry of a pair. An infinite error becomes null, because JSON has no infinity."""
    hooks = [asdict(hook) | {"worst": None if hook.worst == math.inf else hook.worst} for hook in found.hooks]
    first = next((hook for hook in hooks if hook["unlike"]), None)
    return {**asdict(found), "hooks": hooks, "first": first, "alike": found.alike, "not_compared": None}


def _json_of_none(a: CaptureInfo, b: CaptureInfo, why: NothingToCompare) -> dict[str, Any]:
    """The JSON entry of a pair that cannot be compared."""
    return {"a": str(a.store), "b": str(b.store), "alike": False, "not_compared": str(why)}


def _text(capture: Capture, found: CaptureDiff) -> str:
    """The differences of one pair as text. capture: store A of the pair."""
    lines = [f"a: {found.a}", f"b: {found.b}", f"{found.positions} rows and {len(found.hooks)} hooks compared"]
    if found.tokens_differ is not None:
        lines.append(f"tokens differ from position {found.tokens_differ} on; rows after it are not compared")
    first = found.first
    if first is None:
        lines.append("no row differs by more than its tolerance")
    else:
        token = int(capture.token_ids[(capture.positions == first.position).argmax()])
        lines.append(f"first: {first.name} at position {first.position} (token {token})")
        unlike = [hook for hook in found.hooks if hook.unlike]
        lines += ["", format_table(("hook", "unlike", "first at", "max error", "at"), map(_cells, unlike[:_SHOWN]))]
        if len(unlike) > _SHOWN:
            lines.append(f"... and {len(unlike) - _SHOWN} more, in the order of the forward; --json has all")
    lines += [f"left out: {hook}: {why}" for hook, why in found.left_out.items()]
    return "\n".join(lines)


def _cells(hook: HookDiff) -> Sequence[object]:
    return hook.name, f"{hook.unlike} of {hook.rows}", hook.position, f"{hook.worst:.3g}", hook.worst_position


def _table(found: Sequence[tuple[CaptureInfo, CaptureDiff]]) -> str:
    """A table with one line per pair, and a line of totals."""
    rows = []
    for info, each in found:
        first, worst = each.first, max(each.hooks, key=lambda hook: hook.worst)
        differ = "" if each.tokens_differ is None else each.tokens_differ
        where = ("", "") if first is None else (first.name, first.position)
        rows.append(
            (cut(info.key or info.store.name), each.positions, differ, *where, f"{worst.worst:.3g}", worst.name)
        )
    header = ("capture", "rows", "tokens differ at", "first hook", "at position", "max error", "in hook")
    return f"{format_table(header, rows)}\n{len(rows)} pairs, {sum(not each.alike for _, each in found)} differ"
