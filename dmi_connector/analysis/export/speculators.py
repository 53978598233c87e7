# SPDX-License-Identifier: Apache-2.0
"""Export of stores as the cached hidden states that speculators trains on: `hs_N.safetensors`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dmi_connector.analysis.export.progress import Done, Progress, export_each, refuse_later_part
from dmi_connector.analysis.export.residual_stream import chosen_ids, ids_of_all, layer_ids
from dmi_connector.analysis.export.safetensors import write_hidden_states
from dmi_connector.captures.capture import Capture
from dmi_connector.captures.captures import Captures
from dmi_connector.captures.finite import FiniteCheck
from dmi_connector.store.format.remote_path import Place


def training_ids(capture: Capture, layers: Sequence[int] | None) -> list[int]:
    """The layer ids to train on: auxiliary layers, then the last layer, whose hidden state is that of the verifier.

    layers: auxiliary layer ids in the order of training; None: all captured ids. Raises ValueError for ids that the
    store lacks.
    """
    known, last = _ids(capture.path, capture.attrs), capture.attrs["num_layers"]
    return [i for i in (known if layers is None else chosen_ids(capture, layers)) if i != last] + [last]


def _ids(store: Place, attrs: Mapping[str, Any]) -> list[int]:
    """The layer ids of a store. Raises ValueError if the last layer's id is missing, which the verifier needs."""
    known = layer_ids(store, attrs)
    if attrs.get("num_layers") not in known:
        raise ValueError(f"{store} lacks resid_final, the verifier's last hidden state; capture resid_final too")
    return known


def export(
    captures: Captures,
    out: Path,
    progress: Progress,
    finite: FiniteCheck,
    layers: Sequence[int] | None = None,
    number_by: str = "order",
) -> Done:
    """Write `out/hs_N.safetensors` for each store.

    A file holds `hidden_states` [tokens, layers, hidden] in the stored dtype, with the last layer last, and `token_ids`
    int64 [tokens]. N is the number of the capture, which speculators takes as the row of its data set. Stores without
    the first tokens of their request are left out.

    layers: auxiliary layer ids (see `residual_stream`), which all stores must have; None: those of the first store.
    number_by: see `number_captures`.
    """
    ids = ids_of_all(captures, _ids, layers)

    def write(capture: Capture, path: Path) -> None:
        refuse_later_part(capture)
        write_hidden_states(capture, path, training_ids(capture, ids), finite)

    settings = {"to": "speculators", "layers": ids}

    def path_of(number: int) -> Path:
        return Path(f"hs_{number}.safetensors")

    return export_each(captures, out, path_of, write, progress, settings, finite, number_by)
