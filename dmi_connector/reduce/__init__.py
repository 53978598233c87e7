# SPDX-License-Identifier: Apache-2.0
"""Reductions of hook rows. The engine encodes values before it writes them to rows, and the reader decodes them.

Examples of `parse`:
parse("int8"), parse("int8(affine)"), parse("int8(32)"), parse("int8(channel=scales.safetensors)"), parse("fp8"),
parse("round(4)"), parse("topk(64)"), parse("topk(64,exact)"), parse("topk(64,sample=0)"), parse("rp(512)"),
parse("rp(512,sign,seed=7)"), parse("rp(512,channel=scales.safetensors)"),
parse("cs(512)"), parse("pca(basis.safetensors)"), parse("pq(books.safetensors)"),
parse("attn(8)"), parse("none")
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dmi_connector.reduce.attn import AttentionSummary
from dmi_connector.reduce.base import Keeps, Reduction
from dmi_connector.reduce.channel import ChannelInt8
from dmi_connector.reduce.channel_projection import ChannelProjection
from dmi_connector.reduce.countsketch import CountSketch
from dmi_connector.reduce.errors import ReduceError, refuse_sketch
from dmi_connector.reduce.fp8 import Fp8
from dmi_connector.reduce.int8 import Int8
from dmi_connector.reduce.latents import Latents
from dmi_connector.reduce.modes import MODES
from dmi_connector.reduce.pca import Pca
from dmi_connector.reduce.pq import ProductQuantisation
from dmi_connector.reduce.probe import Probe
from dmi_connector.reduce.projection import RandomProjection
from dmi_connector.reduce.rounding import Round
from dmi_connector.reduce.topk import TopK

__all__ = [
    "KINDS",
    "MODES",
    "Keeps",
    "ReduceError",
    "Reduction",
    "forms",
    "from_settings",
    "parse",
    "parse_projection",
    "summaries",
]

KINDS: dict[str, type[Reduction]] = {
    c.kind: c
    for c in (Int8, Fp8, Round, TopK, RandomProjection, CountSketch, Pca, ProductQuantisation, AttentionSummary)
}
"""All reductions by name."""
STORED: dict[str, type[Reduction]] = {c.kind: c for c in (ChannelInt8, ChannelProjection, Probe, Latents)}
"""Further reductions in stores. The option `reduce` names them in another way (FITTED), or not at all."""
FITTED: dict[str, type[Reduction]] = {"int8": ChannelInt8, "rp": ChannelProjection}
"""{name: the reduction that replaces it if its brackets contain "channel=FILE"}."""
_CHANNEL = re.compile(r"(^|,)\s*channel\s*(=|,|$)")
_SPEC = re.compile(r"\s*(\w+)\s*(?:\((.*)\))?\s*", re.DOTALL)


def parse(spec: str) -> Reduction | None:
    """The reduction that a setting names; None for "none". For a mode, `bind` of the result returns the reduction.

    Raises ReduceError that names the error and the choices.
    """
    match = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
    if match is None:
        raise ReduceError(f"reduce: {spec!r} is not valid; write one of none, {', '.join(KINDS)}, as in 'topk(64)'")
    kind, inside = match[1], match[2]
    if kind == "none" or kind in MODES:
        if inside is not None:
            raise ReduceError(f"reduce: {spec!r} is not valid; {kind} takes no brackets, write {kind!r}")
        return MODES.get(kind)
    if kind not in KINDS:
        refuse_sketch(spec)
        raise ReduceError(f"reduce: {kind!r} is unknown; use one of none, {', '.join([*KINDS, *MODES])}")
    named = FITTED[kind] if kind in FITTED and _CHANNEL.search(inside or "") else KINDS[kind]
    return named.from_text(inside or "")


def parse_projection(spec: str) -> RandomProjection:
    """The projection that `dmi fit-scales --project` names. Raises ReduceError for another reduction."""
    found = parse(spec)
    if not isinstance(found, RandomProjection) or found.needs_file:
        raise ReduceError(f"--project {spec} is not valid; give a projection, such as rp(512)")
    return found


def forms() -> list[str]:
    """The forms of each reduction in settings."""
    return [form for kind in KINDS.values() for form in kind.forms]


def summaries() -> dict[str, type[Reduction]]:
    """{hook that is stored only as a summary: its reduction}; see `Reduction.only`."""
    return {hook: kind for kind in KINDS.values() for hook in kind.only}


def from_settings(settings: Mapping[str, Any]) -> Reduction:
    """Rebuild a reduction from the settings in a store (`Reduction.settings`). Raises ReduceError."""
    values = dict(settings)
    kind = values.pop("kind", None)
    known = KINDS | STORED
    if kind not in known:
        raise ReduceError(f"reduction {kind!r} is unknown to this version; known: {', '.join(known)}")
    return known[kind](**values)
