# SPDX-License-Identifier: Apache-2.0
"""Computed sizes and costs: of a billion tokens, of one long sequence, and the limits of a node.

    python -m benchmarks.scale --tokens 1e9 --gpus 1,8,64 --price 0.023     # the first tables of docs/SCALE.md
    python -m benchmarks.scale --sequence 2048 --model Qwen3-4B             # the budget of docs/REDUCTIONS.md

Nothing is measured here. Speeds are those of docs/PERFORMANCE.md on one H200 under continuous load. Speed is assumed to
grow linearly with the number of GPUs, each with an engine and 16 cores of its own; up to four GPUs were measured. Bytes
of a sequence are those of its rows before compression. Metadata files add about 20 kB. `benchmarks.node` measures the
costs from which the limits of a node are computed, and prints the limits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import common
from dmi_connector.dtypes import ITEMSIZE
from dmi_connector.hooks import ModelDims, parse_selection
from dmi_connector.layout import TOKEN_ARRAYS, hook_reductions, row_layouts
from dmi_connector.reduce.attn import AttentionSummary
from dmi_connector.reduce.modes import rules_of

MODULE = "benchmarks.scale"
MODELS = {
    "Qwen3-4B": ModelDims("Qwen3ForCausalLM", 36, 2560, 32, 8, 128, 9728, 151936),
    "Qwen3-32B": ModelDims("Qwen3ForCausalLM", 64, 5120, 64, 8, 128, 25600, 151936),
    "Llama-3-70B": ModelDims("LlamaForCausalLM", 80, 8192, 64, 8, 128, 28672, 128256),
}
"""{name of a model: its sizes}."""

# ---- a billion tokens ----------------------------------------------------------------------------------------------

INDEX_BYTES = 630
"""Bytes of the index per capture, from benchmarks/results/cpu-index.json."""
FIXED_FILES = 7
"""Number of files of a store beside those of hooks: the root document, and two for each of three token arrays. A hook
has two files.
"""


@dataclass(frozen=True)
class Selection:
    """A selection of hooks, and what was measured with it.

    token_bytes: bytes per row. GB_per_s: GB/s that one engine exports while writing keeps up. ratio: raw / stored
    bytes. arrays: number of hooks. limit: the bottleneck.
    """

    name: str
    token_bytes: int
    GB_per_s: float
    ratio: float
    arrays: int
    limit: str


SELECTIONS = (
    Selection("`hidden-states`, `zstd`", 189_440, 3.2, 1.5, 2, "the engine"),
    Selection("four layers' `mlp_post` and `resid_post`, `zstd`", 98_304, 1.6, 1.5, 2, "the engine"),
    Selection("`int8` of everything, `lz4`", 1_280_000, 12.7, 1.0, 14, "cores that encode"),
)


def costs(selection: Selection, tokens: float, gpus: int) -> tuple[float, float]:
    """(hours, GB/s written to files) to capture `tokens` rows on `gpus` GPUs."""
    speed = selection.GB_per_s * gpus
    return tokens * selection.token_bytes / 1e9 / speed / 3600, speed / selection.ratio


def tables(
    tokens: float, gpus: list[int], price: float, rows: int = 511, selections: tuple[Selection, ...] = SELECTIONS
) -> str:
    """Two tables in Markdown: time and speed, then size and price.

    tokens: number of rows. gpus: numbers of GPUs. price: dollars per GB and month. rows: rows per store.
    """
    stores = tokens / rows
    hours = (f"hours, {n} GPU{'s' * (n > 1)}" for n in gpus)
    speed = [["selection", *hours, f"GB/s stored ({'; '.join(map(str, gpus))} GPUs)", "bottleneck"]]
    size = [["selection", "TB raw", "TB stored", f"dollars a month ({price:g} per GB)", "files, millions", "index, GB"]]
    for one in selections:
        found = [costs(one, tokens, n) for n in gpus]
        raw = tokens * one.token_bytes / 1e12
        stored = raw / one.ratio
        files = stores * (FIXED_FILES + 2 * one.arrays)
        speed.append([one.name, *(f"{h:,.1f}" for h, _ in found), "; ".join(f"{s:,.1f}" for _, s in found), one.limit])
        size.append([one.name, f"{raw:,.0f}", f"{stored:,.0f}", f"{stored * 1e3 * price:,.0f}", f"{files / 1e6:,.0f}",
                     f"{stores * INDEX_BYTES / 1e9:,.1f}"])  # fmt: skip
    return common.markdown(speed) + "\n\n" + common.markdown(size)


# ---- one sequence --------------------------------------------------------------------------------------------------

BUDGET = 120e6
"""Maximum number of bytes of one sequence."""
PARTS = {
    "residual stream": "resid_pre,resid_final",
    "MLP neurons": "mlp_post",
    "attention of each head": "pattern",
    "output of each head": "z",
}
"""{part of the budget: its hooks}."""
RAW = "raw"
"""The column of unreduced values. `pattern` is always reduced: in this column by `attn(8)`, as in most modes."""
MODES = ("summary", "compact")
"""Modes of the option `reduce` that the table compares with RAW."""


def token_bytes(hooks: str, mode: str, dims: ModelDims) -> int:
    """Bytes per token of the arrays of `hooks`, without padding, for a model in bfloat16. mode: of MODES, or RAW."""
    selection = parse_selection(hooks, dims)
    rules = {"pattern*": AttentionSummary.example} if mode == RAW else rules_of(mode)
    reductions = hook_reductions(tuple(rules.items()), selection, dims, 1)
    (layout,) = row_layouts(selection, dims, "bfloat16", 1, reductions)
    return sum(field.nbytes for field in layout.fields)


def megabytes(tokens: int, mode: str, dims: ModelDims) -> dict[str, float]:
    """{part of PARTS, or "token arrays": MB} of one sequence of `tokens` tokens. Each store has the token arrays."""
    found = {part: token_bytes(hooks, mode, dims) * tokens / 1e6 for part, hooks in PARTS.items()}
    return {**found, "token arrays": sum(ITEMSIZE[dtype] for dtype in TOKEN_ARRAYS.values()) * tokens / 1e6}


def budget_table(tokens: int, dims: ModelDims) -> str:
    """A table in Markdown of the MB of one sequence, by part and mode."""
    columns = (RAW, *MODES)
    found = {mode: megabytes(tokens, mode, dims) for mode in columns}
    hooks = {part: ", ".join(f"`{hook}`" for hook in names.split(",")) for part, names in PARTS.items()}
    lines = [["MB", "hooks", RAW, *(f"`{mode}`" for mode in MODES)]]
    for part in found[RAW]:
        lines.append([part, hooks.get(part, ""), *(f"{found[mode][part]:,.1f}" for mode in columns)])
        if hooks.get(part) == "`pattern`":
            lines[-1][2] += f" (`{AttentionSummary.example}`)"
    lines.append(["all", "", *(f"{sum(found[mode].values()):,.1f}" for mode in columns)])
    return common.markdown(lines)


# ---- a node ----------------------------------------------------------------------------------------------------------

Numbers = dict[str, Any]
STORE_ROWS = 511
"""Number of rows per store."""
RAW_PASSES, STORED_PASSES = 2, 3
"""Number of times that a raw byte and a stored byte pass through main memory, counted and not measured. A raw byte is
written to the ring and read from the ring. For a stored byte, a page is cleared, the page is written, and the disk
reads the page.
"""


def _assumed(value: float, what: str) -> Any:
    return field(default=value, metadata={"what": what})


@dataclass(frozen=True)
class Machine:
    """A node. The defaults are assumptions."""

    cores: float = _assumed(16, "cores per GPU, one of which the engine uses")
    core_cost: float = _assumed(1.5, "CPU seconds on the node per CPU second on the machine of the measurement")
    memory: float = _assumed(400, "GB/s of main memory")
    disk: float = _assumed(20, "GB/s written to the file system")
    link: float = _assumed(50, "GB/s from each GPU to main memory")
    writers: float = _assumed(64, "maximum number of writer processes per rank")


def split_layout(layout: str) -> tuple[bool, int]:
    """(whether ranks share stores, number of ranks) of a layout such as "DP 8" or "TP 8"."""
    return layout.startswith("TP"), int(layout.split()[1])


def node_limits(found: Numbers, case: str, codec: str, layout: str, node: Machine) -> dict[str, float]:
    """{limit: tokens per second of the whole node that reach it}. found: a result of `benchmarks.node`."""
    tensor, n = split_layout(layout)
    row, store, cost = found["rows"][case][layout], found["costs"][case]["store"], found["costs"][case][codec][layout]
    GB, share = row["bytes"] / 1e9, row["largest_share"]
    cpu_s = node.core_cost * (cost["writer_s"] * GB + store[layout]["cpu_s"] / STORE_ROWS)
    return {
        "cores": (node.cores - 1) * n / cpu_s,
        "writers": min(node.writers, node.cores * n * share) / share / cpu_s,
        "coordinator": (1 if tensor else n) * STORE_ROWS / cost["coordinator_s_a_store"] / node.core_cost,
        "link": node.link / share / GB,
        "memory": node.memory / (RAW_PASSES + STORED_PASSES / cost["compression"]) / GB,
        "disk": node.disk * cost["compression"] / GB,
        "index": STORE_ROWS / (2 * found["shared"]["append"][str(n)]["cpu_s"]) / node.core_cost,
    }


def node_table(found: Numbers, node: Machine, layouts: Sequence[str], codec: str | None = None) -> str:
    """A table in Markdown of the limits of a node, in thousands of tokens per second.

    found: a result of `benchmarks.node`. codec: the codec of all selections; None: their own.
    """
    lines: list[list[str]] = []
    for case, rows in found["rows"].items():
        for layout in layouts:
            used = codec or rows[layout]["codec"]
            by_limit = node_limits(found, case, used, layout, node)
            name, least = min(by_limit.items(), key=lambda item: item[1])
            GB, compression = rows[layout]["bytes"] / 1e9, found["costs"][case][used][layout]["compression"]
            lines.append([f"{case}, `{used}`", f"{GB * 1e3:.2f}", layout])
            lines[-1] += [f"{common.three_digits(number / 1e3):,g}" for number in by_limit.values()]
            lines[-1] += [name, f"{least * GB / compression:.1f}"]
    head = ["model, selection, codec", "MB per token", "GPUs", *by_limit, "first", "GB/s stored"]
    return common.markdown([head, *lines])


# ---- the program -----------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    p = common.parser(MODULE, __doc__)
    p.add_argument("--sequence", type=int, metavar="TOKENS", help="print the MB of one sequence of TOKENS tokens")
    p.add_argument("--model", choices=MODELS, default="Qwen3-4B", help="with --sequence: the model (%(default)s)")
    p.add_argument("--tokens", type=float, default=1e9, help="tokens to capture (default: %(default)s)")
    p.add_argument("--gpus", default="1,8,64", help="comma-separated numbers of GPUs (default: %(default)s)")
    p.add_argument("--price", type=float, default=0.023, help="dollars per GB and month (default: %(default)s)")
    p.add_argument("--rows", type=int, default=511, help="rows per store (default: %(default)s)")
    p.add_argument(
        "--own",
        nargs=4,
        type=float,
        metavar=("BYTES", "GB_PER_S", "RATIO", "HOOKS"),
        help="your own selection: bytes per token, exported GB/s, raw / stored bytes, number of hooks",
    )
    args = p.parse_args(argv)
    if args.sequence:
        print(budget_table(args.sequence, MODELS[args.model]))
        return 0
    selections: tuple[Selection, ...] = SELECTIONS
    if args.own:
        nbytes, speed, ratio, hooks = args.own
        selections = (Selection("your own", int(nbytes), speed, ratio, int(hooks), "as measured"),)
    print(tables(args.tokens, [int(n) for n in args.gpus.split(",")], args.price, args.rows, selections))
    return 0


if __name__ == "__main__":
    sys.exit(main())
