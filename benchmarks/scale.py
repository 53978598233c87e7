# SPDX-License-Identifier: Apache-2.0
"""What a billion tokens cost, worked out from measured speeds: the tables of docs/SCALE.md.

    python -m benchmarks.scale --tokens 1e9 --gpus 1,8,64 --price 0.023

Speeds are those of docs/PERFORMANCE.md on one H200 under continuous load. More GPUs are taken to be as many times as
quick, each with an engine and 16 cores of its own; that was not measured beyond two.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from benchmarks import common

MODULE = "benchmarks.scale"
INDEX_BYTES = 630
"""Of a capture: benchmarks/results/cpu-index.json."""
FIXED_FILES = 7
"""Of a store, beside two for each hook: the root document, and two for each of three token arrays."""


@dataclass(frozen=True)
class Selection:
    """token_bytes: bytes of a row. GB_per_s: exported by one engine while the files keep up. ratio: raw to stored
    bytes. arrays: the number of hooks. limit: the bottleneck.
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
    """(hours, GB a second into the files) of `tokens` rows on so many GPUs."""
    speed = selection.GB_per_s * gpus
    return tokens * selection.token_bytes / 1e9 / speed / 3600, speed / selection.ratio


def tables(
    tokens: float, gpus: list[int], price: float, rows: int = 511, selections: tuple[Selection, ...] = SELECTIONS
) -> str:
    """Markdown. price: of a GB for a month. rows: of a store."""
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


def main(argv: list[str] | None = None) -> int:
    p = common.parser(MODULE, __doc__)
    p.add_argument("--tokens", type=float, default=1e9)
    p.add_argument("--gpus", default="1,8,64", help="comma-separated (default: %(default)s)")
    p.add_argument("--price", type=float, default=0.023, help="of a GB for a month (default: %(default)s)")
    p.add_argument("--rows", type=int, default=511, help="of a store (default: %(default)s)")
    p.add_argument(
        "--own",
        nargs=4,
        type=float,
        metavar=("BYTES", "GB_PER_S", "RATIO", "HOOKS"),
        help="in the place of the table's: bytes a token, exported GB a second, raw to stored bytes, number of hooks",
    )
    args = p.parse_args(argv)
    selections: tuple[Selection, ...] = SELECTIONS
    if args.own:
        nbytes, speed, ratio, hooks = args.own
        selections = (Selection("your own", int(nbytes), speed, ratio, int(hooks), "as measured"),)
    print(tables(args.tokens, [int(n) for n in args.gpus.split(",")], args.price, args.rows, selections))
    return 0


if __name__ == "__main__":
    sys.exit(main())
