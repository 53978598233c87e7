# SPDX-License-Identifier: Apache-2.0
"""The `dmi` command. A subcommand imports only what it needs, so `dmi info` needs neither vllm nor torch."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from dmi_connector.cli import places, units
from dmi_connector.cli.help import describe
from dmi_connector.wording import suggest

_ON_LINUX = ("demo", "serve", "run", "repair", "prune")
"""Commands that write or remove stores. They run only on Linux."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that prints an error on one line, and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def make_parser() -> Parser:
    """The parser of all subcommands except `serve` and `run`, which have their own parsers."""
    import dmi_connector
    from dmi_connector.cli.plots import add_plot_options
    from dmi_connector.cli.verify import add_verify

    parser = Parser(prog="dmi", description="Capture the internal tensors of a model served by vLLM, and look at them.")
    parser.add_argument("-V", "--version", action="version", version=f"dmi {dmi_connector.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)

    demo = commands.add_parser("demo", help="capture every hook of a tiny model and compare it with transformers")
    demo.add_argument("--dir", default="demo", help="directory for the model, stores and picture (default: demo)")
    demo.add_argument("--hooks", default=None, help="what to capture (default: vllm-full,q_rot,k_rot)")
    demo.add_argument("--keep", action="store_true", help="keep the stores of earlier demos in DIR")
    demo.set_defaults(run=_demo)

    commands.add_parser("serve", help="vLLM's OpenAI server with capture: dmi serve MODEL --hooks ... [any vllm flag]")

    commands.add_parser(
        "run", help="capture a whole file or data set of prompts: dmi run --model M --prompts FILE --out DIR"
    )

    ls = commands.add_parser("ls", help="list the captures of a store directory")
    ls.add_argument("dir", metavar="DIR")
    ls.add_argument("--key", help="only captures with this key")
    ls.add_argument("--request-id", help="only captures of this request id, and of its children")
    ls.add_argument("--stats", action="store_true", help="print totals: states, bytes, missing rows, reasons and dates")
    ls.add_argument("--json", action="store_true", help="print a JSON list (with --stats, an object)")
    ls.set_defaults(run=_ls)

    tail = commands.add_parser("tail", help="print captures as they finish, one per line")
    tail.add_argument("dir", metavar="DIR")
    tail.add_argument(
        "-n", "--last", type=int, default=10, metavar="N", help="first print the last N captures (default: 10)"
    )
    tail.add_argument("--key", help="only captures with this key")
    tail.add_argument(
        "--rows", metavar="KEY", help="print the rows of the newest capture with this key as they are written"
    )
    tail.add_argument(
        "--hook", action="append", default=[], help="with --rows: print norms of this hook, as resid_pre@20; repeatable"
    )
    tail.add_argument(
        "--once", action="store_true", help="exit after the last captures; with --rows, do not wait for a new KEY"
    )
    tail.add_argument("--json", action="store_true", help="print one JSON object per line")
    tail.set_defaults(run=_tail)

    info = commands.add_parser("info", help="print arrays, sizes and attributes of a store")
    info.add_argument("store", metavar="STORE")
    info.add_argument("--json", action="store_true", help="print a JSON object")
    info.set_defaults(run=_info)

    add_verify(commands.add_parser("verify", help="check stores; exit 1: one is damaged, 3: values are not finite"))

    repair = commands.add_parser(
        "repair", help="finish stores of killed writers, and uploads; exit 1: a store or an upload is not finished"
    )
    repair.add_argument("path", metavar="DIR|PARTIAL", help="a store directory, or one NAME.zarr.partial")
    repair.add_argument("--json", action="store_true", help="print a JSON list")
    repair.add_argument("--remove-empty", action="store_true", help="remove partial stores with nothing to salvage")
    repair.set_defaults(run=_repair)

    prune = commands.add_parser("prune", help="remove the oldest finished stores that no process reads")
    prune.add_argument("dir", metavar="DIR")
    prune.add_argument(
        "--older-than", type=units.seconds, metavar="AGE", help="remove stores older than this: 3600, 90m, 12h, 7d"
    )
    prune.add_argument(
        "--keep-bytes", type=units.nbytes, metavar="SIZE", help="maximum size of the stores to keep: 500M, 2T"
    )
    prune.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")
    prune.add_argument("--json", action="store_true", help="print a JSON list")
    prune.set_defaults(run=_prune)

    from dmi_connector.cli.diff import add_diff
    from dmi_connector.cli.export import add_export

    add_diff(commands.add_parser("diff", help="compare captures of the same tokens; exit 1: they differ"))

    add_export(commands.add_parser("export", help="write stores in the formats of other programs"))

    fit = commands.add_parser("fit-pca", help="fit principal components to stores, for the reduction pca(FILE)")
    fit.add_argument("stores", metavar="STORE|DIR|URL", nargs="+", help="stores that hold the hooks unreduced")
    fit.add_argument("--hook", action="append", required=True, metavar="HOOK", help="hook to fit; can be repeated")
    fit.add_argument("--rank", type=int, required=True, metavar="K", help="number of components to keep")
    fit.add_argument(
        "--group", type=int, default=0, metavar="D", help="one basis per group of D values, such as head_dim"
    )
    fit.add_argument("--layer", action="append", type=int, metavar="N", help="only this layer; can be repeated")
    fit.add_argument("--model", help="only stores of this model: its name, or the last part of its path")
    fit.add_argument("-o", "--out", required=True, metavar="FILE", help="a new .safetensors file")
    fit.set_defaults(run=_fit_pca)

    from dmi_connector.cli.fit_pq import add_fit_pq
    from dmi_connector.cli.fit_probe import add_fit_probe
    from dmi_connector.cli.fit_scales import add_fit_scales

    add_fit_scales(commands.add_parser("fit-scales", help="fit scales to stores, for the reduction int8(channel=FILE)"))
    add_fit_pq(commands.add_parser("fit-pq", help="fit codebooks to stores, for the reduction pq(FILE)"))
    add_fit_probe(commands.add_parser("fit-probe", help="fit a probe to labelled captures, for the option probes"))

    from dmi_connector.cli.fidelity import add_fidelity

    add_fidelity(
        commands.add_parser(
            "fidelity", help="measure what reductions keep of stored rows; exit 1: a measure is below --bar"
        )
    )

    from dmi_connector.cli.sketch import add_sketch

    add_sketch(commands.add_parser("sketch", help="keep the main directions of rows in k rows (Frequent Directions)"))

    plot = commands.add_parser("plot", help="draw captures as PNG or SVG: norms, logit lens, attention and others")
    add_plot_options(plot)
    plot.set_defaults(run=_plot)

    view = commands.add_parser("view", help="show captures in a browser on this machine")
    view.add_argument("path", metavar="DIR|STORE")
    view.add_argument("--port", type=int, default=0, metavar="N", help="port (default: a free one)")
    view.add_argument("--model", type=Path, metavar="DIR", help="the model's directory, for the logit lens")
    view.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="directory of tokenizer.json (default: the model's)"
    )
    view.add_argument("--sae", type=Path, metavar="FILE", help="safetensors file of an autoencoder, for its latents")
    view.add_argument("--sae-hook", metavar="HOOK", help="the hook that --sae encodes (default: from its settings)")
    view.set_defaults(run=_view)
    for name, command in commands.choices.items():
        describe(command, name)
    return parser


