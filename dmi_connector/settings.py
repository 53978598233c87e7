# SPDX-License-Identifier: Apache-2.0
"""Server options (`kv_connector_extra_config`) and request options (`kv_transfer_params`), parsed and validated.

Every refusal is an `OptionError` whose message names the option, the value and the fix.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from itertools import islice
from typing import Any

from dmi_connector.reduce import ReduceError, parse
from dmi_connector.urls import parse_url
from dmi_connector.wording import show, suggest

CODECS = ("none", "lz4", "zstd")
POLICIES = ("block", "drop")
SINKS = ("disk", "host", "null")
CHECKS = ("none", "poison")
CUDA_GRAPHS = ("auto", "vllm")
FILE_MODES = ("private", "group", "world")
_MOST_BYTES, _MOST_TOTAL, _MOST_TOKENS = 1 << 44, 1 << 60, 1 << 40
"""Upper bounds of options: bytes of a buffer; bytes and seconds of limits; token positions."""
_LONGEST_PATH, _LONGEST_NAME = 1024, 255
"""Characters of a path and bytes of one of its names, as file systems take them."""
_SUGGEST_FROM = 100
"""Characters of a given name that are compared with known names."""
MOST_SPANS = 4096
"""Spans of `dmi.loss_spans`, at most."""
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class OptionError(ValueError):
    """A bad option. The message names the option, the value and the fix."""


def _refuse(option: str, value: object, fix: str) -> OptionError:
    return OptionError(f"{option}: {show(value)} {fix}")


def _check_names(where: str, given: Mapping[Any, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            near = suggest(name[:_SUGGEST_FROM], known) if isinstance(name, str) else ""
            raise OptionError(f"{where}: option {show(name)} is unknown{near or ';'} known options: {', '.join(known)}")


def _integer(option: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refuse(option, value, f"is not valid; give a whole number from {low} to {high}")
    return value


def _boolean(option: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse(option, value, "is not valid; give true or false")
    return value


def _one_of(option: str, value: object, choices: tuple[str, ...]) -> str:
    if value not in choices:
        near = suggest(value[:_SUGGEST_FROM], choices) if isinstance(value, str) else ""
        raise _refuse(option, value, f"is unknown{near or ';'} choose one of {', '.join(choices)}")
    return str(value)


def _hook_items(option: str, value: object) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not items or not all(isinstance(i, str) for i in items):
        raise _refuse(option, value, "is not valid; give hook names as a comma-separated string or a list of strings")
    return tuple(i.strip() for i in items)


def _path(option: str, value: object) -> str:
    if isinstance(value, str) and value and "\0" not in value:
        with contextlib.suppress(UnicodeEncodeError):
            os.fsencode(value)
            return os.path.abspath(value)
    raise _refuse(option, value, "is not valid; give the directory where stores are written")


def _is_directory_name(value: object) -> bool:
    """Whether it is an absolute path without "." and ".." that a file system can hold."""
    if not isinstance(value, str) or not value.startswith("/") or len(value) > _LONGEST_PATH or not value.isprintable():
        return False
    parts = value.split("/")
    return not {".", ".."} & set(parts) and all(len(part.encode()) <= _LONGEST_NAME for part in parts)


def _roots(value: object) -> tuple[str, ...]:
    items = [i.strip() for i in value.split(",")] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(_is_directory_name(i) for i in items):
        raise _refuse(
            "save_path_roots", value, "is not valid; give absolute directories, without '.' and '..', as a list"
        )
    return tuple(os.path.normpath(i) for i in items)


def _upload(value: object) -> str:
    """The URL without a slash at its end, "" for none."""
    if value == "":
        return ""
    try:
        bucket, prefix = parse_url("upload", value)
    except ValueError as error:
        raise OptionError(str(error)) from error
    return f"s3://{bucket}/{prefix}".rstrip("/")


def _reduce(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping) or not all(isinstance(x, str) for item in value.items() for x in item):
        raise _refuse("reduce", value, 'is not valid; give {patterns: reduction}, as in {"resid_*": "rp(512)"}')
    for spec in value.values():
        try:
            parse(spec)
        except ReduceError as error:
            raise OptionError(str(error)) from error
    return tuple(value.items())


@dataclass(frozen=True)
class ServerOptions:
    """What one server captures and how it stores it.

    hooks: the selection (see `hooks.parse_selection`). store_dir: directory of the stores, created when missing.
    codec: "zstd", "lz4" or "none". always_compress: writers that fall behind compress nevertheless. chunk_tokens: token
    rows of one compressed chunk. segment_tokens: rows of one shard
    file, a multiple of chunk_tokens. writers: writer processes, 0 for a choice by the machine's cores.
    host_buffer_bytes: shared (on a GPU: pinned) memory between the engine and the writers. staging_bytes: GPU memory
    where chunks are gathered before they are copied out. policy: what happens when writing falls behind, "block" (the
    engine waits, nothing is lost) or "drop" (the engine never waits, stores record the missing ranges).
    sink: "disk" writes stores; "host" (copy to host memory, then discard) and "null" (leave rows on the GPU) are for
    benchmarks. fsync: flush every store to the device before it gets its final name.
    file_mode: who may read stores, "private" (their owner), "group" or "world". allow_custom_save_path: requests may
    name a directory beneath save_path_roots. Limits, 0 for none: max_request_bytes of the raw rows of a request,
    max_total_bytes of all stores, min_free_bytes of the file system. Stores are removed, oldest first, that are older
    than retain_seconds, and while finished ones take more than retain_bytes; 0 keeps all.
    shutdown_seconds: how long finishing what is under way may take when the engine ends.
    reduce: {hook patterns: reduction}, the first that matches a hook counts (docs/REDUCTIONS.md).
    check: "poison" fills rows with a pattern before each forward and lists rows as missing in which some of it is left.
    Slow, for tests of new models and engine features.
    upload: s3://bucket/prefix where finished stores are uploaded to, "" for none. upload_remove_local: remove the local
    copy of a store that was uploaded. upload_backlog_bytes: finished stores that wait for their upload take no more;
    beyond that `policy` says what happens: the engine waits, or a store stays here for a repair. upload_retry_seconds:
    how long a store whose upload fails is tried again. upload_only_complete: stores that lack rows, and those of
    requests that were aborted, are not uploaded.
    cuda_graphs: "auto" takes vLLM's mode FULL in place of its default where that is right, "vllm" leaves it.
    """

    store_dir: str
    hooks: tuple[str, ...] = ("hidden-states",)
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
    check: str = "none"
    cuda_graphs: str = "auto"
    upload: str = ""
    upload_remove_local: bool = False
    upload_backlog_bytes: int = 1 << 36
    upload_retry_seconds: int = 180
    upload_only_complete: bool = False

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> ServerOptions:
        """Build from `kv_connector_extra_config`. Raises OptionError."""
        if not isinstance(extra, Mapping):
            raise _refuse("kv_connector_extra_config", extra, "is not valid; give a JSON object")
        _check_names("kv_connector_extra_config", extra, [f.name for f in fields(cls)])
        chunk = _integer("chunk_tokens", extra.get("chunk_tokens", cls.chunk_tokens), 1, 1 << 16)
        segment = _integer("segment_tokens", extra.get("segment_tokens", max(cls.segment_tokens, chunk)), 1, 1 << 20)
        if segment % chunk:
            raise _refuse("segment_tokens", segment, f"must be a multiple of chunk_tokens ({chunk})")
        custom = _boolean("allow_custom_save_path", extra.get("allow_custom_save_path", cls.allow_custom_save_path))
        roots = _roots(extra.get("save_path_roots", []))
        if custom and not roots:
            raise _refuse("allow_custom_save_path", custom, "needs save_path_roots; give the directories allowed")
        sink = _one_of("sink", extra.get("sink", cls.sink), SINKS)
        upload = _upload(extra.get("upload", cls.upload))
        if upload and sink != "disk":
            raise _refuse("upload", upload, f"needs stores to upload, and sink {sink!r} writes none; give sink 'disk'")
        remove_local = _boolean("upload_remove_local", extra.get("upload_remove_local", False))
        if remove_local and not upload:
            raise _refuse(
                "upload_remove_local",
                True,
                "needs an upload, and there is none; give upload, as in s3://bucket/captures",
            )
        numbers = ("max_request_bytes", "max_total_bytes", "min_free_bytes", "retain_seconds", "retain_bytes")
        return cls(
            store_dir=_path("store_dir", extra.get("store_dir")),
            hooks=_hook_items("hooks", extra.get("hooks", list(cls.hooks))),
            codec=_one_of("codec", extra.get("codec", cls.codec), CODECS),
            always_compress=_boolean("always_compress", extra.get("always_compress", cls.always_compress)),
            chunk_tokens=chunk,
            segment_tokens=segment,
            writers=_integer("writers", extra.get("writers", cls.writers), 0, 256),
            host_buffer_bytes=_integer("host_buffer_bytes", extra.get("host_buffer_bytes", 0), 0, _MOST_BYTES),
            staging_bytes=_integer("staging_bytes", extra.get("staging_bytes", 0), 0, _MOST_BYTES),
            policy=_one_of("policy", extra.get("policy", cls.policy), POLICIES),
            sink=sink,
            fsync=_boolean("fsync", extra.get("fsync", cls.fsync)),
            file_mode=_one_of("file_mode", extra.get("file_mode", cls.file_mode), FILE_MODES),
            allow_custom_save_path=custom,
            save_path_roots=roots,
            shutdown_seconds=_integer(
                "shutdown_seconds", extra.get("shutdown_seconds", cls.shutdown_seconds), 1, 86400
            ),
            reduce=_reduce(extra.get("reduce", {})),
            check=_one_of("check", extra.get("check", cls.check), CHECKS),
            cuda_graphs=_one_of("cuda_graphs", extra.get("cuda_graphs", cls.cuda_graphs), CUDA_GRAPHS),
            upload=upload,
            upload_remove_local=remove_local,
            upload_backlog_bytes=_integer(
                "upload_backlog_bytes", extra.get("upload_backlog_bytes", cls.upload_backlog_bytes), 1, _MOST_TOTAL
            ),
            upload_retry_seconds=_integer(
                "upload_retry_seconds", extra.get("upload_retry_seconds", cls.upload_retry_seconds), 0, 86400
            ),
            upload_only_complete=_boolean("upload_only_complete", extra.get("upload_only_complete", False)),
            **{name: _integer(name, extra.get(name, 0), 0, _MOST_TOTAL) for name in numbers},
        )


_INCLUDE = "include_output_tokens"
_NEAR, _NEAR_LENGTH = 0.85, 3
"""How alike (0 to 1) a misspelt name is, and by how many characters longer or shorter."""
_DMI_LIKE = re.compile(r"\s*dmi\s*(?:[._-]\s*(.*))?", re.IGNORECASE | re.DOTALL)
"""Names that are meant for us. The group is what stands behind a prefix."""
_ANSWERED = ("dmi_store", "dmi_request_id", "dmi_url", "dmi_key", "dmi_reason", "dmi_missing", "dmi_error")
"""Names in responses. Proxies hand these on with a request to the next server."""
_LOOKED_AT = 32
"""Names that are compared with it at most: that takes the engine's time, and a client may send any number."""


