# SPDX-License-Identifier: Apache-2.0
"""`dmi export`: writes stores in the formats of other programs."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from dmi_connector.analysis.export.numbering import NUMBERINGS
from dmi_connector.analysis.export.progress import Progress
from dmi_connector.analysis.export.targets import TARGETS, export
from dmi_connector.captures.captures import captures_of
from dmi_connector.captures.finite import POLICIES, WHAT, NotFinite
from dmi_connector.cli import units
from dmi_connector.store.format.remote_path import place_of
from dmi_connector.store.read.index import is_store
from dmi_connector.urls import is_url

FLAGS: dict[str, dict[str, Any]] = {
    "layers": {
        "metavar": "IDS",
        "help": "layer ids such as 2,18,33; in a model of N layers, id N is the stream after the last layer",
    },
    "number_by": {
        "choices": NUMBERINGS,
        "help": "source of a file's number: order of requests (default), their keys, or rows or ids of dmi run's input",
    },
    "loss": {
        "choices": ("generated", "all", "spans"),
        "help": "tokens to train on: generated (default), all, or spans (generated tokens and those in loss_spans)",
    },
    "prompt_start": {
        "type": int,
        "metavar": "N",
        "help": "tokens to leave out at the start of the prompt (default: 0)",
    },
    "hook": {
        "metavar": "HOOK",
        "help": "such as resid_pre@12 or blocks.12.hook_resid_pre; numpy, parquet and webdataset take a list: q@3,k@3",
    },
    "context_size": {"type": int, "metavar": "N", "help": "rows per context (default: 128; for delphi 256)"},
    "skip": {"type": int, "metavar": "N", "help": "rows to leave out at the start of each store (default: 0)"},
    "sae": {
        "metavar": "PATH",
        "help": "safetensors file of an autoencoder, with its cfg.json beside it, or the directory of both",
    },
    "splits": {"type": int, "metavar": "N", "help": "number of files of latents (default: 5)"},
    "shard_size": {"type": units.nbytes, "metavar": "SIZE", "help": "approximate bytes per shard (default: 1G)"},
    "gzip": {"action": "store_const", "const": True, "help": "compress the files"},
}
"""{option that only some formats take: keyword arguments of add_argument}."""
_LOG_EVERY_S = 10
"""Seconds between lines of progress, if standard error is not a terminal."""
NOT_FINITE = 3
"""Exit status if values are not finite. `dmi verify` has the same."""


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `dmi export`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "formats:\n" + "\n".join(f"  {t.name:16}{t.doc}{_takes(t.options)}" for t in TARGETS.values())
    parser.add_argument("stores", metavar="STORE|DIR|URL", nargs="+", help="stores, or directories of stores")
    parser.add_argument("--to", choices=tuple(TARGETS), required=True, help="the format, see below")
    parser.add_argument(
        "-o",
        "--out",
        help="the output directory; with one STORE and --to safetensors or zip, a directory or a new file (default: a"
        " file in the current directory, with the name of STORE)",
    )
    parser.add_argument("--key", action="append", help="only captures with this key; can be repeated")
    parser.add_argument("--model", help="only captures of this model: its name, or the last part of its path")
    parser.add_argument(
        "--finite",
        choices=POLICIES,
        help="what to do with a store that holds NaN or infinity: skip leaves it out (default; saelens and delphi leave"
        " out only the context), keep writes it (default of zip), fail ends the export. With such a store the"
        " exit status is 3",
    )
    for name, arguments in FLAGS.items():
        parser.add_argument("--" + name.replace("_", "-"), **arguments)
    parser.set_defaults(run=run_export)


def _takes(options: tuple[str, ...]) -> str:
    return f" ({', '.join('--' + name.replace('_', '-') for name in options)})" if options else ""


def run_export(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 0, or NOT_FINITE. Raises ValueError if nothing can be exported."""
    found = captures_of(options.stores, options.key, options.model, incomplete=True)
    captures = replace(found, infos=tuple(info for info in found.infos if info.state == "complete"))
    lacking = len(found) - len(captures)
    if lacking and not len(captures):
        raise ValueError(f"export: all {lacking} captures lack rows (dmi ls says which); capture them again")
    given = {name: value for name in FLAGS if (value := getattr(options, name)) is not None}
    if "layers" in given:
        given["layers"] = _layers(given["layers"])
    out, file = _out(options)
    target = TARGETS[options.to]
    show = _progress_of(target.file_counts if file else target.counts)
    try:
        done = export(captures, options.to, out, given, show, file, options.finite)
    except NotFinite as error:
        print(f"dmi: {error}", file=sys.stderr)
        return NOT_FINITE
    for store, row in done.not_finite.items():
        print(f"dmi: {store}: row {row} holds {WHAT}", file=sys.stderr)
    counts = f"{done.written} written" + (f", {done.kept} already existed" if done.kept else "")
    left = [f"{lacking} left out, because they are incomplete (dmi ls lists them)"] if lacking else []
    print("; ".join((f"{done.out}: {'; '.join(done.notes) or counts}", *left, *done.warnings)))
    return NOT_FINITE if done.not_finite else 0


def _out(options: argparse.Namespace) -> tuple[Path, bool]:
    """(path of the output, whether the output is one file). Neither depends on how many stores --key selects.

    Raises ValueError for a URL, and without -o where a directory is written.
    """
    store, suffix = place_of(options.stores[0]), TARGETS[options.to].suffix
    one = bool(suffix) and len(options.stores) == 1 and is_store(store)
    if is_url(options.out):
        raise ValueError(f"export: -o {options.out}: a URL; give a directory on this machine, and upload it yourself")
    if options.out == "":
        raise ValueError("export: -o is empty; give a directory or a file")
    if options.out is not None:
        return Path(options.out), one and not options.out.endswith("/") and not Path(options.out).is_dir()
    if one:
        return Path(f"{store.absolute().stem}{suffix}"), True
    raise ValueError(f"export: --to {options.to} needs -o DIR; give a new directory, or that of an export to continue")


def _layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--layers {text!r} is not valid; write layer ids as in 2,18,33") from error


def _progress_of(counts: str) -> Progress:
    """A function that shows progress on standard error: in one line on a terminal, else in a line every 10 seconds.

    counts: what is counted, such as "stores".
    """
    shown, ended = time.monotonic(), False

    def show(done: int, total: int) -> None:
        nonlocal shown, ended
        now = time.monotonic()
        if sys.stderr.isatty() and not ended:
            ended = done == total
            print(f"\r{done}/{total} {counts} exported", end="\n" if ended else "", file=sys.stderr, flush=True)
        elif not sys.stderr.isatty() and now - shown >= _LOG_EVERY_S:
            print(f"{done}/{total} {counts} exported", file=sys.stderr, flush=True)
            shown = now

    return show
