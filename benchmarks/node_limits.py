# SPDX-License-Identifier: Apache-2.0
"""What a node can capture, by costs that `benchmarks.node` measured: the formulas and the table of docs/SCALE.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import common

Numbers = dict[str, Any]
ROWS = 511
"""Of a store."""
RAW_PASSES, STORED_PASSES = 2, 3
"""Passes through main memory, counted, not measured. Raw bytes: into the ring, out of it. Stored bytes: a page is
cleared, it is filled, the disk reads it.
"""


def _assumed(value: float, what: str) -> Any:
    return field(default=value, metadata={"what": what})


@dataclass(frozen=True)
class Machine:
    """A node. Its defaults are assumptions."""

    cores: float = _assumed(16, "cores for each GPU, one of them kept busy by the engine")
    core_cost: float = _assumed(1.5, "CPU seconds there for one where costs were measured")
    memory: float = _assumed(400, "GB/s of main memory")
    disk: float = _assumed(20, "GB/s into the file system")
    link: float = _assumed(50, "GB/s off each GPU")
    writers: float = _assumed(64, "writer processes of a rank at most; else its part of the cores")


def split(layout: str) -> tuple[bool, int]:
    """(whether ranks share stores, number of ranks) of "DP 8" or "TP 8"."""
    return layout.startswith("TP"), int(layout.split()[1])


def limits(found: Numbers, case: str, codec: str, layout: str, node: Machine) -> dict[str, float]:
    """Tokens a second of the whole node at which each limit binds. found: a result of `benchmarks.node`."""
    tensor, n = split(layout)
    row, store, cost = found["rows"][case][layout], found["costs"][case]["store"], found["costs"][case][codec][layout]
    GB, share = row["bytes"] / 1e9, row["largest_share"]
    cpu_s = node.core_cost * (cost["writer_s"] * GB + store[layout]["cpu_s"] / ROWS)
    return {
        "cores": (node.cores - 1) * n / cpu_s,
        "writers": min(node.writers, node.cores * n * share) / share / cpu_s,
        "coordinator": (1 if tensor else n) * ROWS / cost["coordinator_s_a_store"] / node.core_cost,
        "link": node.link / share / GB,
        "memory": node.memory / (RAW_PASSES + STORED_PASSES / cost["compression"]) / GB,
        "disk": node.disk * cost["compression"] / GB,
        "index": ROWS / (2 * found["shared"]["append"][str(n)]["cpu_s"]) / node.core_cost,
    }


def table(found: Numbers, node: Machine, layouts: Sequence[str], codec: str | None = None) -> str:
    """Markdown: thousands of tokens a second. codec: in the place of each selection's own."""
    lines: list[list[str]] = []
    for case, rows in found["rows"].items():
        for layout in layouts:
            used = codec or rows[layout]["codec"]
            by_limit = limits(found, case, used, layout, node)
            name, least = min(by_limit.items(), key=lambda item: item[1])
            GB, compression = rows[layout]["bytes"] / 1e9, found["costs"][case][used][layout]["compression"]
            lines.append([f"{case}, `{used}`", f"{GB * 1e3:.2f}", layout])
            lines[-1] += [f"{common.three_digits(number / 1e3):,g}" for number in by_limit.values()]
            lines[-1] += [name, f"{least * GB / compression:.1f}", str(found["measured"][case][layout] or "")]
    head = ["model, selection, codec", "MB a token", "GPUs", *by_limit, "first", "GB/s stored", "measured"]
    return common.markdown([head, *lines])
