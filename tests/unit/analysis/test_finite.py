# SPDX-License-Identifier: Apache-2.0
"""Values that are not finite: each export and each kind of batch counts these rows and names their stores."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file, save_file

from dmi_connector import TokenDataset, open_capture, open_captures
from dmi_connector.analysis.export import delphi, webdataset
from dmi_connector.analysis.export.packed import PackedRows
from dmi_connector.analysis.export.progress import NOTE
from dmi_connector.analysis.export.targets import TARGETS
from dmi_connector.captures.finite import FiniteCheck, NotFinite, not_finite
from dmi_connector.cli.main import main
from dmi_connector.dtypes import numpy_dtype
from dmi_connector.layout import ArraySpec
from dmi_connector.store.read.verify import verify_store
from tests import storekit as kit
from tests.shorter import soak

WIDTH, LENGTH, FROM = 16, 60, 21
SPECS = (
    ArraySpec("resid_pre", "bfloat16", (0, 1, 2), WIDTH),
    ArraySpec("resid_final", "bfloat16", (), WIDTH),
    ArraySpec("final_ln", "bfloat16", (), WIDTH),
    ArraySpec("router_logits", "float32", (0, 1, 2), 8),
    ArraySpec("topk_weights", "float32", (0, 1, 2), 2),
    ArraySpec("topk_ids", "int32", (0, 1, 2), 2),
    ArraySpec("logits", "float32", (), 12, per_sample=True),
)
ATTRS = {"num_layers": 3, "experts": {"count": 8, "layers": [0, 1, 2]}}
FLAGS: dict[str, list[str]] = {
    "delphi": ["--hook", "resid_pre@1", "--context-size", "10", "--splits", "1"],
    "specforge": ["--loss", "all"],
    "numpy": ["--hook", "resid_pre@1"],
    "parquet": ["--hook", "resid_pre@1"],
    "webdataset": ["--hook", "resid_pre@1", "--shard-size", "1"],
}
FORMATS = [name for name in TARGETS if name != "saelens"]
"""Formats that are tested here. saelens needs datasets: tests/types/test_sae_lens.py."""
Run = Callable[..., tuple[int, str, str]]


def values(number: int, bad: dict[str, tuple[int, float]] | None = None) -> kit.Values:
    """Finite values, except `bad`: {hook: (row, value)} puts the value into the last element of all rows from this row
    on.
    """
    rng = np.random.default_rng(number)
    found: kit.Values = {}
    for spec in SPECS:
        shape = (4, spec.width) if spec.per_sample else (max(1, len(spec.layers)), LENGTH, spec.width)
        if spec.dtype == "int32":
            found[spec.name] = rng.integers(1, 8, shape, dtype=np.int32).view("u4")
            continue
        made = rng.standard_normal(shape).astype(numpy_dtype(spec.dtype))
        if spec.name in (bad or {}):
            row, value = (bad or {})[spec.name]
            made[..., row:, -1] = value
        found[spec.name] = made.view(f"u{made.itemsize}")
    return found


STREAM = ("resid_pre", "resid_final", "final_ln")
BAD: dict[str, dict[str, tuple[int, float]]] = {
    "nan": {**dict.fromkeys(STREAM, (FROM, np.nan)), "topk_weights": (FROM, np.nan), "router_logits": (FROM, np.nan)},
    "inf": {**dict.fromkeys(STREAM, (FROM, np.inf)), "topk_weights": (FROM, np.inf)},
    "minus": {**dict.fromkeys(STREAM, (FROM, -np.inf)), "router_logits": (FROM, -np.inf)},
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores DIR/KIND/a.zarr, b.zarr and c.zarr of 60 rows. In b.zarr, rows from row 21 on are not finite."""
    root, owner = tmp_path_factory.mktemp("finite"), kit.Store(1 << 22)
    for kind, bad in BAD.items():
        for number, name in enumerate("abc"):
            held = values(number, bad if name == "b" else {"logits": (0, -np.inf)})
            owner.write(root / f"{kind}/{name}.zarr", SPECS, LENGTH, 4, held, attrs=ATTRS, chunk=32)
    large = {"resid_pre": (FROM, 1e6)}
    for name, bad in (("a", {}), ("b", large)):
        owner.write(root / f"large/{name}.zarr", SPECS, LENGTH, 4, values(0, bad), attrs=ATTRS, chunk=32)
    assert owner.shutdown()
    return root


