# SPDX-License-Identifier: Apache-2.0
"""Bytes of one long sequence, by what is captured and how it is reduced: the table of docs/REDUCTIONS.md.

    python -m benchmarks.budget --model Qwen3-4B --tokens 2048

They are what rows hold, before compression by a codec. Files of metadata come to some 20 kB more.
"""

from __future__ import annotations

import sys

from benchmarks import common
from benchmarks.node import MODELS
from dmi_connector.dtypes import ITEMSIZE
from dmi_connector.hooks import ModelDims, parse_selection
from dmi_connector.layout import TOKEN_ARRAYS, hook_reductions, row_layouts
from dmi_connector.reduce.modes import rules_of

MODULE = "benchmarks.budget"
BUDGET = 120e6
"""Bytes of one sequence."""
PARTS = {
    "residual stream": "resid_pre,resid_final",
    "MLP neurons": "mlp_post",
    "attention of each head": "pattern",
    "output of each head": "z",
}
"""What the budget is for, and its hooks."""
MODES = ("summary", "compact")


def token_bytes(hooks: str, mode: str, dims: ModelDims) -> int:
    """Bytes that one token takes in the arrays of `hooks`, without padding, in a model in bfloat16."""
    selection = parse_selection(hooks, dims)
    reductions = hook_reductions(tuple(rules_of(mode).items()), selection, dims, 1)
    (layout,) = row_layouts(selection, dims, "bfloat16", 1, reductions)
    return sum(field.nbytes for field in layout.fields)


def megabytes(tokens: int, mode: str, dims: ModelDims) -> dict[str, float]:
    """By part, and of the arrays of tokens, which each store has."""
    found = {part: token_bytes(hooks, mode, dims) * tokens / 1e6 for part, hooks in PARTS.items()}
    return {**found, "token arrays": sum(ITEMSIZE[dtype] for dtype in TOKEN_ARRAYS.values()) * tokens / 1e6}


def table(tokens: int, dims: ModelDims) -> str:
    """Markdown, in MB."""
    found = {mode: megabytes(tokens, mode, dims) for mode in MODES}
    hooks = {part: ", ".join(f"`{hook}`" for hook in names.split(",")) for part, names in PARTS.items()}
    lines = [["MB", "hooks", *(f"`{mode}`" for mode in MODES)]]
    for part in found[MODES[0]]:
        lines.append([part, hooks.get(part, ""), *(f"{found[mode][part]:.1f}" for mode in MODES)])
    lines.append(["all", "", *(f"{sum(found[mode].values()):.1f}" for mode in MODES)])
    return common.markdown(lines)


def main(argv: list[str] | None = None) -> int:
    p = common.parser(MODULE, __doc__)
    p.add_argument("--model", choices=MODELS, default="Qwen3-4B", help="whose shapes (default: %(default)s)")
    p.add_argument("--tokens", type=int, default=2048, help="of the sequence (default: %(default)s)")
    args = p.parse_args(argv)
    print(table(args.tokens, MODELS[args.model]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
