# SPDX-License-Identifier: Apache-2.0
"""Responses for the panels of `dmi view` over HTTP: predictions, attribution, experts, latents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from starlette.testclient import TestClient

from dmi_connector.analysis.attribution import logit_attribution
from dmi_connector.analysis.texts import Texts
from dmi_connector.analysis.unembedding import Outcomes, Unembedding, log_softmax
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.layout import ArraySpec
from dmi_connector.reduce import parse
from dmi_connector.store.format.completeness import Cause, Loss
from dmi_connector.view import latents as view_latents
from dmi_connector.view import predictions
from dmi_connector.view.app import make_app
from dmi_connector.view.data import Library
from dmi_connector.view.latents import Latents
from tests import storekit as kit
from tests import viewkit

START, VOCABULARY = 3, 30
"""Position of the first row of the store "late", and the size of its vocabulary."""
LATE_IDS = np.arange(24, dtype="<i4") + 9
ROWS, HOLE, BAD = 300, slice(64, 96), 100
"""Of the store "lossy": number of rows, more than are encoded at a time; missing rows; a row that is not finite."""
STREAM = np.random.default_rng(3).standard_normal((2, ROWS, viewkit.HIDDEN)).astype("f4")
STREAM[1, BAD, 5] = np.nan


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """captures/ with the store "parts" of `write_panels` and the stores above, and sae/."""
    root = tmp_path_factory.mktemp("answers")
    (root / "captures").mkdir()
    viewkit.write_panels(root / "captures", model)
    owner, about = kit.Store(1 << 24), {"num_layers": 2}
    specs = [ArraySpec("resid_final", "float32", (), 8), ArraySpec("logits", "float32", (), VOCABULARY)]
    late = {"attrs": {**about, "start": START}, "ids": LATE_IDS}
    owner.write(root / "captures/late.zarr", specs, len(LATE_IDS), 12, wait=False, **late)
    specs = [ArraySpec("resid_pre", "float32", (0, 1), viewkit.HIDDEN)]
    lossy = {
        "values": {"resid_pre": kit.bits(STREAM)},
        "losses": [Loss.of(Cause.FELL_BEHIND, [(HOLE.start, HOLE.stop)])],
    }
    owner.write(root / "captures/lossy.zarr", specs, ROWS, chunk=32, attrs=about, wait=False, **lossy)
    assert owner.shutdown(kit.PATIENCE)
    return root


@pytest.fixture(scope="module")
def page(root: Path, model: Path) -> TestClient:
    return client(root, model=model, sae=Latents.load(root / "sae", None))


@pytest.fixture(scope="module")
def parts(root: Path) -> Iterator[Capture]:
    with open_capture(root / "captures/parts.zarr") as capture:
        yield capture


def client(root: Path, **options: Any) -> TestClient:
    app = make_app(Library.at(root / "captures"), "secret", **options)
    return TestClient(app, base_url="http://127.0.0.1/secret/")


def floats(response: Any) -> np.ndarray:
    assert response.status_code == 200, response.text
    return np.frombuffer(response.content, "<f4").reshape([int(n) for n in response.headers["x-shape"].split(",")])


def told(page: TestClient, action: str, store: str = "parts", **query: Any) -> Any:
    response = page.get(f"api/{action}/{store}.zarr", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def refused(page: TestClient, action: str, store: str, **query: Any) -> str:
    response = page.get(f"api/{action}/{store}.zarr", params=query)
    assert response.status_code == 400, response.text
    return str(response.json()["error"])


# ---- attributes of a capture ----------------------------------------------------------------------------------------


def test_a_capture_says_all_that_the_page_reads(page: TestClient) -> None:
    found = told(page, "capture", "late")
    hooks, attrs, versions = (
        {hook["name"]: hook for hook in found.pop("hooks")},
        found.pop("attrs"),
        found.pop("versions"),
    )
    assert attrs["model"] == "tiny" and json.loads(versions) == {}
    assert found.pop("lens") is None and found.pop("predictions") is None
    assert found.pop("attribution").startswith("Capture the hooks resid_pre@0, attn_out and mlp_out of all layers")
    assert found.pop("latents") == {
        "lacks": "The autoencoder encodes blocks.6.hook_resid_pre, which the store lacks.",
        "count": 24,
        "hook": "blocks.6.hook_resid_pre",
    }
    assert found == {
        "name": "late.zarr",
        "tokens": 24,
        "prompt": 12,
        "start": START,
        "running": False,
        "complete": True,
        "reason": None,
        "missing": [],
        "heads": 0,
        "attention": {"layers": [], "until": 24},
        "places": ["final"],
        "experts": None,
    }
    assert hooks["resid_final"] == {
        "name": "resid_final",
        "layers": [],
        "dtype": "float32",
        "width": 8,
        "reduce": None,
        "rows": None,
        "statistics": hooks["resid_final"]["statistics"],
    }
    assert hooks["resid_final"]["statistics"][0] == {"name": "norm", "index": None, "signed": False}
    assert hooks["logits"]["rows"] == [[12 - START, 24 - START]]


@pytest.mark.parametrize("with_model", [True, False])
def test_rows_with_a_prediction_are_those_after_captured_logits(root: Path, model: Path, with_model: bool) -> None:
    """The distribution comes from the final stream, or without a model from captured logits, whose positions begin at
    that of the first row.
    """
    found = told(client(root, model=model if with_model else None), "capture", "late")["hooks"][-1]
    statistics = [
        {"name": "log-probability", "index": None, "signed": False, "flipped": True},
        {"name": "entropy", "index": None, "signed": False, "flipped": False},
    ]
    entry = {"name": "prediction", "layers": [], "dtype": "float32", "width": 1, "reduce": None}
    rows = [1, 24] if with_model else [13 - START, 25 - START]
    assert found == {**entry, "rows": [rows], "statistics": statistics}


def test_experts_and_their_load(page: TestClient, parts: Capture) -> None:
    layers = list(range(viewkit.LAYERS))
    assert told(page, "capture")["experts"] == {"layers": layers, "count": 8, "each": 2, "weights": True}
    ids = parts.numpy("topk_ids")
    assert told(page, "load", layer=4) == {"counts": np.bincount(ids[4].ravel(), minlength=8).tolist()}
    window = {"first": 20, "count": 9}
    assert np.array_equal(floats(page.get("api/experts/parts.zarr", params=window)), ids[:, 20:29])
    weights = floats(page.get("api/experts/parts.zarr", params={**window, "weights": 1}))
    assert np.array_equal(weights, parts.numpy("topk_weights")[:, 20:29])
    assert refused(page, "load", "late", layer=0) == "the store has no topk_ids"


@pytest.mark.parametrize("name", ["parts.zarr", "not-there-yet.zarr", "renamed"])
def test_a_store_is_told_from_a_directory_of_stores(name: str, root: Path, tmp_path: Path) -> None:
    """It is recognised by its name, because its request may still run, or by its content."""
    (tmp_path / "parts.zarr").symlink_to(root / "captures/parts.zarr")
    if name == "renamed":
        (tmp_path / name).mkdir()
        (tmp_path / name / "zarr.json").touch()
    library = Library.at(tmp_path / name)
    assert library.only == (tmp_path / name).resolve().name and library.directory == (tmp_path / name).resolve().parent
    assert (Library.at(tmp_path).only, Library.at(tmp_path).directory) == (None, tmp_path)


# ---- predictions ----------------------------------------------------------------------------------------------------


def test_the_lens_of_all_tokens_comes_in_pieces(page: TestClient, parts: Capture, model: Path) -> None:
    """First the chosen token at all places, then all tokens at each place."""
    end, places = Unembedding.load(model), [*map(str, range(12)), "final"]
    rows = [*parts.numpy("resid_pre"), parts.numpy("resid_final")]
    answer = page.get("api/predicted/parts.zarr", params={"first": 10, "count": 10, "token": 13})
    pieces = [json.loads(line) for line in answer.text.splitlines()]
    assert [piece["place"] for piece in pieces[:4]] == [None, "final", "0", "6"] and pieces[0]["token"] == 13
    assert sorted(piece["place"] for piece in pieces[1:]) == sorted(places)
    for piece in pieces[1:]:
        own = log_softmax(end.logits(rows[places.index(piece["place"])]))[9:19]  # the rows before those of the window
        assert piece["token"] == 10
        np.testing.assert_allclose(piece["logprobs"], own[np.arange(10), parts.token_ids[10:20]], rtol=1e-4)
        np.testing.assert_allclose(piece["entropy"], -(np.exp(own) * own).sum(-1), rtol=1e-4, atol=1e-6)
        best = own.argmax(-1).tolist()
        assert [one["id"] for one in piece["best"]] == best
        assert [one["text"] for one in piece["best"]] == list(Texts(model).of(best) or [])
        at = places.index(piece["place"])
        assert pieces[0]["best"][at] == piece["best"][3]
        assert [pieces[0][of][at] for of in ("logprobs", "entropy")] == pytest.approx(
            [piece["logprobs"][3], piece["entropy"][3]], rel=1e-5
        )


def test_the_error_of_a_later_piece_is_a_line(page: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    real = predictions.predicted

    def predicted(*given: Any) -> Outcomes:
        if given[2] == "0":
            raise ValueError("layer 0 is damaged")
        return real(*given)

    monkeypatch.setattr(predictions, "predicted", predicted)
    first, *others = map(json.loads, page.get("api/predicted/parts.zarr", params={"count": 4}).text.splitlines())
    assert first["place"] == "final" and others == [{"error": "layer 0 is damaged"}]
    assert [predictions.halving(n) for n in range(4)] == [[], [0], [1, 0], [2, 0, 1]]


def test_a_token_outside_the_vocabulary_has_no_log_probability(root: Path) -> None:
    page = client(root)
    heat = {"hook": "prediction", "statistic": "log-probability"}
    found = floats(page.get("api/heat/late.zarr", params=heat))[0]
    finite = np.flatnonzero(np.isfinite(found))
    assert (finite + 9).tolist() == list(range(19, VOCABULARY)), (
        "only rows 10 to 20 must have a value, because row 21 predicts token 30"
    )
    entropy = floats(page.get("api/heat/late.zarr", params={**heat, "statistic": "entropy"}))[0]
    assert np.flatnonzero(np.isfinite(entropy)).tolist() == list(range(10, 22))
    last = told(page, "alternatives", "late", token=21)
    assert (len(last["tokens"]), last["rank"], last["came"]) == (10, None, None)


@pytest.mark.parametrize("row", [30, 59])
def test_attribution_is_of_the_next_token_or_of_the_likeliest(
    row: int, page: TestClient, parts: Capture, model: Path
) -> None:
    end = Unembedding.load(model)
    likeliest = int(end.logits(parts.numpy("resid_final", tokens=[row])).argmax())
    target = likeliest if row == 59 else int(parts.token_ids[row + 1])
    shares, names = logit_attribution(parts, end, target, rows=slice(row, row + 1))
    found = told(page, "attribution", token=row)
    (text,) = Texts(model).of([target]) or [None]
    assert (found["parts"], found["target"]) == (names, {"id": target, "text": text})
    np.testing.assert_allclose(found["values"], shares[:, 0], rtol=1e-5)
    assert found["logit"] == pytest.approx(shares.sum(), rel=1e-5)


def test_attribution_needs_every_block_and_the_final_stream(page: TestClient, root: Path, tmp_path: Path) -> None:
    assert told(page, "capture")["attribution"] is None
    assert "Start dmi view with --model" in told(client(root), "capture")["attribution"]
    owner, wide = kit.Store(1 << 20), viewkit.HIDDEN
    pre, final = ArraySpec("resid_pre", "float32", (0, 1), wide), ArraySpec("resid_final", "float32", (), wide)
    blocks = [ArraySpec(name, "float32", (0, 1), wide) for name in ("attn_out", "mlp_out")]
    short = [pre, final, blocks[0], ArraySpec("mlp_out", "float32", (0,), wide)]
    for name, specs in (("short", short), ("endless", [pre, *blocks])):
        owner.write(tmp_path / f"captures/{name}.zarr", specs, 8, attrs={"num_layers": 2}, wait=False)
    assert owner.shutdown(kit.PATIENCE)
    own = client(tmp_path, model=root)
    for name in ("short", "endless"):
        assert told(own, "capture", name)["attribution"].startswith("Capture the hooks resid_pre@0"), name
        assert refused(own, "attribution", name, token=3)


# ---- latents --------------------------------------------------------------------------------------------------------


def sae_at(folder: Path, root: Path, **facts: Any) -> Path:
    """Copy the autoencoder, with other fields in its `cfg.json`. Returns the directory."""
    folder.mkdir()
    tensors = load_file(root / "sae/sae_weights.safetensors")
    save_file(tensors, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps({"architecture": "standard", **facts}))
    return folder


def test_the_hook_of_an_autoencoder_is_given_or_that_of_its_files(root: Path, tmp_path: Path) -> None:
    new = sae_at(tmp_path / "new", root, metadata={"hook_name": "blocks.2.hook_resid_pre"})
    bare = sae_at(tmp_path / "bare", root)
    assert Latents.load(root / "sae", None).hook == "blocks.6.hook_resid_pre"
    assert Latents.load(root / "sae/sae_weights.safetensors", "resid_pre@3").hook == "resid_pre@3"
    assert Latents.load(new / "sae_weights.safetensors", None).hook == "blocks.2.hook_resid_pre"
    assert Latents.load(bare, "resid_pre@1").hook == "resid_pre@1"
    scope = load_file(root / "sae/sae_weights.safetensors")
    (tmp_path / "scope").mkdir()
    np.savez(tmp_path / "scope/params.npz", **scope, threshold=np.zeros(24, "f4"))
    assert Latents.load(tmp_path / "scope/params.npz", "resid_pre@1").hook == "resid_pre@1", (
        "an autoencoder without cfg.json"
    )
    for path in (bare, tmp_path / "scope/params.npz"):
        with pytest.raises(ValueError, match=r"its files name no hook; give --sae-hook, such as resid_pre@12"):
            Latents.load(path, None)


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        ("resid_pre@1", None),
        ("resid_pre", "resid_pre has the layers [0, 1]; name that of the autoencoder, as in --sae-hook resid_pre@N."),
        ("resid_pre@7", "The autoencoder encodes resid_pre@7, which the store lacks."),
        ("blocks.0.hook_mlp_out", "The autoencoder encodes blocks.0.hook_mlp_out, which the store lacks."),
        ("resid_pre@first", "'resid_pre@first' names no layer; write a hook as in 'resid_pre@3'"),
        ("nothing@1", "nothing"),
    ],
)
def test_a_store_without_the_hook_has_no_latents(hook: str, words: str | None, root: Path) -> None:
    latents = Latents.load(root / "sae", hook)
    with open_capture(root / "captures/lossy.zarr", allow_incomplete=True) as capture:
        found = latents.lacking(capture)
    assert found is None if words is None else words in str(found)
    page = client(root, sae=latents)
    about = told(page, "capture", "lossy")
    assert about["latents"] == {"lacks": found, "count": 24, "hook": hook}
    assert ("latents" in [one["name"] for one in about["hooks"]]) == (words is None)
    if words is not None:
        assert refused(page, "latents", "lossy", token=3) == found
    assert refused(client(root), "latents", "lossy", token=3) == "start dmi view with --sae FILE"


def test_an_autoencoder_of_another_width_or_of_reduced_rows_is_refused(root: Path, tmp_path: Path) -> None:
    reduction, owner = parse("rp(16)"), kit.Store(1 << 20)
    assert reduction is not None
    settings = {**reduction.settings(), "dtype": "float32", "width": 64}
    pre = ArraySpec("resid_pre", "uint8", (0, 1), reduction.stored_width(64, "float32"), reduce=settings)
    specs = [pre, ArraySpec("mlp_out", "float32", (0, 1), 8), ArraySpec("resid_final", "float32", (), 64)]
    owner.write(tmp_path / "a.zarr", specs, 10, attrs={"num_layers": 2})
    assert owner.shutdown(kit.PATIENCE)
    with open_capture(tmp_path / "a.zarr") as capture:
        hooks = ("resid_pre@0", "resid_post@0", "resid_post@1", "mlp_out@0")
        said = {hook: Latents.load(root / "sae", hook).lacking(capture) for hook in hooks}
    assert said["mlp_out@0"] == "The autoencoder takes rows of 64 values; mlp_out@0 has 8."
    assert str(said["resid_pre@0"]).startswith("'resid_pre' was stored as rp, from which this cannot be")
    assert str(said["resid_post@0"]).startswith("'resid_post' was stored as rp") and said["resid_post@1"] is None


def test_the_strongest_latents_of_a_token(page: TestClient, root: Path, parts: Capture) -> None:
    values = Latents.load(root / "sae", None).encoder.encode(parts.numpy("resid_pre", 6))
    row = int((values > 0).sum(1).argmax())
    order = np.argsort(-values[row], kind="stable")[: int((values[row] > 0).sum())].tolist()
    found = told(page, "latents", token=row)["latents"]
    assert [one["latent"] for one in found] == order[:20] and len(order) > 2
    np.testing.assert_allclose([one["value"] for one in found], values[row, order[:20]], rtol=1e-5)
    some = Latents.load(root / "sae", None).strongest(parts, row, 2)
    assert some == found[:2]


@pytest.mark.parametrize("k", [None, 5])
def test_one_latent_in_a_window(k: int | None, root: Path) -> None:
    """With the k largest of a row, other latents decide whether a latent is kept. Latent 17 is active."""
    latents = Latents.load(root / "sae", "resid_pre@1")
    latents = replace(latents, encoder=replace(latents.encoder, k=k))
    wanted = latents.encoder.encode(np.nan_to_num(STREAM[1]))[:, 17]
    wanted[HOLE] = wanted[BAD] = np.nan
    page, query = client(root, sae=latents), {"hook": "latents", "statistic": "value", "index": 17}
    found = floats(page.get("api/heat/lossy.zarr", params=query))
    assert found.shape == (1, ROWS) and (found > 0).any()
    np.testing.assert_allclose(found[0], wanted, rtol=1e-4, atol=1e-5)
    part = floats(page.get("api/heat/lossy.zarr", params={**query, "first": 90, "count": 20}))
    assert np.array_equal(part[0], found[0, 90:110], equal_nan=True)
    assert "latent 24 does not exist: the autoencoder has latents 0 to 23" in refused(
        page, "heat", "lossy", hook="latents", index=24
    )


def test_the_strongest_contexts_of_a_latent(root: Path, model: Path) -> None:
    """All stores that have the hook are searched. The histogram has the values above 0."""
    latents = Latents.load(root / "sae", "resid_pre@1")
    found = told(client(root, model=model, sae=latents), "contexts", latent=17)
    own: list[tuple[str, np.ndarray, np.ndarray]] = []
    for name in ("parts", "lossy"):
        with open_capture(root / f"captures/{name}.zarr", allow_incomplete=True) as capture:
            own.append(
                (f"{name}.zarr", capture.token_ids, latents.window(capture, 17, slice(0, len(capture.token_ids))))
            )
    every = np.concatenate([values[np.isfinite(values)] for _, _, values in own])
    active = every[every > 0]
    assert (found["rows"], found["active"], found["read"]) == (60 + ROWS - 32 - 1, len(active), 3)
    assert sum(found["counts"]) == len(active) and len(found["edges"]) == len(found["counts"]) + 1
    assert found["edges"][0] == 0 and found["edges"][-1] == pytest.approx(float(active.max()))
    places = [(float(v), name, row) for name, _, values in own for row, v in enumerate(values) if v > 0]
    places.sort(key=lambda place: -place[0])
    assert [(one["store"], one["row"]) for one in found["found"]] == [place[1:] for place in places[:12]]
    for one in found["found"]:
        ids, values = next((ids, values) for name, ids, values in own if name == one["store"])
        first, stop = max(0, one["row"] - 8), min(len(ids), one["row"] + 5)
        assert (one["first"], one["ids"]) == (first, ids[first:stop].tolist())
        assert one["value"] == values[one["row"]]
        assert one["values"] == [float(v) if np.isfinite(v) else None for v in values[first:stop]]
        assert one["texts"] == list(Texts(model).of(one["ids"]) or [])


def test_contexts_are_searched_for_a_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit also holds within a store, because a store of 32,000 tokens may take a minute. A first block of the
    newest store is always read.
    """
    monkeypatch.setattr(view_latents, "_SECONDS", -1.0)
    found = told(client(root, sae=Latents.load(root / "sae", "resid_pre@1")), "contexts", latent=17)
    assert (found["read"], found["rows"]) == (1, HOLE.start)
    assert {one["store"] for one in found["found"]} == {"lossy.zarr"}
    assert all(one["row"] < HOLE.start for one in found["found"])


def test_a_latent_that_is_never_active_has_no_context(root: Path) -> None:
    latents = Latents.load(root / "sae", "resid_pre@1")
    dead = replace(latents.encoder, bias=np.full(24, -1e6, np.float32))
    found = told(client(root, sae=replace(latents, encoder=dead)), "contexts", latent=17)
    assert (found["found"], found["active"], sum(found["counts"])) == ([], 0, 0)
