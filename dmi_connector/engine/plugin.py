# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point: registers names, and lets processes of `dmi run` end with their parent.

In an engine without our connector, the registered model classes build vLLM's own models.
"""

from __future__ import annotations

import functools
import multiprocessing
import os

from dmi_connector.args import CONNECTOR_MODULE, CONNECTORS
from dmi_connector.store.format.locks import LIFE_LOCK, hold_life_lock


def register() -> None:
    """Register model classes and the connector by name. vLLM imports a class when it uses it.

    A process that an engine of `dmi run` started also holds the life lock (`LIFE_LOCK`), and is killed when its parent
    exits.
    """
    parent = multiprocessing.parent_process()
    if LIFE_LOCK in os.environ and parent is not None and parent.pid is not None:
        from dmi_connector.engine.offline.lifetime import end_with_parent

        end_with_parent(parent.pid)
        hold_life_lock()
    from vllm.model_executor.models import ModelRegistry

    from dmi_connector.engine.model.architectures import ARCHITECTURES, OWN_CLASSES, TRANSFORMERS, TRANSFORMERS_CLASSES
    from dmi_connector.engine.owners import OWNERS

    for name, row in OWN_CLASSES.items():  # only if this vLLM has the class itself
        if getattr(ModelRegistry.models.get(name), "module_name", TRANSFORMERS) == row.base.partition(":")[0]:
            ARCHITECTURES[name] = row
    for name, row in ARCHITECTURES.items():
        if not row.in_transformers:
            ModelRegistry.register_model(name, f"dmi_connector.engine.models:{name}")
    for name, model in list(ModelRegistry.models.items()):  # all names that the Transformers backend serves
        if getattr(model, "module_name", "") == TRANSFORMERS and model.class_name in TRANSFORMERS_CLASSES:
            ModelRegistry.register_model(name, f"dmi_connector.engine.models:{model.class_name}")
    for owner in OWNERS.values():
        for name in owner.models:
            ModelRegistry.register_model(name, f"dmi_connector.engine.models:{name}")
    _register_connector()


@functools.cache  # once per process: vLLM raises an error for a name that is registered
def _register_connector() -> None:
    """Let `kv_connector` name our connectors without their module, which vLLM imports if one of them is chosen."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in CONNECTORS:
        KVConnectorFactory.register_connector(name, CONNECTOR_MODULE, name)
