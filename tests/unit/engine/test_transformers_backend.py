# SPDX-License-Identifier: Apache-2.0
"""Hooks that are found from the structure of a decoder layer, and structures without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")
from dmi_connector.engine.model.transformers_backend import Blocks, _NotFound, blocks_of, generic


class Attention(nn.Module):
    def forward(self, hidden_states: torch.Tensor, mask: Any = None) -> tuple[torch.Tensor, None]:
        return hidden_states * 2, None


class Layer(nn.Module):
    """A layer as in most models."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between, self.mlp, self.after = (nn.Linear(4, 4) for _ in range(4))
        self.attn, self.drop, self.scale = Attention(), nn.Dropout(0.1), 0.5

    def forward(self, hidden_states: torch.Tensor, mask: Any, **_kwargs: Any) -> torch.Tensor:
        out, _ = self.attn(hidden_states=self.before(hidden_states), mask=mask)
        hidden_states = hidden_states + self.drop(out)
        return hidden_states + self.mlp(self.between(hidden_states))


class InPlace(Layer):
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor]:  # type: ignore[override]
        residual = hidden_states
        residual += self.attn(self.before(hidden_states))[0]
        return (residual.add(nn.functional.dropout(self.mlp(self.between(residual)))),)


class PostNorms(Layer):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden_states = self.between(self.attn(hidden_states)[0]) + hidden_states
        return self.after(self.mlp(hidden_states)) + hidden_states


class SideBySide(Layer):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        normed = self.before(hidden_states)
        return self.mlp(normed) + self.attn(normed)[0] + hidden_states


class AttentionFirst(Layer):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        normed = self.before(hidden_states)
        return hidden_states + self.attn(normed)[0] + self.mlp(normed)


class SharedNorm(Layer):
    """Two modules read the stream between the two blocks."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden_states = hidden_states + self.attn(self.before(hidden_states))[0]
        return hidden_states + self.mlp(self.between(hidden_states) * self.after(hidden_states))


@pytest.mark.parametrize(
    ("layer", "blocks"),
    [
        (Layer, Blocks("attn", "mlp", "between")),
        (InPlace, Blocks("attn", "mlp", "between")),
        (PostNorms, Blocks("between", "after", "mlp")),
        (SideBySide, Blocks("attn", "mlp", parallel=True)),
        (AttentionFirst, Blocks("attn", "mlp", parallel=True)),
        (SharedNorm, Blocks("attn", "mlp")),
    ],
)
def test_the_blocks_that_a_layer_adds_to_its_input_are_found(layer: type[Layer], blocks: Blocks) -> None:
    assert blocks_of(layer(), "attn") == blocks


class Multiplied(Layer):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden_states = hidden_states + self.scale * self.attn(hidden_states)[0]
        return hidden_states + self.mlp(hidden_states)


class NormedStream(Layer):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden_states = hidden_states + self.attn(hidden_states)[0]
        return self.after(hidden_states + self.mlp(hidden_states))


class ThreeBlocks(Layer):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return hidden_states + self.attn(hidden_states)[0] + self.mlp(hidden_states) + self.after(hidden_states)


class Twice(Layer):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden_states = hidden_states + self.attn(self.mlp(hidden_states))[0]
        return hidden_states + self.mlp(hidden_states)


class OneOfAnother(Layer):
    """The input of the MLP is only the output of attention, so both outputs depend on attention."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        out = self.attn(hidden_states)[0]
        return hidden_states + out + self.mlp(out)


class Branches(Layer):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return hidden_states if hidden_states.sum() > 0 else -hidden_states


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (Multiplied, r"changes an output before it adds it \(mul\)"),
        (NormedStream, "does not return the sum of its input and two outputs, but of 1 values"),
        (ThreeBlocks, "does not return the sum of its input and two outputs, but of 4 values"),
        (Twice, "calls mlp more than once"),
        (OneOfAnother, "does not add one output that depends on attention and one that does not"),
        (Branches, r"cannot be traced \(TraceError\)"),
    ],
)
def test_a_layer_of_unknown_structure_is_refused(layer: type[Layer], why: str) -> None:
    with pytest.raises(_NotFound, match=why):
        blocks_of(layer(), "attn")


def small(model_type: str, **fields: Any) -> Any:
    from transformers import AutoConfig

    sizes = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 1}
    return AutoConfig.for_model(model_type, vocab_size=512, pad_token_id=0, **{**sizes, **fields})


def test_a_row_is_made_of_a_model_that_nobody_listed() -> None:
    row = generic("StableLmForCausalLM", small("stablelm"))
    assert (row.layers, row.embed, row.attn) == ("model.layers", "model.embed_tokens", "self_attn.attn")
    assert row.only == ("embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_final", "logits")
    dims = row.dims(small("stablelm"))
    assert (dims.layers, dims.hidden, dims.heads, dims.kv_heads, dims.head_dim, dims.vocab) == (3, 96, 3, 1, 32, 512)
    assert not row.parallel and row.why == "" and not dims.moe_layers


def test_a_row_says_that_both_blocks_run_side_by_side() -> None:
    row = generic("StableLmForCausalLM", small("stablelm", use_parallel_residual=True))
    assert row.parallel and "resid_mid" not in row.only and "attn_out" in row.only


def test_a_row_without_blocks_says_why_and_has_the_residual_stream() -> None:
    row = generic("GraniteForCausalLM", small("granite"))
    assert row.only == ("embed", "resid_pre", "resid_final", "logits")
    assert row.why == "layer 0 changes an output before it adds it (mul)"


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("gptj", "no module calls the attention interface of transformers"),
        ("moonshine", r"its attention is in \d places of a layer"),
        ("qwen3_next", "1 of 4 layers have attention, as in hybrid models"),
        ("falcon_h1", r"mamba in a layer keeps a recurrent state \(cache_params\)"),
    ],
)
def test_other_models_get_no_row(model_type: str, why: str) -> None:
    falcon = {"mamba_d_ssm": 96, "mamba_n_heads": 3, "mamba_d_head": 32}
    config = small(model_type, num_hidden_layers=4, **(falcon if model_type == "falcon_h1" else {}))
    with pytest.raises(ValueError, match=f"none could be derived from its structure: .*{why}"):
        generic("Some", config)
