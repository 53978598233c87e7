# SPDX-License-Identifier: Apache-2.0
"""Every reduction from a real engine to decoded values, on one rank and on two, against transformers in float32."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from dmi_connector import capture_args, open_capture, open_captures
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.analysis.sparse_encoder import SparseEncoder
from dmi_connector.cli.main import main
from dmi_connector.reduce.basis import Basis
from dmi_connector.reduce.pca import Pca
from dmi_connector.reduce.projection import matrix
from dmi_connector.store.read.fitted_files import find_fitted
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.read.waiting import wait_for
from tests.engine.check import attention_weights, hooks_of, reference
from tests.engine.check_reduced import KEPT, NOISE, check, check_summaries, whole_rows
from tests.engine.harness import ALL_HOOKS, SMALL, Ask, Run, engine, generate, prompt
from tests.probekit import check_inline, check_largest, check_neurons, check_scores, save_encoder, save_probe

REDUCE = {
    "resid_pre": "int8",
    "resid_final": "rp(8,sign)",
    "resid_*": "rp(16,seed=3)",
    "mlp_pre": "int8(affine)",
    "mlp_pre_linear": "fp8",
    "mlp_post": "topk(8)",
    "attn_out": "topk(5,exact)",
    "k": "cs(6,exact,seed=5)",
    "ln1": "round(8)",
    "embed": "none",
}
PCA = ("ln2", "k_rot")  # whole and, with two ranks, in slices
CHANNEL = ("q_rot", "final_ln")  # in slices with two ranks, and once in the model
PROJECTED = "rp(8,group=32"  # of z, by head
PQ = ("q", "mlp_out")  # in slices with two ranks, and whole
TOP = 8
LENGTHS = (1, 33, 300)
STEP = 512
"""Tokens of the first step: more than deferred.MOST_TOKENS; the steps that follow have fewer."""


@pytest.fixture(scope="module")
def fit(core_run: Callable[[str, str, str], Run], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """fit(command, hooks, option, ...): a file that is fitted to what an earlier engine captured."""
    stores = [str(core_run("qwen3", "eager", "draft").store(f"len{n}")) for n in (127, 128, 129)]

    def fitted(command: str, hooks: Sequence[str], *options: str) -> Path:
        out = tmp_path_factory.mktemp(command) / "fitted.safetensors"
        named = [word for hook in hooks for word in ("--hook", hook)]
        assert main([command, *stores, *named, *options, "-o", str(out)]) == 0
        return out

    return fitted


@pytest.fixture(scope="module")
def basis(fit: Callable[..., Path]) -> Path:
    return fit("fit-pca", PCA, "--rank", "12")


@pytest.fixture(scope="module")
def heads(fit: Callable[..., Path]) -> Path:
    """Principal components of each head."""
    return fit("fit-pca", ["v"], "--rank", "12", "--group", "32")


@pytest.fixture(scope="module")
def scales(fit: Callable[..., Path]) -> Path:
    return fit("fit-scales", CHANNEL, "--margin", "1")


@pytest.fixture(scope="module")
def projected(fit: Callable[..., Path]) -> Path:
    """Scales of projected heads."""
    return fit("fit-scales", ["z"], "--project", f"{PROJECTED})", "--margin", "1.5")


@pytest.fixture(scope="module")
def books(fit: Callable[..., Path]) -> Path:
    return fit("fit-pq", PQ, "--subvectors", "16")


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Probes of hooks that are reduced too, in whole rows and, with two ranks, in slices."""
    folder = tmp_path_factory.mktemp("probes")
    return {
        "risk": save_probe(folder / "risk.safetensors", "resid_pre", (1,), 64, 3, output="sigmoid"),
        "many": save_probe(folder / "many.safetensors", "z", (0, 1, 2), 128, 2, output="softmax"),
        "deep": save_probe(folder / "deep.safetensors", "resid_post", (2,), 64, 16, 2, norm="layer"),
    }


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("sae") / "sae", 64, 200)


