# SPDX-License-Identifier: Apache-2.0
"""The order of training batches, and the values of a batch, compared with expected values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dmi_connector.analysis.training import token_batches
from dmi_connector.analysis.training.batch_order import BatchOrder
from dmi_connector.analysis.training.token_batches import TokenBatches
from dmi_connector.captures.finite import NotFinite

COUNTS = np.array([5, 3, 0, 8, 4, 1, 7])


def order(shuffle: bool = False, rank: int = 0, world_size: int = 1, **more: Any) -> BatchOrder:
    given: dict[str, Any] = {"counts": COUNTS, "batch_size": 4, "buffer_tokens": 8, "seed": 7, **more}
    return BatchOrder(**given, shuffle=shuffle, rank=rank, world_size=world_size)


# ---- order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "buffer", "groups"),
    [
        ([5, 8, 8, 16, 20, 21, 28], 8, [(0, 0, 8), (1, 8, 16), (2, 16, 21), (3, 21, 28)]),
        ([9, 10, 17], 8, [(0, 0, 10), (1, 10, 17)]),
        ([1, 2, 3], 1, [(0, 0, 1), (1, 1, 2), (2, 2, 3)]),
        ([3, 6, 9], 100, [(0, 0, 9)]),
        ([100], 8, [(0, 0, 100)]),
        ([8, 9], 8, [(0, 0, 8), (1, 8, 9)]),
    ],
)
def test_blocks_whose_last_tokens_share_a_buffer_are_one_group(ends: list[int], buffer: int, groups: Any) -> None:
    assert order(buffer_tokens=buffer)._groups(np.array(ends)) == groups


@pytest.mark.parametrize(("rank", "worker", "blocks"), [(0, 0, [0, 4]), (0, 1, [1, 5]), (1, 0, [2, 6]), (1, 1, [3])])
def test_workers_of_ranks_take_blocks_in_turn(rank: int, worker: int, blocks: list[int]) -> None:
    """Each worker yields as many batches as the worker with the fewest tokens."""
    found = order(rank=rank, world_size=2, batch_size=2).stream(3, worker, 2)
    assert found.blocks.tolist() == blocks and found.ends.tolist() == np.cumsum(COUNTS[blocks]).tolist()
    assert (found.batches, found.seed) == (2, (7, 3, 2 * rank + worker))
    assert found.groups == order()._groups(found.ends)


@pytest.mark.parametrize("epoch", [0, 3])
def test_blocks_and_tokens_are_shuffled_by_seed_and_epoch(epoch: int) -> None:
    blocks = np.arange(7)
    np.random.default_rng((7, epoch)).shuffle(blocks)
    shuffled = order(True, rank=1, world_size=2)
    found = shuffled.stream(epoch, 0, 1)
    assert found.blocks.tolist() == blocks[1::2].tolist() and found.seed == (7, epoch, 1)
    for number, begin, end in found.groups:
        places = np.arange(end - begin)
        np.random.default_rng((7, epoch, 1, number)).shuffle(places)
        assert shuffled.places(found, (number, begin, end)).tolist() == places.tolist()
        assert order().places(found, (number, begin, end)).tolist() == list(range(end - begin))


def test_too_few_tokens_for_a_batch_are_refused() -> None:
    none = "^no store has a row that passes skip, phase, after, mask and last; choose other rows$"
    with pytest.raises(ValueError, match=none):
        order(counts=np.array([0, 0])).stream(0, 0, 1)
    few = "^28 tokens are too few for batches of 29; use a smaller batch_size$"
    with pytest.raises(ValueError, match=few):
        order(batch_size=29).stream(0, 0, 1)
    assert order(batch_size=28).stream(0, 0, 1).batches == 1
    many = "^28 tokens are too few for batches of 13 in 2 workers; use a smaller batch_size, or fewer workers$"
    with pytest.raises(ValueError, match=many):
        order(batch_size=13).stream(0, 0, 2)
    assert order(batch_size=12).stream(0, 1, 2).batches == 1


# ---- batches --------------------------------------------------------------------------------------------------------


class View:
    """A fake view of rows without a reduction. Row n is row 10 + n of store n // 2."""

    def __init__(self, hook: str) -> None:
        self.hook, self.stores = hook, ["a.zarr", "b.zarr"]

    @staticmethod
    def decoded(rows: np.ndarray) -> np.ndarray:
        return rows[0]

    @staticmethod
    def origins(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return numbers // 2, numbers + 10

    @staticmethod
    def keys(stores: np.ndarray) -> np.ndarray:
        return np.array(["x", None], object)[stores]


class Seen:
    """A fake `FiniteCheck` that records its calls."""

    def __init__(self, policy: str) -> None:
        self.policy, self.told, self.first = policy, list[Any](), {"a.zarr": 3, "b.zarr": 1}

    def see_all(self, stores: Any, numbers: np.ndarray, rows: np.ndarray) -> None:
        self.told.append((stores, numbers.tolist(), rows.tolist()))


def batches(policy: str = "skip", fields: tuple[str, ...] = (), single: bool = False, **more: Any) -> Any:
    views = {"q": View("q"), "logits": View("logits")}
    if single:
        del views["logits"]
    made = SimpleNamespace(
        views=views,
        fields=fields,
        single=single,
        dtype=None,
        normalization={},
        _view=views["q"],
        _finite=Seen(policy),
        world_size=1,
        rank=0,
        **more,
    )
    made._bad = lambda name, tensor: TokenBatches._bad(made, name, tensor)
    made._refuse_fewer_batches = lambda: TokenBatches._refuse_fewer_batches(made)
    return made


INF, NAN = float("inf"), float("nan")
NUMBERS = np.array([3, 0, 1, 2])


def rows(q: list[float], logits: list[float] = [0, 0, 0, 0], **fields: Any) -> dict[str, np.ndarray]:  # noqa: B006
    arrays = {"q": np.array(q, "f4").reshape(1, -1, 1), "logits": np.array(logits, "f4").reshape(1, -1, 1)}
    return {**arrays, token_batches._ROW: NUMBERS[None], **{name: np.array(v)[None] for name, v in fields.items()}}


def plain(batch: Any) -> dict[str, Any]:
    return {name: v.ravel().tolist() if isinstance(v, torch.Tensor) else v for name, v in batch.items()}


def test_rows_that_are_not_finite_are_left_out_with_their_fields() -> None:
    """A logit of minus infinity is a masked token, and counts as finite."""
    made = batches(fields=("token_ids", "row", "store", "key"))
    given = rows([1, INF, 3, 4], [0, 0, -INF, NAN], token_ids=[7, 8, 9, 6])
    found = TokenBatches._given(made, given)
    assert list(found) == ["q", "logits", "token_ids", "row", "store", "key"]
    assert plain(found) == {
        **{"q": [1.0, 3.0], "logits": [0.0, -INF], "token_ids": [7, 9]},
        **{"row": [13, 11], "store": [1, 0], "key": [None, "x"]},
    }
    assert made._finite.told == [(["a.zarr", "b.zarr"], [0, 1], [10, 12])]
    kept = batches("keep", fields=("token_ids",))
    found = TokenBatches._given(kept, given)
    assert plain(found)["token_ids"] == [7, 8, 9, 6] and kept._finite.told == made._finite.told


def test_a_batch_is_normalised_then_gets_its_dtype() -> None:
    made = batches()
    made.normalization = {"q": SimpleNamespace(apply=lambda tensor: tensor * 100_000)}
    made.dtype = torch.float16
    found = TokenBatches._given(made, rows([0.25, 0.5, 2, 0]))
    assert found["q"].dtype == found["logits"].dtype == torch.float16
    assert plain(found) == {"q": [24992.0, 49984.0, 0.0], "logits": [0.0, 0.0, 0.0]}, "float16 cannot hold 200,000"
    made.dtype = torch.float8_e4m3fn
    assert TokenBatches._given(made, rows([0, 0, 0, 0]))["q"].dtype == torch.float8_e4m3fn


def test_one_hook_alone_is_a_tensor_and_a_batch_without_rows_is_none() -> None:
    made = batches(single=True)
    found = TokenBatches._given(made, rows([1, 2, NAN, 4]))
    assert isinstance(found, torch.Tensor) and found.ravel().tolist() == [1, 2, 4]
    assert TokenBatches._given(made, rows([NAN] * 4)) is None
    made.world_size, made.rank = 2, 1
    why = r"^rank 1 has a batch whose rows all hold .*; leave out b.zarr, or use a larger batch_size$"
    with pytest.raises(NotFinite, match=why):
        TokenBatches._given(made, rows([NAN] * 4))


def test_ranks_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert token_batches._distributed() == (0, 1)
    there = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True)
    there.get_rank, there.get_world_size = lambda: 3, lambda: 5
    monkeypatch.setattr(token_batches.torch, "distributed", there)
    assert token_batches._distributed() == (3, 5)
    there.is_initialized = lambda: False
    assert token_batches._distributed() == (0, 1)


@pytest.mark.parametrize("info", [None, "worker 2"])
def test_a_loop_begins_where_this_process_or_this_worker_is(info: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty batches are skipped. Warnings about values that are not finite come after each batch and at the end."""
    told: list[str] = []
    loops = SimpleNamespace(start=lambda *given: ("of the worker", *given))
    made: Any = SimpleNamespace(_start_loop=lambda: "of the process", _loops=loops, _next="next", _after="after")
    made.worker_batches = lambda start: iter([("batch", start), None, "last"])
    made._finite = SimpleNamespace(warn=lambda: told.append("now"), warn_all=lambda: told.append("all"))
    made._finite_batches = lambda batches: TokenBatches._finite_batches(made, batches)
    monkeypatch.setattr(token_batches, "get_worker_info", lambda: info)
    start = "of the process" if info is None else ("of the worker", info, "next", "after")
    assert list(TokenBatches.__iter__(made)) == [("batch", start), "last"] and told == ["now", "now", "now", "all"]
