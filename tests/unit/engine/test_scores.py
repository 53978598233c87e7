# SPDX-License-Identifier: Apache-2.0
"""Scores of probes in responses, with vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.request import RequestStatus

from dmi_connector.engine.owners.paged import PagedSlots
from dmi_connector.engine.scheduler.tracker import Tracker
from dmi_connector.engine.transfer.exporter import Exporter
from dmi_connector.reduce.probe import Probe
from tests import schedulerkit
from tests.exporterkit import SMALL, make_exporter
from tests.probekit import save_encoder, save_probe
from tests.schedulerkit import BLOCK, Engine, score
from tests.shorter import seeds
from tests.trackerkit import ask, generate

Make = Callable[..., Engine]
RISK = {"probes": {"risk": {"inline": ["max", "min", "mean"]}}}


@pytest.fixture
def make(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # the configuration reads it; there is no runner
    return lambda **more: Engine(tiny_model("qwen3"), tmp_path, monkeypatch, scored=True, **more)


def responses(engine: Engine, short: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Record the tracker's results at the end of each request, including aborted ones. short: list of the requests that
    ended while they were preempted.
    """
    said: dict[str, dict[str, Any]] = {}
    finish = engine.tracker.finish

    def noted(request: Any, blocks: Any) -> Any:
        tracked = engine.tracker.tracked.get(request.request_id)
        keep, response = finish(request, blocks)
        if short is not None and tracked is not None and tracked.scores is not None and tracked.scores.short:
            short.append(request.request_id)
        said[request.request_id] = response or {}
        return keep, response

    engine.tracker.finish = noted  # type: ignore[method-assign]
    return said


def want(engine: Engine, name: str, first: int, last: int) -> dict[str, Any]:
    """The expected response for rows at positions from `first` to `last`."""
    tokens = engine.requests[name].all_token_ids
    rows = [score(tokens[at], at) for at in range(first, last + 1)]
    found = {"max": max(rows), "at": first + rows.index(max(rows)), "min": min(rows), "last": rows[-1]}
    return {**found, "mean": pytest.approx(sum(rows) / len(rows)), "from": first, "through": last}


KINDS: list[dict[str, Any]] = [
    {"blocks": 24, "ahead": False},
    {"blocks": 24},
    {"blocks": 40, "late": True},
    {"blocks": 24, "drafts": 3, "ahead": False, "hooks": "q,logits"},
    {"blocks": 24, "drafts": 3, "hooks": "q,logits"},
    {"blocks": 24, "pages": 12},
    {"blocks": 40, "pages": 20, "ahead": False, "borrows": True},
    {"blocks": 24, "pages": 30, "drafts": 3},
    {"blocks": 24, "sleeps": True},
    {"blocks": 24, "pages": 12, "sleeps": True},
    {"blocks": 40, "pages": 30, "sleeps": True, "ahead": False, "on_gpu": True},
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: ",".join(map(str, kind.items())))
@pytest.mark.parametrize("seed", range(2))
def test_responses_have_the_scores_of_all_rows_in_random_histories(make: Make, kind: dict[str, Any], seed: int) -> None:
    """Arrivals, prefix hits, preemptions, rejected drafts, aborts, resets of the cache while requests run, and
    sleep.
    """
    engine, short = make(seed=seed, **kind), list[str]()
    said, random = responses(engine, short), engine.random
    for _ in range(100):
        if random.random() < 0.1 * seed and "logits" not in kind.get("hooks", ""):
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        if "sleeps" in kind and random.random() < 0.1:
            engine.pause()
            engine.sleep()
        if random.random() < 0.35 and len(engine.requests) - len(said) < 12:
            first, start = random.choice([3, 4, 5]), random.choice([0, 0, 5, 20, 300])
            prompt = [first + n % 20 for n in range(random.randrange(1, 120))]
            engine.add(prompt, random.randrange(1, 60), {**RISK, "tokens": [start, None]})
        running = [name for name, request in engine.requests.items() if not request.is_finished()]
        if running and random.random() < 0.05:
            engine.abort(random.choice(running))
        engine.step()
        if random.random() < 0.1 * seed and not kind.get("drafts"):
            engine.settle()
    engine.drain()
    assert engine.faults() == []
    scored = 0
    for name, stored in engine.stored.items():
        found, length = said[name]["dmi_probe"]["risk"], stored.ends[0][0]
        if name in {*engine.aborted, *short}:  # steps that were running at the end are not included
            if "max" in found:
                assert found == want(engine, name, found["from"], found["through"]), name
        elif length:
            assert found == want(engine, name, stored.start + stored.borrowed, stored.start + length - 1), name
            scored += 1
        else:
            assert found == {"tokens": 0}
    assert scored > 5


