# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with the real connector, tracker and exporter. Only the model is simulated: it writes row headers.

It runs hundreds of steps per second, so tests can find orders of events that are rare in an engine.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from dmi_connector.engine.connector import DMIConnector
from dmi_connector.engine.context import Drafting
from dmi_connector.engine.host_scores import HostScores
from dmi_connector.engine.kernels.lookup import Lookup
from dmi_connector.engine.owners.paged import PagedSlots
from dmi_connector.engine.owners.pool_limits import PAGE, StepLimits
from dmi_connector.engine.owners.pool_pages import PoolSlots
from dmi_connector.engine.replaced import tell_turns
from dmi_connector.engine.scheduler.tracker import Tracker
from dmi_connector.engine.transfer.gpu_lane import DeviceLane
from dmi_connector.engine.transfer.logits import LogitsExport
from dmi_connector.store.write.ring import Extent, Ring
from tests.exporterkit import SMALL, make_exporter
from tests.lanekit import Event, simulate
from tests.probekit import save_probe
from tests.storekit import PATIENCE

BLOCK = 16
TOKENS = 64
"""Maximum number of tokens of a step."""
STOP = 2
"""The id of the token that ends a request."""


class Held:
    """Replaces holds on stores. These stores are not on a disk, and all of them exist."""

    @staticmethod
    def hold(store: str) -> str:
        """Return the store itself."""
        return store

    @staticmethod
    def release(held: str) -> None:
        """Nothing needs to be removed."""


class SchedulerHalf(DMIConnector):
    """The scheduler half with a given tracker. vLLM creates the connector with arguments of its own."""

    tracker_given: ClassVar[Tracker]

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.tracker = self.tracker_given
        self.context = self.tracker.context


class HybridHalf(SchedulerHalf, SupportsHMA):
    """As above, with vLLM's hybrid cache manager."""

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])


def sessions_of_033(patch: pytest.MonkeyPatch) -> None:
    """Let an older vLLM continue sessions as 0.33 does. A session keeps all tokens except the last sampled one.

    Older versions keep only the computed tokens. After a preemption there are none, and the session is in no queue.
    """
    original, take_result = Scheduler._update_request_as_session, Scheduler.update_from_output

    def _update_request_as_session(self: Scheduler, session: Request, update: Any) -> None:
        computed, kept = session.num_computed_tokens, session.num_tokens - 1
        session.num_computed_tokens = kept
        original(self, session, update)
        session.num_computed_tokens = min(computed, kept)

    def update_from_output(self: Scheduler, *result: Any) -> Any:
        answers = take_result(self, *result)
        queued = {*self.waiting, *getattr(self, "kv_holding_waiting", ()), *getattr(self, "skipped_waiting", ())}
        for request in self.requests.values():
            if request.resumable and request.status == RequestStatus.WAITING and request not in queued:
                self._enqueue_waiting_request(request)
        return answers

    patch.setattr(Scheduler, "_update_request_as_session", _update_request_as_session)
    patch.setattr(Scheduler, "update_from_output", update_from_output)


class Stored:
    """Fake `OpenCapture`. rows: {row: (token, position) in its header}.

    source, borrowed: the first `borrowed` rows come from the capture `source`. `source` must have them when the first
    other row arrives.
    """

    def __init__(
        self, ring: Ring, token_bytes: int, start: int, source: Stored | None = None, borrowed: int = 0
    ) -> None:
        self.ring, self.token_bytes, self.start = ring, token_bytes, start
        self.source, self.borrowed = source, borrowed
        self.rows: dict[int, tuple[int, int]] = {}
        self.ends: list[tuple[Any, ...]] = []
        self.draft_index: np.ndarray | None = None
        self.logits: dict[int, tuple[int, int]] = {}

    def parcel(self, extent: Extent, parts: Sequence[tuple[Stored, int, int, int]]) -> None:
        for stored, first, count, offset in parts:
            stored.borrow()
            payload = self.ring.view(extent)[offset : offset + stored.token_bytes * count]
            for row, (token, position) in enumerate(payload[-8 * count :].view(np.int32).reshape(count, 2).tolist()):
                assert first + row not in stored.rows, f"row {first + row} was stored twice"
                stored.rows[first + row] = token, position
        self.ring.release(extent)

    def borrow(self) -> None:
        """Copy the borrowed rows."""
        if self.source is not None:
            source, self.source = self.source, None
            source.borrow()
            assert len(source.rows.keys() & range(self.borrowed)) == self.borrowed, (
                "the source does not have these rows yet"
            )
            self.rows.update((row, source.rows[row]) for row in range(self.borrowed))

    def close(self, *what: Any, draft_index: np.ndarray | None = None) -> None:
        self.borrow()
        self.ends.append(what)
        self.draft_index = draft_index


