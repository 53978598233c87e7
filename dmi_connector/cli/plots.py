# SPDX-License-Identifier: Apache-2.0
"""`dmi plot`: draws pictures of stores. KINDS lists the options of each kind of picture."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dmi_connector.captures.capture import Capture
from dmi_connector.store.format.remote_path import place_of
from dmi_connector.store.read.index import is_store
from dmi_connector.store.read.verify import stores_of

if TYPE_CHECKING:
    from dmi_connector.reduce.statistic import Statistic

Options = argparse.Namespace
Open = Callable[[str], Capture]


_CONTEXT = 24
"""Number of tokens to read on each side of an activating token. `draw_top_tokens` leaves out those that do not fit."""


@dataclass(frozen=True)
class Kind:
    """One kind of picture.

    draw: draws the picture and returns its path. takes: options that may be given. needs: options that must be given.
    `takes` and `needs` leave out STORE and --out. many: whether several stores may be given.
    """

    draw: Callable[[Options, Open], Path]
    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    many: bool = False


class Stores:
    """The captures of stores. Each iteration opens one capture at a time, and closes it before the next.

    paths: paths or URLs of stores, or of directories of stores. Raises ValueError for a directory without a finished
    store.
    """

    def __init__(self, paths: Sequence[str], open_store: Open) -> None:
        self._open = open_store
        self._paths = [store for path in paths for store in _stores_in(path)]

    def __iter__(self) -> Iterator[Capture]:
        for path in self._paths:
            with self._open(path) as capture:
                yield capture


def _stores_in(path: str) -> list[str]:
    place = place_of(path)
    if is_store(place) or (isinstance(place, Path) and not place.is_dir()):  # else `open_store` raises
        return [path]
    return [str(store) for store in stores_of(place)]


def add_plot_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dmi plot`."""
    parser.add_argument(
        "stores",
        metavar="STORE",
        nargs="+",
        help="one store; norms, heat and drift take several, neuron and difference also directories of stores",
    )
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="a .png or .svg file")
    parser.add_argument("--kind", choices=tuple(KINDS), default="norms", help="what to draw (default: norms)")
    parser.add_argument("--tokenizer", metavar="DIR", help="directory of tokenizer.json (default: the model's)")
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="directory of the model: for lens and attribution (default: the model that the store names); for"
        " uncertainty, to compute the logits of every row (default: the captured logits)",
    )
    parser.add_argument(
        "--hook", metavar="HOOK", help="required for heat, text, neuron, difference; for drift (default: resid_final)"
    )
    parser.add_argument(
        "--layer",
        type=int,
        metavar="N",
        help="required for attention; for text, neuron, difference and drift, required if the hook has several layers",
    )
    parser.add_argument(
        "--values",
        metavar="STAT",
        help="for text: the statistic that colours tokens, such as norm or largest-value (default: the hook's first)",
    )
    parser.add_argument(
        "--neuron",
        type=int,
        metavar="N",
        help="index of a value in a row: required for neuron; for heat, to draw this value instead of norms; for"
        " text, for statistics of one value, one output of a probe or one latent",
    )
    parser.add_argument("--head", type=int, metavar="N", help="for text: statistics of one head (--hook pattern)")
    parser.add_argument(
        "--against",
        action="append",
        metavar="STORE",
        help="required for difference: a store or a directory of stores to compare with; can be repeated",
    )
    parser.add_argument(
        "--rows", metavar="ROWS", help="for text: FIRST:STOP; for difference: all (default), prompt, generated or last"
    )
    parser.add_argument(
        "--since", metavar="ROW", help="for drift: what rows are compared with: prompt (default) or previous"
    )
    parser.add_argument(
        "--token",
        type=int,
        metavar="ID",
        help="token id: for attribution (default: the next token); for text with --hook logits",
    )


