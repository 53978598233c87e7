# SPDX-License-Identifier: Apache-2.0
"""Defines the interfaces of owners. An owner keeps the rows of an engine. A row has all captured values of one token.

`Owner` is the interface for a whole engine, `RowSlots` for its scheduler, and `RowMemory` for its workers. The rest of
`engine` uses only these interfaces. A slot is the index of a row. "vLLM's slots" are those of its KV cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from dmi_connector.engine.host_scores import HostScores
    from dmi_connector.engine.messages import Borrow, StepMetadata
    from dmi_connector.hooks import ModelDims, Selection
    from dmi_connector.layout import RowLayout
    from dmi_connector.request_options import CaptureParams
    from dmi_connector.settings import ServerOptions


class Context(Protocol):
    """The part of `engine.context.CaptureContext` that owners read. A protocol avoids a circular import."""

    @property
    def options(self) -> ServerOptions: ...

    @property
    def may_sleep(self) -> bool: ...

    @property
    def ranks(self) -> int: ...

    @property
    def dims(self) -> ModelDims: ...

    @property
    def selection(self) -> Selection: ...

    @property
    def layout(self) -> RowLayout: ...

    @property
    def cache_layer(self) -> str: ...

    @property
    def here(self) -> range: ...


class Captured(Protocol):
    """The part of `engine.scheduler.tracked_request.Tracked` that owners read."""

    capture: int
    path: str
    blocks: list[int]
    request: Request
    params: CaptureParams
    selection: Selection

    @property
    def limit(self) -> int: ...


class RowMemory(Protocol):
    """The memory of one worker's rows. It is registered among vLLM's layers, under `CaptureContext.cache_layer`.

    row_dtype: dtype of the model. step: metadata of the running batch (query starts and vLLM's slots), None before the
    first batch. poisons: whether the rows of a step are filled with UNWRITTEN (model/coverage.py) before its forward.
    unpoisoned: slots of the step whose rows are not filled yet. scores: host memory to which each forward copies the
    scores of probes; None without probes, and before vLLM has allocated its cache.
    """

    row_dtype: torch.dtype
    step: CommonAttentionMetadata | None
    poisons: bool
    unpoisoned: torch.Tensor | None
    scores: HostScores | None

    @property
    def pages(self) -> int:
        """Number of pages of a pool, without the null page. 0 if rows are in vLLM's blocks."""

    @property
    def rows(self) -> torch.Tensor | None:
        """uint8 [slots, row_bytes]. None until there is memory, as in vLLM's profiling run."""

    def rows_and_slots(self, forward: ForwardContext, first: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(`rows`, int64 slots of this forward's tokens, negative without a row). None if the forward writes no rows.

        first: whether this is the first tap of a forward.
        """

    @property
    def cache_slots(self) -> int:
        """Number of vLLM's slots in the layer whose slots index the scores."""

    @property
    def step_tokens(self) -> int:
        """With a pool: maximum number of tokens per step, for the additional lines of `HostScores`. Otherwise 0."""

    def slots_in_cache(self, forward: ForwardContext) -> torch.Tensor:
        """vLLM's slots of this forward's tokens, in the layer of `cache_slots`: int64, negative for padding."""

    def place(self, table: np.ndarray) -> None:
        """Change entries of the table of a pool, see `StepMetadata.table`."""

    def poison_step(self) -> None:
        """Fill the rows of the step with UNWRITTEN, once. Call it before the forward, after freed rows are read."""


class RowSlots(ABC):
    """The scheduler half: computes the slots of a request's rows, and decides how long the rows are kept.

    group: the cache group of vLLM whose blocks are in `Tracked.blocks`. block_size: slots per block of this group.
    eager: whether the scheduler records the blocks of a step, and calls `cover`, before the forward of the step. stays:
    whether rows of an ended request stay in memory until workers have gathered (copied) them.
    """

    eager: ClassVar[bool] = False
    stays: ClassVar[bool] = False

    def __init__(self, group: int, block_size: int) -> None:
        self.group, self.block_size = group, block_size
        self._in_block = np.arange(block_size)

    def sample_slot(self, tracked: Captured, position: int) -> int:
        """vLLM's slot of a token. Workers find the token's row of logits by it."""
        return tracked.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def in_cache(self, tracked: Captured, start: int, stop: int) -> np.ndarray:
        """vLLM's slots of positions [start, stop), int64 [stop - start]."""
        size = self.block_size
        before = start // size
        firsts = np.array(tracked.blocks[before : -(-stop // size)], np.int64) * size
        slots: np.ndarray = np.add.outer(firsts, self._in_block).ravel()
        return slots[start - before * size : stop - before * size]

    @abstractmethod
    def of(self, tracked: Captured, start: int, stop: int) -> np.ndarray:
        """The slots of the rows at positions [start, stop), int64 [stop - start]."""

    @abstractmethod
    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """The result of `get_num_new_matched_tokens`. computed: number of the request's tokens in the prefix cache."""

    @abstractmethod
    def preempted(self, tracked: Captured, computed: int, metadata: StepMetadata) -> int:
        """A request was preempted. Writes to the step's message what workers must do with its rows.

        computed: number of its computed tokens, 0 if it was in no step since the last check for full chunks. Returns
        the position up to which its rows exist.
        """

    @abstractmethod
    def ended(self, request: Request, blocks: list[int], waiting: bool, others: bool) -> bool:
        """A captured request ended. Returns whether vLLM keeps its blocks until the workers report the request.

        waiting: whether staging memory is short (`Tracker.keep_rows`). others: whether other captured requests run.
        """

    def check_room(self, tracked: Captured) -> None:  # noqa: B027
        """Raise OptionError for a request whose rows can never have slots."""

    def arrived(self, tracked: Captured) -> None:  # noqa: B027
        """A request that will be captured has arrived."""

    def begin(self, tracked: Captured) -> Borrow | None:
        """A request is scheduled for the first time. Returns the rows that it borrows from an earlier capture."""
        return None

    def lost(self, captures: Iterable[int]) -> None:  # noqa: B027
        """These captures lack rows, so no request may borrow from them."""

    def stored(self, path: str, whole: bool) -> None:  # noqa: B027
        """A capture has ended. path: path of its store. whole: whether the store exists and has all rows."""

    def handed(self, tracked: Captured, stop: int, rows: int) -> None:  # noqa: B027
        """Rows of positions below `stop` were handed to the workers. rows: number of rows handed over since the
        engine's start, including these.
        """

    def captured(self, tracked: Captured) -> int:
        """Position up to which a preempted request still has its rows."""
        return 0

    def cover(self, output: SchedulerOutput, gathered: int) -> Iterable[tuple[Captured, int]]:
        """Allocate slots for the rows of this step, if `eager`. gathered: number of rows that the workers have gathered
        since the engine's start.

        Returns (request, number of its computed tokens after the step) of requests whose rows cannot wait for the next
        check for full chunks. Their full chunks are handed over in this step.
        """
        return ()

    def look(self, running: Sequence[Captured], scheduled: Mapping[str, int]) -> None:  # noqa: B027
        """Called with the running requests, once every few steps. scheduled: request id -> tokens in this step."""

    def plan(self, output: SchedulerOutput, metadata: StepMetadata) -> None:  # noqa: B027
        """Complete the message of a step that vLLM has planned."""

    def forget(self, tracked: Captured) -> None:  # noqa: B027
        """A request has ended, and its last rows were handed to the workers."""

    def attributes(self, tracked: Captured) -> dict[str, Any]:
        """Root attributes of the store of a request that ends."""
        return {}

    def take_counts(self) -> dict[str, int]:
        """Increases of counters since the last call, by key of `metrics.COUNTERS`."""
        return {}

    def sized(self, pages: int) -> None:  # noqa: B027
        """Set the number of pages of the workers' pools, see `RowMemory.pages`."""

    def close(self) -> None:  # noqa: B027
        """Release files. Called when the engine shuts down, after its workers have shut down."""

    @abstractmethod
    def freed(self, request_ids: Iterable[str]) -> None:
        """The workers have gathered the rows of these ended requests."""

    @abstractmethod
    def take_release(self) -> bool:
        """Whether rows must be exported before the next forward, because blocks were freed. The call resets this."""

    @abstractmethod
    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Called with the scheduler's KV cache manager once it exists."""


class Owner(ABC):
    """Determines where the rows of an engine are. An owner has no state.

    name: the owner's name in `capture_args` and in stores. models: classes that replace models of vLLM, {name in vLLM's
    registry: "module:class"}. `plugin.py` registers these names with vLLM, and `models.py` sets `capturing` of the
    classes.
    """

    name: ClassVar[str]
    models: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def fits(self, vllm_config: VllmConfig) -> bool:
        """Whether the configuration selects this owner. The first owner of OWNERS that fits is used."""

    # ---- at start ---------------------------------------------------------------------------------------------------

    def features(self, vllm_config: VllmConfig) -> list[str]:
        """The features of vLLM that this owner uses, keys of `contract_names.NAMES`."""
        return []

    @abstractmethod
    def check(self, vllm_config: VllmConfig) -> None:
        """Raises ValueError for a configuration that this owner does not support. The message names the fix."""

    def ignored(self, vllm_config: VllmConfig, context: Context) -> str:
        """A warning that names settings without effect; "" if there are none."""
        return ""

    def remedy(self, error: str) -> str:
        """The fix for a request that vLLM refuses with this error; "" if this owner knows none."""
        return ""

    # ---- the tapped model -------------------------------------------------------------------------------------------

    def options(self, options: ServerOptions, given: Container[str], row_bytes: int) -> ServerOptions:
        """Options with the defaults of this owner. given: names of the options in the configuration."""
        return options

    @abstractmethod
    def attach(self, model: nn.Module, context: Context) -> None:
        """Add what this owner needs to the tapped model. Called once the model is built."""

    def output(self, output: Any) -> Any:
        """The output of the tapped model's forward. output: the output of vLLM's forward."""
        return output

    def before_scheduler(self, vllm_config: VllmConfig) -> None:  # noqa: B027
        """Called in the scheduler's process, before vLLM's scheduler reads the configuration of drafts."""

    # ---- the connector's two halves ---------------------------------------------------------------------------------

    @abstractmethod
    def row_slots(self, context: Context, config: KVCacheConfig, vllm_config: VllmConfig) -> RowSlots:
        """Make the scheduler half. Raises ValueError if the cache has no layer for rows."""

    @abstractmethod
    def row_memory(self, context: Context, config: KVCacheConfig, vllm_config: VllmConfig) -> RowMemory:
        """The worker half. Called after vLLM has allocated its caches. Raises ValueError for an unsupported layout."""