class Pool:
    """Fake `RowPool`. table: the page of each block of vLLM's cache."""

    row_dtype, step, poisons, unpoisoned, scores = torch.float32, None, False, None, None

    def __init__(self, rows: torch.Tensor, blocks: int) -> None:
        self.rows, self.pages = rows, len(rows) // PAGE - 1
        self.table = torch.full((blocks,), -1, dtype=torch.int64)

    def place(self, table: np.ndarray) -> None:
        assert len(set(table[0].tolist())) == table.shape[1], "an entry changes twice"
        self.table[torch.from_numpy(table[0])] = torch.from_numpy(table[1])
        used = self.table[self.table >= 0].tolist()
        assert len(used) == len(set(used)), "a page has two blocks"

    def places(self, slots: list[int]) -> list[int]:
        found = torch.empty(len(slots), dtype=torch.int64)
        Lookup(PAGE)(torch.tensor(slots, dtype=torch.int64), self.table, found)
        return found.tolist()


def _other(states: bool, drafts: int) -> KVCacheSpec:
    """The layers beside those with full attention: with states, or with a window."""
    if states:
        shape = {"shapes": ((16,),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"}
        return MambaSpec(block_size=BLOCK, num_speculative_blocks=drafts, **shape)
    return SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=40)


def score(token: int, position: int) -> int:
    """The simulated score of a row. It is exact in float32, and differs between the rows of a request."""
    return 1000 * token + position


class Engine:
    """An engine of one rank with the interface of vLLM's: `add`, `step`, `abort`.

    ahead: whether the next step is scheduled before the result of the current one. on_gpu: export rows by the lane,
    with CPU memory instead of CUDA (lanekit.py). sleeps: whether the engine may sleep. tokens: returns the next sampled
    token; None: random tokens. drafts: draft tokens per request and step; most are accepted. pages: number of pages of
    the pool; 0: rows are in vLLM's blocks. borrows: whether requests borrow rows from earlier ones, whose stores all
    stay. scored: whether rows have a score of the probe "risk" (`score`), which requests ask for in `dmi`. alerts: the
    option `probe_alerts`.
    """

    def __init__(
        self,
        model: Path,
        store_dir: Path,
        patch: pytest.MonkeyPatch,
        *,
        seed: int = 0,
        blocks: int = 400,
        ahead: bool = True,
        on_gpu: bool = False,
        chunk: int = 8,
        hooks: str = "q",
        sleeps: bool = False,
        late: bool = False,
        drafts: int = 0,
        pages: int = 0,
        borrows: bool = False,
        policy: str = "block",
        scored: bool = False,
        alerts: dict[str, float] | None = None,
        tokens: Callable[[], int] | None = None,
        scheduling: dict[str, Any] | None = None,
        v1: bool = False,
        stages: bool = False,
        hybrid: str = "",
    ) -> None:
        self.random = random.Random(seed)
        self._token = tokens or (lambda: STOP if self.random.random() < 0.03 else self.random.randrange(5, 30))
        options: dict[str, Any] = {"chunk_tokens": chunk, "hooks": hooks, "sink": "host", "policy": policy}
        if scored:
            probe = save_probe(store_dir / "risk.safetensors", "mlp_out", (1,), SMALL.hidden, 1)
            options |= {"hooks": f"{hooks},probe.risk", "probes": {"risk": str(probe)}, "probe_alerts": alerts or {}}
        if on_gpu:
            simulate(patch)
            Event.link.set()
        self.exporter = make_exporter(store_dir, (pages + 1 if pages else blocks) * BLOCK, SMALL, **options)
        self.exporter.ring.close()
        self.exporter.ring = Ring(1 << 20)
        drafting = Drafting("ngram", drafts, False) if drafts else None
        self.exporter.context = replace(self.exporter.context, may_sleep=sleeps, drafting=drafting)
        self.exporter.logits = LogitsExport(self.exporter, self._post if "logits" in hooks else None, drafts > 0)
        keep_rows = 1 << 60
        if on_gpu:
            self.exporter.lane = DeviceLane(self.exporter.ring, 1 << 14, self.exporter.rows)
            keep_rows = (1 << 13) // self.exporter.context.layout.row_bytes
        model_config = ModelConfig(model=str(model), dtype="float32", max_model_len=256)
        states = hybrid in ("states", "parts")
        config = VllmConfig(
            model_config=model_config,
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=TOKENS,
                max_model_len=256,
                enable_chunked_prefill=True,
                async_scheduling=ahead and not stages,
                is_encoder_decoder=False,
                **(scheduling or {}),
            ),
            cache_config=CacheConfig(
                block_size=BLOCK, enable_prefix_caching=True, mamba_cache_mode="align" if states else "none"
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="HybridHalf" if hybrid else "SchedulerHalf",
                kv_connector_module_path=__name__,
                kv_role="kv_producer",
            ),
        )
        config.cache_config.num_gpu_blocks = blocks
        if drafts:
            config.speculative_config = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=drafts,
                prompt_lookup_max=2,
                target_model_config=model_config,
                target_parallel_config=config.parallel_config,
            )
        slots: Any = PagedSlots(self.exporter.context, BLOCK, blocks)
        self.pool = None
        if pages:
            slots = PoolSlots(self.exporter.context, 0, BLOCK, blocks, StepLimits.of(config))
            slots.sized(pages)
            slots.borrowing.sources._enabled = borrows
            slots.borrowing._holds = Held()
            self.pool = self.exporter.layer = Pool(self.exporter.rows, blocks)  # type: ignore[assignment]
        self.tracker = Tracker(self.exporter.context, slots, keep_rows, behind=int(ahead and not stages))
        SchedulerHalf.tracker_given = self.tracker
        for name in ("_update_request_as_session", "_handle_stopped_request"):  # so that monkeypatch restores them
            patch.setattr(Scheduler, name, getattr(Scheduler, name))
        tell_turns(DMIConnector)
        # slots and scores of steps that are not copied to the host yet
        self._copies = deque[tuple[list[int], list[int]]]()
        if scored:
            kept = TOKENS if pages else 0
            scores = HostScores(self.exporter.context.layout, blocks * BLOCK, kept, torch.device("cpu"))
            self.exporter.layer.scores, self._lines = scores, scores._lines.view(torch.float32)
            self.tracker.scores.open([scores.path], scores.slots)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["l"], spec), *([KVCacheGroupSpec(["m"], _other(states, drafts))] if hybrid else ())]
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        kind = AsyncScheduler if ahead and not stages else Scheduler
        hash_size = BLOCK // 2 if hybrid == "parts" else BLOCK
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=hash_size,
        )
        self.scheduler.use_v2_model_runner = not v1
        self.worker = DMIConnector.__new__(DMIConnector)
        KVConnectorBase_V1.__init__(self.worker, vllm_config=config, role=KVConnectorRole.WORKER, kv_cache_config=cache)
        self.worker.context, self.worker.exporter = self.exporter.context, self.exporter
        self._scored = scored
        self.stored: dict[str, Stored] = {}
        self._note_opened()
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(hash_size, sha256)
        self.requests: dict[str, Request] = {}
        self.replies: dict[str, Any] = {}
        self.aborted: set[str] = set()
        self.samples: list[tuple[int, int]] = []
        self.outputs: dict[str, bool] = {}  # whether rows of generated tokens are captured
        self.drafted: dict[str, list[int]] = {}  # {request: `Close.draft_index` of each token}
        self.turns: dict[str, list[tuple[int, int]]] = {}  # ended turns of sessions: (end of the prompt, tokens kept)
        self._note_tokens()
        self._late, self._drafts, self._with_logits = late, drafts, "logits" in hooks
        self._ahead, self._queue = ahead, deque[tuple[Any, Any]]()
        self._batch: dict[str, dict[str, Any]] = {}  # the runner's state of its requests
        self._free = self.free

    @property
    def free(self) -> int:
        """The number of free blocks."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def _note_opened(self) -> None:
        original = self.exporter._open

        def opened(message: Any) -> None:
            original(message)
            capture: Any = self.exporter.captures[message.capture]
            ring, token_bytes, borrow = self.exporter.ring, capture.layout.payload.token_bytes, message.borrow
            source = () if borrow is None else (self.stored[borrow.request_id], len(borrow.token_ids))
            capture.out = Stored(ring, token_bytes, message.start, *source)
            self.stored[message.request_id] = capture.out

        self.exporter._open = opened  # type: ignore[method-assign]

    def _note_tokens(self) -> None:
        """Keep the result of each step, and the turns of sessions."""
        added, next_turn = self.scheduler._update_request_with_output, self.scheduler._update_request_as_session

        def noted(request: Request, tokens: list[int], *args: Any, **more: Any) -> tuple[list[int], bool]:
            tokens, stopped = added(request, tokens, *args, **more)
            self.drafted[request.request_id] += [*range(1, len(tokens)), 0]
            return tokens, stopped

        def noted_turn(request: Request, update: Any) -> None:
            prompt, drafted = request.num_prompt_tokens, self.drafted[request.request_id]
            next_turn(request, update)
            kept = request.num_prompt_tokens - len(update.prompt_token_ids)
            self.turns.setdefault(request.request_id, []).append((prompt, kept))
            drafted[kept:] = [0] * len(update.prompt_token_ids)

        self.scheduler._update_request_with_output = noted  # type: ignore[method-assign]
        self.scheduler._update_request_as_session = noted_turn  # type: ignore[method-assign]

    def add(self, prompt: Sequence[int], max_tokens: int, dmi: Any = None, outputs: bool = True, **more: Any) -> str:
        """Begin a request. outputs: whether to capture its generated tokens too. Returns its id."""
        name = more.pop("name", f"r{len(self.requests)}")
        wanted = {"include_output_tokens": outputs, **({"dmi": dmi} if dmi else {})}
        sampling = SamplingParams(max_tokens=max_tokens, extra_args={"kv_transfer_params": wanted})
        sampling.update_from_generation_config({}, STOP)
        self.requests[name] = Request(name, list(prompt), sampling, None, block_hasher=self.hasher, **more)
        self.outputs[name] = outputs or (self.pool is not None and self.requests[name].resumable)
        self.drafted[name] = [0] * len(prompt)
        self.scheduler.add_request(self.requests[name])
        return name

    def turn(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        """Run steps until a turn of a session has ended, and begin its last turn."""
        while self.requests[name].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            self.step()
        self.send(name, prompt, max_tokens)
        self.hang_up(name)

    def send(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        """Send the next prompt of a session."""
        sampling = SamplingParams(max_tokens=max_tokens)
        sampling.update_from_generation_config({}, STOP)
        more = {"block_hasher": self.hasher, "resumable": True}
        self.scheduler.add_request(Request(name, list(prompt), sampling, None, **more))

    def hang_up(self, name: str) -> None:
        """End a session after its last turn."""
        self.scheduler.add_request(Request(name, [0], SamplingParams(max_tokens=1), None))

    def preempt(self, name: str) -> None:
        """Preempt a running request. The steps in flight may still add tokens to it."""
        self.scheduler.running.remove(self.requests[name])
        self.scheduler._preempt_request(self.requests[name], 0.0)

    def abort(self, name: str) -> None:
        self.aborted.add(name)
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def busy(self) -> bool:
        return self.scheduler.has_requests() or bool(self._queue)

    def step(self) -> None:
        """Run one step like vLLM's engine core. With `ahead`, the next one is scheduled before its result arrives."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._queue.append((output, self._execute(output)))
            if self._ahead and len(self._queue) < 2 and output.total_num_scheduled_tokens:
                return
        if self._queue:
            self._finish_step()

    def _finish_step(self) -> None:
        """Process the result of the oldest step in flight."""
        output, result = self._queue.popleft()
        self._copy_scores(len(self._queue))
        answers = self.scheduler.update_from_output(output, result).get(0)
        if self._drafts and not self._ahead:
            self._propose(list(output.num_scheduled_tokens))
        for answer in answers.outputs if answers else ():
            if answer.finish_reason is not None:
                self.replies[answer.request_id] = answer.kv_transfer_params

    def settle(self) -> None:
        """Finish all steps in flight, as the engine core may do before it schedules another step."""
        while self._queue:
            self._finish_step()

    def _copy_scores(self, left: int) -> None:
        """Copy the scores of all steps except the last `left` to host memory."""
        while len(self._copies) > left:
            slots, scores = self._copies.popleft()
            self._lines[slots] = torch.tensor(scores, dtype=torch.float32)[:, None]

    def _propose(self, names: list[str]) -> None:
        """Propose draft tokens after a step. Sometimes there are none."""
        drafts = [self._draft() if self.random.random() < 0.8 else [] for _ in names]
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _draft(self) -> list[int]:
        return [self._token() for _ in range(self._drafts)]

    def _post(self, extent: Extent, rows: Sequence[tuple[Stored, str, int, int, int]]) -> None:
        """Store rows of logits. Each row names its token and position."""
        for stored, _, index, position, offset in rows:
            token, at = self.exporter.ring.view(extent)[offset : offset + 8].view(np.float32).astype(int).tolist()
            assert at == position, f"sample {index} is of {at}, not of {position}"
            assert index not in stored.logits or not self._drafts, f"sample {index} came twice"
            # a step whose result vLLM dropped is computed again; a writer drops the later rows too
            stored.logits = {known: row for known, row in stored.logits.items() if known < index}
            assert not stored.ends, f"sample {index} came after the end of its store, which drops it"
            stored.logits[index] = token, position
        self.exporter.ring.release(extent)

    def _logits(
        self, counts: Sequence[tuple[int, int]], slots: Sequence[int], tokens: Sequence[tuple[int, int]]
    ) -> None:
        """Compute the logits of a step.

        counts: for each request, its number of tokens and how many of them have logits. slots, tokens: slot, and (token
        id, position), of each token.
        """
        ends = np.cumsum([0, *(tokens for tokens, _ in counts)])
        of = [end - n + i for end, (_, n) in zip(ends[1:], counts, strict=True) for i in range(n)]
        step = SimpleNamespace(slot_mapping=torch.tensor(slots), query_start_loc=torch.from_numpy(ends))
        self.exporter.layer.step = step  # type: ignore[assignment]
        logits = torch.zeros(len(of), SMALL.vocab)
        logits[:, :2] = torch.tensor(tokens)[torch.tensor(of)].float()
        self.exporter.logits.of_tokens(torch.tensor(of))
        self.exporter.logits.export(logits)

    def drain(self) -> None:
        """Run steps until all requests have ended and all rows are exported."""
        deadline = time.monotonic() + PATIENCE
        while self.busy:
            held = list(getattr(self.tracker.slots, "held", ()))
            assert time.monotonic() < deadline, f"held {held}, {len(self.scheduler.running)} run"
            self.step()
            if not self.scheduler.running:
                time.sleep(0.001)  # let the lane's thread run

    def pause(self) -> None:
        """Pause the engine, but keep its requests. Only steps that are already scheduled are finished."""
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self.drain()

    def sleep(self) -> None:
        """Do what vLLM does between the pause of an engine and its next step."""
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self.exporter.rows.zero_()
        if self.exporter.lane is not None:
            self.exporter.lane.staging.buffer.zero_()
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _execute(self, output: Any) -> ModelRunnerOutput:
        """Run the worker and the runner for one step."""
        batch, message = self._batch, output.kv_connector_metadata
        for name in output.finished_req_ids:
            batch.pop(name, None)
        for new in output.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids or new.prompt_token_ids)
            at = new.num_computed_tokens
            batch[new.req_id] = {"blocks": list(new.block_ids[0]), "at": at, "tokens": tokens, "drafts": self._draft()}
        cached = output.scheduled_cached_reqs
        for name, blocks, at in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            known = batch[name]
            if name in cached.resumed_req_ids:
                known["blocks"] = list(blocks[0])
                known["tokens"] = list(cached.all_token_ids.get(name, known["tokens"]))
            elif blocks is not None:
                known["blocks"] += blocks[0]
            if self._drafts and name not in cached.resumed_req_ids and known["at"] >= len(known["tokens"]) - 1:
                continue  # the runner knows what was accepted. With `ahead`, vLLM's scheduler does not know it yet
            known["at"] = at
        self.samples += [(sample.capture, sample.position) for sample in message.samples]
        if message.kept_scores:  # the copies of earlier steps are complete, as on the stream
            self._copy_scores(0)
        self.worker.handle_preemptions(message)
        self.worker.bind_connector_metadata(message)
        sampled: dict[str, list[int]] = {}
        copied: tuple[list[int], list[int]] = [], []
        counts: list[tuple[int, int]] = []
        slots: list[int] = []
        tokens: list[tuple[int, int]] = []
        for name, count in output.num_scheduled_tokens.items():
            known = batch[name]
            proposed = output.scheduled_spec_decode_tokens.get(name, [])
            drafts = known["drafts"][: len(proposed)] if -1 in proposed else list(proposed)
            inputs = known["tokens"] + drafts
            for position in range(known["at"], known["at"] + count):
                slots.append(known["blocks"][position // BLOCK] * BLOCK + position % BLOCK)
                tokens.append((inputs[position], position))
            last = known["at"] + count >= len(inputs)
            accepted = next((i for i, _ in enumerate(drafts) if self.random.random() < 0.3), len(drafts))
            sampled[name] = [*drafts[:accepted], self._token()] if last else []
            counts.append((count, 1 + len(drafts) if last else 1))
            known["at"] += count - (len(drafts) - accepted if last else 0)
            known["tokens"], known["drafts"] = known["tokens"] + sampled[name], self._draft() if self._drafts else []
        headers = self.exporter.rows.view(torch.int32).numpy()
        for row, slot, header in zip(self.pool.places(slots) if self.pool else slots, slots, tokens, strict=True):
            if row >= 0:
                headers[row, :2] = header
                copied[0].append(slot)
                copied[1].append(score(*header))
        if self._scored:
            self._copies.append(copied)
            if self.random.random() < 0.5:
                self._copy_scores(0)
        if self._with_logits and slots:
            self._logits(counts, slots, tokens)
        if not self._late:
            self.worker.wait_for_save()
        result = self.worker.get_transfer_results(output.finished_req_ids)
        report = KVConnectorOutput(finished_sending=result.finished_sending or None)
        report.kv_connector_worker_meta = self.worker.build_connector_worker_meta()
        if self._late:
            self.worker.wait_for_save()
        self.worker.clear_connector_metadata()
        names = list(sampled)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: number for number, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=report,
        )

    def faults(self) -> list[str]:
        """Problems after all requests have ended: wrong, repeated or missing rows, and unreleased resources."""
        self.exporter.shutdown()
        found = [] if self.free == self._free else [f"{self._free - self.free} blocks are not free"]
        held = getattr(self.tracker.slots, "held", ())
        left = {"held": held, "tracked": self.tracker.tracked, "captures": self.exporter.captures}
        found += [f"{name}: {list(what)}" for name, what in left.items() if what]
        for name, stored in self.stored.items():
            request = self.requests[name]
            if len(stored.ends) != 1:
                found.append(f"{name} was closed {len(stored.ends)} times")
                continue
            length, _, ids, _, losses = stored.ends[0]
            lost = {row for loss in losses for start, stop in loss.rows for row in range(start, stop)}
            tokens = list(request.all_token_ids)
            if ids != tokens[stored.start : stored.start + length]:
                found.append(f"{name}: its token ids are others")
            found += self._faults_of_samples(name, stored)
            for row in set(range(length)) - lost:
                if stored.rows.get(row) != (ids[row], stored.start + row):
                    found.append(f"{name}: row {row} is {stored.rows.get(row)}, not {(ids[row], stored.start + row)}")
            if lost - set(range(length, len(tokens))):
                found.append(f"{name}: rows {sorted(lost)} of {length} are lost")
        return found

    def _faults_of_samples(self, name: str, stored: Stored) -> list[str]:
        """Problems with the drafts and logits of a store, compared with the tokens that the scheduler accepted."""
        length, samples, *_ = stored.ends[0]
        request, end = self.requests[name], stored.start + length
        index, found = self.drafted[name][stored.start : end], []
        if self._drafts and (stored.draft_index is None or stored.draft_index.tolist() != index):
            found.append(f"{name}: draft_index is {stored.draft_index}, not {index}")
        tokens = list(request.all_token_ids)
        positions: list[int] = []
        for prompt, kept in [*self.turns.get(name, ()), (request.num_prompt_tokens, end)]:
            limit = end if self.outputs[name] else min(end, prompt)
            positions += range(max(prompt - 1, stored.start), min(kept, limit))
        want = {i: (tokens[p], p) for i, p in enumerate(positions)}
        if self._drafts and name in self.aborted and request.num_preemptions and samples.get("logits") == len(want) - 1:
            want.popitem()  # it was computed again, and not yet up to its last row
        # the store drops the other rows
        there = {i: row for i, row in stored.logits.items() if i < samples.get("logits", 0)}
        if samples and (samples["logits"] != len(want) or there != want):
            found.append(f"{name}: {samples} logits are {stored.logits}, not {want}")
        return found
