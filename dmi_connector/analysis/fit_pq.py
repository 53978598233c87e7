# SPDX-License-Identifier: Apache-2.0
"""`dmi fit-pq`: the codebooks of pq(file), from captured hooks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

try:
    import torch
except ImportError as error:
    raise ImportError("fit-pq: torch is not installed; install dmi_connector[torch]") from error

from dmi_connector.analysis.fit_rows import LayerFit, fit_file
from dmi_connector.option_values import whole_number
from dmi_connector.reduce.codebooks import BITS, Codebooks, centroids_of
from dmi_connector.store.format.remote_path import Given

ROWS = 16384
"""Default of the maximum number of rows per layer to fit on."""
_ROUNDS, _LEAST_GAIN = 20, 1e-3
"""Maximum number of iterations of k-means, and the relative decrease of the error below which k-means stops."""
_SEED = 0
_AT_ONCE = 1 << 22
"""Maximum number of distances per matrix product. As float32 these are 16 MiB, which fit into the CPU caches."""


def fit_pq(
    stores: Sequence[Given],
    hooks: Sequence[str],
    subvectors: int,
    out: str | os.PathLike[str],
    bits: int = 8,
    layers: Sequence[int] | None = None,
    model: str | None = None,
    rows: int = ROWS,
) -> dict[str, float]:
    """Fit codebooks for each layer of `hooks`, and write them to `out`, a new safetensors file.

    Each row is cut into `subvectors` parts, and k-means finds 2^bits - 1 centroids for each part. k-means uses at most
    `rows` rows per layer, which are drawn from all rows with a fixed seed. The stores are read once for each hook and
    layer. layers, model: as in `fit_pca`.

    Returns {"HOOK.LAYER": share of the variance of the drawn rows that is kept, up to 1}.

    Raises ValueError if `subvectors` is below 1 or does not divide the width, if `bits` is not 4 or 8, and for fewer
    rows than centroids. Raises the errors of `fit_file` too.
    """
    if bits not in BITS:
        raise ValueError(f"--bits {bits} is not valid; give {' or '.join(map(str, BITS))}")
    if (whole_number(subvectors) or 0) < 1:
        raise ValueError(f"--subvectors {subvectors!r} is not valid; give 1 or more")
    if rows < centroids_of(bits):
        raise ValueError(f"--rows {rows} is fewer than the {centroids_of(bits)} centroids of --bits {bits}; give more")

    def fit(hook: str, blocks: Iterator[np.ndarray]) -> LayerFit:
        sample = _sample(blocks, rows)
        width = sample.shape[1]
        if len(sample) and width % subvectors:
            raise ValueError(f"--subvectors {subvectors} does not divide the {width} values of {hook}; give a divisor")
        if len(sample) < centroids_of(bits):
            raise ValueError(
                f"fit-pq: {len(sample)} rows of {hook} are fewer than the {centroids_of(bits)} centroids of --bits"
                f" {bits}; capture more tokens{', or give --bits 4' if bits > 4 else ''}"
            )
        centroids, error = k_means(sample.reshape(len(sample), subvectors, -1), centroids_of(bits))
        spread = float(np.square(sample - sample.mean(0)).sum(dtype=np.float64))
        about = {"width": width, "m": subvectors, "bits": bits}
        return LayerFit({"centroids": centroids}, about, 1 - error / spread if spread else 1.0)

    return fit_file(Codebooks, stores, hooks, out, layers, model, fit)


def _sample(blocks: Iterator[np.ndarray], most: int) -> np.ndarray:
    """At most `most` rows, float32 [n, width], each with the same probability."""
    draw = np.random.default_rng(_SEED)
    keys, rows = np.zeros(0), np.zeros((0, 0), np.float32)
    for block in blocks:
        keys = np.append(keys, draw.random(len(block)))
        rows = np.concatenate([rows, block.astype(np.float32)]) if rows.size else block.astype(np.float32)
        if len(keys) > most:
            kept = np.sort(np.argpartition(keys, most)[:most])
            keys, rows = keys[kept], rows[kept]
    return rows


def k_means(rows: np.ndarray, count: int) -> tuple[np.ndarray, float]:
    """k-means of each of the m sub-vectors of float32 rows [n, m, size], n >= count.

    A centroid without a row is moved to the row that is farthest from its own centroid.

    Returns (centroids float32 [m, count, size], sum of the squared distances of all rows to their centroids).
    """
    x = torch.from_numpy(np.ascontiguousarray(rows.swapaxes(0, 1)))
    parts = x.split(max(1, _AT_ONCE // (x.shape[1] * count)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # parts run in parallel, because their operations are too small for several threads
    try:
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(lambda part: _k_means(part, _first(part, count)), parts))
    finally:
        torch.set_num_threads(threads)
    return torch.cat([centroids for centroids, _ in found]).numpy(), sum(error for _, error in found)


def _first(x: torch.Tensor, count: int) -> torch.Tensor:
    """Initial centroids [m, count, size], drawn from the rows of x [m, n, size] with k-means++ (Arthur and
    Vassilvitskii, 2007).

    The probability of a row is proportional to its squared distance from the nearest centroid drawn before.
    """
    generator = torch.Generator().manual_seed(_SEED)
    norms, squares, found = x.square().sum(2), torch.ones(x.shape[:2]), []
    for number in range(count):
        sums = squares.cumsum(1)
        drawn = torch.searchsorted(sums, torch.rand(len(x), 1, generator=generator) * sums[:, -1:])
        found.append(x.gather(1, drawn.clamp(max=x.shape[1] - 1)[..., None].expand(-1, -1, x.shape[2])))
        own = norms + found[-1].square().sum(2) - 2 * (x @ found[-1].transpose(1, 2))[..., 0]
        squares = torch.minimum(squares, own.clamp(min=0)) if number else own.clamp(min=0)
    return torch.cat(found, 1)


def _k_means(x: torch.Tensor, centroids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """k-means of x [m, n, size], from the initial centroids [m, count, size]. Returns as `k_means`."""
    norms, before = x.square().sum(2), float("inf")
    with_one = torch.nn.functional.pad(x, (0, 1), value=1)
    for _ in range(_ROUNDS):
        nearest, squares = _nearest(with_one, norms, centroids)
        error = float(squares.sum(dtype=torch.float64))
        if error >= (1 - _LEAST_GAIN) * before:
            break
        before = error
        sums = torch.zeros_like(centroids).scatter_add_(1, nearest[..., None].expand_as(x), x)
        counts = torch.zeros(centroids.shape[:2]).scatter_add_(1, nearest, torch.ones_like(squares))
        far = squares.topk(centroids.shape[1], dim=1).indices
        empty = counts == 0
        spare = far.gather(1, (empty.cumsum(1) - 1).clamp(min=0))
        moved = x.gather(1, spare[..., None].expand_as(centroids))
        centroids = torch.where(empty[..., None], moved, sums / counts.clamp(min=1)[..., None])
    own = centroids.gather(1, _nearest(with_one, norms, centroids)[0][..., None].expand_as(x))
    return centroids, float((x - own).square().sum(dtype=torch.float64))


def _nearest(with_one: torch.Tensor, norms: torch.Tensor, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(index of the nearest centroid, squared distance to it), [m, n] each.

    with_one: x with a column of ones, [m, n, size + 1]. norms: squared norms of x.
    """
    halves = centroids.square().sum(2, keepdim=True) / 2
    least = (with_one @ torch.cat([-centroids, halves], 2).transpose(1, 2)).min(2)
    return least.indices, (norms + 2 * least.values).clamp(min=0)
