# SPDX-License-Identifier: Apache-2.0
"""The settings of a run. Settings that affect the contents of stores are saved in RUN_NAME and must not change."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dmi_connector.bulk.manifest import cannot_write
from dmi_connector.bulk.order import Order
from dmi_connector.bulk.prompts import Columns
from dmi_connector.bulk.recovery import is_unused
from dmi_connector.reduce.probe_option import parse_probe
from dmi_connector.settings import ServerOptions
from dmi_connector.store.format.locks import hold_part, lock_alone
from dmi_connector.wording import show

RUN_NAME = "run.json"
"""File with the name and the settings of a run."""
LIFE_NAME = ".life.lock"
"""Prefix of the names of lock files. Processes of engines hold shared locks on them until they exit. Each share has a
file for all its engines. On a Ray cluster each worker has a file of its own too.
"""
_LOCK_NAME = ".settings.lock"
"""File on which each process of `dmi run` holds a shared lock."""
_OTHERS_S, _AGAIN_S = 2.0, (0.02, 0.2)
"""Seconds to retry while other processes hold the lock, and the range of the pauses between tries, in seconds."""
_FORMAT = 1
"""Format version of RUN_NAME."""
STORE_OPTIONS = ("hooks", "reduce", "codec", "chunk_tokens", "segment_tokens", "check")
"""Server options that affect the contents of stores, besides `probes`."""
FREE_FLAGS = frozenset(
    (
        "gpu-memory-utilization",
        "kv-cache-memory-bytes",
        "max-num-seqs",
        "max-num-batched-tokens",
        "tensor-parallel-size",
        "pipeline-parallel-size",
        "distributed-executor-backend",
        "enable-prefix-caching",
        "no-enable-prefix-caching",
        "enable-chunked-prefill",
        "no-enable-chunked-prefill",
        "async-scheduling",
        "no-async-scheduling",
        "enforce-eager",
        "no-enforce-eager",
        "compilation-config",
        "download-dir",
        "load-format",
        "max-parallel-loading-workers",
        "block-size",
        "num-gpu-blocks-override",
        "swap-space",
        "cpu-offload-gb",
        "tp",
        "pp",
        "cc",
        "O",
        "O0",
        "O1",
        "O2",
        "O3",
        "optimization-level",
    )
)
"""Flags of vLLM that affect speed, but not which values are captured. They may change when a run is resumed."""


@dataclass(frozen=True)
class RunSettings:
    """What a run captures, of which prompts.

    model: vLLM's argument `model`. capture: arguments of `capture_args` except `store_dir`. flags: flags of vLLM's
    engine. sampling: fields of SamplingParams. max_tokens: maximum number of tokens to generate; None captures only the
    prompt. chat: whether a text is the user's message of a chat. columns: names of the input columns. order: order of
    the rows, and the share.
    """

    model: str
    capture: Mapping[str, Any]
    flags: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    chat: bool = False
    columns: Columns = field(default_factory=Columns)
    order: Order = field(default_factory=Order)

    def fingerprint(self, identity: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The settings that must not change, JSON-serializable. identity: result of `sources.identity`."""
        return {
            "model": self.model,
            "owner": self.capture.get("owner", "draft"),
            **_resolved(self.capture),
            **_probes(self.capture),
            "flags": sorted(flag for flag in joined(self.flags) if _flag_name(flag) not in FREE_FLAGS),
            "sampling": _resolved_sampling(self.sampling),
            "max_tokens": self.max_tokens,
            "chat": self.chat,
            "columns": asdict(self.columns),
            "shuffle": self.order.shuffle,
            "shards": self.order.shares,
            "prompts": [dict(file) for file in identity],
        }

    def engine_message(self, out: Path) -> dict[str, Any]:
        """The settings for an engine process, JSON-serializable. out: directory of the stores."""
        names = ("model", "flags", "sampling", "max_tokens")
        # A prompt whose store is incomplete is captured again, so incomplete stores must not be uploaded.
        capture = {**self.capture, **({"upload_only_complete": True} if self.capture.get("upload") else {})}
        return {**{name: getattr(self, name) for name in names}, "capture": capture, "store_dir": str(out)}


def joined(flags: Sequence[str]) -> list[str]:
    """Flags of a command line, each with its values, as in "--flag=value,value"."""
    found: list[str] = []
    for text in flags:
        if text.startswith("-") and not re.fullmatch(r"-\d.*", text):
            found.append(text)
        elif found:
            found[-1] += ("," if "=" in found[-1] else "=") + text
        else:
            found.append(text)
    return found


def engine_gpus(flags: Sequence[str]) -> int:
    """Number of GPUs of an engine with these flags: tensor-parallel ranks times pipeline stages. Raises ValueError."""
    sizes = {"tensor-parallel-size": 1, "pipeline-parallel-size": 1}
    for flag in joined(flags):
        name = _flag_name(flag)
        name = {"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size"}.get(name, name)
        if name in sizes:
            value = flag.partition("=")[2]
            if not re.fullmatch("0*[1-9][0-9]{0,8}", value):
                raise ValueError(f"--{name} {value!r} is not valid; give an integer of at least 1")
            sizes[name] = int(value)
    return math.prod(sizes.values())


def _flag_name(flag: str) -> str:
    return flag.lstrip("-").split("=")[0].split(".")[0].replace("_", "-")


