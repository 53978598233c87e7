# SPDX-License-Identifier: Apache-2.0
"""Every reduction from a real engine to decoded values, on one rank and on two, against transformers in float32."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from dmi_connector import Capture, capture_args, open_capture, open_captures
from dmi_connector.analysis.oracle.transformers_oracle import Oracle
from dmi_connector.analysis.sparse_encoder import SparseEncoder
from dmi_connector.cli.main import main
from dmi_connector.reduce.basis import Basis
from dmi_connector.reduce.channel import ChannelInt8
from dmi_connector.reduce.channel_projection import ChannelProjection
from dmi_connector.reduce.codebooks import Codebooks
from dmi_connector.reduce.countsketch import CountSketch
from dmi_connector.reduce.fp8 import Fp8
from dmi_connector.reduce.int8 import Int8
from dmi_connector.reduce.pca import Pca
from dmi_connector.reduce.pq import ProductQuantisation
from dmi_connector.reduce.projection import RandomProjection, SeededProjection, matrix
from dmi_connector.reduce.rounding import Round
from dmi_connector.reduce.scales import Scales
from dmi_connector.reduce.topk import TopK
from dmi_connector.store.read.fitted_files import find_fitted
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.read.waiting import wait_for
from tests.engine.check import attention_weights, hooks_of, reference
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
KEPT = ("embed", "logits")
LENGTHS = (1, 33, 300)
STEP = 512
"""Tokens of the first step: more than deferred.MOST_TOKENS; the steps that follow have fewer."""
NOISE = 1e-5
"""Rounding differences of two float32 programs."""


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


def watch_branches(patch: pytest.MonkeyPatch) -> list[str]:
    """Ops that may write on a branch, or wait for one, as they run. (They find none, as ever on a CPU.)"""
    from dmi_connector.engine.taps import op as tap_op

    ops: list[str] = []
    patch.setattr(tap_op, "captured_branch", lambda _device: ops.append(sys._getframe(1).f_code.co_name))
    return ops


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of hooks that are reduced themselves, whole and, with two ranks, in slices."""
    folder = tmp_path_factory.mktemp("probes")
    return {
        "risk": save_probe(folder / "risk.safetensors", "resid_pre", (1,), 64, 3, output="sigmoid"),
        "many": save_probe(folder / "many.safetensors", "z", (0, 1, 2), 128, 2, output="softmax"),
        "deep": save_probe(folder / "deep.safetensors", "resid_post", (2,), 64, 16, 2, norm="layer"),
    }


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("sae") / "sae", 64, 200)


# The ranks first: they are forked, which no process may be that has compiled a model. So tests of one rank alone come
# after all others.
@pytest.fixture(scope="module", params=[2, 1], ids=["tp2", "tp1"])
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
    tp = request.param
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
    args["max_num_batched_tokens"] = STEP
    with pytest.MonkeyPatch.context() as patch:
        if tp > 1:
            patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
            args |= {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "enforce_eager": True}
        else:
            run.facts["ops"] = watch_branches(patch)
        with engine(tiny_model("qwen3"), in_process=tp == 1, fork=tp > 1, **args) as llm:
            inline = {name: {"inline": ["max", "mean"]} for name in probes}
            asked = {"include_output_tokens": True, "dmi": {"probes": inline, "summary": True}}
            generate(llm, run, {f"len{n}": Ask(prompt(n), asked) for n in LENGTHS})
            generate(llm, run, {"again": Ask(prompt(300), asked)})  # its first blocks come from the prefix cache
    return run


