# SPDX-License-Identifier: Apache-2.0
"""`dmi serve`: vLLM's OpenAI server with capture."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NoReturn

from dmi_connector.args import OWNERS, capture_args
from dmi_connector.cli import units
from dmi_connector.codecs import CODECS
from dmi_connector.option_values import OptionError
from dmi_connector.reduce import MODES, ReduceError, forms
from dmi_connector.reduce.errors import refuse_sketch
from dmi_connector.settings import CHECKS, CUDA_GRAPHS, FILE_MODES, POLICIES, SINKS, ServerOptions
from dmi_connector.store.write.coordinator.directories import check_directories

SERVER = "vllm.entrypoints.openai.api_server"
"""Module of vLLM's server. The command `vllm` fails if vLLM's distribution has another name than vllm."""

_CONFLICT = re.compile(
    r"^(?:--(?P<long>kv[-_]transfer[-_]config|speculative[-_]config)(?:[.=]|$)|(?P<short>-sc)(?:[.=]|$))"
)
_CHOICES = {
    "codec": tuple(CODECS),
    "policy": POLICIES,
    "sink": SINKS,
    "file_mode": FILE_MODES,
    "check": CHECKS,
    "cuda_graphs": CUDA_GRAPHS,
}
_OURS = {option.name for option in fields(ServerOptions)}
_MEANING = {
    "store_dir": "directory of the stores, created if it is missing",
    "hooks": "what to capture: hooks, presets and wildcards with commas, such as resid_post@0-3,logits",
    "pool_bytes": "size of the pool per rank, with --owner pool",
    "codec": "codec of the stores",
    "always_compress": "compress every chunk, also when writers are behind",
    "chunk_tokens": "rows per chunk",
    "segment_tokens": "rows per shard file, a multiple of --chunk-tokens",
    "writers": "writer processes per rank",
    "host_buffer_bytes": "size of the ring buffer between engine and writers, per rank",
    "staging_bytes": "GPU memory in which chunks wait for their copy to the host",
    "policy": "when the ring buffer is full: block makes the engine wait, drop drops rows and lists them as missing",
    "sink": "disk writes stores; host and null discard rows, and are for benchmarks",
    "fsync": "flush each store to the disk before it gets its final name",
    "file_mode": "who may read stores: their owner, the group, or everyone",
    "allow_custom_save_path": "requests may choose the directory of their store, beneath --save-path-roots",
    "save_path_roots": "directories that may contain the stores of such requests, with commas",
    "max_request_bytes": "maximum size of one request's rows, before compression",
    "max_total_bytes": "maximum size of all stores",
    "min_free_bytes": "space that must stay free on the file system",
    "retain_seconds": "age at which finished stores are removed",
    "retain_bytes": "while finished stores take more than this, the oldest is removed",
    "shutdown_seconds": "how long writing may continue after the engine ends",
    "reduce": "what is stored instead of whole rows",
    "probes": "scores that are computed in the forward pass, and captured as the hook probe.NAME",
    "probe_alerts": "requests with a larger score are counted",
    "check": "poison finds values that were never written; it is slow, and meant for tests of new models",
    "cuda_graphs": "auto uses vLLM's graph mode FULL where it is correct, vllm keeps vLLM's own",
    "upload": "s3://bucket/prefix, to which finished stores are uploaded",
    "upload_remove_local": "remove the local copy of an uploaded store",
    "upload_backlog_bytes": "maximum size of the finished stores that wait for their upload",
    "upload_retry_seconds": "how long transient errors of an upload are retried",
    "upload_only_complete": "do not upload stores that lack rows, nor those of aborted requests",
}
"""Option -> what it does, for the help. docs/CAPTURING.md says more."""
_AUTOMATIC = ("writers", "host_buffer_bytes", "staging_bytes", "pool_bytes")
"""Options for which 0 means an automatic value. For other options with default 0, 0 means no limit or no removal."""
_UNITS = {"bytes": (units.nbytes, "SIZE"), "seconds": (units.seconds, "TIME")}
"""Last word of an option's name -> the `type` and the metavar of its flag."""
_JSON = {
    "reduce": '{"resid_*": "rp(512)", "*": "int8"}',
    "probes": '{"risk": "risk.safetensors"}',
    "probe_alerts": '{"risk": 0.8}',
}
"""Option whose flag takes a JSON object -> an example."""
_GRAPHS = re.compile(r"^(--compilation[-_]config|-cc)([.=]|$)")
"""Matches flags of vLLM that configure CUDA graphs."""