def _resolved(capture: Mapping[str, Any]) -> dict[str, Any]:
    """The effective values of STORE_OPTIONS, including defaults. Raises OptionError."""
    given = {name: capture[name] for name in STORE_OPTIONS if name in capture}
    options = ServerOptions.parse({"store_dir": "/", **given})
    values = {name: getattr(options, name) for name in STORE_OPTIONS}
    return {**values, "hooks": ",".join(options.hooks), "reduce": dict(options.reduce)}


def _probes(capture: Mapping[str, Any]) -> dict[str, Any]:
    """{"probes": {name: digest of its file}}; {} without probes, as in runs of older versions."""
    probes = {name: parse_probe(name, text) for name, text in capture.get("probes", {}).items()}
    return {"probes": {name: probe.sha256 or probe.path for name, probe in probes.items()}} if probes else {}


def _resolved_sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams, including the defaults of `EngineFeed`."""
    return {"temperature": 0.0, "n": 1, **fields}


@contextlib.contextmanager
def settle(out: Path, fingerprint: Mapping[str, Any]) -> Iterator[str]:
    """Yield the name of the run in the directory `out`, and protect its settings until the end of the block.

    Begins a run if there is none, or if the existing run has other settings but captured nothing. Several shares may
    start at once: each holds a shared lock, so that no process replaces its settings. fingerprint: result of
    `RunSettings.fingerprint`.

    Raises ValueError if the existing run has other settings, and OSError if the file system has no locks.
    """
    wanted = json.loads(json.dumps(fingerprint))
    lock, deadline = out / _LOCK_NAME, time.monotonic() + _OTHERS_S
    written = False
    while True:
        with hold_part(lock):
            if not (out / RUN_NAME).exists():
                _write(out, wanted, os.link)
            noted = _noted(out)
            if noted["settings"] == wanted:
                yield str(noted["run"])
                return
        with lock_alone(lock) as alone:
            # If another process has written settings meanwhile, compare them first.
            if alone and _noted(out) == noted:
                if written or not is_unused(out, str(noted["run"]), LIFE_NAME):
                    raise _refusal(out, noted["settings"], wanted)
                _write(out, wanted, os.replace)
                written = True  # if they do not read back as written, the next iteration raises
        if not alone:
            if time.monotonic() > deadline:
                raise _refusal(out, noted["settings"], wanted)
            time.sleep(random.uniform(*_AGAIN_S))


def _write(out: Path, wanted: Mapping[str, Any], put: Callable[[Path, Path], None]) -> None:
    """Write RUN_NAME with a new name for the run. put: os.link to keep an existing file, os.replace to replace it."""
    own = out / f"{RUN_NAME}.{uuid.uuid4().hex[:8]}"
    run = {"format": _FORMAT, "run": uuid.uuid4().hex[:8], "settings": wanted}
    try:
        with open(own, "w") as file:
            file.write(json.dumps(run, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        own.unlink(missing_ok=True)
        raise cannot_write(out / RUN_NAME, error) from error
    with contextlib.suppress(FileExistsError):  # another share has just begun the run
        put(own, out / RUN_NAME)
    own.unlink(missing_ok=True)


def _noted(out: Path) -> dict[str, Any]:
    """The contents of RUN_NAME. Raises ValueError if the file is damaged or has another format."""
    try:
        noted: dict[str, Any] = json.loads((out / RUN_NAME).read_text())
        found = noted.get("format")
        if found == _FORMAT:
            settings = noted["settings"]
            if not str.isalnum(noted["run"]):  # it becomes part of file names
                raise ValueError(f"run {noted['run']!r} is not the name of a run")
            settings |= _resolved(settings)  # older versions saved no defaults
            settings["columns"] = {**asdict(Columns()), **settings["columns"]}
            settings["sampling"] = _resolved_sampling(settings["sampling"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"--out {out}: {RUN_NAME} is damaged ({error!r}); put back a copy of it, or give another --out"
        ) from error
    if found != _FORMAT:
        raise ValueError(
            f"--out {out}: {RUN_NAME} is of format {found}, this version writes {_FORMAT}; give another --out"
        )
    return noted


def _refusal(out: Path, noted: Mapping[str, Any], wanted: Mapping[str, Any]) -> ValueError:
    """The error for settings `wanted` that differ from those of the existing run."""
    for name, value in wanted.items():
        if (before := noted.get(name)) != value:
            if name == "prompts" and before:
                change = _changed(before, value)
                return ValueError(
                    f"--out {out}: the prompts have changed since its run began: {change}; give the same files, or "
                    "another --out"
                )
            return ValueError(
                f"--out {out} was begun with {name} {show(before)}, not {show(value)}; give the same, or another --out"
            )
    name = min(noted.keys() - wanted.keys())
    return ValueError(f"--out {out} was begun with {name} {show(noted[name])}; give it too, or another --out")


def _changed(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
    """The first difference between two inputs, in words. before, now: results of `sources.identity`."""
    old, new = ({str(file["name"]): file for file in files} for files in (before, now))
    gone, more = [name for name in old if name not in new], [name for name in new if name not in old]
    if gone and more:
        return f"{gone[0]} is gone, {more[0]} is new"
    if gone or more:
        return f"{gone[0]} is gone" if gone else f"{more[0]} is new"
    for name, file in new.items():
        if file["bytes"] != old[name]["bytes"]:
            return f"{name} has {file['bytes']} bytes, not {old[name]['bytes']}"
        if file != old[name]:
            return f"{name} has other content"
    return "its files are in another order"
