# SPDX-License-Identifier: Apache-2.0
"""`dmi fit-scales`: fits scales for the reductions int8(channel=FILE) and rp(k,channel=FILE)."""

from __future__ import annotations

import argparse

from dmi_connector.cli import places


def add_fit_scales(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dmi fit-scales`."""
    parser.add_argument("stores", metavar="STORE|DIR|URL", nargs="+", help="stores that hold the hooks unreduced")
    parser.add_argument("--hook", action="append", required=True, metavar="HOOK", help="hook to fit; can be repeated")
    parser.add_argument("--layer", action="append", type=int, metavar="N", help="only this layer; can be repeated")
    parser.add_argument("--model", help="only stores of this model: its name, or the last part of its path")
    parser.add_argument(
        "--margin",
        type=float,
        default=1.1,
        metavar="FACTOR",
        help="range of the codes, relative to the largest magnitude in the stores (default: 1.1)",
    )
    parser.add_argument(
        "--project", metavar="RP", help="fit scales of projected rows: rp(512) for rp(512,channel=FILE)"
    )
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="a new .safetensors file")
    parser.set_defaults(run=run_fit_scales)


def run_fit_scales(options: argparse.Namespace) -> int:
    """Run the command. Raises what `fit_scales` raises."""
    from dmi_connector.analysis.fit_scales import fit_scales

    stores = places.stores(options.stores)
    rows = fit_scales(stores, options.hook, options.out, options.layer, options.model, options.margin, options.project)
    for name, count in rows.items():
        print(f"{name}: fitted on {count} rows")
    return 0