def make_serve_parser() -> Parser:
    """The parser of the capture flags of `dmi serve`. It accepts no abbreviated flags, which could be flags of vLLM."""
    from dmi_connector.cli.serve import USAGE, add_options

    parser = Parser(prog="dmi serve", usage=USAGE, allow_abbrev=False)
    add_options(parser)
    describe(parser, "serve")
    return parser


def make_run_parser() -> Parser:
    """The parser of the flags of `dmi run`. It accepts no abbreviated flags, which could be flags of vLLM."""
    from dmi_connector.cli.run import USAGE, add_run

    parser = Parser(prog="dmi run", usage=USAGE, allow_abbrev=False)
    add_run(parser)
    describe(parser, "run")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Without a command, print the help.

    argv: the arguments; None: those of the process. Returns the exit status. 0: success. 1: the command found something
    wrong. 2: the command could not run. 3: values are not finite. 130: Ctrl-C.
    """
    arguments = [_at_home(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    from dmi_connector.store.format.linux import check_linux
    from dmi_connector.store.read.reader import CaptureIncomplete

    try:
        if not arguments:
            make_parser().print_help()
            _flush()
            return 0
        if arguments[0] in _ON_LINUX:
            check_linux(arguments[0])
        if arguments[:1] == ["serve"]:
            from dmi_connector.cli.serve import serve

            serve(arguments[1:], make_serve_parser())
        if arguments[:1] == ["run"]:
            from dmi_connector.cli.run import run

            return run(*make_run_parser().parse_known_args(arguments[1:]))
        options = make_parser().parse_args(arguments)
        status = int(options.run(options))
        _flush()
        return status
    except BrokenPipeError:  # the reader of standard output has closed the pipe, as in `dmi ls | head`
        _discard_output()
        return int(
            bool(arguments) and arguments[0] in ("run", "repair", "prune", "verify", "export")
        )  # these commands may have stopped before they had finished
    except KeyboardInterrupt:
        return 130
    except CaptureIncomplete as error:
        reason, missing = " ".join(str(error.reason or "no reason given").split()), error.missing or "unknown"
        print(
            f"dmi: capture {error.path} is incomplete: {reason}; missing rows: {missing}."
            f" dmi {arguments[0]} takes complete stores; leave this one out, or capture it again",
            file=sys.stderr,
        )
        return 2
    except (ValueError, KeyError, OSError, ImportError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        print("dmi: " + " ".join(str(text).split()), file=sys.stderr)
        with contextlib.suppress(OSError):  # if the disk is full, `text` says so already
            _flush()
        return 2


def _flush() -> None:
    """Flush standard output, so that `main` can report an error. Otherwise only the interpreter's exit flushes it."""
    try:
        if sys.stdout is not None:  # else it was closed before the start
            sys.stdout.flush()
    except OSError:
        _discard_output()
        raise


