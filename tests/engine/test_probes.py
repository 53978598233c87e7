# SPDX-License-Identifier: Apache-2.0
"""Probes without the hooks that they score, compared with transformers: preemption, prefix hits, chunked prefill and
drafts, with owner pool, and in `make soak` with owner target. test_reduce.py tests probes on one and two ranks,
test_compiled_tokens.py compiled ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmi_connector import capture_args, open_capture
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.analysis.sparse_encoder import SparseEncoder
from dmi_connector.reduce.probe_file import load
from dmi_connector.store.read.verify import verify_store
from tests.engine.check import reference
from tests.engine.drafts import NGRAM, Pair, drafting
from tests.engine.harness import SMALL, Ask, Run, engine, generate, prompt, watch_scheduler
from tests.probekit import check_inline, check_largest, check_neurons, check_scores, save_encoder, save_probe
from tests.shorter import soak

K = 20
ALL = {"include_output_tokens": True}
ASKED = {name: {"inline": ["max", "mean"]} for name in ("risk", "many", "first", "last", "one")}
INLINE = {**ALL, "dmi": {"probes": ASKED, "summary": True}}
NORMS = {"norm": "norm(resid_pre)", "end": "norm(resid_final)"}
LARGEST = {"top": ("mlp_post", 1), "tops": ("resid_mid", 3)}
TOPS = {name: f"top({hook},{k})" for name, (hook, k) in LARGEST.items()}
CONDITIONS = {
    "plain": Ask(prompt(50), ALL),
    "kept again": Ask(prompt(300), {**ALL, "dmi": {"keep_if": "max(one) > -1e9", "probes": ASKED}}),
    "kept": Ask(prompt(50), {**ALL, "dmi": {"key": "kept", "keep_if": "max(one) > -1e9"}}),
    "dropped": Ask(prompt(50), {**ALL, "dmi": {"key": "dropped", "keep_if": "max(one) > 1e9", "probes": ASKED}}),
    "stopped": Ask(prompt(50), {**ALL, "dmi": {"key": "stopped", "stop_if": "one < 1e9"}}),
}
STOP = 109
"""Position of a generated token, the first one whose score counts in LATE. With drafts it is one of several drafts."""
LATE = Ask(prompt(12) * 6, {**ALL, "dmi": {"tokens": [STOP, None], "stop_if": "one < 1e9"}}, {"max_tokens": 60})
# Six blocks of 128 for four requests that need two or three each, so some are preempted.
CROWD = {f"crowd{n}": Ask(prompt(n), INLINE, {"max_tokens": 80}) for n in (90, 100, 110, 200)}
ASKS = {
    "one": Ask(prompt(1), INLINE),
    "long": Ask(prompt(300), INLINE),
    "repeated": Ask(prompt(12) * 6, INLINE, {"max_tokens": 60}),
}
ALERTS = {"one": -1e9}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "target, few blocks": ("target", {"num_gpu_blocks_override": 7}),
    "pool, few blocks": ("pool", {"num_gpu_blocks_override": 7}),
    "pool, drafts": ("pool", {"speculative_config": NGRAM}),
}


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("probes")
    return {
        "risk": save_probe(folder / "risk.safetensors", "mlp_out", (1,), 64, 3),
        "many": save_probe(folder / "many.safetensors", "z", (0, 2), 128, 1, output="sigmoid"),
        "first": save_probe(folder / "first.safetensors", "embed", (), 64, 8, 2, norm="unit"),
        "last": save_probe(folder / "last.safetensors", "final_ln", (), 64, 2),
        "one": save_probe(folder / "one.safetensors", "attn_out", (2,), 64, 1),
    }


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("sae") / "sae", 64, 300, architecture="jumprelu")


@pytest.fixture(scope="module", params=["pool, few blocks", "pool, drafts", *soak("target, few blocks")])
def run(
    request: pytest.FixtureRequest,
    tiny_model: Callable[..., Path],
    probes: dict[str, Path],
    encoder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    run = Run(tmp_path_factory.mktemp("probes"))
    owner, more = CASES[request.param]
    given = {name: str(path) for name, path in probes.items()} | {
        "sae": f"{encoder}, hook=resid_post, layer=1, k={K}",
        **NORMS,
        **TOPS,
    }
    args: dict[str, Any] = capture_args("probe.*", run.store_dir, owner, probes=given, probe_alerts=ALERTS, **SMALL)
    args |= {**more, "disable_log_stats": False}
    model = tiny_model("qwen3")
    drafts = args.pop("speculative_config", None)
    started = partial(engine, model) if drafts is None else partial(drafting, Pair("qwen3", model, drafts))
    with started(enforce_eager=True, **args) as llm:
        watch_scheduler(llm, run)
        generate(llm, run, ASKS)
        generate(llm, run, {"again": Ask(prompt(300), INLINE)})  # its first blocks come from the prefix cache
        generate(llm, run, CROWD)
        some = {**ALL, "dmi": {"hooks": "probe.many,probe.risk", "layers": [2]}}
        generate(llm, run, {"some": Ask(prompt(40), some), **CONDITIONS})
        generate(llm, run, {"late": LATE})
        for _ in range(3):
            llm.llm_engine.step()
        run.facts["metrics"] = {metric.name: metric for metric in llm.get_metrics() if "dmi_probe" in metric.name}
        run.facts["requests"] = len(run.replies)
    assert bool(run.preempted) == ("blocks" in request.param) and bool(run.drafts) == ("drafts" in request.param)
    return run


def test_scores_are_those_of_the_rows_of_transformers(
    run: Run, oracle: Callable[..., Oracle], probes: dict[str, Path]
) -> None:
    for name in (*ASKS, *CROWD, "again"):
        capture = open_capture(run.store(name), timeout=300)
        assert verify_store(run.store(name)) == []
        assert set(capture.attrs["hooks"]) == {f"probe.{probe}" for probe in (*probes, "sae", *NORMS, *TOPS)}
        check_scores(capture, probes, reference(oracle("qwen3"), tuple(run.tokens(name))))


def test_responses_have_the_scores_of_their_stores(run: Run, probes: dict[str, Path]) -> None:
    for name in (*ASKS, *CROWD, "again"):
        capture = open_capture(run.store(name), timeout=300)
        for probe in probes:
            check_inline(capture, probe, run.replies[name].kv_transfer_params["dmi_probe"][probe])
    assert "dmi_probe" not in run.replies["some"].kv_transfer_params, "the request did not ask for scores"


def test_norms_are_those_of_the_rows_of_transformers(run: Run, oracle: Callable[..., Oracle]) -> None:
    for name in (*ASKS, *CROWD, "again"):
        capture = open_capture(run.store(name), timeout=300)
        want = reference(oracle("qwen3"), tuple(run.tokens(name)))
        for probe, hook in (("norm", "resid_pre"), ("end", "resid_final")):
            exact = np.linalg.norm(want[hook][:, : len(capture.token_ids)].astype(float), axis=-1)
            stored = capture.numpy(f"probe.{probe}")[..., 0]
            np.testing.assert_allclose(stored.reshape(exact.shape), exact, rtol=1e-5)


def test_a_summary_has_the_norms_of_the_store_by_layer(run: Run) -> None:
    for name in (*ASKS, *CROWD, "again"):
        said, capture = run.replies[name].kv_transfer_params["dmi_summary"], open_capture(run.store(name), timeout=300)
        first = int(capture.attrs.get("borrowed_tokens", 0))
        assert set(said) == {"resid_pre", "resid_final", "mlp_post", "resid_mid", "from", "through"}
        assert len(json.dumps(said)) < 900
        assert (said["from"], said["through"]) == (first, len(capture.token_ids) - 1)
        for probe, hook in (("norm", "resid_pre"), ("end", "resid_final")):
            stored = capture.numpy(f"probe.{probe}")[..., first:, 0]
            want = {"mean": stored.mean(-1), "last": stored[..., -1]}
            for what, values in want.items():
                np.testing.assert_allclose(said[hook][what], values, rtol=1e-3, err_msg=f"{name} {hook} {what}")
    assert "dmi_summary" not in run.replies["some"].kv_transfer_params, "the request did not ask for a summary"


def test_largest_neurons_are_those_of_the_rows_of_transformers(run: Run, oracle: Callable[..., Oracle]) -> None:
    for name in (*ASKS, *CROWD, "again"):
        capture = open_capture(run.store(name), timeout=300)
        want = reference(oracle("qwen3"), tuple(run.tokens(name)))
        for probe, (hook, k) in LARGEST.items():
            check_largest(capture.numpy(f"probe.{probe}"), want[hook][:, : len(capture.token_ids)], k)


def test_a_summary_has_the_neurons_with_the_largest_values(run: Run, oracle: Callable[..., Oracle]) -> None:
    """Rows of generated tokens, which no request here borrows."""
    for name, ask in (ASKS | CROWD | {"again": ASKS["long"]}).items():
        said = run.replies[name].kv_transfer_params["dmi_summary"]
        want, tokens = reference(oracle("qwen3"), tuple(run.tokens(name))), run.tokens(name)
        for hook, k in LARGEST.values():
            check_neurons(said[hook], want[hook][:, len(ask.prompt) : len(tokens) - 1], k, len(ask.prompt))


def test_keep_if_stores_only_requests_for_which_it_holds(run: Run, probes: dict[str, Path]) -> None:
    """A kept request has the same rows as the same request without a condition. Rows of cached tokens count too, also
    with owner pool.
    """
    dropped = run.replies["dropped"].kv_transfer_params
    for name, same in (("kept", "plain"), ("kept again", "long")):
        capture, other = (open_capture(run.store(each), timeout=300) for each in (name, same))
        assert capture.token_ids.tolist() == other.token_ids.tolist() and capture.complete
        for probe in (*probes, *NORMS):
            np.testing.assert_allclose(
                capture.numpy(f"probe.{probe}"), other.numpy(f"probe.{probe}"), rtol=1e-5, atol=1e-5, err_msg=name
            )
    for name in probes:
        check_inline(capture, name, run.replies["kept again"].kv_transfer_params["dmi_probe"][name])
    assert "borrowed_tokens" not in capture.attrs and capture.attrs.get("recomputed_tokens", 0) == 256 * bool(
        run.drafts
    )
    capture = open_capture(run.store("kept"), timeout=300)
    assert verify_store(run.store("kept")) == [] and len(capture.token_ids) == 50 + 11
    assert dropped["dmi_store"] is None and dropped["dmi_reason"].startswith(
        "dmi.keep_if: max(one) > 1e9 does not hold"
    )
    for name in probes:
        check_inline(capture, name, dropped["dmi_probe"][name])
    assert run.tokens("dropped") == run.tokens("kept") == [*capture.token_ids, run.tokens("kept")[-1]]
    assert [path for path in run.store_dir.rglob("*") if path.name.startswith("dropped")] == []
    assert "dropped" not in (run.store_dir / "index.jsonl").read_text()


def test_stop_if_ends_a_request(run: Run, oracle: Callable[..., Oracle]) -> None:
    reply, tokens = run.replies["stopped"], run.tokens("stopped")
    assert reply.kv_transfer_params["dmi_stop"].startswith("dmi.stop_if: one < 1e9 holds at position 0, where it is ")
    drafts = NGRAM["num_speculative_tokens"] if run.drafts else 0
    assert 51 <= len(tokens) <= 52 + drafts and reply.outputs[0].finish_reason == "length"
    best = reference(oracle("qwen3"), tuple(tokens))["logits"].argmax(-1)
    assert tokens[50:] == best[49:-1].tolist()
    assert len(open_capture(run.store("stopped"), timeout=300).token_ids) == len(tokens) - 1


def test_stop_if_ends_a_request_while_it_drafts(run: Run) -> None:
    """One or two steps after the row, each of which may accept all its drafts. The store has the accepted tokens."""
    tokens, said = run.tokens("late"), run.replies["late"].kv_transfer_params
    assert said["dmi_stop"].startswith(f"dmi.stop_if: one < 1e9 holds at position {STOP}, where it is ")
    drafts = NGRAM["num_speculative_tokens"] if run.drafts else 0
    assert STOP + 2 <= len(tokens) <= STOP + 3 + 2 * drafts < len(LATE.prompt) + 60
    assert run.replies["late"].outputs[0].finish_reason == "length"
    assert tokens == run.tokens("repeated")[: len(tokens)]
    capture, whole = (open_capture(run.store(name), timeout=300) for name in ("late", "repeated"))
    assert capture.complete and verify_store(run.store("late")) == []
    assert capture.token_ids.tolist() == tokens[STOP:-1]
    assert capture.positions.tolist() == [*range(STOP, len(tokens) - 1)]
    rows = slice(STOP, len(tokens) - 1)
    for probe in ("one", "risk", "many"):
        want = whole.numpy(f"probe.{probe}")[..., rows, :]
        np.testing.assert_allclose(capture.numpy(f"probe.{probe}"), want, rtol=1e-5, atol=1e-5)
    if run.drafts:
        assert capture.draft_index[0] > 0, "the token at this position was no draft: choose another one"
        assert capture.attrs["draft_tokens"]["accepted"] >= np.count_nonzero(capture.draft_index)


def test_metrics_have_a_score_and_an_alert_for_each_request(run: Run) -> None:
    alerts, scores = run.facts["metrics"]["vllm:dmi_probe_alerts"], run.facts["metrics"]["vllm:dmi_probe_score"]
    assert alerts.labels["probe"] == scores.labels["probe"] == "one"
    assert alerts.value == scores.count == run.facts["requests"]


def test_latents_are_the_largest_of_the_rows_of_transformers(
    run: Run, oracle: Callable[..., Oracle], encoder: Path
) -> None:
    for name in (*ASKS, *CROWD, "again"):
        capture = open_capture(run.store(name), timeout=300)
        rows = reference(oracle("qwen3"), tuple(run.tokens(name)))["resid_pre"][2, : len(capture.token_ids)]
        want = SparseEncoder.load(encoder).encode(rows)
        ids, values = capture.latents("probe.sae")
        largest = -np.sort(-want, 1)
        # A latent near its threshold may be active in only one of the two programs.
        same = np.isclose(values, largest[:, :K], rtol=0, atol=1e-5).all(1)
        assert same.mean() > 0.98, name
        there = same[:, None] & (ids >= 0)
        np.testing.assert_allclose(
            np.take_along_axis(want, np.maximum(ids, 0), 1)[there], values[there], rtol=0, atol=1e-5
        )
        assert ((values > 0) == (ids >= 0)).all() and (ids >= 0).any(1).mean() > 0.5


def test_tokens_are_the_best_ones_of_transformers(run: Run, oracle: Callable[..., Oracle]) -> None:
    for name, ask in (ASKS | CROWD).items():
        tokens = run.tokens(name)
        best = reference(oracle("qwen3"), tuple(tokens))["logits"].argmax(-1)
        assert tokens[len(ask.prompt) :] == best[len(ask.prompt) - 1 : -1].tolist(), name


def test_a_request_chooses_probes_and_layers(run: Run, probes: dict[str, Path]) -> None:
    some = open_capture(run.store("some"), timeout=300)
    assert {name: hook["layers"] for name, hook in some.attrs["hooks"].items()} == {"probe.many": [2], "probe.risk": []}
    assert some.numpy("probe.many").shape == (1, len(some.token_ids), 1)


def test_the_store_names_its_probes_and_copies_lie_beside_it(run: Run, probes: dict[str, Path]) -> None:
    capture = open_capture(run.store("one"), timeout=300)
    for name, path in probes.items():
        file, about = load(path), capture.attrs["hooks"][f"probe.{name}"]["reduce"]
        assert (about["source"], about["sha256"]) == (file.facts.hook, file.sha256)
        kept = load(run.store_dir / "probes" / f"{file.sha256}.safetensors")
        assert kept.facts == file.facts
        np.testing.assert_array_equal(
            kept.of((*kept.facts.layers, 0)[0])[0][0], file.of((*kept.facts.layers, 0)[0])[0][0]
        )
