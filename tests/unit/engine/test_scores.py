# SPDX-License-Identifier: Apache-2.0
"""Scores of probes in responses, under vLLM's own scheduler: of every row, whatever happens to a request."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from dmi_connector.engine.messages import StepScores
from dmi_connector.engine.owners.paged import PagedSlots
from dmi_connector.engine.scheduler.tracker import Tracker
from tests import schedulerkit
from tests.exporterkit import SMALL, make_exporter
from tests.probekit import save_encoder, save_probe
from tests.schedulerkit import Engine, score
from tests.trackerkit import ask, generate

Make = Callable[..., Engine]
RISK = {"probes": {"risk": {"inline": ["max", "min", "mean"]}}}


@pytest.fixture
def make(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # asked when the configuration is made; there is no runner
    return lambda **more: Engine(tiny_model("qwen3"), tmp_path, monkeypatch, scored=True, **more)


def responses(engine: Engine) -> dict[str, dict[str, Any]]:
    """What the tracker says at the end of each request, of aborted ones too."""
    said: dict[str, dict[str, Any]] = {}
    finish = engine.tracker.finish

    def noted(request: Any, blocks: Any) -> Any:
        keep, response = finish(request, blocks)
        said[request.request_id] = response or {}
        return keep, response

    engine.tracker.finish = noted  # type: ignore[method-assign]
    return said


def want(engine: Engine, name: str, first: int, last: int) -> dict[str, Any]:
    """The answer for rows of positions from `first` to `last`."""
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
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: ",".join(map(str, kind.items())))
@pytest.mark.parametrize("seed", range(2))
def test_responses_have_the_scores_of_all_rows_in_random_lives(make: Make, kind: dict[str, Any], seed: int) -> None:
    """Arrivals, prefix hits, preemptions, rejected drafts, aborts."""
    engine = make(seed=seed, **kind)
    said, random = responses(engine), engine.random
    for _ in range(100):
        if random.random() < 0.35 and len(engine.requests) - len(said) < 12:
            first, start = random.choice([3, 4, 5]), random.choice([0, 0, 5, 20, 300])
            prompt = [first + n % 20 for n in range(random.randrange(1, 120))]
            engine.add(prompt, random.randrange(1, 60), {**RISK, "tokens": [start, None]})
        running = [name for name, request in engine.requests.items() if not request.is_finished()]
        if running and random.random() < 0.05:
            engine.abort(random.choice(running))
        engine.step()
    engine.drain()
    assert engine.faults() == []
    scored = 0
    for name, stored in engine.stored.items():
        found, length = said[name]["dmi_probe"]["risk"], stored.ends[0][0]
        if not length:
            assert found == {"tokens": 0}
        elif name not in engine.aborted:
            assert found == want(engine, name, stored.start + stored.borrowed, stored.start + length - 1), name
            scored += 1
        elif "max" in found:  # steps that were running when it ended are not in it
            assert found["through"] < stored.start + length
            assert found == want(engine, name, found["from"], found["through"]), name
    assert scored > 5


def test_parts_of_ranks_are_added_up_and_layers_stay_apart(tmp_path: Path) -> None:
    """Two ranks: each has half of z, of which "two" scores two layers. One rank alone writes "whole"."""
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
    steps, _ = generate(tracker, request, 1, ended=False)
    assert steps[0].report, "all ranks answer"
    first, second = (pickle.loads(pickle.dumps(exporter.take_report(steps[0].scores))) for exporter in exporters)
    tracker.scores.take(first.aggregate(second).scores)
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


def test_scores_that_are_still_being_copied_are_waited_for_where_they_are_read() -> None:
    class Late:
        """An event after which `values` are there."""

        def synchronize(self) -> None:
            values[:] = 7

    values = torch.zeros(2, 1)
    scores = StepScores(0, [(1, 0, 2)], values, Late())
    assert values.tolist() == [[0], [0]], "making the report waits for nothing"
    copy = pickle.loads(pickle.dumps(scores))
    assert copy.ready is None and copy.values.tolist() == [[7], [7]] == scores.values.tolist()


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
    """Of all captured requests, whether they ask for scores or not. One sample of each."""
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


@pytest.mark.parametrize(
    ("probes", "says"),
    [
        (
            {"risc": {"inline": "max"}},
            "dmi.probes: 'risc' is no probe of this server: did you mean 'risk'? it has: risk",
        ),
        ({"sae": {"inline": "max"}}, "dmi.probes: 'sae' is an autoencoder, which has no score; name a probe"),
    ],
)
def test_only_probes_of_the_server_have_scores(tmp_path: Path, probes: Any, says: str) -> None:
    files = {
        "risk": str(save_probe(tmp_path / "risk.safetensors", "mlp_out", (1,), SMALL.hidden, 1)),
        "sae": f"{save_encoder(tmp_path / 'sae', SMALL.hidden, 16)}, hook=mlp_out, layer=1",
    }
    exporter = make_exporter(tmp_path, 32, SMALL, probes=files, hooks="probe.*", sink="host")
    tracker = Tracker(exporter.context, PagedSlots(exporter.context, 16, 8), 1 << 60)
    request = ask({"dmi": {"probes": probes}})
    tracker.on_new_request(request)  # type: ignore[arg-type]
    assert tracker.finish(request, []) == (False, {"dmi_error": says})  # type: ignore[arg-type]
    exporter.shutdown()
