# SPDX-License-Identifier: Apache-2.0
"""`open_captures` finds the stores of a directory, `Captures` goes through them one at a time."""

from __future__ import annotations

import datetime
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

from dmi_connector.store.format.remote_path import Given, RemotePath, place_of
from dmi_connector.store.read.capture import Capture, open_capture
from dmi_connector.store.read.hook_names import holds, hook_and_layer
from dmi_connector.store.read.index import (
    FINISHED,
    CaptureInfo,
    find_captures,
    indexed_captures,
    info_of,
    is_store,
    same_request,
)
from dmi_connector.store.read.metadata import read_attrs
from dmi_connector.store.read.one_model import OneModel, is_named
from dmi_connector.store.read.own_values import check_own_values
from dmi_connector.store.read.remote_index import list_prefix
from dmi_connector.store.read.row_view import RowView, check_some
from dmi_connector.store.read.thread_pool import in_fetch_threads, in_threads

if TYPE_CHECKING:
    import pandas
    import polars

Time = str | datetime.date
Where = Callable[[CaptureInfo], bool]


def open_captures(
    directory: Given,
    key: str | Collection[str] | None = None,
    where: Where | None = None,
    *,
    request_id: str | None = None,
    model: str | None = None,
    after: Time | None = None,
    before: Time | None = None,
    prompt_len: range | SupportsIndex | None = None,
    incomplete: bool = False,
    hooks: str | Collection[str] | None = None,
) -> Captures:
    """The finished stores of a directory, by start time. Opens none of them: the directory's index is read.

    directory: a path, or a URL such as s3://bucket/prefix. There, stores that no index names are opened once; a store
    whose upload has not ended is left out.

    A filter that is None lets everything pass.

    key: one key, or several. request_id: as in `find_captures`. model: the model's name, or the last part of its path.
    after, before: when the request began, as ISO 8601, a datetime or a date; without a zone it is UTC. `after` itself
    counts, `before` does not. prompt_len: tokens of the prompt, a number or a range. incomplete: also stores that lack
    rows. where: called with each `CaptureInfo` that these filters let pass. hooks: what a store must have captured, as
    in `Captures.filter`; it is looked for last, since the index does not have it.

    Stores of a directory without an index are found by their names (*.zarr), and each is opened once. Raises ValueError
    for a time or a prompt_len that is none, for a directory that is not there, for a store in its place, and where one
    of these stores cannot be read.
    """
    place = place_of(directory)
    if isinstance(place, RemotePath):
        found = _remote(place)
    else:
        one = key if isinstance(key, str) else None
        found = find_captures(place, one, request_id)
    keys = {key} if isinstance(key, str) else key
    lengths = None if prompt_len is None else _lengths(prompt_len)
    begin, end = _time("after", after), _time("before", before)
    states = FINISHED if incomplete else FINISHED[:1]

    def wanted(info: CaptureInfo) -> bool:
        named = request_id is None or same_request(request_id, info.request_id)
        kept = info.state in states and (keys is None or info.key in keys)
        return kept and named and _between(info.started, begin, end)

    kept = [info for info in found if wanted(info) and is_there(info)]
    if model is not None or lengths is not None or where is not None:
        kept = [_whole(info) for info in kept]
    if model is not None:
        kept = [info for info in kept if is_named(info.model, model)]
    if lengths is not None:
        kept = [info for info in kept if info.prompt_len in lengths]
    directories = (place,) if isinstance(place, Path) else ()
    return Captures(tuple(info for info in kept if where is None or where(info)), model, directories).filter(
        hooks=hooks
    )


def of_one_model(captures: Capture | Iterable[Capture]) -> Iterator[Capture]:
    """Each of the captures. Raises ValueError for one of another model than those before, as `check_one_model` does."""
    one = OneModel(captures.model if isinstance(captures, Captures) else None)
    for capture in captures if isinstance(captures, Iterable) else [captures]:
        one.check(capture.path, capture.attrs.get("model"))
        yield capture


def named_rows(captures: Captures, name: str, skip: int = 0) -> RowView:
    """The rows of a hook by a name as in `Captures.filter`, as `Captures.rows` gives them.

    Raises as that does. Raises KeyError for a name of TransformerLens that means another tensor in the first store's
    model, ValueError for one whose hook was stored as other values.
    """
    check_some(captures.infos, name)
    with captures[0] as first:
        hook, layer = hook_and_layer(name, first.attrs)
        view = captures.rows(hook, layer, skip)
        if hook != name.partition("@")[0]:
            check_own_values(first, hook, layer)  # the view refuses stores that were reduced in another way
    return view


def is_there(info: CaptureInfo) -> bool:
    """Whether a finished store can be read: on this machine, or where it was uploaded to."""
    return isinstance(info.store, RemotePath) or info.store.is_dir()


