# SPDX-License-Identifier: Apache-2.0
"""`dmi fit-pq`: fits codebooks for the reduction pq(FILE)."""

from __future__ import annotations

import argparse

from dmi_connector.cli import places


def add_fit_pq(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dmi fit-pq`."""
    parser.add_argument("stores", metavar="STORE|DIR|URL", nargs="+", help="stores that hold the hooks unreduced")
    parser.add_argument("--hook", action="append", required=True, metavar="HOOK", help="hook to fit; can be repeated")
    parser.add_argument("--subvectors", type=int, required=True, metavar="M", help="number of parts of a row")
    parser.add_argument("--bits", type=int, default=8, metavar="N", help="bits per part: 8 (default) or 4")
    parser.add_argument("--layer", action="append", type=int, metavar="N", help="only this layer; can be repeated")
    parser.add_argument("--model", help="only stores of this model: its name, or the last part of its path")
    parser.add_argument("--rows", type=int, default=16384, metavar="N", help="maximum rows to fit on (default: 16384)")
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="a new .safetensors file")
    parser.set_defaults(run=run_fit_pq)


def run_fit_pq(options: argparse.Namespace) -> int:
    """Run the command. Raises what `fit_pq` raises."""
    from dmi_connector.analysis.fit_pq import fit_pq

    kept = fit_pq(
        places.stores(options.stores),
        options.hook,
        options.subvectors,
        options.out,
        options.bits,
        options.layer,
        options.model,
        options.rows,
    )
    for name, share in kept.items():
        print(f"{name}: {100 * share:.2f} % of the variance")
    return 0
