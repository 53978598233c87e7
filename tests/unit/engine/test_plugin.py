# SPDX-License-Identifier: Apache-2.0
"""The plugin's registrations in vLLM, in a process that has not imported the connector."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("vllm")

from tests import programs

SCRIPT = """
import sys
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.plugins import load_general_plugins
from dmi_connector.engine.plugin import register

MODULE = "dmi_connector.engine.connector"
load_general_plugins()
register()
register()
others = ("ExampleConnector", "ExampleHiddenStatesConnector", "MultiConnector")
assert all(KVConnectorFactory.get_connector_class_by_name(name).__module__.startswith("vllm.") for name in others)
assert MODULE not in sys.modules, "imported although another connector was chosen"
for path in (None, MODULE):
    for name in ("DMIConnector", "DMIPoolConnector"):
        chosen = KVTransferConfig(kv_connector=name, kv_connector_module_path=path, kv_role="kv_producer")
        found = KVConnectorFactory.get_connector_class(chosen)
        assert (found.__module__, found.__name__) == (MODULE, name), found
        assert KVConnectorFactory.supports_hma_config(chosen) == (name == "DMIPoolConnector")
print("all well")
"""


def test_the_name_of_the_connector_is_registered_and_its_module_imported_where_it_is_chosen() -> None:
    done = programs.run([sys.executable, "-c", SCRIPT], timeout=600)
    assert done.stdout.endswith("all well\n"), done.stderr