VALUES = """       A SIZE may end with k, M, G or T, as in 500M, and a TIME with s, m, h or d, as in 7d.
       A flag with [true|false] means true if it stands alone."""
"""How to write the values of server options, for the usage."""
USAGE = f"""dmi serve MODEL [--hooks HOOKS] [--store-dir DIR] [--owner OWNER] [option ...] [any vllm flag ...]

       MODEL comes first. Flags that are not listed here go to vLLM's server as they are.
{VALUES}"""


def add_options(parser: argparse._ActionsContainer, leave_out: Sequence[str] = ()) -> None:
    """Add --owner, and a flag for each field of `ServerOptions` except `leave_out`. The defaults of flags are None."""
    parser.add_argument(
        "--owner", choices=OWNERS, help="where rows are kept: draft (default), target or pool, see docs/CAPTURING.md"
    )
    for option in fields(ServerOptions):
        if option.name in leave_out or option.name == "owner":
            continue
        flag, word = "--" + option.name.replace("_", "-"), option.name.rpartition("_")[2]
        default = f"(default: {_default(option)})"
        if option.name in _JSON:
            names, metavar = (MODES, "MODE|JSON") if option.name == "reduce" else ((), "JSON")
            said = f"{_said(option.name)} {default}"
            parser.add_argument(flag, type=_rules(_JSON[option.name], names), metavar=metavar, help=said)
            continue
        said = f"{_MEANING[option.name]} {default}"
        if option.type == "bool":
            parser.add_argument(flag, nargs="?", type=_boolean, const=True, metavar="true|false", help=said)
            continue
        kind: Any
        if option.type == "int":
            kind, metavar = _UNITS.get(word, (int, "N"))
        else:
            kind, metavar = str, {"upload": "URL", "roots": "DIRS"}.get(word, word.upper())
        choices = _CHOICES.get(option.name)
        parser.add_argument(flag, type=kind, choices=choices, metavar=None if choices else metavar, help=said)


def _default(option: Field[Any]) -> str:
    """The default of an option, for the help."""
    if option.name == "store_dir":
        return "captures"  # that of `capture_args`
    if isinstance(option.default, tuple):
        return ",".join(option.default) or "none"
    if option.type == "int" and option.default == 0:
        removal = option.name.startswith("retain_")
        return f"0, {'automatic' if option.name in _AUTOMATIC else 'no removal' if removal else 'no limit'}"
    return str(option.default).lower() if option.type == "bool" else str(option.default) or "none"


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; give true or false, or the flag alone for true")
    return text.lower() == "true"


def _rules(example: str, names: Collection[str]) -> Callable[[str], dict[str, str] | str]:
    """The `type` of a flag whose value is a JSON object like `example`, or one of `names`."""

    def parse(text: str) -> dict[str, str] | str:
        if text in names:
            return text
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            try:
                refuse_sketch(text)
            except ReduceError as error:
                raise argparse.ArgumentTypeError(str(error)) from error
            either = f"one of {', '.join(names)}, or " if names else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not valid; give {either}JSON, as in {example}")
        return value

    return parse


def _said(option: str) -> str:
    """The meaning of an option whose flag takes a JSON object, with an example."""
    example = f"as in '{_JSON[option]}'"
    if option == "reduce":
        return f"{_MEANING[option]}: {', '.join(MODES)}, or {example}; reductions: {', '.join(forms())}"
    return f"{_MEANING[option]}, {example}"