def copy_scores(tracker: Tracker, exporters: list[Exporter]) -> None:
    """Simulate what forwards write to all slots, and what the ranks report at the start."""
    for exporter in exporters:
        slots, scores = torch.arange(len(exporter.rows)), exporter.layer.scores
        assert scores is not None
        scores.copy(exporter.rows, slots, slots)
    tracker.scores.open([exporter.layer.scores.path for exporter in exporters if exporter.layer.scores], 32)


def test_parts_of_ranks_are_added_and_layers_stay_separate(tmp_path: Path) -> None:
    """Each of two ranks has half of z. The probe "two" scores two layers of z. Only one rank writes the probe
    "whole".
    """
    two = save_probe(tmp_path / "two.safetensors", "z", (0, 1), SMALL.heads * SMALL.head_dim, 2, output="sigmoid")
    whole = save_probe(tmp_path / "whole.safetensors", "mlp_out", (1,), SMALL.hidden, 1)
    given = {"probes": {"two": str(two), "whole": str(whole)}, "hooks": "probe.*", "sink": "host"}
    exporters = [make_exporter(tmp_path, 32, SMALL, rank, 2, **given) for rank in range(2)]
    rng = np.random.default_rng(0)
    stored: dict[str, list[np.ndarray]] = {"probe.two": [], "probe.whole": []}
    for exporter in exporters:
        for one in exporter.context.layout.fields:
            values = rng.standard_normal((32, one.stored[1])).astype(np.float32)
            words = exporter.rows.view(torch.float32)
            words[:, one.offset // 4 : one.offset // 4 + values.shape[1]] = torch.from_numpy(values)
            stored[one.hook].append(values)
    assert [len(values) for values in stored.values()] == [4, 1]
    request = ask({"dmi": {"probes": {"two": {"inline": "max"}, "whole": {"inline": "mean"}}}}, prompt=5)
    context = exporters[0].context
    tracker = Tracker(context, PagedSlots(context, 16, 8), 1 << 60)
    tracker.on_new_request(request)  # type: ignore[arg-type]
    generate(tracker, request, 1, ended=False)
    copy_scores(tracker, exporters)
    _, response = tracker.finish(request, [1])  # type: ignore[arg-type]
    slots = np.arange(16, 21)
    a, b, c, d = stored["probe.two"]  # layers 0 and 1 of rank 0, then of rank 1
    two_scores = [1 / (1 + np.exp(-(x + y)[slots])) for x, y in ((a, c), (b, d))]
    found = response["dmi_probe"]
    np.testing.assert_allclose(found["two"]["max"], [rows.max(0) for rows in two_scores], rtol=1e-6)
    np.testing.assert_allclose(found["two"]["last"], [rows[-1] for rows in two_scores], rtol=1e-6)
    assert found["two"]["at"] == [rows.argmax(0).tolist() for rows in two_scores]
    np.testing.assert_allclose(found["whole"]["mean"], stored["probe.whole"][0][slots].mean(), rtol=1e-6)
    for exporter in exporters:
        exporter.shutdown()


@pytest.mark.parametrize(("include", "generated"), [(False, 0), (True, 0), (True, 4)])
def test_a_summary_has_the_neurons_with_the_largest_values(tmp_path: Path, include: bool, generated: int) -> None:
    """Each of two ranks has half of mlp_post. Rows of generated tokens count, or rows of the prompt if there are no
    others.
    """
    given: dict[str, Any] = {"probes": {"top": "top(mlp_post)", "three": "top(z,3)", "norm": "norm(mlp_out)"}}
    given["hooks"] = "probe.*,embed,logits"  # these two come first, so that a later rank has the first layers of a norm
    dims = replace(SMALL, layers=5)
    exporters = [make_exporter(tmp_path, 32, dims, rank, 2, sink="host", **given) for rank in range(2)]
    rng, whole = np.random.default_rng(1), {}
    for rank, exporter in enumerate(exporters):
        words = exporter.rows.view(torch.float32)
        for one in exporter.context.layout.scored:
            assert isinstance(one.reduction, Probe)
            values = torch.from_numpy(rng.standard_normal((32, one.width), dtype=np.float32))
            one.reduction.prepare(one.width, torch.device("cpu"), one.layer, rank)
            words[:, one.offset // 4 : one.offset // 4 + one.stored[1]] = one.reduction.encode(values, one.layer)
            whole.setdefault((one.tapped, one.layer), []).append(values.numpy())
    params = {"include_output_tokens": include, "dmi": {"summary": True}}
    request, context = ask(params, prompt=5), exporters[0].context
    tracker = Tracker(context, PagedSlots(context, 16, 8), 1 << 60)
    tracker.on_new_request(request)  # type: ignore[arg-type]
    generate(tracker, request, 1 + generated, ended=False)
    copy_scores(tracker, exporters)
    _, response = tracker.finish(request, [1])  # type: ignore[arg-type]
    said = response["dmi_summary"]
    positions = range(5, 5 + generated) if generated else range(5)
    assert set(said) == {"mlp_post", "z", "mlp_out", "from", "through"}
    assert set(said["mlp_post"]) == set(said["z"]) == {"neuron", "value", "at"} and "mean" in said["mlp_out"]
    order = [one.layer for e in exporters for one in e.context.layout.scored if one.tapped == "mlp_out"]
    assert sorted(order) == [*range(5)] != order
    for layer, last in enumerate(said["mlp_out"]["last"]):  # any rank may write a layer
        (rows,) = whole["mlp_out", layer]
        np.testing.assert_allclose(last, np.linalg.norm(rows[16 + said["through"]]), rtol=1e-3)
    for hook, k in (("mlp_post", 1), ("z", 3)):
        for layer, neurons in enumerate(said[hook]["neuron"]):
            rows = np.concatenate(whole[hook, layer], 1)[16 + positions.start : 16 + positions.stop]
            most = np.abs(rows).max(0)
            want = np.argsort(-most, kind="stable")[:k]
            at = np.abs(rows).argmax(0)[want]
            assert np.ravel(neurons).tolist() == want.tolist(), (hook, layer)
            assert np.ravel(said[hook]["at"][layer]).tolist() == (positions.start + at).tolist()
            np.testing.assert_allclose(np.ravel(said[hook]["value"][layer]), rows[at, want], rtol=1e-3)
    for exporter in exporters:
        exporter.shutdown()


def test_scores_that_are_not_finite_are_null(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    monkeypatch.setattr(schedulerkit, "score", lambda token, position: float("nan") if position == 3 else position)
    engine.add(range(5, 25), 3, {"probes": {"risk": {"inline": ["max", "min"]}}})
    engine.drain()
    assert engine.replies["r0"]["dmi_probe"]["risk"] == {
        "max": None,
        "at": 3,
        "min": None,
        "last": 21,
        "from": 0,
        "through": 21,
    }
    assert engine.faults() == []


def test_requests_with_a_score_above_the_threshold_are_counted(make: Make) -> None:
    """All captured requests count, whether or not they ask for scores. The histogram gets one sample of each."""
    engine = make(alerts={"risk": 20_000.0}, tokens=lambda: 9)
    taken: list[dict[str, Any]] = [engine.tracker.take_counts()]
    take = engine.tracker.take_counts
    engine.tracker.take_counts = lambda: taken.append(take()) or {}  # type: ignore[func-returns-value,method-assign]
    names = [engine.add([token] * 5, 3, dmi) for token, dmi in ((7, None), (21, None), (30, RISK))]
    engine.add([30] * 5, 3, {"enabled": False})
    engine.drain()
    engine.drain()
    seen: dict[str, Any] = {"probe_alerts.risk": 0, "probe_score.risk": []}
    for counts in taken:
        for key, value in counts.items():
            seen[key] += value
    most = [
        max(score(token, at) for at, token in enumerate(engine.requests[name].all_token_ids[:-1])) for name in names
    ]
    assert taken[0] == {"probe_alerts.risk": 0}, "the series is there before the first alert"
    assert seen == {"probe_alerts.risk": 2, "probe_score.risk": most}
    assert "dmi_probe" not in engine.replies["r0"] and "dmi_probe" in engine.replies["r2"]
    assert engine.faults() == []


def test_a_score_that_is_not_finite_hides_no_other(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest finite score is in the histogram, and an alert counts any score above the threshold."""
    engine = make(alerts={"risk": 3.0})
    lost = {3: float("nan"), 1: float("-inf")}
    monkeypatch.setattr(schedulerkit, "score", lambda token, position: lost.get(position, position))
    seen: list[dict[str, Any]] = []
    take = engine.tracker.take_counts
    engine.tracker.take_counts = lambda: seen.append(take()) or {}  # type: ignore[func-returns-value,method-assign]
    engine.add([5] * 7, 1, None)
    engine.drain()
    engine.drain()
    assert [most for counts in seen for most in counts.get("probe_score.risk", [])] == [6.0]
    assert sum(counts.get("probe_alerts.risk", 0) for counts in seen) == 1


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_only_requests_whose_condition_holds_are_kept_in_random_lives(make: Make, kind: dict[str, Any]) -> None:
    """For other requests, workers only get orders to copy scores."""
    pages = {"pages": 16} if "pages" in kind else {}  # room for all rows of the longest request and for a step
    engine = make(seed=5, **{**kind, "hooks": "q", **pages})
    said, random, asked = responses(engine), engine.random, {}
    for _ in range(100):
        if random.random() < 0.35 and len(engine.requests) - len(said) < 12:
            first = random.choice([3, 4, 5])
            prompt = [first + n % 20 for n in range(random.randrange(1, 120))]
            asked[engine.add(prompt, random.randrange(1, 60), {**RISK, "keep_if": "max(risk) > 28500"})] = prompt
        running = [name for name, request in engine.requests.items() if not request.is_finished()]
        if running and random.random() < 0.05:
            engine.abort(random.choice(running))
        engine.step()
    engine.drain()
    assert engine.faults() == []
    dropped = [name for name, found in said.items() if "does not hold" in found.get("dmi_reason", "")]
    whole = 0
    for name in asked:
        tokens = engine.requests[name].all_token_ids[:-1]
        scores = [score(token, at) for at, token in enumerate(tokens)]
        ended = name not in engine.aborted
        if name in dropped:
            assert said[name]["dmi_store"] is None and name not in engine.stored
            assert not ended or max(scores) <= 28500
        elif "dmi_error" not in said[name]:
            assert name in engine.stored and (not ended or max(scores) > 28500)
            if ended and "dmi_missing" in said[name]:  # its last token arrived while it was preempted
                there = range(said[name]["dmi_missing"][0][0] if pages else 0)
                assert said[name]["dmi_missing"] == [[len(there), len(tokens)]]
                assert engine.stored[name].rows == {at: (tokens[at], at) for at in there}
            elif ended:
                assert engine.stored[name].rows == {at: (token, at) for at, token in enumerate(tokens)}
                whole += 1
    assert len(dropped) > 3 and whole > 3


def test_a_request_that_is_not_kept_says_so_and_is_counted(make: Make) -> None:
    engine = make(tokens=lambda: 9)
    engine.tracker.warning = "layer ids are ignored"
    taken: dict[str, Any] = {}
    take = engine.tracker.take_counts
    engine.tracker.take_counts = lambda: taken.update(take()) or {}  # type: ignore[func-returns-value,method-assign]
    engine.add([7] * 5, 3, {"keep_if": "count(risk > 8999) > 3", "key": "mine"})
    engine.drain()
    reply = engine.replies["r0"]
    assert reply == {
        "dmi_store": None,
        "dmi_request_id": "r0",
        "dmi_key": "mine",
        "dmi_warning": "layer ids are ignored",
        "dmi_reason": "dmi.keep_if: count(risk > 8999) > 3 does not hold (count is 2), so nothing is stored",
    }
    assert taken["not_kept"] == 1 and engine.tracker.handed == 0
    assert not engine.stored and engine.faults() == []


@pytest.mark.parametrize("pages", [0, 30])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_kept_request_ends_before_an_in_process_engine_sleeps(
    make: Make, monkeypatch: pytest.MonkeyPatch, pages: int, on_gpu: bool
) -> None:
    """Workers get the messages about this request only when it has ended."""
    engine = make(sleeps=True, pages=pages, on_gpu=on_gpu, hooks="q", tokens=lambda: 9)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", engine.worker)
    engine.add([7] * 20, 5, {"keep_if": "max(risk) > 1"})
    while not engine.replies:
        engine.step()
    assert engine.tracker.pending_opens and not engine.stored
    engine.sleep()
    assert list(engine.stored) == ["r0"] and not engine.tracker.pending_opens
    engine.add([7] * 20, 5)
    engine.drain()
    assert engine.faults() == [] and len(engine.stored) == 2


def test_a_request_whose_score_is_not_a_number_is_kept(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    monkeypatch.setattr(schedulerkit, "score", lambda token, position: float("nan") if position == 3 else position)
    engine.add(range(5, 25), 3, {"keep_if": "max(risk) > 1e9"})
    engine.drain()
    assert list(engine.stored) == ["r0"] and "dmi_reason" not in engine.replies["r0"]
    assert engine.faults() == []


@pytest.mark.parametrize(
    ("kind", "dmi", "says"),
    [
        (
            {"pages": 13},
            {},
            "keeps up to 160 rows in the pool until the request ends, and pool_bytes has room for 144; lower "
            "max_tokens, give dmi.tokens, or start the server with pool_bytes {} or more",
        ),
        ({"pages": 12}, {"tokens": [31, None]}, "keeps up to 129 rows"),
        ({"pages": 12, "drafts": 3}, {"tokens": [31, None]}, "keeps up to 135 rows"),
        (
            {"hooks": "q,logits"},
            {},
            "cannot be combined with logits, which are written in each step; leave logits out of dmi.hooks",
        ),
    ],
)
def test_rows_that_cannot_wait_are_refused(make: Make, kind: dict[str, Any], dmi: dict[str, Any], says: str) -> None:
    """The request is served, and nothing is reserved for it."""
    engine = make(**kind)
    name = engine.add([7] * 100, 58, {**dmi, "keep_if": "max(risk) > 1"})
    engine.drain()
    says = says.format(15 * BLOCK * engine.exporter.context.layout.row_bytes)
    assert engine.replies[name]["dmi_error"].startswith(f"dmi.keep_if: 'max(risk) > 1' {says}")
    assert engine.faults() == [] and not engine.stored


def test_a_request_may_have_as_many_rows_as_the_model_allows_tokens(make: Make) -> None:
    """This holds for a session too, because its later turns are unknown."""
    engine, whole = make(pages=19), {"keep_if": "max(risk) > 1"}
    names = [engine.add([7] * 10, 500, whole), engine.add([7] * 10, 5, whole, resumable=True)]
    assert all("keeps up to 256 rows" in engine.tracker.refused[name] for name in names)
    fits = {**whole, "tokens": [0, 240]}
    names += [engine.add([7] * 10, 500, fits), engine.add([7] * 10, 5, fits, resumable=True)]
    assert set(engine.tracker.tracked) == {*names[2:]}
    for name in names:
        engine.abort(name)
    engine.drain()
    assert engine.faults() == []


def test_a_pool_that_just_fits_keeps_the_last_rows(make: Make) -> None:
    """With one page less, the request is refused (see above). Its rows stay in the pool while it is preempted."""
    engine = make(pages=14, tokens=lambda: 9)
    name = engine.add([7] * 100, 58, {"keep_if": "max(risk) > 1"})
    while engine.requests[name].num_output_tokens < 30:
        engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.drain()
    assert "dmi_missing" not in engine.replies[name] and len(engine.stored[name].rows) == 157
    assert engine.faults() == []


def test_a_request_that_keeps_many_rows_is_not_overtaken_forever(make: Make) -> None:
    """Its rows and another request do not fit at the same time, and a new request arrives in each step."""
    engine = make(pages=16, seed=3, tokens=lambda: 9)
    engine.add([3] * 20, 20)
    name = engine.add([7] * 100, 58, {"keep_if": "max(risk) > 1"})
    for _ in range(400):
        if len(engine.requests) - len(engine.replies) < 8:
            engine.add([4 + len(engine.requests) % 20] * 20, 20)
        engine.step()
        if name in engine.replies:
            break
    assert name in engine.replies, "others passed it"
    engine.drain()
    assert len(engine.stored[name].rows) == 157 and engine.faults() == []


def test_a_request_that_others_wait_for_may_be_aborted(make: Make) -> None:
    engine = make(pages=16, tokens=lambda: 9)
    engine.add([3] * 20, 40)
    engine.step()
    name = engine.add([7] * 100, 58, {"keep_if": "max(risk) > 1"})
    behind = engine.add([4] * 20, 5)
    for _ in range(5):
        engine.step()
    assert engine.requests[behind].num_output_tokens == 0, "it waits"
    engine.abort(name)
    for _ in range(10):
        engine.step()
    assert behind in engine.replies and "r0" not in engine.replies
    engine.drain()
    assert engine.faults() == []


def test_tokens_of_the_prefix_cache_are_computed_again_for_a_condition(make: Make) -> None:
    """Borrowed rows have no scores. Here the first row has the largest score. Other requests borrow rows that this one
    stored.
    """
    engine = make(pages=40, borrows=True, tokens=lambda: 9)
    names = []
    for more in ({}, {"keep_if": "max(risk) > 28999"}, {}):
        names.append(engine.add([29] + [7] * 63, 5, more))
        engine.drain()
    borrowed = [engine.stored[name].borrowed for name in names]
    assert borrowed[:2] == [0, 0] and borrowed[2] > 0
    assert engine.stored[names[1]].ends[0][3]["recomputed_tokens"] >= 48, "the cache had them"
    assert engine.faults() == []


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("kind", [{"blocks": 24}, {"blocks": 24, "pages": 12}], ids=str)
def test_requests_are_stopped_by_their_own_scores_in_random_histories(
    make: Make, kind: dict[str, Any], seed: int
) -> None:
    """The cache is reset too, also while no step is in flight, as in a pause."""
    engine = make(seed=seed, **kind)
    said, random = responses(engine), engine.random
    for _ in range(100):
        if random.random() < 0.3 and len(engine.requests) - len(said) < 8:
            prompt = [5 + random.randrange(20) for _ in range(random.randrange(1, 100))]
            engine.add(prompt, random.randrange(1, 60), {"stop_if": "risk > 28999"})
        if random.random() < 0.2:
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.step()
        if random.random() < 0.2:
            engine.settle()
    engine.drain()
    assert engine.faults() == []
    stopped = 0
    for name, response in said.items():
        tokens = engine.requests[name].all_token_ids
        if stop := response.get("dmi_stop"):
            at = int(stop.split("position ")[1].split(",")[0])
            assert score(tokens[at], at) > 28999 and all(score(t, p) <= 28999 for p, t in enumerate(tokens[:at])), name
            stopped += 1
    assert stopped


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_request_ends_soon_after_a_score(make: Make, kind: dict[str, Any]) -> None:
    """One score passes the threshold at position 30, at a generated token. The score of another request does so in its
    prompt.
    """
    engine = make(tokens=lambda: 9, **{**kind, "blocks": 60})
    late = engine.add([9] * 20, 60, {"stop_if": "risk > 9029"})
    never = engine.add([9] * 20, 60, {"stop_if": "risk < 9000"})
    early = engine.add([9] * 40, 60, {"stop_if": "risk > 9029"})
    engine.drain()
    lengths = {name: engine.requests[name].num_output_tokens for name in (late, never, early)}
    drafts = kind.get("drafts", 0)
    assert 11 <= lengths[late] <= 13 + 2 * drafts, "positions 20 to 30, and those behind it of two steps"
    assert lengths[never] == 60 and lengths[early] == 2
    assert engine.replies[late]["dmi_stop"] == "dmi.stop_if: risk > 9029 holds at position 30, where it is 9030"
    assert "dmi_stop" not in engine.replies[never] and "position 30" in engine.replies[early]["dmi_stop"]
    assert engine.faults() == []


@pytest.mark.parametrize(
    ("probes", "says"),
    [
        (
            {"risc": {"inline": "max"}},
            "dmi.probes: 'risc' is not a probe of this server: did you mean 'risk'? it has: top, risk",
        ),
        ({"sae": {"inline": "max"}}, "dmi.probes: 'sae' is an autoencoder, which has no score; name a probe"),
        (
            {"top": {"inline": "max"}},
            "dmi.probes: 'top' has indexes of neurons, which are not scores; ask for dmi.summary",
        ),
    ],
)
def test_only_probes_of_the_server_have_scores(tmp_path: Path, probes: Any, says: str) -> None:
    files = {
        "risk": str(save_probe(tmp_path / "risk.safetensors", "mlp_out", (1,), SMALL.hidden, 1)),
        "sae": f"{save_encoder(tmp_path / 'sae', SMALL.hidden, 16)}, hook=mlp_out, layer=1",
        "top": "top(mlp_out)",
    }
    exporter = make_exporter(tmp_path, 32, SMALL, probes=files, hooks="probe.*", sink="host")
    tracker = Tracker(exporter.context, PagedSlots(exporter.context, 16, 8), 1 << 60)
    request = ask({"dmi": {"probes": probes}})
    tracker.on_new_request(request)  # type: ignore[arg-type]
    assert tracker.finish(request, []) == (False, {"dmi_error": says})  # type: ignore[arg-type]
    exporter.shutdown()


def test_a_summary_of_a_server_without_norms_is_refused(make: Make) -> None:
    engine = make()
    engine.add([7] * 5, 3, {"summary": True})
    engine.drain()
    assert engine.replies["r0"]["dmi_error"] == (
        "dmi.summary: True needs norms or largest neurons of rows, and this server computes none; start it with probes "
        '{"norm": "norm(resid_pre)", "top": "top(mlp_post)"}, and probe.* in hooks'
    )
    assert engine.faults() == []


def end_of_turn(engine: Engine, name: str) -> None:
    """Run steps until a turn of a session has ended. With asynchronous scheduling, one step is then in flight."""
    while engine.requests[name].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        engine.step()


@pytest.fixture
def sessions(make: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Engines whose sessions are those of vLLM 0.33."""
    schedulerkit.sessions_of_033(monkeypatch)
    return make


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_a_session_may_be_preempted_in_the_first_step_of_a_turn(sessions: Make, asked: bool, reset: bool) -> None:
    """All rows of its earlier turns are more than the rows of a step."""
    engine = sessions(pages=40, blocks=60, alerts={"risk": 1e9}, tokens=lambda: 9)
    name = engine.add([7] * 60, 12, RISK if asked else None, resumable=True)
    end_of_turn(engine, name)
    engine.settle()
    engine.send(name, [8] * 5, 12)
    engine.step()
    if reset:
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    else:
        engine.preempt(name)
    engine.step()
    engine.hang_up(name)
    engine.drain()
    assert engine.faults() == []


@pytest.mark.parametrize("pages", [0, 40])
@pytest.mark.parametrize("settle", [False, True])
def test_the_last_row_of_a_session_decides_too(sessions: Make, settle: bool, pages: int) -> None:
    """The client ends the session while the step after the last token of a turn is in flight, or later."""
    tokens = iter([9, 9, 9, 9, 29, 2])
    engine = sessions(blocks=60, pages=pages, tokens=lambda: next(tokens, 9))
    said = responses(engine)
    name = engine.add([7] * 10, 30, {**RISK, "keep_if": "max(risk) > 20000"}, resumable=True)
    end_of_turn(engine, name)
    if settle:
        engine.settle()
    engine.hang_up(name)
    engine.drain()
    assert "dmi_reason" not in said[name] and said[name]["dmi_probe"]["risk"]["max"] == score(29, 14)
    assert name in engine.stored and engine.faults() == []


def test_later_turns_of_a_stopped_session_end_after_one_token(sessions: Make) -> None:
    engine = sessions(blocks=60, tokens=lambda: 9)
    said = responses(engine)
    name = engine.add([7] * 10, 6, {**RISK, "stop_if": f"risk > {score(9, 12)}"}, resumable=True)
    lengths = []
    for _ in range(3):
        end_of_turn(engine, name)
        engine.settle()
        lengths.append(engine.requests[name].num_output_tokens)
        engine.send(name, [8] * 5, 12)
    end_of_turn(engine, name)
    engine.hang_up(name)
    engine.drain()
    assert lengths == [6, 1, 1] and said[name]["dmi_stop"].endswith(f"position 13, where it is {score(9, 13)}")


@pytest.mark.parametrize("pages", [0, 40])
def test_earlier_turns_of_an_aborted_session_count(sessions: Make, pages: int) -> None:
    """It is aborted while the first step of its second turn is in flight."""
    engine = sessions(blocks=60, pages=pages, tokens=lambda: 9, alerts={"risk": score(9, 12)})
    said = responses(engine)
    name = engine.add([7] * 10, 12, {**RISK, "keep_if": "max(risk) > 50000"}, resumable=True)
    end_of_turn(engine, name)
    engine.settle()
    engine.send(name, [8] * 5, 12)
    engine.step()
    engine.abort(name)
    assert said[name]["dmi_probe"]["risk"]["through"] == 20 and "does not hold" in said[name]["dmi_reason"]
    assert engine.tracker.take_counts()["probe_alerts.risk"] == 1
    engine.drain()
