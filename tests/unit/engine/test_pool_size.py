# SPDX-License-Identifier: Apache-2.0
"""The number of rows of a pool, and its minimum."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from dmi_connector.engine.owners import OWNERS
from dmi_connector.engine.owners.pool_limits import PAGE, StepLimits
from dmi_connector.engine.owners.pool_size import pool_rows
from dmi_connector.option_values import OptionError
from dmi_connector.settings import ServerOptions

GIB = 1 << 30


def limits(tokens: int = 8192, requests: int = 256, **more: Any) -> StepLimits:
    return StepLimits(SimpleNamespace(max_num_batched_tokens=tokens), tokens, requests, **more)


def rows(cache_bytes: int, row_bytes: int, of: StepLimits, **options: Any) -> int:
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=cache_bytes))
    given = ServerOptions.parse({"store_dir": "/x", "owner": "pool", "chunk_tokens": 64, **options})
    return pool_rows(given, row_bytes, of, config)


@pytest.mark.parametrize(("row_bytes", "share"), [(189_504, 0.045), (1_290_000, 0.095), (2_559_040, 0.128)])
def test_a_pool_takes_a_share_of_the_cache_by_the_size_of_its_rows(row_bytes: int, share: float) -> None:
    cache = 125 * GIB
    found = rows(cache, row_bytes, limits())
    assert found % PAGE == 0 and 0 <= cache * share - found * row_bytes < PAGE * row_bytes


def test_a_pool_is_no_larger_than_all_that_may_run_and_no_smaller_than_some_requests() -> None:
    small, of = 1024, limits(tokens=512, requests=4)
    assert rows(125 * GIB, small, of) == (2 * 512 // PAGE + 4 * of.pages_of_request(64)) * PAGE
    assert rows(1 << 20, small, of) == of.least_pages(64, 4) * PAGE
    many = limits(requests=256)
    assert rows(1 << 20, small, many) == many.least_pages(64, 16) * PAGE


def test_a_pool_of_a_given_size_has_room_for_a_request_beside_a_step() -> None:
    of, row_bytes = limits(tokens=2048, requests=8), 4096
    least = of.least_pages(64)
    assert rows(GIB, row_bytes, of, pool_bytes=(least + 1) * PAGE * row_bytes) == least * PAGE
    with pytest.raises(OptionError, match=rf"pool_bytes: .* give at least {(least + 1) * PAGE * row_bytes}, or lower"):
        rows(GIB, row_bytes, of, pool_bytes=(least + 1) * PAGE * row_bytes - 1)
    assert limits(tokens=2048, requests=8, whole=True).least_pages(64) > least, "a whole step must fit"


def test_draft_tokens_need_room(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits(of_request=5).pages_of_request(64) > limits().pages_of_request(64)
    assert limits(of_request=5).floor(100) == 756 and limits().floor(100) == 356 and limits(tokens=99).floor(100) == 99


def test_steps_of_hybrid_models_are_not_shorter_than_a_block() -> None:
    """Pieces of prompts end with blocks. With shorter steps, vLLM would never compute any of a prompt."""

    def of(mode: str, block: int, hybrid: bool = True, tokens: int = 2048) -> StepLimits:
        scheduler = {"max_num_batched_tokens": tokens, "max_num_scheduled_tokens": None, "max_num_seqs": 8}
        scheduler |= {"disable_chunked_mm_input": False, "enable_chunked_prefill": True}
        config: Any = SimpleNamespace(
            scheduler_config=SimpleNamespace(**scheduler),
            speculative_config=None,
            cache_config=SimpleNamespace(mamba_cache_mode=mode, block_size=block),
            model_config=SimpleNamespace(is_hybrid=hybrid, is_multimodal_model=False, max_model_len=4096),
        )
        return StepLimits.of(config)

    assert of("align", 1152).floor(4) == 1152 + 4
    assert of("align", 128).floor(4) == of("none", 1152).floor(4) == of("align", 1152, hybrid=False).floor(4) == 256 + 4
    assert of("align", 1152, tokens=1024).floor(4) == 256 + 4, (
        "no step has room for a block, so pieces may end anywhere"
    )


def test_chunks_of_large_rows_are_short_unless_they_are_given() -> None:
    pool, options = OWNERS["pool"], ServerOptions.parse({"store_dir": "/x", "owner": "pool"})
    assert [pool.options(options, (), size).chunk_tokens for size in (500_000, 500_001)] == [64, 32]
    given = ServerOptions.parse({"store_dir": "/x", "owner": "pool", "chunk_tokens": 128})
    assert pool.options(given, {"chunk_tokens": 128}, 10).chunk_tokens == 128
    assert OWNERS["target"].options(options, (), 10) is options


def test_the_size_of_a_pool_needs_a_pool() -> None:
    with pytest.raises(OptionError, match="pool_bytes: 5 is the size of a pool, and there is none; give owner 'pool'"):
        ServerOptions.parse({"store_dir": "/x", "pool_bytes": 5})
    with pytest.raises(OptionError, match="owner: 'target' is not set here; leave owner out"):
        ServerOptions.parse({"store_dir": "/x", "owner": "target"})
