# SPDX-License-Identifier: Apache-2.0
"""The root attributes that all stores of an engine share: how the layers of the model attend."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.v1.attention.backends.composite import MMPrefixAttentionRouting, create_composite_attention_backend

from dmi_connector.engine.store_attributes import store_attributes
from tests.trackerkit import make_tracker


class Impl:
    """An `impl` with the arguments that vLLM passes to FlashAttention's."""

    supports_quant_query_input = supports_pcp = supports_dcp = can_return_lse_for_decode = False
    need_to_return_lse_for_decode = supports_mtp_with_cp_non_trivial_interleave_size = False
    lse_base_on_e = True

    def __init__(self, scale: float, alibi_slopes: list[float] | None, logits_soft_cap: float | None) -> None:
        self.scale, self.alibi_slopes, self.logits_soft_cap = scale, alibi_slopes, logits_soft_cap


def backend(name: str) -> Any:
    """A backend of vLLM that chooses between two."""
    two = (
        SimpleNamespace(
            full_cls_name=lambda n=n: ("tests", n),
            get_impl_cls=lambda: Impl,
            get_builder_cls=lambda: SimpleNamespace(requires_block_table_width=False),
            forward_includes_kv_cache_update=False,
            supports_mm_prefix=lambda: True,
        )
        for n in ("Masks", "Causal")
    )
    names = {"name": "Both", "backend_name": name, "module": __name__, "routing_policy": MMPrefixAttentionRouting}
    return create_composite_attention_backend.__wrapped__(*two, **names)


def attention_of(store_dir: Path, layer: Any) -> dict[str, Any]:
    """The attribute `attention` of a model in which all layers attend as `layer`."""
    context = make_tracker(store_dir).context
    layers = {f"model.layers.{i}.self_attn.attn": layer for i in range(context.dims.layers)}
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(model="tiny"), compilation_config=SimpleNamespace(static_forward_context=layers)
    )
    found: dict[str, Any] = store_attributes(context, config)["attention"]
    return found


def test_attention_of_a_backend_that_chooses_between_two_is_that_of_both(tmp_path: Path) -> None:
    """vLLM chooses TRITON_FLASH_ATTN on Hopper, and TRITON_FLASHINFER on Blackwell, for Gemma 3 and 4 with images."""
    both = backend("TRITON_FLASH_ATTN")
    layer = SimpleNamespace(impl=both.get_impl_cls()(0.5, None, 30.0), attn_backend=both, use_mm_prefix=True)
    layer.sliding_window = 1024
    assert attention_of(tmp_path, layer) == {
        "scale": 0.5,
        "soft_cap": 30.0,
        "windows": [1024] * 3,
        "image_blocks": True,
    }


def test_kernels_without_alibi_and_a_soft_cap_need_not_name_them(tmp_path: Path) -> None:
    """In vLLM neither HPC_ATTN nor TURBOQUANT does."""
    layer = SimpleNamespace(impl=SimpleNamespace(scale=0.25), sliding_window=None)
    assert attention_of(tmp_path, layer) == {"scale": 0.25}