def server_command(argv: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], ServerOptions | None]:
    """(the command line of vLLM's server, the server options in it). argv: the arguments after `dmi serve`.

    The server options are None if they are in vLLM's --config file. parser: `main.make_serve_parser`. Raises
    OptionError for a bad option, and for flags of vLLM that configure the connector a second time.
    """
    rest = [_spelled(word) for word in argv]
    model = [rest.pop(0)] if rest and not rest[0].startswith("-") else []
    options, passed = parser.parse_known_args(rest)
    if not model and not any(re.match(r"^--(model|config)(=|$)", flag) for flag in passed):
        raise OptionError("model: none is given; write it first, as in dmi serve MODEL --hooks hidden-states")
    given = {name: value for name, value in vars(options).items() if value is not None}
    refuse_conflicts(passed, "dmi serve", f", or run python -m {SERVER} with flags of your own")
    command = [sys.executable, "-P", "-m", SERVER]
    command += ["--model", *model] if model else []
    if _config_captures(passed, given):
        return [*command, *passed], None
    leave_graphs(given, passed)
    arguments = capture_args(**given)
    for name, value in arguments.items():
        command += [f"--{name}", json.dumps(value)]
    mine = ServerOptions.parse(arguments["kv_transfer_config"]["kv_connector_extra_config"])
    return [*command, *passed], mine


def _spelled(word: str) -> str:
    """An argument, with dashes instead of underscores in capture flags. vLLM accepts both in its own flags."""
    flag, equals, value = word.partition("=")
    if flag.startswith("--") and flag[2:].replace("-", "_") in _OURS:
        return flag.replace("_", "-") + equals + value
    return word


def leave_graphs(given: dict[str, Any], flags: Sequence[str]) -> None:
    """Set `cuda_graphs` in `given` to "vllm" if a flag of vLLM configures CUDA graphs, unless it is set there."""
    if any(_GRAPHS.match(flag) for flag in flags):
        given.setdefault("cuda_graphs", "vllm")


def refuse_conflicts(flags: Sequence[str], command: str, other: str = "") -> None:
    """Raise OptionError for flags of vLLM that `command` sets itself. other: an alternative, for the message."""
    for flag in flags:
        match = _CONFLICT.match(flag)
        if match is not None:
            raise OptionError(
                f"{match['long'] or match['short']}: {command} writes this flag itself; leave it out, and give "
                f"--hooks and --owner{other}"
            )


def _config_captures(passed: Sequence[str], given: dict[str, Any]) -> bool:
    """Whether vLLM's --config file configures the connector. Raises OptionError if capture flags are given too.

    passed: the flags for vLLM. given: server options of the command line.
    """
    names = [passed[i + 1] for i, flag in enumerate(passed[:-1]) if flag == "--config"]
    names += [flag.partition("=")[2] for flag in passed if flag.startswith("--config=")]
    for name in names:
        path = Path(name)
        if not path.is_file():
            raise OptionError(f"config: {name!r} is not a file; give a YAML file of vLLM flags, as in configs/")
        if not re.search(r"^[\"']?kv[-_]transfer[-_]config\b", path.read_text(), re.MULTILINE):
            continue
        if given:
            flags = ", ".join("--" + option.replace("_", "-") for option in given)
            raise OptionError(
                f"config: {name!r} has a kv-transfer-config, which {flags} would replace; put these settings "
                "into the file, or remove its kv-transfer-config and speculative-config"
            )
        return True
    return False


def serve(argv: Sequence[str], parser: argparse.ArgumentParser) -> NoReturn:
    """Replace this process with vLLM's server. argv, parser: as in `server_command`.

    Raises OptionError. Raises ValueError if vLLM is not installed, or if a directory cannot be used.
    """
    command, options = server_command(argv, parser)
    if options is not None:
        check_directories(options)
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vllm: it is not installed in this environment; install dmi_connector[vllm]")
    sys.stdout.flush()
    os.execv(command[0], command)
