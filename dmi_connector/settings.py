# SPDX-License-Identifier: Apache-2.0
"""Server options (`kv_connector_extra_config`), parsed and validated."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dmi_connector.codecs import CODECS
from dmi_connector.option_values import (
    OptionError,
    boolean,
    check_names,
    hook_items,
    integer,
    is_directory_name,
    one_of,
    refuse,
)
from dmi_connector.reduce import ReduceError, parse
from dmi_connector.reduce.modes import rules_of
from dmi_connector.reduce.probe import Probe
from dmi_connector.reduce.probe_option import parse_probe
from dmi_connector.urls import is_url, parse_url
from dmi_connector.wording import suggest

POLICIES = ("block", "drop")
SINKS = ("disk", "host", "null")
CHECKS = ("none", "poison")
CUDA_GRAPHS = ("auto", "vllm")
FILE_MODES = ("private", "group", "world")
POOL = "pool"
_OF_CACHE = ("draft", "target")
"""Owners that `--owner` and `capture_args` name, but not the option `owner`: options of vLLM decide between them."""
_OF_VLLM = {
    "shared_storage_path": "did you mean 'store_dir'?",
    "num_writer_threads": "did you mean 'writers'?",
    "use_synchronization_lock": "leave it out: a store gets its final name only when it is finished.",
}
"""Option that only vLLM's ExampleHiddenStatesConnector has -> what to do instead."""
_MOST_BYTES, _MOST_TOTAL = 1 << 44, 1 << 60
"""Upper bounds of option values: bytes of a buffer, and bytes or seconds of a limit."""
_MOST_SCORE = sys.float_info.max
"""Bound of thresholds. Python raises OverflowError when it converts a larger integer to a float."""


def _path(option: str, value: object) -> str:
    if is_url(value):  # not shown, because it may hold a secret
        raise OptionError(f"{option}: the value is a URL; give a local directory, and the URL as the option upload")
    if isinstance(value, str) and value and "\0" not in value:
        with contextlib.suppress(UnicodeEncodeError):
            os.fsencode(value)
            return os.path.abspath(os.path.expanduser(value))
    raise refuse(option, value, "is not valid; give the directory where stores are written")


def _owner(value: object) -> str:
    """POOL, or "" for the owner that vLLM's options determine. Raises OptionError."""
    if value in _OF_CACHE:
        raise refuse(
            "owner",
            value,
            "is not set here; leave owner out: with speculative_config method extract_hidden_states, rows are in the "
            "draft's cache, otherwise in the target's",
        )
    return "" if value == "" else one_of("owner", value, (POOL,))


def _roots(value: object) -> tuple[str, ...]:
    items = [i.strip() for i in value.split(",")] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(is_directory_name(i) for i in items):
        raise refuse(
            "save_path_roots", value, "is not valid; give absolute directories, without '.' and '..', as a list"
        )
    return tuple(os.path.normpath(i) for i in items)


def _upload(value: object) -> str:
    """The URL without a trailing slash; "" for no upload. Raises OptionError."""
    if value == "":
        return ""
    try:
        bucket, prefix = parse_url("upload", value)
    except ValueError as error:
        raise OptionError(str(error)) from error
    return f"s3://{bucket}/{prefix}".rstrip("/")


def _reduce(value: object) -> tuple[tuple[str, str], ...]:
    if isinstance(value, str):
        try:
            value = rules_of(value)
        except ReduceError as error:
            raise OptionError(str(error)) from error
    if not isinstance(value, Mapping) or not all(isinstance(x, str) for item in value.items() for x in item):
        raise refuse("reduce", value, 'is not valid; give {patterns: reduction}, as in {"resid_*": "rp(512)"}')
    for spec in value.values():
        try:
            parse(spec)
        except ReduceError as error:
            raise OptionError(str(error)) from error
        except ValueError as error:  # a path that no file can have
            raise refuse("reduce", spec, f"is not valid ({error}); give the path of a file") from error
    return tuple(value.items())


def _probes(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping) or not all(isinstance(x, str) for item in value.items() for x in item):
        raise refuse("probes", value, 'is not valid; give {name: file}, as in {"risk": "risk.safetensors"}')
    for name, text in value.items():
        try:
            parse_probe(name, text)
        except ReduceError as error:
            raise OptionError(str(error)) from error
        except ValueError as error:  # a path that no file can have
            raise refuse("probes", {name: text}, f"is not valid ({error}); give the path of a file") from error
    return tuple(value.items())