def captures_of(
    paths: Iterable[Given],
    key: str | Collection[str] | None = None,
    model: str | None = None,
    incomplete: bool = False,
) -> Captures:
    """The captures of stores (`NAME.zarr`, `NAME.zip`), in their order, and of directories, by start time.

    paths: paths and URLs.

    key, model: as in `open_captures`. Raises CaptureIncomplete for a store that lacks rows; such stores of a directory
    are left out, unless `incomplete` is true. Raises ValueError for what is neither a store nor a directory.
    """
    keys = {key} if isinstance(key, str) else key
    infos: list[CaptureInfo] = []
    directories: tuple[Path, ...] = ()
    for path in map(place_of, paths):
        if is_store(path):
            open_capture(path, timeout=0).close()
            infos += [info for info in [info_of(path)] if keys is None or info.key in keys]
        else:
            found = open_captures(path, key, incomplete=incomplete)
            infos += found.infos
            directories += found.directories
    kept = infos if model is None else [info for info in map(_whole, infos) if is_named(info.model, model)]
    return Captures(tuple(kept), model, directories)


def _remote(place: RemotePath) -> list[CaptureInfo]:
    """Captures below a prefix. Raises ValueError where nothing is."""
    listed = list_prefix(place)
    if not (listed.stores or listed.zips or listed.indexed):
        raise ValueError(f"{place} holds no store and no index; give the prefix of stores, as in s3://bucket/captures")
    known = {info.store.name: info for info in (indexed_captures(place) if listed.indexed else ())}
    found = [known[name] for name in listed.stores if name in known]
    unknown = [place / name for name in sorted((listed.stores - known.keys()) | listed.zips)]
    opened: list[CaptureInfo] = []

    def look(store: RemotePath) -> None:
        if (info := _uploaded(store)) is not None:
            opened.append(info)

    in_fetch_threads(look, unknown)
    return sorted([*found, *opened], key=lambda info: (info.started, info.store.name))


def _uploaded(store: RemotePath) -> CaptureInfo | None:
    """What a store says of itself; None while its root document, which comes last, is not there."""
    try:
        return info_of(store)
    except ValueError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def _whole(info: CaptureInfo) -> CaptureInfo:
    """With what the index of older stores lacks."""
    if info.prompt_len is not None and info.model is not None:
        return info
    attrs = read_attrs(info.store)
    return replace(info, prompt_len=attrs["prompt_len"], model=attrs.get("model"))


def _holding(infos: Sequence[CaptureInfo], hooks: str | Collection[str]) -> list[CaptureInfo]:
    """Those that captured all of these hooks."""
    wanted = [hooks] if isinstance(hooks, str) else hooks
    holding: set[int] = set()

    def look(number: int) -> None:
        attrs = read_attrs(infos[number].store)
        if all(holds(name, attrs) for name in wanted):
            holding.add(number)

    remote = any(isinstance(info.store, RemotePath) for info in infos)
    (in_fetch_threads if remote else in_threads)(look, range(len(infos)))
    return [infos[number] for number in sorted(holding)]


def _lengths(prompt_len: range | SupportsIndex) -> range:
    if isinstance(prompt_len, range):
        return prompt_len
    try:
        length = operator.index(prompt_len)
    except TypeError as error:
        raise ValueError(f"prompt_len {prompt_len!r} is not valid; give a number of tokens, or a range") from error
    return range(length, length + 1)


def _time(name: str, value: Time | None) -> datetime.datetime | None:
    try:
        at = None if value is None else datetime.datetime.fromisoformat(str(value))
    except ValueError as error:
        raise ValueError(f"{name} {value!r} is no time; write it as in 2026-01-31 or 2026-01-31T12:00") from error
    return at.replace(tzinfo=datetime.UTC) if at is not None and at.tzinfo is None else at


def _between(started: str, begin: datetime.datetime | None, end: datetime.datetime | None) -> bool:
    if begin is None and end is None:
        return True
    try:
        at = _time("started", started)
    except ValueError:  # an index line without a time
        return False
    return at is not None and (begin is None or begin <= at) and (end is None or at < end)