def _discard_output() -> None:
    """Redirect standard output to /dev/null, so that the flush at the interpreter's exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _at_home(argument: str) -> str:
    """Expand `~/` at the start of an argument or of an option's value. Shells expand neither --out=~/x nor "~/x"."""
    option, equals, path = argument.partition("=")
    if argument.startswith("--") and path.startswith("~/"):
        return f"{option}{equals}{os.path.expanduser(path)}"
    return os.path.expanduser(argument) if argument.startswith("~/") else argument


def _demo(options: argparse.Namespace) -> int:
    from dmi_connector.cli import demo

    return demo.run_demo(options.dir, options.hooks or demo.HOOKS, options.keep)


def _ls(options: argparse.Namespace) -> int:
    from dmi_connector.cli import tables
    from dmi_connector.store.read.index import find_captures

    place = places.place(options.dir, "a store directory")
    found = find_captures(place, key=options.key, request_id=options.request_id)
    if options.stats:
        totals = tables.stats(found)
        print(json.dumps(totals, indent=1) if options.json else tables.stats_text(totals))
    elif options.json:
        print(json.dumps(tables.captures_json(found), indent=1))
    elif found:
        print(tables.captures_text(found))
    elif options.key is None and options.request_id is None:
        print(f"no captures in {options.dir}", file=sys.stderr)
    else:
        _say_no_match(options, {info.key for info in find_captures(place)})
    return 0


def _say_no_match(options: argparse.Namespace, keys: set[str | None]) -> None:
    near = "" if options.key is None else suggest(options.key, filter(None, keys))
    print(f"no captures in {options.dir} match{near}", file=sys.stderr)


