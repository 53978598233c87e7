# SPDX-License-Identifier: Apache-2.0
"""The plugin's registrations in vLLM, in a process that has not imported the connector."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from dmi_connector.store.format.locks import LIFE_LOCK, lock_alone
from tests import programs
from tests.storekit import until

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


def engine_process(lock: str, answers: Any) -> None:
    """A child of multiprocessing, as vLLM's engine process is one: it loads our plugin first."""
    os.environ[LIFE_LOCK] = lock
    from dmi_connector.engine.plugin import register

    register()
    with lock_alone(lock) as alone:
        answers.put(alone)
    time.sleep(10**6)


def start_engine(lock: str) -> None:
    """Start an engine process, say whether the lock was free there, and wait for ever."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    context.Process(target=engine_process, args=(lock, answers)).start()
    print(answers.get(), flush=True)
    time.sleep(10**6)


def test_the_plugin_ties_engine_processes_to_the_run(tmp_path: Path) -> None:
    """The process that starts them is killed. Its child ends, and with it the lock."""
    lock = tmp_path / "life"
    lock.touch()
    code = f"from tests.unit.engine.test_plugin import start_engine; start_engine({str(lock)!r})"
    read, write = os.pipe()
    with open(read, "rb") as printed:
        with open(write, "wb") as out, (tmp_path / "log").open("wb") as log:
            parent = programs.Program([sys.executable, "-c", code], stdout=out, stderr=log)
        assert printed.readline() == b"False\n", "the child holds the lock"
        parent.kill()
        assert printed.read() == b"", "the child ends too"
    until(lambda: is_free(lock))
    parent.wait()


def is_free(lock: Path) -> bool:
    with lock_alone(lock) as alone:
        return alone
