# SPDX-License-Identifier: Apache-2.0
"""`dmi fidelity`: measures how much reductions keep of stored rows."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict

from dmi_connector.cli import places


def add_fidelity(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dmi fidelity`."""
    parser.add_argument("stores", metavar="STORE|DIR|URL", nargs="+", help="stores that hold the hooks unreduced")
    parser.add_argument(
        "--reduce", action="append", metavar="SPEC", help="reduction, as in server options; can be repeated"
    )
    parser.add_argument("--hooks", default="*", help="names or wildcards, separated by commas (default: all)")
    parser.add_argument("--layer", action="append", type=int, metavar="N", help="only this layer; can be repeated")
    parser.add_argument(
        "--labels",
        metavar="FILE|tokens",
        help="also measure concept scores: CSV or JSON lines with key, store or request_id, and label 0 or 1; or"
        " tokens: the most frequent tokens are the labels",
    )
    parser.add_argument("--model", metavar="DIR", help="also measure the logit lens, with the weights of this model")
    parser.add_argument(
        "--sae",
        metavar="PATH[, hook=NAME, layer=N]",
        help="also measure latents and reconstruction error of this autoencoder, written as in the option probes",
    )
    parser.add_argument(
        "--bar", type=float, metavar="VALUE", help="print which measures are below VALUE; exit 1 if there are any"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list, one entry per layer")
    parser.set_defaults(run=run_fidelity)


def run_fidelity(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 1 if a measure is below --bar, else 0. Raises as `fidelity` does."""
    from dmi_connector.analysis.autoencoder import Autoencoder
    from dmi_connector.analysis.downstream import TOKENS
    from dmi_connector.analysis.fidelity import DEFAULT, below, fidelity, markdown
    from dmi_connector.analysis.fit_probe import read_labels
    from dmi_connector.analysis.unembedding import Unembedding

    bar = options.bar
    if bar is not None and not 0 < bar <= 1:
        raise ValueError(f"--bar {bar} is not valid; give a number above 0, at most 1, as in --bar 0.95")
    stores = places.stores(options.stores, complete=True)
    if not stores:
        raise ValueError("fidelity: every store lacks rows (dmi ls says which); capture them again")
    labels = options.labels if options.labels in (None, TOKENS) else read_labels(options.labels)
    unembedding = None if options.model is None else Unembedding.load(options.model)
    sae = None if options.sae is None else Autoencoder.load(options.sae)
    found = fidelity(stores, options.reduce or DEFAULT, options.hooks, options.layer, labels, unembedding, sae)
    failed = [[] if bar is None else below(one.measures, bar) for one in found]
    if options.json:
        listed = [{**asdict(one), "measures": _json(one.measures)} for one in found]
        if bar is not None:
            listed = [{**one, "below": names} for one, names in zip(listed, failed, strict=True)]
        print(json.dumps(listed, indent=1))
    else:
        print(markdown(found, bar))
        if bar is not None:
            right = sum(not names for names in failed)
            print(f"\n{right} of {len(found)} results (one per layer and reduction) reach {bar:g} in each measure.")
            print("Measures of which a larger value is worse are not compared.")
    return int(any(failed))


def _json(measures: Mapping[str, float]) -> dict[str, float | None]:
    """Measures with None for a value that is not finite, because JSON has neither NaN nor infinity."""
    return {name: value if math.isfinite(value) else None for name, value in measures.items()}
