# SPDX-License-Identifier: Apache-2.0
"""Makes the model classes that replace those of vLLM's registry.

vLLM imports these classes by name. `models.NAME` is vLLM's class NAME, with taps if our connector is configured. A few
names are classes of owners (`Owner.models`). Without our connector, a model has the modules and the compiled graph of
vLLM's class, or is of the class `Architecture.uncaptured` if the architecture names one.
"""

from __future__ import annotations

import functools
import importlib
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank

from dmi_connector.engine.context import CaptureContext, capture_context, is_active
from dmi_connector.engine.features import ROUTING
from dmi_connector.engine.model.architectures import ARCHITECTURES, FORWARD, TRANSFORMERS, TRANSFORMERS_CLASSES
from dmi_connector.engine.model.transformers_backend import Generic
from dmi_connector.engine.owners import OWNERS

logger = logging.getLogger("vllm.dmi_connector")

_building = False
"""Whether a tapped model is being built. Models built inside it, such as the language model of a multimodal model, then
get no taps, although vLLM finds them under our name.
"""


class Tapped:
    """Mixin that comes before a vLLM model class in the MRO."""

    dmi_context: CaptureContext | None = None

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        global _building
        if _is_draft(vllm_config):
            _building, before = True, _building  # models inside a draft get no taps either
            try:
                super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
            finally:
                _building = before
            return
        if _building or not is_active(vllm_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
            return
        _building = True
        try:
            self._init_tapped(vllm_config, prefix)
        finally:
            _building = False

    def _init_tapped(self, vllm_config: Any, prefix: str) -> None:
        from dmi_connector.engine import refusals
        from dmi_connector.engine.graphs import choose_graphs
        from dmi_connector.engine.replaced import decomposed_experts
        from dmi_connector.engine.taps.compilation import check_mixers, compilation_of
        from dmi_connector.engine.taps.install import install

        context, compilation = capture_context(vllm_config), compilation_of(vllm_config)
        refusals.check_one_engine()
        check_mixers(vllm_config, {field.tapped for field in context.layout.fields})
        vllm_config.additional_config["dmi_connector"] = f"{context.fingerprint};{compilation}"
        routed = not ROUTING.isdisjoint(context.selection.hooks)
        with decomposed_experts() if routed else nullcontext():
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        if context.drafting is not None and "logits" in context.selection.hooks:
            from dmi_connector.engine.connector import note_logits_of
            from dmi_connector.engine.replaced import tell_logits_of

            tell_logits_of(note_logits_of, vllm_config.use_v2_model_runner)
        if vllm_config.use_v2_model_runner and not context.first_stage:
            from dmi_connector.engine.replaced import tell_token_ids
            from dmi_connector.engine.taps.inputs import note_token_ids

            tell_token_ids(note_token_ids)
        choose_graphs(vllm_config, context.options.cuda_graphs, context.visual_layers)
        self.dmi_context = context
        assert isinstance(self, nn.Module)
        self.dmi_taps = install(self, context, compilation)
        context.coverage.model = weakref.ref(self)
        if context.arch.language:
            self.requires_raw_input_tokens = True  # in addition to embeddings
        if isinstance(context.arch, Generic) and get_tensor_model_parallel_rank() == 0:
            logger.warning(
                "dmi_connector: %s has no row in the table of architectures. Hooks found by its structure: %s%s. To "
                "get other hooks, add a row: see docs/HOOKS.md",
                context.arch.name,
                ", ".join(context.arch.only),
                context.arch.why and f"; attn_out and mlp_out are missing: {context.arch.why}",
            )
        context.owner.attach(self, context)

    def dmi_begin(self) -> None:
        """Before the first forward, tap the modules again: vLLM replaces some of them after it has built a model."""
        if self.dmi_context is not None and not self.dmi_context.coverage.checked:
            self.dmi_taps.follow()

    @contextmanager
    def dmi_forward(self, traced: bool) -> Iterator[None]:
        """Let taps write only during this model's forward, if a draft model runs modules of this model."""
        drafting = None if self.dmi_context is None else self.dmi_context.drafting
        if traced or drafting is None or not drafting.shares_modules:
            yield
            return
        self.dmi_taps.resting = False
        try:
            yield
        finally:
            self.dmi_taps.resting = True

    def dmi_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Write the inputs of a forward to its rows, for models that get embeddings, and for later pipeline stages.

        Returns the keyword arguments of the forward.
        """
        from dmi_connector.engine.taps.inputs import write_inputs

        given = {**dict(zip(_INPUTS, args, strict=False)), **kwargs}
        embeddings = given.get("inputs_embeds")
        write_inputs(self.dmi_taps, given["input_ids"], given["positions"], embeddings)
        # As without capture, vLLM's forward gets token ids or embeddings, not both.
        return given if embeddings is None else {**given, "input_ids": None}

    def dmi_positions(self, positions: torch.Tensor) -> None:
        """Write the positions to the rows after a forward, for models whose layers may not get positions."""
        if self.dmi_context is not None and self.dmi_context.arch.positions == FORWARD:
            from dmi_connector.engine.taps.inputs import end_forward

            end_forward(self.dmi_taps, positions)

    def dmi_end(self, positions: torch.Tensor) -> None:
        """A forward ended. positions: int [..., tokens]. Raises ValueError if the first forward lacks a hook."""
        if self.dmi_context is not None and not self.dmi_context.coverage.checked:
            self.dmi_context.coverage.check(positions.shape[-1])

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Call vLLM's method, except with our own draft, which reads no hidden states of the target."""
        if self.dmi_context is None or self.dmi_context.drafting is not None:
            super().set_aux_hidden_state_layers(layers)  # type: ignore[misc]

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        if self.dmi_context is None or self.dmi_context.drafting is not None:
            return super().get_eagle3_default_aux_hidden_state_layers()  # type: ignore[misc]
        return (0,)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = super().compute_logits(hidden_states)  # type: ignore[misc]
        if self.dmi_context is not None:
            self.dmi_context.coverage.logits = True
        if self.dmi_context is not None and logits is not None and "logits" in self.dmi_context.selection.hooks:
            from dmi_connector.engine.connector import offer_logits

            offer_logits(logits)
        return logits


def _is_draft(vllm_config: Any) -> bool:
    """Whether the model that is being built is the draft model of speculative decoding, which is not captured."""
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    if speculative is None or model is None or model is speculative.target_model_config:
        return False  # methods without a draft model, such as n-gram, name the target as their draft
    return model is speculative.draft_model_config


_INPUTS = ("input_ids", "positions", "intermediate_tensors", "inputs_embeds")
"""The arguments of every model's forward, in order."""


def _imported(place: str) -> Any:
    """The class at ``module:Class``."""
    module, _, class_name = place.partition(":")
    return getattr(importlib.import_module(module), class_name)


def _tapped_class(name: str) -> type:
    """Make the tapped class of a vLLM class. Classes of the Transformers backend keep their name, by which vLLM
    recognizes the backend.
    """
    row = ARCHITECTURES.get(name)
    place = row.base if row is not None else f"{TRANSFORMERS}:{name}"
    module, _, class_name = place.partition(":")
    base, uncaptured = _imported(place), row.uncaptured if row is not None else ""
    name = class_name if module == TRANSFORMERS else name

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        traced = torch.compiler.is_compiling()  # a wholly compiled model runs this code only while it is traced
        if not traced:
            self.dmi_begin()
        positions = kwargs["positions"] if "positions" in kwargs else args[1]
        if self.dmi_context is not None and (self.dmi_context.arch.language or not self.dmi_context.first_stage):
            args, kwargs = (), self.dmi_inputs(args, kwargs)
        with self.dmi_forward(traced):
            output = base.forward(self, *args, **kwargs)
        self.dmi_positions(positions)
        if not traced:
            self.dmi_end(positions)
        return output if self.dmi_context is None else self.dmi_context.owner.output(output)

    attributes: dict[str, Any] = {"forward": forward, "__module__": __name__, "__doc__": base.__doc__}
    if uncaptured:

        def new(cls: type, *, vllm_config: Any, prefix: str = "") -> Any:
            if _building or _is_draft(vllm_config) or not is_active(vllm_config):
                return _imported(uncaptured)(vllm_config=vllm_config, prefix=prefix)
            logger.warning(
                "dmi_connector: capture runs %s as vLLM's %s, not as its %s, whose fused kernels taps cannot read. "
                "So speed and rounding differ from those of the engine without capture",
                name,
                place,
                uncaptured,
            )
            return base.__new__(cls)

        attributes["__new__"] = new
    if not hasattr(base, "set_aux_hidden_state_layers"):
        attributes["supports_eagle3"] = False
    return type(name, (Tapped, base), attributes)


def _owners_class(name: str, place: str) -> type:
    """Make an owner's class for a model of vLLM, and set its `capturing`, because owners do not know the context."""
    base = _imported(place)

    def capturing(vllm_config: Any) -> CaptureContext | None:
        return capture_context(vllm_config) if is_active(vllm_config) else None

    attributes = {"capturing": staticmethod(capturing), "__module__": __name__, "__doc__": base.__doc__}
    return type(name, (base,), attributes)


def __getattr__(name: str) -> type:
    theirs = dict(item for owner in OWNERS.values() for item in owner.models.items())
    if name in theirs:
        cls = _owners_class(name, theirs[name])
    elif name in ARCHITECTURES or name in TRANSFORMERS_CLASSES:
        cls = _tapped_class(name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = cls
    return cls
