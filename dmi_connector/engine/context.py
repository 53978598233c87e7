# SPDX-License-Identifier: Apache-2.0
"""`CaptureContext` describes what one engine captures. Each process computes it once, for its models and connector."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from dmi_connector.args import CONNECTORS, EXTRACT_HIDDEN_STATES
from dmi_connector.engine import contract
from dmi_connector.engine.features import features_of_hooks, may_sleep
from dmi_connector.engine.model.architectures import Architecture, Latent
from dmi_connector.engine.model.coverage import Coverage
from dmi_connector.engine.model.transformers_backend import row_of
from dmi_connector.engine.owners import owner_of
from dmi_connector.hooks import ModelDims, Selection, check_names, parse_selection
from dmi_connector.layout import Reductions, RowField, RowLayout, hook_reductions, row_layouts
from dmi_connector.probes import check_alerts, with_probes
from dmi_connector.reduce.probe import Probe
from dmi_connector.settings import ServerOptions
from dmi_connector.store.format.kept_files import BASES, PROBES, keep_copy
from dmi_connector.store.write.coordinator.directories import check_directories

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from dmi_connector.engine.owners.base import Owner


@dataclass(frozen=True)
class Drafting:
    """Speculative decoding in an engine that captures.

    method: as in `speculative_config`. most: maximum number of draft tokens per request and step
    (num_speculative_tokens). shares_modules: whether the draft may run modules of the target, such as its embedding.
    """

    method: str
    most: int
    shares_modules: bool


@dataclass(frozen=True)
class CaptureContext:
    """What one engine captures.

    layouts: the row layout of each rank. dtype: dtype of the model. tp: tensor-parallel size. rank: the rank of this
    process, 0 if it has none. may_sleep: whether vLLM may discard its caches (sleep mode). owner: the owner of the
    rows. block_scale: factor by which the output of a block is multiplied before it is added to the residual stream.
    embed_scale: factor of the embeddings. visual_layers: after each of the first `visual_layers` layers, visual
    features are added to the residual stream. drafting: the speculative decoding of the engine, or None. stages: the
    layers of each rank's pipeline stage, () without stages. The last stage is rank 0, because that stage has the logits
    and vLLM waits for its answer. coverage: which fields the taps of this process have written.
    """

    options: ServerOptions
    arch: Architecture
    dims: ModelDims
    selection: Selection
    layouts: tuple[RowLayout, ...]
    dtype: str
    tp: int
    owner: Owner
    rank: int = 0
    may_sleep: bool = False
    block_scale: float = 1.0
    embed_scale: float = 1.0
    visual_layers: int = 0
    drafting: Drafting | None = None
    stages: tuple[range, ...] = ()
    coverage: Coverage = field(default_factory=Coverage, compare=False, repr=False)

    @property
    def cache_layer(self) -> str:
        """Name of the cache layer of the rows. A name must contain exactly one integer, by which vLLM sorts layers."""
        return f"dmi_rows.{self.dims.layers}"

    @property
    def ranks(self) -> int:
        """Number of ranks that write a store."""
        return len(self.stages) or self.tp

    @property
    def here(self) -> range:
        """The layers that this process has."""
        return self.stages[self.rank] if self.stages else range(self.dims.layers)

    @property
    def first_stage(self) -> bool:
        """Whether this process embeds tokens."""
        return self.here.start == 0

    @property
    def last_stage(self) -> bool:
        """Whether this process has the final norm and the logits."""
        return self.here.stop == self.dims.layers

    @property
    def scored(self) -> bool:
        """Whether rows hold scores of a probe."""
        return any(layout.scored for layout in self.layouts)

    @property
    def layout(self) -> RowLayout:
        """The rows of this process's rank."""
        return self.layouts[self.rank]

    def field(self, hook: str, layer: int) -> RowField | None:
        """The field of a hook and layer, in the layout of a rank that writes it. None if it is not selected."""
        return self.layouts[self.layout.writer.get((hook, layer), self.rank)].find(hook, layer)

    @property
    def fingerprint(self) -> str:
        """All settings that change the compiled graph, as text that vLLM's compile hash includes."""
        fields = [f for layout in self.layouts for f in layout.fields]
        settings = {f.hook: f.reduction.settings() for f in fields if f.reduction is not None}
        # The graph does not depend on the content of a file, such as the weights of a probe.
        reduced = {hook: {**found, "sha256": None} if "sha256" in found else found for hook, found in settings.items()}
        ranks = f"tp{self.tp}{sorted(self.layout.writer.items()) if self.ranks > 1 else ''}"
        return f"{self.owner.name};{self.dtype};{ranks};row{self.layout.row_bytes};{self.selection};{reduced}"


def is_active(vllm_config: VllmConfig) -> bool:
    """Whether this engine runs with our connector. Raises ValueError if it is used together with other connectors."""
    from dmi_connector.engine import refusals

    refusals.check_alone(vllm_config)
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector in CONNECTORS


_built: tuple[object, CaptureContext] | None = None
"""The last context of this process, with the `kv_transfer_config` that it was built from."""


