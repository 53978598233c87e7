# SPDX-License-Identifier: Apache-2.0
"""Rows with the attributes of their tokens, selected by phase, by mask, after a token, or from the end. Logits."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector import Capture, TokenDataset, open_captures
from dmi_connector.analysis.logprobs import top_logprobs
from dmi_connector.analysis.training.normalization import Normalization
from dmi_connector.captures.captures import Captures
from dmi_connector.captures.row_choice import RowChoice, Runs
from dmi_connector.layout import ArraySpec
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.read.files.store_files import LocalFiles
from tests import storekit as kit

torch = pytest.importorskip("torch")

LENGTHS, PROMPTS, SAMPLES, START = (70, 9, 40), (50, 4, 20), (3, 2, 4), 5
VOCAB = 320
"""Size of the vocabulary. The next tokens of some samples are outside it."""
END = 7
"""The token after which the answer begins."""
SPECS = (
    ArraySpec("z", "float32", (0, 1), 4),
    ArraySpec("resid_pre", "bfloat16", (0, 1), 4),
    ArraySpec("logits", "float32", (), VOCAB),
)
KEYS = ("a", None, "c")


def ids_of(number: int) -> np.ndarray:
    """Token ids of a store. `END` occurs twice, but not in the second store."""
    ids = np.arange(LENGTHS[number]) + 100 * (number + 1)
    if number != 1:
        ids[[LENGTHS[number] // 2, LENGTHS[number] - 3]] = END
    return ids


def z_of(number: int) -> np.ndarray:
    """Values of z, [rows, 4]. The first value identifies store and row."""
    z = np.random.default_rng(number).standard_normal((LENGTHS[number], 4)).astype("f4")
    z[:, 0] = 1000 * number + np.arange(LENGTHS[number])
    return z


def logits_of(number: int) -> np.ndarray:
    return np.random.default_rng(number + 9).standard_normal((SAMPLES[number], VOCAB)).astype("f4")


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Captures:
    """Three stores from position 5 on. Rows 32 to 39 and a sample of the last one are missing."""
    folder, owner = tmp_path_factory.mktemp("rows"), kit.Store(4 << 20)
    for i, length in enumerate(LENGTHS):
        attrs = {"prompt_len": START + PROMPTS[i], "num_layers": 2, "start": START}
        record = owner.open(folder / f"{i}.zarr", *SPECS, chunk=8, segment=16, attrs=attrs, key=KEYS[i])
        values = {"z": np.stack([0 * z_of(i), z_of(i)]).view("u4"), "resid_pre": np.ones((2, length, 4), "u2")}
        owner.feed(record, values, length, skip=[32] if i == 2 else [], ids=ids_of(i))
        for n, row in enumerate(logits_of(i)):
            if (i, n) != (2, 1):
                owner.put_rows(record, "logits", row[None].view("u4"), n, START + PROMPTS[i] - 1 + n)
        losses = [Loss.of(Cause.FELL_BEHIND, [[32, 40]])] if i == 2 else []
        owner.close(record, length, {"logits": SAMPLES[i]}, ids_of(i), losses)
        assert owner.flush(kit.PATIENCE)
    assert owner.shutdown()
    return open_captures(folder, incomplete=True)


def rows_where(keep: Any) -> list[int]:
    """The first values of z of all rows that are not missing and that keep(store, row) selects."""
    there = [(i, row) for i, n in enumerate(LENGTHS) for row in range(n) if not (i == 2 and row >= 32)]
    return [1000 * i + row for i, row in there if keep(i, row)]


def names(values: np.ndarray) -> list[int]:
    return values[:, 0].astype(int).tolist()


def odd(capture: Capture) -> np.ndarray:
    return capture.token_ids % 2 == 1


CHOICES: list[tuple[dict[str, Any], Any]] = [
    ({"phase": "prompt"}, lambda i, row: row < PROMPTS[i]),
    ({"phase": "generated", "skip": 55}, lambda i, row: row >= max(55, PROMPTS[i])),
    ({"last": 1}, lambda i, row: i < 2 and row == LENGTHS[i] - 1),  # the last row of the third store is missing
    ({"last": 2, "phase": "prompt"}, lambda i, row: PROMPTS[i] - 2 <= row < PROMPTS[i]),
    ({"after": END}, lambda i, row: i != 1 and row > LENGTHS[i] // 2),
    ({"after": [END, 204]}, lambda i, row: row > 4 if i == 1 else row > LENGTHS[i] // 2),
    ({"mask": odd}, lambda i, row: ids_of(i)[row] % 2 == 1),
    ({"mask": odd, "phase": "generated", "last": 3}, lambda i, row: row in _last_odd(i)),
]


def _last_odd(number: int) -> list[int]:
    return [row for row in range(PROMPTS[number], LENGTHS[number]) if ids_of(number)[row] % 2][-3:]


@pytest.mark.parametrize(("choice", "keep"), CHOICES, ids=[", ".join(choice) for choice, _ in CHOICES])
def test_rows_are_chosen(captures: Captures, choice: dict[str, Any], keep: Any) -> None:
    view, want = captures.rows("z", 1, **choice), rows_where(keep)
    assert names(view[:]) == want and len(view) == len(want) > 1
    data = TokenDataset(captures, ["z@1", "row", "store", "resid_pre@0"], batch_size=1, buffer_tokens=8, **choice)
    found = [(int(b["z@1"][0, 0]), int(1000 * b["store"][0] + b["row"][0])) for b in data]
    assert sorted(found) == [(name, name) for name in want] and len(data) == len(want)


def test_a_choice_that_is_not_valid_is_refused(captures: Captures) -> None:
    for options, message in (
        ({"phase": "answer"}, "phase 'answer' is not valid; use 'prompt' or 'generated'"),
        ({"phase": ["prompt"]}, r"phase \['prompt'\] is not valid; use 'prompt' or 'generated'"),
        ({"last": 0}, "last 0 is not valid"),
        ({"last": 1.5}, r"last 1\.5 is not valid; use 1 row or more"),
        ({"skip": 1.5}, r"skip 1\.5 is not valid; use 0 or more rows"),
        ({"skip": "1"}, "skip '1' is not valid; use 0 or more rows"),
        ({"after": "</think>"}, "after '</think>' is not valid; use a token id, or a list of token ids"),
        ({"after": [1.5]}, r"after \[1\.5\] is not valid; use a token id"),
        ({"after": True}, "after True is not valid; use a token id"),
        ({"mask": lambda cap: np.ones(3, bool)}, r"mask: it returned bool of shape \(3,\) for .*0.zarr; return"),
        ({"mask": lambda cap: cap.token_ids}, "mask: it returned int32 of shape"),
    ):
        with pytest.raises(ValueError, match=message):
            captures.rows("z", 1, **options)


def test_a_store_with_other_numbers_of_rows_is_named(captures: Captures) -> None:
    """The index lists other numbers of tokens than the stores have."""
    for choice, counts, message in (
        (RowChoice(phase="prompt"), [71, 9, 40], r"0\.zarr/phase has 70 values, the store has 71 rows"),
        (RowChoice(), [70, 9, 41], r"2\.zarr/missing has 40 values, the store has 41 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            choice.of(captures.infos, counts)


def test_tokens_may_be_numpy_integers(captures: Captures) -> None:
    for after in (np.int64(END), np.array([END]), {END}):
        assert len(captures.rows("z", 1, after=after)) == len(captures.rows("z", 1, after=END)) > 0


def test_each_row_comes_with_its_token(captures: Captures) -> None:
    view = captures.rows("z", 1)
    found = view.tokens()
    want = rows_where(lambda i, row: True)
    assert (1000 * found["store"] + found["row"]).tolist() == want
    at = [(name // 1000, name % 1000) for name in want]
    assert found["token_ids"].tolist() == [ids_of(i)[row] for i, row in at]
    assert found["positions"].tolist() == [START + row for _, row in at]
    assert found["phase"].tolist() == [int(row >= PROMPTS[i]) for i, row in at]
    assert found["key"].tolist() == [KEYS[i] for i, _ in at]
    following = [ids_of(i)[row + 1] if row + 1 < LENGTHS[i] else -1 for i, row in at]
    assert found["next_token_ids"].tolist() == following
    some = pickle.loads(pickle.dumps(view)).tokens([75, 2, 75], ["token_ids"])
    assert some["token_ids"].tolist() == [205, 102, 205] and list(some) == ["token_ids"]
    with pytest.raises(ValueError, match="fields: 'tokenids' is not known: did you mean 'token_ids'"):
        view.tokens([0], ["tokenids"])


def test_batches_of_a_view_can_have_their_tokens(captures: Captures) -> None:
    pairs = list(captures.rows("z", 1, phase="generated").batches(13, tokens=True))
    for rows, tokens in pairs:
        assert names(rows) == (1000 * tokens["store"] + tokens["row"]).tolist()
    assert sum(len(rows) for rows, _ in pairs) == len(rows_where(lambda i, row: row >= PROMPTS[i]))


def test_an_unknown_id_of_a_salvaged_store_is_not_a_next_token(captures: Captures, tmp_path: Path) -> None:
    owner = kit.Store(1 << 20)
    losses = [Loss.of(Cause.FELL_BEHIND, [[8, 16]]), Loss.of(Cause.TOKEN_IDS_UNKNOWN)]
    ids = np.where(np.arange(20) // 8 == 1, 0, np.arange(20))
    owner.write(tmp_path / "a.zarr", SPECS[:1], 20, losses=losses, ids=ids)
    assert owner.shutdown()
    tokens = open_captures(tmp_path, incomplete=True).rows("z", 1).tokens()
    assert tokens["next_token_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7, -1, 17, 18, 19, -1]


def test_a_chunk_is_read_once_for_many_chosen_rows(captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    original = LocalFiles.open

    def counted(self: LocalFiles, path: str) -> Any:
        opened.append(f"{self}/{path}")
        return original(self, path)

    data = TokenDataset(captures[:1], "z@1", batch_size=1, mask=lambda cap: cap.token_ids % 2 == 0)
    monkeypatch.setattr(LocalFiles, "open", counted)
    assert len(list(data)) == len(data) == 35
    assert len([path for path in opened if "/z/c/" in path]) == 9, "9 chunks have tokens with even ids"


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_batches_have_the_fields_beside_their_rows(captures: Captures) -> None:
    fields = ["token_ids", "next_token_ids", "positions", "phase", "store", "row", "key"]
    data = TokenDataset(captures, ["z@1", *fields], batch_size=10, buffer_tokens=30, seed=3)
    view, seen = captures.rows("z", 1), []
    order = {name: number for number, name in enumerate(names(view[:]))}
    for batch in data:
        assert list(batch) == ["z@1", *fields]
        numbers = [order[name] for name in names(batch["z@1"].numpy())]
        want = view.tokens(numbers)
        for name in fields:
            found = batch[name] if name == "key" else batch[name].numpy()
            assert list(found) == want[name].tolist(), name
        assert batch["token_ids"].dtype == torch.int32 and batch["phase"].dtype == torch.uint8
        seen += numbers
    assert len(set(seen)) == len(seen) == 110 and data.config["hooks"] == ["z@1", *fields]
    with pytest.raises(ValueError, match=r"hooks \['token_ids'\], .* name a hook"):
        TokenDataset(captures, ["token_ids"])


def test_fields_follow_rows_that_are_left_out(tmp_path: Path) -> None:
    owner, z = kit.Store(1 << 20), np.ones((2, 40, 4), "f4")
    z[1, :, 0] = np.arange(40)
    z[1, 5::7, 2] = np.nan
    owner.write(tmp_path / "a.zarr", SPECS[:1], 40, values={"z": z.view("u4")})
    assert owner.shutdown()
    with pytest.warns(RuntimeWarning, match="left out"):
        batches = list(TokenDataset(tmp_path, ["z@1", "row"], batch_size=8))
    assert [len(batch["row"]) for batch in batches] != [8] * 5
    assert all(batch["z@1"][:, 0].tolist() == batch["row"].tolist() for batch in batches)


def test_the_length_is_that_of_the_next_loop(captures: Captures) -> None:
    data = TokenDataset(captures, "z@1", batch_size=10, buffer_tokens=30, epochs=2)
    assert len(data) == len(list(data)) == 22 and len(data.loader()) == 22
    data.load_state_dict({**data.state_dict(), "batch": 4})
    assert len(data) == len(list(data)) == 18
    with pytest.raises(TypeError, match="epochs=None has no length"):
        len(TokenDataset(captures, "z@1", batch_size=10, epochs=None))


def test_a_state_of_other_rows_is_refused(captures: Captures) -> None:
    state = TokenDataset(captures, "z@1", batch_size=1, mask=odd).state_dict()
    other = TokenDataset(captures, "z@1", batch_size=1, mask=lambda cap: ~odd(cap))
    with pytest.raises(ValueError, match="of other stores or settings"):
        other.load_state_dict(state)


# ---- normalisation ---------------------------------------------------------------------------------------------------


def test_the_mean_norm_becomes_the_root_of_the_width(captures: Captures, tmp_path: Path) -> None:
    data = TokenDataset(captures, "z@1", batch_size=10, shuffle=False, normalize="mean_norm")
    rows, plain = torch.cat(list(data)), torch.cat(list(TokenDataset(captures, "z@1", batch_size=10, shuffle=False)))
    norms = np.linalg.norm(captures.rows("z", 1)[:], axis=1)
    np.testing.assert_allclose(rows, plain * (2 / norms.mean()), rtol=1e-5)
    data.save_normalization(tmp_path / "norm.safetensors")
    again = TokenDataset(captures, "z@1", batch_size=10, shuffle=False, normalize=tmp_path / "norm.safetensors")
    assert torch.equal(torch.cat(list(again)), rows) and again.config["normalize"] == {"z@1": "mean_norm"}
    np.testing.assert_allclose(data.normalization["z@1"].invert(rows), plain, rtol=1e-5)
    with pytest.raises(ValueError, match="of other stores or settings"):
        TokenDataset(captures, "z@1", batch_size=10, shuffle=False).load_state_dict(again.state_dict())


def test_whitened_rows_have_the_identity_as_covariance(captures: Captures, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 111, "buffer_tokens": 200, "shuffle": False}
    data = TokenDataset(captures, "z@1", normalize="whiten", **options)
    (rows,) = list(data)
    assert rows.dtype == torch.float32
    np.testing.assert_allclose(rows.mean(0), np.zeros(4), atol=1e-3)
    np.testing.assert_allclose(np.cov(rows.numpy().T), np.eye(4), atol=1e-2)
    plain = torch.from_numpy(captures.rows("z", 1)[:])
    data.save_normalization(tmp_path / "w.safetensors")
    path = str(tmp_path / "w.safetensors")
    loaded = TokenDataset(captures, "z@1", normalize=path, **options).normalization["z@1"]
    np.testing.assert_allclose(loaded.invert(rows), plain, atol=0.5)


def test_a_normalisation_of_something_else_is_refused(captures: Captures, tmp_path: Path) -> None:
    one = Normalization.fit(captures.rows("z", 1))
    for given, message in (
        ("mean", "normalize 'mean' is not valid; use one of mean_norm, whiten, or a file"),
        ({"z@0": one}, "'z@1' is not fitted, only z@0"),
        (Normalization("mean_norm", np.zeros(9, np.float32)), "'z@1' has 4 values per row, not 9"),
    ):
        with pytest.raises(ValueError, match=message):
            TokenDataset(captures, "z@1", batch_size=10, normalize=given)
    with pytest.raises(ValueError, match="too few for rank 4"):
        Normalization.fit(captures.rows("z", 1, last=1), "whiten")
    with pytest.raises(ValueError, match="has no finite row whose norm is not 0"):
        Normalization.fit(captures.rows("z", 0))
    with pytest.raises(ValueError, match="the data set has no normalisation"):
        TokenDataset(captures, "z@1", batch_size=10).save_normalization(tmp_path / "x")


# ---- logits ----------------------------------------------------------------------------------------------------------

THERE = [(i, n) for i, count in enumerate(SAMPLES) for n in range(count) if (i, n) != (2, 1)]


def test_logits_of_many_stores_are_one_array(captures: Captures) -> None:
    view = captures.rows("logits")
    want = np.stack([logits_of(i)[n] for i, n in THERE])
    np.testing.assert_array_equal(view[:], want)
    tokens = view.tokens()
    assert list(zip(tokens["store"].tolist(), tokens["row"].tolist(), strict=True)) == THERE
    assert tokens["positions"].tolist() == [START + PROMPTS[i] - 1 + n for i, n in THERE]
    assert tokens["token_ids"].tolist() == [ids_of(i)[PROMPTS[i] - 1 + n] for i, n in THERE]
    assert tokens["phase"].tolist() == [int(n > 0) for _, n in THERE]
    assert len(captures.rows("logits", phase="prompt")) == 3, "only the last token of a prompt has logits"
    batches = list(TokenDataset(captures, ["logits", "row"], batch_size=2))
    assert len(batches) == 4 and batches[0]["logits"].shape == (2, VOCAB)
    with pytest.raises(ValueError, match="'z@1' and 'logits' do not have rows of the same tokens; batch logits alone"):
        TokenDataset(captures, ["logits", "z@1"])


def test_the_likeliest_tokens_of_many_stores(captures: Captures) -> None:
    found = top_logprobs(captures.rows("logits"), 3)
    logits = torch.from_numpy(captures.rows("logits")[:])
    values, ids = logits.log_softmax(-1).topk(3)
    assert np.array_equal(found.token_ids, ids.numpy())
    np.testing.assert_allclose(found.logprobs, values.numpy(), atol=1e-5)
    following = [ids_of(i)[PROMPTS[i] + n] for i, n in THERE]
    every = logits.log_softmax(-1)
    want = [every[row, token].item() if token < VOCAB else np.nan for row, token in enumerate(following)]
    assert 0 < np.isnan(want).sum() < len(want)
    np.testing.assert_allclose(found.next_logprobs, want, atol=1e-5)
    dtypes = [values.dtype for values in (found.token_ids, found.logprobs, found.next_logprobs)]
    assert dtypes == [np.int32, np.float32, np.float32]
    with pytest.raises(ValueError, match="k 321 is not valid; use 1 to 320"):
        top_logprobs(captures.rows("logits"), 321)
    with pytest.raises(ValueError, match="'z' does not hold logits"):
        top_logprobs(captures.rows("z", 1))


def test_consecutive_rows_of_a_run_are_read_as_a_slice() -> None:
    """The three runs are rows 5 to 7 and 20 to 23 of the first store, and row 0 of the second store."""
    runs = Runs(np.array([0, 0, 1]), np.array([5, 20, 0]), np.array([0, 3, 7, 8]))
    wanted = [(0, 5), (0, 6), (0, 7), (0, 20), (0, 21), (0, 22), (0, 23), (1, 0)]
    assert [*zip(*(part.tolist() for part in runs.origins(np.arange(8))), strict=True)] == wanted
    for begin, count, first in ((0, 3, 5), (1, 2, 6), (3, 4, 20), (3, 1, 20), (6, 1, 23), (7, 1, 0)):
        assert runs.span(begin, count) == slice(first, first + count)
    across = runs.span(2, 3)
    assert isinstance(across, np.ndarray) and across.tolist() == [7, 20, 21]