def _tail(options: argparse.Namespace) -> int:
    from dmi_connector.cli.tail import RowTail, follow
    from dmi_connector.store.read.index import indexed_captures

    if options.last < 0:
        raise ValueError(f"--last {options.last} is not valid; use 0 or more")
    directory = places.store_directory(options.dir)
    if options.rows is not None:
        rows = RowTail(directory, options.rows, options.hook, options.once, options.json)
        for line in rows:
            print(line, flush=True)
        return 0 if rows.complete else 1
    if options.hook:
        raise ValueError("--hook is for --rows; give --rows KEY")
    known: set[str | None] = {None}
    if options.key is not None:
        known = {info.key for info in indexed_captures(directory)}
    if options.key not in known:
        _say_no_match(options, known)
    lines = follow(directory, options.last, options.key, once=options.once, as_json=options.json)
    for line in lines:
        print(line, flush=True)
    return 0


def _open(path: str) -> Any:
    from dmi_connector.captures.capture import open_capture

    place = places.place(path, "a store (*.zarr, *.zip)")
    places.refuse_many(place)
    return open_capture(place, timeout=0, allow_incomplete=True)


def _info(options: argparse.Namespace) -> int:
    from dmi_connector.cli import tables

    capture = _open(options.store)
    print(json.dumps(tables.info_json(capture), indent=1) if options.json else tables.info_text(capture))
    return 0


def _repair(options: argparse.Namespace) -> int:
    from dmi_connector.store.write.finish.repair import repair

    path = places.store_directory(options.path, "a store directory or a partial store (*.zarr.partial)")
    if path.suffix == ".zarr":
        raise ValueError(f"{path} is a finished store; give its directory, or a partial store (*.zarr.partial)")
    outcomes = repair(path, options.remove_empty)
    if options.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    elif outcomes:
        print("\n".join(map(str, outcomes)))
    else:
        print(f"no partial stores in {path}, and nothing to upload", file=sys.stderr)
    return 1 if any(outcome.state in ("empty", "refused", "failed", "not uploaded") for outcome in outcomes) else 0


def _prune(options: argparse.Namespace) -> int:
    from dmi_connector.cli.tables import format_bytes
    from dmi_connector.store.write.finish.retention import prune

    directory = places.store_directory(options.dir)
    if options.older_than is None and options.keep_bytes is None:
        raise ValueError("prune: no limit is given; give --older-than, --keep-bytes or both")
    removed = prune(directory, options.older_than, options.keep_bytes, dry_run=options.dry_run)
    if options.json:
        print(json.dumps([{"store": str(store.path), "bytes": store.nbytes} for store in removed], indent=1))
        return 0
    verb = "would be removed" if options.dry_run else "removed"
    for store in removed:
        print(f"{store.path}: {verb}, {format_bytes(store.nbytes)}")
    print(f"{len(removed)} {verb}, {format_bytes(sum(store.nbytes for store in removed))}")
    return 0


def _fit_pca(options: argparse.Namespace) -> int:
    from dmi_connector.analysis.fit_pca import fit_pca

    if options.rank < 1:
        raise ValueError(f"--rank {options.rank} is not valid; keep 1 component or more")
    if options.group < 0:
        raise ValueError(
            f"--group {options.group} is not valid; give the number of values in a group, such as head_dim"
        )
    stores = places.stores(options.stores)
    shares = fit_pca(stores, options.hook, options.rank, options.out, options.layer, options.model, options.group)
    for name, share in shares.items():
        print(f"{name}: {100 * share:.2f} % of the variance")
    return 0


def _plot(options: argparse.Namespace) -> int:
    from dmi_connector.cli.plots import draw

    print(draw(options, _open))
    return 0


def _view(options: argparse.Namespace) -> int:
    if not all(importlib.util.find_spec(name) for name in ("starlette", "uvicorn")):
        raise ValueError("view: starlette or uvicorn is not installed; install dmi_connector[view]")
    from dmi_connector.view.server import serve

    path = places.store_directory(options.path, "a store (*.zarr) or a directory of stores")
    if options.sae_hook is not None and options.sae is None:
        raise ValueError("--sae-hook is for --sae; give --sae FILE")
    chosen = (options.model, options.tokenizer, options.sae, options.sae_hook)
    serve(path, options.port, *chosen, lambda url: print(url, flush=True))
    return 0