def _meant(name: str, params: Mapping[Any, Any], known: Sequence[str]) -> str:
    """How a name beside `dmi` that is meant for us is written; "" for other names, and for those of a response."""
    like = _DMI_LIKE.fullmatch(name[:_SUGGEST_FROM])
    answered = name in _ANSWERED and (name != "dmi_key" or "dmi_request_id" in params)
    if name == "dmi" or answered or not (like or _is_slip(name, "dmi")):
        return ""
    option = like[1] if like else None
    if option == _INCLUDE:
        return f'{{"{_INCLUDE}": ...}}'
    return f'{{"dmi": {{"{option}": ...}}}}' if option in known else f'{{"dmi": ...}}, with any of {", ".join(known)}'


def _is_slip(name: str, word: str) -> bool:
    """Whether a name is `word` but for one letter that is missing, wrong or too much, or two that are swapped."""
    name = name[:_SUGGEST_FROM].lower()
    if len(name) == len(word):
        wrong = [i for i, (a, b) in enumerate(zip(name, word, strict=True)) if a != b]
        swapped = len(wrong) == 2 and wrong[1] == wrong[0] + 1 and sorted(name) == sorted(word)
        return len(wrong) == 1 or swapped
    shorter, longer = sorted((name, word), key=len)
    return len(longer) - len(shorter) == 1 and any(longer[:i] + longer[i + 1 :] == shorter for i in range(len(longer)))