def capture_context(vllm_config: VllmConfig) -> CaptureContext:
    """The context of an engine, which the target, the draft and both halves of the connector share.

    Raises ValueError for a configuration that is not supported. The message names the option, its value and the fix.
    """
    global _built
    transfer = vllm_config.kv_transfer_config
    if _built is None or _built[0] is not transfer or _built[1].rank != rank_here(_built[1].tp, len(_built[1].stages)):
        _built = transfer, _build(vllm_config)
    return _built[1]


def _build(vllm_config: VllmConfig) -> CaptureContext:
    """Check the configuration, make the store directory, copy files into it, and compute the selection and layout."""
    from dmi_connector.engine import refusals

    refusals.check(vllm_config)
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    options = ServerOptions.parse(transfer.kv_connector_extra_config or {})
    model = vllm_config.model_config
    arch = row_of(model).fit(model.hf_text_config)
    if isinstance(arch, Latent) and not model.use_mla:
        arch = arch.over_heads()
    refusals.check_attention(arch, model)
    dims = replace(arch.dims(model.hf_text_config), rope_axes=model.mrope_num_dims if model.uses_mrope else 0)
    tp, stages = vllm_config.parallel_config.tensor_parallel_size, _stages(vllm_config, dims.layers)
    dims, probes = with_probes(dims, options.probes, tp)
    check_alerts(options.probe_alerts, probes)
    check_names(options.hooks, [name for name, _ in options.probes])
    selection = parse_selection(options.hooks, dims)
    tapped = list(dict.fromkeys(dims.hooks[name].source or name for name in selection.hooks))
    contract.check_names(features_of_hooks(vllm_config, arch, tapped))
    if "logits" in selection.hooks:
        refusals.check_logits(vllm_config)
    dtype = str(model.dtype).removeprefix("torch.")
    refusals.check_ranks(arch, tapped, tp)
    refusals.check_stages(arch, dims, selection.hooks, options, stages)
    check_directories(options)
    chosen = hook_reductions(options.reduce, selection, dims, tp)
    reductions = {**chosen, **{name: probe for name, probe in probes.items() if name in selection.hooks}}
    if reductions:
        refusals.check_reductions(vllm_config, reductions)
    if options.probes:
        refusals.check_precision()
    if options.sink == "disk":
        _keep_files(options, reductions)
    layouts, rank = row_layouts(selection, dims, dtype, tp, reductions, stages), rank_here(tp, len(stages))
    header_first = bool(arch.language or (stages and stages[rank].start))
    coverage = Coverage(layouts[rank].fields, options.check == "poison", header_first)
    scales = arch.block_scale(model.hf_text_config), _embed_scale(arch, dims, model.dtype)
    rest = (may_sleep(model), *scales, arch.visual_layers(model.hf_config), _drafting(vllm_config), stages, coverage)
    owner, given = owner_of(vllm_config), transfer.kv_connector_extra_config or {}
    options = owner.options(options, given, layouts[rank].row_bytes)
    return CaptureContext(options, arch, dims, selection, layouts, dtype, tp, owner, rank, *rest)


def _stages(vllm_config: VllmConfig, layers: int) -> tuple[range, ...]:
    """`CaptureContext.stages` for a model with this number of layers."""
    from vllm.distributed.utils import get_pp_indices

    size = vllm_config.parallel_config.pipeline_parallel_size
    return tuple(range(*get_pp_indices(layers, stage, size)) for stage in reversed(range(size))) if size > 1 else ()


def rank_here(tp: int, stages: int) -> int:
    """The rank of this process, as `CaptureContext` numbers ranks. 0 in the scheduler's process.

    stages: number of pipeline stages, 0 without them.
    """
    from vllm.distributed.parallel_state import (
        get_pp_group,
        get_tensor_model_parallel_rank,
        model_parallel_is_initialized,
    )

    if max(tp, stages) == 1 or not model_parallel_is_initialized():
        return 0
    return stages - 1 - get_pp_group().rank_in_group if stages else get_tensor_model_parallel_rank()


def _embed_scale(arch: Architecture, dims: ModelDims, dtype: torch.dtype) -> float:
    """The factor of the embeddings, rounded to the model's dtype as in vLLM."""
    return float(torch.tensor(dims.hidden**0.5, dtype=dtype)) if arch.embed_scaled else 1.0


def _drafting(vllm_config: VllmConfig) -> Drafting | None:
    speculative: Any = vllm_config.speculative_config
    if speculative is None or speculative.method == EXTRACT_HIDDEN_STATES:
        return None
    return Drafting(speculative.method, speculative.num_speculative_tokens, speculative.use_eagle())


def _keep_files(options: ServerOptions, reductions: Reductions) -> None:
    """Copy the fitted files of reductions and the files of selected probes to directories beside the stores.

    Autoencoders are not copied, because they are large. Raises ValueError if a file cannot be copied.
    """
    fitted = [f for r in reductions.values() if (f := r.fitted()) is not None]
    kept = [("reduce", BASES, *file) for file in sorted({(f.source, f.sha256) for f in fitted})]
    kept += [("probes", PROBES, r.path, r.sha256) for r in reductions.values() if isinstance(r, Probe) and r.sha256]
    for option, folder, source, sha256 in kept:
        try:
            keep_copy(source, sha256, folder, options.store_dir, options.file_mode)
        except OSError as error:
            raise ValueError(f"{option}: {source} cannot be copied to {options.store_dir!r} ({error})") from error
