# SPDX-License-Identifier: Apache-2.0
"""docs/REDUCTIONS.md and ACCURACY.md: their figures are those of benchmarks/results, rounded down."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fidelity, scale
from dmi_connector.analysis.fidelity import LARGER_IS_WORSE
from dmi_connector.layout import RowField
from dmi_connector.reduce import KINDS, MODES, forms, parse
from dmi_connector.reduce.modes import rules_of
from tests.resultkit import same, table

ROOT = Path(__file__).parents[2]
PAGE = "".join((ROOT / "docs" / name).read_text() for name in ("REDUCTIONS.md", "ACCURACY.md"))
"""Both pages. Some figures are in both."""
RUNS = json.loads((ROOT / "benchmarks/results/cpu-fidelity.json").read_text())["runs"]
RESULTS, AFTER = RUNS["fidelity"], RUNS["downstream"]
DOWNSTREAM = AFTER["trained"]
COLUMNS = (
    ("int8", "cosine_least"),
    ("int8(32)", "cosine_least"),
    ("fp8", "cosine_least"),
    ("rp(512)", "pairs"),
    ("rp(512)", "probes"),
    ("topk(64)", "recall"),
    ("topk(64)", "importance"),
)


def down(value: float, digits: int) -> str:
    return f"{math.floor(round(value * 10**digits, 3)) / 10**digits:.{digits}f}"


def layers(weights: str, hook: str, reduction: str, measure: str) -> list[float]:
    """A measure for each layer of a hook."""
    found = [one for one in RESULTS[weights] if (one["hook"], one["reduction"]) == (hook, reduction)]
    return [one["measures"][measure] for one in found if measure in one["measures"]]


@pytest.mark.parametrize(("number", "weights"), [(0, "trained"), (1, "random")])
def test_each_row_is_the_worst_layer(number: int, weights: str) -> None:
    lines = PAGE.split("| hook | width | int8")[number + 1].split("\n\n")[0].splitlines()[2:]
    rows = {cells[0]: cells[1:] for cells in ([cell.strip() for cell in row.split("|")[1:-1]] for row in lines)}
    assert set(rows) == {one["hook"] for one in RESULTS[weights]}
    for hook, (width, *shown) in rows.items():
        assert {int(width)} == {one["width"] for one in RESULTS[weights] if one["hook"] == hook}
        for text, (reduction, measure) in zip(shown, COLUMNS, strict=True):
            found = layers(weights, hook, reduction, measure)
            want = down(min(found), 5 if measure == "cosine_least" else 4) if found else ""
            assert text == want, (hook, reduction, measure)


def test_measures_below_the_bar_are_named() -> None:
    below = {
        (weights, measure, hook)
        for weights in ("trained", "random")
        for measure in ("pairs", "probes")
        for hook in {one["hook"] for one in RESULTS[weights]}
        if layers(weights, hook, "rp(512)", measure) and min(layers(weights, hook, "rp(512)", measure)) < 0.95
    }
    assert below == {
        ("trained", "probes", "resid_pre"),
        *(("random", "probes", hook) for hook in ("resid_mid", "resid_final", "mlp_out")),
        ("random", "pairs", "mlp_out"),
    }
    sentences = (
        "`rp(512)` is below 0.95 for the probe scores of `resid_pre`. With random weights it is below 0.95 for the"
        " probe scores of `resid_mid`, `resid_final` and `mlp_out`, and for the cosines of `mlp_out`."
    )
    assert sentences in " ".join(PAGE.split())


def test_larger_projections_are_as_measured() -> None:
    rows = re.findall(r"^\| `(rp\(\d+\))`: (.*?) \| a \w+ \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 8
    for reduction, what, cells in rows:
        weights = "random" if what.endswith("random weights") else "trained"
        measure = "pairs" if what.startswith("cosines") else "probes"
        want = [down(min(layers(weights, h, reduction, measure)), 4) for h in ("resid_pre", "resid_mid", "mlp_out")]
        assert cells.split(" | ") == want, (reduction, what)


def test_figures_in_the_text_are_as_measured() -> None:
    text = " ".join(PAGE.split())

    def gaussian(weights: str) -> tuple[str, str, str]:
        stream = [
            min(layers(weights, hook, "rp(512,gaussian)", "pairs"))
            for hook in ("resid_pre", "resid_mid", "resid_final")
        ]
        q = min(layers(weights, "q", "rp(512,gaussian)", "pairs"))
        return down(min(stream), 4), down(max(stream), 4), down(q, 4)

    low, high, q = gaussian("trained")
    assert f"cosines of pairs are {low} to {high} on the residual stream and {q} on `q`" in text
    low, high, q = gaussian("random")
    assert f"(random weights: {low} to {high}, and {q})" in text
    kept = [down(min(layers(one, "resid_mid", "pca(256 components)", "variance")), 4) for one in ("trained", "random")]
    assert f"keeps {kept[0]} of the variance of `resid_mid` (random weights: {kept[1]})" in text
    alone = down(min(layers("trained", "mlp_post", "topk(64,sample=0)", "importance")), 4)
    assert f"it is {alone} for `mlp_post`" in text


def found(hook: str, reduction: str, measure: str) -> list[float]:
    """A downstream measure for each layer of a hook."""
    own = [one["measures"] for one in DOWNSTREAM if (one["hook"], one["reduction"]) == (hook, reduction)]
    return [measures[measure] for measures in own if measure in measures]


@pytest.mark.parametrize(
    ("title", "measure"),
    [
        ("importance", "importance"),
        ("concept scores", "concepts"),
        ("top token", "lens_top"),
        ("KL divergence", "lens_kl"),
        ("latents kept", "latents"),
        ("autoencoder's error", "sae_error"),
        ("attention", "attention"),
    ],
)
def test_results_of_analyses_are_as_measured(title: str, measure: str) -> None:
    head, _, *lines = PAGE.split(f"| {title} | int8 ")[1].split("\n\n")[0].splitlines()
    reductions = ["int8", *(cell.strip() for cell in head.split("|")[1:-1])]
    rows = {cells[0]: cells[1:] for cells in ([cell.strip() for cell in row.split("|")[1:-1]] for row in lines)}
    assert set(rows) == {one["hook"] for one in DOWNSTREAM if measure in one["measures"]}
    for hook, cells in rows.items():
        for reduction, cell in zip(reductions, cells, strict=True):
            values = found(hook, reduction, measure)
            worst = _up(max(values, default=0)) if measure in LARGER_IS_WORSE else down(min(values, default=0), 4)
            assert cell == (worst if values else ""), (hook, reduction)
    told = {one["reduction"] for one in DOWNSTREAM if measure in one["measures"]} - {"pca(file) of heads"}
    assert told <= {*reductions} | {"rp(16,group=64)"}, "the table must have all columns"


def _up(value: float) -> str:
    return f"{math.ceil(round(value * 10**4, 3)) / 10**4:.4f}"


def test_the_summary_has_the_worst_hook() -> None:
    """Of the trained model. The bytes are those of a row of 2,560 values."""
    fitted = {"int8(channel=file)": 2560, "pca(file)": 256, "pq(file)": 640}  # values, scores and codes of a byte
    for reduction, size, *shown in table("REDUCTIONS.md", "| reduction | bytes | lowest cosine of a row |"):
        spec = reduction.strip("`")
        nbytes = fitted.get(spec) or RowField("resid_pre", 0, "bfloat16", 2560, 0, parse(spec)).nbytes
        same(size, nbytes / 5120)
        rows = [one["measures"] for one in RESULTS["trained"] if one["reduction"] == spec]
        least = [one["cosine_least"] for one in rows if "cosine_least" in one]
        analysed = [one["measures"] for one in DOWNSTREAM if one["reduction"] == spec]
        concepts, top = ([one[what] for one in analysed if what in one] for what in ("concepts", "lens_top"))
        for cell, values, digits in zip(shown, (least, concepts, top), (5, 4, 4), strict=True):
            assert cell == (down(min(values), digits) if values else ""), (reduction, digits)


def test_figures_of_scales_and_sketches_are_as_measured() -> None:
    text = " ".join(PAGE.split())
    hooks = {one["hook"] for one in DOWNSTREAM}
    channel = "int8(channel=file)"
    least = {hook: down(min(found(hook, channel, "cosine_least")), 4) for hook in hooks}
    others = min(value for hook, value in least.items() if hook != "mlp_post")
    assert f"of `mlp_post` is {least['mlp_post']}, and {others} or more for the other hooks" in text
    beyond = [round(10_000 * (1 - share)) for hook in hooks for share in found(hook, channel, "in_range")]
    assert set(beyond) <= {0, 1, 2} and "1 or 2 of 10,000 values are beyond" in text
    wide = [hook for hook in hooks if hook.startswith(("resid", "mlp"))]
    pairs, probes = ([min(found(hook, "cs(512)", what)) for hook in wide] for what in ("pairs", "probes"))
    assert f"pairs are {down(min(pairs), 4)} to {down(max(pairs), 4)} on hooks wider than 512" in text
    assert f"probe scores {down(min(probes), 4)} to {down(max(probes), 4)}" in text
    topk = {hook for hook in hooks if min(found(hook, "topk(64)", "concepts")) >= 0.95}
    assert topk == {"mlp_post"}, "only mlp_post must reach 0.95"


def test_figures_of_autoencoders_and_attention_are_as_measured() -> None:
    text = " ".join(PAGE.split())
    explained = {one["hook"]: down(one["explained"], 4) for one in AFTER["autoencoders"]}
    assert {one["rows"] for one in AFTER["autoencoders"]} == {24_384}
    assert {(one["latents"], one["k"], one["layer"]) for one in AFTER["autoencoders"]} == {(512, 16, 1)}
    least, most = min(explained, key=explained.__getitem__), max(explained, key=explained.__getitem__)
    assert f"explain {explained[least]} (`{least}`) to {explained[most]} (`{most}`) of the variance" in text
    beyond = max(found("resid_pre", "pca(file)", "lens_kl"))
    assert f"its KL divergence is {_up(beyond)}" in text
    least_attention = min(
        layers("random", "q_rot", "int8", "attention") + layers("random", "k_rot", "int8", "attention")
    )
    assert f"With random weights `int8` has {down(least_attention, 4)}" in text


def test_losses_of_autoencoders_and_attention_are_named() -> None:
    """Values below 0.95 are those that the sentences below the tables name."""
    encoded, attended = ("resid_pre", "z", "mlp_post", "mlp_out"), ("q_rot", "k_rot")
    assert {one["hook"] for one in DOWNSTREAM if "latents" in one["measures"]} == {*encoded}
    assert {one["hook"] for one in DOWNSTREAM if "attention" in one["measures"]} == {*attended}
    below = {
        (one["reduction"], one["hook"])
        for one in DOWNSTREAM
        if min(one["measures"].get("latents", 1), one["measures"].get("attention", 1)) < 0.95
    }
    assert below == {
        *(("topk(64)", hook) for hook in (*encoded, *attended)),
        *(("pq(file)", hook) for hook in ({*encoded, *attended} - {"mlp_post"})),
        ("int8", "mlp_post"),
        *(("pca(file) of heads", hook) for hook in ("z", *attended)),
    }
    lost = {
        hook: (1 - min(found(hook, "fp8", what))) / (1 - min(found(hook, "int8", what)))
        for what, hooks in (("latents", encoded), ("attention", attended))
        for hook in hooks
    }
    assert lost.pop("mlp_post") < 1 and all(2 < times < 4 for times in lost.values()), lost
    lacking = [one for one in DOWNSTREAM if one["reduction"].startswith(("rp", "cs"))]
    assert not any({"latents", "sae_error", "attention"} & set(one["measures"]) for one in lacking)


PARTS = {
    "`rp(256)` of `z`: cosines of pairs": ("rp(256)", "pairs"),
    "`rp(256)` of `z`: probe scores": ("rp(256)", "probes"),
    "`attn(4,half)` of `pattern`: attention": ("attn(4,half)", "mass"),
    "`attn(4,half)` of `pattern`: attention of a head": ("attn(4,half)", "least_head"),
    "`attn(8)` of `pattern`: attention": ("attn(8)", "mass"),
    "`attn(8)` of `pattern`: attention of a head": ("attn(8)", "least_head"),
}


def test_accuracy_of_compact_is_as_measured() -> None:
    chosen = MODES["compact"].bind("z", [0], 4096, 1), rules_of("compact")["pattern*"]
    assert (parse("rp(256)"), "attn(4,half)") == chosen and rules_of("summary")["pattern*"] == "attn(8)"

    def least(weights: str, reduction: str, measure: str) -> float:
        own = [one["measures"] for one in RUNS["compact"][weights] if one["reduction"] == reduction]
        assert len(own) == 2, "there must be two layers"
        return min(measures[measure] for measures in own)

    rows = {what: cells for what, *cells in table("ACCURACY.md", "| part of a mode |")}
    want = {what: [down(least(one, *found), 4) for one in ("trained", "random")] for what, found in PARTS.items()}
    assert rows == want
    reach = {(weights, *found) for found in PARTS.values() for weights in RUNS["compact"] if weights != "header"}
    assert {one for one in reach if least(*one) >= 0.95} == {("trained", "rp(256)", "pairs")}
    text = " ".join(PAGE.split())
    assert "only the cosines of pairs of the trained model reach 0.95" in text
    assert f"probe scores have a correlation of {want['`rp(256)` of `z`: probe scores'][0]} with those" in text
    four, eight = (want[f"`{spec}` of `pattern`: attention"][0] for spec in ("attn(4,half)", "attn(8)"))
    assert f"hold {four} of the attention of a trained model, instead of {eight}." in text
    errors = [math.sqrt(1 / 256 - 1 / width) for width in (512, 4096)]
    assert f"cosine is {errors[0]:.3f} for 512 values, and {errors[1]:.3f} for 4,096" in text


@pytest.mark.parametrize(("spec", "mass", "least"), [("attn(8)", 0.9125, 0.9), ("attn(4,half)", 0.55, 0.5)])
def test_the_kept_attention_is_that_of_the_largest_weights(spec: str, mass: float, least: float) -> None:
    """Two heads and two captures. Each query has other keys with the largest weights."""
    rows = [[0.2] + [0.1] * 8, [0.15] * 4 + [0.1] + [0.075] * 4]
    rng, captures = np.random.default_rng(0), []
    for queries in (9, 12):
        weights = np.ones((2, queries, 9), np.float32)
        for head, query in np.ndindex(2, queries - 8):  # other queries see at most 8 keys, and do not count
            weights[head, 8 + query] = rng.permutation(rows[head])
        captures.append(weights)
    found = fidelity.weights_kept(captures, spec)
    near = {"rel": 2**-11 if "half" in spec else 1e-6}
    assert found == {"mass": pytest.approx(mass, **near), "least_head": pytest.approx(least, **near)}
    assert (found["least_head"] != pytest.approx(least, rel=1e-6)) == ("half" in spec), (
        "weights must be rounded to float16"
    )


def test_results_of_analyses_of_a_random_model_are_as_measured() -> None:
    random = RUNS["downstream-random"]["random"]

    def least(hook: str, reduction: str, measure: str) -> float | None:
        own = [one["measures"] for one in random if (one["hook"], one["reduction"]) == (hook, reduction)]
        return min((measures[measure] for measures in own if measure in measures), default=None)

    head, _, *lines = PAGE.split("| random weights | int8 |")[1].split("\n\n")[0].splitlines()
    reductions = ["int8", *(cell.strip() for cell in head.split("|")[:-1])]
    names, below = {"concept scores": "concepts", "attention": "attention"}, set()
    shown = {cells[0]: cells[1:] for cells in ([cell.strip() for cell in row.split("|")[1:-1]] for row in lines)}
    assert {*reductions} == {one["reduction"] for one in random}
    assert {*shown} == {f"{hook}: concept scores" for hook in {one["hook"] for one in random}} | {
        f"{hook}: attention" for hook in ("q_rot", "k_rot")
    }
    for what, cells in shown.items():
        hook, measure = what.split(": ")
        for reduction, cell in zip(reductions, cells, strict=True):
            value = least(hook, reduction, names[measure])
            assert cell == ("" if value is None else down(value, 4)), (what, reduction)
            if value is not None and value < 0.95:
                below.add((what, reduction))
    lost = [f"{hook}: concept scores" for hook in ("q", "z", "q_rot", "k_rot")] + [
        "q_rot: attention",
        "k_rot: attention",
    ]
    assert below == {(what, "topk(64)") for what in lost}
    kept = [one["measures"].get("importance", 1) for one in random if one["reduction"] != "topk(64)"]
    assert f"The importance is {down(min(kept), 4)} or more, except with `topk(64)`" in " ".join(PAGE.split())


HEADS = [("rp(16,group=64)", measure) for measure in ("pairs", "probes", "concepts")]
HEADS += [("pca(file) of heads", one) for one in ("variance", "importance", "concepts", "attention", "latents")]


def test_accuracy_of_reductions_of_heads_is_as_measured() -> None:
    rows = {hook: cells for hook, *cells in table("ACCURACY.md", "| heads of |")}
    assert set(rows) == {"q", "k", "v", "z", "q_rot", "k_rot"}
    for hook, cells in rows.items():
        values = [found(hook, *column) for column in HEADS]
        assert cells == [down(min(own), 4) if own else "" for own in values]


def test_figures_of_codebooks_and_projected_scales_are_as_measured() -> None:
    text = " ".join(PAGE.split())
    hooks = {one["hook"] for one in DOWNSTREAM}
    median = {hook: down(min(found(hook, "pq(file)", "cosine_median")), 4) for hook in hooks}
    assert f"median cosines of {min(median.values())} (`{min(median, key=lambda h: median[h])}`) to" in text
    assert f"to {max(median.values())}" in text
    least = {hook: down(min(found(hook, "pq(file)", "cosine_least")), 4) for hook in hooks}
    assert f"the lowest of a row is {min(least.values())} (`{min(least, key=lambda h: least[h])}`)" in text
    gaps = [
        abs(min(found(hook, "rp(512,channel=file)", what)) - min(found(hook, "rp(512)", what)))
        for hook in hooks
        for what in ("pairs", "probes")
        if found(hook, "rp(512)", what)
    ]
    assert f"differ by at most {_up(max(gaps))} from those of `rp(512)`" in text


def test_the_table_of_modes_says_what_they_choose() -> None:
    table = PAGE.split("## Modes")[1].split("##")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", table, re.MULTILINE)
    assert [name for name, *_ in rows] == [*MODES]
    for name, wide, neurons, heads, attention in rows:
        mode = MODES[name]
        assert mode.bind("z", [0], 4096, 1) == parse(heads.strip("`"))
        assert rules_of(name)["pattern*"] == attention.strip("`")
        assert mode.bind("resid_pre", [0], 4096, 1) == parse(wide.strip("`"))
        assert mode.bind("mlp_post", [0], 4096, 1) == parse(neurons.strip("`"))
        narrow = [width for width in (64, 500) if mode.bind("resid_pre", [0], width, 1) == parse("int8(32)")]
        assert narrow == ([64, 500] if name != "topk8" else [])


def test_the_table_of_the_budget_is_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    section = PAGE.split("## A budget for one sequence")[1].split("\n## ")[0]
    tokens, model = re.findall(r"python -m benchmarks.scale --sequence (\d+) --model (\S+)`", section)[0]
    assert scale.main(["--model", model, "--sequence", tokens]) == 0
    assert capsys.readouterr().out.strip() in section
    dims = scale.MODELS[model]
    whole = {mode: sum(scale.megabytes(int(tokens), mode, dims).values()) * 1e6 for mode in scale.MODES}
    assert whole["compact"] < scale.BUDGET < whole["summary"]
    assert f"{whole['compact'] / int(tokens) / 1e3:.1f} kB per token" in section
    hooks = re.findall(r'"(resid_pre[^"]*)"', section)[0]
    assert hooks == ",".join(scale.PARTS.values()), "the example must capture the hooks that the table counts"
    # A row of 36 layers, computed by hand: rp(512), topk(64) without a sample, four weights of 32 heads, rp(256).
    by_hand = 36 * (516 + (64 * 3 + 4) + 32 * (4 * 4 + 4) + 260) + 516
    assert scale.token_bytes(hooks, "compact", dims) == by_hand
    # The raw row: two bytes per value, and eight weights of 32 heads.
    by_hand = 36 * (2 * (2560 + 9728 + 4096) + 32 * (8 * 8 + 4)) + 2 * 2560
    assert scale.token_bytes(hooks, scale.RAW, dims) == by_hand
    # causal: a token attends to itself and earlier ones
    weights = 2 * dims.layers * dims.heads * int(tokens) * (int(tokens) + 1) / 2
    assert f"would take {weights / 1e9:.1f} GB more" in " ".join(section.split())


def test_every_form_is_described_and_every_kind_has_its_bytes() -> None:
    table = PAGE.split("## Reference")[1].split("##")[0]
    assert [form for form in forms() if f"`{form}`" not in table] == []
    stored = (ROOT / "docs/FORMAT.md").read_text().split("## 11. Reduced hooks")[1]
    assert [kind for kind in KINDS if f"| `{kind}` |" not in stored] == []
    for kind in KINDS.values():
        assert kind.forms and all(form.partition("(")[0] == kind.kind for form in kind.forms)
        assert {type(parse(spec)) for spec in (*kind.compared, *filter(None, [kind.example]))} <= {kind}


SPEED = {
    "`fp8`": ("h200-encodings-64", "fp8 null"),
    "`int8(32)`": ("h200-encodings-64", "int8(32) null"),
    "`int8(affine)`": ("h200-encodings-more", "int8(affine) null"),
    "`int8(channel=file)`": ("h200-encodings-channel", "int8(channel) null"),
    "`round(5)`": ("h200-encodings-channel", "round(5) null"),
    "`rp(512)`": ("h200-encodings", "rp(512) null"),
    "`rp(512,sign)`": ("h200-encodings-rp", "rp(512) sign null"),
    "`rp(512,channel=file)`": ("h200-encodings-rp", "rp(512) channel null"),
    "`rp(32,group=128)`": ("h200-encodings-heads", "rp(32) by 128 null"),
    "`topk(64)`": ("h200-encodings", "topk(64) null"),
    "`topk(64,exact)`": ("h200-encodings-more", "topk(64) exact null"),
    "mode `full8`": ("h200-encodings-modes", "full8 null"),
    "mode `rp8`": ("h200-encodings-modes", "rp8 null"),
    "mode `topk8`": ("h200-encodings-heads", "topk8 null"),
    "mode `summary`": ("h200-encodings-modes", "summary null"),
    "`cs(512)`": ("h200-encodings", "cs(512) null"),
    "`pca(file)`, k = 128": ("h200-encodings-fitted", "pca(128) null"),
    "`pq(file)`, 4 bits, sub-vectors of 4": ("h200-encodings-fitted", "pq(4 bits) null"),
    "`pq(file)`, 8 bits, sub-vectors of 8": ("h200-encodings-fitted", "pq(8 bits) null"),
}


def test_speeds_are_those_of_the_runs_beside_int8() -> None:
    runs = json.loads((ROOT / "benchmarks/results/gpu-busy.json").read_text())["runs"]
    section = PAGE.split("## Speed on a GPU")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if re.match(r"\| (mode )?`", line)]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in rows] == [*SPEED]
    fastest = []
    for (name, width, ratios, each_ms), (run, setup) in zip(rows, SPEED.values(), strict=True):
        (load,) = runs[run]["engines"][setup]["loads"]
        own, base = (runs[run]["engines"][engine]["loads"][load] for engine in (setup, "int8 null"))
        pairs = zip(own["tok_per_s"], base["tok_per_s"], strict=False)
        assert ratios == ", ".join(f"{mine / int8:.2f}" for mine, int8 in pairs), name
        assert width == f"{runs[run]['engines'][setup]['bytes_per_token']:,}", name
        if each_ms:
            more = (own["between_tokens_p50_ms"][0] - base["between_tokens_p50_ms"][0]) / 399
            assert float(each_ms) == pytest.approx(more, rel=0.25), name
        fastest += base["tok_per_s"] if load == "short64" else []
    assert f"{min(fastest):,.0f} to {max(fastest):,.0f} tokens/s" in section
