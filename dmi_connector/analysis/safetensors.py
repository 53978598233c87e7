# SPDX-License-Identifier: Apache-2.0
"""Export of a store to safetensors, as vLLM's own connector writes hidden states."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dmi_connector.store.read.capture import Capture, open_capture
from dmi_connector.store.read.hook_names import Source

_SAFETENSORS_DTYPE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
_TOKENS_PER_STEP = 256
"""Rows converted at a time."""


def export_safetensors(
    store: str | os.PathLike[str], out: str | os.PathLike[str], layer_ids: Sequence[int] | None = None
) -> list[int]:
    """Write the file that vLLM's ExampleHiddenStatesConnector would have written for this request.

    The file holds `hidden_states` [tokens, layers, hidden] in the stored dtype and `token_ids` int64 [tokens]. It gets
    its name when it is whole.

    layer_ids: vLLM's auxiliary layer ids. An id below the number of layers is the residual stream entering that layer
    (resid_pre). The number of layers is the stream after the last one, before the final norm (resid_final). None: all
    that were captured. Returns the ids written.

    Raises ValueError if the store has no residual stream or lacks an id; CaptureIncomplete for an incomplete store.
    """
    capture = open_capture(store, timeout=0)
    sources = _residual_stream(capture)
    ids = sorted(sources) if layer_ids is None else sorted(set(layer_ids))
    lacking = [i for i in ids if i not in sources]
    if lacking or not ids:
        raise ValueError(
            f"layer_ids {lacking} are not in {store}: it has {sorted(sources)} (hooks resid_pre, resid_final)"
        )
    arrays = {s.array: capture.array(s.array) for s in sources.values()}
    name = str(capture.attrs["hooks"][sources[ids[0]].array]["dtype"])
    token_ids = capture.token_ids.astype("<i8")
    tokens, hidden = len(token_ids), arrays[sources[ids[0]].array].shape[-1]
    itemsize = arrays[sources[ids[0]].array].dtype.itemsize
    size = tokens * len(ids) * hidden * itemsize
    # safetensors puts wider types first.
    header = {
        "token_ids": {"dtype": "I64", "shape": [tokens], "data_offsets": [0, token_ids.nbytes]},
        "hidden_states": {
            "dtype": _SAFETENSORS_DTYPE[name],
            "shape": [tokens, len(ids), hidden],
            "data_offsets": [token_ids.nbytes, token_ids.nbytes + size],
        },
    }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    temporary = Path(f"{os.fspath(out)}.partial")
    with open(temporary, "wb") as f:
        f.write(len(head).to_bytes(8, "little") + head + token_ids.tobytes())
        for first in range(0, tokens, _TOKENS_PER_STEP):
            rows = slice(first, min(tokens, first + _TOKENS_PER_STEP))
            read = {n: np.asarray(array[:, rows, :]) for n, array in arrays.items()}
            block = np.stack([read[sources[i].array][sources[i].index] for i in ids], axis=1)
            f.write(np.ascontiguousarray(block).tobytes())
    os.replace(temporary, out)
    return ids


def _residual_stream(capture: Capture) -> dict[int, Source]:
    hooks, found = capture.attrs["hooks"], {}
    if "resid_pre" in hooks:
        found = {layer: Source(layer, "resid_pre", i) for i, layer in enumerate(hooks["resid_pre"]["layers"])}
    if "resid_final" in hooks:
        if "num_layers" not in capture.attrs:
            raise ValueError(f"{capture.path} has no num_layers attribute: the id of resid_final is unknown")
        layers = int(capture.attrs["num_layers"])
        found[layers] = Source(layers, "resid_final", 0)
    return found
