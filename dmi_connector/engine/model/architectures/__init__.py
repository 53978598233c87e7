# SPDX-License-Identifier: Apache-2.0
"""The table of architectures. A row says which modules of a model are tapped. docs/HOOKS.md says how to add a row."""

from __future__ import annotations

from dmi_connector.engine.model.architectures.backend import BACKEND, OWN
from dmi_connector.engine.model.architectures.base import FORWARD, TRANSFORMERS, TRANSFORMERS_CLASSES, Architecture
from dmi_connector.engine.model.architectures.dense import DENSE
from dmi_connector.engine.model.architectures.experts import EXPERTS
from dmi_connector.engine.model.architectures.hybrids import HYBRIDS
from dmi_connector.engine.model.architectures.latent import LATENT, Latent
from dmi_connector.engine.model.architectures.mixed import MIXED, Mixed
from dmi_connector.engine.model.architectures.vision import wrappers

__all__ = [
    "ARCHITECTURES",
    "FORWARD",
    "OWN_CLASSES",
    "TRANSFORMERS",
    "TRANSFORMERS_CLASSES",
    "Architecture",
    "Latent",
    "Mixed",
    "register_architecture",
]

_TEXT = (*DENSE, *EXPERTS, *LATENT, *MIXED, *HYBRIDS, *BACKEND)
ARCHITECTURES: dict[str, Architecture] = {row.name: row for row in _TEXT}
ARCHITECTURES |= {row.name: row for row in wrappers(ARCHITECTURES)}
"""The table: name of an architecture, as in a model's `config.json` -> its row."""

OWN_CLASSES: dict[str, Architecture] = {row.name: row for row in OWN}
"""Rows for classes that vLLM 0.31 has and 0.32 does not. With 0.31 they replace rows of ARCHITECTURES (plugin.py)."""


def register_architecture(row: Architecture) -> None:
    """Add an architecture to the table, or replace it. Call this from your own `vllm.general_plugins` entry point."""
    from vllm.model_executor.models import ModelRegistry

    ARCHITECTURES[row.name] = row
    ModelRegistry.register_model(row.name, f"dmi_connector.engine.models:{row.name}")