def draw(options: Options, open_store: Open) -> Path:
    """Draw the picture and return its path. Raises ValueError if the options do not fit the kind of picture."""
    kind = KINDS[options.kind]
    known = {name for one in KINDS.values() for name in (*one.takes, *one.needs)}
    given = {name for name in known if getattr(options, name) is not None}
    for name in sorted(given - {*kind.takes, *kind.needs}):
        raise ValueError(f"plot: --kind {options.kind} takes no --{name}; leave it out")
    for name in kind.needs:
        if name not in given:
            raise ValueError(f"plot: --kind {options.kind} needs --{name}; give it")
    if len(options.stores) > 1 and not kind.many:
        raise ValueError(f"plot: --kind {options.kind} draws one store, {len(options.stores)} were given; name one")
    return kind.draw(options, open_store)


def _norms(options: Options, open_store: Open) -> Path:
    from dmi_connector.analysis.pictures.plot import draw_residual_norms

    return draw_residual_norms([open_store(path) for path in options.stores], options.out, options.tokenizer)


def _heat(options: Options, open_store: Open) -> Path:
    from dmi_connector.analysis.pictures.plot import draw_heat

    captures = [open_store(path) for path in options.stores]
    return draw_heat(captures, options.out, options.hook, options.neuron, options.tokenizer)


def _text(options: Options, open_store: Open) -> Path:
    from dmi_connector.analysis.pictures.plot_text import draw_text

    rows = _row_range(options.rows)
    capture = open_store(options.stores[0])
    statistic, index = _statistic(capture, options)
    return draw_text(capture, options.out, options.hook, statistic, index, options.layer, rows, options.tokenizer)


def _row_range(text: str | None) -> slice:
    """Parse FIRST:STOP, where FIRST and STOP may be left out. None means all rows. Raises ValueError for other text."""
    found = re.fullmatch(r"(\d*):(\d*)", text or ":", re.ASCII)
    if found is None:
        raise ValueError(f"plot: --rows {text} is not valid; write FIRST:STOP, as in 0:200")
    return slice(*(int(number) if number else None for number in found.groups()))


_INDEX_OPTIONS = {"neuron": "neuron", "output": "neuron", "latent": "neuron", "head": "head", "token id": "token"}
"""`Statistic.index_name` -> the option that gives the index."""


def _statistic(capture: Capture, options: Options) -> tuple[Statistic, int]:
    """(the statistic that --values names, the index that --neuron, --head or --token gives).

    The index is 0 for a statistic without an index, and by default for a probe. Without --values, the statistic is the
    hook's first one that takes exactly the given options of --neuron, --head and --token; if there is none, the hook's
    first one. Raises ValueError for an unknown statistic, for an option that the statistic does not take, and if its
    index is not given.
    """
    from dmi_connector.analysis.stats import statistics

    known = {found.name.replace(" ", "-"): found for found in statistics(capture, options.hook)}
    needs = {name: _INDEX_OPTIONS.get(found.index_name or "") for name, found in known.items()}
    given = {option for option in _INDEX_OPTIONS.values() if getattr(options, option) is not None}
    fitting = [name for name in known if {needs[name]} - {None} == given]
    name = [*fitting, *known][0] if options.values is None else options.values.replace(" ", "-")
    if name not in known:
        raise ValueError(f"plot: --values {name} does not exist for {options.hook!r}; use {', '.join(known)}")
    for option in sorted(given - {needs[name]}):
        raise ValueError(f"plot: --values {name} takes no --{option}; leave it out")
    needed = needs[name]
    if needed is None:
        return known[name], 0
    if needed not in given and known[name].index_name == "output":  # most probes have one output
        return known[name], 0
    if needed not in given:
        raise ValueError(f"plot: --values {name} needs --{needed}; give it")
    return known[name], getattr(options, needed)


