# SPDX-License-Identifier: Apache-2.0
"""Computes latents of a sparse autoencoder: the strongest latents of a token, or one latent's values and contexts."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.analysis.sparse_encoder import SparseEncoder
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.names import holds, hook_and_layer
from dmi_connector.captures.own_values import check_own_values
from dmi_connector.reduce.latents import hook_of
from dmi_connector.reduce.sparse_encoder import settings_of

LATENTS = "latents"
"""Name of an entry in the page's list of hooks. The value of a token is that of one latent."""
_ROWS = 256
"""Rows encoded at a time."""
_SECONDS = 2.0
"""Time limit for the rows that `contexts` reads."""
_BEFORE, _BEHIND = 8, 4
"""Number of tokens of a context before and after its token."""
_BINS = 24  # of a histogram


@dataclass(frozen=True)
class Latents:
    """An autoencoder. hook: hook and layer whose rows it encodes, as in "resid_pre@12"."""

    encoder: SparseEncoder
    hook: str

    @classmethod
    def load(cls, path: Path, hook: str | None) -> Latents:
        """Load an autoencoder. hook: None for the hook named in its settings (`cfg.json` or `hyperparams.json`).

        Raises ValueError if neither names a hook. Raises the errors of `SparseEncoder.load`.
        """
        encoder = SparseEncoder.load(path)
        named = hook or hook_of(settings_of(path))
        if not named:
            raise ValueError(f"--sae {path}: its files name no hook; give --sae-hook, such as resid_pre@12")
        return cls(encoder, named)

    def lacking(self, capture: Capture) -> str | None:
        """Why latents of a store cannot be computed; None if they can."""
        try:
            if not holds(self.hook, capture.attrs):
                return f"The autoencoder encodes {self.hook}, which the store lacks."
            hook, layer = hook_and_layer(self.hook, capture.attrs)
            check_own_values(capture, hook, layer)
            layers = capture.layers.get(hook, [])
            if layer is None and len(layers) > 1:
                return f"{hook} has the layers {layers}; name that of the autoencoder, as in --sae-hook {hook}@N."
        except (KeyError, ValueError) as error:
            return str(error.args[0])
        width, needed = self._rows(capture, slice(0, 0)).shape[-1], len(self.encoder.weight)
        return None if width == needed else f"The autoencoder takes rows of {needed} values; {self.hook} has {width}."

    def described(self) -> dict[str, Any]:
        """The entry of `LATENTS` among the hooks of a store, as JSON."""
        values = [{"name": "value", "index": "latent", "signed": False}]
        entry = {"name": LATENTS, "layers": [], "dtype": "float32", "width": self.encoder.latents, "reduce": None}
        return {**entry, "rows": None, "statistics": values}

    def strongest(self, capture: Capture, row: int, count: int) -> list[dict[str, Any]]:
        """At most `count` active latents of one token, the largest first, as JSON: [{latent, value}]."""
        values = self.encoder.encode(self._rows(capture, slice(row, row + 1)))[0]
        order = np.argsort(-values, kind="stable")[:count]
        return [{"latent": int(at), "value": float(values[at])} for at in order if values[at] > 0]

    def window(self, capture: Capture, latent: int, rows: slice) -> np.ndarray:
        """The values of one latent, float32 [tokens]. NaN for rows that the store lacks, or that are not finite."""
        return self._window(capture, latent, rows, None)

    def _window(self, capture: Capture, latent: int, rows: slice, until: float | None) -> np.ndarray:
        """Like `window`, but rows not encoded by the time `until` (time.monotonic()) are NaN. None: no limit."""
        one, at = self._only(latent)
        found = np.full(rows.stop - rows.start, np.nan, np.float32)
        for run in capture.runs(_ROWS):
            run = slice(max(run.start, rows.start), min(run.stop, rows.stop))
            if run.start < run.stop:
                values = self._rows(capture, run)
                encoded = one.encode(values)[:, at]
                encoded[~np.isfinite(values).all(-1)] = np.nan
                found[run.start - rows.start : run.stop - rows.start] = encoded
                if until is not None and time.monotonic() >= until:
                    break
        return found

    def contexts(self, stores: Iterable[Capture], latent: int, count: int) -> dict[str, Any]:
        """The tokens of many stores with the largest values of a latent, and a histogram of its values, as JSON.

        {found: [{store, row, value, first, ids, values}], rows, active, edges, counts, read}. Reading stops after
        _SECONDS, also within a store. found: at most `count` tokens, each with its context: the row of the first token,
        ids and values. rows: number of rows with a finite value. active: number of rows with a value above 0. edges,
        counts: the histogram of values above 0. read: number of stores that were opened.
        """
        until, best, values, read = time.monotonic() + _SECONDS, list[dict[str, Any]](), [], 0
        for capture in stores:
            with capture:
                if self.lacking(capture) is None:
                    mine = self._window(capture, latent, slice(0, int(capture.attrs["num_tokens"])), until)
                    values.append(mine[np.isfinite(mine)])
                    best += _contexts(capture, mine, count)
                    best = sorted(best, key=lambda one: -one["value"])[:count]
            read += 1
            if time.monotonic() >= until:
                break
        every = np.concatenate([*values, np.zeros(0, np.float32)])
        active = every[every > 0]
        counts, edges = np.histogram(active, _BINS, (0, float(active.max(initial=1e-6))))
        told = {"rows": len(every), "active": len(active), "read": read}
        return {"found": best, **told, "edges": edges.tolist(), "counts": counts.tolist()}

    def _rows(self, capture: Capture, rows: slice) -> np.ndarray:
        hook, layer = hook_and_layer(self.hook, capture.attrs)
        values = capture.numpy(hook, layer, rows)
        return values[0] if values.ndim == 3 else values

    def _only(self, latent: int) -> tuple[SparseEncoder, int]:
        """(encoder, index of `latent` in it). The encoder has only this latent, unless it is a top-k encoder."""
        full = self.encoder
        if not 0 <= latent < full.latents:
            raise ValueError(f"latent {latent} does not exist: the autoencoder has latents 0 to {full.latents - 1}")
        if full.k is not None:
            return full, latent
        at = slice(latent, latent + 1)
        threshold = None if full.threshold is None else full.threshold[at]
        gate = None if full.gate is None else (full.gate[0][at], full.gate[1][at])
        weight = np.ascontiguousarray(full.weight[:, at])
        return replace(full, weight=weight, bias=full.bias[at], threshold=threshold, gate=gate), 0


def _contexts(capture: Capture, values: np.ndarray, count: int) -> list[dict[str, Any]]:
    """The tokens of a store with the largest values above 0, each with the tokens around it. count: maximum number."""
    ids, found = capture.token_ids, []
    for row in np.argsort(-np.nan_to_num(values), kind="stable")[:count].tolist():
        if values[row] > 0:
            first, stop = max(0, row - _BEFORE), min(len(values), row + _BEHIND + 1)
            near = [float(v) if np.isfinite(v) else None for v in values[first:stop]]
            one = {"store": capture.path.name, "row": row, "value": float(values[row]), "first": first}
            found.append({**one, "ids": ids[first:stop].tolist(), "values": near})
    return found
