# SPDX-License-Identifier: Apache-2.0
"""What a Frequent Directions sketch keeps of rows with a decaying spectrum, and its CPU time.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.sketch

Rows are made up: eigenvalue i of their covariance is 1 / i. The error of k rows B for the rows A is the spectral norm
of A^T A - B^T B, divided by the squared Frobenius norm of A.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np

from dmi_connector.analysis.frequent_directions import FrequentDirections
from dmi_connector.wording import format_bytes

_CHUNK = 128
"""Rows of an update, as in a store."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16_000, help="rows (default: %(default)s)")
    parser.add_argument("--width", type=int, default=2560, help="values per row (default: %(default)s)")
    parser.add_argument("-k", type=int, default=64, help="rows of the sketch (default: %(default)s)")
    options = parser.parse_args(argv)
    n, width, k = options.rows, options.width, options.k
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((width, width)))[0]
    rows = ((rng.standard_normal((n, width)) * np.arange(1, width + 1) ** -0.5) @ basis.T).astype(np.float32)
    found, seconds = FrequentDirections(k, width), []
    for first in range(0, n, _CHUNK):
        start = time.process_time()
        found.update(rows[first : first + _CHUNK])
        seconds.append(time.process_time() - start)
    gram = rows.T.astype(np.float64) @ rows
    total = np.trace(gram)

    def error(kept: np.ndarray) -> float:
        return float(np.abs(np.linalg.eigvalsh(gram - kept.T.astype(np.float64) @ kept)[[0, -1]]).max() / total)

    samples = [error(rows[np.random.default_rng(seed).permutation(n)[:k]] * (n / k) ** 0.5) for seed in range(3)]
    size = format_bytes(k * width * 4)
    print(f"| kept of {n:,} rows of {width:,} values | bytes | error |\n|---|---|---|")
    print(f"| all rows in bfloat16 | {format_bytes(n * width * 2)} | 0 |")
    print(f"| `dmi sketch -k {k}` | {size} | {error(found.rows):.4f} (bound {found.error / total:.4f}) |")
    print(f"| the best {k} rows (SVD) | {size} | {np.linalg.eigvalsh(gram)[-k - 1] / total:.4f} |")
    print(f"| {k} rows drawn at random, scaled | {size} | {min(samples):.4f} to {max(samples):.4f} |")
    print(f"\n{1e6 * np.median(seconds) / _CHUNK:.0f} us of CPU time per row (median of {len(seconds)} updates)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
