# SPDX-License-Identifier: Apache-2.0
"""Frequent Directions: a sketch B of at most k rows. B^T B approximates A^T A, where A is a stream of rows.

Liberty, "Simple and deterministic matrix sketching", KDD 2013. Ghashami, Liberty, Phillips, Woodruff, "Frequent
Directions: simple and deterministic matrix sketching", SIAM Journal on Computing 45 (2016).
"""

from __future__ import annotations

from typing import Self

import numpy as np

from dmi_connector.option_values import whole_number


class FrequentDirections:
    """A sketch B [at most k, width] of the matrix A [count, width] of all rows passed to `update`.

    For each unit vector x: 0 <= |A x|² - |B x|² <= `error`. So the spectral norm of A^T A - B^T B is at most `error`.
    With Frobenius norms, `error` is at most (|A|² - |B|²) / (k + 1). It is also at most |A - A_j|² / (k + 1 - j) for
    each j from 0 to k, where A_j is the best approximation of A of rank j. If A has rank k or less, B^T B equals A^T A.
    All this holds up to the rounding of float32.

    This is the variant with a buffer of 2k rows (Ghashami et al., 2016, section 3.2). A full buffer is rotated to its
    right singular vectors. Then the square of singular value k + 1 is subtracted from the squares of the larger ones.
    The paper calls this a sketch of k + 1 rows, of which the last is always 0. The bounds are its Theorem 1.1. The
    result depends on the order of rows, but not on how they are divided among calls of `update`.

    k: maximum number of rows of B. width: number of values per row. count: number of rows of A. squared: |A|².
    not_finite: number of rows with a NaN or an infinity, which are not in A. The buffer takes 16 * k * width bytes
    (float64). Raises ValueError for a k or a width below 1, and if the buffer cannot be allocated.
    """

    def __init__(self, k: int, width: int) -> None:
        if min(whole_number(k) or 0, whole_number(width) or 0) < 1:
            raise ValueError(f"k {k!r}, width {width!r} are not valid; give 1 or more of each")
        self.k, self.width = k, width
        self.count, self.not_finite, self.squared = 0, 0, 0.0
        try:
            self._buffer = np.empty((2 * k, width))
        except (MemoryError, ValueError) as error:
            raise ValueError(f"k {k} needs {16 * k * width} bytes of memory per layer; give a smaller k") from error
        self._held, self._removed = 0, 0.0

    @classmethod
    def of(cls, k: int, rows: np.ndarray, error: float, squared: float, count: int, not_finite: int) -> Self:
        """Rebuild a sketch from its `rows` [n, width] with n <= k, and from its other attributes."""
        found = cls(k, rows.shape[1])
        found._append(rows)
        found._removed, found.squared, found.count, found.not_finite = error, squared, count, not_finite
        return found

    def update(self, rows: np.ndarray) -> None:
        """Add rows [n, width], converted to float32. Raises ValueError for another shape."""
        rows = np.asarray(rows, np.float32)
        if rows.ndim != 2 or rows.shape[1] != self.width:
            raise ValueError(f"rows of shape {rows.shape} do not fit; give rows of [n, {self.width}]")
        finite = np.isfinite(rows).all(1)
        if not finite.all():
            self.not_finite += int((~finite).sum())
            rows = rows[finite]
        self.count += len(rows)
        self.squared += float(np.square(rows, dtype=np.float64).sum())
        self._append(rows)

    def merge(self, other: FrequentDirections) -> None:
        """Add the rows of another sketch's B. The bounds then hold for the rows that either sketch was updated with.

        Raises ValueError if k or width differ.
        """
        if (self.k, self.width) != (other.k, other.width):
            raise ValueError(
                f"a sketch of k {other.k}, width {other.width} cannot be merged into one of k {self.k}, width "
                f"{self.width}; give sketches of the same k and width"
            )
        self.count, self.squared = self.count + other.count, self.squared + other.squared
        self.not_finite += other.not_finite
        self._removed += other._removed
        self._append(other._buffer[: other._held].copy())

    @property
    def rows(self) -> np.ndarray:
        """B: float32 [n, width] with n <= k. Its rows are orthogonal, in descending order of norm."""
        return self._shrunk()[0].astype(np.float32)

    @property
    def error(self) -> float:
        """The sum of the squares that were subtracted, one for each rotation of the buffer.

        It includes the rotation that reduces the buffer to `rows`.
        """
        return self._removed + self._shrunk()[1]

    def _append(self, rows: np.ndarray) -> None:
        while len(rows):
            if self._held == len(self._buffer):
                kept, removed = self._shrunk()
                self._buffer[: len(kept)], self._held = kept, len(kept)
                self._removed += removed
            part = rows[: len(self._buffer) - self._held]
            self._buffer[self._held : self._held + len(part)] = part
            self._held, rows = self._held + len(part), rows[len(part) :]

    def _shrunk(self) -> tuple[np.ndarray, float]:
        """(the buffer reduced to at most k rows, float64 [n, width]; what that subtracts from squared singular values).

        With H the rows in the buffer, the eigenvalues of H H^T are the squared singular values of H, and the
        eigenvectors are the left singular vectors. H H^T is at most 2k x 2k, so this is faster than an SVD.
        """
        held = self._buffer[: self._held]
        squares, vectors = np.linalg.eigh(held @ held.T)
        removed = max(float(squares[-self.k - 1]), 0.0) if len(held) > self.k else 0.0
        left = squares[::-1][: self.k] - removed
        left = left[left > 0]  # also drops eigenvalues that rounding made negative
        rotation = vectors[:, ::-1][:, : len(left)] * np.sqrt(left / (left + removed))
        return rotation.T @ held, removed
