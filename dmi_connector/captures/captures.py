# SPDX-License-Identifier: Apache-2.0
"""`open_captures` finds the stores of a directory. `Captures` opens them one at a time."""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

import numpy as np

from dmi_connector.captures import tables
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.captures.filters import Time, Where, between, holding, lengths, parse_time, whole, why_none
from dmi_connector.captures.finding import below_prefix, is_unreadable, opening
from dmi_connector.captures.names import hook_and_layer
from dmi_connector.captures.one_model import OneModel, is_named
from dmi_connector.captures.own_values import check_own_values
from dmi_connector.captures.row_choice import Mask, RowChoice
from dmi_connector.captures.row_view import RowView, check_some
from dmi_connector.captures.scores import scores as scores_of
from dmi_connector.captures.tables import Decode
from dmi_connector.store.format.remote_path import Given, Place, RemotePath, place_of
from dmi_connector.store.read.hook_names import Layers
from dmi_connector.store.read.index import (
    FINISHED,
    CaptureInfo,
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
    """The finished stores of a directory, by start time. Opens none of them: the directory's index is read.

    directory: a path, or a URL such as s3://bucket/prefix. There, stores that no index names are opened once; a store
    whose upload has not ended is left out.

    A filter that is None accepts every store.

    key: one key, or several. request_id: as in `find_captures`. model: the model's name, or the last part of its path.
    after, before: when the request began, as ISO 8601, a datetime or a date; without a zone it is UTC. `after` itself
    counts, `before` does not. prompt_len: tokens of the prompt, a number or a range. incomplete: also stores that lack
    rows. where: called with each `CaptureInfo` that these filters let pass. hooks: what a store must have captured, as
    in `Captures.filter`; it is looked for last, since the index does not have it.

    on_error: "skip" leaves out stores that cannot be opened, such as those with damaged metadata: a warning counts and
    names them, and `Captures.skipped` lists them. Each store is opened once for that. Damaged values are found when
    they are read, or by dmi verify.

    Where no store passes the filters, a warning says why. Stores of a directory without an index are found by their
    names (*.zarr), and each is opened once. Raises ValueError for a bad time or prompt_len, for a directory that
    does not exist or whose stores are one level below, and for a store in place of a directory; KeyError for a hook
    that none of the stores holds.
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
    """`open_captures` without its warning. given: its other filters that are not None."""
    key, request_id, model = given.get("key"), given.get("request_id"), given.get("model")
    prompt_len, where = given.get("prompt_len"), given.get("where")
    place = place_of(directory)
    if isinstance(place, RemotePath):
        found = below_prefix(place, on_error)
    elif on_error == "skip":
        found = find_captures(place, on_error=on_error)  # of those that cannot be opened no key is known
    else:
        one = key if isinstance(key, str) else None
        found = find_captures(place, one, request_id)
    skipped = [(info.store, info.reason or "") for info in found if on_error == "skip" and is_unreadable(info)]
    keys = {key} if isinstance(key, str) else key
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
    """Yield the captures. Raises ValueError at the first one of another model, as `check_one_model` does."""
    one = OneModel(captures.model if isinstance(captures, Captures) else None)
    for capture in [captures] if isinstance(captures, Capture) else captures:
        one.check(capture.path, capture.attrs.get("model"))
        yield capture


def named_rows(
    captures: Captures, name: str, choice: RowChoice | None = None, beside: RowView | None = None
) -> RowView:
    """`Captures.rows` of a hook that is named as in `Captures.filter`. beside: a view that has the same rows.

    Raises as that does. Raises KeyError for a name of TransformerLens that means another tensor in the first store's
    model, ValueError for one whose hook was stored as other values.
    """
    captures.check_one_model()
    check_some(captures.infos, name, captures.why_empty)
    with captures[0] as first:
        hook, layer = hook_and_layer(name, first.attrs)
        view = RowView(captures.infos, hook, layer, choice, beside)
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
    kept = infos if model is None else [info for info in map(whole, infos) if is_named(info.model, model)]
    if infos and not kept:
        why = why_none(place_of(paths[0]), infos, {"model": model}, incomplete)
    return Captures(tuple(kept), model, directories, "" if kept else why)


@dataclass(frozen=True)
class Captures:
    """Finished stores, none of them open. Made by `open_captures`.

    `captures[3]` opens one, as `captures["key"]` and `captures["NAME.zarr"]` do; `captures[:100]` gives fewer. A loop
    opens one store at a time, and closes it when it asks for the next. So memory does not grow with the stores, but for
    one `CaptureInfo` each.

    model: the name by which all were chosen. None: they may be of several models. directories: of this machine, in
    which they were looked for. why_empty: where there is none, the reason, as far as known. skipped: (store, reason) of
    each that was left out because it cannot be opened, with on_error="skip".
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
        try:
            info = self.infos[operator.index(number)]
        except TypeError as error:
            raise TypeError(
                f"captures[{number!r}]: give the number, the name or the key of a store, or a slice"
            ) from error
        except IndexError as error:
            raise IndexError(f"captures[{number}] does not exist: there are {len(self)} stores") from error
        return open_capture(info.store, timeout=0, allow_incomplete=True)

    def _number(self, name: str) -> int:
        """That of the store with a name (NAME.zarr or NAME), or of the only one with a key. Raises KeyError."""
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
        """Those whose `CaptureInfo` `where` accepts, and that captured all of `hooks`. None accepts every store.

        hooks: one name or several, such as "resid_pre@3" (hook@layer), "q" (any layer of it) or "blocks.3.attn.hook_z".
        A name of TransformerLens that means another tensor in a store's model leaves that store out. The root document
        of each store that `where` accepts is read once. Raises ValueError where one cannot be read, and for a bad
        layer, KeyError for a hook or layer that none of these stores holds.
        """
        kept = [info for info in map(whole, self.infos) if where(info)] if where is not None else self.infos
        found, why = kept if hooks is None else holding(kept, hooks), self.why_empty
        if kept and not found:
            names = [hooks] if isinstance(hooks, str) else hooks or ()
            why = f"none of {len(kept)} stores holds all of {', '.join(map(repr, names))}"
        return replace(self, infos=tuple(found), why_empty=why)

    def check_one_model(self) -> None:
        """Raise ValueError where the stores are of several models. Stores chosen by `model` count as one model's."""
        one = OneModel(self.model)
        for info in map(whole, self.infos) if self.model is None else ():
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

    def scores(self, probe: str, what: str = "max") -> np.ndarray:
        """One score of a probe for each store, from the index: float32 [stores, outputs], or [stores, layers, outputs]
        for a probe of several layers. Opens no store.

        probe: its name, with or without `probe.`. what: "max", "min", "mean", "last" (of the last row), or "at" (the
        position of the first row with the largest score), over the rows that are not missing. NaN where a store has no
        score, or one that is not finite.

        Raises KeyError if none of the stores has the probe, ValueError for another `what`, and where stores have
        different outputs or layers of it.
        """
        return scores_of(self.infos, probe, what)

    @overload
    def table(self, to: Literal["pandas"] = "pandas", text: Decode | None = None) -> pandas.DataFrame: ...
    @overload
    def table(self, to: Literal["polars"], text: Decode | None = None) -> polars.DataFrame: ...
    def table(self, to: str = "pandas", text: Decode | None = None) -> pandas.DataFrame | polars.DataFrame:
        """One row per store, with the fields of `CaptureInfo` as columns. Times are UTC, paths are text.

        Stores of `dmi run` also have `row` (number of the row in the input), `id` and `finish_reason`, from the
        manifests beside them; they are null for other stores. text: makes text of a list of token ids, such as
        `tokenizer.decode`; adds `prompt`, and opens each store.

        to: "pandas" or "polars". Raises ImportError without that library (`dmi_connector[pandas]`,
        `dmi_connector[polars]`), ValueError for another name.
        """
        return tables.of_captures(self.infos, self.directories, to, text)

    def token_table(self, to: str = "pandas", text: Decode | None = None) -> Any:
        """One row per token that is not missing, with the columns store (its name), key, row, position, token_id and
        phase (0: prompt, 1: generated), as `to` says. text: makes text of a list of one token id; adds `text`.

        Reads the token arrays of each store. Raises as `table`.
        """
        return tables.of_tokens(self.infos, to, text)

    def xarray(self, hooks: str | Sequence[str], padded: bool = False) -> xarray.Dataset:
        """Hooks of all stores as one lazy xarray Dataset, see `captures.many_xarray.dataset`."""
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
        """The rows of a hook in all stores, one after the other, as one long array that reads rows on use.

        hook, layer: as in `Capture.numpy`, `resid_pre@12` too; `logits` have a row for each sampled token. skip: rows
        that are left out at the start of each store. phase: "prompt" or "generated". after: a token id, or several:
        rows after the first row with one of them; none of a store without one. mask: a function of an open `Capture`
        that returns a boolean for each of its rows (of logits: for each sample). last: at most this many rows per
        store, the last that pass the others. Missing rows are left out. phase, after and mask read the token arrays of
        each store once.

        Raises ValueError without a store, for stores of several models, and for options that are not valid; KeyError
        for a hook or layer that the first store did not capture. Another store that did not is found when it is read,
        which then raises KeyError: `filter(hooks=...)` leaves such stores out.
        """
        choice = RowChoice(skip, phase, after, mask, last)
        if "@" in hook:
            if layer is not None:
                raise ValueError(f"{hook!r} names its layer; leave layer={layer!r} out")
            return named_rows(self, hook, choice)
        self.check_one_model()
        check_some(self.infos, hook, self.why_empty)
        return RowView(self.infos, hook, layer, choice)
