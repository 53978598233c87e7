# SPDX-License-Identifier: Apache-2.0
"""What one engine captures, worked out once from vLLM's config and shared by models, rows and connector."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dmi_connector.engine.architectures import ARCHITECTURES, Architecture
from dmi_connector.hooks import ModelDims, Selection, parse_selection
from dmi_connector.layout import Reductions, RowLayout, hook_reductions, row_layout
from dmi_connector.reduce.basis import load
from dmi_connector.reduce.pca import Pca
from dmi_connector.settings import ServerOptions
from dmi_connector.store.bases import keep_copy
from dmi_connector.store.paths import make_directory

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONNECTOR = "DMIConnector"
CONNECTOR_MODULE = "dmi_connector.engine.connector"
EHS = "extract_hidden_states"


@dataclass(frozen=True)
class CaptureContext:
    """Selection, layout and owner of the rows ("draft" or "target") for one engine."""

    options: ServerOptions
    arch: Architecture
    dims: ModelDims
    selection: Selection
    layout: RowLayout
    dtype: str
    tp: int
    owner: str

    @property
    def layer_name(self) -> str:
        """Name of the cache layer; vLLM reads exactly one integer out of it and sorts layers by it."""
        return f"dmi_rows.{self.dims.layers}"

    @property
    def fingerprint(self) -> str:
        """What of this changes the compiled graph: goes into vLLM's compile hash."""
        reduced = {s.hook: s.reduction.settings() for s in self.layout.segments if s.reduction is not None}
        return f"{self.owner};{self.dtype};tp{self.tp};row{self.layout.row_bytes};{self.selection};{reduced}"


def is_active(vllm_config: VllmConfig) -> bool:
    """Whether this engine runs with our connector."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR


def capture_context(vllm_config: VllmConfig) -> CaptureContext:
    """Build the context, refusing what cannot work with a ValueError that names option, value and fix."""
    from dmi_connector.engine import contract

    contract.check(vllm_config)
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    options = ServerOptions.parse(transfer.kv_connector_extra_config or {})
    model = vllm_config.model_config
    arch = ARCHITECTURES.get(model.architecture)
    if arch is None:
        raise ValueError(
            f"model: architecture {model.architecture!r} has no row of hooks; known: {', '.join(ARCHITECTURES)}. "
            "Adding one takes a few lines: see docs/MODELS.md"
        )
    dims = arch.dims(model.hf_text_config)
    selection = parse_selection(options.hooks, dims)
    if "logits" in selection.hooks:
        contract.check_logits(vllm_config)
    dtype = str(model.dtype).removeprefix("torch.")
    tp = vllm_config.parallel_config.tensor_parallel_size
    owner = "draft" if _is_ehs(vllm_config) else "target"
    _check_store_dir(options)
    reductions = hook_reductions(options.reduce, selection, dims, tp)
    if reductions:
        contract.check_reductions(vllm_config)
    if options.sink == "disk":
        _keep_bases(options, reductions)
    layout = row_layout(selection, dims, dtype, tp, reductions)
    return CaptureContext(options, arch, dims, selection, layout, dtype, tp, owner)


def _is_ehs(vllm_config: VllmConfig) -> bool:
    speculative: Any = vllm_config.speculative_config
    return speculative is not None and speculative.method == EHS


def _keep_bases(options: ServerOptions, reductions: Reductions) -> None:
    for source in {r.source for r in reductions.values() if isinstance(r, Pca)}:
        try:
            keep_copy(load(source), options.store_dir, options.file_mode)
        except OSError as error:
            raise ValueError(f"reduce: {source} cannot be copied to {options.store_dir!r} ({error})") from error


def _check_store_dir(options: ServerOptions) -> None:
    if options.sink != "disk":
        return
    try:
        make_directory(options.store_dir, options.file_mode)
    except OSError as error:
        raise ValueError(f"store_dir: {options.store_dir!r} cannot be created ({error}); choose another") from error
    if not os.access(options.store_dir, os.W_OK | os.X_OK):
        raise ValueError(f"store_dir: {options.store_dir!r} is not writable by this user; choose another")
    for root in options.save_path_roots:
        if not os.path.isdir(root):
            raise ValueError(f"save_path_roots: {root!r} is no directory; create it or leave it out")
