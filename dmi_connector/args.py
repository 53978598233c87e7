# SPDX-License-Identifier: Apache-2.0
"""Engine arguments that switch capture on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from dmi_connector.hooks import check_names
from dmi_connector.option_values import OptionError
from dmi_connector.settings import POOL, ServerOptions

MAX_BATCH = 65536
"""A batch size that no vLLM engine exceeds."""
EXTRACT_HIDDEN_STATES = "extract_hidden_states"
"""Method of vLLM's speculative config. With it, rows are kept in the cache layer of vLLM's draft model."""
PLACEHOLDER_LAYERS = [1]
"""Layer ids in the speculative config. vLLM requires at least one. The id has no effect."""
NO_DRAFTS = [[1, MAX_BATCH, 0]]
"""Schedule of draft tokens (`num_speculative_tokens_per_batch_size`): none at any batch size."""
_DRAFT = {
    "method": EXTRACT_HIDDEN_STATES,
    "num_speculative_tokens": 1,
    "num_speculative_tokens_per_batch_size": NO_DRAFTS,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": PLACEHOLDER_LAYERS}},
}
OWNER_ARGS: dict[str, dict[str, Any]] = {"draft": {"speculative_config": _DRAFT}, "target": {}, POOL: {}}
"""Owner of rows -> engine arguments that it needs besides `kv_transfer_config`."""
OWNERS = tuple(OWNER_ARGS)
CONNECTOR, CONNECTOR_MODULE = "DMIConnector", "dmi_connector.engine.connector"
"""Class and module of the connector, as vLLM's `kv_transfer_config` names them."""
POOL_CONNECTOR = "DMIPoolConnector"
"""Class of the connector for owner "pool", in the same module. With it, vLLM's hybrid KV cache manager stays on."""
CONNECTORS = (CONNECTOR, POOL_CONNECTOR)


def capture_args(
    hooks: str | Iterable[str] = "hidden-states",
    store_dir: str | os.PathLike[str] = "captures",
    owner: str = "draft",
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Keyword arguments for `vllm.LLM` that switch capture on. `vllm serve` takes each as a flag with a JSON value.

    hooks: the selection, as in "hidden-states,mlp_post@10-20,-logits", or a list of its items. store_dir: directory of
    the stores. options: the other fields of `ServerOptions`. owner: where rows are kept until they are copied.

    - "draft": in the cache layer of vLLM's draft model (method extract_hidden_states). Returns `speculative_config` and
      `kv_transfer_config`.
    - "target": in a cache layer of the served model. Returns `kv_transfer_config`.
    - "pool": in memory beside vLLM's cache. Returns `kv_transfer_config`.

    Raises OptionError for a bad option. Raises SelectionError for an unknown hook, and for a probe that `hooks` does
    not select. The engine checks at its start whether the model has these hooks and layers.
    """
    if owner not in OWNERS:
        raise OptionError(f"owner: {owner!r} is unknown; choose one of {', '.join(OWNERS)}")
    selection = list(hooks) if isinstance(hooks, Iterable) and not isinstance(hooks, str | Mapping) else hooks
    directory = os.fspath(store_dir) if isinstance(store_dir, os.PathLike) else store_dir
    extra = {"hooks": selection, "store_dir": directory, **options}
    if isinstance(given := options.get("probes"), dict):
        extra["probes"] = {n: os.fspath(file) if isinstance(file, os.PathLike) else file for n, file in given.items()}
    if owner == POOL:
        extra["owner"] = POOL
    parsed = ServerOptions.parse(extra)
    extra["store_dir"] = parsed.store_dir  # absolute: the engine may run in another directory
    check_names(parsed.hooks, [name for name, _ in parsed.probes])
    transfer = {
        "kv_connector": POOL_CONNECTOR if owner == POOL else CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }
    return {**deepcopy(OWNER_ARGS[owner]), "kv_transfer_config": transfer}
