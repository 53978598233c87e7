# SPDX-License-Identifier: Apache-2.0
"""Reads the manifests of `dmi run`, which map the stores of a directory to rows of the input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MANIFESTS = "manifest*.jsonl"
"""Glob pattern of the manifests in the directory of a run: one manifest, or one per job of `--shard`."""


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
