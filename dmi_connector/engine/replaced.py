# SPDX-License-Identifier: Apache-2.0
"""Replaces methods of vLLM in an engine that captures. contract_names.py lists them with the reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from dmi_connector.engine.messages import StepMetadata


def schedule_no_drafts() -> None:
    """V1 runner: let the extract_hidden_states proposer propose nothing, so each step decodes one token per request.

    Such a step uses the plain sampler, because the sampler for drafts fails without draft tokens if a request has
    `top_k`. On the V2 runner, num_speculative_tokens_per_batch_size with 0 drafts has the same effect, but V1 fails an
    assertion with this setting. The constructor of our draft calls this function, so other processes keep vLLM's own
    methods.
    """
    from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def propose(self: Any, num_speculative_tokens: int, sampled_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """No draft tokens: int tensor [batch, 0]."""
        if not getattr(self.model, "dmi_active", False):
            return proposes(self, num_speculative_tokens, sampled_token_ids, *args, **kwargs)
        return sampled_token_ids[:, :0]

    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        """vLLM's sampler output for logits [requests, vocabulary], as without a draft model."""
        none = spec_decode_metadata is not None and not any(spec_decode_metadata.num_draft_tokens)
        ours = none and getattr(getattr(self.drafter, "model", None), "dmi_active", False)
        return samples(self, logits, None if ours else spec_decode_metadata)

    proposes = _replace(ExtractHiddenStatesProposer, propose)
    samples = _replace(GPUModelRunner, _sample)


def skip_draft_forward() -> None:
    """V2 runner: let the extract_hidden_states speculator leave out the draft's forward and its preparation.

    The forward of our draft does nothing, because taps have written the rows. vLLM leaves a draft's forward out in
    warm-up steps without attention, and with this function in every step. The constructor of our draft calls the
    function.
    """
    from vllm.v1.worker.gpu.spec_decode.extract_hidden_states import ExtractHiddenStatesSpeculator

    def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The draft tokens of vLLM's own method, int tensor [batch, 1]. The schedule of 0 drafts drops them."""
        if getattr(self.model, "dmi_active", False):
            kwargs["skip_attn_for_dummy_run"] = True
        return original(self, *args, **kwargs)

    original = _replace(ExtractHiddenStatesSpeculator, propose)


