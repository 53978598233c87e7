# SPDX-License-Identifier: Apache-2.0
"""`dmi view` over HTTP: who gets responses, and whether they have the values of the stores."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from dmi_connector.analysis.texts import Texts
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from dmi_connector.view import attention, data, lens, server, texts_index
from dmi_connector.view.app import ACTIONS, MOST_TOKENS, _or_none, make_app
from dmi_connector.view.app import _Pages as make_pages
from dmi_connector.view.data import Library
from tests import storekit as kit
from tests import viewkit
from tests.recorded import check_recorded

TOKEN = "secret"
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """Made-up stores with an index."""
    root = tmp_path_factory.mktemp("stores")
    viewkit.write_stores(root, model)
    return root


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of an engine, without an index."""
    return viewkit.unpack(tmp_path_factory.mktemp("real"))


def client(path: Path, **options: Any) -> TestClient:
    return TestClient(make_app(Library.at(path), TOKEN, **options), base_url=f"http://127.0.0.1/{TOKEN}/")


def floats(response: Any) -> np.ndarray:
    assert response.status_code == 200, response.text
    return np.frombuffer(response.content, "<f4").reshape([int(n) for n in response.headers["x-shape"].split(",")])


# ---- access ---------------------------------------------------------------------------------------------------------

PLACES = ["", "api/captures", "api/capture/story.zarr", "api/heat/story.zarr", "static/main.js", "nothing"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("token", ["", "wrong", "secre", "secrets", "SECRET", "%00", "é"])
def test_a_wrong_token_is_refused(place: str, token: str, stores: Path) -> None:
    asked = TestClient(make_app(Library.at(stores), TOKEN)).get(f"/{token}/{place}")
    assert asked.status_code == 403 and "wrong token" in asked.text


def test_the_root_is_refused_without_a_token(stores: Path) -> None:
    assert TestClient(make_app(Library.at(stores), TOKEN)).get("/").status_code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("place", PLACES)
def test_only_get_is_answered(method: str, place: str, stores: Path) -> None:
    asked = client(stores).request(method, place)
    assert (asked.status_code, asked.headers["allow"]) == (405, "GET")
    assert asked.text == ("" if method == "HEAD" else "only GET is answered")


OUTSIDE = ["..", ".", "", "../secret.zarr", "%2e%2e%2fsecret.zarr", "..%2Fsecret.zarr", "%2Fetc", "a/../../secret.zarr"]
OUTSIDE += ["link.zarr", "listed.zarr", "index.jsonl", "nobody.zarr", "x%00.zarr", "story.zarr%2F..%2Fstory.zarr"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_that_lead_outside_are_not_found(name: str, tmp_path: Path, real: Path) -> None:
    inside = tmp_path / "stores"
    inside.mkdir()
    (tmp_path / "secret.zarr").symlink_to(real / "full.zarr")
    (inside / "link.zarr").symlink_to(real / "full.zarr")
    line = '{"event": "finish", "store": "%s", "state": "complete", "created": ""}\n'
    (inside / "index.jsonl").write_text("".join(line % name for name in ("../secret.zarr", "link.zarr", "listed.zarr")))
    page = client(inside)
    for action in ACTIONS:
        assert page.get(f"api/{action}/{name}").status_code == 404, action
    assert [found["name"] for found in page.get("api/captures").json()["captures"]] == []


def test_a_listed_store_that_became_a_link_is_not_followed(real: Path, tmp_path: Path) -> None:
    shutil.copytree(real / "full.zarr", tmp_path / "mine.zarr")
    page = client(tmp_path)
    assert page.get("api/capture/mine.zarr").status_code == 200
    shutil.rmtree(tmp_path / "mine.zarr")
    (tmp_path / "mine.zarr").symlink_to(real / "full.zarr")
    assert page.get("api/capture/mine.zarr").status_code == 404


@pytest.mark.parametrize("name", ["../app.py", "%2e%2e/app.py", "..%2Fapp.py", "%2Fetc%2Fpasswd", ""])
def test_static_files_are_those_of_the_page(name: str, stores: Path) -> None:
    assert client(stores).get(f"static/{name}").status_code == 404


def test_every_answer_forbids_other_hosts(stores: Path) -> None:
    page = client(stores)
    for place in ("", "static/main.js", "api/captures", "api/capture/no.zarr", "nothing"):
        headers = page.get(place).headers
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert (headers["referrer-policy"], headers["cache-control"]) == ("no-referrer", "no-store")


def test_the_page_names_no_other_host_and_all_its_files_exist(stores: Path) -> None:
    page = client(stores)
    assert "<title>dmi view</title>" in page.get("").text
    assert page.get(f"http://127.0.0.1/{TOKEN}").url.path == f"/{TOKEN}/"
    static = ROOT / "dmi_connector" / "view" / "static"
    names = [path.name for path in static.iterdir()]
    assert {"index.html", "main.js", "style.css"} <= set(names)
    for name in names:
        text = page.get(f"static/{name}").text
        assert text == (static / name).read_text()
        assert "//" not in text.replace("http://www.w3.org/2000/svg", "").replace("// ", "") or name == "colour.js", (
            name
        )


# ---- the list -------------------------------------------------------------------------------------------------------


def test_the_list_is_searched_and_paged(stores: Path) -> None:
    page = client(stores)

    def names(**query: Any) -> list[str]:
        return [found["name"] for found in page.get("api/captures", params=query).json()["captures"]]

    assert set(names()) == {f"{n}.zarr" for n in ("story", "long", "lossy", "bare", *(f"run-{i:05}" for i in range(3)))}
    assert names(search="STORY") == ["story.zarr"]
    assert names(search="incomplete") == ["lossy.zarr"]
    assert names(search="cmpl-long 0") == ["long.zarr"], "all words must match, in any field"
    assert names(search="nobody") == []
    assert names(first=2, count=3) == names()[2:5]
    (line,) = page.get("api/captures", params={"search": "lossy"}).json()["captures"]
    assert (line["key"], line["state"], line["tokens"]) == ("lossy", "incomplete", 200)


def test_a_search_of_texts_goes_on_where_it_stopped(stores: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts_index, "_SECONDS", 0)
    page = client(stores)
    found = page.get("api/captures", params={"search": "lighthouse"}).json()
    assert (found["total"], found["pending"]) == (0, 7), "no text must be read yet"
    shown = page.get("api/captures").json()["captures"]
    assert {line["name"]: line["text"][:14] for line in shown}["story.zarr"] == "The lighthouse"
    found = page.get("api/captures", params={"search": "lighthouse LANTERN"}).json()
    assert found["pending"] == 0 and {line["name"] for line in found["captures"]} == {
        f"{name}.zarr" for name in ("story", "long", "lossy")
    }


def test_texts_are_cut_to_what_is_shown_and_to_what_is_searched(tmp_path: Path) -> None:
    """The list shows 96 characters of the prompt on one line. A search covers 2,048 tokens, in lower case."""

    class Words:
        """A fake `Texts`: one word per token."""

        def whole(self, ids: list[int]) -> str:
            asked.append(len(ids))
            return " \n".join(f"W{i}" for i in ids)

    owner, ids = kit.Store(1 << 20), np.arange(2100, dtype="<i4")
    for name, prompt in (("a", 5), ("b", 300)):
        about = {"model": "tiny", "prompt_len": prompt}
        owner.write(tmp_path / f"{name}.zarr", [ArraySpec("q", "float32", (), 1)], 2100, ids=ids, attrs=about)
    assert owner.shutdown()
    asked: list[int] = []
    index = texts_index.TextIndex(lambda model: Words() if model == "tiny" else None)  # type: ignore[arg-type, return-value]
    infos = {info.store.name: info for info in Library.at(tmp_path)._found()}
    assert index.prompt(infos["a.zarr"]) == "W0 W1 W2 W3 W4" and asked == [2048, 5]
    assert index.prompt(infos["b.zarr"]) == " ".join(f"W{i}" for i in range(96))[:96] and asked[2:] == [2048, 96]
    pairs = [(info, name) for name, info in sorted(infos.items())]
    for words, found in ((["w2047", "a.zarr"], ["a.zarr"]), (["w2048"], []), (["w0", "w1"], ["a.zarr", "b.zarr"])):
        assert [info.store.name for info in index.search(pairs, words)[0]] == found
    assert len(asked) == 4, "each text must be read once"
    about = {"model": "tiny", "prompt_len": 14, "start": 10}
    owner = kit.Store(1 << 20)
    owner.write(tmp_path / "later.zarr", [ArraySpec("q", "float32", (), 1)], 20, ids=ids[:20], attrs=about)
    assert owner.shutdown()
    later = next(info for info in Library.at(tmp_path)._found() if info.store.name == "later.zarr")
    assert index.prompt(later) == "W0 W1 W2 W3", "the prompt must end at position 14, which is row 4"
    broken = texts_index.TextIndex(lambda _model: (_ for _ in ()).throw(ValueError("no tokenizer")))
    assert broken.prompt(infos["b.zarr"]) == "" and broken.search(pairs, ["w0"]) == ([], 0)


def test_predictions_come_from_captured_logits_without_a_model(real: Path) -> None:
    page = client(real)
    with open_capture(real / "full.zarr") as cap:
        logits, rows, ids = cap.numpy("logits").astype("f8"), cap.logits_positions, cap.token_ids
    own = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    query = {"hook": "prediction", "statistic": "log-probability"}
    found = floats(page.get("api/heat/full.zarr", params=query))[0]
    last = rows + 1 < len(ids)
    np.testing.assert_allclose(found[rows[last] + 1], own[last, ids[rows[last] + 1]], rtol=1e-4)
    assert np.isnan(np.delete(found, rows[last] + 1)).all()
    token = int(rows[0]) + 1
    told = page.get("api/alternatives/full.zarr", params={"token": token}).json()
    assert [one["id"] for one in told["tokens"]] == np.argsort(-own[0], kind="stable")[:10].tolist()
    assert told["came"] == pytest.approx(np.exp(own[0, ids[token]]), rel=1e-3)
    assert page.get("api/alternatives/full.zarr", params={"token": 0}).json()["tokens"] == []


def test_thumbnails_have_the_largest_weights(real: Path) -> None:
    weights = np.random.default_rng(0).random((300, 300)).astype("f4")
    small = attention.pooled(weights, 128)
    assert small.shape == (100, 100) and small[2, 5] == weights[6:9, 15:18].max()
    assert np.array_equal(attention.pooled(weights[:100, :100], 128), weights[:100, :100])
    answer = client(real).get("api/heads/full.zarr", params={"layer": 1, "first": 8, "count": 12})
    found = [json.loads(line) for line in answer.text.splitlines()]
    with open_capture(real / "full.zarr") as cap:
        whole = cap.attention(1)[:, 8:20, 8:20]
    assert [(one["head"], one["shape"]) for one in found] == [(head, [12, 12]) for head in range(4)]
    for one, wanted in zip(found, whole, strict=True):
        values = np.frombuffer(base64.b64decode(one["values"]), "<f4").reshape(12, 12)
        np.testing.assert_allclose(values, wanted, rtol=1e-5)


def test_ten_thousand_captures_are_listed_in_pieces(tmp_path: Path) -> None:
    viewkit.write_list(tmp_path / "many", 10_000)
    page = client(tmp_path / "many")
    found = page.get("api/captures", params={"count": 10**6}).json()
    assert found["total"] == 10_000 and len(found["captures"]) == 200
    assert found["captures"][0]["name"] == "run-09999.zarr", "the newest store must come first"
    last = page.get("api/captures", params={"first": 9_950, "count": 100}).json()["captures"]
    assert len(last) == 50
    assert page.get("api/captures", params={"search": "key-7"}).json()["total"] == 11 * 100


def test_the_list_follows_the_directory(stores: Path, tmp_path: Path, model: Path) -> None:
    page = client(tmp_path)
    assert page.get("api/captures").json()["total"] == 0
    viewkit.write_stores(tmp_path, model, many=0)
    assert page.get("api/captures").json()["total"] == 4


def test_the_list_follows_an_index_that_alone_grew(tmp_path: Path) -> None:
    """Appending a line does not change the directory itself."""
    viewkit.write_list(tmp_path / "some", 3)
    page, index = client(tmp_path / "some"), tmp_path / "some" / "index.jsonl"
    assert page.get("api/captures", params={"search": "late"}).json()["total"] == 0
    with open(index, "a") as lines:
        line = {"event": "finish", "store": "run-00001.zarr", "state": "complete", "key": "late"}
        lines.write(f"{json.dumps(line)}\n")
    found = page.get("api/captures", params={"search": "late"}).json()["captures"]
    assert [capture["name"] for capture in found] == ["run-00001.zarr"]


def test_a_store_of_a_directory_below_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "below" / "inner.zarr").mkdir(parents=True)
    line = {"event": "finish", "store": "below/inner.zarr", "state": "complete", "created": ""}
    (tmp_path / "index.jsonl").write_text(f"{json.dumps(line)}\n")
    assert client(tmp_path).get("api/captures").json()["total"] == 0


def test_one_store_is_shown_alone(stores: Path) -> None:
    page = client(stores / "story.zarr")
    assert [found["name"] for found in page.get("api/captures").json()["captures"]] == ["story.zarr"]
    assert page.get("api/capture/story.zarr").status_code == 200
    assert page.get("api/capture/long.zarr").status_code == 404


def test_one_store_is_shown_next_to_files_that_are_not_captures(real: Path, tmp_path: Path) -> None:
    shutil.copytree(real / "full.zarr", tmp_path / "mine.zarr")
    (tmp_path / "other.zarr").mkdir()
    (tmp_path / "other.zarr/zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    page = client(tmp_path / "mine.zarr")
    assert [found["name"] for found in page.get("api/captures").json()["captures"]] == ["mine.zarr"]
    assert page.get("api/capture/mine.zarr").status_code == 200
    assert page.get("api/capture/other.zarr").status_code == 404
    shutil.rmtree(tmp_path / "mine.zarr")
    assert page.get("api/captures").json()["total"] == 0


def test_a_link_that_the_user_names_is_followed(stores: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.zarr"
    link.symlink_to(stores / "story.zarr")
    assert client(link).get("api/capture/story.zarr").status_code == 200


# ---- values ---------------------------------------------------------------------------------------------------------


def test_a_capture_says_what_can_be_asked(real: Path, stores: Path, model: Path) -> None:
    found = client(real).get("api/capture/full.zarr").json()
    hooks = {hook["name"]: hook for hook in found["hooks"]}
    assert hooks["q_rot"]["layers"] == found["attention"]["layers"] == [0, 1, 2] and hooks["q_rot"]["width"] == 128
    assert (found["heads"], found["tokens"], found["complete"]) == (4, 26, True)
    assert "--model DIR" in found["lens"]
    assert client(stores, model=model).get("api/capture/story.zarr").json()["lens"] is None
    bare = client(stores, model=model).get("api/capture/bare.zarr").json()
    assert bare["attention"]["layers"] == [] and "no residual stream" in bare["lens"]
    assert "Predictions need the hook logits" in bare["predictions"] and bare["experts"] is None
    assert [h["reduce"] for h in client(real).get("api/capture/reduced.zarr").json()["hooks"] if h["name"] == "q"] == [
        "int8"
    ]


def test_every_statistic_of_every_hook_is_answered(real: Path) -> None:
    page = client(real)
    for store in ("full", "reduced", "incomplete"):
        found = page.get(f"api/capture/{store}.zarr").json()
        for hook in found["hooks"]:
            for statistic in hook["statistics"]:
                query = {"hook": hook["name"], "statistic": statistic["name"], "index": 1, "first": 3, "count": 8}
                values = floats(page.get(f"api/heat/{store}.zarr", params=query))
                assert values.shape == (len(hook["layers"]) or 1, 8), (store, query)
                assert np.isfinite(values).any() or hook["name"] in ("logits", "prediction"), (store, query)


def test_heat_has_the_values_of_the_store(real: Path) -> None:
    page = client(real)

    def heat(hook: str, statistic: str, index: int = 0) -> np.ndarray:
        query = {"hook": hook, "statistic": statistic, "index": index, "first": 5, "count": 10}
        return floats(page.get("api/heat/full.zarr", params=query))

    with open_capture(real / "full.zarr") as capture:
        q = capture.numpy("q", tokens=slice(5, 15))
        np.testing.assert_allclose(heat("q", "norm"), np.sqrt((q.astype("f8") ** 2).sum(-1)), rtol=1e-5)
        np.testing.assert_allclose(heat("q", "mean"), q.astype("f8").mean(-1), atol=1e-6)
        np.testing.assert_array_equal(heat("q", "largest magnitude"), abs(q).max(-1))
        np.testing.assert_array_equal(heat("q", "largest value"), q.max(-1))
        np.testing.assert_array_equal(heat("q", "value", 7), q[..., 7])
        np.testing.assert_array_equal(
            heat("embed", "value", 7), capture.numpy("embed", tokens=slice(5, 15))[None, :, 7]
        )


def test_statistics_of_logits_stand_at_their_tokens(real: Path) -> None:
    page = client(real)
    with open_capture(real / "full.zarr") as capture:
        logits, rows = capture.numpy("logits").astype("f8"), capture.logits_positions
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = {
        "entropy": -(shares * np.log(shares)).sum(-1),
        "largest probability": shares.max(-1),
        "log-probability of": np.log(shares[:, 3]),
    }
    for name, wanted in expected.items():
        found = floats(page.get("api/heat/full.zarr", params={"hook": "logits", "statistic": name, "index": 3}))
        assert found.shape == (1, 26)
        np.testing.assert_allclose(found[0, rows], wanted, rtol=1e-4)
        assert np.isnan(np.delete(found[0], rows)).all(), "tokens without logits must have no value"


def test_missing_rows_have_no_value(stores: Path) -> None:
    found = floats(client(stores).get("api/heat/lossy.zarr", params={"hook": "resid_pre", "first": 60, "count": 40}))
    assert np.isnan(found[:, 4:36]).all() and np.isfinite(found[:, :4]).all() and np.isfinite(found[:, 36:]).all()


def test_a_capture_says_which_rows_have_logits(tmp_path: Path) -> None:
    viewkit.write_spoilt(tmp_path)
    hooks = client(tmp_path).get("api/capture/spoilt.zarr").json()["hooks"]
    assert {hook["name"]: hook["rows"] for hook in hooks} == {
        "resid_pre": None,
        "q_rot": None,
        "k_rot": None,
        "logits": [[20, 30]],
        "prediction": [[21, 31]],
    }
    found = floats(client(tmp_path).get("api/heat/spoilt.zarr", params={"hook": "logits", "statistic": "entropy"}))
    assert np.flatnonzero(np.isfinite(found[0])).tolist() == list(range(20, 30))


@pytest.mark.parametrize(("rows", "ranges"), [([], []), ([3], [[3, 4]]), ([5, 2, 3, 9, 5], [[2, 4], [5, 6], [9, 10]])])
def test_ranges_are_the_runs_of_rows(rows: list[int], ranges: list[list[int]]) -> None:
    assert data.ranges(np.array(rows, np.int64)) == ranges


def test_attention_is_that_of_the_reader(real: Path) -> None:
    page = client(real)
    with open_capture(real / "full.zarr") as capture:
        whole = capture.attention(1, 2)
    query: dict[str, Any] = {"layer": 1, "head": 2}
    found = floats(page.get("api/attention/full.zarr", params={**query, "first": 8, "count": 12}))
    np.testing.assert_allclose(found[:, 0], whole[8:20, :8].sum(1), rtol=1e-5)
    np.testing.assert_allclose(found[:, 1:], whole[8:20, 8:20], rtol=1e-5)
    keys = page.get("api/attended/full.zarr", params={**query, "token": 20}).json()["keys"]
    assert len(keys) == 10
    assert [key["row"] for key in keys] == np.argsort(-whole[20], kind="stable")[:10].tolist()
    assert keys[0]["weight"] == pytest.approx(whole[20].max())


def test_the_first_of_keys_with_equal_weights_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys with weight 0 are left out."""
    weights = np.zeros((1, 1000), "f4")
    weights[0, 5::2] = 0.25
    weights[0, 900] = 0.5
    monkeypatch.setattr(attention, "attention_pattern", lambda *_: weights)
    found = attention.largest(None, 0, 0, 999)  # type: ignore[arg-type]
    assert [key["row"] for key in found] == [900, *range(5, 23, 2)] and found[1] == {"row": 5, "weight": 0.25}
    assert [key["row"] for key in attention.largest(None, 0, 0, 999, 2)] == [900, 5]  # type: ignore[arg-type]
    weights[0, 5:900] = 0
    weights[0, 901:] = 0
    assert attention.largest(None, 0, 0, 999) == [{"row": 900, "weight": 0.5}]  # type: ignore[arg-type]


def test_attention_is_shown_as_far_as_its_keys_are_there(stores: Path, real: Path) -> None:
    page = client(stores)
    assert page.get("api/capture/story.zarr").json()["attention"]["until"] > 200
    assert page.get("api/capture/lossy.zarr").json()["attention"]["until"] == 64
    query = {"layer": 0, "head": 0, "first": 32}
    assert floats(page.get("api/attention/lossy.zarr", params={**query, "count": 32})).shape == (32, 33)
    beyond = page.get("api/attention/lossy.zarr", params={**query, "count": 33})
    assert beyond.status_code == 400 and "lacks rows before the queries" in beyond.json()["error"]
    assert client(real).get("api/capture/reduced.zarr").json()["attention"]["until"] == 26


def test_attention_of_a_summary_has_the_stored_weights(real: Path) -> None:
    with open_capture(real / "reduced.zarr") as capture:
        positions, weights, _ = capture.attention_summary(2, 1)
    page = client(real)
    found = floats(page.get("api/attention/reduced.zarr", params={"layer": 2, "head": 1}))
    wanted = np.zeros((26, 26), "f4")
    for query, (keys, values) in enumerate(zip(positions, weights, strict=True)):
        wanted[query, keys[keys >= 0]] = values[keys >= 0]
    np.testing.assert_array_equal(found[:, 1:], wanted)
    assert page.get("api/attention/reduced.zarr", params={"layer": 2, "head": 4}).status_code == 400


def test_queries_before_rotary_are_no_attention(tmp_path: Path) -> None:
    specs = (ArraySpec("q", "float32", (0,), 64), ArraySpec("k", "float32", (0,), 64))
    owner = kit.Store(1 << 20)
    try:
        for rotary in (True, False):
            about = {"rotary": rotary, "dims": {"heads": 2, "kv_heads": 2, "head_dim": 32}}
            owner.write(tmp_path / f"{rotary}.zarr", specs, 12, attrs=about)
    finally:
        assert owner.shutdown()
    page, query = client(tmp_path), {"layer": 0, "head": 1}
    with open_capture(tmp_path / "False.zarr") as capture:
        found = floats(page.get("api/attention/False.zarr", params=query))
        np.testing.assert_allclose(found[:, 1:], capture.attention(0, 1), rtol=1e-6)
    assert page.get("api/capture/True.zarr").json()["attention"]["layers"] == []
    refused = page.get("api/attention/True.zarr", params=query)
    assert refused.status_code == 400 and "capture q_rot and k_rot" in refused.json()["error"]


def test_tokens_have_their_text(stores: Path, model: Path, real: Path) -> None:
    found = client(stores).get("api/tokens/story.zarr", params={"count": 1000}).json()
    assert "".join(found["texts"]) == viewkit.STORY
    part = client(stores).get("api/tokens/story.zarr", params={"first": 10, "count": 5}).json()
    assert (part["first"], part["texts"]) == (10, found["texts"][10:15])
    assert client(real).get("api/tokens/full.zarr").json()["texts"] is None, (
        "without its model, the store must have no texts"
    )
    assert client(real, tokenizer=model).get("api/tokens/full.zarr").json()["texts"] is not None
    assert client(real, model=model).get("api/tokens/full.zarr").json()["texts"] is not None


def test_the_tokenizer_that_is_named_comes_before_that_of_the_model(real: Path, model: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(512)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    page = client(real, model=model, tokenizer=tmp_path)
    found = page.get("api/tokens/full.zarr").json()
    assert [text.strip() for text in found["texts"]] == [f"w{i}" for i in found["ids"]]
    pages = make_pages(Library.at(real), model, tmp_path)
    with open_capture(real / "full.zarr") as capture:
        assert pages._with_texts(capture, [{}, {}], [0, -1]) == [{"id": 0, "text": " w0"}, {"id": -1, "text": None}]


def test_a_word_keeps_its_space_where_decoders_drop_the_first_one(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    core = Tokenizer(
        models.BPE(vocab={"▁a": 0, "▁b": 1, "c": 2, "▁": 3, "a": 4, "b": 5}, merges=[("▁", "a"), ("▁", "b")])
    )
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    core.save(str(tmp_path / "tokenizer.json"))
    assert Texts(tmp_path).of([0, 1, 2]) == [" a", " b", "c"]
    damaged = np.array([-1, 2, -(2**31)], np.int32)
    assert Texts(tmp_path).of(damaged) == ["", "c", ""] and Texts(tmp_path).whole(damaged.tolist()) == "c"


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("capture/no.zarr", "not a finished store"),
        ("heat/full.zarr?hook=qq", "did you mean 'q'"),
        ("heat/full.zarr?hook=q&statistic=median", "'median' does not exist for 'q'"),
        ("heat/full.zarr?hook=q&statistic=value&index=128", "neuron 128 does not exist: 'q' has 0 to 127"),
        ("heat/full.zarr?hook=q&first=-1", "first='-1' is not valid"),
        (f"heat/full.zarr?hook=q&first={'9' * 12}", "is not valid; give an integer"),
        ("attention/full.zarr?layer=9&head=0", "no layer 9"),
        ("attention/full.zarr?layer=0&head=4", "head 4 does not exist"),
        ("attention/full.zarr?head=0", "layer='' is not valid"),
        ("attended/full.zarr?layer=0&head=0&token=26", "token 26 does not exist: the store has 26 tokens"),
        ("lens/full.zarr?token=0", "--model DIR"),
        ("heat/full.zarr?hook=prediction&statistic=norm", "'norm' does not exist for 'prediction'"),
        ("predicted/full.zarr", "--model DIR"),
        ("heads/full.zarr?layer=9", "no layer 9"),
        ("attribution/full.zarr?token=1", "--model DIR"),
        ("load/full.zarr?layer=0", "no topk_ids"),
        ("experts/full.zarr", "hook 'topk_ids' is not in this store"),
        ("latents/full.zarr?token=1", "start dmi view with --sae FILE"),
        ("contexts/full.zarr?latent=1", "start dmi view with --sae FILE"),
        ("attention/incomplete.zarr?layer=0&head=0&count=1", "has no attention; capture"),
    ],
)
def test_bad_questions_say_what_is_wrong(query: str, words: str, real: Path) -> None:
    asked = client(real).get(f"api/{query}")
    assert asked.status_code == (404 if "no.zarr" in query else 400)
    assert words in asked.json()["error"]


@pytest.mark.parametrize(("row", "missing"), [(63, False), (64, True), (95, True), (96, False)])
def test_a_missing_row_is_refused(row: int, missing: bool, stores: Path, model: Path) -> None:
    asked = client(stores, model=model).get("api/lens/lossy.zarr", params={"token": row})
    assert asked.status_code == (400 if missing else 200)
    assert not missing or "rows that the store lacks" in asked.json()["error"]


def test_the_last_row_exists_and_the_one_after_it_does_not(stores: Path, model: Path) -> None:
    page = client(stores, model=model)
    assert page.get("api/lens/lossy.zarr?token=199").status_code == 200
    assert "token 200 does not exist" in page.get("api/lens/lossy.zarr?token=200").json()["error"]


def test_a_window_is_never_larger_than_the_limit(stores: Path) -> None:
    found = floats(client(stores).get("api/heat/long.zarr", params={"hook": "resid_final", "count": 10**9}))
    assert found.shape == (1, MOST_TOKENS)
    beyond = floats(client(stores).get("api/heat/long.zarr", params={"hook": "resid_final", "first": 10**9}))
    assert beyond.shape == (1, 0)


def test_verify_finds_damage(stores: Path, tmp_path: Path, model: Path) -> None:
    viewkit.write_stores(tmp_path, model, many=0)
    page = client(tmp_path)
    assert page.get("api/verify/story.zarr").json() == {"problems": [], "not_finite": [], "unseen": None}
    shard = tmp_path / "story.zarr" / "q_rot" / "c" / "0" / "0" / "0"
    damaged = bytearray(shard.read_bytes())
    damaged[100] ^= 1
    os.chmod(shard, 0o644)
    shard.write_bytes(damaged)
    problems = page.get("api/verify/story.zarr").json()["problems"]
    assert problems and "q_rot" in problems[0]


def test_verify_tells_values_that_are_not_finite_from_damage(tmp_path: Path) -> None:
    owner, spec = kit.Store(1 << 20), ArraySpec("q", "float32", (0,), 8)
    values = kit.random_bits(spec, 20)
    values.view("f4")[0, 3, 3] = np.nan
    owner.write(tmp_path / "a.zarr", [spec], 20, values={"q": values}, attrs={"num_layers": 1})
    assert owner.shutdown()
    found = client(tmp_path).get("api/verify/a.zarr").json()
    assert found["problems"] == [] and "1 values are not finite" in found["not_finite"][0]


def test_the_lens_of_a_row_that_is_not_finite_names_no_token(
    stores: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = lens.residual_rows

    def spoilt(capture: Capture, row: int) -> tuple[list[str], np.ndarray]:
        places, rows = read(capture, row)
        rows[1, 3] = np.nan
        return places, rows

    monkeypatch.setattr(lens, "residual_rows", spoilt)
    first, second, *_ = client(stores, model=model).get("api/lens/story.zarr", params={"token": 5}).json()["places"]
    assert all(token["id"] >= 0 and token["text"] is not None for token in first["tokens"])
    assert {(token["id"], token["text"], token["p"]) for token in second["tokens"]} == {(-1, None, None)}


def test_no_store_is_held_between_answers(tmp_path: Path, model: Path) -> None:
    viewkit.write_stores(tmp_path, model, many=0)
    page = client(tmp_path)
    assert page.get("api/heat/story.zarr", params={"hook": "resid_pre"}).status_code == 200
    assert main(["prune", str(tmp_path), "--keep-bytes", "0"]) == 0
    assert list(tmp_path.glob("*.zarr")) == []
    assert page.get("api/capture/story.zarr").status_code == 404


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_serves_on_loopback_alone(stores: Path) -> None:
    command = [sys.executable, "-m", "dmi_connector.cli", "view", str(stores)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:") and url.endswith("/")
            with urllib.request.urlopen(f"{url}api/captures") as answer:
                assert answer.status == 200
            port = int(url.split(":")[2].split("/")[0])
            with socket.socket() as other, pytest.raises(OSError):
                other.connect(("127.0.0.2", port))
        finally:
            process.terminate()
    assert process.returncode in (0, -15)


def test_the_server_listens_on_loopback_and_says_where(
    stores: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It uses the given port, or a free one. It logs no requests and has no websockets."""
    made: list[Any] = []

    class Server:
        def __init__(self, config: Any) -> None:
            self.config, self.sockets = config, list[Any]()
            made.append(self)

        def run(self, sockets: list[socket.socket]) -> None:
            self.sockets = [one.getsockname() for one in sockets]
            with socket.socket() as other:
                other.connect(sockets[0].getsockname())

    monkeypatch.setattr(server.uvicorn, "Server", Server)
    said: list[str] = []
    server.serve(stores, model=model, tokenizer=model, say=said.append)
    server.serve(stores / "story.zarr", made[0].sockets[0][1], say=said.append)
    first, second = made
    assert first.sockets == second.sockets, "the port must be free again at the end"
    ((host, port),) = first.sockets
    assert host == "127.0.0.1" and port > 0
    tokens = [text.removeprefix(f"http://127.0.0.1:{port}/").removesuffix("/") for text in said]
    assert all(len(token) == 32 for token in tokens) and tokens[0] != tokens[1]
    for one, token, count in zip(made, tokens, (7, 1), strict=True):
        config = one.config
        assert (config.access_log, config.log_level, config.lifespan, config.ws) == (False, "warning", "off", "none")
        page = TestClient(config.app, base_url=f"http://127.0.0.1/{token}/")
        assert page.get("api/captures").json()["total"] == count
    told = [
        TestClient(one.config.app, base_url=f"http://127.0.0.1/{token}/").get("api/capture/story.zarr").json()["lens"]
        for one, token in zip(made, tokens, strict=True)
    ]
    assert told[0] is None and "--model DIR" in told[1]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match=rf"--port {taken.getsockname()[1]} cannot be used \(.*give another, or 0"):
            server.serve(stores, taken.getsockname()[1], say=said.append)
    assert len(said) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere does not exist; give a store (*.zarr) or a directory"),
        ([".", "--port", "70000"], "--port 70000 cannot be used"),
        ([".", "--model", "nowhere"], "give the directory of the model's weights (`--model DIR`)"),
        ([".", "--tokenizer", "nowhere"], "tokenizer: nowhere has no tokenizer.json"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["view", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"tokenizer: .*tokenizer\.json cannot be read \(.*give the directory of another"
    ):
        Texts(tmp_path)


def test_a_negative_token_id_has_no_text(model: Path) -> None:
    texts = Texts(model)
    assert texts.of([5, -1, 6]) == [*(texts.of([5]) or ()), "", *(texts.of([6]) or ())]
    assert texts.whole([5, -1, 6]) == texts.whole([5, 6])


def test_the_page_needs_neither_torch_nor_vllm() -> None:
    code = "import sys, dmi_connector.view.server; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_without_its_packages_the_command_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["view", "."]) == 2
    assert "install dmi_connector[view]" in capsys.readouterr().err


def test_verify_of_a_store_that_cannot_be_opened_lists_its_problems(tmp_path: Path) -> None:
    owner = kit.Store(1 << 20)
    owner.write(tmp_path / "a.zarr", [ArraySpec("q", "float32", (0,), 8)], 20, attrs={"num_layers": 1})
    assert owner.shutdown()
    page = client(tmp_path)
    (tmp_path / "a.zarr/q/zarr.json").unlink()
    assert page.get("api/capture/a.zarr").status_code == 400
    found = page.get("api/verify/a.zarr")
    assert found.status_code == 200 and any("q" in problem for problem in found.json()["problems"])


def test_json_has_null_for_numbers_that_are_not_finite() -> None:
    assert _or_none(np.array([0.5, np.nan, np.inf, -np.inf], np.float32)) == [0.5, None, None, None]


ASKED = (
    *("captures?count=3", "captures?search=story", "captures?search=lighthouse&first=0&count=2"),
    *("capture/story.zarr", "capture/bare.zarr", "capture/lossy.zarr", "tokens/story.zarr?first=20&count=5"),
    *("heat/story.zarr?hook=prediction&first=2&count=9", "heat/story.zarr?hook=prediction&statistic=entropy&count=7"),
    *("heat/story.zarr?hook=resid_pre", "heat/story.zarr?hook=q&statistic=value&index=3&count=8"),
    *("attention/story.zarr?layer=0&head=1&count=12", "heads/story.zarr?layer=0&count=12"),
    *("attended/story.zarr?layer=0&head=1&token=17", "lens/story.zarr?token=9", "alternatives/story.zarr?token=9"),
    *("predicted/story.zarr?count=4", "predicted/story.zarr?token=4&first=3&count=4", "attribution/story.zarr?token=5"),
    *("verify/story.zarr", "heat/lossy.zarr?hook=prediction&first=60&count=8", "alternatives/lossy.zarr?token=65"),
)


def test_answers_are_those_of_before(stores: Path, model: Path) -> None:
    """data/answers.json has the recorded responses, whose keys the page reads.

    For arrays it has the shape, the number of NaN values and the mean magnitude.
    """
    asking = client(stores, model=model, tokenizer=model)
    for query in ASKED:
        asked = asking.get(f"api/{query}")
        found: Any = [asked.status_code, asked.headers["content-type"]]
        if "x-shape" in asked.headers:
            values = floats(asked)
            found += [list(values.shape), int(np.isnan(values).sum()), float(np.nanmean(np.abs(values)))]
        else:
            text = asked.text.replace(json.dumps(str(stores))[1:-1], "STORES").replace(
                json.dumps(str(model))[1:-1], "M"
            )
            parts = text.splitlines() if found[1].startswith("application/x-ndjson") else [text]
            found += [json.loads(part, object_hook=without_times) for part in parts]
        check_recorded("answers.json", query, found)


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    """A response without times, models and sizes of files, which depend on paths of this run.

    Floats in base64 are replaced by their mean magnitude.
    """
    kept = {key: value for key, value in answer.items() if key not in ("started", "created", "model", "bytes")}
    if isinstance(values := kept.get("values"), str):
        kept["values"] = float(np.abs(np.frombuffer(base64.b64decode(values), "<f4")).mean())
    return kept