@pytest.fixture(scope="module")
def sae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with two latents: latent 0 is the last value of a row, and latent 1 the first."""
    folder = tmp_path_factory.mktemp("sae")
    encoder = np.zeros((WIDTH, 2), np.float32)
    encoder[-1, 0] = encoder[0, 1] = 1
    zeros = {"b_enc": np.zeros(2, np.float32), "b_dec": np.zeros(WIDTH, np.float32)}
    save_file({"W_enc": encoder, "W_dec": encoder.T.copy(), **zeros}, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps({"architecture": "standard"}))
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], sae: Path) -> Run:
    def call(to: str, *argv: str | Path) -> tuple[int, str, str]:
        flags = FLAGS.get(to, []) + (["--sae", str(sae)] if to == "delphi" else [])
        status = main(["export", "--to", to, *flags, *map(str, argv)])
        return (status, *capsys.readouterr())

    return call


def written(to: str, out: Path) -> dict[str, list[np.ndarray]]:
    """The float arrays of each file of an export."""
    found: dict[str, list[np.ndarray]] = {}
    for path in sorted(out.rglob("*.*")):
        name = str(path.relative_to(out))
        if path.suffix == ".safetensors":
            found[name] = [*load_file(path).values()]
        elif path.suffix == ".ckpt":
            found[name] = [tensor.float().numpy() for tensor in torch.load(path).values()]
        elif path.suffix == ".npy":
            found[name] = [np.load(path)]
        elif path.suffix == ".npz":
            found[name] = [np.load(path)["resid_pre@1"]]
        elif path.suffix == ".parquet":
            found[name] = [np.array(pq.read_table(path)["resid_pre@1"].to_pylist())]
        elif path.suffix == ".tar":
            with tarfile.open(path) as shard:
                members = [shard.extractfile(member) for member in shard if member.name.endswith("resid_pre@1.npy")]
                found[name] = [np.load(io.BytesIO(member.read())) for member in members if member]
        elif path.suffix == ".zip":
            with open_capture(path) as capture:
                found[name] = [capture.numpy(hook) for hook in STREAM]
    return found


def finite(found: dict[str, list[np.ndarray]]) -> bool:
    return all(np.isfinite(part.astype(np.float64)).all() for parts in found.values() for part in parts)


# ---- the check ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_each_row_with_a_nan_or_an_infinity_is_found(dtype: str) -> None:
    rows = np.random.default_rng(0).standard_normal((70_000, 3)).astype(numpy_dtype(dtype))
    largest = ml_dtypes.finfo(rows.dtype).max
    rows[0], rows[1] = largest, -largest
    assert not len(not_finite(rows))
    wrong = {5: np.nan, 6: np.inf, 43_690: -np.inf, 43_691: -np.nan, 69_999: np.inf}
    for row, value in wrong.items():
        rows[row, 2] = value
    assert not_finite(rows).tolist() == sorted(wrong)
    assert not_finite(rows.reshape(-1, 7, 3)).tolist() == [0, 6241, 9999], "rows are of the first axis"
    assert not_finite(rows[::-1]).tolist() == sorted(69_999 - row for row in wrong), "of any strides"
    assert not_finite(rows, minus_infinity=True).tolist() == [5, 6, 43_691, 69_999]
    assert not len(not_finite(rows[:0])) and not len(not_finite(np.full((3, 2), 0x7F80, np.uint16)))


def test_another_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="finite 'drop' is not valid; use skip, keep or fail"):
        FiniteCheck("drop")


# ---- exports ------------------------------------------------------------------------------------------------


def test_the_formats_have_these_defaults() -> None:
    assert {target.finite for target in TARGETS.values()} == {"skip", "keep"}
    assert [target.name for target in TARGETS.values() if target.finite == "keep"] == ["zip"]


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("kind", list(BAD))
def test_every_export_names_the_store_and_leaves_its_rows_out(
    stores: Path, tmp_path: Path, run: Run, kind: str, to: str
) -> None:
    out = tmp_path / "out"
    if to == "zip":
        assert run(to, stores / kind, "-o", out)[0] == 3 and not finite(written(to, out)), "it is the store as it is"
        out = tmp_path / "skipped"
    flags = ["--finite", "skip"] if to == "zip" else []
    bad = stores / kind / "b.zarr"
    for _ in range(2):  # the second run has nothing to do, and prints the same
        status, text, err = run(to, stores / kind, *flags, "-o", out)
        assert status == 3 and err == f"dmi: {bad}: row {FROM} holds values that are not finite\n", err
        # 18 contexts of 10 rows, from three stores; rows 81 to 119 are not finite
        left = "4 contexts" if to == "delphi" else "1"
        assert text.endswith(f"{left} left out: values that are not finite\n"), text
        found = written(to, out)
        assert finite(found)
        if left == "1":
            assert len(found) == 2
        else:
            assert text.startswith(f"{out}: 14 contexts of 10 tokens")
    if to == "delphi":
        (path,) = out.rglob("*.safetensors")
        latents, ids = load_file(path), np.arange(LENGTH) % 97
        assert latents["tokens"].tolist() == np.tile(ids, 3).reshape(-1, 10)[[*range(8), *range(12, 18)]].tolist()
        rows = open_captures(stores / kind).rows("resid_pre", 1)[:].reshape(-1, 10, WIDTH)[[*range(8), *range(12, 18)]]
        want = np.argwhere(rows[..., [-1, 0]] > 1e-5)
        assert latents["locations"].tolist() == want.tolist(), "contexts are numbered without those left out"


def test_a_killed_export_of_shards_remembers_stores_that_are_not_finite(
    stores: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note is written before the shard without these stores is renamed."""
    flags = [stores / "nan", "--shard-size", "1G", "-o", tmp_path]
    with monkeypatch.context() as patch, pytest.raises(BaseException, match="killed"):
        patch.setattr(webdataset, "note_not_finite", lambda *_args: pytest.fail("killed"))
        run("webdataset", *flags)
    for _ in range(2):
        status, text, _ = run("webdataset", *flags)
        assert status == 3 and text.endswith("; 1 left out: values that are not finite\n")


