# SPDX-License-Identifier: Apache-2.0
"""Exports stores as SpecForge's offline features for training EAGLE-3 drafts: `rows_A-B/data_N.ckpt`."""

from __future__ import annotations

import gzip as gzip_file
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

try:
    import torch
except ImportError as error:
    raise ImportError("specforge: torch is not installed; install dmi_connector[torch]") from error

from dmi_connector.analysis.export.progress import Done, LeftOut, Progress, export_each, refuse_later_part
from dmi_connector.analysis.export.residual_stream import chosen_ids, ids_of_all, layer_ids, stream_rows
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.captures import Captures
from dmi_connector.captures.finite import FiniteCheck
from dmi_connector.captures.own_values import check_own_values
from dmi_connector.dtypes import as_torch
from dmi_connector.store.format.remote_path import Place

_GROUP = 2000
"""Files per directory, the same as in SpecForge's own scripts."""


def features(capture: Capture, layers: Sequence[int] | None, loss: str, finite: FiniteCheck) -> dict[str, torch.Tensor]:
    """The tensors of one request, as SpecForge reads them.

    input_ids, loss_mask: int64 [tokens]. hidden_state: [1, tokens, hidden], the output of the final norm, to which
    SpecForge applies the unembedding. aux_hidden_state: [1, tokens, layers x hidden], the concatenated auxiliary
    layers. Both hidden states have the stored dtype.

    layers: auxiliary layer ids, see `residual_stream`; None: all captured layers of resid_pre. loss: the tokens for
    which loss_mask is 1. "generated" selects generated tokens, "all" selects all tokens, and "spans" selects generated
    tokens and those in `dmi.loss_spans`.

    Raises ValueError for a store without final_ln or an auxiliary layer, and for projections. Raises LeftOut for a
    store without tokens to train on, without `loss_spans` for "spans", or without the first tokens of its request.
    Raises NotFinite for a NaN or an infinity, unless `finite` keeps them.
    """
    refuse_later_part(capture)
    known = _aux_ids(capture.path, capture.attrs)
    ids = chosen_ids(capture, known if layers is None else layers)
    mask = _mask(capture, loss)
    check_own_values(capture, "final_ln")
    stream = finite.check(capture.path, stream_rows(capture, ids, slice(None)))
    final = finite.check(capture.path, capture.numpy("final_ln", convert=False))
    return {
        "input_ids": torch.from_numpy(capture.token_ids.astype(np.int64)),
        "loss_mask": torch.from_numpy(mask),
        "hidden_state": as_torch(final)[None],
        "aux_hidden_state": as_torch(stream.reshape(1, len(stream), -1)),
    }


def _mask(capture: Capture, loss: str) -> np.ndarray:
    """The loss mask of a request, int64 [tokens]: 1 for tokens to train on. Raises LeftOut without such a token."""
    mask = np.ones(len(capture.token_ids), np.int64) if loss == "all" else (capture.phase == 1).astype(np.int64)
    if loss == "spans":
        if "loss_spans" not in capture.attrs:
            fix = "capture with dmi.loss_spans, or a column loss_mask of dmi run"
            raise LeftOut(capture.path, "no loss_spans", fix)
        for start, stop in capture.attrs["loss_spans"]:
            mask[start:stop] = 1
        if not mask.any():
            raise LeftOut(
                capture.path, "no token to train on", "its loss_spans are empty: use --loss all, or leave the store out"
            )
    if not mask.any():
        fix = "use --loss all, or capture with include_output_tokens"
        raise LeftOut(capture.path, "no generated token to train on", fix)
    return mask


def _aux_ids(store: Place, attrs: Mapping[str, Any]) -> list[int]:
    """The layer ids of resid_pre in a store. Raises ValueError for a store without resid_pre or final_ln."""
    if "final_ln" not in attrs["hooks"]:
        raise ValueError(f"{store} lacks final_ln, which SpecForge takes as target; capture final_ln too")
    known = [i for i in layer_ids(store, attrs) if i != attrs.get("num_layers")]
    if not known:
        raise ValueError(f"{store} lacks resid_pre, SpecForge's auxiliary layers; capture resid_pre too")
    return known


def _all_ids(store: Place, attrs: Mapping[str, Any]) -> list[int]:
    """All layer ids in a store, including that of resid_final. Raises ValueError as `_aux_ids` does."""
    _aux_ids(store, attrs)
    return layer_ids(store, attrs)


def export(
    captures: Captures,
    out: Path,
    progress: Progress,
    finite: FiniteCheck,
    layers: Sequence[int] | None = None,
    number_by: str = "order",
    loss: str = "generated",
    gzip: bool = False,
) -> Done:
    """Write `out/rows_A-B/data_N.ckpt` for each store, with the `features` of its request.

    N is the number of the capture. A directory has files A to B - 1. Stores without a token to train on, or without the
    first tokens of their request, are left out. layers: auxiliary layer ids, which all stores must have; None: those of
    the first store. number_by: see `number_captures`. loss: as in `features`. gzip: write compressed files, `.ckpt.gz`.
    """
    ids = ids_of_all(captures, _aux_ids if layers is None else _all_ids, layers)

    def path_of(number: int) -> Path:
        first = number // _GROUP * _GROUP
        return Path(f"rows_{first}-{first + _GROUP}/data_{number}.ckpt{'.gz' if gzip else ''}")

    def write(capture: Capture, path: Path) -> None:
        tensors = features(capture, ids, loss, finite)
        with _opened(path, gzip) as file:
            torch.save(tensors, file)

    settings = {"to": "specforge", "layers": ids, "loss": loss, "gzip": gzip}
    return export_each(captures, out, path_of, write, progress, settings, finite, number_by)


def _opened(path: Path, gzip: bool) -> Any:
    return gzip_file.open(path, "wb", compresslevel=1) if gzip else open(path, "wb")
