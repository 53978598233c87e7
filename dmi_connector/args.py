# SPDX-License-Identifier: Apache-2.0
"""Engine arguments that switch capture on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from dmi_connector.hooks import check_names
from dmi_connector.option_values import OptionError
from dmi_connector.settings import POOL, ServerOptions

MAX_BATCH = 65536
"""A batch size that no vLLM engine exceeds."""
EXTRACT_HIDDEN_STATES = "extract_hidden_states"
"""The method of vLLM's speculative config under which the draft owns the rows."""
PLACEHOLDER_LAYERS = [1]
"""Layer ids in that config. vLLM requires at least one id. They have no effect, since `hooks` chooses the layers."""
_DRAFT = {
    "method": EXTRACT_HIDDEN_STATES,
    "num_speculative_tokens": 1,
    "num_speculative_tokens_per_batch_size": [[1, MAX_BATCH, 0]],  # no drafts at any batch size
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": PLACEHOLDER_LAYERS}},
}
OWNER_ARGS: dict[str, dict[str, Any]] = {"draft": {"speculative_config": _DRAFT}, "target": {}, POOL: {}}
"""Engine arguments that each owner of the rows needs besides the connector. `engine/owners/` has a class for each."""
OWNERS = tuple(OWNER_ARGS)
CONNECTOR, CONNECTOR_MODULE = "DMIConnector", "dmi_connector.engine.connector"
"""The connector's name and module in vLLM's options."""
POOL_CONNECTOR = "DMIPoolConnector"
"""The connector of owner "pool", in the same module. With it vLLM keeps its hybrid cache manager on."""
CONNECTORS = (CONNECTOR, POOL_CONNECTOR)


def capture_args(
    hooks: str | Iterable[str] = "hidden-states",
    store_dir: str | os.PathLike[str] = "captures",
    owner: str = "draft",
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Arguments for `vllm.LLM`, which are also the JSON of two flags of `vllm serve`.

    hooks: the selection, as in "hidden-states,mlp_post@10-20,-logits", or a list. store_dir: where stores are written.
    owner: "draft" gives `speculative_config` (vLLM's extract_hidden_states path, whose draft model owns the rows) and
    `kv_transfer_config`; "target" gives only `kv_transfer_config`, and the served model owns the rows. "pool" gives
    only `kv_transfer_config` too, and rows are in separate memory. options: the other fields of `ServerOptions`.

    Raises OptionError for a bad option, and SelectionError for a hook that no model has. The hooks and
    layers of the model are checked when the engine starts.
    """
    if owner not in OWNERS:
        raise OptionError(f"owner: {owner!r} is unknown; choose one of {', '.join(OWNERS)}")
    selection = hooks if isinstance(hooks, str) else list(hooks)
    extra = {"hooks": selection, "store_dir": os.path.abspath(store_dir), **options}
    if isinstance(given := options.get("probes"), dict):
        extra["probes"] = {n: os.fspath(file) if isinstance(file, os.PathLike) else file for n, file in given.items()}
    if owner == POOL:
        extra["owner"] = POOL
    parsed = ServerOptions.parse(extra)
    check_names(parsed.hooks, [name for name, _ in parsed.probes])
    transfer = {
        "kv_connector": POOL_CONNECTOR if owner == POOL else CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }
    return {**deepcopy(OWNER_ARGS[owner]), "kv_transfer_config": transfer}
