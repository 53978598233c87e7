# SPDX-License-Identifier: Apache-2.0
"""One engine for each configuration, started when first asked for and ended at once."""

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
"""On and around the edges of chunks (32) and blocks (128); 300 needs several prefill steps of 128 tokens."""

COMPILED = {"enforce_eager": False}
EAGER = {"enforce_eager": True}


@pytest.fixture(scope="session", autouse=True)
def borrowers_wait() -> None:
    """In an engine of this process, borrowers wait however long it takes for stores that are still written."""
    pool_borrowing._WAIT_S = 600.0


def core_requests(run: Run, llm: object) -> None:
    """The requests that every architecture answers: edges, prefix hits, prompt logprobs, n = 3, prompt only, a stop."""
    generate(llm, run, {f"len{n}": Ask(prompt(n)) for n in LENGTHS})
    stop = run.replies["len33"].outputs[0].token_ids[4]
    generate(
        llm,
        run,
        {
            "again": Ask(prompt(300)),
            "scored": Ask(prompt(300), sampling={"prompt_logprobs": 1}),
            # Read from the cache, vLLM has no logprobs of these tokens, and cannot write their text.
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
                },  # no seed: vLLM cannot chunk a seeded prompt on the CPU
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
    """core_run(arch, mode, owner): `core_requests` answered by an engine of that configuration."""
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