def _lens(options: Options, open_store: Open) -> Path:
    from dmi_connector.analysis.lens import logit_lens
    from dmi_connector.analysis.pictures.plot import draw_lens
    from dmi_connector.analysis.unembedding import Unembedding

    capture = open_store(options.stores[0])
    lens = logit_lens(capture, Unembedding.of(capture, options.model), top=1)
    return draw_lens(capture, lens, options.out, options.tokenizer)


def _attribution(options: Options, open_store: Open) -> Path:
    from dmi_connector.analysis.attribution import logit_attribution
    from dmi_connector.analysis.pictures.plot import draw_attribution
    from dmi_connector.analysis.unembedding import Unembedding

    capture = open_store(options.stores[0])
    shares, labels = logit_attribution(capture, Unembedding.of(capture, options.model), options.token)
    return draw_attribution(capture, shares, labels, options.out, options.tokenizer)


def _attention(options: Options, open_store: Open) -> Path:
    from dmi_connector.analysis.pictures.plot import draw_attention

    return draw_attention(open_store(options.stores[0]), options.layer, options.out, options.tokenizer)


def _uncertainty(options: Options, open_store: Open) -> Path:
    from dmi_connector.analysis.lens import uncertainty
    from dmi_connector.analysis.pictures.plot import draw_uncertainty
    from dmi_connector.analysis.unembedding import Unembedding

    unembedding = None if options.model is None else Unembedding.load(options.model)
    capture = open_store(options.stores[0])
    return draw_uncertainty(capture, uncertainty(capture, unembedding), options.out, options.tokenizer)


def _drift(options: Options, open_store: Open) -> Path:
    from dmi_connector.analysis.pictures.plot import draw_drift

    hook, since = options.hook or "resid_final", options.since or "prompt"
    captures = [open_store(path) for path in options.stores]
    return draw_drift(captures, options.out, hook, options.layer, since)


def _neuron(options: Options, open_store: Open) -> Path:
    from dmi_connector.analysis.labels import name_of_values
    from dmi_connector.analysis.neurons import top_tokens
    from dmi_connector.analysis.pictures.plot_sets import draw_top_tokens

    stores = Stores(options.stores, open_store)
    found = top_tokens(stores, options.hook, options.neuron, options.layer, context=_CONTEXT)
    where = options.hook if options.layer is None else f"{options.hook}, layer {options.layer}"
    return draw_top_tokens(
        found, options.out, f"{where}, {name_of_values(options.hook)} {options.neuron}", options.tokenizer
    )


def _difference(options: Options, open_store: Open) -> Path:
    from dmi_connector.analysis.directions import mean_difference
    from dmi_connector.analysis.labels import name_of_values
    from dmi_connector.analysis.pictures.plot_sets import draw_mean_difference

    sets = [Stores(paths, open_store) for paths in (options.stores, options.against)]
    found = mean_difference(sets[0], sets[1], options.hook, options.layer, options.rows or "all")
    return draw_mean_difference(found, options.out, ("stores", "against"), name_of_values(options.hook))


KINDS = {
    "norms": Kind(_norms, takes=("tokenizer",), many=True),
    "heat": Kind(_heat, takes=("tokenizer", "neuron"), needs=("hook",), many=True),
    "text": Kind(_text, takes=("tokenizer", "values", "layer", "neuron", "head", "token", "rows"), needs=("hook",)),
    "lens": Kind(_lens, takes=("tokenizer", "model")),
    "attribution": Kind(_attribution, takes=("tokenizer", "model", "token")),
    "attention": Kind(_attention, takes=("tokenizer",), needs=("layer",)),
    "uncertainty": Kind(_uncertainty, takes=("tokenizer", "model")),
    "drift": Kind(_drift, takes=("hook", "layer", "since"), many=True),
    "neuron": Kind(_neuron, takes=("tokenizer", "layer"), needs=("hook", "neuron"), many=True),
    "difference": Kind(_difference, takes=("layer", "rows"), needs=("hook", "against"), many=True),
}
"""Value of --kind -> what it draws, and its options."""
