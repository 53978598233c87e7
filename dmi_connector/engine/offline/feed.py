# SPDX-License-Identifier: Apache-2.0
"""Runs an offline vLLM engine with capture, for `dmi run`. Prompts are added one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dmi_connector.args import capture_args
from dmi_connector.engine import contract
from dmi_connector.engine.owners import OWNERS
from dmi_connector.option_values import OptionError
from dmi_connector.wording import show

_LONG_PROMPT = 4096
"""Maximum number of tokens of the prompt with which sampling fields are checked, because some fields name positions in
a prompt.
"""


class PromptRefused(ValueError):
    """The engine cannot take a prompt. The message says why."""


@dataclass(frozen=True)
class Ended:
    """A request that has ended.

    name: as given to `EngineFeed.add`. prompt: number of tokens of the prompt. generated: number of generated tokens; 0
    if `max_tokens` is None. finish: vLLM's finish reason. store: path of its store (`dmi_store`), or None. error: why
    it was not captured (`dmi_error`), or None.
    """

    name: str
    prompt: int
    generated: int
    finish: str | None
    store: str | None
    error: str | None


class EngineFeed:
    """vLLM's engine with capture. The caller repeats two steps: `add` until enough requests run, then `step`.

    model: model name or directory, as for vLLM. capture: arguments of `capture_args`. flags: more flags of vLLM's
    engine, as on a command line. sampling: fields of SamplingParams; temperature is 0 (greedy) by default. max_tokens:
    maximum number of tokens to generate per prompt. With None, only rows of prompts are captured, and vLLM samples one
    token per prompt.

    Raises OptionError for flags, arguments of `capture_args` or sampling fields that are not valid. Raises the errors
    of vLLM if the engine cannot start.
    """

    def __init__(
        self,
        model: str,
        capture: Mapping[str, Any],
        flags: Sequence[str] = (),
        sampling: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> None:
        from vllm import EngineArgs, LLMEngine
        from vllm.usage.usage_lib import UsageContext

        self._make_sampling, self._max_tokens = _sampling(sampling or {}, max_tokens), max_tokens
        own = [text for name, value in capture_args(**capture).items() for text in (f"--{name}", json.dumps(value))]
        parsed = _parser().parse_args(["--model", model, *own, *flags])
        args = EngineArgs.from_cli_args(parsed)
        args.disable_log_stats = True  # as in vLLM's LLM
        self._engine = LLMEngine.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)
        try:
            self._check_sampling(sampling or {})
        except BaseException:
            self.shutdown()
            raise

    def _check_sampling(self, fields: Mapping[str, Any]) -> None:
        """Raise OptionError for sampling fields that vLLM would refuse with any prompt."""
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        contract.check_names(["bulk capture"])
        tasks = self._engine.get_supported_tasks()
        length = self._engine.vllm_config.model_config.max_model_len - (self._max_tokens or 1)
        prompt = {"prompt_token_ids": [0] * max(1, min(length, _LONG_PROMPT))}

        def check(some: Mapping[str, Any]) -> None:
            params = _maker(some, self._max_tokens)("a")
            request = self._engine.input_processor.process_inputs("a", prompt, params, supported_tasks=tasks)
            MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(request))

        _refuse(fields, check)

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of requests that vLLM runs at a time."""
        return int(self._engine.vllm_config.scheduler_config.max_num_seqs)

    @property
    def busy(self) -> bool:
        """Whether some request has not ended."""
        return bool(self._engine.has_unfinished_requests())

    def add(self, name: str, key: str, prompt: Mapping[str, Any]) -> None:
        """Add a request to vLLM's queue.

        name: name of the request in the results of `step`. key: key of its store. prompt: a result of `Prompt.to_json`.
        Raises PromptRefused if the engine cannot take the prompt, and EngineDeadError if the engine has died.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            given = self._given(prompt)
            self._engine.add_request(name, given, self._make_sampling(key, prompt.get("options", {})))
        except EngineDeadError:
            raise
        except Exception as error:  # templates and tokenizers may raise anything, and other prompts may be valid
            raise PromptRefused(f"{type(error).__name__}: {error}") from error

    def _given(self, prompt: Mapping[str, Any]) -> Any:
        if "token_ids" in prompt:
            return {"prompt_token_ids": list(prompt["token_ids"])}
        if "text" in prompt:
            return {"prompt": prompt["text"]}
        messages = prompt["messages"]
        tokenizer: Any = self._engine.get_tokenizer()
        # If the last message is the assistant's, no generation prompt is added.
        asks = messages[-1]["role"] != "assistant"
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        return {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def step(self) -> list[Ended]:
        """Wait for the engine's next outputs. Returns the requests that ended with these outputs."""
        ended = []
        for output in self._engine.step():
            if output.finished:
                params = output.kv_transfer_params or {}
                answer = output.outputs[0]
                ended.append(
                    Ended(
                        name=output.request_id,
                        prompt=len(output.prompt_token_ids),
                        generated=len(answer.token_ids) if self._max_tokens is not None else 0,
                        finish=answer.finish_reason,
                        store=params.get("dmi_store"),
                        error=params.get("dmi_error"),
                    )
                )
        return ended

    def shutdown(self) -> None:
        """Stop the engine.

        vLLM kills engine processes that do not exit in time. The coordinator process then finishes their stores.
        """
        self._engine.engine_core.shutdown()


