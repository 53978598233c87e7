# SPDX-License-Identifier: Apache-2.0
"""`dmi fidelity`: measures how well reductions keep captured rows. Full rows are reduced as taps would reduce them."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

try:
    import torch
except ImportError as error:
    raise ImportError("fidelity: torch is not installed; install dmi_connector[torch]") from error

from dmi_connector.analysis.attention_overlap import AttentionOverlap
from dmi_connector.analysis.autoencoder import Autoencoder
from dmi_connector.analysis.downstream import LENS_HOOKS, Downstream, concepts_of
from dmi_connector.analysis.downstream import MEANINGS as DOWNSTREAM
from dmi_connector.analysis.fit_probe import Labels
from dmi_connector.analysis.unembedding import Unembedding
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.captures.one_model import OneModel
from dmi_connector.hooks import HOOKS
from dmi_connector.layout import ITEMSIZE
from dmi_connector.reduce import KINDS, STORED, ReduceError, Reduction, parse
from dmi_connector.reduce.fitted import FittedReduction
from dmi_connector.reduce.measures import ReducedRows
from dmi_connector.store.format.remote_path import Given
from dmi_connector.wording import suggest

logger = logging.getLogger(__name__)

DEFAULT = tuple(spec for kind in KINDS.values() for spec in kind.compared)
"""Reductions that are compared by default."""


@dataclass(frozen=True)
class Fidelity:
    """Fidelity of one reduction on one layer of a hook.

    layer: None for a hook that exists once. reduction: as in server options. tokens: number of rows. width: values per
    full row. size: bytes of a stored row / bytes of a full row. measures: {name: value}, see `Reduction.measured` and
    `downstream.MEANINGS`.
    """

    hook: str
    layer: int | None
    reduction: str
    tokens: int
    width: int
    size: float
    measures: dict[str, float]


def fidelity(
    stores: Sequence[Given],
    specs: Sequence[str] = DEFAULT,
    hooks: str = "*",
    layers: Sequence[int] | None = None,
    labels: Labels | str | None = None,
    unembedding: Unembedding | None = None,
    autoencoder: Autoencoder | None = None,
) -> list[Fidelity]:
    """Reduce the rows of `stores` by each of `specs`, and compare the decoded rows with the full ones.

    Stores without rows are left out. A reduction that does not fit the width of a hook is left out for that hook.

    specs: reductions as in server options. hooks: names or wildcards, separated by commas. layers: layer numbers;
    negative numbers count from the last layer; None: all. Hooks that exist once are measured with any `layers`. labels:
    labels of captures for the measure `concepts`; "tokens": the most frequent tokens are the labels. unembedding: the
    model's unembedding, for the logit lens of the residual stream. autoencoder: a sparse autoencoder, for the measures
    of the hook and layer that it encodes. `downstream.MEANINGS` explains these measures.

    Raises ValueError if the stores have no rows or none of the hooks in full, are of several models, or if only some
    have a hook in full. Raises ValueError for a layer that none of the hooks has, for an autoencoder of a hook or layer
    that is not measured, and if every reduction is left out. Raises KeyError for a hook or layer that a later store
    lacks.
    """
    kept, names = _chosen(stores, hooks)
    with open_capture(kept[0], 0) as first:
        wanted, reductions = _numbers(first, names, layers), {spec: parse(spec) for spec in specs}
        layers_of: dict[str, list[int | None]] = {hook: [*first.layers[hook]] or [None] for hook in names}
        dtypes = {hook: _dtype(first, hook) for hook in names}
        encoded = None if autoencoder is None else autoencoder.place(first.num_layers)
    if encoded is not None and not _is_measured(encoded, layers_of, wanted):
        hook, layer = encoded
        where = hook if layer is None else f"{hook} of layer {layer}"
        raise ValueError(
            f"--sae: the autoencoder encodes {where}, which is not measured; give stores that hold these rows in full,"
            " and include them in --hooks and --layer if you give these options"
        )
    concepts = concepts_of(kept, labels) if labels is not None else None
    found, reasons = [], []
    for hook in names:
        for layer in layers_of[hook]:
            if wanted is None or layer is None or layer in wanted:
                rows, tokens = _rows(kept, hook, layer)
                lens = unembedding if hook in LENS_HOOKS else None
                encoder = autoencoder if (hook, layer) == encoded else None
                attended = AttentionOverlap.of(kept, hook, layer)
                downstream = Downstream(rows, concepts, lens, encoder, attended)
                for spec, reduction in reductions.items():
                    if reduction is None or (why := _unfit(reduction, rows.shape[1])):
                        reasons.append("'none' is not a reduction" if reduction is None else why)
                    else:
                        found.append(_measure(spec, reduction, hook, layer, rows, tokens, dtypes[hook], downstream))
    if not found:
        why = "; ".join(dict.fromkeys(reasons)) or "none was given"
        raise ValueError(f"fidelity: no reduction can be measured ({why}); give another --reduce")
    return found


def _chosen(stores: Sequence[Given], hooks: str) -> tuple[list[Given], list[str]]:
    """Return (stores with rows, hooks to measure).

    Raises ValueError if no store has rows, if the first store with rows has none of the hooks in full, or if a later
    one has a reduced hook or is of another model. Raises KeyError if a later store lacks a hook.
    """
    one, empty, names = OneModel(), [], list[str]()
    kept: list[Given] = []
    for store in stores:
        with open_capture(store, 0) as capture:
            if not capture.attrs["num_tokens"]:
                empty.append(str(capture.path))
                continue
            one.check(capture.path, capture.attrs.get("model"))
            names = names or _in_full(capture, hooks)
            for hook in names:
                if capture.reduction(hook) is not None:
                    raise ValueError(
                        f"fidelity: {hook} of {capture.path} is stored reduced; give stores that hold it in full, or"
                        " name other hooks with --hooks"
                    )
            kept.append(store)
    if not kept:
        raise ValueError(f"fidelity: {', '.join(empty)} hold no rows; give a store with rows")
    for path in empty:
        logger.warning("fidelity: %s holds no rows; it is left out", path)
    return kept, names


def _in_full(capture: Capture, hooks: str) -> list[str]:
    """The matching hooks that a store has in full. Raises ValueError if there are none."""
    for pattern in map(str.strip, hooks.split(",")):
        if not fnmatch.filter(capture.attrs["hooks"], pattern):
            near = suggest(pattern, capture.attrs["hooks"]) or ";"
            held = ", ".join(capture.attrs["hooks"])
            raise ValueError(f"fidelity: {capture.path} holds no hook {pattern!r}{near} it holds {held}")
    names = [h for h in capture.attrs["hooks"] if any(fnmatch.fnmatch(h, p.strip()) for p in hooks.split(","))]
    names = [h for h in names if capture.reduction(h) is None]
    names = [h for h in names if HOOKS[h].scope != "sampled" and HOOKS[h].dtype != "int32"]
    if not names:
        raise ValueError(
            f"{capture.path} holds no hook in full that matches {hooks!r}; it holds {', '.join(capture.hooks)}"
        )
    return names


def _rows(stores: Sequence[Given], hook: str, layer: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(rows [tokens, width] of one layer of a hook, their token ids) of all stores.

    Stores are opened one at a time, since thousands at once would be too many open files.
    """
    rows, tokens = [], []
    for store in stores:
        with open_capture(store, 0) as capture:
            rows.append(capture.numpy(hook, layer))
            tokens.append(capture.token_ids)
    return np.concatenate(rows), np.concatenate(tokens)


