# SPDX-License-Identifier: Apache-2.0
"""FULL CUDA graphs are chosen only in configurations in which they are known to be correct."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import vllm.model_executor.layers.attention_layer_base as attention
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport

from dmi_connector.engine import graphs

FULL, PIECES = CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE


class Layer:
    """A fake of vLLM's attention layer."""

    def __init__(
        self,
        head_size: int = 128,
        name: str = "FLASH_ATTN",
        support: str = "ALWAYS",
        window: int | None = None,
        kernels: int = 3,
        kind: str = "decoder",
    ) -> None:
        builder = SimpleNamespace(get_cudagraph_support=lambda _config, _spec: AttentionCGSupport[support])
        self.head_size = head_size
        self.impl = SimpleNamespace(vllm_flash_attn_version=kernels, attn_type=kind)
        self._backend = SimpleNamespace(get_name=lambda: name, get_builder_cls=lambda: builder)
        self._spec = SimpleNamespace(sliding_window=window)

    def get_attn_backend(self) -> Any:
        return self._backend

    def get_kv_cache_spec(self, _config: Any) -> Any:
        return self._spec


def config(
    mode: CUDAGraphMode,
    *layers: object,
    largest: int = 512,
    device: str = "cuda",
    v2: bool = True,
    splits: int = 32,
    stages: int = 1,
) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode=mode,
            max_cudagraph_capture_size=largest,
            static_forward_context={str(n): layer for n, layer in enumerate(layers)},
        ),
        device_config=SimpleNamespace(device_type=device),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=splits),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        use_v2_model_runner=v2,
    )


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(attention, "AttentionLayerBase", Layer)
    for level in ("info", "warning"):
        monkeypatch.setattr(graphs.logger, level, lambda text, *values: found.append(text % values))
    return found


@pytest.mark.parametrize("head_size", [65, 80, 96, 128])
def test_full_graphs_are_chosen_where_they_are_right(lines: list[str], head_size: int) -> None:
    given = config(PIECES, Layer(head_size), object(), Layer(head_size))
    graphs.choose_graphs(given, "auto", 0)
    assert given.compilation_config.cudagraph_mode == FULL and not lines


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (Layer(64), "FLASH_ATTN has heads of up to 64 values, or of more than 128"),
        (Layer(256), "FLASH_ATTN has heads of up to 64 values, or of more than 128"),
        (Layer(name="TRITON_ATTN"), "attention backend TRITON_ATTN"),
        (Layer(576, name="FLASHMLA"), "attention backend FLASHMLA"),
        (Layer(kernels=4), "FLASH_ATTN runs FlashAttention 4"),
        (Layer(support="UNIFORM_BATCH"), "FLASH_ATTN supports only graphs of UNIFORM_BATCH on this GPU"),
        (Layer(window=512), "sliding windows"),
        (Layer(kind="encoder_only"), "attention that is not causal"),
    ],
    ids=["heads-64", "heads-256", "backend", "latent", "flash-attention-4", "flash-attention-2", "windows", "encoder"],
)
def test_elsewhere_vllms_default_stays_and_the_log_says_why(lines: list[str], layer: Layer, said: str) -> None:
    given = config(PIECES, Layer(), layer)
    graphs.choose_graphs(given, "auto", 0)
    assert given.compilation_config.cudagraph_mode == PIECES
    assert len(lines) == 1 and said in lines[0]


@pytest.mark.parametrize("splits", [0, 1])
def test_a_limit_of_splits_with_which_plan_and_graph_may_differ_keeps_the_default(
    lines: list[str], splits: int
) -> None:
    """0: the plan chooses the splits of each step. 1: with large blocks, plan and graph pack heads differently."""
    given = config(PIECES, Layer(), splits=splits)
    graphs.choose_graphs(given, "auto", 0)
    assert given.compilation_config.cudagraph_mode == PIECES
    assert len(lines) == 1 and f"flash_attn_max_num_splits_for_cuda_graph is {splits}" in lines[0]


@pytest.mark.parametrize("mode", [PIECES, FULL])
@pytest.mark.parametrize("images", [True, False])
def test_a_model_whose_first_layers_add_visual_features_keeps_its_default(
    lines: list[str], mode: CUDAGraphMode, images: bool
) -> None:
    """vLLM clears them in the forward of Qwen3-VL, which does not run when a graph of a whole step is replayed."""
    given = config(mode, Layer())
    given.model_config = SimpleNamespace(supports_multimodal_inputs=images)
    graphs.choose_graphs(given, "auto", 3)
    assert given.compilation_config.cudagraph_mode == (mode if images else FULL)
    assert len(lines) == images and all("the first layers add visual features" in line for line in lines)
    assert mode == PIECES or all("FULL gives wrong values here" in line for line in lines)


def test_an_untested_vllm_keeps_its_default(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs.contract, "untested", lambda: "0.34.0")
    given = config(PIECES, Layer())
    graphs.choose_graphs(given, "auto", 0)
    assert given.compilation_config.cudagraph_mode == PIECES and "vLLM 0.34.0 was not tested" in lines[0]


def test_pipeline_stages_keep_the_default(lines: list[str]) -> None:
    given = config(PIECES, Layer(), stages=2)
    graphs.choose_graphs(given, "auto", 0)
    assert given.compilation_config.cudagraph_mode == PIECES and "pipeline stages" in lines[0]


def test_the_v1_runner_keeps_its_default(lines: list[str]) -> None:
    given = config(PIECES, Layer(), v2=False)
    graphs.choose_graphs(given, "auto", 0)
    assert given.compilation_config.cudagraph_mode == PIECES and "V1 model runner" in lines[0]


@pytest.mark.parametrize(
    ("mode", "option", "said"),
    [
        (PIECES, "vllm", "cuda_graphs is 'vllm' and cudagraph_mode FULL_AND_PIECEWISE"),
        (CUDAGraphMode.PIECEWISE, "auto", "cudagraph_mode PIECEWISE"),
        (CUDAGraphMode.FULL_DECODE_ONLY, "auto", "cudagraph_mode FULL_DECODE_ONLY"),
        (FULL, "vllm", ""),
        (CUDAGraphMode.NONE, "auto", ""),
    ],
)
def test_a_mode_set_by_the_user_is_kept(lines: list[str], mode: CUDAGraphMode, option: str, said: str) -> None:
    given = config(mode, Layer())
    graphs.choose_graphs(given, option, 0)
    assert given.compilation_config.cudagraph_mode == mode
    assert len(lines) == bool(said) and all(said in line for line in lines)
    how = "without CUDA graphs" if mode == CUDAGraphMode.FULL_DECODE_ONLY else "with piecewise CUDA graphs"
    assert all(f"batches run {how}" in line for line in lines)


def test_a_user_who_asks_for_full_where_it_is_wrong_is_warned(lines: list[str]) -> None:
    given = config(FULL, Layer(64))
    graphs.choose_graphs(given, "auto", 0)
    assert given.compilation_config.cudagraph_mode == FULL
    assert lines[0].startswith("dmi_connector: cudagraph_mode: FULL gives wrong attention here: FLASH_ATTN has heads")


def test_the_log_says_if_large_steps_run_without_a_graph(lines: list[str]) -> None:
    graphs.choose_graphs(config(FULL, Layer(), largest=128), "auto", 0)
    assert len(lines) == 1 and "the largest CUDA graph has 128 tokens" in lines[0]
    graphs.choose_graphs(config(PIECES, Layer(), device="cpu"), "auto", 0)
    assert len(lines) == 1