@dataclass(frozen=True)
class Captures:
    """Finished stores, none of them open. Made by `open_captures`.

    `captures[3]` opens one, `captures[:100]` gives fewer. A loop opens one store at a time, and closes it when it asks
    for the next. So memory does not grow with the stores, but for one `CaptureInfo` each.

    model: the name by which all were chosen. None: they may be of several models. directories: of this machine, in
    which they were looked for.
    """

    infos: tuple[CaptureInfo, ...]
    model: str | None = None
    directories: tuple[Path, ...] = ()

    def __len__(self) -> int:
        return len(self.infos)

    @overload
    def __getitem__(self, number: int) -> Capture: ...
    @overload
    def __getitem__(self, number: slice) -> Captures: ...
    def __getitem__(self, number: int | slice) -> Capture | Captures:
        if isinstance(number, slice):
            return replace(self, infos=self.infos[number])
        return open_capture(self.infos[number].store, timeout=0, allow_incomplete=True)

    def __iter__(self) -> Iterator[Capture]:
        for number in range(len(self)):
            with self[number] as capture:
                yield capture

    def __repr__(self) -> str:
        tokens = sum(info.num_tokens or 0 for info in self.infos)
        return f"Captures({len(self)} stores, {tokens} tokens)"

    def filter(self, where: Where | None = None, *, hooks: str | Collection[str] | None = None) -> Captures:
        """Those whose `CaptureInfo` `where` accepts, and that captured all of `hooks`. None lets everything pass.

        hooks: one name or several, such as "resid_pre@3" (hook@layer), "q" (any layer of it) or "blocks.3.attn.hook_z".
        A name of TransformerLens that means another tensor in a store's model leaves that store out. The root document
        of each store that `where` accepts is read once. Raises ValueError where one cannot be read, and for a bad
        layer, KeyError for a name of TransformerLens that no hook equals.
        """
        kept = [info for info in map(_whole, self.infos) if where(info)] if where is not None else self.infos
        return replace(self, infos=tuple(kept if hooks is None else _holding(kept, hooks)))

    def check_one_model(self) -> None:
        """Raise ValueError where the stores are of several models. Those that were chosen by `model` count as one's."""
        one = OneModel(self.model)
        for info in map(_whole, self.infos) if self.model is None else ():
            one.check(info.store, info.model)

    def progress(self, description: str | None = None) -> Iterator[Capture]:
        """Go through the stores as a loop does, with a progress bar (tqdm) on standard error.

        Raises ImportError without tqdm (`dmi_connector[progress]`).
        """
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError("progress: tqdm is not installed; install dmi_connector[progress]") from error
        yield from tqdm(self, desc=description, total=len(self), unit="store")

    @overload
    def table(self, to: Literal["pandas"] = "pandas") -> pandas.DataFrame: ...
    @overload
    def table(self, to: Literal["polars"]) -> polars.DataFrame: ...
    def table(self, to: str = "pandas") -> pandas.DataFrame | polars.DataFrame:
        """One row a store, with the fields of `CaptureInfo` as columns. Times are UTC, paths are text.

        to: "pandas" or "polars". Raises ImportError without that library (`dmi_connector[pandas]`,
        `dmi_connector[polars]`), ValueError for another name.
        """
        columns = self._columns()
        times = ("started", "finished")
        if to == "pandas":
            try:
                import pandas
            except ImportError as error:
                raise ImportError("table: pandas is not installed; install dmi_connector[pandas]") from error
            kinds = {"bytes": "Int64", "num_tokens": "Int64", "prompt_len": "Int64"}
            frame = pandas.DataFrame(columns).astype(kinds)
            return frame.assign(**{n: pandas.to_datetime(frame[n], utc=True, format="ISO8601") for n in times})
        if to == "polars":
            try:
                import polars
            except ImportError as error:
                raise ImportError("table: polars is not installed; install dmi_connector[polars]") from error
            whole: dict[str, Any] = {"bytes": polars.Int64, "num_tokens": polars.Int64, "prompt_len": polars.Int64}
            whole |= dict.fromkeys(("remove_local", "only_complete"), polars.Boolean)
            made = polars.DataFrame(columns, schema={name: whole.get(name, polars.String) for name in columns})
            return made.with_columns(polars.col(*times).str.to_datetime(time_zone="UTC", time_unit="us"))
        raise ValueError(f"table: {to!r} is not valid; use 'pandas' or 'polars'")

    def _columns(self) -> dict[str, list[Any]]:
        rows = [{**vars(_whole(info)), "store": str(info.store)} for info in self.infos]
        return {name: [row[name] for row in rows] for name in CaptureInfo.__dataclass_fields__}

    def rows(self, hook: str, layer: int | None = None, skip: int = 0) -> RowView:
        """The rows of a hook in all stores, one after the other, as one long array that is read when it is indexed.

        hook, layer: as in `Capture.numpy`. skip: rows that are left out at the start of each store, such as 1 for the
        first token, whose norm is often large. Missing rows are left out.

        Raises ValueError without a store, for stores of several models, and for logits; KeyError for a hook or layer
        that the first store did not capture. Another store that did not is found when it is read, which then raises
        KeyError: `filter(hooks=...)` leaves such stores out.
        """
        self.check_one_model()
        return RowView(self.infos, hook, layer, skip)
