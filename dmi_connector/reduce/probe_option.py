# SPDX-License-Identifier: Apache-2.0
"""Parses the option `probes`: a file of a probe or an autoencoder, the norm of rows, or their largest values.

Examples: "risk.safetensors"; "risk.safetensors, sha256=HASH" (only with this content); "sae_dir, hook=resid_pre,
layer=12, k=32"; of all layers: "norm(resid_pre)", "top(mlp_post)", "top(mlp_post,4)".
"""

from __future__ import annotations

import os
import re

from dmi_connector.reduce.base import MOST_DIGITS
from dmi_connector.reduce.errors import ReduceError
from dmi_connector.reduce.latents import Latents
from dmi_connector.reduce.probe import Probe
from dmi_connector.reduce.probe_file import is_probe

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_OF_ROWS = re.compile(r"norm\((\w+)\)|top\((\w+)(?:,\s*(\d{1,9}))?\)")
_NUMBERS = ("layer", "k")
_OF_ENCODERS = ("hook", *_NUMBERS)
"""Settings that may follow only an autoencoder. The file of a probe contains its hook and layers."""
_VALUES = {"sha256": "HASH", "hook": "NAME", "layer": "NUMBER", "k": "NUMBER"}
"""{setting: its value, for errors}."""


def parse_probe(name: str, text: str) -> Probe | Latents:
    """Make the probe of an entry {name: text} of the option. Reads its file. Raises ReduceError."""
    if not _NAME.fullmatch(name):
        raise ReduceError(f"probes: the name {name!r} is not valid; use letters, digits, '_' and '-', 64 at most")
    text = text.strip()
    if of_rows := _OF_ROWS.fullmatch(text):
        norm, top, k = of_rows.groups()
        return Probe.norm_of(norm, text) if norm else Probe.top_of(top, int(k or 1), text)
    path, *rest = (part.strip() for part in text.split(","))
    path = os.path.expanduser(path)
    encoder = os.path.exists(path) and not is_probe(path)
    found = None if encoder else Probe.load(path)  # before the settings, so that the error names a missing file
    known = ("sha256", *(_OF_ENCODERS if encoder else ()))
    given: dict[str, str] = {}
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals or key not in known or (key in _NUMBERS and not _is_number(value)):
            raise ReduceError(
                f"probes: {part!r} in {text!r} of {name!r} is not valid; this file may be followed by "
                + ", ".join(f"{key}={_VALUES[key]}" for key in known)
            )
        given[key] = value
    layer, k = (int(given[key]) if key in given else None for key in _NUMBERS)
    probe = found or Latents.load(path, given.get("hook"), layer, k)
    if (wanted := given.get("sha256", probe.sha256)) != probe.sha256:
        raise ReduceError(
            f"probes: {path} of {name!r} has the SHA-256 {probe.sha256}, not {wanted}; give the file with "
            "that hash, or the hash of this file"
        )
    return probe


def _is_number(value: str) -> bool:
    return value.isdecimal() and len(value) <= MOST_DIGITS
