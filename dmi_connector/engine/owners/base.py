# SPDX-License-Identifier: Apache-2.0
"""The interface of an owner of rows.

`Owner` answers for an engine, `RowSlots` in the scheduler, `RowMemory` in a worker. The rest of the engine uses these
interfaces only.
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
    """What owners read of `engine.context.CaptureContext`, which knows its owner."""

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
    """What owners read of `engine.scheduler.tracked_request.Tracked`."""

    capture: int
    path: str
    blocks: list[int]
    request: Request
    params: CaptureParams
    selection: Selection

    @property
    def limit(self) -> int: ...


class RowMemory(Protocol):
    """A worker's memory of rows. It is registered under `CaptureContext.cache_layer` among vLLM's layers.

    row_dtype: the model's. step: metadata of the running batch (query starts and vLLM's slots), None before the first.
    poisons: whether the rows of a step are filled with UNWRITTEN before its forward. unpoisoned: slots of the step
    whose rows are still to be filled. scores: where each forward copies its scores; None without probes, and before
    vLLM has made its cache.
    """

    row_dtype: torch.dtype
    step: CommonAttentionMetadata | None
    poisons: bool
    unpoisoned: torch.Tensor | None
    scores: HostScores | None

    @property
    def pages(self) -> int:
        """Pages of a pool without the null page, which the scheduler gives to requests. 0 for rows in vLLM's blocks."""

    @property
    def rows(self) -> torch.Tensor | None:
        """uint8 [slots, row_bytes]. None until there is memory, as in vLLM's profiling run."""

    def rows_and_slots(self, forward: ForwardContext, first: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(rows, int64 slots of the tokens of this forward; padding is negative). None where nothing is written.

        first: the first tap of a forward asks.
        """

    @property
    def cache_slots(self) -> int:
        """Slots of vLLM's cache, of the layer by whose slots the scheduler finds scores."""

    @property
    def step_tokens(self) -> int:
        """Maximum tokens of a step, if their rows stay here when vLLM's slots go; else 0."""

    def slots_in_cache(self, forward: ForwardContext) -> torch.Tensor:
        """The slots of that layer of the tokens of this forward, int64; padding is negative."""

    def place(self, table: np.ndarray) -> None:
        """Change entries of the table of a pool, see `StepMetadata.table`."""

    def poison_step(self) -> None:
        """Fill the rows of the step with UNWRITTEN, once. Call it before the forward, and after freed rows are read."""


class RowSlots(ABC):
    """The scheduler's half: which slots the rows of a request have, and how long they keep them.

    block_size: slots of a block of vLLM's cache group `group`. Blocks of that group are noted in `Tracked.blocks`.
    eager: the blocks of a step are noted, and `cover` is called, before its forward. stays: rows of an ended request
    stay where they are until they are gathered.
    """

    eager: ClassVar[bool] = False
    stays: ClassVar[bool] = False

    def __init__(self, group: int, block_size: int) -> None:
        self.group, self.block_size = group, block_size
        self._in_block = np.arange(block_size)

    def sample_slot(self, tracked: Captured, position: int) -> int:
        """vLLM's slot of a token, by which the workers find its row of logits."""
        return tracked.blocks[position // self.block_size] * self.block_size + position % self.block_size

    def in_cache(self, tracked: Captured, start: int, stop: int) -> np.ndarray:
        """vLLM's slots of positions [start, stop), int64 [stop - start]."""
        size = self.block_size
        before = start // size
        firsts = np.multiply(tracked.blocks[before : -(-stop // size)], size)
        slots: np.ndarray = np.add.outer(firsts, self._in_block).ravel()
        return slots[start - before * size : stop - before * size]

    @abstractmethod
    def of(self, tracked: Captured, start: int, stop: int) -> np.ndarray:
        """Where the rows of positions [start, stop) lie, int64 [stop - start]."""

    @abstractmethod
    def matched(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """The connector's `get_num_new_matched_tokens`. computed: tokens of the request that the prefix cache has."""

    @abstractmethod
    def preempted(self, tracked: Captured, computed: int, metadata: StepMetadata) -> int:
        """A request was preempted: say in the step's message what becomes of its rows.

        computed: tokens that steps since the last look for chunks are known to have computed, 0 if it was in none.
        Returns the position up to which its rows are there.
        """

    @abstractmethod
    def ended(self, request: Request, blocks: list[int], waiting: bool, others: bool) -> bool:
        """A captured request ended. Returns whether vLLM keeps its blocks until workers name the request.

        waiting: more rows wait to be gathered than staging memory takes. others: other captured requests run.
        """

    def check_room(self, tracked: Captured) -> None:  # noqa: B027
        """Raises OptionError for a request that is to be captured whose rows can never have places."""

    def arrived(self, tracked: Captured) -> None:  # noqa: B027
        """A request is to be captured."""

    def begin(self, tracked: Captured) -> Borrow | None:
        """A request is scheduled for the first time. Returns the rows that it borrows from an earlier capture."""
        return None

    def lost(self, captures: Iterable[int]) -> None:  # noqa: B027
        """These captures lack rows."""

    def stored(self, path: str, whole: bool) -> None:  # noqa: B027
        """A capture has ended. path: of its store. whole: it is there and has all rows."""

    def handed(self, tracked: Captured, stop: int, rows: int) -> None:  # noqa: B027
        """Rows of positions below `stop` were handed to the workers. rows: handed since the start, these included."""

    def captured(self, tracked: Captured) -> int:
        """Position up to which a request that was preempted still has its rows."""
        return 0

    def cover(self, output: SchedulerOutput, gathered: int) -> Iterable[tuple[Captured, int]]:
        """Give rows of this step a place, if `eager`. gathered: rows that the workers have gathered since the start.

        Returns requests whose rows cannot wait for the next look for chunks, each with its tokens after the step. Their
        rows are handed after the looks of the step.
        """
        return ()

    def look(self, running: Sequence[Captured], scheduled: Mapping[str, int]) -> None:  # noqa: B027
        """Running requests are looked at, once in some steps. scheduled: tokens of this step by request."""

    def plan(self, output: SchedulerOutput, metadata: StepMetadata) -> None:  # noqa: B027
        """The message of a step is complete but for what the owner has to say, and vLLM has planned the step."""

    def forget(self, tracked: Captured) -> None:  # noqa: B027
        """A request that had arrived ended, and its last rows were handed."""

    def attributes(self, tracked: Captured) -> dict[str, Any]:
        """Root attributes of the store of a request that ends."""
        return {}

    def take_counts(self) -> dict[str, int]:
        """What changed since the last call, by key of `metrics.COUNTERS`."""
        return {}

    def sized(self, pages: int) -> None:  # noqa: B027
        """Set the number of pages of the workers' pools, see `RowMemory.pages`."""

    @abstractmethod
    def freed(self, request_ids: Iterable[str]) -> None:
        """The workers have gathered the rows of these ended requests."""

    @abstractmethod
    def take_release(self) -> bool:
        """Whether rows must leave before the next forward because blocks were freed. False once it was read."""

    @abstractmethod
    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Called with the scheduler's KV cache manager once it exists."""


class Owner(ABC):
    """Where the rows of an engine lie, and what depends on it. It has no state.

    name: as `capture_args` takes it and stores say it. models: our classes for models of vLLM that it needs, {name in
    vLLM's registry: "module:class"}. `models.py` makes them known to vLLM and sets their `capturing`.
    """

    name: ClassVar[str]
    models: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def fits(self, vllm_config: VllmConfig) -> bool:
        """Whether the configuration selects this owner. Owners are asked in the order of OWNERS."""

    # ---- at start ---------------------------------------------------------------------------------------------------

    def features(self, vllm_config: VllmConfig) -> list[str]:
        """The features of vLLM that it uses, keys of `contract_names.NAMES`."""
        return []

    @abstractmethod
    def check(self, vllm_config: VllmConfig) -> None:
        """Raises ValueError for a configuration that it does not support, with the fix."""

    def ignored(self, vllm_config: VllmConfig, context: Context) -> str:
        """A sentence that names settings without effect, or ""."""
        return ""

    def remedy(self, error: str) -> str:
        """What to do where vLLM refuses a request with this error, or ""."""
        return ""

    # ---- the tapped model -------------------------------------------------------------------------------------------

    def options(self, options: ServerOptions, given: Container[str], row_bytes: int) -> ServerOptions:
        """Options with the defaults of this owner. given: the names of those that the configuration has."""
        return options

    @abstractmethod
    def attach(self, model: nn.Module, context: Context) -> None:
        """Called once the tapped model is built: add what this owner needs to it."""

    def output(self, output: Any) -> Any:
        """What the forward of the tapped model returns. output: what vLLM's own returns."""
        return output

    # ---- the connector's two halves ---------------------------------------------------------------------------------

    @abstractmethod
    def row_slots(self, context: Context, config: KVCacheConfig, vllm_config: VllmConfig) -> RowSlots:
        """The scheduler's half. Raises ValueError where the cache has no place for rows."""

    @abstractmethod
    def row_memory(self, context: Context, config: KVCacheConfig, vllm_config: VllmConfig) -> RowMemory:
        """The worker's half, once vLLM has made its caches. Raises ValueError for an unknown layout."""