@pytest.mark.parametrize("to", FORMATS)
def test_policies_keep_and_fail_apply_to_every_format(stores: Path, tmp_path: Path, run: Run, to: str) -> None:
    bad = stores / "nan/b.zarr"
    status, text, err = run(to, stores / "nan", "--finite", "fail", "-o", tmp_path / "fail")
    assert (status, text) == (3, ""), text
    assert (
        err == f"dmi: {bad}: row {FROM} holds values that are not finite; leave the store out, or give --finite keep\n"
    )
    assert finite(written(to, tmp_path / "fail"))
    assert run(to, stores / "nan", "--finite", "skip", "-o", tmp_path / "fail")[0] == 3, (
        "the failed export must continue"
    )
    for _ in range(2):
        status, text, err = run(to, stores / "nan", "--finite", "keep", "-o", tmp_path / "keep")
        assert status == 3 and err == f"dmi: {bad}: row {FROM} holds values that are not finite\n", err
        assert "kept: values that are not finite" in text, text
    found = written(to, tmp_path / "keep")
    assert to in ("routed-experts", "delphi") or not finite(found), "ids of experts are integers"
    assert len(found) == (1 if to == "delphi" else 3)
    if to != "zip":
        assert "was written with" in run(to, stores / "nan", "-o", tmp_path / "keep")[2], "no set of both"


