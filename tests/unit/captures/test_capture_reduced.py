# SPDX-License-Identifier: Apache-2.0
"""Values that a reader computes: attention, attention summaries, rows from principal components."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dmi_connector.captures import attention as attention_module
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce import parse
from dmi_connector.reduce.basis import METADATA, Basis
from dmi_connector.reduce.pca import fit
from dmi_connector.reduce.projection import matrix
from dmi_connector.reduce.topk import TopK
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.store.format.kept_files import BASES, keep_copy
from tests import storekit as kit
from tests.fittedkit import basis_tensors

HEADS, KV, SIZE, TOKENS = 4, 2, 8, 40
DIMS = {"heads": HEADS, "kv_heads": KV, "head_dim": SIZE}


@pytest.fixture(scope="module")
def stores() -> Iterator[kit.Store]:
    p = kit.Store(4 << 20)
    yield p
    assert p.shutdown(kit.PATIENCE)


def specs(q: str = "q_rot", k: str = "k_rot") -> list[ArraySpec]:
    return [ArraySpec(q, "float32", (0, 2), HEADS * SIZE), ArraySpec(k, "float32", (0, 2), KV * SIZE)]


def expected(values: kit.Values, index: int, q: str = "q_rot", k: str = "k_rot") -> np.ndarray:
    """Softmax in float64, [heads, tokens, tokens]. Two heads share their keys."""
    queries = values[q][index].view("f4").astype("f8").reshape(TOKENS, HEADS, SIZE)
    keys = values[k][index].view("f4").astype("f8").reshape(TOKENS, KV, SIZE)
    found = np.zeros((HEADS, TOKENS, TOKENS))
    for head in range(HEADS):
        for t in range(TOKENS):
            scores = keys[: t + 1, head // 2] @ queries[t, head] / SIZE**0.5
            weights = np.exp(scores - scores.max())
            found[head, t, : t + 1] = weights / weights.sum()
    return found


@pytest.mark.parametrize("names", [("q_rot", "k_rot"), ("q", "k")])
@pytest.mark.parametrize("at_a_time", [256, 7])
def test_attention_is_the_softmax_of_stored_queries_and_keys(
    stores: kit.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str], at_a_time: int
) -> None:
    monkeypatch.setattr(attention_module, "_QUERIES", at_a_time)
    values = stores.write(tmp_path / "a.zarr", specs(*names), TOKENS, attrs={"dims": DIMS, "num_layers": 3})
    cap = open_capture(tmp_path / "a.zarr", timeout=0)
    for layer, index in ((0, 0), (2, 1), (-1, 1)):
        whole = expected(values, index, *names)
        found = cap.attention(layer)
        assert found.dtype == np.float32 and found.shape == (HEADS, TOKENS, TOKENS)
        np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(cap.attention(layer, 3), whole[3], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(cap.attention(layer, -3), whole[1], rtol=1e-4, atol=1e-6)
        part = cap.attention(layer, queries=slice(5, 23))
        np.testing.assert_allclose(part, whole[:, 5:23, :23], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(cap.attention(layer, 0, slice(-2, None)), whole[0, -2:], rtol=1e-4, atol=1e-6)
    assert cap.attention(0, queries=slice(9, 9)).shape == (HEADS, 0, 0)


def test_queries_from_before_rotary_give_no_attention(stores: kit.Store, tmp_path: Path) -> None:
    attrs = {"dims": DIMS, "rotary": True}
    stores.write(tmp_path / "a.zarr", specs("q", "k"), TOKENS, attrs=attrs)
    with pytest.raises(KeyError, match=r"capture q_rot and k_rot \(preset attention\)"):
        open_capture(tmp_path / "a.zarr", timeout=0).attention(0)
    stores.write(tmp_path / "b.zarr", specs("q", "k"), TOKENS, attrs={**attrs, "rotary": False})
    assert open_capture(tmp_path / "b.zarr", timeout=0).attention(0).shape == (HEADS, TOKENS, TOKENS)


def test_softmax_of_large_scores_does_not_overflow(stores: kit.Store, tmp_path: Path) -> None:
    """Scores of different rows differ by hundreds, so each row is shifted by its own maximum."""
    scale = np.geomspace(0.1, 300, TOKENS)[:, None]
    values = {s.name: kit.random_bits(s, TOKENS).view("f4") for s in specs()}
    values["q_rot"] = values["q_rot"] * scale.astype("f4")
    bits = {name: kit.bits(value) for name, value in values.items()}
    stores.write(tmp_path / "a.zarr", specs(), TOKENS, values=bits, attrs={"dims": DIMS})
    found = open_capture(tmp_path / "a.zarr", timeout=0).attention(0)
    np.testing.assert_allclose(found, expected(bits, 0), rtol=1e-2, atol=1e-6)


def test_attention_that_cannot_be_rebuilt_is_refused(stores: kit.Store, tmp_path: Path) -> None:
    stores.write(tmp_path / "a.zarr", specs(), TOKENS, attrs={"dims": DIMS})
    cap = open_capture(tmp_path / "a.zarr", timeout=0)
    for head in (HEADS, -HEADS - 1):
        with pytest.raises(ValueError, match=f"head {head} does not exist: the model has heads 0 to 3"):
            cap.attention(0, head)
    with pytest.raises(ValueError, match="must be a slice with step 1"):
        cap.attention(0, queries=slice(0, 9, 2))
    stores.write(tmp_path / "start.zarr", specs(), TOKENS, attrs={"dims": DIMS, "start": 1})
    with pytest.raises(ValueError, match="lacks rows before the queries"):
        open_capture(tmp_path / "start.zarr", timeout=0).attention(0)
    losses = [Loss.of(Cause.FELL_BEHIND, [[20, 30]])]
    values = stores.write(tmp_path / "lost.zarr", specs(), TOKENS, attrs={"dims": DIMS}, losses=losses)
    cap = open_capture(tmp_path / "lost.zarr", timeout=0, allow_incomplete=True)
    np.testing.assert_allclose(
        cap.attention(0, queries=slice(0, 20)), expected(values, 0)[:, :20, :20], rtol=1e-4, atol=1e-6
    )
    with pytest.raises(ValueError, match="lacks rows before the queries"):
        cap.attention(0, queries=slice(0, 21))
    for hook, lacking in ((0, "q_rot"), (1, "k_rot")):
        stores.write(tmp_path / f"{hook}.zarr", [specs()[1 - hook]], TOKENS, attrs={"dims": DIMS})
        with pytest.raises(KeyError, match=lacking):
            open_capture(tmp_path / f"{hook}.zarr", timeout=0).attention(0)


@pytest.mark.parametrize("said", ["windows", "chunks"])
def test_attention_names_a_layer_that_was_not_captured(
    stores: kit.Store, tmp_path: Path, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    attrs = {"dims": DIMS, "num_layers": 3, "rotary": True, "attention": {said: [4, None, 4]}}
    stores.write(tmp_path / "a.zarr", specs(), TOKENS, attrs=attrs)
    cap = open_capture(tmp_path / "a.zarr", timeout=0)
    assert cap.attention(-1).shape == (HEADS, TOKENS, TOKENS)
    for layer in (1, 3, 99, -4):
        with pytest.raises(KeyError, match=f"hook 'q_rot' has no layer {layer} in this store; it has"):
            cap.attention(layer)
    stores.write(tmp_path / "b.zarr", specs()[:1], TOKENS, attrs=attrs)
    with pytest.raises(KeyError, match="capture q_rot and k_rot"):
        open_capture(tmp_path / "b.zarr", timeout=0).attention(99)
    command = ["plot", str(tmp_path / "a.zarr"), "--kind", "attention", "--layer", "99", "-o", str(tmp_path / "p.png")]
    assert main(command) == 2
    assert "has no layer 99 in this store" in capsys.readouterr().err


@pytest.mark.parametrize("shards", [1, 2])
def test_a_summary_of_attention_gives_positions_weights_and_entropy(
    stores: kit.Store, tmp_path: Path, shards: int
) -> None:
    """Each rank stores its own heads. The result does not depend on the number of ranks."""
    m, rng = 3, np.random.default_rng(0)
    reduction = parse(f"attn({m})")
    assert reduction is not None
    rows = np.zeros((2, TOKENS, HEADS, 2 * m + 1), "<i4")
    rows[..., :m] = rng.integers(-1, 900, rows[..., :m].shape)
    rows[..., m:] = rng.random(rows[..., m:].shape, np.float32).view("<i4")
    width = reduction.stored_width(HEADS, "float32")
    settings = {**reduction.settings(), "dtype": "float32", "width": HEADS}
    spec = ArraySpec("pattern", "uint8", (0, 2), width, reduce=settings)
    stores.write(tmp_path / "a.zarr", [spec], TOKENS, values={"pattern": rows.view("u1").reshape(2, TOKENS, width)})
    cap = open_capture(tmp_path / "a.zarr", timeout=0)
    if shards == 2:
        cap.attrs["hooks"]["pattern"]["shards"] = 2  # two ranks would write the same bytes
    positions, weights, entropy = cap.attention_summary(2)
    assert (positions.dtype, weights.dtype, entropy.dtype) == (np.int32, np.float32, np.float32)
    np.testing.assert_array_equal(positions, rows[1, ..., :m])
    np.testing.assert_array_equal(weights, rows[1, ..., m : 2 * m].view("f4"))
    np.testing.assert_array_equal(entropy, rows[1, ..., 2 * m].view("f4"))
    np.testing.assert_array_equal(cap.attention_summary(2, -1)[0], rows[1, :, -1, :m])
    for head in (HEADS, -HEADS - 1):
        with pytest.raises(ValueError, match=f"head {head} does not exist: the model has heads 0 to {HEADS - 1}"):
            cap.attention_summary(2, head)
    one = cap.attention_summary(0, 3, slice(4, 9))
    wanted = (rows[0, 4:9, 3, :m], rows[0, 4:9, 3, m : 2 * m].view("f4"), rows[0, 4:9, 3, 2 * m].view("f4"))
    for got, want in zip(one, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


WIDTH, RANK = 16, 5


def of_layers(layers: tuple[int, ...]) -> np.ndarray:
    """Float32 [layers, 200, WIDTH]. Dimensions differ in variance. The mean of a layer is its number."""
    rng = np.random.default_rng(3)
    return np.stack(
        [rng.normal(size=(200, WIDTH)) * rng.permutation(0.5 ** np.arange(WIDTH)) + layer for layer in layers]
    ).astype(np.float32)


def as_components(stores: kit.Store, folder: Path, layers: dict[str, tuple[int, ...]]) -> tuple[Capture, Path]:
    """(a capture of hooks stored as principal components, their basis). layers: {hook: its layers}; () for a hook
    without layers.
    """
    import torch

    tensors, about, specs, values = {}, {}, [], {}
    for hook, own in layers.items():
        for layer, rows in zip(own or (0,), of_layers(own or (0,)), strict=True):
            basis, _ = fit([rows], RANK)
            tensors |= basis_tensors(f"{hook}.{layer}", basis)
        about[hook] = {"width": WIDTH, "k": RANK, "layers": list(own or (0,))}
    path = folder / "basis.safetensors"
    save_file(tensors, path, metadata={METADATA: json.dumps({"hooks": about})})
    for hook, own in layers.items():
        reduction: Any = parse(f"pca({path})")
        reduction = reduction.bind(hook, own or (0,), WIDTH, 1)
        stored = []
        for layer, rows in zip(own or (0,), of_layers(own or (0,)), strict=True):
            reduction.prepare(WIDTH, torch.device("cpu"), layer, 0)
            stored.append(reduction.encode(torch.from_numpy(rows), layer).numpy())
        settings = {**reduction.settings(), "dtype": "float32", "width": WIDTH}
        specs.append(ArraySpec(hook, "uint8", own, stored[0].shape[1], reduce=settings))
        values[hook] = np.stack(stored)
    (folder / "stores").mkdir()
    stores.write(folder / "stores/a.zarr", specs, 200, values=values, attrs={"num_layers": 6})
    return open_capture(folder / "stores/a.zarr", timeout=0), path


@pytest.fixture
def scores(stores: kit.Store, tmp_path: Path) -> tuple[Capture, np.ndarray, Path]:
    """(a capture of mlp_out in two layers as principal components, its rows [layers, tokens, width], their basis)."""
    cap, path = as_components(stores, tmp_path, {"mlp_out": (1, 4)})
    return cap, of_layers((1, 4)), path


def test_rows_are_restored_from_principal_components(scores: tuple[Capture, np.ndarray, Path]) -> None:
    """The basis is given, or the copy next to the store is read."""
    cap, rows, path = scores
    with pytest.raises(FileNotFoundError, match="or give it as basis="):
        cap.restore("mlp_out", 4)
    given = cap.restore("mlp_out", 4, basis=path)
    assert given.shape == (200, WIDTH) and np.abs(given - rows[1]).max() < 0.15
    (cap.path.parent / BASES).mkdir()
    # an empty file, as after a power failure
    (cap.path.parent / BASES / f"{Basis.load(path).sha256}.safetensors").touch()
    keep_copy(str(path), Basis.load(path).sha256, BASES, str(cap.path.parent), "private")
    np.testing.assert_array_equal(cap.restore("mlp_out", 4), given)
    np.testing.assert_array_equal(cap.restore("mlp_out", -2), given)
    np.testing.assert_array_equal(cap.restore("mlp_out", 4, slice(3, 7)), given[3:7])
    assert np.abs(cap.restore("mlp_out", 1) - rows[0]).max() < 0.15
    (cap.path.parent / BASES).rename(cap.path.parent.parent / BASES)  # in the parent of the store's folder
    np.testing.assert_array_equal(cap.restore("mlp_out", 4), given)
    with pytest.raises(ValueError, match="has a basis of its own; name one layer"):
        cap.restore("mlp_out")


def test_one_layer_of_components_need_not_be_named(stores: kit.Store, tmp_path: Path) -> None:
    cap, path = as_components(stores, tmp_path, {"mlp_out": (4,)})
    one = cap.restore("mlp_out", tokens=slice(0, 9), basis=path)
    assert one.shape == (9, WIDTH)
    np.testing.assert_array_equal(one, cap.restore("mlp_out", 4, basis=path)[:9])


def test_resid_post_uses_the_basis_of_the_array_that_holds_it(stores: kit.Store, tmp_path: Path) -> None:
    """resid_post of a layer is resid_pre of the next layer, or resid_final after the last layer."""
    cap, path = as_components(stores, tmp_path, {"resid_pre": (0, 1, 5), "resid_final": ()})
    direction = np.random.default_rng(1).normal(size=WIDTH).astype(np.float32)
    same: tuple[tuple[int, str, int | None], ...]
    same = ((0, "resid_pre", 1), (4, "resid_pre", 5), (5, "resid_final", None), (-1, "resid_final", None))
    for layer, hook, own in same:
        np.testing.assert_array_equal(
            cap.restore("resid_post", layer, basis=path), cap.restore(hook, own, basis=path), err_msg=hook
        )
        np.testing.assert_array_equal(
            cap.project("resid_post", direction, layer, path), cap.project(hook, direction, own, path), err_msg=hook
        )
    assert np.abs(cap.restore("resid_post", 0, basis=path) - of_layers((0, 1, 5))[1]).max() < 0.15


def test_directions_are_taken_to_the_space_of_the_scores(scores: tuple[Capture, np.ndarray, Path]) -> None:
    cap, rows, path = scores
    direction = np.random.default_rng(1).normal(size=WIDTH).astype(np.float32)
    projected = cap.project("mlp_out", direction, 4, path)
    assert projected.shape == (RANK,)
    exact = (rows[1] - rows[1].mean(0)) @ direction
    assert np.abs(cap.numpy("mlp_out", 4) @ projected - exact).max() < 0.3
    with pytest.raises(ValueError, match=r"\(15,\), but a row of 'mlp_out' has 16 values; give one of shape \(16,\)"):
        cap.project("mlp_out", direction[:-1], 4, path)


def test_another_basis_is_refused(scores: tuple[Capture, np.ndarray, Path], tmp_path: Path) -> None:
    cap, rows, _path = scores
    basis, _ = fit([rows[0]], RANK)
    tensors = basis_tensors("mlp_out.4", basis)
    about = {"hooks": {"mlp_out": {"width": WIDTH, "k": RANK, "layers": [4]}}}
    save_file(tensors, tmp_path / "other.safetensors", metadata={METADATA: json.dumps(about)})
    with pytest.raises(ValueError, match="holds another basis file"):
        cap.restore("mlp_out", 4, basis=tmp_path / "other.safetensors")
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors does not exist; give the file with SHA-256"):
        cap.restore("mlp_out", 4, basis=tmp_path / "none.safetensors")


@pytest.mark.parametrize("shards", [1, 2])
def test_directions_are_projected_as_the_rows_of_each_rank_were(stores: kit.Store, tmp_path: Path, shards: int) -> None:
    """Each rank projects its slice of a row. The matrix has as many rows as the slice has values."""
    import torch

    k, width, layers = 4, 32, (0, 1)
    reduction: Any = parse(f"rp({k})")
    rows = np.random.default_rng(0).normal(size=(2, 50, width)).astype(np.float32)
    part = width // shards
    parts = [torch.from_numpy(p.copy()) for p in np.split(rows, shards, axis=2)]
    for shard in range(shards):
        reduction.prepare(part, torch.device("cpu"), 0, shard)
    stored = np.concatenate([np.stack([reduction.encode(layer).numpy() for layer in p]) for p in parts], axis=2)
    settings = {**reduction.settings(), "dtype": "float32", "width": width}
    spec = ArraySpec("resid_pre", "uint8", layers, stored.shape[2], reduce=settings)
    stores.write(tmp_path / "a.zarr", [spec], 50, values={"resid_pre": stored}, attrs={"num_layers": 2})
    cap = open_capture(tmp_path / "a.zarr", timeout=0)
    cap.attrs["hooks"]["resid_pre"]["shards"] = shards
    direction = np.random.default_rng(1).normal(size=width).astype(np.float32)
    projected = cap.project("resid_pre", direction)
    exact = [piece @ matrix(part, k, reduction.seed, reduction.distribution) for piece in np.split(direction, shards)]
    np.testing.assert_allclose(projected, np.concatenate(exact), rtol=1e-5)
    assert cap.numpy("resid_pre", 1).shape == (50, k * shards)
    with pytest.raises(ValueError, match="was not stored as principal components"):
        cap.restore("resid_pre", 0)


def test_only_projections_project(stores: kit.Store, tmp_path: Path) -> None:
    stores.write(tmp_path / "a.zarr", specs(), TOKENS)
    with pytest.raises(ValueError, match="was not stored as a projection"):
        open_capture(tmp_path / "a.zarr", timeout=0).project("q_rot", np.zeros(HEADS * SIZE))


@pytest.mark.parametrize(
    ("missing", "slices"),
    [
        ([], [(0, 16), (16, 32), (32, 40)]),
        ([[0, 5]], [(5, 21), (21, 37), (37, 40)]),
        ([[10, 20], [36, 40]], [(0, 10), (20, 36)]),
        ([[0, 40]], []),
        ([[3, 4], [36, 39]], [(0, 3), (4, 20), (20, 36), (39, 40)]),
    ],
)
def test_runs_hold_all_rows_that_are_not_missing(
    stores: kit.Store, tmp_path: Path, missing: list[list[int]], slices: list[tuple[int, int]]
) -> None:
    losses = [Loss.of(Cause.FELL_BEHIND, missing)] if missing else []
    stores.write(tmp_path / "a.zarr", specs(), TOKENS, losses=losses)
    cap = open_capture(tmp_path / "a.zarr", timeout=0, allow_incomplete=True)
    assert [(s.start, s.stop) for s in cap.runs(16)] == slices


class _Facts(dict[str, Any]):
    """A fake store: the names of its hooks, and its attributes."""

    def __init__(self, names: list[str], **attrs: Any) -> None:
        super().__init__(dict.fromkeys(names))
        self.attrs = attrs


@pytest.mark.parametrize(("window", "chunk"), [(3, None), (1, None), (None, 4), (5, 4), (130, None)])
def test_layers_with_a_window_have_weights_only_inside_it(window: int | None, chunk: int | None) -> None:
    rng, tokens = np.random.default_rng(5), 140  # more queries than are computed at a time
    q, k = (rng.standard_normal((tokens, SIZE)).astype("f4") for _ in "qk")
    facts = {"windows": [window], "chunks": [chunk]}
    capture: Any = _Facts([], attention=facts, dims={"heads": 1, "kv_heads": 1, "head_dim": SIZE})
    wanted = np.zeros((tokens, tokens))
    for query in range(tokens):
        first = max(query - window + 1 if window else 0, query // chunk * chunk if chunk else 0, 0)
        scores = k[first : query + 1].astype("f8") @ q[query].astype("f8") / SIZE**0.5
        shares = np.exp(scores - scores.max())
        wanted[query, first : query + 1] = shares / shares.sum()
    found = attention_module.weights_of_head(capture, 0, 0, q, k)
    assert np.array_equal(found == 0, wanted == 0)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("names", "attrs", "seen"),
    [
        (["q", "k"], {}, ("q", "k")),
        (["q", "k", "k_rot"], {}, ("q_rot", "k_rot")),
        (["q", "k", "q_rot"], {}, ("q_rot", "k_rot")),
        (["k"], {}, ("q_rot", "k_rot")),
        (["q", "k", "k_rot"], {"rotary": False}, ("q", "k")),
        (["q", "k"], {"rotary": True}, ("q_rot", "k_rot")),
    ],
)
def test_inputs_of_attention_of_older_stores_are_found(
    names: list[str], attrs: dict[str, Any], seen: tuple[str, str]
) -> None:
    capture: Any = _Facts(names, **attrs)
    assert attention_module.seen_by_attention(capture) == seen


def test_directions_of_resid_post_use_the_reduction_of_the_array_that_holds_it(
    stores: kit.Store, tmp_path: Path
) -> None:
    """resid_post of the last layer is resid_final, the only hook that is stored as a projection."""
    import torch

    reduction: Any = parse("rp(4)")
    rows = np.random.default_rng(2).normal(size=(3, TOKENS, 16)).astype(np.float32)
    stored = reduction.encode(torch.from_numpy(rows[2])).numpy()[None]
    settings = {**reduction.settings(), "dtype": "float32", "width": 16}
    specs = [
        ArraySpec("resid_pre", "float32", (0, 1), 16),
        ArraySpec("resid_final", str(stored.dtype), (), stored.shape[-1], reduce=settings),
    ]
    values = {"resid_pre": kit.bits(rows[:2]), "resid_final": stored}
    stores.write(tmp_path / "a.zarr", specs, TOKENS, values=values, attrs={"num_layers": 2})
    with open_capture(tmp_path / "a.zarr", timeout=0) as cap:
        direction = np.arange(16, dtype=np.float32)
        found = cap.project("resid_post", direction, 1)
        np.testing.assert_array_equal(found, cap.project("resid_final", direction))
        assert found.shape == (4,)
        with pytest.raises(ValueError, match="'resid_post' was not stored as a projection"):
            cap.project("resid_post", direction, 0)


@pytest.mark.parametrize(
    "change", [{"k": "8"}, {"k": None}, {"more": 1}, {"kind": ["topk"]}, {"width": "x"}, {"dtype": ...}], ids=str
)
def test_a_forged_entry_of_a_reduced_hook_is_refused(
    change: dict[str, Any], stores: kit.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced = {**TOPK.settings(), "width": 100, "dtype": "float32", **change}
    reduced = {name: value for name, value in reduced.items() if value is not ...}
    capture = topk_store(stores, tmp_path / "a.zarr")
    monkeypatch.setitem(capture.attrs["hooks"]["mlp_post"], "reduce", reduced)
    with pytest.raises(ValueError, match=r"a\.zarr: the reduction of 'mlp_post' is damaged"):
        capture.numpy("mlp_post", 0)


def test_damaged_rows_of_topk_are_refused(stores: kit.Store, tmp_path: Path) -> None:
    capture = topk_store(stores, tmp_path / "a.zarr")
    with pytest.raises(ValueError, match=r"a row of topk\(8\) has the index \d+ of 100 values; it is damaged"):
        capture.numpy("mlp_post", 0)


TOPK = TopK(8)


def topk_store(stores: kit.Store, path: Path) -> Capture:
    """A store of random bytes for hooks reduced with topk."""
    reduced = {**TOPK.settings(), "width": 100, "dtype": "float32"}
    stores.write(path, [ArraySpec("mlp_post", "uint8", (0, 1), TOPK.stored_width(100, "float32"), reduce=reduced)], 20)
    return open_capture(path, 0)