def _alerts(value: object, probes: Sequence[tuple[str, str]]) -> tuple[tuple[str, float], ...]:
    """Parse the thresholds of `probe_alerts`. probes: the parsed option `probes`. Raises OptionError."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise refuse("probe_alerts", value, 'is not valid; give {name: score}, as in {"risk": 0.8}')
    files = dict(probes)
    for name, least in value.items():
        if name not in files:
            known = ", ".join(files) or "none"
            raise refuse("probe_alerts", name, f"is not a probe{suggest(name, files) or ';'} probes: {known}")
        if isinstance(least, bool) or not isinstance(least, int | float) or not -_MOST_SCORE <= least <= _MOST_SCORE:
            raise refuse("probe_alerts", {name: least}, "is not valid; give a number; larger scores are counted")
        probe = parse_probe(name, files[name])
        if not isinstance(probe, Probe) or not probe.one_score:
            raise refuse(
                "probe_alerts", name, "does not have one score per row; name a probe of one output in one layer"
            )
    return tuple((name, float(least)) for name, least in value.items())


@dataclass(frozen=True)
class ServerOptions:
    """What one server captures and how it stores it.

    What is captured. hooks: the selection (see `hooks.parse_selection`). reduce: {hook patterns: reduction}, in which
    the first match of a hook applies, or the name of a mode (docs/REDUCTIONS.md). probes: {name: file}; each probe is
    computed in the forward pass and captured as the hook probe.NAME (docs/PROBES.md). probe_alerts: {name: score};
    requests with a larger score of the probe are counted.

    Memory. owner: "pool" keeps rows in a pool, "" keeps them in vLLM's cache. pool_bytes: size of the pool; 0: from the
    size of vLLM's cache. staging_bytes: GPU memory in which chunks are gathered; 0: automatic. host_buffer_bytes: size
    of the ring between the engine and the writers, pinned on a GPU; 0: automatic. cuda_graphs: "auto" uses vLLM's mode
    FULL instead of vLLM's default where FULL is correct; "vllm" keeps the default.

    Writing. store_dir: directory of the stores, created if it is missing. codec: codec of chunks, a name in
    `codecs.CODECS`. always_compress: writers compress chunks even when they are behind. chunk_tokens: rows per chunk.
    segment_tokens: rows per shard, a multiple of chunk_tokens. writers: number of writer processes; 0: from the number
    of cores. policy: what happens when writers are behind. With "block" the engine waits, and no rows are lost. With
    "drop" the engine does not wait, and stores record the missing ranges. sink: "disk" writes stores. "host" (copy to
    host memory, then discard) and "null" (leave rows on the GPU) are for benchmarks. fsync: flush every store to the
    disk before it gets its final name. file_mode: who may read stores: "private" (their owner), "group" or "world".
    allow_custom_save_path: requests may name a directory beneath one of save_path_roots. shutdown_seconds: how long
    writing may continue after the engine ends. check: "poison" fills rows with a pattern before each forward, and
    lists rows that still contain the pattern as missing. It is slow, and meant for tests of new models and features.

    Limits; 0: no limit. max_request_bytes: of the raw rows of one request. max_total_bytes: of all stores.
    min_free_bytes: space that must stay free on the file system. retain_seconds: age at which stores are removed.
    retain_bytes: the oldest stores are removed while finished stores take more bytes.

    Upload. upload: s3://bucket/prefix to which finished stores are uploaded, "" for none. upload_remove_local: remove
    the local copy of an uploaded store. upload_backlog_bytes: maximum bytes of finished stores that wait for their
    upload. Beyond this limit `policy` decides: the engine waits, or a store stays local until `dmi repair` uploads it.
    upload_retry_seconds: how long transient errors of an upload are retried. upload_only_complete: do not upload stores
    that lack rows, or whose request was aborted.
    """

    store_dir: str
    hooks: tuple[str, ...] = ("hidden-states",)
    owner: str = ""
    pool_bytes: int = 0
    codec: str = "zstd"
    always_compress: bool = False
    chunk_tokens: int = 128
    segment_tokens: int = 1024
    writers: int = 0
    host_buffer_bytes: int = 0
    staging_bytes: int = 0
    policy: str = "block"
    sink: str = "disk"
    fsync: bool = False
    file_mode: str = "private"
    allow_custom_save_path: bool = False
    save_path_roots: tuple[str, ...] = ()
    max_request_bytes: int = 0
    max_total_bytes: int = 0
    min_free_bytes: int = 0
    retain_seconds: int = 0
    retain_bytes: int = 0
    shutdown_seconds: int = 60
    reduce: tuple[tuple[str, str], ...] = ()
    probes: tuple[tuple[str, str], ...] = ()
    probe_alerts: tuple[tuple[str, float], ...] = ()
    check: str = "none"
    cuda_graphs: str = "auto"
    upload: str = ""
    upload_remove_local: bool = False
    upload_backlog_bytes: int = 1 << 36
    upload_retry_seconds: int = 180
    upload_only_complete: bool = False

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> ServerOptions:
        """Parse vLLM's `kv_connector_extra_config`. Raises OptionError."""
        if not isinstance(extra, Mapping):
            raise refuse("kv_connector_extra_config", extra, "is not valid; give a JSON object")
        for name in sorted(_OF_VLLM.keys() & extra.keys()):
            raise OptionError(
                f"kv_connector_extra_config: option {name!r} is one of vLLM's ExampleHiddenStatesConnector: "
                f"{_OF_VLLM[name]} docs/FROM_VLLM.md compares the options of both"
            )
        check_names("kv_connector_extra_config", extra, [f.name for f in fields(cls)])
        chunk = integer("chunk_tokens", extra.get("chunk_tokens", cls.chunk_tokens), 1, 1 << 16)
        segment = integer("segment_tokens", extra.get("segment_tokens", max(cls.segment_tokens, chunk)), 1, 1 << 20)
        if segment % chunk:
            raise refuse("segment_tokens", segment, f"must be a multiple of chunk_tokens ({chunk})")
        custom = boolean("allow_custom_save_path", extra.get("allow_custom_save_path", cls.allow_custom_save_path))
        roots = _roots(extra.get("save_path_roots", []))
        if custom and not roots:
            raise refuse("allow_custom_save_path", custom, "needs save_path_roots; give the directories allowed")
        sink = one_of("sink", extra.get("sink", cls.sink), SINKS)
        upload = _upload(extra.get("upload", cls.upload))
        if upload and sink != "disk":
            raise refuse("upload", upload, f"needs stores to upload, and sink {sink!r} writes none; give sink 'disk'")
        remove_local = boolean("upload_remove_local", extra.get("upload_remove_local", False))
        if remove_local and not upload:
            raise refuse(
                "upload_remove_local",
                True,
                "needs an upload, and there is none; give upload, as in s3://bucket/captures",
            )
        owner = _owner(extra.get("owner", cls.owner))
        pool_bytes = integer("pool_bytes", extra.get("pool_bytes", 0), 0, _MOST_BYTES)
        if pool_bytes and owner != POOL:
            raise refuse("pool_bytes", pool_bytes, f"is the size of a pool, and there is none; give owner {POOL!r}")
        probes = _probes(extra.get("probes", {}))
        numbers = ("max_request_bytes", "max_total_bytes", "min_free_bytes", "retain_seconds", "retain_bytes")
        return cls(
            store_dir=_path("store_dir", extra.get("store_dir")),
            hooks=hook_items("hooks", extra.get("hooks", list(cls.hooks))),
            owner=owner,
            pool_bytes=pool_bytes,
            codec=one_of("codec", extra.get("codec", cls.codec), tuple(CODECS)),
            always_compress=boolean("always_compress", extra.get("always_compress", cls.always_compress)),
            chunk_tokens=chunk,
            segment_tokens=segment,
            writers=integer("writers", extra.get("writers", cls.writers), 0, 256),
            host_buffer_bytes=integer("host_buffer_bytes", extra.get("host_buffer_bytes", 0), 0, _MOST_BYTES),
            staging_bytes=integer("staging_bytes", extra.get("staging_bytes", 0), 0, _MOST_BYTES),
            policy=one_of("policy", extra.get("policy", cls.policy), POLICIES),
            sink=sink,
            fsync=boolean("fsync", extra.get("fsync", cls.fsync)),
            file_mode=one_of("file_mode", extra.get("file_mode", cls.file_mode), FILE_MODES),
            allow_custom_save_path=custom,
            save_path_roots=roots,
            shutdown_seconds=integer("shutdown_seconds", extra.get("shutdown_seconds", cls.shutdown_seconds), 1, 86400),
            reduce=_reduce(extra.get("reduce", {})),
            probes=probes,
            probe_alerts=_alerts(extra.get("probe_alerts", {}), probes),
            check=one_of("check", extra.get("check", cls.check), CHECKS),
            cuda_graphs=one_of("cuda_graphs", extra.get("cuda_graphs", cls.cuda_graphs), CUDA_GRAPHS),
            upload=upload,
            upload_remove_local=remove_local,
            upload_backlog_bytes=integer(
                "upload_backlog_bytes", extra.get("upload_backlog_bytes", cls.upload_backlog_bytes), 1, _MOST_TOTAL
            ),
            upload_retry_seconds=integer(
                "upload_retry_seconds", extra.get("upload_retry_seconds", cls.upload_retry_seconds), 0, 86400
            ),
            upload_only_complete=boolean("upload_only_complete", extra.get("upload_only_complete", False)),
            **{name: integer(name, extra.get(name, 0), 0, _MOST_TOTAL) for name in numbers},
        )
