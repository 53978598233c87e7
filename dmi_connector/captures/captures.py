# SPDX-License-Identifier: Apache-2.0
"""Defines `open_captures`, which finds the stores of a directory, and `Captures`, which opens them one at a time."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

import numpy as np

from dmi_connector.captures import tables
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.captures.filters import Time, Where, between, holding, keys_of, lengths, parse_time, whole, why_none
from dmi_connector.captures.finding import below_prefix, is_unreadable, opening
from dmi_connector.captures.lens_names import ALL_NAMES, split_name
from dmi_connector.captures.names import hook_and_layer
from dmi_connector.captures.one_model import OneModel, is_named
from dmi_connector.captures.own_values import check_own_values
from dmi_connector.captures.row_choice import Mask, RowChoice
from dmi_connector.captures.row_view import RowView, check_some
from dmi_connector.captures.scores import scores as scores_of
from dmi_connector.captures.tables import Decode
from dmi_connector.option_values import whole_number
from dmi_connector.store.format.remote_path import Given, Place, RemotePath, place_of
from dmi_connector.store.read.hook_names import Layers
from dmi_connector.store.read.index import (
    FINISHED,
    CaptureInfo,
    check_text,
    find_captures,
    info_of,
    is_store,
    same_request,
)
from dmi_connector.wording import suggest

if TYPE_CHECKING:
    import pandas
    import polars
    import xarray

logger = logging.getLogger(__name__)
_NAMED = 5
"""Maximum number of stores that a warning names."""


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
    on_error: Literal["raise", "skip"] = "raise",
) -> Captures:
    """Find the finished stores of a directory, sorted by start time.

    This reads the directory's index; most stores are not opened. directory: a path, or a URL such as
    s3://bucket/prefix. In an object store, stores that no index names are opened once, and stores whose upload has not
    ended are left out.

    A filter that is None accepts every store.

    key: one key, or several. where: function that is called with each `CaptureInfo` that passes the other filters,
    except `hooks`. request_id: as in `find_captures`. model: name of the model, or last part of its path. after,
    before: start time of the request, as ISO 8601, datetime or date, in UTC if it has no time zone. `after` is
    inclusive, `before` exclusive. prompt_len: number of tokens of the prompt, or a range of numbers. incomplete:
    include stores that lack rows. hooks: hooks that a store must have, as in `Captures.filter`. This filter is applied
    last, because it reads the stores.

    on_error: "skip" leaves out stores that cannot be opened, such as those with damaged metadata. A warning counts and
    names them, and `Captures.skipped` lists them. For this check each store is opened once. Damaged values are found
    only when they are read, or by dmi verify.

    If no store passes the filters, a warning says why. Stores of a directory without an index are found by their names
    (*.zarr), and each is opened once. Raises ValueError for an invalid filter, for a directory that does not exist or
    whose stores are one level below, and for a store in place of a directory. Raises KeyError for a hook that none of
    the stores has.
    """
    filters: dict[str, Any] = {"key": key, "request_id": request_id, "model": model, "after": after, "before": before}
    filters |= {"prompt_len": prompt_len, "where": where}
    given = filters | {"hooks": hooks}
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error {on_error!r} is not valid; use 'raise' or 'skip'")
    kept = {name: value for name, value in filters.items() if value is not None}
    found = _open(directory, incomplete, hooks, kept, on_error)
    if found.skipped:
        named = ", ".join(f"{store} ({why})" for store, why in found.skipped[:_NAMED])
        logger.warning("open_captures: %d stores cannot be opened, left out: %s", len(found.skipped), named)
    if not len(found) and given != dict.fromkeys(given):
        logger.warning("open_captures: %s", found.why_empty)
    return found


def _open(
    directory: Given,
    incomplete: bool,
    hooks: str | Collection[str] | None,
    given: dict[str, Any],
    on_error: str = "raise",
) -> Captures:
    """`open_captures` without its warnings. given: the other filters, except those that are None."""
    key, request_id, model = given.get("key"), given.get("request_id"), given.get("model")
    prompt_len, where = given.get("prompt_len"), given.get("where")
    keys = keys_of(key)
    check_text("request_id", request_id)
    check_text("model", given.get("model"))
    place = place_of(directory)
    if isinstance(place, RemotePath):
        found = below_prefix(place, on_error)
    elif on_error == "skip":
        found = find_captures(place, on_error=on_error)  # all, as unreadable stores have no known key
    else:
        one = key if isinstance(key, str) else None
        found = find_captures(place, one, request_id)
    skipped = [(info.store, info.reason or "") for info in found if on_error == "skip" and is_unreadable(info)]
    allowed = None if prompt_len is None else lengths(prompt_len)
    begin, end = parse_time("after", given.get("after")), parse_time("before", given.get("before"))
    states = FINISHED if incomplete else FINISHED[:1]

    def wanted(info: CaptureInfo) -> bool:
        named = request_id is None or same_request(request_id, info.request_id)
        kept = info.state in states and (keys is None or info.key in keys)
        return kept and named and between(info.started, begin, end)

    kept = [info for info in found if wanted(info) and is_there(info)]
    if on_error == "skip":
        kept, others = opening(kept)
        skipped += others
    if model is not None or allowed is not None or where is not None:
        kept = [whole(info) for info in kept]
    if model is not None:
        kept = [info for info in kept if is_named(info.model, model)]
    if allowed is not None:
        kept = [info for info in kept if info.prompt_len in allowed]
    kept = [info for info in kept if where is None or where(info)]
    why = ""
    if not kept:
        every = find_captures(place) if isinstance(place, Path) and (key, request_id) != (None, None) else found
        finished = [info for info in every if info.state in FINISHED and is_there(info)]
        why = why_none(place, finished, given, incomplete)
    directories = (place,) if isinstance(place, Path) else ()
    return Captures(tuple(kept), model, directories, why, tuple(skipped)).filter(hooks=hooks)


def of_one_model(captures: Capture | Iterable[Capture]) -> Iterator[Capture]:
    """Yield the captures. Raises ValueError at the first capture of another model, like `check_one_model`."""
    one = OneModel(captures.model if isinstance(captures, Captures) else None)
    for capture in [captures] if isinstance(captures, Capture) else captures:
        one.check(capture.path, capture.attrs.get("model"))
        yield capture


def named_rows(
    captures: Captures, name: str, choice: RowChoice | None = None, beside: RowView | None = None
) -> RowView:
    """The view of `Captures.rows` for a hook name as in `Captures.filter`.

    beside: a view of the same stores with the same choice; its rows are reused. Raises like `Captures.rows`. For a
    TransformerLens name, also raises KeyError if the name means another tensor in the first store's model, and
    ValueError if a reduction did not keep the hook's values.
    """
    captures.check_one_model()
    check_some(captures.infos, name, captures.why_empty)
    with captures[0] as first:
        hook, layer = hook_and_layer(name, first.attrs)
        view = RowView(captures.infos, hook, layer, choice, beside)
        if hook != name.partition("@")[0]:
            check_own_values(first, hook, layer)  # the view refuses stores with other reductions
    return view


def is_there(info: CaptureInfo) -> bool:
    """Whether a finished store exists. A store in an object store is assumed to exist."""
    return isinstance(info.store, RemotePath) or info.store.is_dir()


def captures_of(
    paths: Iterable[Given],
    key: str | Collection[str] | None = None,
    model: str | None = None,
    incomplete: bool = False,
) -> Captures:
    """The captures of stores (`NAME.zarr`, `NAME.zip`), in the given order, and of directories, sorted by start time.

    paths: paths and URLs. A store that several of them name is returned once.

    key, model: as in `open_captures`. incomplete: include stores of directories that lack rows. Raises
    CaptureIncomplete if a path names a store that lacks rows. Raises ValueError for a path that is neither a store nor
    a directory.
    """
    keys = keys_of(key)
    infos: list[CaptureInfo] = []
    directories: tuple[Path, ...] = ()
    paths, why = list(paths), ""
    for path in map(place_of, paths):
        if is_store(path):
            open_capture(path, timeout=0).close()
            infos += [info for info in [info_of(path)] if keys is None or info.key in keys]
        else:
            found = _open(path, incomplete, None, {} if key is None else {"key": key})
            infos += found.infos
            why = why or found.why_empty
            directories += found.directories
    infos = list({str(info.store.absolute()): info for info in infos}.values())
    kept = infos if model is None else [info for info in map(whole, infos) if is_named(info.model, model)]
    if infos and not kept:
        why = why_none(place_of(paths[0]), infos, {"model": model}, incomplete)
    return Captures(tuple(kept), model, directories, "" if kept else why)


@dataclass(frozen=True)
class Captures:
    """Finished stores, none of them open. Made by `open_captures`.

    `captures[3]`, `captures["key"]` and `captures["NAME.zarr"]` open one store. `captures[:100]` is a `Captures` of the
    first hundred stores. A loop opens one store at a time, and closes it before the next one. Only one `CaptureInfo`
    per store is in memory.

    model: the model by which the stores were filtered; None if they may be of several models. directories: local
    directories in which stores were searched. why_empty: why there is no store, as far as it is known; else "".
    skipped: (store, reason) of each store that was left out by on_error="skip".
    """

    infos: tuple[CaptureInfo, ...]
    model: str | None = None
    directories: tuple[Path, ...] = ()
    why_empty: str = ""
    skipped: tuple[tuple[Place, str], ...] = ()

    def __len__(self) -> int:
        return len(self.infos)

    @overload
    def __getitem__(self, number: int | str) -> Capture: ...
    @overload
    def __getitem__(self, number: slice) -> Captures: ...
    def __getitem__(self, number: int | slice | str) -> Capture | Captures:
        if isinstance(number, slice):
            return replace(self, infos=self.infos[number])
        if isinstance(number, str):
            number = self._number(number)
        at = whole_number(number)
        if at is None:
            raise TypeError(f"captures[{number!r}]: give the number, the name or the key of a store, or a slice")
        try:
            info = self.infos[at]
        except IndexError as error:
            raise IndexError(f"captures[{number}] does not exist: there are {len(self)} stores") from error
        return open_capture(info.store, timeout=0, allow_incomplete=True)

    def _number(self, name: str) -> int:
        """The index of the only store with this name (NAME.zarr or NAME) or this key. Raises KeyError."""
        for of in (lambda info: info.store.name, lambda info: info.store.stem, lambda info: info.key):
            found = [number for number, info in enumerate(self.infos) if of(info) == name]
            if len(found) > 1:
                raise KeyError(f"{len(found)} stores are named {name!r}; choose them with open_captures(key={name!r})")
            if found:
                return found[0]
        near = suggest(name, [known for info in self.infos for known in (info.store.name, info.key) if known])
        raise KeyError(f"no store of {len(self)} has the name or key {name!r}{near}")

    def __iter__(self) -> Iterator[Capture]:
        for number in range(len(self)):
            with self[number] as capture:
                yield capture

    def __repr__(self) -> str:
        tokens = sum(info.num_tokens or 0 for info in self.infos)
        left = f", {len(self.skipped)} skipped" if self.skipped else ""
        return f"Captures({len(self)} stores, {tokens} tokens{left}{': ' if self.why_empty else ''}{self.why_empty})"

    def filter(self, where: Where | None = None, *, hooks: str | Collection[str] | None = None) -> Captures:
        """The captures that `where` accepts, and that have all of `hooks`. A filter that is None accepts every store.

        where: function of a `CaptureInfo`. hooks: one name or several, such as "resid_pre@3" (hook@layer), "q" (in any
        layer) or "blocks.3.attn.hook_z". A store is left out if a TransformerLens name means another tensor in its
        model, or if it was removed meanwhile. With `hooks`, the root `zarr.json` of each store that `where` accepts is
        read once. Raises ValueError if a `zarr.json` cannot be read, and for an invalid layer. Raises KeyError for a
        hook or layer that none of these stores has.
        """
        kept = [info for info in map(whole, self.infos) if where(info)] if where is not None else self.infos
        found, why = kept if hooks is None else holding(kept, hooks), self.why_empty
        if kept and not found:
            names = [hooks] if isinstance(hooks, str) else hooks or ()
            why = f"none of {len(kept)} stores holds all of {', '.join(map(repr, names))}"
        return replace(self, infos=tuple(found), why_empty=why)

    def check_one_model(self) -> None:
        """Raise ValueError if the stores are of several models. Stores filtered by `model` count as one model."""
        one = OneModel(self.model)
        for info in map(whole, self.infos) if self.model is None else ():
            one.check(info.store, info.model)

    def progress(self, description: str | None = None) -> Iterator[Capture]:
        """Iterate over the stores with a progress bar (tqdm) on standard error.

        Raises ImportError without tqdm (`dmi_connector[progress]`).
        """
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError("progress: tqdm is not installed; install dmi_connector[progress]") from error
        yield from tqdm(self, desc=description, total=len(self), unit="store")

    def scores(self, probe: str, what: str = "max") -> np.ndarray:
        """One score of a probe per store and output, from the index. Opens no store.

        Returns float32 [stores, outputs], or [stores, layers, outputs] for a probe of several layers.

        probe: name of the probe, with or without `probe.`. what: "max", "min" or "mean" over the rows, "last" (the
        score of the last row), or "at" (the position of the first row with the largest score). Missing rows are left
        out. The result is NaN for a store without a score, and for a score that is not finite.

        Raises KeyError if none of the stores has the probe. Raises ValueError for another `what`, and if the outputs or
        layers of the probe differ between stores.
        """
        return scores_of(self.infos, probe, what)

    @overload
    def table(self, to: Literal["pandas"] = "pandas", text: Decode | None = None) -> pandas.DataFrame: ...
    @overload
    def table(self, to: Literal["polars"], text: Decode | None = None) -> polars.DataFrame: ...
    def table(self, to: str = "pandas", text: Decode | None = None) -> pandas.DataFrame | polars.DataFrame:
        """One row per store, with the fields of `CaptureInfo` as columns. Times are UTC, paths are text.

        With stores of `dmi run`, the table also has the columns `row` (number of the row in the input), `id` and
        `finish_reason`, from the manifests in their directories. They are null for other stores. text: a function that
        decodes a list of token ids, such as `tokenizer.decode`. With `text` the table has the column `prompt`, and each
        store is opened.

        to: "pandas" or "polars". Raises ImportError without that library (`dmi_connector[pandas]`,
        `dmi_connector[polars]`), ValueError for another name.
        """
        return tables.of_captures(self.infos, self.directories, to, text)

    def token_table(self, to: str = "pandas", text: Decode | None = None) -> Any:
        """A table with one row per token, except missing ones.

        The columns are store (name of the store), key, row, position, token_id and phase (0: prompt, 1: generated). to:
        as in `table`. text: a function that decodes a list of one token id. With `text` the table has the column
        `text`.

        Reads the token arrays of each store. Raises like `table`.
        """
        return tables.of_tokens(self.infos, to, text)

    def xarray(self, hooks: str | Sequence[str], padded: bool = False) -> xarray.Dataset:
        """Hooks of all stores as one lazy xarray Dataset; see `captures.many_xarray.dataset`."""
        from dmi_connector.captures.many_xarray import dataset

        names = [hooks] if isinstance(hooks, str) else hooks
        views: dict[str, RowView] = {}
        for name in names:
            views[name] = named_rows(self, name, None, next(iter(views.values()), None))
        return dataset(self.infos, views, padded)

    def rows(
        self,
        hook: str,
        layer: Layers = None,
        skip: int = 0,
        *,
        phase: str | None = None,
        after: int | Collection[int] | None = None,
        mask: Mask | None = None,
        last: int | None = None,
    ) -> RowView:
        """The rows of a hook in all stores, as one array. Rows are read when they are indexed.

        hook, layer: as in `Capture.numpy`. `logits` have one row per sampled token. skip: number of rows to leave out
        at the start of each store. phase: keep only rows of this phase, "prompt" or "generated".
        after: a token id, or several; keep only rows after the first row with one of these ids, so a store without such
        a row gives no rows. mask: a function that takes an open `Capture` and returns one boolean per row (for
        `logits`, per sample). last: maximum number of rows per store; the last rows that pass the other options are
        kept. Missing rows are left out. With phase or after, token arrays of each store are read once. With mask, each
        store is opened once.

        Raises ValueError if there is no store, for stores of several models, and for invalid options. Raises KeyError
        for a hook or layer that the first store lacks. If another store lacks it, reading rows of that store raises
        KeyError; `filter(hooks=...)` leaves such stores out.
        """
        choice = RowChoice(skip, phase, after, mask, last)
        if "@" in hook or split_name(hook)[0] in ALL_NAMES:
            if layer is not None:
                raise ValueError(f"{hook!r} names its layer; leave layer={layer!r} out")
            return named_rows(self, hook, choice)
        self.check_one_model()
        check_some(self.infos, hook, self.why_empty)
        return RowView(self.infos, hook, layer, choice)
