# SPDX-License-Identifier: Apache-2.0
"""Probes: their files, the option, their hooks, and the scores of their encoder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from dmi_connector import capture_args
from dmi_connector.hooks import HOOKS, ModelDims, SelectionError, narrow, parse_selection
from dmi_connector.layout import hook_reductions, row_layouts
from dmi_connector.option_values import OptionError
from dmi_connector.probes import check_alerts, with_probes
from dmi_connector.reduce import ReduceError, from_settings
from dmi_connector.reduce.largest import check, over_rows
from dmi_connector.reduce.probe import Probe
from dmi_connector.reduce.probe_file import ACTIVATIONS, METADATA, ProbeFacts, is_probe, load, save
from dmi_connector.settings import ServerOptions
from tests.probekit import matrices, save_probe, scores

DIMS = ModelDims("Qwen3ForCausalLM", 4, 32, 4, 2, 8, 64, 512)
CPU = torch.device("cpu")
WIDTH = 32


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("probes")
    made = {
        "risk": ("resid_pre", (2,), WIDTH, 3),
        "many": ("z", (0, 1, 3), WIDTH, 1),
        "last": ("resid_final", (), WIDTH, 2),
        "post": ("resid_post", (3,), WIDTH, 2),
        "early": ("resid_post", (1,), WIDTH, 2),
        "alias": ("mlp_in", (1,), WIDTH, 2),
    }
    return {name: save_probe(folder / f"{name}.safetensors", *rest) for name, rest in made.items()}


def options(files: dict[str, Path], *names: str) -> list[tuple[str, str]]:
    return [(name, str(files[name])) for name in names]


# ---- files ----------------------------------------------------------------------------------------------------------


def tensors(*sizes: int) -> dict[str, np.ndarray]:
    named: dict[str, np.ndarray] = {}
    for number, (weight, bias) in enumerate(matrices(*sizes)):
        named |= {f"1.{number}.weight": weight, f"1.{number}.bias": bias}
    return named


GOOD: dict[str, Any] = {"hook": "resid_pre", "layers": [1], "outputs": ["a", "b"]}


@pytest.mark.parametrize(
    ("facts", "named", "message"),
    [
        ({"kind": "forest"}, tensors(8, 2), "kind 'forest' is unknown; choose one of linear, mlp"),
        ({"norm": "batch"}, tensors(8, 2), "norm 'batch' is unknown"),
        ({"hook": ["resid_pre"]}, tensors(8, 2), r"hook \['resid_pre'\] is not valid"),
        ({"outputs": []}, tensors(8, 2), r"outputs \[\] is not valid; give different names"),
        ({"outputs": ["a", ""]}, tensors(8, 2), r"outputs \['a', ''\] is not valid; give different names"),
        ({"outputs": ["a", 5]}, tensors(8, 2), r"outputs \['a', 5\] is not valid; give different names"),
        ({"outputs": ["a", "a"]}, tensors(8, 2), r"outputs \['a', 'a'\] is not valid"),
        ({"layers": [2, 1]}, tensors(8, 2), r"layers \[2, 1\] is not valid; give layer numbers, ascending"),
        ({"threshold": 3}, tensors(8, 2), "its dmi_probe .* is not valid"),
        ({"layers": [1, 2]}, tensors(8, 2), r"has 0 matrices for layer 2, named 2\.0\.weight"),
        ({"kind": "mlp"}, tensors(8, 2), "has 1 matrices for layer 1.* this one is mlp"),
        ({}, tensors(8, 4, 2), "has 2 matrices for layer 1.* this one is linear"),
        ({}, tensors(8, 3), r"have the shapes \[\(3, 8\)\].* the number of outputs, 2"),
        ({}, {**tensors(8, 2), "1.0.bias": np.zeros(3, np.float32)}, "each with a bias"),
        ({}, {**tensors(8, 2), "1.0.weight": np.full((2, 8), np.nan, np.float32)}, "not finite in layer 1"),
    ],
)
def test_a_file_that_would_give_no_true_scores_is_refused(
    facts: dict[str, Any], named: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "probe.safetensors"
    save_file(named, path, metadata={METADATA: json.dumps({**GOOD, **facts})})
    with pytest.raises(ReduceError, match=rf"^probes: .*probe\.safetensors.*{message}"):
        load(path)


def test_files_that_are_not_probes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ReduceError, match=r"nowhere cannot be read \(No such file"):
        load(tmp_path / "nowhere")
    path = tmp_path / "plain.safetensors"
    save_file(tensors(8, 2), path)
    with pytest.raises(ReduceError, match="has no 'dmi_probe' in its metadata"):
        load(path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ReduceError, match="is not a safetensors file"):
        load(path)
    for header in (b'{"__metadata__": 5}', b"[" * 100_000):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        assert not is_probe(path)
        with pytest.raises(ReduceError, match="is not a safetensors file"):
            load(path)


def test_a_file_reads_back_as_it_was_written(tmp_path: Path) -> None:
    facts = ProbeFacts("q", (1, 3), ("yes", "no"), "mlp", "tanh", "softmax", "unit")
    stacks = {layer: matrices(8, 5, 2, seed=layer) for layer in facts.layers}
    made = save(tmp_path / "a.safetensors", facts, stacks, {"stores": "200"})
    assert (made.facts, made.width, made.hidden) == (facts, 8, 5)
    for layer, stack in stacks.items():
        for (weight, bias), (w, b) in zip(made.of(layer), stack, strict=True):
            np.testing.assert_array_equal(weight, w)
            np.testing.assert_array_equal(bias, b)


# ---- the option -----------------------------------------------------------------------------------------------------


def test_capture_args_refuse_what_the_engine_would(files: dict[str, Path], tmp_path: Path) -> None:
    def given(hooks: str, **probes: str) -> dict[str, Any]:
        return capture_args(hooks, tmp_path, probes=probes)

    extra = given("probe.risk", risk=str(files["risk"]))["kv_transfer_config"]["kv_connector_extra_config"]
    assert ServerOptions.parse(extra).probes == (("risk", str(files["risk"])),)
    assert (
        capture_args("probe.risk", tmp_path, probes={"risk": files["risk"]})["kv_transfer_config"]
        == (given("probe.risk", risk=str(files["risk"]))["kv_transfer_config"])
    )
    assert given("probe.*,-probe.last", risk=str(files["risk"]), last=str(files["last"]))
    with pytest.raises(SelectionError, match=r"'probe\.rsk' is not a known probe: did you mean 'probe\.risk'\?"):
        given("probe.rsk", risk=str(files["risk"]))
    with pytest.raises(SelectionError, match=r"'risk' is not captured; add probe\.risk to hooks"):
        given("hidden-states", risk=str(files["risk"]))
    for bad, message in (
        ({"risk": 3}, r"give \{name: file\}"),
        ({"a.b": str(files["risk"])}, "the name 'a.b' is not valid"),
        ({"risk": f"{files['risk']}, k=3"}, "'k=3' in .* is not valid; this file may be followed by sha256=HASH$"),
        ({"risk": f"{files['risk']}, fast"}, "'fast' in .* is not valid"),
        ({"risk": f"{files['risk']}, sha256={'0' * 64}"}, "has the SHA-256 .*, not 0000"),
        ({"risk": "nowhere"}, "nowhere cannot be read"),
        ({"sae": "nowhere, hook=resid_pre, layer=1"}, r"nowhere cannot be read \(No such file"),
    ):
        with pytest.raises(OptionError, match=f"^probes: .*{message}"):
            ServerOptions.parse({"store_dir": "s", "probes": bad})
    with_hash = f"{files['risk']}, sha256={load(files['risk']).sha256}"
    assert given("probe.risk", risk=with_hash)


# ---- hooks ----------------------------------------------------------------------------------------------------------


def test_probes_are_hooks_of_one_engine(files: dict[str, Path]) -> None:
    dims, computed = with_probes(DIMS, options(files, "risk", "many", "last"), 1)
    assert set(dims.hooks) == {*HOOKS, "probe.risk", "probe.many", "probe.last"} and "probe.risk" not in HOOKS
    assert not any(name.startswith("probe.") for name in DIMS.hooks)
    served = parse_selection("probe.*,q@1", dims)
    assert served.hooks == {"q": (1,), "probe.risk": (2,), "probe.many": (0, 1, 3), "probe.last": (0,)}
    assert str(served) == "q@1,probe.risk@2,probe.many@0+1+3,probe.last@0"
    assert parse_selection("probe.many@1-3,-probe.many@3", dims).hooks == {"probe.many": (1,)}
    with pytest.raises(SelectionError, match=r"does not exist in Qwen3ForCausalLM in those layers: .* z@0\+1\+3"):
        parse_selection("probe.many@2", dims)
    narrowed = narrow(served, None, [1], dims).hooks  # narrowing keeps probes of one layer, like hooks without layers
    assert narrowed == {"q": (1,), "probe.risk": (2,), "probe.many": (1,), "probe.last": (0,)}
    assert narrow(served, ["probe.risk"], None, dims).hooks == {"probe.risk": (2,)}
    assert hook_reductions([("*", "int8")], served, dims, 1).keys() == {"q"}
    with pytest.raises(ReduceError, match=r"probe\.risk cannot have the reduction"):
        hook_reductions([("probe.risk", "int8")], served, dims, 1)
    (layout,) = row_layouts(served, dims, "bfloat16", 1, dict(computed))
    risk = layout.find("probe.risk", 2)
    assert risk is not None and (risk.dtype, risk.width, risk.stored, risk.source) == (
        *("bfloat16", 32, ("float32", 3)),
        "resid_pre",
    )
    assert [f.hook for f in layout.taking("resid_pre", 2)] == ["probe.risk"] and not layout.taking("resid_pre", 1)
    assert layout.row_bytes == 256  # header, q, and 5 fields of 16 bytes


def test_resid_post_is_resid_pre_of_the_next_layer(files: dict[str, Path]) -> None:
    dims, computed = with_probes(DIMS, options(files, "post", "early", "alias"), 1)
    sources = {name: (hook.source, hook.layers) for name, hook in dims.hooks.items() if hook.source}
    assert sources == {
        "probe.post": ("resid_final", (0,)),
        "probe.early": ("resid_pre", (2,)),
        "probe.alias": ("ln2", (1,)),
    }
    early = computed["probe.early"]
    early.prepare(WIDTH, CPU, 2, 0)
    rows = np.random.default_rng(0).standard_normal((5, WIDTH)).astype(np.float32)
    got = early.encode(torch.from_numpy(rows), 2).numpy()
    np.testing.assert_allclose(got, scores(files["early"], rows, 1), atol=1e-5)


def test_two_ranks_write_slices_of_what_is_sliced_and_one_rank_the_rest(files: dict[str, Path]) -> None:
    dims, computed = with_probes(DIMS, options(files, "risk", "many"), 2)
    selection = parse_selection("probe.*", dims)
    layouts = row_layouts(selection, dims, "float32", 2, dict(computed))
    assert sorted(len(layout.fields) for layout in layouts) == [3, 4], (
        "each rank must have its slice of z, and one rank the whole row"
    )
    assert {layout.find("probe.many", 1).width for layout in layouts} == {16}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("hook", "layers", "width", "message"),
    [
        ("resid_prex", (1,), 32, "resid_prex, which is not a hook: did you mean 'resid_pre'"),
        ("topk_ids", (1,), 32, "topk_ids, which holds integers"),
        ("logits", (), 512, "logits, which has no row of values for each token"),
        ("pattern", (1,), 4, "pattern, which has no row of values for each token"),
        ("resid_pre", (7,), 32, r"which does not exist in layer 7: resid_pre is in layers 0, 1, 2, 3"),
        ("kv_c", (1,), 32, "which does not exist: Qwen3ForCausalLM has no kv_c"),
        ("resid_final", (2,), 32, "resid_final in layer 2, but resid_final exists once; make layers of the probe"),
        ("resid_pre", (), 32, "resid_pre, and names no layer; give one"),
        ("resid_pre", (1,), 64, "resid_pre with 64 values, but here it has 32; give a probe of this model"),
        ("resid_post", (1, 2), 32, "resid_post in 2 layers; name resid_pre"),
    ],
)
def test_a_probe_of_another_model_is_refused(
    hook: str, layers: tuple[int, ...], width: int, message: str, tmp_path: Path
) -> None:
    path = save_probe(tmp_path / "p.safetensors", hook, layers, width, 1)
    with pytest.raises(OptionError, match=rf"^probes: 'p' \(.*p\.safetensors\) is of .*{message}"):
        with_probes(DIMS, [("p", str(path))], 1)


def test_only_linear_probes_can_be_added_up_over_ranks(tmp_path: Path) -> None:
    deep = save_probe(tmp_path / "deep.safetensors", "z", (1,), WIDTH, 4, 1)
    normed = save_probe(tmp_path / "normed.safetensors", "z", (1,), WIDTH, 1, norm="unit")
    for path in (deep, normed):
        with pytest.raises(OptionError, match=r"is not a linear probe, and each of 2 ranks has only a slice of z"):
            with_probes(DIMS, [("p", str(path))], 2)
        with_probes(DIMS, [("p", str(path))], 1)
    whole = save_probe(tmp_path / "whole.safetensors", "resid_pre", (1,), WIDTH, 4, 1)
    with_probes(DIMS, [("p", str(whole))], 2)


# ---- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("sizes", "facts"),
    [
        ((WIDTH, 3), {}),
        ((WIDTH, 3), {"output": "softmax", "norm": "unit"}),
        ((WIDTH, 1), {"output": "sigmoid", "norm": "layer"}),
        ((WIDTH, 9, 5, 2), {}),
    ],
)
def test_scores_are_products_in_float32(
    sizes: tuple[int, ...], facts: dict[str, str], dtype: torch.dtype, tmp_path: Path
) -> None:
    path = save_probe(tmp_path / "p.safetensors", "resid_pre", (1,), *sizes, **facts)
    probe = Probe.load(str(path)).bind("resid_pre", (1,), WIDTH, 1)
    probe.prepare(WIDTH, CPU, 1, 0)
    values = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = probe.encode(values, 1)
    assert got.dtype == torch.float32 and got.shape == (7, sizes[-1])
    np.testing.assert_allclose(got.numpy(), scores(path, values.float().numpy(), 1), atol=1e-5)
    both = probe.before_layers(torch.stack([values, values * 2], 1), [1, 1])
    assert torch.equal(both[:, 0], got) and torch.equal(both[:, 1], probe.encode(values * 2, 1))
    again = from_settings(json.loads(json.dumps(probe.settings())))
    assert again == replace(probe, path="") and hash(again) == hash(replace(probe, path=""))
    assert "path" not in probe.settings(), "a store must not have paths of the server"


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_those_of_torch(activation: str, tmp_path: Path) -> None:
    path = save_probe(tmp_path / "p.safetensors", "ln1", (1,), WIDTH, 4, 1, activation=activation)
    probe = Probe.load(str(path))
    probe.prepare(WIDTH, CPU, 1, 0)
    values = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(2))
    (w, b), (v, c) = ((torch.from_numpy(m), torch.from_numpy(n)) for m, n in load(path).of(1))
    modules = {"relu": torch.nn.ReLU(), "gelu": torch.nn.GELU(), "silu": torch.nn.SiLU(), "tanh": torch.nn.Tanh()}
    torch.testing.assert_close(probe.encode(values, 1), modules[activation](values @ w.T + b) @ v.T + c)


@pytest.mark.parametrize("output", ["none", "sigmoid", "softmax"])
def test_the_parts_of_two_ranks_add_up_to_the_scores(output: str, tmp_path: Path) -> None:
    path = save_probe(tmp_path / "p.safetensors", "z", (1,), WIDTH, 3, output=output)
    rows = 20 * np.random.default_rng(3).standard_normal((6, WIDTH)).astype(np.float32)
    probe = Probe.load(str(path)).bind("z", (1,), WIDTH // 2, 2)
    parts = []
    for shard, part in enumerate(np.split(rows, 2, 1)):
        probe.prepare(WIDTH // 2, CPU, 1, shard)
        parts.append(probe.encode(torch.from_numpy(np.ascontiguousarray(part)), 1).numpy())
    want = scores(path, rows, 1)
    with np.errstate(all="raise", under="ignore"):
        np.testing.assert_allclose(probe.merge(parts), want, atol=1e-5)
    one = Probe.load(str(path))
    one.prepare(WIDTH, CPU, 1, 0)
    whole = one.encode(torch.from_numpy(rows), 1).numpy()
    np.testing.assert_allclose(one.merge([one.decode(whole, WIDTH, "float32")]), want, atol=1e-5)


def test_a_file_that_changed_since_the_start_is_noticed(tmp_path: Path) -> None:
    """Stores would name another file than the one that scored their rows."""
    path = save_probe(tmp_path / "p.safetensors", "q", (1,), WIDTH, 1)
    probe = Probe.load(str(path))
    save_probe(path, "q", (2,), WIDTH, 2)
    with pytest.raises(ReduceError, match=r"p\.safetensors has changed since the engine started; start it again"):
        probe.prepare(WIDTH, CPU, 1, 0)


def test_rows_that_are_not_finite_give_scores_that_are_not(files: dict[str, Path]) -> None:
    probe = Probe.load(str(files["risk"]))
    probe.prepare(WIDTH, CPU, 2, 0)
    values = torch.zeros(3, WIDTH)
    values[0, 5], values[1, 7] = float("nan"), float("inf")
    assert probe.encode(values, 2).isfinite().all(1).tolist() == [False, False, True]


# ---- norms ----------------------------------------------------------------------------------------------------------


def test_an_alert_needs_one_score_per_row() -> None:
    """Only the model determines the number of layers of a norm."""
    given = {"norm": "norm(resid_pre)", "end": "norm(resid_final)"}
    parsed = ServerOptions.parse({"store_dir": "s", "probes": given, "probe_alerts": {"norm": 1, "end": 1}})
    _, computed = with_probes(DIMS, parsed.probes, 1)
    check_alerts([("end", 1.0)], computed)
    with pytest.raises(OptionError, match="probe_alerts: 'norm' has a score in each of 4 layers; name a probe of one"):
        check_alerts(parsed.probe_alerts, computed)


def test_a_norm_needs_no_file_and_is_of_all_layers_of_its_hook() -> None:
    dims, computed = with_probes(DIMS, [("norm", "norm(resid_pre)"), ("end", " norm(resid_final) ")], 2)
    assert parse_selection("probe.*", dims).hooks == {"probe.norm": (0, 1, 2, 3), "probe.end": (0,)}
    norm = computed["probe.norm"]
    rows = torch.randn(5, WIDTH, dtype=torch.bfloat16)
    norm.prepare(WIDTH, CPU, 2, 0)
    stored = norm.encode(rows, 2)
    assert stored.shape == (5, norm.stored_width(WIDTH, "bfloat16")) and stored.dtype == torch.float32
    np.testing.assert_allclose(stored[:, 0], np.linalg.norm(rows.double().numpy(), axis=1), rtol=1e-6)
    read = from_settings(norm.settings())
    assert isinstance(read, Probe) and (read.form, read.outputs, read.sha256) == ("norm", ("norm",), "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("norm(resid_post)", r"of resid_post in all layers; give norm\(resid_pre\), and norm\(resid_final\)"),
        ("norm(resid_prr)", "of resid_prr, which is not a hook: did you mean 'resid_pre'"),
        ("norm(topk_ids)", "of topk_ids, which holds integers"),
        ("norm(kv_c)", "of kv_c, which does not exist: Qwen3ForCausalLM has no kv_c"),
        ("norm(mlp_post)", r"norm\(mlp_post\) needs whole rows, and each of 2 ranks has only a slice of mlp_post"),
    ],
)
def test_a_norm_of_what_a_rank_does_not_have_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        with_probes(DIMS, [("norm", text)], 2)


# ---- largest values -------------------------------------------------------------------------------------------------


def top(text: str, tp: int = 1) -> Probe:
    probe = with_probes(DIMS, [("top", text)], tp)[1]["probe.top"]
    assert isinstance(probe, Probe)
    return probe


def test_largest_values_are_of_all_layers_of_their_hook() -> None:
    dims, computed = with_probes(DIMS, [("top", "top(mlp_post)"), ("many", " top(resid_final, 3) ")], 1)
    assert parse_selection("probe.*", dims).hooks == {"probe.top": (0, 1, 2, 3), "probe.many": (0,)}
    assert computed["probe.top"].outputs == ("neuron", "value")
    read = from_settings(computed["probe.many"].settings())
    assert isinstance(read, Probe) and (read.form, read.k, read.sha256) == ("top", 3, "")
    assert read.outputs == ("neuron.0", "neuron.1", "neuron.2", "value.0", "value.1", "value.2")


@pytest.mark.parametrize("k", [1, 4])
def test_largest_values_are_those_of_numpy_of_equal_ones_the_first(k: int) -> None:
    probe = top(f"top(mlp_post,{k})")
    rows = torch.randn(200, 64).round(decimals=1).to(torch.bfloat16)  # many are equal
    rows[7] = 0
    probe.prepare(64, CPU, 2, 0)
    stored = probe.encode(rows, 2)
    assert stored.shape == (200, probe.stored_width(64, "bfloat16")) and stored.dtype == torch.float32
    values = rows.float().numpy()
    order = np.argsort(-np.abs(values), 1, kind="stable")[:, :k]
    np.testing.assert_array_equal(stored[:, :k], order)
    np.testing.assert_array_equal(stored[:, k:], np.take_along_axis(values, order, 1))


def test_nan_is_the_largest_value() -> None:
    probe = top("top(mlp_post,2)")
    rows = torch.zeros(2, 64)
    rows[0, 3], rows[0, 5], rows[1, 9] = float("nan"), float("inf"), -float("inf")
    probe.prepare(64, CPU, 0, 0)
    stored = probe.encode(rows, 0).numpy()
    np.testing.assert_array_equal(stored, [[3, 5, np.nan, np.inf], [9, 0, -np.inf, 0]])


@pytest.mark.parametrize("k", [1, 4])
def test_slices_of_ranks_are_joined_to_the_largest_values_of_whole_rows(k: int) -> None:
    """This includes equal values in several slices, and largest values that are all in one slice."""
    rows = torch.randn(300, 64).round(decimals=1)
    rows[5, 32:], rows[6, :32], rows[7, 40] = 0, 0, float("nan")
    whole, parts = top(f"top(mlp_post,{k})"), top(f"top(mlp_post,{k})", 2)
    whole.prepare(64, CPU, 1, 0)
    want = whole.encode(rows, 1).numpy()
    stored = []
    for rank in range(2):
        parts.prepare(32, CPU, 1, rank)
        stored.append(parts.encode(rows[:, 32 * rank : 32 * (rank + 1)], 1).numpy())
    np.testing.assert_array_equal(parts.merge(stored), want)
    np.testing.assert_array_equal(whole.merge([want]), want)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("count", [1, 50])
def test_the_largest_of_each_row_give_the_largest_neurons_of_all_rows(k: int, count: int) -> None:
    rows = torch.randn(count, 2, 64).round(decimals=1)  # of two layers
    probe = top(f"top(mlp_post,{k})")
    for layer in range(2):
        probe.prepare(64, CPU, layer, 0)
    kept = np.concatenate([probe.encode(rows[:, layer], layer).numpy() for layer in range(2)], 1)
    neurons, values, at = over_rows(kept, k)
    assert neurons.shape == values.shape == at.shape == (2, k)
    magnitudes = rows.abs().numpy()
    for layer in range(2):
        most = magnitudes[:, layer].max(0)
        assert len(set(neurons[layer].tolist())) == k
        np.testing.assert_array_equal(np.abs(values[layer]), -np.sort(-most)[:k])
        np.testing.assert_array_equal(most[neurons[layer]], np.abs(values[layer]))
        np.testing.assert_array_equal(rows[at[layer], layer, neurons[layer]], values[layer])
        np.testing.assert_array_equal(at[layer], magnitudes[:, layer].argmax(0)[neurons[layer]])


def test_rows_that_did_not_come_have_no_neuron() -> None:
    assert over_rows(np.full((3, 4), np.nan, np.float32), 1)[0].tolist() == [[-1], [-1]]
    known = np.array([[np.nan] * 4, [5, 2, 9, -3]], np.float32)  # the scores of the first row have not arrived
    neurons, values, at = over_rows(known, 2)
    assert (neurons.tolist(), values.tolist(), at.tolist()) == ([[5, 2]], [[9.0, -3.0]], [[1, 1]])


@pytest.mark.parametrize(
    ("text", "tp", "message"),
    [
        ("top(mlp_post,0)", 1, r"top\(mlp_post,0\) is not valid; it may keep 1 to 16 values of a row"),
        ("top(mlp_post,17)", 1, r"top\(mlp_post,17\) is not valid; it may keep 1 to 16"),
        ("top(mlp_post, 9)", 8, r"top\(mlp_post, 9\) is not valid; it may keep 1 to 8"),
        ("top(resid_post)", 1, r"of resid_post in all layers; give top\(resid_pre\), and top\(resid_final\)"),
        ("top(topk_ids)", 1, "of topk_ids, which holds integers"),
        ("top(kv_c)", 1, "of kv_c, which does not exist: Qwen3ForCausalLM has no kv_c"),
        ("top()", 1, r"top\(\) .*cannot be read"),
    ],
)
def test_largest_values_that_do_not_exist_are_refused(text: str, tp: int, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        with_probes(DIMS, [("top", text)], tp)


def test_indexes_that_float32_does_not_hold_are_refused() -> None:
    check("top(mlp_post)", 1, 1 << 23, 2)
    with pytest.raises(ReduceError, match="have 16777218 values; at most 16777216 are supported"):
        check("top(mlp_post)", 1, (1 << 23) + 1, 2)


def test_the_head_for_the_kernel_has_the_weights_and_biases_of_its_layer(files: dict[str, Path]) -> None:
    probe = Probe.load(str(files["many"]))
    for layer in (0, 1, 3):
        probe.prepare(WIDTH, CPU, layer, 0)
    rows = torch.randn(4, WIDTH)
    for layer in (0, 1, 3):
        head = probe.head(layer, CPU)
        assert head.output == "none" and head.bias is not None
        found = rows @ head.weight.T + head.bias
        torch.testing.assert_close(found, probe.encode(rows, layer), atol=1e-5, rtol=1e-5)