# Two ranks come first, because a process that has compiled a model may not fork.
@pytest.fixture(
    scope="module",
    params=[(2, "eager"), (1, "eager"), pytest.param((1, "compiled"), marks=pytest.mark.soak)],
    ids=["tp2", "tp1", "tp1-compiled"],
)
def run(
    request: pytest.FixtureRequest,
    tiny_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    basis: Path,
    heads: Path,
    scales: Path,
    projected: Path,
    books: Path,
    probes: dict[str, Path],
    encoder: Path,
) -> Run:
    tp, mode = request.param
    if tp > (os.cpu_count() or 1):
        pytest.skip("each rank needs a core")
    run = Run(tmp_path_factory.mktemp(f"reduce-tp{tp}"))
    reduce = REDUCE | {",".join(PCA): f"pca({basis})", "pattern": f"attn({TOP}{',half' if tp == 2 else ''})"}
    reduce[",".join(CHANNEL)] = f"int8(channel={scales})"
    reduce["v"] = f"pca({heads})"
    reduce["z"] = f"{PROJECTED},channel={projected})"
    reduce[",".join(PQ)] = f"pq({books})"
    computed = {name: str(path) for name, path in probes.items()}
    computed["sae"] = f"{encoder}, hook=resid_mid, layer=1, k=9"
    computed |= {"top": "top(mlp_post)", "tops": "top(resid_mid,3)"}  # of slices and, with two ranks, of whole rows
    args = capture_args(f"{ALL_HOOKS},pattern,probe.*", run.store_dir, reduce=reduce, probes=computed, **SMALL)
    args |= {"max_num_batched_tokens": STEP, "enforce_eager": mode == "eager"}
    with pytest.MonkeyPatch.context() as patch:
        if tp > 1:
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
            args |= {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        with engine(tiny_model("qwen3"), in_process=tp == 1, fork=tp > 1, **args) as llm:
            inline = {name: {"inline": ["max", "mean"]} for name in probes}
            asked = {"include_output_tokens": True, "dmi": {"probes": inline, "summary": True}}
            generate(llm, run, {f"len{n}": Ask(prompt(n), asked) for n in LENGTHS})
            generate(llm, run, {"again": Ask(prompt(300), asked)})  # its first blocks come from the prefix cache
    return run


def test_every_row_decodes_to_the_values_of_transformers(run: Run, oracle: Callable[..., Oracle]) -> None:
    for length in LENGTHS:
        store, tokens = run.store(f"len{length}"), run.tokens(f"len{length}")
        capture = open_capture(store, timeout=300)
        assert verify_store(store) == []
        want = reference(oracle("qwen3"), tuple(tokens))
        for hook in hooks_of("qwen3"):
            exact = whole_rows(want[hook], hook, length, tokens)
            got = capture.numpy(hook)
            check(capture, hook, got, exact)
            if hook not in KEPT and hook != "ln1":
                assert capture.array(hook).dtype == np.uint8
                stored = dict(capture.array(hook).attrs["reduce"])
                assert stored["width"] == exact.shape[-1] and stored["shards"] == capture.attrs["hooks"][hook]["shards"]
        np.testing.assert_allclose(capture.numpy("q", layer=1), capture.numpy("q")[1])
        np.testing.assert_allclose(capture.torch("resid_pre", layer=-1).numpy(), capture.numpy("resid_pre")[-1])


def test_probes_score_the_rows_of_transformers(
    run: Run, oracle: Callable[..., Oracle], probes: dict[str, Path]
) -> None:
    for name in (*(f"len{n}" for n in LENGTHS), "again"):
        capture = open_capture(run.store(name), timeout=300)
        check_scores(capture, probes, reference(oracle("qwen3"), tuple(run.tokens(name))))
        assert capture.attrs["hooks"]["probe.many"]["shards"] == capture.attrs["tp"]


def test_responses_have_the_scores_of_all_ranks(run: Run, probes: dict[str, Path]) -> None:
    for name in (*(f"len{n}" for n in LENGTHS), "again"):
        capture = open_capture(run.store(name), timeout=300)
        found = run.replies[name].kv_transfer_params["dmi_probe"]
        assert list(found) == list(probes)
        for probe in probes:
            check_inline(capture, probe, found[probe])


def test_largest_neurons_are_those_of_whole_rows(run: Run, oracle: Callable[..., Oracle]) -> None:
    for length in LENGTHS:
        capture, tokens = open_capture(run.store(f"len{length}"), timeout=300), run.tokens(f"len{length}")
        said = run.replies[f"len{length}"].kv_transfer_params["dmi_summary"]
        want = reference(oracle("qwen3"), tuple(tokens))
        for probe, hook, k in (("top", "mlp_post", 1), ("tops", "resid_mid", 3)):
            rows = want[hook][:, : len(tokens) - 1]
            check_largest(capture.numpy(f"probe.{probe}"), rows, k)
            check_neurons(said[hook], rows[:, length:], k, length)
        assert capture.attrs["hooks"]["probe.top"]["shards"] == capture.attrs["tp"]


def test_the_index_has_the_scores_of_all_ranks(run: Run, probes: dict[str, Path]) -> None:
    names = [f"len{n}" for n in LENGTHS]
    for name in names:
        wait_for(run.store(name), 300)
    captures = open_captures(run.store_dir)
    infos = {info.store.name: number for number, info in enumerate(captures.infos)}
    for probe in probes:
        found = captures.scores(probe)
        assert "top" not in (captures.infos[0].scores or {}), "indexes are no scores"
        for name in names:
            want = open_capture(run.store(name)).numpy(f"probe.{probe}").max(-2)
            np.testing.assert_allclose(found[infos[run.store(name).name]], want, rtol=1e-6)


def test_latents_are_those_of_the_encoder(run: Run, oracle: Callable[..., Oracle], encoder: Path) -> None:
    for length in LENGTHS:
        capture, tokens = open_capture(run.store(f"len{length}"), timeout=300), run.tokens(f"len{length}")
        rows = reference(oracle("qwen3"), tuple(tokens))["resid_mid"][1, : len(tokens) - 1]
        want = SparseEncoder.load(encoder).encode(rows)
        ids, values = capture.latents("probe.sae")
        np.testing.assert_allclose(values, -np.sort(-want, 1)[:, :9], rtol=0, atol=NOISE)
        there = ids >= 0
        at = np.take_along_axis(want, np.maximum(ids, 0), 1)
        np.testing.assert_allclose(at[there], values[there], rtol=0, atol=NOISE)


def test_rows_shrink_as_the_reductions_say(run: Run) -> None:
    capture = open_capture(run.store("len300"), timeout=300)
    for hook, info in capture.attrs["hooks"].items():
        reduction = capture.reduction(hook)
        if reduction is not None:
            local = info["reduce"]["width"] // info["shards"]
            assert info["width"] == reduction.stored_width(local, "float32") * info["shards"]
            assert capture.array(hook).shape[-1] == info["width"]


def test_directions_can_be_projected(run: Run, oracle: Callable[..., Oracle]) -> None:
    capture, tokens = open_capture(run.store("len300"), timeout=300), run.tokens("len300")
    exact = reference(oracle("qwen3"), tuple(tokens))["resid_mid"][1, : len(tokens) - 1]
    direction = exact[3]
    projected = capture.project("resid_mid", direction)
    basis = matrix(64, 16, 3, "orthogonal")
    np.testing.assert_allclose(projected, direction @ basis, rtol=1e-5)
    scores = capture.numpy("resid_mid", layer=1) @ projected
    assert np.corrcoef(scores, exact @ basis @ basis.T @ direction)[0, 1] > 0.9999
    with pytest.raises(ValueError, match=r"'resid_mid' has 64 values; give one of shape \(64,\)"):
        capture.project("resid_mid", direction[:5])
    with pytest.raises(ValueError, match="not stored as a projection"):
        capture.project("q", direction)


def test_principal_components_can_be_restored_to_rows(run: Run, oracle: Callable[..., Oracle], tmp_path: Path) -> None:
    """Twelve of 64 components keep little of these rows, so the best that twelve can keep is compared."""
    capture, tokens = open_capture(run.store("len300"), timeout=300), run.tokens("len300")
    exact = reference(oracle("qwen3"), tuple(tokens))["ln2"][1, : len(tokens) - 1]
    reduction = capture.reduction("ln2")
    assert isinstance(reduction, Pca) and reduction.k == 12
    part = find_fitted(Basis, reduction.sha256, capture.path).of("ln2", 1, 12)
    best = (exact - part.mean) @ part.components @ part.components.T + part.mean
    assert np.abs(capture.restore("ln2", 1) - best).max() < 0.05 * np.abs(best).max()
    direction = best[7]
    scores = capture.numpy("ln2", 1) @ capture.project("ln2", direction, layer=1) + part.mean @ direction
    assert np.corrcoef(scores, best @ direction)[0, 1] > 0.999
    with pytest.raises(ValueError, match="name one layer"):
        capture.restore("ln2")
    with pytest.raises(ValueError, match="not stored as principal components"):
        capture.restore("q", 0)
    copy = tmp_path / "elsewhere.zarr"
    shutil.copytree(capture.path, copy)
    moved = open_capture(copy, timeout=0)
    assert moved.numpy("ln2").shape == (3, len(tokens) - 1, 12), "scores need no basis"
    with pytest.raises(FileNotFoundError, match=rf"SHA-256 {reduction.sha256} from bases/ .*, or give it as basis="):
        moved.restore("ln2", 1)
    kept = capture.path.parent / "bases" / f"{reduction.sha256}.safetensors"
    np.testing.assert_array_equal(moved.restore("ln2", 1, basis=kept), capture.restore("ln2", 1))


def test_attention_summaries_are_those_of_transformers(run: Run, tiny_model: Callable[..., Path]) -> None:
    """Requests have prompts in one step and in two, decode steps, and a hit of the prefix cache."""
    for name in (*(f"len{n}" for n in LENGTHS), "again"):
        tokens = run.tokens(name)[:-1]
        capture = open_capture(run.store(name), timeout=300)
        check_summaries(capture, attention_weights(tiny_model("qwen3"), tokens), TOP)