def zero_no_rows(backend: type) -> None:
    """Let vLLM zero all caches in newly allocated blocks except the cache of rows. backend: the backend of its layer.

    vLLM zeroes new blocks if layers have caches of different dtypes, as with an FP8 cache beside the rows. On the V2
    runner vLLM zeroes them before it calls `handle_preemptions`, which reads rows of freed blocks. So rows of an ended
    or preempted request would be lost. The constructor of the cache layer calls this function.
    """
    from vllm.v1.worker.utils import KVBlockZeroer

    def __init__(self: Any, device: Any, attn_groups_iter: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        """vLLM's method, without the layers of `backend`."""
        original(self, device, [group for group in attn_groups_iter if group.backend is not backend], *args, **kwargs)

    original = _replace(KVBlockZeroer, __init__)


def tell_logits_of(note: Callable[[Any], None], v2: bool) -> None:
    """With speculative decoding: call `note` with the indexes of a step's tokens that have logits, int [samples].

    A request has a row of logits for its sampled token and for each draft token. Only the runner knows the number of
    these rows. The constructor of the target calls this function. v2: whether the engine uses the V2 runner.
    """
    if v2:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2

        def sample(self: Any, hidden_states: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            """vLLM's sampler output."""
            note(input_batch.logits_indices)
            return original(self, hidden_states, input_batch, *args, **kwargs)

        original = _replace(RunnerV2, sample)
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def _calc_spec_decode_metadata(self: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's SpecDecodeMetadata of the step."""
        metadata = original(self, *args, **kwargs)
        note(metadata.logits_indices)
        return metadata

    original = _replace(GPUModelRunner, _calc_spec_decode_metadata)


def tell_token_ids(note: Callable[[Any], None]) -> None:
    """V2 runner: call `note` before each step with the memory into which the runner then writes the step's token ids.

    The memory is int32 [maximum number of tokens], and the same for all steps. vLLM passes no token ids to the model of
    a later pipeline stage (0.33 does, if the model sets `requires_raw_input_tokens`). The constructor of such a model
    calls this function. The profiling run is the first step, so `note` has the memory before CUDA graphs are captured.
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of vLLM's own method."""
        note(self.input_buffers.input_ids)
        return original(self, *args, **kwargs)

    original = _replace(GPUModelRunner, execute_model)


def tell_turns(connector: type[Any]) -> None:
    """Scheduler: call `on_turn_end` of a connector of this class when a turn of a session ends, and `on_next_turn` when
    the session gets its next prompt.

    At the end of a turn vLLM drops the step in flight. With the next prompt vLLM drops the last sampled token, and
    appends the prompt to the tokens before this token. The end of a turn and the next prompt may both come between two
    steps, and while the request is preempted. The scheduler half calls this function.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    def _handle_stopped_request(self: Any, request: Any) -> bool:
        """Whether the request has ended, as vLLM's method says it."""
        if request.resumable and isinstance(self.connector, connector):
            self.connector.on_turn_end(request)
        return bool(stops(self, request))

    def _update_request_as_session(self: Any, session: Any, update: Any) -> None:
        """vLLM's method."""
        original(self, session, update)
        if isinstance(self.connector, connector):
            self.connector.on_next_turn(session, session.num_prompt_tokens - len(update.prompt_token_ids or ()))

    original = _replace(Scheduler, _update_request_as_session)
    stops = _replace(Scheduler, _handle_stopped_request)


def ask_one_rank() -> None:
    """Executor of several ranks: wait for the answer of only one rank in steps in which ranks do not report.

    In each step vLLM waits for the answers of all ranks if there is a connector, otherwise for the answer of one rank.
    An answer takes time of the rank's thread and of the engine. Our ranks report at least once in STEPS_TOGETHER steps.
    In other steps their answers have nothing for our connector. The scheduler half calls this function.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        """The answer of one rank, or of all, as vLLM's own method gives it."""
        if method == "execute_model":
            metadata = kwargs["args"][0].kv_connector_metadata
            self.dmi_one_rank = isinstance(metadata, StepMetadata) and not metadata.report
        if method in ("execute_model", "sample_tokens") and self.dmi_one_rank:
            kwargs["kv_output_aggregator"] = None
        return calls(self, method, *args, **kwargs)

    calls = _replace(MultiprocExecutor, collective_rpc)


@contextmanager
def decomposed_experts() -> Iterator[None]:
    """Let vLLM build expert layers with kernels that do not include routing, if vLLM offers that (since 0.33).

    vLLM asks each router whether it supports a kernel that includes routing. The answer changes nothing else. Raises
    ValueError if the engine's `moe_backend` has no other kernel for these experts.
    """
    from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter

    asked = vars(FusedMoERouter).get("supports_monolithic_kernels")
    if asked is None:
        yield
        return
    FusedMoERouter.supports_monolithic_kernels = property(lambda _router: False)
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        if _NEEDS_OTHER_KERNELS not in str(error):
            raise
        raise ValueError(
            "moe_backend: topk_ids and topk_weights need kernels of experts that do not include routing, and vLLM has "
            f"none here ({error}); choose another --moe-backend, or leave these hooks out"
        ) from error
    finally:
        FusedMoERouter.supports_monolithic_kernels = asked


_NEEDS_OTHER_KERNELS = "routes adjusted after routing"
"""In vLLM's message, the reason why a kernel that includes routing was not chosen."""


def _replace(cls: Any, method: Any) -> Any:
    """Replace the method of that name by `method`, unless the class has our method. Returns the method it had."""
    original = getattr(cls, method.__name__)
    if not getattr(original, "dmi_silent", False):
        method.dmi_silent = True
        setattr(cls, method.__name__, method)
    return original
