# SPDX-License-Identifier: Apache-2.0
"""Assigns hooks to ranks: slices under tensor parallelism, replicated hooks, and hooks of pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dmi_connector.hooks import Hook, ModelDims

Place = tuple[str, int]
"""(hook name, layer)."""

_UNEVEN = 1.1
"""Maximum bytes of a rank's row, as a multiple of the mean over all ranks."""


@dataclass(frozen=True)
class HookShard:
    """The slice of a hook that one rank has: slice `shard` of `shards`, each of `width` elements.

    owner: False if another rank has the same slice and writes it. For a replicated hook, `owner` is True only on rank
    0, and `writers_of_whole` decides which rank writes it.
    """

    width: int
    shards: int
    shard: int
    owner: bool


def shard_of(hook: Hook, dims: ModelDims, tp: int, rank: int) -> HookShard:
    """The slice of `hook` on `rank`, as in vLLM. With fewer KV heads than ranks, several ranks share a KV head."""
    width = dims.width(hook)
    if not hook.sharded or tp == 1:
        return HookShard(width, 1, 0, rank == 0)
    if hook.width == "K" and dims.kv_heads < tp:
        copies = tp // dims.kv_heads
        return HookShard(dims.head_dim, dims.kv_heads, rank // copies, rank % copies == 0)
    return HookShard(width // tp, tp, rank, True)


def writers_of_stages(places: Iterable[Place], dims: ModelDims, stages: Sequence[range]) -> dict[Place, int]:
    """The rank that computes each hook and layer in an engine with pipeline stages.

    stages: the layers of each rank. `embed` is on the first stage. Other hooks that exist once are on the last stage.
    """
    by_layer = {layer: rank for rank, layers in enumerate(stages) for layer in layers}

    def layer_of(name: str, layer: int) -> int:
        if dims.hooks[name].scope != "once":
            return layer
        return 0 if name == "embed" else dims.layers - 1

    return {(name, layer): by_layer[layer_of(name, layer)] for name, layer in places}


def writers_of_whole(nbytes: Mapping[Place, int], logits: int, dims: ModelDims, tp: int) -> dict[Place, int]:
    """Assign each layer of each replicated hook to one rank, so that row sizes are balanced.

    Hooks are assigned from the largest to the smallest, each to the rank with the fewest bytes. While a row is larger
    than _UNEVEN times the mean, the layers of the largest hook in it are divided among all ranks, in contiguous runs.
    Of the assignments tried, the one with the smallest maximum row size is returned.

    nbytes: bytes on one rank of each selected hook and layer, in the order of the rows. logits: bytes per row of
    logits, which rank 0 writes. tp: tensor-parallel size.
    """
    whole: dict[str, dict[int, int]] = {}  # replicated hook -> {layer: bytes}
    rows = [0] * tp
    for (name, layer), size in nbytes.items():
        shards = [shard_of(dims.hooks[name], dims, tp, rank) for rank in range(tp)]
        if shards[0].shards == 1:
            whole.setdefault(name, {})[layer] = size
            continue
        for rank, shard in enumerate(shards):
            rows[rank] += size * shard.owner
    apart: set[str] = set()  # hooks whose layers are divided among the ranks
    found, held = best = _give_out(whole, apart, rows, logits)
    while max(held) * tp > _UNEVEN * sum(held):
        able = [name for name in whole if name not in apart and len(whole[name]) > 1]
        able = [name for name in able if held[found[name, next(iter(whole[name]))]] == max(held)]
        if not able:
            break
        apart |= {max(able, key=lambda name: sum(whole[name].values()))}
        found, held = _give_out(whole, apart, rows, logits)
        # If several ranks have the longest row, the maximum falls only after the last of them is changed.
        if max(held) < max(best[1]):
            best = found, held
    return best[0]


def _give_out(
    whole: Mapping[str, Mapping[int, int]], apart: set[str], rows: Sequence[int], logits: int
) -> tuple[dict[Place, int], list[int]]:
    """(rank of each layer of each replicated hook, bytes per row on each rank).

    whole: replicated hook -> {layer: bytes}. apart: hooks whose layers are divided among the ranks. rows: bytes per row
    of the other hooks on each rank. logits: as in `writers_of_whole`.
    """
    found: dict[Place, int] = {}
    held = [*rows]
    load = lambda rank: held[rank] + (0 if rank else logits)  # noqa: E731
    for name in sorted(whole, key=lambda name: (name not in apart, -sum(whole[name].values()))):
        layers = list(whole[name].items())
        run = -(-len(layers) // len(rows)) if name in apart else len(layers)
        takers = sorted(range(len(rows)), key=load)
        for rank, first in zip(takers, range(0, len(layers), run), strict=False):
            for layer, size in layers[first : first + run]:
                found[name, layer] = rank
                held[rank] += size
    return found, held
