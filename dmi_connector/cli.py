# SPDX-License-Identifier: Apache-2.0
"""The `dmi` command. Each subcommand imports what it needs: reading a store needs neither vllm nor torch."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def make_parser() -> Parser:
    """The parser of all subcommands but the vllm flags of `serve`."""
    import dmi_connector

    parser = Parser(prog="dmi", description="Capture the internal tensors of a model served by vLLM, and look at them.")
    parser.add_argument("--version", action="version", version=f"dmi {dmi_connector.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)

    demo = commands.add_parser("demo", help="capture every hook of a tiny model and compare it with transformers")
    demo.add_argument("--dir", default="demo", help="where model, stores and picture go (default: demo)")
    demo.add_argument("--hooks", default=None, help="what to capture (default: vllm-full)")
    demo.add_argument("--keep", action="store_true", help="keep the stores of earlier demos in DIR")
    demo.set_defaults(run=_demo)

    commands.add_parser("serve", help="vLLM's OpenAI server with capture: dmi serve MODEL --hooks ... [any vllm flag]")

    ls = commands.add_parser("ls", help="list the captures of a store directory")
    ls.add_argument("dir", metavar="DIR")
    ls.add_argument("--key", help="only those with this key")
    ls.add_argument("--request-id", help="only those of this request, with all its children")
    ls.add_argument("--json", action="store_true", help="print a JSON list")
    ls.set_defaults(run=_ls)

    info = commands.add_parser("info", help="arrays, sizes and attributes of a store")
    info.add_argument("store", metavar="STORE")
    info.add_argument("--json", action="store_true", help="print a JSON object")
    info.set_defaults(run=_info)

    verify = commands.add_parser("verify", help="check stores byte by byte; exit 1 when one is damaged")
    verify.add_argument("path", metavar="STORE|DIR")
    verify.set_defaults(run=_verify)

    export = commands.add_parser("export", help="write a store in another format")
    export.add_argument("store", metavar="STORE")
    export.add_argument("--to", choices=("safetensors",), required=True)
    export.add_argument("-o", "--out", help="default: the store's name in the current directory")
    export.set_defaults(run=_export)

    plot = commands.add_parser("plot", help="draw residual norms by layer and token")
    plot.add_argument("stores", metavar="STORE", nargs="+")
    plot.add_argument("-o", "--out", required=True, metavar="PNG")
    plot.add_argument("--tokenizer", metavar="DIR", help="directory of tokenizer.json, for the words on the axis")
    plot.set_defaults(run=_plot)
    return parser


def make_serve_parser() -> Parser:
    """The parser of our own flags of `dmi serve`. Abbreviations are off: they could be flags of vLLM."""
    from dmi_connector.serve import USAGE, add_options

    parser = Parser(prog="dmi serve", usage=USAGE, allow_abbrev=False)
    add_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status: 0, 1 for what it found wrong, 2 for what it could not do."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    from dmi_connector.store.reader import CaptureIncomplete

    try:
        if arguments[:1] == ["serve"]:
            from dmi_connector.serve import serve

            serve(arguments[1:], make_serve_parser())
        options = make_parser().parse_args(arguments)
        return int(options.run(options))
    except BrokenPipeError:
        # The reader of our output went away, as in `dmi ls | head`: nothing is left to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, KeyError, OSError, CaptureIncomplete) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        print("dmi: " + " ".join(str(text).split()), file=sys.stderr)
        return 2


def _demo(options: argparse.Namespace) -> int:
    from dmi_connector import demo

    return demo.run_demo(options.dir, options.hooks or demo.HOOKS, options.keep)


def _directory(path: str, kind: str) -> Path:
    if not os.path.isdir(path):
        raise ValueError(f"{path} is {'a file' if os.path.exists(path) else 'not there'}; give {kind}")
    return Path(path)


def _ls(options: argparse.Namespace) -> int:
    from dmi_connector import tables
    from dmi_connector.store.index import find_captures

    found = find_captures(_directory(options.dir, "a store directory"), key=options.key, request_id=options.request_id)
    if options.json:
        print(json.dumps(tables.captures_json(found), indent=1))
    elif found:
        print(tables.captures_text(found))
    else:
        narrowed = options.key is not None or options.request_id is not None
        print(f"no captures in {options.dir}{' match' if narrowed else ''}", file=sys.stderr)
    return 0


def _open(path: str) -> Any:
    from dmi_connector.store.reader import open_capture

    return open_capture(_directory(path, "a store (*.zarr)"), timeout=0, allow_incomplete=True)


def _info(options: argparse.Namespace) -> int:
    from dmi_connector import tables

    capture = _open(options.store)
    print(json.dumps(tables.info_json(capture), indent=1) if options.json else tables.info_text(capture))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from dmi_connector.store.reader import read_attrs
    from dmi_connector.store.verify import verify_store

    path = _directory(options.path, "a store (*.zarr) or a directory of stores")
    stores = [path] if (path / "zarr.json").exists() or path.suffix == ".zarr" else sorted(path.glob("*.zarr"))
    if not stores:
        raise ValueError(f"{path} holds no finished store (*.zarr); give a store or a directory of stores")
    damaged = 0
    for store in stores:
        problems = verify_store(store)
        damaged += bool(problems)
        for problem in problems:
            print(problem)
        if not problems:
            attrs = read_attrs(store)
            print(f"{store}: sound" + ("" if attrs["complete"] else f", but incomplete: {attrs['reason']}"))
    print(f"{len(stores)} checked, {damaged} damaged")
    return 1 if damaged else 0


def _export(options: argparse.Namespace) -> int:
    from dmi_connector.store.export import export_safetensors

    store = _directory(options.store, "a store (*.zarr)")
    out = Path(options.out or f"{store.absolute().stem}.safetensors")
    ids = export_safetensors(store, out)
    print(f"{out}: layer ids {', '.join(map(str, ids))}")
    return 0


def _plot(options: argparse.Namespace) -> int:
    from dmi_connector.plot import draw_residual_norms

    print(draw_residual_norms([_open(store) for store in options.stores], options.out, options.tokenizer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
