# SPDX-License-Identifier: Apache-2.0
"""Starts one engine per configuration when a test first needs it, and stops it at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dmi_connector import capture_args
from dmi_connector.engine.owners import pool_borrowing
from tests.engine.harness import (
    ALL_HOOKS,
    SMALL,
    Ask,
    Run,
    engine,
    generate,
    prompt,
    watch_scheduler,
)

LENGTHS = (1, 31, 32, 33, 127, 128, 129, 300)
"""Prompt lengths at and next to the edges of chunks (32) and blocks (128). A prompt of 300 tokens needs several prefill
steps of 128 tokens.
"""

COMPILED = {"enforce_eager": False}
EAGER = {"enforce_eager": True}


@pytest.fixture(scope="session", autouse=True)
def borrowers_wait() -> None:
    """Let borrowers wait without a time limit for stores that are still being written, in engines of this process."""
    pool_borrowing._WAIT_S = 600.0


def core_requests(run: Run, llm: object) -> None:
    """The requests that run on every architecture: edge cases, prefix hits, prompt logprobs, n = 3, a stop token."""
    generate(llm, run, {f"len{n}": Ask(prompt(n)) for n in LENGTHS})
    stop = run.replies["len33"].outputs[0].token_ids[4]
    generate(
        llm,
        run,
        {
            "again": Ask(prompt(300)),
            "scored": Ask(prompt(300), sampling={"prompt_logprobs": 1}),
            # With a prefix hit, vLLM has no logprobs of the cached tokens, and fails to decode their text.
            "scored-hit": Ask(
                prompt(300),
                sampling={"prompt_logprobs": 1, "skip_reading_prefix_cache": False, "detokenize": False},
            ),
            "shared": Ask(prompt(300)[:256] + prompt(20, seed=1)),
            "three": Ask(
                prompt(129, seed=2),
                kv={"include_output_tokens": True, "dmi": {"key": "three"}},
                sampling={
                    "n": 3,
                    "temperature": 0.8,
                },  # no seed: on a CPU vLLM cannot split a seeded prompt over steps
            ),
            "only33": Ask(prompt(33, seed=3), kv={"include_output_tokens": False}),
            "only300": Ask(prompt(300, seed=3), kv=None),
            "stop": Ask(prompt(33), sampling={"stop_token_ids": [stop]}),
            "one": Ask(prompt(40, seed=4), sampling={"max_tokens": 1}),
        },
    )


@pytest.fixture(scope="session")
def core_run(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str, str], Run]:
    """core_run(arch, mode, owner): `core_requests` and their responses, from an engine of that configuration."""
    done: dict[tuple[str, str, str], Run] = {}

    def get(arch: str, mode: str, owner: str) -> Run:
        if (arch, mode, owner) not in done:
            run = Run(tmp_path_factory.mktemp(f"{arch}-{mode}-{owner}"))
            args = capture_args(ALL_HOOKS, run.store_dir, owner, **SMALL)
            with engine(tiny_model(arch), **args, **(EAGER if mode == "eager" else COMPILED)) as llm:
                watch_scheduler(llm, run)
                run.block_size = llm.llm_engine.vllm_config.cache_config.block_size
                core_requests(run, llm)
                if owner != "draft":
                    generate(
                        llm,
                        run,
                        {"limits": Ask(prompt(20, seed=9), sampling={"logit_bias": {77: 100.0}, "min_p": 0.1})},
                    )
            done[arch, mode, owner] = run
        return done[arch, mode, owner]

    return get
