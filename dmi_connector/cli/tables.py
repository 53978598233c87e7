# SPDX-License-Identifier: Apache-2.0
"""The text and JSON output of `dmi ls` and `dmi info`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dmi_connector.captures.capture import Capture
from dmi_connector.captures.captures import is_there
from dmi_connector.dtypes import ITEMSIZE
from dmi_connector.store.format.schema import layer_numbers
from dmi_connector.store.read.index import FINISHED, CaptureInfo
from dmi_connector.store.read.metadata import read_array, read_attrs
from dmi_connector.wording import cut, format_bytes

ATTRIBUTES = (
    "model",
    "architecture",
    "dtype",
    "request_id",
    "key",
    "complete",
    "reason",
    "missing",
    "finish_reason",
    "num_tokens",
    "prompt_len",
    "start",
    "seed",
    "speculative",
    "draft_tokens",
    "tp",
    "codec",
    "chunk_tokens",
    "segment_tokens",
    "created",
    "finished",
    "versions",
    "format_version",
)
"""Root attributes that `dmi info` prints, in this order."""

NUMBERS = {"raw", "stored", "ratio", "bytes", "tokens", "hooks", "width", "max error", "sketch", "bound"}
"""Names of columns that are right-aligned."""


def format_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as text. Columns named in NUMBERS are right-aligned, the others left-aligned."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        columns = zip(header, row, widths, strict=True)
        lines.append("  ".join(c.rjust(w) if name in NUMBERS else c.ljust(w) for name, c, w in columns))
    return "\n".join(line.rstrip() for line in [lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


@dataclass(frozen=True)
class ArraySize:
    """The size of one array of a store.

    shape, dtype: as in the store. layers: see `format_layers`. raw: bytes of the values. stored: bytes of the files,
    metadata included.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layers: str
    raw: int
    stored: int

    @property
    def ratio(self) -> str:
        """raw / stored as text, "-" if nothing is stored."""
        return f"{self.raw / self.stored:.2f}" if self.stored else "-"


def array_sizes(capture: Capture) -> list[ArraySize]:
    """The sizes of all arrays of a store: first the hooks in the order of its attributes, then the other arrays."""
    hooks: dict[str, Any] = capture.attrs["hooks"]
    names = list(dict.fromkeys(path.split("/")[0] for path in capture.attrs["files"]))
    sizes = []
    for name in [*(n for n in hooks if n in names), *(n for n in names if n not in hooks)]:
        document = read_array(capture.files, name)
        shape, stored_type = tuple(document["shape"]), document["data_type"]
        raw = math.prod(shape) * ITEMSIZE[stored_type]
        stored = sum(size for path, (size, _) in capture.attrs["files"].items() if path.split("/")[0] == name)
        layers = hooks[name]["layers"] if name in hooks else []
        dtype = hooks[name]["dtype"] if name in hooks else stored_type
        sizes.append(ArraySize(name, shape, dtype, format_layers(layers), raw, stored))
    return sizes


def store_size(capture: Capture) -> ArraySize:
    """The size of all arrays of a store together. The root `zarr.json` is not counted."""
    sizes = array_sizes(capture)
    return ArraySize("total", (), "", "", sum(s.raw for s in sizes), sum(s.stored for s in sizes))


def format_layers(layers: Sequence[int]) -> str:
    """Layer numbers as ranges: [0, 1, 2, 5] gives "0-2+5", [] gives "-"."""
    return layer_numbers(layers) or "-"


def info_text(capture: Capture) -> str:
    """The output of `dmi info`: the attributes in ATTRIBUTES, and a table of the arrays."""
    rows = [
        (
            s.name,
            "x".join(map(str, s.shape)),
            s.dtype,
            s.layers,
            format_bytes(s.raw),
            format_bytes(s.stored),
            s.ratio,
        )
        for s in [*array_sizes(capture), store_size(capture)]
    ]
    table = format_table(("array", "shape", "dtype", "layers", "raw", "stored", "ratio"), rows)
    width = max(map(len, ATTRIBUTES))
    attributes = [f"{name:<{width}}  {_text(capture.attrs[name])}" for name in ATTRIBUTES if name in capture.attrs]
    return "\n".join([str(capture.path), "", *attributes, "", table])


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return "-" if value is None else str(value)


def info_json(capture: Capture) -> dict[str, Any]:
    """The output of `dmi info --json`, JSON-serializable. Sizes are in bytes."""
    arrays = [
        {"name": s.name, "shape": list(s.shape), "dtype": s.dtype, "raw": s.raw, "stored": s.stored}
        for s in array_sizes(capture)
    ]
    attributes = {name: capture.attrs[name] for name in ATTRIBUTES if name in capture.attrs}
    return {"store": str(capture.path), "attributes": attributes, "arrays": arrays}


def captures_text(found: Sequence[CaptureInfo]) -> str:
    """The output of `dmi ls`: a table with one line per capture."""
    rows = [
        (
            info.store.name,
            cut(info.key or "-"),
            cut(info.request_id or "-"),
            "-" if info.num_tokens is None else info.num_tokens,
            format_bytes(info.bytes),
            info.started.replace("T", " ").split(".")[0],
            info.state if info.reason is None else f"{info.state}: {info.reason}",
        )
        for info in found
    ]
    return format_table(("store", "key", "request", "tokens", "bytes", "started (UTC)", "state"), rows)


def captures_json(found: Sequence[CaptureInfo]) -> list[dict[str, Any]]:
    """The output of `dmi ls --json`, JSON-serializable. `store` is the absolute path or the URL."""
    return [{**vars(info), "store": str(info.store.absolute())} for info in found]


def stats(found: Sequence[CaptureInfo]) -> dict[str, Any]:
    """The output of `dmi ls --stats --json`: totals of captures.

    captures: number of captures. states: {state: number of captures}. absent: number of finished captures whose store
    is gone. bytes, tokens, missing_rows: sums over the stores that exist. reasons: {reason: number of captures}, with
    numbers in reasons replaced by "#". oldest, newest: start times of stores that exist, None without a store.
    """
    ended = [info for info in found if info.state in FINISHED]
    present = [info for info in ended if is_there(info)]
    incomplete = [info for info in present if info.state == "incomplete"]
    missing = [read_attrs(info.store)["missing"] for info in incomplete]
    reasons = Counter(re.sub(r"\d+", "#", info.reason) for info in found if info.reason)
    began = [info.started for info in present if info.started]
    return {
        "captures": len(found),
        "states": dict(Counter(info.state for info in found).most_common()),
        "absent": len(ended) - len(present),
        "bytes": sum(info.bytes or 0 for info in present),
        "tokens": sum(info.num_tokens or 0 for info in present),
        "missing_rows": sum(stop - start for ranges in missing for start, stop in ranges),
        "reasons": dict(reasons.most_common()),
        "oldest": min(began, default=None),
        "newest": max(began, default=None),
    }


def stats_text(totals: dict[str, Any]) -> str:
    """The output of `dmi ls --stats`. totals: result of `stats`."""
    shown = {
        **{name: totals[name] for name in ("captures", "tokens", "missing_rows", "absent")},
        "bytes": format_bytes(totals["bytes"]),
        **{f"state {state}": count for state, count in totals["states"].items()},
        **{name: (totals[name] or "-").replace("T", " ").split(".")[0] for name in ("oldest", "newest")},
    }
    lines = [f"{name.replace('_', ' '):<18}{value}" for name, value in shown.items()]
    return "\n".join(lines + [f"{count} x {reason}" for reason, count in totals["reasons"].items()])
