# SPDX-License-Identifier: Apache-2.0
"""Batches of a `TokenDataset`. An epoch has each token at most once. Runs are reproducible, and resuming is exact."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dmi_connector import TokenDataset, open_captures  # noqa: E402
from dmi_connector.analysis.export.packed import PackedRows  # noqa: E402
from dmi_connector.analysis.training.token_batches import TokenBatches  # noqa: E402
from dmi_connector.analysis.training.worker_loops import Batch, Position, WorkerLoops  # noqa: E402
from dmi_connector.captures.captures import Captures  # noqa: E402
from dmi_connector.layout import ArraySpec  # noqa: E402
from dmi_connector.reduce import parse  # noqa: E402
from tests import storekit as kit  # noqa: E402
from tests.shorter import soak  # noqa: E402

LENGTHS = (300, 20, 128, 129, 77, 64)
TOKENS = sum(LENGTHS)
SPECS = (ArraySpec("resid_pre", "bfloat16", (0, 1), 8), ArraySpec("z", "float32", (0, 1), 4))


def named(number: int, length: int) -> kit.Values:
    """Values that identify their token: 1000 * store + row, as a float in `z` and as raw bits in `resid_pre`."""
    ids = np.arange(length) + 1000 * number
    z = np.zeros((2, length, 4), "f4")
    z[1] = ids[:, None]
    resid = np.zeros((2, length, 8), "u2")
    resid[1] = ids[:, None]
    return {"resid_pre": resid, "z": z.view("u4")}


EVERY = {1000 * i + row for i, length in enumerate(LENGTHS) for row in range(length)}


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Captures:
    folder = tmp_path_factory.mktemp("tokens")
    stores = kit.Store(4 << 20)
    for i, length in enumerate(LENGTHS):
        stores.write(folder / f"{i}.zarr", SPECS, length, values=named(i, length), chunk=32, attrs={"num_layers": 2})
    assert stores.shutdown()
    return open_captures(folder)


def make(captures: Captures, **options: Any) -> TokenDataset:
    return TokenDataset(captures, **{"hooks": "z@1", "batch_size": 20, "buffer_tokens": 150, "seed": 5, **options})


def ids(batch: Batch) -> list[int]:
    assert isinstance(batch, torch.Tensor)
    values = batch[:, 0].view(torch.int16) if batch.dtype == torch.bfloat16 else batch[:, 0]
    return values.to(torch.int64).tolist()


def tokens(batches: Any) -> list[list[int]]:
    return [ids(batch) for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [token for batch in batches for token in batch]


# ---- order ----------------------------------------------------------------------------------------------


def test_an_epoch_has_each_token_once_in_batches_of_one_size(captures: Captures) -> None:
    data = make(captures)
    found = tokens(data)
    assert len(found) == data.batches() == TOKENS // 20 and {len(batch) for batch in found} == {20}
    assert len(set(flat(found))) == len(flat(found)) and set(flat(found)) <= EVERY
    assert data.num_tokens == TOKENS


def test_without_shuffle_tokens_come_in_the_order_of_the_stores(captures: Captures) -> None:
    found = flat(tokens(make(captures, shuffle=False)))
    assert found == sorted(EVERY)[: TOKENS // 20 * 20]


def test_the_seed_decides_the_order_and_each_epoch_has_its_own(captures: Captures) -> None:
    first, again, other = (tokens(make(captures, seed=seed, epochs=2)) for seed in (5, 5, 6))
    assert first == again != other
    half = len(first) // 2
    assert first[:half] != first[half:]


def test_batches_mix_stores(captures: Captures) -> None:
    kinds = [len({token // 1000 for token in batch}) for batch in tokens(make(captures, buffer_tokens=718))]
    assert np.mean(kinds) > 3.5, "six stores, and batches of 20"


def test_without_epochs_batches_never_end(captures: Captures) -> None:
    endless = iter(make(captures, epochs=None))
    assert sum(1 for _, batch in zip(range(100), endless, strict=False) if len(ids(batch)) == 20) == 100


def test_several_hooks_give_rows_of_the_same_tokens(captures: Captures) -> None:
    data = make(captures, hooks=["z@1", "resid_pre@1", "blocks.0.hook_resid_post"])
    for batch in data:
        assert isinstance(batch, dict) and list(batch) == ["z@1", "resid_pre@1", "blocks.0.hook_resid_post"]
        assert ids(batch["z@1"]) == ids(batch["resid_pre@1"]) == ids(batch["blocks.0.hook_resid_post"])
        assert batch["resid_pre@1"].shape == (20, 8) and batch["resid_pre@1"].dtype == torch.bfloat16


def test_a_dtype_and_skipped_rows_can_be_asked_for(captures: Captures) -> None:
    data = make(captures, hooks="resid_pre@-1", dtype=torch.float32, skip=2, shuffle=False)
    batches = list(data)
    assert {batch.dtype for batch in batches} == {torch.float32} and data.num_tokens == TOKENS - 2 * len(LENGTHS)
    assert {token % 1000 for token in flat(tokens(make(captures, skip=2)))}.isdisjoint({0, 1})


def test_a_dtype_that_numpy_lacks_can_be_asked_for(captures: Captures) -> None:
    batch = next(iter(make(captures, dtype=torch.float8_e4m3fn)))
    assert isinstance(batch, torch.Tensor) and batch.dtype == torch.float8_e4m3fn


def test_one_buffer_or_many_give_each_token_once(captures: Captures) -> None:
    for buffer in (20, 33, 10_000):
        found = flat(tokens(make(captures, buffer_tokens=buffer)))
        assert len(set(found)) == len(found) == TOKENS // 20 * 20


# ---- memory ---------------------------------------------------------------------------------------------


def test_two_buffers_serve_an_epoch_whose_batches_are_not_kept(captures: Captures) -> None:
    data = make(captures, buffer_tokens=64, epochs=3)
    for batch in data:
        assert len(ids(batch)) == 20
    assert len(data._memory._made["z@1"]) <= 2


def test_batches_that_are_kept_do_not_change(captures: Captures) -> None:
    data = make(captures, buffer_tokens=64, epochs=2)
    kept = list(data)
    assert tokens(kept) == tokens(make(captures, buffer_tokens=64, epochs=2))


# ---- ranks and workers ----------------------------------------------------------------------------------


def test_ranks_read_different_tokens_in_equally_many_batches(captures: Captures) -> None:
    parts = [tokens(make(captures, rank=rank, world_size=3)) for rank in range(3)]
    assert len({len(part) for part in parts}) == 1 and len(parts[0]) >= 8
    together = flat([batch for part in parts for batch in part])
    assert len(set(together)) == len(together)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_read_different_tokens(captures: Captures, workers: int) -> None:
    data = make(captures, epochs=2)
    found = tokens(data.loader(workers))
    assert len(found) == data.batches(0, workers) + data.batches(1, workers)
    epoch = flat(found[: data.batches(0, workers)])
    assert len(set(epoch)) == len(epoch)
    plain = torch.utils.data.DataLoader(make(captures, epochs=2), batch_size=None, num_workers=workers)
    assert tokens(plain) == found


@pytest.mark.parametrize("workers", [0, *soak(2)])
def test_a_collate_function_gets_each_batch(captures: Captures, workers: int) -> None:
    found = list(make(captures).loader(workers, collate_fn=_ids))
    assert found == [_ids(batch) for batch in make(captures).loader(workers)] and len(found) > 2


def _ids(batch: Any) -> list[int]:
    return list(batch.flatten().tolist())


def test_one_worker_gives_what_none_gives(captures: Captures) -> None:
    assert tokens(make(captures).loader(1)) == tokens(make(captures).loader(0)) == tokens(make(captures))


# ---- loops --------------------------------------------------------------------------------------

Loops = Callable[[TokenDataset], Iterator[list[list[int]]]]


def plain(workers: int, **options: Any) -> Loops:
    def loops(data: TokenDataset) -> Iterator[list[list[int]]]:
        loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=workers, **options)
        while True:
            yield tokens(loader)

    return loops


def own(workers: int | None, again: bool = False) -> Loops:
    def loops(data: TokenDataset) -> Iterator[list[list[int]]]:
        loader = data if workers is None else data.loader(workers)
        while True:
            yield tokens(data.loader(workers) if again and workers is not None else loader)

    return loops


@pytest.mark.parametrize(
    ("loops", "workers"),
    [
        pytest.param(own(None), 1, id="data"),
        pytest.param(own(2), 2, id="loader"),
        pytest.param(own(0, again=True), 1, id="a-loader-for-each"),
        pytest.param(plain(0), 1, id="DataLoader"),
        pytest.param(plain(2), 2, id="DataLoader-workers"),
        pytest.param(plain(2, persistent_workers=True), 2, id="DataLoader-persistent"),
    ],
)
def test_each_loop_has_its_own_order_and_left_out_tokens(captures: Captures, loops: Loops, workers: int) -> None:
    data = make(captures)
    found = list(itertools.islice(loops(data), 3))
    together = tokens(make(captures, epochs=3).loader(workers if workers > 1 else 0))
    assert [batch for loop in found for batch in loop] == together, "as one loop over three epochs"
    assert found[0] != found[1] != found[2] != found[0]
    left = [EVERY - set(flat(loop)) for loop in found]
    assert left[0] and not left[0] == left[1] == left[2], "other tokens do not fill a batch"
    if workers == 1:
        data.set_epoch(1)
        assert next(loops(data)) == found[1] and next(loops(data)) == found[2]


def test_a_loop_that_ends_early_uses_up_its_order(captures: Captures) -> None:
    orders = [tokens(make(captures, epochs=3))[i * 35 : (i + 1) * 35] for i in range(3)]
    data = make(captures)
    next(iter(data))
    assert tokens(data) == orders[1]
    loader = data.loader(0)
    first = [ids(batch) for batch in itertools.islice(loader, 5)]
    assert first + tokens(loader) == orders[2], "a loader must continue with the rest"
    endless = make(captures, epochs=None)
    assert [ids(next(iter(endless))) for _ in range(3)] == [order[0] for order in orders]


def test_set_epoch_overrides_the_rest_of_a_loop(captures: Captures) -> None:
    data = make(captures)
    loader = data.loader(0)
    orders = [tokens(loader) for _ in range(3)]
    next(iter(loader))
    loader.set_epoch(2)
    assert tokens(loader) == orders[2]
    next(iter(loader))
    data.set_epoch(1)
    assert tokens(loader) == orders[1] and tokens(data) == orders[2]
    with pytest.raises(ValueError, match="epoch -1 is not valid; use 0 or more"):
        data.set_epoch(-1)


def test_a_data_set_that_was_pickled_counts_its_loops_too(captures: Captures) -> None:
    loops = plain(2)(pickle.loads(pickle.dumps(make(captures))))
    assert next(loops) != next(loops)


@pytest.mark.parametrize("workers", [None, 0, *soak(2)])
def test_a_resumed_loop_is_followed_by_the_next(captures: Captures, workers: int | None) -> None:
    def start() -> Any:
        data = make(captures, epochs=2)
        return data if workers is None else data.loader(workers)

    loops = start()
    every = [tokens(loops) for _ in range(3)]
    for after in (10,) if workers else (0, 10, 40):  # worker processes take seconds to start
        loops = start()
        tokens(loops)
        begun = iter(loops)
        for _ in range(after):
            next(begun)
        state = pickle.loads(pickle.dumps(loops.state_dict()))
        begun.close()
        resumed = start()
        resumed.load_state_dict(state)
        assert [tokens(resumed), tokens(resumed)] == [every[1][after:], every[2]]


# ---- resume ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 7, 35, 36, 70])
def test_iteration_resumes_exactly(captures: Captures, after: int) -> None:
    every = tokens(make(captures, epochs=2))
    data = make(captures, epochs=2)
    running = iter(data)
    for _ in range(after):
        next(running)
    state = pickle.loads(pickle.dumps(data.state_dict()))
    older = make(captures, epochs=2)
    older.load_state_dict({name: value for name, value in state.items() if name != "end"})
    assert tokens(older) == every[after:]
    resumed = make(captures, epochs=2)
    resumed.load_state_dict(state)
    assert tokens(resumed) == every[after:]
    assert tokens(resumed) == tokens(make(captures, epochs=4))[len(every) :], "the next loop is a whole one"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_resumes_exactly(captures: Captures, workers: int) -> None:
    every = tokens(make(captures, epochs=2).loader(workers))
    per_epoch = make(captures).batches(0, max(1, workers))
    for after in (1, per_epoch, per_epoch + 3):
        loader = make(captures, epochs=2).loader(workers)
        running = iter(loader)
        for _ in range(after):
            next(running)
        state = loader.state_dict()
        del running
        resumed = make(captures, epochs=2).loader(workers)
        resumed.load_state_dict(state)
        assert tokens(resumed) == every[after:]


def test_a_state_of_other_data_or_workers_is_refused(captures: Captures) -> None:
    state = make(captures).state_dict()
    with pytest.raises(ValueError, match="the state lacks batch, workers, world_size, of; give a result of state_dict"):
        make(captures).load_state_dict({"epoch": 3, "optimizer": {}})
    for other in ({"seed": 6}, {"batch_size": 21}, {"hooks": "resid_pre@1"}, {"skip": 1}):
        with pytest.raises(ValueError, match="the state is of other stores or settings"):
            make(captures, **other).load_state_dict(state)
    with pytest.raises(ValueError, match="the state is of workers 1, not 2"):
        make(captures).loader(2).load_state_dict(state)
    with pytest.raises(ValueError, match="the state is of world_size 1, not 2"):
        make(captures, rank=0, world_size=2).load_state_dict(state)


# ---- what trainers take ---------------------------------------------------------------------------------


def test_next_gives_a_batch_of_activations_as_dictionary_learning_asks(captures: Captures) -> None:
    data = iter(make(captures, hooks="resid_pre@1", dtype=torch.float32, epochs=None))
    batch = next(data)
    assert batch.shape == (20, 8) and batch.dtype == torch.float32 and batch.is_contiguous()


def test_the_config_is_plain(captures: Captures) -> None:
    config = make(captures).config
    assert config["hooks"] == ["z@1"] and config["batch_size"] == 20 and config["tokens"] == TOKENS


def test_a_directory_can_be_given(captures: Captures) -> None:
    assert tokens(TokenDataset(captures.infos[0].store.parent, "z@1", 20, buffer_tokens=150, seed=5)) == tokens(
        make(captures)
    )


# ---- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hooks": []}, ValueError, "not valid; name a hook"),
        ({"batch_size": 0}, ValueError, "batch_size 0 is not valid; give an integer of at least 1"),
        ({"batch_size": 5.0}, ValueError, "batch_size 5.0 is not valid; give an integer of at least 1"),
        ({"buffer_tokens": "9"}, ValueError, "buffer_tokens '9' is not valid; give an integer"),
        ({"seed": -1}, ValueError, "seed -1 is not valid; give an integer of at least 0"),
        ({"epochs": -1}, ValueError, "epochs -1 is not valid; give an integer of at least 1"),
        ({"epochs": 0}, ValueError, "epochs 0 is not valid"),
        ({"buffer_tokens": 19}, ValueError, "give a batch_size from 1 to buffer_tokens"),
        ({"hooks": "z"}, ValueError, r"'z' has layers \[0, 1\]; name one, as in 'z@0'"),
        ({"hooks": "z@one"}, ValueError, "'z@one' names no layer"),
        ({"hooks": "z@7"}, KeyError, "no layer 7"),
        ({"dtype": "float32"}, ValueError, "dtype 'float32' is not valid; give a dtype of torch"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank 2 is not valid; use 0 to 1"),
        ({"rank": True, "world_size": 2}, ValueError, "rank True is not valid; use 0 to 1"),
        ({"seed": True}, ValueError, "seed True is not valid; give an integer of at least 0"),
        ({"batch_size": True}, ValueError, "batch_size True is not valid; give an integer of at least 1"),
        ({"epochs": True}, ValueError, "epochs True is not valid; give an integer of at least 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    captures: Captures, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(captures, **options)


def test_too_few_tokens_for_workers_are_refused_before_one_starts(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make(captures, batch_size=120).loader(workers=6)
    monkeypatch.setattr(torch.utils.data.DataLoader, "__iter__", lambda _: pytest.fail("workers start"))
    with pytest.raises(ValueError, match=r"^718 tokens are too few for batches of 120 in 6 workers; use a smaller"):
        iter(loader)


def test_a_choice_without_a_row_is_refused(captures: Captures) -> None:
    with pytest.raises(ValueError, match=r"^no store has a row that passes skip, phase, after, mask and last"):
        list(make(captures, after=[1 << 20]))


def test_too_few_tokens_are_refused(captures: Captures) -> None:
    with pytest.raises(ValueError, match=r"^718 tokens are too few for batches of 800; use a smaller batch_size$"):
        len(make(captures, batch_size=800, buffer_tokens=800))
    with pytest.raises(ValueError, match="718 tokens are too few for batches of 400 in 2 workers"):
        list(make(captures, batch_size=400, buffer_tokens=400, world_size=2, rank=0))


def test_a_damaged_chunk_ends_the_iteration_with_an_error(tmp_path: Path) -> None:
    stores = kit.Store(1 << 20)
    stores.write(tmp_path / "a.zarr", SPECS, 64, values=named(0, 64), codec="none", attrs={"num_layers": 2})
    assert stores.shutdown()
    path = tmp_path / "a.zarr/z/c/0/0/0"
    path.write_bytes(b"\x01" + path.read_bytes()[1:])
    data = TokenDataset(tmp_path, "z@0", 16)
    with pytest.raises(ValueError, match="the chunk does not match its crc32c"):
        list(data)


def test_a_store_without_the_hook_ends_the_iteration_with_its_name(tmp_path: Path) -> None:
    stores = kit.Store(1 << 20)
    for i, specs in enumerate([SPECS, SPECS[:1]]):
        stores.write(tmp_path / f"{i}.zarr", specs, 64, values=named(i, 64), attrs={"num_layers": 2})
    assert stores.shutdown()
    options: dict[str, Any] = {"hooks": "z@1", "batch_size": 16, "buffer_tokens": 16, "shuffle": False}
    data = TokenDataset(open_captures(tmp_path), **options)
    with pytest.raises(KeyError, match=r"1\.zarr did not capture \['z@1'\]; leave such stores out"):
        list(data)
    assert tokens(TokenDataset(open_captures(tmp_path, hooks="z@1"), **options)) == [
        list(range(i, i + 16)) for i in range(0, 64, 16)
    ]


@pytest.fixture
def reduced(tmp_path: Path) -> Iterator[tuple[Path, np.ndarray]]:
    reduction = parse("int8")
    wide = np.random.default_rng(0).standard_normal((1, 100, 8)).astype("f4")
    stored = reduction.encode(torch.from_numpy(wide[0])).numpy()[None]
    settings = {**reduction.settings(), "width": 8, "dtype": "float32"}
    stores = kit.Store(1 << 20)
    spec = ArraySpec("resid_pre", "uint8", (0,), stored.shape[-1], reduce=settings)
    stores.write(tmp_path / "a.zarr", [spec], 100, values={"resid_pre": stored})
    assert stores.shutdown()
    yield tmp_path, wide[0]


def test_an_absent_torch_is_named_with_its_extra() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from dmi_connector import *\n"
        "try: from dmi_connector import TokenDataset\n"
        "except ImportError as error: assert 'install dmi_connector[torch]' in str(error), error\n"
        "else: raise AssertionError"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_reduced_hooks_are_decoded(reduced: tuple[Path, np.ndarray]) -> None:
    path, wide = reduced
    found = torch.cat(list(TokenDataset(path, "resid_pre@0", 25, shuffle=False)))
    assert found.dtype == torch.float32 and np.abs(found.numpy() - wide).max() < 0.05


def test_a_name_that_means_another_tensor_there_is_refused(tmp_path: Path) -> None:
    owner = kit.Store(1 << 20)
    attrs = {"num_layers": 1, "architecture": "GraniteForCausalLM"}
    owner.write(tmp_path / "a.zarr", [ArraySpec("embed", "float32", (), 8)], 20, attrs=attrs)
    assert owner.shutdown()
    captures = open_captures(tmp_path)
    with pytest.raises(KeyError, match="'hook_embed' has no equivalent here"):
        TokenDataset(captures, "hook_embed", batch_size=4)
    with pytest.raises(KeyError, match="'hook_embed' has no equivalent here"):
        PackedRows(captures, "hook_embed", 4)
    assert PackedRows(captures, "embed", 4).name == "embed"


def test_names_that_depend_on_the_model_are_those_of_its_store(tmp_path: Path) -> None:
    """They are the names of queries with and without a norm, and of attention outputs before and after a post-norm."""
    owner = kit.Store(1 << 20)
    specs = [ArraySpec(name, "float32", (0, 1), 8) for name in ("q", "attn_proj", "attn_out")]
    for name, attrs, held in (
        ("plain", {"qk_norm": False}, specs[:1]),
        ("normed", {"qk_norm": True}, specs[:1]),
        ("post", {"qk_norm": True}, specs),
    ):
        owner.write(tmp_path / f"{name}.zarr", held, 20, attrs={"num_layers": 2, **attrs})
    assert owner.shutdown(kit.PATIENCE)
    every = open_captures(tmp_path)
    for name, hook, stores in (
        ("blocks.1.attn.hook_q", "q", ["plain"]),
        ("blocks.1.attn.q_norm.hook_out", "q", ["normed", "post"]),
        ("blocks.1.attn.hook_out", "attn_proj", ["post"]),
        ("blocks.1.ln1_post.hook_out", "attn_out", ["post"]),
    ):
        found = every.filter(hooks=name)
        assert [info.store.stem for info in found.infos] == stores, name
        [batch] = TokenDataset(found[:1], name, 20, shuffle=False)
        np.testing.assert_array_equal(batch, found[0].numpy(hook, 1))
        np.testing.assert_array_equal(batch, found[0][name])
        packed = PackedRows(found[:1], name, 4)
        assert packed.name == name
        np.testing.assert_array_equal(packed.read(0, 5).reshape(20, 8), batch)
    with pytest.raises(KeyError, match="no equivalent here: not captured: q and k are after the norm"):
        TokenDataset(every.filter(hooks="attn_proj"), "blocks.1.attn.hook_q", 4)
    with pytest.raises(KeyError, match=r"'blocks\.1\.hook_nothing' has no equivalent here; suffixes that have"):
        every.filter(hooks="blocks.1.hook_nothing")
    with pytest.raises(ValueError, match=r"no store to read 'blocks\.1\.attn\.hook_q' from"):
        TokenDataset(every[:0], "blocks.1.attn.hook_q", 4)


def test_rows_that_fill_no_batch_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stores of 10 and 4 rows: the second begins where the only batch ends."""
    owner = kit.Store(1 << 20)
    for name, rows in (("a", 10), ("b", 4)):
        owner.write(tmp_path / f"{name}.zarr", [ArraySpec("q", "float32", (0,), 4)], rows)
    assert owner.shutdown()
    data = TokenDataset(open_captures(tmp_path), "q@0", batch_size=10, buffer_tokens=10, shuffle=False)
    read: list[int] = []
    fetch = TokenBatches._read

    def noted(self: TokenBatches, stream: Any, group: Any, memory: Any) -> Any:
        read.append(group[0])
        return fetch(self, stream, group, memory)

    monkeypatch.setattr(TokenBatches, "_read", noted)
    assert [len(batch) for batch in data] == [10] and read == [0]