def check(capture: Capture, hook: str, got: np.ndarray, exact: np.ndarray) -> None:
    """`got` is as near to `exact` [..., width] as the hook's reduction promises, slice by slice."""
    reduction, shards = capture.reduction(hook), capture.attrs["hooks"][hook]["shards"]
    if isinstance(reduction, TopK):
        magnitude = np.abs(exact)
        kept = got != 0
        assert (kept.sum(-1) == reduction.k).all(), hook
        lowest = np.where(kept, magnitude, np.inf).min(-1)
        step = 0 if reduction.exact else magnitude.max(-1, keepdims=True) / 127
        # Slices are merged by their stored values: what is left out may be larger by a step.
        unsure = step if shards > 1 else 0
        assert (np.where(kept, 0, magnitude).max(-1, keepdims=True) <= lowest[..., None] + unsure + NOISE).all(), hook
        assert (np.abs(np.where(kept, got - exact, 0)) <= 0.51 * step + NOISE).all(), hook
        assert reduction.sample == reduction.k // 4
        width, step = exact.shape[-1] // shards, np.zeros(1)
        stored = np.split(capture.array(hook)[:], shards, -1)
        for part, values in zip(stored, np.split(exact, shards, -1), strict=True):
            places, sampled = reduction.sampled(part, width, "float32")
            true = np.take_along_axis(values, places, -1)
            if not reduction.exact:  # kept values are cut off at the scale of the others
                least = np.sort(np.abs(values), -1)[..., -reduction.k, None]
                largest = np.where(np.abs(true) > least + NOISE, 0, np.abs(true)).max(-1, keepdims=True)
                true, step = np.clip(true, -largest, largest), largest / 127
            assert (np.abs(sampled - true) <= 0.51 * step + NOISE).all(), hook
        return
    if isinstance(reduction, Pca):
        for layer, (scores, values) in enumerate(zip(got, exact, strict=True)):
            part = find_fitted(Basis, reduction.sha256, capture.path).of(hook, layer, 12)
            if reduction.group:  # the heads of a slice are stored with one scale
                components, std = part.of_groups
                cut = (values - part.mean).reshape(len(values), len(std), -1).swapaxes(0, 1)
                want = (cut @ components / std[:, None]).swapaxes(0, 1).reshape(len(values), shards, -1)
                steps = np.abs(want).max(-1, keepdims=True) / 127
                assert (np.abs(scores.reshape(want.shape) - want) <= 0.51 * steps + 100 * NOISE).all(), hook
                continue
            slices = [
                (mine @ components) / part.std
                for mine, components in zip(
                    np.split(values - part.mean, shards, -1), np.split(part.components, shards), strict=True
                )
            ]
            steps = sum(np.abs(s).max(-1, keepdims=True) / 127 for s in slices)
            assert (np.abs(scores - sum(slices)) <= 0.51 * steps + 100 * NOISE).all(), hook
        return
    if isinstance(reduction, ProductQuantisation):
        file = find_fitted(Codebooks, reduction.sha256, capture.path)
        for layer, (rows, values) in enumerate(zip(got, exact, strict=True)):
            centroids = file.of(hook, layer)
            read, cut = (x.reshape(len(x), len(centroids), 1, -1) for x in (rows, values))
            assert ((read == centroids).all(-1).any(-1)).all(), hook
            nearest = ((cut - centroids) ** 2).sum(-1).min(-1)
            unsure = 2**-18 * (cut**2).sum((-1, -2)) + NOISE
            assert (((cut - read) ** 2).sum((-1, -2)) <= nearest + unsure).all(), hook
        return
    if isinstance(reduction, ChannelInt8):
        layers = capture.layers[hook] or [0]
        scales = np.stack([find_fitted(Scales, reduction.sha256, capture.path).of(hook, layer) for layer in layers])
        step = scales[:, None] if capture.layers[hook] else scales
        inside = np.clip(exact, -127 * step, 127 * step)
        assert (np.abs(got - inside) <= 0.51 * step + NOISE).all(), hook
        assert (exact == inside).mean() > 0.99, "what was fitted is the range of these rows too"
        return
    if isinstance(reduction, ChannelProjection):
        layers = range(len(got))
        step = np.stack([find_fitted(Scales, reduction.sha256, capture.path).of(hook, n) for n in layers])[:, None]
        values = np.stack([reduction.rows_projected(rows) for rows in exact])  # by head, so slices are side by side
        inside = np.clip(values, -127 * step, 127 * step)
        assert (np.abs(got - inside) <= 0.51 * step + NOISE).all(), hook
        assert (values == inside).mean() > 0.99
        return
    for mine, values in zip(np.split(got, shards, -1), np.split(exact, shards, -1), strict=True):
        width = values.shape[-1]
        if isinstance(reduction, SeededProjection):
            values = values @ np.stack([reduction.slice_projected(unit) for unit in np.eye(values.shape[-1])])
        largest = np.abs(values).max(-1, keepdims=True)
        if isinstance(reduction, Int8 | RandomProjection):
            affine = isinstance(reduction, Int8) and reduction.affine
            step = (values.max(-1, keepdims=True) - values.min(-1, keepdims=True)) / 254 if affine else largest / 127
            allowed = 0.51 * step
        elif isinstance(reduction, CountSketch):
            assert reduction.exact
            allowed = np.full(1, NOISE * width / reduction.k)  # of each value of a sum
        elif isinstance(reduction, Fp8):
            allowed = np.abs(values) * 2.0**-4 + largest / 448 * 2.0**-9
        elif isinstance(reduction, Round):
            allowed = np.abs(values) * 2.0 ** -(reduction.bits + 1)
        else:
            assert reduction is None and hook in KEPT, hook
            allowed = np.zeros(1)
        assert (np.abs(mine - values) <= allowed + NOISE).all(), (hook, np.abs(mine - values).max())


