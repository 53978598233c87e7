# SPDX-License-Identifier: Apache-2.0
"""The option `probes`: "FILE" names the file of a probe, "FILE, sha256=HASH" that file with that content alone."""

from __future__ import annotations

import re

from dmi_connector.reduce.errors import ReduceError
from dmi_connector.reduce.probe import Probe

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_KEYS = ("sha256",)


def parse_probe(name: str, text: str) -> Probe:
    """The probe that an entry {name: text} of the option names. Reads its file. Raises ReduceError."""
    if not _NAME.fullmatch(name):
        raise ReduceError(f"probes: the name {name!r} is not valid; use letters, digits, '_' and '-', 64 at most")
    path, *rest = (part.strip() for part in text.split(","))
    given = dict(part.split("=", 1) for part in rest if "=" in part)
    if len(given) < len(rest) or (unknown := sorted(given.keys() - set(_KEYS))):
        wrong = unknown[0] if len(given) == len(rest) else rest
        raise ReduceError(
            f"probes: {wrong!r} in {text!r} of {name!r} is unknown; a file may be followed by "
            + " or ".join(f"{key}=..." for key in _KEYS)
        )
    probe = Probe.load(path)
    if (wanted := given.get("sha256", probe.sha256)) != probe.sha256:
        raise ReduceError(
            f"probes: {path} of {name!r} has the SHA-256 {probe.sha256}, not {wanted}; give the file with that hash, or"
            " this hash"
        )
    return probe
