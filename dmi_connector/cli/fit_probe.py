# SPDX-License-Identifier: Apache-2.0
"""`dmi fit-probe`: fits a probe to labelled captures."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from dmi_connector.cli import places


def add_fit_probe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dmi fit-probe`."""
    from dmi_connector.analysis.directions import ROWS

    parser.add_argument("stores", metavar="STORE|DIR|URL", nargs="+", help="stores that hold the hook unreduced")
    parser.add_argument(
        "--labels",
        required=True,
        metavar="FILE",
        help="CSV or JSON lines: label (0 or 1), and key, request_id or store",
    )
    parser.add_argument("--hook", required=True, metavar="HOOK", help="hook whose rows the probe scores")
    parser.add_argument("--layer", type=int, metavar="N", help="required if the hook has several layers")
    parser.add_argument("--rows", choices=ROWS, default="all", help="rows to which the label applies (default: all)")
    parser.add_argument(
        "--held-out", type=float, default=0.2, metavar="SHARE", help="share of captures to test on (default: 0.2)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed that chooses the held-out captures (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="a new .safetensors file")
    parser.set_defaults(run=run_fit_probe)


def run_fit_probe(options: argparse.Namespace) -> int:
    """Run the command. Raises what `fit_probe` raises."""
    from dmi_connector.analysis.fit_probe import fit_probe, read_labels

    labels, stores = read_labels(options.labels), places.stores(options.stores)
    chosen = (options.layer, options.rows, options.held_out, options.seed)
    found = fit_probe(stores, labels, options.hook, options.out, *chosen)
    if options.json:
        print(json.dumps(asdict(found), indent=1))
        return 0
    print(f"fitted on {found.rows} rows of {found.captures} captures")
    held = f"accuracy {found.accuracy:.3f}, baseline (more frequent label) {found.baseline:.3f}; AUC {found.auc:.3f}"
    print(f"tested on {found.held_rows} rows of {found.held_out} other captures: {held}")
    return 0