def _numbers(capture: Capture, hooks: Sequence[str], layers: Sequence[int] | None) -> set[int] | None:
    """The layers to measure, as numbers from 0 on; None: all. Raises ValueError for a layer that no hook has."""
    own = sorted({number for hook in hooks for number in capture.layers[hook]})
    if layers is None or not own:
        return None
    wanted = {layer: layer + capture.num_layers if layer < 0 else layer for layer in layers}
    for layer, number in wanted.items():
        if number not in own:
            raise ValueError(
                f"--layer {layer} of {', '.join(hooks)} is not in {capture.path}; it has {', '.join(map(str, own))}"
            )
    return set(wanted.values())


def _is_measured(
    place: tuple[str, int | None], layers_of: Mapping[str, Sequence[int | None]], wanted: set[int] | None
) -> bool:
    hook, layer = place
    return layer in layers_of.get(hook, ()) and (wanted is None or layer is None or layer in wanted)


def _unfit(reduction: Reduction, width: int) -> str:
    """Why a reduction cannot be applied to rows of this width; "" if nothing prevents it."""
    try:
        reduction.check(width)
    except ReduceError as error:
        return str(error)
    return ""


def _dtype(capture: Capture, hook: str) -> str:
    return str(capture.attrs["hooks"][hook]["dtype"])


