# SPDX-License-Identifier: Apache-2.0
"""`dmi run`: captures a set of prompts offline."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import fields
from pathlib import Path
from typing import Any

from dmi_connector.args import capture_args
from dmi_connector.bulk.budget import Budget
from dmi_connector.bulk.engines import EnginePool, EngineProcesses, device_shares, visible_devices
from dmi_connector.bulk.manifest import Manifest
from dmi_connector.bulk.order import Order, parse_share
from dmi_connector.bulk.progress import Progress
from dmi_connector.bulk.prompts import Columns
from dmi_connector.bulk.ray_workers import LOCAL, RayWorkers, connected
from dmi_connector.bulk.recovery import Recovered, not_uploaded, recover
from dmi_connector.bulk.run import Outcome, Run
from dmi_connector.bulk.settings import LIFE_NAME, RunSettings, engine_gpus, settle
from dmi_connector.bulk.signals import stopped_by_signals
from dmi_connector.bulk.sources import identity, open_source
from dmi_connector.cli import units
from dmi_connector.cli.serve import VALUES, add_options, leave_graphs, refuse_conflicts
from dmi_connector.option_values import OptionError
from dmi_connector.settings import ServerOptions
from dmi_connector.store.format.locks import lock_alone
from dmi_connector.store.format.paths import UMASKS, make_directory
from dmi_connector.urls import is_url
from dmi_connector.wording import format_bytes

USAGE = f"""dmi run --model MODEL --prompts FILE|DIR --out DIR [--hooks HOOKS] [--max-tokens N] [option ...]
               [any flag of vLLM's engine ...]

       If the command was stopped or killed, start it again: it continues where it was. Flags that are not listed
       here go to vLLM's engine as they are.
{VALUES}"""
NOT_OURS = (
    "store_dir",
    "policy",
    "sink",
    "allow_custom_save_path",
    "save_path_roots",
    "max_request_bytes",
    "max_total_bytes",
    "min_free_bytes",
    "retain_seconds",
    "retain_bytes",
    "upload_only_complete",
)
"""Server options that `dmi run` does not take, because it does not need them or sets them itself."""
_WAIT_S = 0.2
_SHOWN = 5
"""Maximum number of rejected rows and failed prompts in the summary."""
_WHY = {
    "max_bytes": "the disk budget is used up",
    "signal": "it was told to stop",
    "engines": "no engine is left",
    "captures": "too many captures in a row failed",
}
"""`Outcome.stopped` -> the reason in words."""


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dmi run`."""
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE|DIR",
        help="a .jsonl or .parquet file, or a directory of a data set",
    )
    prompts.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="NAME=COLUMN",
        help="input column of prompt, messages, prompt_token_ids, id or loss_mask, as in prompt=text; can be repeated",
    )
    prompts.add_argument(
        "--chat", action="store_true", help="apply the chat template: the prompt is the user's message"
    )
    prompts.add_argument("--shuffle", type=int, metavar="SEED", help="shuffle the rows with this seed")
    prompts.add_argument("--limit", type=_count, metavar="N", help="only the first N rows, after shuffling")
    prompts.add_argument(
        "--shard",
        type=_share,
        default=(0, 1),
        metavar="I/N",
        help="share I of N, with I from 0 to N - 1: every Nth row",
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument("--model", required=True, help="name or directory of the model, as for vLLM")
    engine.add_argument(
        "--max-tokens", type=_count, metavar="N", help="maximum tokens to generate (default: none, prompts only)"
    )
    engine.add_argument("--sampling", type=_object, default={}, metavar="JSON", help="fields of vLLM's SamplingParams")
    engine.add_argument(
        "--data-parallel",
        type=_count,
        default=1,
        metavar="N",
        help="number of engines on this machine, each with its own GPUs (default: 1)",
    )
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run the engines on a Ray cluster: HOST:PORT, auto or local",
    )
    cluster.add_argument("--workers", type=_count, metavar="N", help="number of engines on the cluster (default: 1)")
    cluster.add_argument("--worker-cpus", type=_count, metavar="N", help="CPUs to reserve per engine (default: 1)")
    cluster.add_argument(
        "--worker-gpus", type=_count, metavar="N", help="GPUs per engine (default: tensor times pipeline parallel size)"
    )
    out = parser.add_argument_group("output")
    out.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory of stores, manifest.jsonl and rejects.jsonl"
    )
    out.add_argument(
        "--max-bytes", type=units.nbytes, default=0, metavar="SIZE", help="maximum size of the stores in DIR: 500M, 2T"
    )
    out.add_argument(
        "--min-free-bytes",
        type=units.nbytes,
        default=0,
        metavar="SIZE",
        help="space that must stay free on the disk of DIR",
    )
    out.add_argument(
        "--when-full", choices=("wait", "end"), default="wait", help="what to do at these limits (default: wait)"
    )
    out.add_argument(
        "--redo-missing", action="store_true", help="capture prompts again whose stores were removed from DIR"
    )
    out.add_argument("--json", action="store_true", help="print progress as JSON objects, one per line")
    add_options(parser.add_argument_group("capture"), leave_out=NOT_OURS)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; give an integer of at least 1")
    return int(text)


