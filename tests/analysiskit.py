# SPDX-License-Identifier: Apache-2.0
"""Stores with the activations of tiny random models, computed by transformers. No engine is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmi_connector.analysis.oracle.oracle_twins import ONCE
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Loss
from tests import storekit as kit

HOOKS = ("resid_pre", "attn_out", "mlp_out", "mlp_post", "q", "k", "q_rot", "k_rot", "resid_final", "logits")


def write_store(
    path: Path,
    oracle: Oracle,
    ids: Sequence[int],
    prompt_len: int,
    hooks: Sequence[str] = HOOKS,
    losses: Sequence[Loss] = (),
    **names: Any,
) -> Path:
    """Write a float32 store of one sequence. Logits begin at the last token of the prompt. Returns `path`.

    names: key and request id, passed to `storekit.Store.open`.
    """
    values = {name: rows for name, rows in oracle.run(ids).items() if name in hooks}
    config, arrays, stored = oracle.config, [], {}
    for name, rows in values.items():
        whole = rows[prompt_len - 1 :] if name == "logits" else rows
        layers = () if name in (*ONCE, "logits") else tuple(range(len(rows)))
        arrays.append(ArraySpec(name, "float32", layers, rows.shape[-1]))
        stored[name] = np.ascontiguousarray(whole).view("u4")
    heads = config.num_attention_heads
    attrs = {
        "model": config.name_or_path,
        "architecture": config.architectures[0],
        "num_layers": config.num_hidden_layers,
        "dtype": "float32",
        "versions": {"vllm": "0.32.0"},
        "dims": {
            "heads": heads,
            "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        },
        "prompt_len": prompt_len,
    }
    owner = kit.Store(16 << 20)
    try:
        record = owner.open(path, *arrays, attrs=attrs, codec="zstd", **names)
        owner.feed(record, stored, len(ids), ids=np.asarray(ids))
        if "logits" in stored:
            for i, row in enumerate(stored["logits"]):
                owner.put_rows(record, "logits", row[None], i, prompt_len - 1 + i)
        counts = {"logits": len(stored["logits"])} if "logits" in stored else {}
        owner.close(record, len(ids), counts, np.asarray(ids), losses)
        assert owner.flush(kit.PATIENCE), "the capture was not committed"
    finally:
        assert owner.shutdown(kit.PATIENCE)
    return path