@dataclass(frozen=True)
class CaptureParams:
    """What one request asks for, under `kv_transfer_params`.

    include_output_tokens: rows of generated tokens too (False: prompt rows only, as in vLLM). key: the client's own
    name for the store. hooks, layers: narrow the server's selection. tokens: positions [start, stop) to keep, stop
    None for all. enabled: False skips the capture. save_path: the directory to write to, if the server allows it.
    loss_spans: [start, stop) positions of the prompt that a trainer learns from; kept for `dmi export`.
    """

    include_output_tokens: bool = False
    key: str | None = None
    hooks: tuple[str, ...] | None = None
    layers: tuple[int, ...] | None = None
    start: int = 0
    stop: int | None = None
    enabled: bool = True
    save_path: str | None = None
    loss_spans: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def parse(cls, params: object) -> CaptureParams:
        """Build from a request's `kv_transfer_params` (None: defaults). Raises OptionError."""
        if params is None:
            return cls()
        if not isinstance(params, Mapping):
            raise _refuse("kv_transfer_params", params, "is not valid; give a JSON object")
        known = ("key", "hooks", "layers", "tokens", "enabled", "save_path", "loss_spans")
        cls._check_places(params, known)
        include = _boolean(_INCLUDE, params.get(_INCLUDE, False))
        options = params.get("dmi")
        if options is None:
            return cls(include_output_tokens=include)
        if not isinstance(options, Mapping):
            raise _refuse("dmi", options, f"is not valid; give a JSON object with any of {', '.join(known)}")
        if _INCLUDE in options:
            raise _refuse(f"dmi.{_INCLUDE}", options[_INCLUDE], "is in the wrong place; write it beside dmi, not in it")
        _check_names("dmi", options, known)
        key = options.get("key")
        if key is not None and (not isinstance(key, str) or _KEY.fullmatch(key) is None):
            raise _refuse(
                "dmi.key",
                key,
                "is not valid; use 1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit",
            )
        save_path = options.get("save_path")
        if save_path is not None and not _is_directory_name(save_path):
            raise _refuse("dmi.save_path", save_path, "is not valid; give an absolute directory, without '.' and '..'")
        hooks = options.get("hooks")
        start, stop = cls._tokens(options.get("tokens"))
        return cls(
            include_output_tokens=include,
            key=key,
            hooks=None if hooks is None else _hook_items("dmi.hooks", hooks),
            layers=cls._layers(options.get("layers")),
            start=start,
            stop=stop,
            enabled=_boolean("dmi.enabled", options.get("enabled", True)),
            save_path=None if save_path is None else os.path.normpath(save_path),
            loss_spans=cls._loss_spans(options.get("loss_spans")),
        )

    def check_prompt(self, prompt_len: int) -> None:
        """Raise OptionError for spans that reach beyond a prompt of so many tokens."""
        if self.loss_spans and self.loss_spans[-1][1] > prompt_len:
            raise _refuse(
                "dmi.loss_spans",
                list(self.loss_spans[-1]),
                f"reaches beyond the {prompt_len} tokens of the prompt; give the spans of this prompt's own tokens",
            )

    @staticmethod
    def _check_places(params: Mapping[Any, Any], known: Sequence[str]) -> None:
        """Raise OptionError for our options beside `dmi`, and near misses. Other names are for other connectors."""
        for name in known:
            if name in params:
                fix = f'write it in dmi, as in {{"dmi": {{"{name}": ...}}}}'
                raise _refuse(name, params[name], f"is in the wrong place; {fix}")
        for name in islice(params, _LOOKED_AT):
            if isinstance(name, str) and (fix := _meant(name, params, known)):
                raise _refuse("kv_transfer_params", name, f"is unknown; write {fix}")
            near = isinstance(name, str) and abs(len(name) - len(_INCLUDE)) <= _NEAR_LENGTH
            if near and name != _INCLUDE and get_close_matches(name, [_INCLUDE], cutoff=_NEAR):
                raise _refuse("kv_transfer_params", name, f"is unknown; did you mean {_INCLUDE!r}?")

    @staticmethod
    def _layers(value: object) -> tuple[int, ...] | None:
        if value is None:
            return None
        if (
            not isinstance(value, list | tuple)
            or not value
            or not all(isinstance(x, int) and not isinstance(x, bool) for x in value)
        ):
            raise _refuse("dmi.layers", value, "is not valid; give a list of layer numbers, as in [0, 5, -1]")
        return tuple(value)

    @staticmethod
    def _tokens(value: object) -> tuple[int, int | None]:
        if value is None:
            return 0, None
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise _refuse("dmi.tokens", value, "is not valid; give [start, stop], as in [0, 128] or [64, null]")
        start = _integer("dmi.tokens start", value[0], 0, _MOST_TOKENS)
        if value[1] is None:
            return start, None
        stop = _integer("dmi.tokens stop", value[1], 0, _MOST_TOKENS)
        if stop <= start:
            raise _refuse("dmi.tokens", list(value), "is empty; stop must be larger than start")
        return start, stop

    @staticmethod
    def _loss_spans(value: object) -> tuple[tuple[int, int], ...] | None:
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) > MOST_SPANS:
            raise _refuse(
                "dmi.loss_spans",
                value,
                f"is not valid; give a list of at most {MOST_SPANS} [start, stop], as in [[12, 80], [95, 130]]",
            )
        end = 0
        for span in value:
            pair = isinstance(span, list | tuple) and len(span) == 2 and all(type(x) is int for x in span)
            if not pair or not end <= span[0] < span[1] <= _MOST_TOKENS:
                raise _refuse(
                    "dmi.loss_spans",
                    span,
                    "is not valid; give [start, stop] with start below stop, each behind the one before",
                )
            end = span[1]
        return tuple((start, stop) for start, stop in value)
