# SPDX-License-Identifier: Apache-2.0
"""The manifest of `dmi run`: which row of its input each store of a directory is of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MANIFESTS = "manifest*.jsonl"
"""Names of the manifests in the directory of a run: one, or one for each share."""


def read_manifest(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a manifest, in the order of its lines. Lines that cannot be parsed are skipped."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and isinstance(entry.get("key"), str):
                yield entry