def test_each_loop_of_workers_begins_where_the_one_before_it_ended() -> None:
    """Workers of one loop have the same base seed. The seed of a worker is the base seed plus its id."""
    loops, first = WorkerLoops(), Position(2, 5, 9)

    def start(base: int, worker: int) -> Position:
        info = SimpleNamespace(seed=base + worker, id=worker)
        return loops.start(info, first, lambda at: Position(at.epoch + 1, 0, at.end))

    assert [start(1000, 0), start(7000, 0), start(50, 1)] == [first, Position(3, 0, 9), Position(4, 0, 9)]
    assert start(50, 1) == Position(5, 0, 9), "persistent workers keep their seed"


def test_loops_of_workers_with_equal_seeds_continue() -> None:
    """Seeds are equal if torch is seeded before each loop. Each call of `start` stands for a new process."""
    loops, first = WorkerLoops(), Position(0, 0, 1)
    epochs = []
    for worker in (0, 1, 1, 0, 0, 1, 2, 2, 0, 1):
        loops._own = None
        info = SimpleNamespace(seed=7 + worker, id=worker)
        epochs.append(loops.start(info, first, lambda at: Position(at.epoch + 1, 0, at.end + 1)).epoch)
    assert epochs == [0, 0, 1, 1, 2, 2, 2, 3, 3, 3]
