# SPDX-License-Identifier: Apache-2.0
"""Shapes of published models, for engines with random weights (`load_format` "dummy"): a config.json of each.

    python -m benchmarks.shapes DIR [--only gemma3,pythia]

Models with experts have fewer layers than the published ones, so that two engines fit one GPU of 80 GB.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import common

SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("shapes.json").read_text())
"""Name -> fields of the configuration."""


def write(name: str, folder: Path) -> Path:
    """Write config.json of a shape into `folder`/`name`, and return that directory."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**SHAPES[name], dtype="bfloat16")
    path = folder / name
    config.save_pretrained(path)
    return path


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    p = common.parser("benchmarks.shapes", __doc__)
    p.add_argument("dir", type=Path)
    p.add_argument("--only", default=",".join(SHAPES), help="comma-separated (default: %(default)s)")
    args = p.parse_args(argv)
    for name in args.only.split(","):
        if name not in SHAPES:
            p.error(f"--only: {name!r} is unknown; choose from {', '.join(SHAPES)}")
        print(write(name, args.dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
