# SPDX-License-Identifier: Apache-2.0
"""Capture the internal tensors of a model while vLLM serves it, and read them back."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dmi_connector.version import __version__

if TYPE_CHECKING:
    from dmi_connector.analysis.importance import importance
    from dmi_connector.analysis.training.token_dataset import TokenDataset as TokenDataset
    from dmi_connector.args import capture_args
    from dmi_connector.captures.capture import Capture, open_capture
    from dmi_connector.captures.captures import Captures, open_captures
    from dmi_connector.store.read.index import find_captures
    from dmi_connector.store.read.reader import CaptureIncomplete
    from dmi_connector.store.read.waiting import CaptureFailed

__all__ = [
    "Capture",
    "CaptureFailed",
    "CaptureIncomplete",
    "Captures",
    "__version__",
    "capture_args",
    "find_captures",
    "importance",
    "open_capture",
    "open_captures",
]

# TokenDataset needs torch. It is not in __all__, so `from dmi_connector import *` works without torch.
_HOME = {
    "TokenDataset": "dmi_connector.analysis.training.token_dataset",
    "capture_args": "dmi_connector.args",
    "Capture": "dmi_connector.captures.capture",
    "CaptureFailed": "dmi_connector.store.read.waiting",
    "CaptureIncomplete": "dmi_connector.store.read.reader",
    "Captures": "dmi_connector.captures.captures",
    "find_captures": "dmi_connector.store.read.index",
    "importance": "dmi_connector.analysis.importance",
    "open_capture": "dmi_connector.captures.capture",
    "open_captures": "dmi_connector.captures.captures",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name on first use, so that `import dmi_connector` needs neither vllm nor torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
