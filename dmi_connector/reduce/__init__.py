# SPDX-License-Identifier: Apache-2.0
"""Reductions of hook rows. The GPU encodes a value before it is written to its row; the reader decodes it.

parse("int8"), parse("int8(affine)"), parse("int8(32)"), parse("fp8"), parse("round(4)"), parse("topk(64)"),
parse("topk(64,exact)"), parse("topk(64,sample=0)"), parse("rp(512)"), parse("rp(512,sign,seed=7)"),
parse("pca(basis.safetensors)"), parse("attn(8)"), parse("none")
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dmi_connector.reduce.attn import AttentionSummary
from dmi_connector.reduce.base import ReduceError, Reduction
from dmi_connector.reduce.fp8 import Fp8
from dmi_connector.reduce.int8 import Int8
from dmi_connector.reduce.pca import Pca
from dmi_connector.reduce.projection import DISTRIBUTIONS, RandomProjection
from dmi_connector.reduce.rounding import Round
from dmi_connector.reduce.topk import TopK

__all__ = ["KINDS", "ReduceError", "Reduction", "from_settings", "parse"]

KINDS: dict[str, type[Reduction]] = {
    c.kind: c for c in (Int8, Fp8, Round, TopK, RandomProjection, Pca, AttentionSummary)
}
_FLAGS: dict[str, dict[str, tuple[str, Any]]] = {
    "int8": {"affine": ("affine", True), "symmetric": ("affine", False)},
    "topk": {"exact": ("exact", True), "int8": ("exact", False)},
    "rp": {name: ("distribution", name) for name in DISTRIBUTIONS},
}
"""Words in the brackets of a kind: the field that each sets, and to what."""
_NUMBER = {"int8": "group", "round": "bits", "topk": "k", "rp": "k", "attn": "m"}
"""The field of a kind that a number without a name sets."""
_NAMED = {("rp", "seed"), ("topk", "sample")}
"""(kind, field) that is set by name only, as in seed=7."""
_SPEC = re.compile(r"\s*(\w+)\s*(?:\((.*)\))?\s*", re.DOTALL)


def parse(spec: str) -> Reduction | None:
    """The reduction that a setting names; None for "none". Raises ReduceError that names the error and the choices."""
    match = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
    if match is None:
        raise ReduceError(f"reduce: {spec!r} is not valid; write one of none, {', '.join(KINDS)}, as in 'topk(64)'")
    kind, inside = match[1], match[2]
    if kind == "none" and inside is None:
        return None
    if kind not in KINDS:
        raise ReduceError(f"reduce: {kind!r} is unknown; use one of none, {', '.join(KINDS)}")
    if kind == "pca":
        return Pca.from_text(inside or "")
    settings: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in (inside or "").split(","))):
        name, _, number = item.rpartition("=")
        if item in _FLAGS.get(kind, {}):
            field, value = _FLAGS[kind][item]
            settings[field] = value
        elif number.isdecimal() and (name in ("", _NUMBER.get(kind)) or (kind, name) in _NAMED):
            field = name or _NUMBER.get(kind, "")
            if not field:
                raise ReduceError(f"reduce: {kind} takes no number, but {spec!r} gives {item!r}; leave it out")
            settings[field] = int(number)
        else:
            known = [*_FLAGS.get(kind, {}), *([f"a number ({_NUMBER[kind]})"] if kind in _NUMBER else [])]
            known += [f"{name}=NUMBER" for of, name in sorted(_NAMED) if of == kind]
            raise ReduceError(f"reduce: {item!r} in {spec!r} is unknown; {kind} takes {', '.join(known) or 'nothing'}")
    if kind == "topk":
        settings.setdefault("sample", settings.get("k", TopK.k) // 4)
    return KINDS[kind](**settings)


def from_settings(settings: Mapping[str, Any]) -> Reduction:
    """The reduction that `Reduction.settings` described, as stores keep it. Raises ReduceError."""
    values = dict(settings)
    kind = values.pop("kind", None)
    if kind not in KINDS:
        raise ReduceError(f"reduction {kind!r} is unknown to this version; known: {', '.join(KINDS)}")
    return KINDS[kind](**values)
