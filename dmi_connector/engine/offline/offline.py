# SPDX-License-Identifier: Apache-2.0
"""Runs an offline engine that captures prompts, for `dmi demo`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class EngineFailed(RuntimeError):
    """The engine did not start, or did not capture a prompt."""


@dataclass(frozen=True)
class Answer:
    """The text that the engine generated for the prompt `key`, and the path of the prompt's store."""

    key: str
    text: str
    store: str


class OfflineEngine:
    """vLLM's offline engine with capture.

    It computes in float32, so captures agree with transformers except for rounding. It runs in eager mode, because
    compilation of a tiny model takes longer than its forwards.

    model: a model directory. engine: the result of `capture_args`. max_model_len: tokens. Raises EngineFailed if the
    engine does not start.
    """

    def __init__(self, model: Path, engine: Mapping[str, Any], max_model_len: int = 512) -> None:
        from vllm import LLM

        try:
            self._llm = LLM(str(model), **engine, dtype="float32", enforce_eager=True, max_model_len=max_model_len)
        except Exception as error:
            raise EngineFailed(f"the engine did not start: {error}") from error

    def answer(self, prompts: Mapping[str, str], new_tokens: int) -> list[Answer]:
        """Generate `new_tokens` tokens for each prompt, greedily. prompts: {key of the store: text}.

        Raises EngineFailed if a prompt was not captured.
        """
        from vllm import SamplingParams

        sampling = [
            SamplingParams(
                max_tokens=new_tokens,
                temperature=0,
                ignore_eos=True,
                extra_args={"kv_transfer_params": {"include_output_tokens": True, "dmi": {"key": key}}},
            )
            for key in prompts
        ]
        outputs = self._llm.generate(list(prompts.values()), sampling, use_tqdm=False)
        answers = []
        for key, output in zip(prompts, outputs, strict=True):
            params: dict[str, Any] = output.kv_transfer_params or {}
            if "dmi_store" not in params:
                raise EngineFailed(f"prompt {key!r} was not captured: {params.get('dmi_error', 'no reason was given')}")
            answers.append(Answer(key, output.outputs[0].text, params["dmi_store"]))
        return answers

    def shutdown(self) -> None:
        """Stop the engine.

        vLLM kills engine processes that do not exit in time. The coordinator process then finishes their stores.
        """
        self._llm.llm_engine.engine_core.shutdown()
