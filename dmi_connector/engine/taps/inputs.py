# SPDX-License-Identifier: Apache-2.0
"""Taps of the model's inputs: the row header (token id and position, as the model saw them) and the embedding.

Token ids are read from the arguments of the embedding module, and positions from the arguments of a module that takes
positions. If `Architecture.positions` is FORWARD, layers may not take positions. Positions are then read from the
arguments of the model's forward, and written after the forward.

The forward of a model with a vision tower gets the embeddings of text and images. `write_inputs` takes the header from
the arguments of this forward. vLLM passes token ids in addition to embeddings if the model sets
`requires_raw_input_tokens`. Pipeline stages after the first have no embedding module. There `write_inputs` takes the
header from the arguments of the forward too. On the V2 runner this forward gets no token ids, so those of the runner
are used (`note_token_ids`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dmi_connector.engine.model.architectures import FORWARD
from dmi_connector.engine.model.coverage import POSITIONS, TOKEN_IDS
from dmi_connector.engine.taps.batches import ModelTaps
from dmi_connector.engine.taps.values import copied
from dmi_connector.layout import AXES


def install_inputs(taps: ModelTaps) -> None:
    """Register the taps of the row header and of `embed`."""
    context, header, embedding = taps.context, taps.once, taps.once.again()
    embed, arch, coverage = context.layout.taking("embed", 0), context.arch, context.coverage
    scale = context.embed_scale

    def at_embed(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not arch.language:
            header.add(TOKEN_IDS, args[0])
        if embed:
            embedding.add_all(embed, copied(output if scale == 1.0 else output * scale))
            embedding.write()
        if arch.positions == FORWARD:
            header.write()

    def before_layer(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        header.add(POSITIONS, kwargs[arch.positions_as] if arch.positions_as in kwargs else args[arch.positions_at])
        header.write()

    if context.first_stage:
        taps.hook(arch.embed, at_embed)  # outside a forward, where vLLM may also call it, the tap writes nothing
    ids, positions = arch.embed, arch.positions or f"{arch.layers}.0"
    if arch.language or not context.first_stage:
        ids = positions = "the forward of the model"
    elif positions != FORWARD:
        taps.hook(positions, before_layer, before=True, with_kwargs=True)
    expected = ((TOKEN_IDS, ids), *((field, arch.embed) for field in embed), (POSITIONS, positions))
    for row_field, module in expected:
        coverage.expect(row_field, module)


_token_ids: torch.Tensor | None = None
"""The memory of the token ids of this process's runner, int32 [maximum tokens]; None before `note_token_ids`."""


def note_token_ids(ids: torch.Tensor) -> None:
    """Note the memory into which the runner writes the token ids of a step, for forwards that get no token ids."""
    global _token_ids
    _token_ids = ids


def write_inputs(
    taps: ModelTaps, ids: torch.Tensor | None, positions: torch.Tensor, embeddings: torch.Tensor | None
) -> None:
    """Write the header, and the embeddings that enter the first layer, before the forward.

    `Tapped.dmi_inputs` calls it for models with `Architecture.language`, and for pipeline stages after the first.

    ids: int [tokens]. positions: int [tokens], or [axes, tokens] with M-RoPE. embeddings: [tokens, hidden]; None if the
    language model embeds token ids itself. If `ids` is None in a later stage, those of the runner are used. Raises
    RuntimeError if there are none.
    """
    if ids is None and not taps.context.first_stage and _token_ids is not None:
        ids = _token_ids[: positions.shape[-1]]
    if ids is None:
        raise RuntimeError(
            f"{taps.context.arch.name}: the forward got no token ids, so rows could not be checked; "
            "turn off the feature that calls it without them"
        )
    layout, once = taps.context.layout, taps.once
    axes = layout.find(AXES, 0)
    if axes is None:
        once.add(TOKEN_IDS, ids)
        once.add(POSITIONS, positions)
        once.write()
    else:
        offsets = [TOKEN_IDS.offset, POSITIONS.offset, axes.offset]
        layer = taps.context.cache_layer
        torch.ops.dmi.tap_header(ids, positions, taps.token, once.tensor, offsets, layer)
    embed = layout.taking("embed", 0)
    if embed and embeddings is not None:
        once.add_all(embed, embeddings)
        once.write()


def end_forward(taps: ModelTaps, positions: torch.Tensor) -> None:
    """Write the positions and end the taps of the forward, in models whose `Architecture.positions` is FORWARD.

    `Tapped.dmi_positions` calls it after the forward. positions: int [tokens].
    """
    taps.once.add(POSITIONS, positions)
    taps.once.write()
    taps.once.end(positions)
