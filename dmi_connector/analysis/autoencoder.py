# SPDX-License-Identifier: Apache-2.0
"""Measures of `dmi fidelity --sae`, which encode full rows and restored rows with a sparse autoencoder.

Restored rows were reduced, decoded, and mapped back into the space of the hook.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dmi_connector.hooks import ALIASES, HOOKS
from dmi_connector.reduce import ReduceError
from dmi_connector.reduce.latents import Latents
from dmi_connector.reduce.probe_option import parse_probe
from dmi_connector.reduce.sparse_encoder import SparseEncoder, settings_of, weights_file
from dmi_connector.reduce.tensors import FloatTensors

MEANINGS: Mapping[str, str] = {
    "latents": "share of a full row's active latents that are also active for the restored row, mean over rows",
    "sae_error": "share of the full rows' variance that the autoencoder does not explain if it encodes restored rows,"
    " minus that share if it encodes full rows",
}
"""{measure: its meaning}. A larger `sae_error` is worse. `sae_error` may be negative."""
_ROWS = 2048
"""Maximum number of rows to encode."""


@dataclass(frozen=True)
class Autoencoder:
    """A sparse autoencoder, and the hook and layer whose rows it encodes.

    hook, layer: from the option `--sae`, or from the autoencoder's settings. layer is None for a hook that exists once.
    decoder: (weight [latents, d_in], bias [d_in]), where d_in is the width of the rows. The decoder returns normalised
    rows. None if the files hold no such decoder. The decoder of a transcoder does not count, because it returns rows of
    another hook.
    """

    hook: str
    layer: int | None
    encoder: SparseEncoder
    decoder: tuple[np.ndarray, np.ndarray] | None

    @classmethod
    def load(cls, text: str) -> Autoencoder:
        """Load an autoencoder. text: as in the option `probes`, "DIR, hook=resid_post, layer=12".

        Raises ValueError if the text is not valid, names a probe, or names files that cannot be read.
        """
        try:
            found = parse_probe("sae", text)
        except ReduceError as error:
            words = str(error).replace("probes:", "--sae:", 1)
            words = words.replace("give a file of a probe", "give the file or directory of an autoencoder")
            raise ValueError(words) from error
        if not isinstance(found, Latents):
            raise ValueError(f"--sae: {text} is a probe; give the file or directory of an autoencoder")
        layer = found.layers[0] if found.layers else None
        encoder = SparseEncoder.load(found.path)
        return cls(ALIASES.get(found.source, found.source), layer, encoder, _decoder(found.path, encoder))

    def place(self, layers: int) -> tuple[str, int | None]:
        """(hook, layer) of the stored rows that the autoencoder encodes.

        `resid_post` of a layer is stored as `resid_pre` of the next layer, or as `resid_final` for the last layer.

        layers: number of layers of the model. Raises ValueError for an unknown hook, for a hook of several layers
        without a layer, and for a hook that exists once with a layer.
        """
        if self.hook == "resid_post" and self.layer is not None:
            return ("resid_final", None) if self.layer == layers - 1 else ("resid_pre", self.layer + 1)
        per_layer = self.hook == "resid_post" or (self.hook in HOOKS and HOOKS[self.hook].scope == "layer")
        if self.hook not in HOOKS and not per_layer:
            fix = "name a hook of docs/HOOKS.md, as in hook=resid_pre"
        elif per_layer and self.layer is None:
            fix = "add layer=NUMBER, as in layer=12"
        elif not per_layer and self.layer is not None:
            fix = "leave the layer out, because the hook exists once per model"
        else:
            return self.hook, self.layer
        where = "no layer" if self.layer is None else f"layer {self.layer}"
        raise ValueError(f"--sae: the autoencoder is of {self.hook} and {where}; {fix}")

    def agreement(self, rows: np.ndarray, restored: np.ndarray) -> dict[str, float]:
        """The measures of MEANINGS that can be computed, over at most 2,048 random rows. rows, restored: [n, d_in].

        Raises ValueError for rows of another width.
        """
        chosen = np.random.default_rng(0).permutation(len(rows))[:_ROWS]
        rows, restored = (x[chosen].astype(np.float32) for x in (rows, restored))
        active, after = (self.encoder.encode(x) > 0 for x in (rows, restored))
        counts = active.sum(1)
        kept = (active & after).sum(1)[counts > 0] / counts[counts > 0]
        found = {"latents": float(kept.mean()) if len(kept) else float("nan")}
        if self.decoder is not None:
            found["sae_error"] = self.unexplained(rows, restored) - self.unexplained(rows, rows)
        return found

    def unexplained(self, rows: np.ndarray, encoded: np.ndarray) -> float:
        """Share of the variance of normalised `rows` that the decoded latents of `encoded` do not explain.

        rows, encoded: [n, d_in]. Raises ValueError without a decoder.
        """
        if self.decoder is None:
            raise ValueError("--sae: the files hold no decoder of these rows, so there is no reconstruction error")
        weight, bias = self.decoder
        wanted = self.encoder.normed(rows)
        left = np.square(wanted - (self.encoder.encode(encoded) @ weight + bias), dtype=np.float64).sum()
        return float(left / np.square(wanted - wanted.mean(0), dtype=np.float64).sum())


def _decoder(path: str, encoder: SparseEncoder) -> tuple[np.ndarray, np.ndarray] | None:
    """Read `Autoencoder.decoder` from files of SAELens, sparsify or Gemma Scope.

    Returns None for files of Llama Scope, which scales rows in another way.
    """
    facts, tensors = settings_of(path), FloatTensors(weights_file(path))
    weight, bias = tensors.get("W_dec"), tensors.get("b_dec")
    if weight is None or bias is None or facts.get("transcode") or "norm_activation" in facts:
        return None
    if weight.shape != (encoder.latents, len(encoder.weight)) or bias.shape != (len(encoder.weight),):
        return None
    if facts.get("rescale_acts_by_decoder_norm"):  # the encoder's latents are multiplied by these norms
        weight = weight / np.linalg.norm(weight, axis=1, keepdims=True)
    return weight, bias
