# SPDX-License-Identifier: Apache-2.0
"""Implements the filters of `open_captures`, and explains why no store passes them."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, SupportsIndex

from dmi_connector.captures.lens_names import ALL_NAMES, split_name, why_not_equal
from dmi_connector.captures.names import holds
from dmi_connector.captures.one_model import is_named
from dmi_connector.hooks import HOOKS
from dmi_connector.option_values import whole_number
from dmi_connector.store.format.remote_path import Place, RemotePath, is_gone
from dmi_connector.store.read.files.thread_pool import in_fetch_threads, in_threads
from dmi_connector.store.read.hook_names import HookTable
from dmi_connector.store.read.index import CaptureInfo, check_text
from dmi_connector.store.read.metadata import NotACapture, read_attrs
from dmi_connector.wording import suggest

Time = str | datetime.date
Where = Callable[[CaptureInfo], bool]


def whole(info: CaptureInfo) -> CaptureInfo:
    """Fill in the fields that index lines of older formats lack, from the store."""
    if info.prompt_len is not None and info.model is not None:
        return info
    attrs = read_attrs(info.store)
    return replace(info, prompt_len=attrs["prompt_len"], model=attrs.get("model"))


def holding(infos: Sequence[CaptureInfo], hooks: str | Collection[str]) -> list[CaptureInfo]:
    """The stores that have all of these hooks, except removed ones. Raises KeyError for a name that no store has."""
    wanted = [hooks] if isinstance(hooks, str) else list(hooks)
    held: dict[int, set[str]] = {}
    layers: dict[str, set[int]] = {}
    reasons: dict[str, str] = {}

    def look(number: int) -> None:
        try:
            attrs = read_attrs(infos[number].store)
        except NotACapture:
            if not is_gone(infos[number].store):
                raise
            return
        held[number] = {name for name in wanted if holds(name, attrs)}
        for name in wanted:
            if why := _other_tensor(name, attrs):
                reasons.setdefault(name, why)
        table = HookTable.of(attrs)
        for name in table.names:
            layers.setdefault(name, set()).update(table.layers(name))

    remote = any(isinstance(info.store, RemotePath) for info in infos)
    (in_fetch_threads if remote else in_threads)(look, range(len(infos)))
    for name in wanted:
        if infos and not any(name in names for names in held.values()):
            raise KeyError(f"{name!r} is in none of {len(infos)} stores{reasons.get(name) or _lacking(name, layers)}")
    return [info for number, info in enumerate(infos) if held.get(number) == {*wanted}]


def _other_tensor(name: str, attrs: Mapping[str, Any]) -> str:
    why = why_not_equal(split_name(name)[0], attrs)
    return "" if why is None else f": {why}"


def _lacking(name: str, layers: Mapping[str, Collection[int]]) -> str:
    """The end of the error message for a name that no store has. layers: {hook: its layers in any of the stores}."""
    hook = ALL_NAMES.get(split_name(name)[0], name.partition("@")[0])
    if layers.get(hook):
        return f": {hook} has the layers {sorted(layers[hook])} there"
    return f"{suggest(hook, [*layers, *HOOKS]) or ';'} they hold: {', '.join(layers)}"


def why_none(place: Place, found: Sequence[CaptureInfo], given: Mapping[str, Any], incomplete: bool) -> str:
    """Why no finished store passes the filters. found: all finished stores. given: the filters."""
    if not found:
        return f"{place} holds no finished store"
    asked = ", ".join(name if callable(value) else f"{name}={value!r}" for name, value in given.items())
    if not incomplete and all(info.state == "incomplete" for info in found):
        return f"all {len(found)} stores of {place} lack rows; incomplete=True takes them too"
    keys = [key] if isinstance(key := given.get("key", ()), str) else list(key)
    known = {info.key for info in found if info.key}
    if not incomplete and any(info.state == "incomplete" and info.key in keys for info in found):
        return f"stores of {place} with {asked} lack rows; incomplete=True takes them too"
    near = next(filter(None, (suggest(key, known) for key in keys if key not in known)), "")
    if not near and "model" in given:
        names = [model for info in found if (model := whole(info).model) is not None]
        if not any(is_named(name, given["model"]) for name in names):  # else another filter leaves its stores out
            near = suggest(given["model"], [*names, *(PurePath(name).name for name in names)])
    return f"none of {len(found)} stores of {place} passes {asked or 'the filters'}{near}"


def keys_of(key: str | Collection[str] | None) -> set[str] | None:
    """The keys that the filter `key` accepts; None: all. Raises ValueError unless it is a key or several keys."""
    if not isinstance(key, Collection) or isinstance(key, str | bytes):
        check_text("key", key)
        return None if key is None else {key}
    for one in key:
        check_text("key", one)
    return {*key}


def lengths(prompt_len: range | SupportsIndex) -> range:
    """The lengths that the filter `prompt_len` accepts. Raises ValueError unless it is an integer or a range."""
    if isinstance(prompt_len, range):
        return prompt_len
    length = whole_number(prompt_len)
    if length is None:
        raise ValueError(f"prompt_len {prompt_len!r} is not valid; give a number of tokens, or a range")
    return range(length, length + 1)


def parse_time(name: str, value: Time | None) -> datetime.datetime | None:
    """Parse a time; None gives None. A time without a time zone is in UTC. name: name of the filter, for errors.

    Raises ValueError.
    """
    try:
        at = None if value is None else datetime.datetime.fromisoformat(str(value))
    except ValueError as error:
        raise ValueError(f"{name} {value!r} is not a time; write it as in 2026-01-31 or 2026-01-31T12:00") from error
    return at.replace(tzinfo=datetime.UTC) if at is not None and at.tzinfo is None else at


def between(started: str, begin: datetime.datetime | None, end: datetime.datetime | None) -> bool:
    """Whether a capture began in [begin, end). With a limit, False if the index has no valid start time."""
    if begin is None and end is None:
        return True
    try:
        at = parse_time("started", started)
    except ValueError:
        return False
    return at is not None and (begin is None or begin <= at) and (end is None or at < end)