@pytest.mark.parametrize("to", FORMATS)
def test_finite_stores_exit_with_0_and_no_file_is_written_without_rows(
    stores: Path, tmp_path: Path, run: Run, to: str
) -> None:
    status, text, err = run(to, stores / "nan/a.zarr", "-o", f"{tmp_path}/sound/")
    assert (status, err) == (0, "") and "not finite" not in text, "logits of minus infinity are masked tokens"
    flags = ["--finite", "skip"] if to == "zip" else []
    if to == "delphi":
        flags += ["--skip", str(FROM)]
    status, text, err = run(to, stores / "nan/b.zarr", *flags, "-o", f"{tmp_path}/none/")
    assert (status, text) == (3, "") and "is left: " in err and str(stores / "nan/b.zarr") in err, err
    assert not [*tmp_path.glob("none/**/*.safetensors"), *tmp_path.glob("none/*.zip"), *tmp_path.glob("none/*.npy")]


@pytest.mark.parametrize("to", ["safetensors", "zip"])
def test_a_single_file_is_not_written_or_is_written_with_keep(stores: Path, tmp_path: Path, run: Run, to: str) -> None:
    bad, out = stores / "inf/b.zarr", tmp_path / "one"
    assert run(to, bad, "--finite", "skip", "-o", out)[0] == 3 and not list(tmp_path.iterdir())
    assert run(to, bad, "--finite", "keep", "-o", out)[:2][0] == 3 and out.exists()


def test_activations_beyond_the_range_of_float16_count(stores: Path, tmp_path: Path, run: Run) -> None:
    """1e6 is finite in the store, and becomes infinite in Delphi's float16."""
    for to in ("safetensors", "zip"):
        assert run(to, stores / "large", "-o", tmp_path / to)[0] == 0
    status, text, err = run("delphi", stores / "large", "-o", tmp_path / "delphi")
    assert status == 3 and f"{stores / 'large/b.zarr'}: row {FROM} holds values that are not finite" in err
    assert text.endswith("4 contexts left out: values that are not finite\n") and finite(
        written("delphi", tmp_path / "delphi")
    )