def _measure(
    spec: str,
    reduction: Reduction,
    hook: str,
    layer: int | None,
    rows: np.ndarray,
    tokens: np.ndarray,
    dtype: str,
    downstream: Downstream,
) -> Fidelity:
    """Encode and decode the rows [n, width] of one layer with a reduction, and measure the result."""
    width = rows.shape[1]
    reduction = reduction.bind(hook, [layer or 0], width, 1)
    reduction.prepare(width, torch.device("cpu"), layer or 0, 0)
    values = torch.from_numpy(rows).to(getattr(torch, dtype))
    stored = reduction.encode(values, layer or 0)
    raw = stored.float().numpy() if stored.is_floating_point() else stored.numpy()
    decoded = reduction.decode(raw, width, dtype)
    if isinstance(reduction, FittedReduction) and reduction.needs_file:
        decoded = reduction.read(decoded, reduction.own_part(layer or 0))
    size = stored.shape[1] * ITEMSIZE[reduction.stored_dtype(dtype)] / (width * ITEMSIZE[dtype])
    both = ReducedRows(rows, raw, decoded, tokens, layer or 0, dtype)
    measures = {**reduction.measures(both), **downstream.measures(decoded, reduction.restored(both))}
    return Fidelity(hook, layer, spec, len(rows), width, size, {k: round(v, 6) for k, v in measures.items()})


LARGER_IS_WORSE = ("error", "lens_kl", "sae_error")
"""Measures of which a larger value is worse. They are not compared with a bar."""


def below(measures: Mapping[str, float], bar: float) -> list[str]:
    """The names of the measures below a bar. NaN counts as below. Measures of LARGER_IS_WORSE are ignored."""
    return [name for name, value in measures.items() if name not in LARGER_IS_WORSE and not value >= bar]


def markdown(found: Sequence[Fidelity], bar: float | None = None) -> str:
    """A Markdown table with a line for each hook and reduction. Each cell is the value of the worst layer.

    bar: a lower limit; if given, a last column names the measures below this limit.
    """
    meanings = {name: meaning for kind in (KINDS | STORED).values() for name, meaning in kind.measured.items()}
    meanings |= DOWNSTREAM
    shown = [name for name in meanings if any(name in f.measures for f in found)]
    titles = ["hook", "width", "reduction", "size", *(n.replace("_", " ") for n in shown)]
    titles += [] if bar is None else [f"bar {bar:g}"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for hook, width, spec in dict.fromkeys((f.hook, f.width, f.reduction) for f in found):
        own = [f for f in found if (f.hook, f.reduction) == (hook, spec)]
        of = {name: [f.measures[name] for f in own if name in f.measures] for name in shown}
        worst = {name: _worst(name, values) for name, values in of.items() if values}
        cells = [f"{worst[name]:.5f}" if name in worst else "" for name in shown]
        if bar is not None:
            failed = below(worst, bar)
            cells.append(f"below: {', '.join(failed).replace('_', ' ')}" if failed else "pass")
        lines.append(f"| {hook} | {width} | `{spec}` | {own[0].size:.4f} | " + " | ".join(cells) + " |")
    meaning = [f"- {name.replace('_', ' ')}: {meanings[name]}" for name in shown]
    return "\n".join(
        [
            *lines,
            "",
            "Each cell is the value of the worst layer. size: bytes of a stored row / bytes of a full row.",
            *meaning,
        ]
    )


def _worst(name: str, values: Sequence[float]) -> float:
    """The worst of the layers. NaN is worse than any number."""
    return float((np.max if name in LARGER_IS_WORSE else np.min)(values))
