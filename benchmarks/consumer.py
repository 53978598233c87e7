# SPDX-License-Identifier: Apache-2.0
"""What reads stores beside a busy engine: removes each finished store, and keeps every 16th for a check.

    python -m benchmarks.consumer STORE_DIR KEEP_DIR

Ends at the end of its standard input, and then prints how many it saw and kept, and how many were gone before it had
removed them (`vanished`: none, unless somebody else removes stores).
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
from pathlib import Path

EVERY = 16
_LOOK_S = 0.05


def consume(stores: Path, keep: Path) -> None:
    keep.mkdir(parents=True, exist_ok=True)
    seen = vanished = 0
    while True:
        over = bool(select.select([sys.stdin], [], [], _LOOK_S)[0])
        for entry in sorted(os.scandir(stores), key=lambda entry: entry.name):
            if entry.name.endswith(".zarr"):
                seen += 1
                try:
                    if seen % EVERY:
                        shutil.rmtree(entry.path)
                    else:
                        os.rename(entry.path, keep / entry.name)
                except FileNotFoundError:
                    vanished += 1
        if over:
            break
    print(json.dumps({"stores": seen, "kept": seen // EVERY, "vanished": vanished}))


if __name__ == "__main__":
    consume(Path(sys.argv[1]), Path(sys.argv[2]))