def test_latents_are_the_same_in_one_step_or_many(
    stores: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("delphi", stores / "nan", "-o", tmp_path / "one")[0] == 3
    monkeypatch.setattr(delphi, "_STEP_VALUES", 20)
    assert run("delphi", stores / "nan", "-o", tmp_path / "many")[0] == 3
    one, many = written("delphi", tmp_path / "one"), written("delphi", tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(np.array_equal(a, b) for name in one for a, b in zip(one[name], many[name], strict=True))


@pytest.mark.parametrize("step", [1, 4, 7, 100])
@pytest.mark.parametrize(("first", "stop"), [(0, 18), (3, 17)])
def test_contexts_come_with_their_own_tokens(
    stores: Path, monkeypatch: pytest.MonkeyPatch, step: int, first: int, stop: int
) -> None:
    """The export for SAELens uses this class."""
    monkeypatch.setattr(PackedRows, "step", step)
    captures = open_captures(stores / "nan")
    every = captures.rows("resid_pre", 1)[:].reshape(18, 10, WIDTH)
    ids = np.concatenate([capture.token_ids for capture in captures]).reshape(18, 10)
    for finite in ("keep", "skip"):
        check = FiniteCheck(finite)
        found = list(PackedRows(captures, "resid_pre@1", 10, finite=check).batches(first, stop))
        assert [end for end, *_ in found] == [*range(first + step, stop, step), stop]
        wanted = [n for n in range(first, stop) if finite == "keep" or n not in range(8, 12)]
        np.testing.assert_array_equal(np.concatenate([rows for _, rows, _ in found]), every[wanted])
        np.testing.assert_array_equal(np.concatenate([tokens for *_, tokens in found]), ids[wanted])
        assert check.rows == {str(stores / "nan/b.zarr"): 39} and check.first == {str(stores / "nan/b.zarr"): FROM}


def test_the_note_of_a_directory_names_the_stores(stores: Path, tmp_path: Path, run: Run) -> None:
    run("speculators", stores / "nan", "--finite", "keep", "-o", tmp_path)
    noted = json.loads((tmp_path / NOTE).read_text())
    assert noted["not_finite"] == {str(stores / "nan/b.zarr"): FROM}


@pytest.mark.parametrize("hook", ["router_logits", "topk_weights"])
def test_routing_is_checked_by_each_hook_that_determines_it(tmp_path: Path, run: Run, hook: str) -> None:
    owner = kit.Store(1 << 22)
    for name, bad in (("a", {}), ("b", {hook: (FROM, np.inf)})):
        owner.write(tmp_path / f"in/{name}.zarr", SPECS, LENGTH, 4, values(0, bad), attrs=ATTRS)
    assert owner.shutdown()
    assert run("routed-experts", tmp_path / "in", "-o", tmp_path / "out")[0] == 3
    assert [path.name for path in (tmp_path / "out").glob("*.npy")] == ["routed_experts_0.npy"]


def test_zip_and_verify_agree_on_each_hook(tmp_path: Path, run: Run) -> None:
    owner = kit.Store(1 << 22)
    for spec in SPECS:
        if spec.dtype != "int32":
            bad = {spec.name: (3, np.inf)}
            owner.write(tmp_path / f"{spec.name}.zarr", SPECS, LENGTH, 4, values(0, bad), attrs=ATTRS)
    assert owner.shutdown()
    found = sorted(tmp_path.glob("*.zarr"))
    assert len(found) == 6 and all(not any(p.damage for p in verify_store(store)) for store in found)
    for store in found:
        assert verify_store(store), store
        # row i of logits belongs to the token at logits_positions[i]
        row = int(open_capture(store).logits_positions[3]) if store.stem == "logits" else 3
        said = f"dmi: {store}: row {row} holds values that are not finite\n"
        assert run("zip", store, "-o", f"{store}.zip")[::2] == (3, said)


# ---- batches ------------------------------------------------------------------------------------------------


def make(stores: Path, **options: Any) -> TokenDataset:
    return TokenDataset(stores, **{"hooks": "resid_pre@1", "batch_size": 12, "buffer_tokens": 40, **options})


@pytest.mark.parametrize("kind", list(BAD))
@pytest.mark.parametrize("workers", [None, 2, *soak(0)])
def test_batches_leave_rows_out_and_count_them(stores: Path, kind: str, workers: int | None) -> None:
    data = make(stores / kind)
    with pytest.warns(RuntimeWarning, match="not finite") as warned:
        found = torch.cat(list(data if workers is None else data.loader(workers)))
    (bad,), (count,) = data.not_finite, data.not_finite.values()
    assert bad == str(stores / kind / "b.zarr") and torch.isfinite(found).all()
    assert len(found) + count == data.batches(0, max(1, workers or 0)) * 12
    text = f"{count} rows of 1 stores hold values that are not finite and were left out: {bad}"
    assert text in str(warned[-1].message)
    rows = open_captures(stores / kind).rows("resid_pre", 1)[:]
    given = {tuple(row) for row in found.float().numpy().tolist()}
    assert given <= {tuple(row) for row in rows.tolist()} and len(given) == len(found)
    if workers != 2:  # with two workers, rows that do not fill a batch of each worker are left out
        assert count == 39


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_without_a_finite_row_are_skipped(stores: Path, workers: int) -> None:
    data = make(stores / "nan", batch_size=4, buffer_tokens=4, shuffle=False)
    loader = data.loader(workers)
    with pytest.warns(RuntimeWarning):
        every = [batch.tolist() for batch in loader]
    assert len(every) < data.batches(0, max(1, workers)) - 5
    assert sum(map(len, every)) + sum(data.not_finite.values()) == data.batches(0, max(1, workers)) * 4
    data.set_epoch(0)
    begun = iter(loader)
    for _ in range(25):
        next(begun)
    state = loader.state_dict()
    del begun
    resumed = make(stores / "nan", batch_size=4, buffer_tokens=4, shuffle=False).loader(workers)
    resumed.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [batch.tolist() for batch in resumed] == every[25:], "they count for a resume"


def test_ranks_do_not_skip_a_batch(stores: Path) -> None:
    data = make(stores / "nan", batch_size=4, buffer_tokens=4, shuffle=False, rank=0, world_size=2)
    with (
        pytest.raises(
            NotFinite, match=r"rank 0 has a batch whose rows all hold .*leave out .*b\.zarr, or use a larger"
        ),
        pytest.warns(RuntimeWarning),
    ):
        list(data)


def test_batches_keep_the_rows_or_raise(stores: Path) -> None:
    data = make(stores / "inf", finite="keep")
    with pytest.warns(RuntimeWarning, match="were kept"):
        found = torch.cat(list(data))
    assert len(found) == 3 * LENGTH and data.not_finite == {str(stores / "inf/b.zarr"): 39}
    data = make(stores / "inf", finite="fail", shuffle=False)
    for batches in (data, data.loader(0)):
        with pytest.raises(NotFinite, match=rf"b\.zarr: row {FROM} holds .* give finite keep"):
            list(batches)
    with pytest.raises(NotFinite, match=r"b\.zarr: row \d+ holds"):
        list(make(stores / "inf", finite="fail", shuffle=False).loader(2))
    with pytest.raises(ValueError, match="finite 'drop' is not valid"):
        make(stores / "inf", finite="drop")


def test_values_beyond_the_range_of_a_dtype_are_left_out(stores: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(torch.cat(list(make(stores / "large")))) == 2 * LENGTH
    data = make(stores / "large", dtype=torch.float16)
    with pytest.warns(RuntimeWarning):
        found = torch.cat(list(data))
    assert torch.isfinite(found).all() and data.not_finite == {str(stores / "large/b.zarr"): 39}


def test_a_row_is_left_out_of_all_hooks(stores: Path) -> None:
    data = make(stores / "minus", hooks=["topk_ids@1", "router_logits@1", "topk_weights@1"])
    with pytest.warns(RuntimeWarning):
        batches = list(data)
    assert {len(part) for batch in batches for part in batch.values()} > {12} or len(batches) == 15
    assert all(len({len(part) for part in batch.values()}) == 1 for batch in batches)
    assert sum(len(batch["topk_ids@1"]) for batch in batches) == 3 * LENGTH - 39


def test_batches_of_a_view_count_the_rows(stores: Path) -> None:
    view = open_captures(stores / "nan").rows("resid_pre", 1)
    with pytest.warns(RuntimeWarning, match="39 rows of 1 stores .* kept"):
        assert sum(map(len, view.batches(50))) == 3 * LENGTH
    with pytest.warns(RuntimeWarning, match="39 rows of 1 stores .* left out"):
        left = list(view.batches(10, finite="skip"))
    assert sum(map(len, left)) == 3 * LENGTH - 39 and all(len(part) and np.isfinite(part).all() for part in left)
    with pytest.raises(NotFinite, match=rf"b\.zarr: row {FROM} holds"):
        list(view.batches(50, finite="fail"))
    with pytest.warns(RuntimeWarning):
        whole = list(open_captures(stores / "nan").rows("resid_pre").batches(50, finite="skip"))
    assert sum(part.shape[1] for part in whole) == 3 * LENGTH - 39 and all(part.shape[0] == 3 for part in whole)


@pytest.mark.parametrize(("policy", "says"), [("skip", 1), ("keep", 1), ("fail", 0)])
def test_a_policy_that_raises_does_not_warn(policy: str, says: int) -> None:
    check = FiniteCheck(policy)
    with contextlib.suppress(NotFinite):
        check.see(Path("/a.zarr"), [3, 5])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        check.warn()
        check.warn_all()
    assert len(found) == says and all("row 3 holds" in str(one.message) for one in found)


@pytest.mark.parametrize(("stores", "end"), [(5, "4.zarr"), (6, "4.zarr, and others")])
def test_a_warning_says_whether_it_names_all_stores(stores: int, end: str) -> None:
    check = FiniteCheck("skip")
    for number in range(stores):
        check.see(Path(f"{number}.zarr"), [3])
    with pytest.warns(RuntimeWarning, match=rf"{stores} rows of {stores} stores hold .*: .*0.zarr, .*{end}$"):
        check.warn_all()