def test_every_row_decodes_to_the_values_of_transformers(run: Run, oracle: Callable[..., Oracle]) -> None:
    for length in LENGTHS:
        store, tokens = run.store(f"len{length}"), run.tokens(f"len{length}")
        capture = open_capture(store, timeout=300)
        assert verify_store(store) == []
        want = reference(oracle("qwen3"), tuple(tokens))
        for hook in hooks_of("qwen3"):
            exact = want[hook]
            exact = exact[length - 1 : len(tokens) - 1] if hook == "logits" else exact[..., : len(tokens) - 1, :]
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
    with pytest.raises(ValueError, match=r"rows of 'resid_mid' \(64,\)"):
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
    with pytest.raises(FileNotFoundError, match=rf"SHA-256 {reduction.sha256} \(or give it as basis=\)"):
        moved.restore("ln2", 1)
    kept = capture.path.parent / "bases" / f"{reduction.sha256}.safetensors"
    np.testing.assert_array_equal(moved.restore("ln2", 1, basis=kept), capture.restore("ln2", 1))


def test_attention_summaries_are_those_of_transformers(run: Run, tiny_model: Callable[..., Path]) -> None:
    """Requests have prompts in one step and in two, decode steps, and a hit of the prefix cache."""
    for name in (*(f"len{n}" for n in LENGTHS), "again"):
        tokens = run.tokens(name)[:-1]
        capture, want = open_capture(run.store(name), timeout=300), attention_weights(tiny_model("qwen3"), tokens)
        near = {"rtol": 0.001 if capture.attrs["tp"] == 2 else 0, "atol": 1e-5}  # float16
        for layer, full in enumerate(want):
            positions, weights, entropy = (x.swapaxes(0, 1) for x in capture.attention_summary(layer))
            assert positions.shape == (full.shape[0], len(tokens), TOP)
            best = -np.sort(-full, axis=-1)[..., :TOP]
            kept = best.shape[-1]  # a prompt of one token has fewer keys than TOP
            np.testing.assert_allclose(weights[..., :kept], best, **near)
            there = np.arange(TOP) <= np.arange(len(tokens))[:, None]
            assert ((positions >= 0) == there).all() and (weights[..., kept:] == 0).all()
            at = np.take_along_axis(full, np.maximum(positions, 0), -1)
            np.testing.assert_allclose(weights, np.where(there, at, 0), **near, err_msg="weights lie there")
            assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in positions.reshape(-1, TOP))
            exact = -(full * np.log(np.where(full > 0, full, 1))).sum(-1)
            np.testing.assert_allclose(entropy, exact, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(capture.attention_summary(1, head=2)[1], weights_of(capture, 1)[:, 2])


def weights_of(capture: Capture, layer: int) -> np.ndarray:
    return capture.attention_summary(layer)[1]


@pytest.mark.parametrize("run", [1], ids=["tp1"], indirect=True)  # two ranks run eagerly, each in its own process
def test_attention_waits_for_the_taps_that_reduce(run: Run) -> None:
    """t: a tap (header, embedding, three layers, final norm). j: a wait before the attention of layer 1 or 2."""
    *steps, after = "".join({"_tap": "t", "_tap_join": "j", "_tap_end": "e"}[op] for op in run.facts["ops"]).split("e")
    assert len(steps) > 20 and after == ""
    steps[0] = steps[0].lstrip("j")  # in a profiling run there are no rows, so taps do not get that far
    assert set(steps) == {"tttjtjtt"}