def _share(text: str) -> tuple[int, int]:
    try:
        return parse_share(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not valid; give a JSON object, as in {{"temperature": 0.7}}')
    return value


def settings_of(options: argparse.Namespace, flags: Sequence[str]) -> RunSettings:
    """The settings from a command line. flags: flags of vLLM's engine. Raises OptionError and ValueError."""
    names = [option.name for option in fields(ServerOptions) if option.name not in NOT_OURS]
    capture = {name: value for name in names if (value := getattr(options, name)) is not None}
    leave_graphs(capture, flags)
    refuse_conflicts(flags, "dmi run")
    capture_args(**capture, store_dir=options.out)
    for name in ("n", "max_tokens", "extra_args", "output_kind"):
        if name in options.sampling and (name, options.sampling[name]) != ("n", 1):
            fix = "give --max-tokens" if name == "max_tokens" else "leave it out"
            raise OptionError(f"--sampling {name}: a bulk capture sets it itself; {fix}")
    share, shares = options.shard
    return RunSettings(
        options.model,
        capture,
        tuple(flags),
        options.sampling,
        options.max_tokens,
        options.chat,
        Columns.parse(options.column),
        Order(options.shuffle, options.limit, share, shares),
    )


def run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Run the command.

    flags: flags of vLLM's engine. Returns the exit status. 0: every prompt has its store, and with `upload` every store
    is uploaded. 2: no engine could start. 1: otherwise, also if every row was rejected. Raises ValueError, OSError.
    """
    if options.ray is None and importlib.util.find_spec("vllm") is None:
        raise ValueError("vllm: it is not installed in this environment; install dmi_connector[vllm]")
    settings, progress = settings_of(options, flags), Progress(options.json)
    _check_cluster(options)
    if options.ray is None:
        device_shares(options.data_parallel, visible_devices())
    source = open_source(options.prompts, settings.columns)
    if is_url(str(options.out)):
        raise ValueError(f"--out {options.out}: a URL; give a directory on this machine, and the URL to --upload")
    out = options.out.absolute()
    mode = settings.capture.get("file_mode", "private")
    make_directory(str(out), mode)
    suffix = settings.order.suffix
    with ExitStack() as stack:
        stack.callback(os.umask, os.umask(UMASKS[mode]))
        name = stack.enter_context(settle(out, settings.fingerprint(identity(options.prompts))))
        if not stack.enter_context(lock_alone(out / f".run{suffix}.lock")):
            raise ValueError(f"--out {out}: another dmi run works on it; wait for its end, or give another --shard")
        life, manifest_path = out / f"{LIFE_NAME}{suffix}", out / f"manifest{suffix}.jsonl"
        recovered = _recover(out, name, settings.order, manifest_path, life, options.redo_missing, progress)
        _say_recovered(recovered, progress)
        manifest = stack.enter_context(closing(Manifest(manifest_path)))
        rejects = stack.enter_context(open(out / f"rejects{suffix}.jsonl", "w"))
        rows = settings.order.rows(source, out)
        budget = Budget(out, options.max_bytes, options.min_free_bytes)
        engines = _engines(options, settings, out, life, progress, stack)
        stack.callback(progress.close)
        job = Run(
            name,
            out,
            rows,
            recovered,
            engines,
            manifest,
            rejects,
            budget,
            progress,
            lambda: _free(life),
            settings.columns,
            settings.chat,
            source.line_offset,
            options.when_full == "end",
            options.max_tokens is not None,
        )
        with stopped_by_signals(job.stop):
            outcome = job.go()
            if settings.capture.get("upload"):
                _wait_for_uploads(life, settings.capture.get("shutdown_seconds", ServerOptions.shutdown_seconds))
    left = not_uploaded(out, name, settings.order) if settings.capture.get("upload") else (0, None)
    return _summarise(outcome, engines.answered(), left, out, suffix, progress)


def _check_cluster(options: argparse.Namespace) -> None:
    """Raise OptionError for cluster options without --ray, and for --data-parallel with it."""
    if options.ray is not None and options.data_parallel != 1:
        raise OptionError(
            f"--data-parallel {options.data_parallel}: it is for runs without Ray; with --ray, give --workers"
        )
    for name in ("workers", "worker_cpus", "worker_gpus"):
        if options.ray is None and (value := getattr(options, name)) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise OptionError(f"{flag} {value}: it is for a Ray cluster; give --ray too, or --data-parallel instead")


def _engines(
    options: argparse.Namespace, settings: RunSettings, out: Path, life: Path, progress: Progress, stack: ExitStack
) -> EnginePool:
    """The engines of a run. Closing `stack` stops the engines and disconnects from the cluster."""
    start, suffix = settings.engine_message(out), settings.order.suffix
    if options.ray is None:
        return stack.enter_context(closing(EngineProcesses(options.data_parallel, start, out, life, suffix)))
    workers = options.workers or 1
    address = options.ray or os.environ.get("RAY_ADDRESS") or LOCAL
    each = options.worker_gpus or engine_gpus(settings.flags)
    needs, room = stack.enter_context(connected(address, workers, options.worker_cpus or 1, each))
    if room < workers:
        text = f"dmi: the cluster has room for {room} of {workers} workers; the others start when it has more"
        progress.say({"event": "cluster", "room": room, "workers": workers}, text)
    return stack.enter_context(closing(RayWorkers(workers, needs, start, out, life, suffix)))


def _free(life: Path) -> bool:
    with lock_alone(life) as alone:
        return alone


def _wait_for_uploads(life: Path, seconds: float) -> None:
    """Wait up to `seconds` until all processes of the engines have exited. They upload the remaining stores."""
    deadline = time.monotonic() + seconds
    while not _free(life) and time.monotonic() < deadline:
        time.sleep(_WAIT_S)


def _recover(
    out: Path, run: str, order: Order, manifest: Path, life: Path, redo_missing: bool, progress: Progress
) -> Recovered:
    """Wait until all processes of an earlier start have exited, then call `recover`. No engine can start meanwhile."""
    told = False
    while True:
        with lock_alone(life) as alone:
            if alone:
                return recover(out, run, order, manifest, redo_missing)
        if not told:
            progress.say({"event": "waiting", "for": "writers"}, "dmi: waiting for writers of the run that was stopped")
            told = True
        time.sleep(_WAIT_S)


def _say_recovered(recovered: Recovered, progress: Progress) -> None:
    done = len(recovered.done) + len(recovered.found)
    if not done and not recovered.removed:
        return
    event = {"event": "recovered", "done": done, "removed": recovered.removed, "gone": recovered.gone}
    text = f"dmi: the run continues: {done} prompts are done, {recovered.removed} unusable stores were removed"
    if recovered.gone:
        text += f", {recovered.gone} stores do not exist any more (--redo-missing captures them again)"
    progress.say(event, text)


def _summarise(
    outcome: Outcome,
    answered: list[int],
    left: tuple[int, str | None],
    out: Path,
    suffix: str,
    progress: Progress,
) -> int:
    """Print how a run ended, and return the exit status. answered: prompts per engine. left: see `not_uploaded`."""
    counts, (not_uploaded, why) = outcome.counts, left
    rejects = out / f"rejects{suffix}.jsonl"
    event = {
        "event": "summary",
        "stored": counts.done - counts.before,
        "done": counts.done,
        "beyond_limit": outcome.beyond,
        "rejected": counts.rejected,
        "failed": counts.failed,
        "lost": outcome.lost,
        "not_uploaded": not_uploaded,
        "upload_failure": why,
        "stopped": outcome.stopped,
        "engines": answered,
        "tokens": counts.tokens,
        "bytes": counts.bytes,
        "manifest": str(out / f"manifest{suffix}.jsonl"),
        "rejects": str(rejects),
    }
    nothing = outcome.all_done and not counts.done and counts.rejected > 0
    lines = [f"{counts.done} prompts have their stores in {out}, {counts.done - counts.before} of them captured now"]
    lines[0] += f" ({counts.tokens} tokens, {format_bytes(counts.bytes)})"
    lines[0] += f"; {outcome.beyond} more are beyond --limit" if outcome.beyond else ""
    if counts.rejected or counts.failed:
        lines.append(f"{counts.rejected} bad rows, {counts.failed} failed prompts: see {rejects}")
        with open(rejects) as file:
            for _, text in zip(range(_SHOWN), file, strict=False):
                entry = json.loads(text)
                where = f"line {entry['line']}" if "line" in entry else f"row {entry['row']}"
                lines.append(f"  {where}: {entry['reason']}")
    if not outcome.began:
        lines.append("no engine could start: correct the error above and start again")
    elif nothing:
        lines.append("no prompt was captured: correct the input, --column or other options by the reasons above")
    elif not outcome.all_done:
        lines.append(f"prompts are left ({_WHY.get(outcome.stopped or '', 'see above')}): start the same command again")
    if not_uploaded:
        reason = f" ({why})" if why else ""
        lines.append(f"{not_uploaded} stores are not uploaded{reason}: when all is done, dmi repair {out} uploads them")
    progress.say(event, "\n".join(lines))
    if not outcome.began:
        return 2
    return 0 if outcome.all_done and not not_uploaded and not nothing else 1