def _parser() -> Any:
    """vLLM's parser of engine arguments, which raises OptionError instead of exiting the process."""
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise OptionError(f"flags of vLLM: {message}")

    return EngineArgs.add_cli_args(Parser(add_help=False, allow_abbrev=False))


def _sampling(fields: Mapping[str, Any], max_tokens: int | None) -> Callable[..., Any]:
    """Check the fields. Returns the result of `_maker`. Raises OptionError if SamplingParams refuses a field."""

    def check(some: Mapping[str, Any]) -> None:
        _maker(some, max_tokens)("a")

    _refuse(fields, check)
    return _maker(fields, max_tokens)


def _maker(fields: Mapping[str, Any], max_tokens: int | None) -> Callable[..., Any]:
    """Make a function (key of the store, other capture options of the request) -> SamplingParams."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    given = {"temperature": 0.0, **fields, "max_tokens": max_tokens or 1, "output_kind": RequestOutputKind.FINAL_ONLY}
    given["detokenize"] = bool(fields.get("stop"))  # the text is not used
    if isinstance(wanted := fields.get("structured_outputs"), dict):
        given["structured_outputs"] = StructuredOutputsParams(**wanted)
    if isinstance(bias := fields.get("logit_bias"), dict):
        given["logit_bias"] = {int(token): value for token, value in bias.items()}  # keys of JSON objects are strings

    def make(key: str, options: Mapping[str, Any] | None = None) -> Any:
        wanted = {"include_output_tokens": max_tokens is not None, "dmi": {"key": key, **(options or {})}}
        return SamplingParams(**given, extra_args={"kv_transfer_params": wanted})

    return make


def _refuse(fields: Mapping[str, Any], check: Callable[[Mapping[str, Any]], None]) -> None:
    """Raise OptionError if `check` refuses fields of SamplingParams. The message names the field that is the cause.

    The cause is the first field without which `check` accepts the others. If there is none, it is the first field that
    `check` refuses alone. If there is none either, the message names all fields.
    """
    try:
        check(fields)
    except Exception as error:  # vLLM may raise anything for unexpected values
        if not fields:
            raise
        without = {name: {other: fields[other] for other in fields if other != name} for name in fields}
        alone = {name: {name: fields[name]} for name in fields}
        blamed = next((name for name in fields if _refusal(check, without[name]) is None), None)
        blamed = blamed or next((name for name in fields if _refusal(check, alone[name]) is not None), None)
        if blamed is not None:
            why, fix = _why(_refusal(check, alone[blamed]) or error)
            raise OptionError(f"--sampling {blamed}: vLLM refuses {show(fields[blamed])}: {why}; {fix}") from error
        why, fix = _why(error)
        raise OptionError(f"--sampling {show(dict(fields))}: vLLM refuses these together: {why}; {fix}") from error


def _refusal(check: Callable[[Mapping[str, Any]], None], fields: Mapping[str, Any]) -> Exception | None:
    """The error with which `check` refuses these fields, or None."""
    try:
        check(fields)
    except Exception as error:
        return error
    return None


def _why(error: Exception) -> tuple[str, str]:
    """(vLLM's message on one line, the fix). The fix is `Owner.remedy` of the first owner that has one."""
    why = " ".join(str(error).split()).rstrip(".")
    return why, next((fix for owner in OWNERS.values() if (fix := owner.remedy(why))), "correct it or leave it out")
