# SPDX-License-Identifier: Apache-2.0
"""The cases and setups of the capture benchmark and their order, and the setups of sustained load."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import drafts, fitted

FULL = "vllm-full,-logits"
HIDDEN = "hidden-states"
BEFORE = ", before"
"""Suffix of setups, and of their engines, that run the code of another checkout (--before)."""


class Case(NamedTuple):
    """A burst of requests. With one output token it measures prefill, otherwise decode.

    requests: number of requests, which are sent at once. prompt_tokens, output_tokens: tokens per request.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int

    def shrunk(self, by: int) -> Case:
        """This case with numbers divided by `by`, for small machines."""
        generated = self.output_tokens if self.output_tokens == 1 else max(2, self.output_tokens // by)
        return Case(max(1, self.requests // by), max(1, self.prompt_tokens // by), generated)

    @property
    def tokens(self) -> int:
        """Number of tokens that count: generated tokens (decode), or prompt tokens (prefill)."""
        return self.requests * (self.output_tokens if self.output_tokens > 1 else self.prompt_tokens)

    @property
    def rows(self) -> int:
        """Number of rows of a request's store. The last generated token has no row."""
        return self.prompt_tokens + self.output_tokens - 1


CASES = {
    "decode1": Case(1, 64, 128),
    "decode32": Case(32, 64, 128),
    "decode128": Case(128, 64, 128),
    "decode128x48": Case(128, 16, 48),
    "prefill8": Case(8, 512, 1),
    "prefill32": Case(32, 512, 1),
    "prefill32x4": Case(128, 512, 1),
}
_USUAL = tuple(case for case in CASES if case != "decode128x48")
"""Cases that are measured without --cases. With the other case, two engines that capture FULL fit on 80 GB."""
PROFILED = "decode32"
"""The case that is profiled."""
PROFILE = f"profile {PROFILED}"
"""Name of the profile among the cases of a result."""


@dataclass(frozen=True)
class Setup:
    """One configuration to measure, of stock vLLM or with capture. Setups with the same `engine` share a process.

    hooks: selection; "" for an engine that does not capture. sink, codec, policy, reduce, owner: server options; owner
    "" is --owner. slow: one writer and a host buffer of two chunks, so that the sink is far slower than the link.
    share: minimum share of time that writers work while the engine decodes; 0: the package's default. cases: names of
    CASES. profile: whether to profile PROFILED too, if it is among the cases.
    """

    name: str
    engine: str
    hooks: str = ""
    sink: str = "disk"
    codec: str = "zstd"
    policy: str = "block"
    slow: bool = False
    share: float = 0.0
    cases: tuple[str, ...] = ()
    reduce: tuple[tuple[str, str], ...] = ()
    owner: str = ""
    profile: bool = True

    @property
    def stores(self) -> bool:
        """Whether the setup writes stores."""
        return bool(self.hooks) and self.sink == "disk"

    @property
    def profiled(self) -> bool:
        """Whether PROFILED is profiled too. A slow sink would make the profile slow."""
        return self.profile and PROFILED in self.cases and not self.slow

    @property
    def phase(self) -> tuple[object, ...]:
        """The options that setups of one phase share. Only setups of one phase are compared with each other."""
        return self.sink, self.codec, self.policy, self.slow, self.share


class Turn(NamedTuple):
    """One measurement: a setup and a case. case: one of CASES, or PROFILE. phase: number of its phase."""

    setup: Setup
    case: str
    phase: int = 0

    @property
    def engine(self) -> str:
        return self.setup.engine


_BOTH, _ONE = ("decode32", "prefill8"), ("decode32",)
CURVES = ("hooks", "layers")
"""Values of --curves: groups of setups with growing selections. `benchmarks.report --plot` draws their speeds."""
REDUCE = {
    "int8": (("*", "int8"),),
    "mixed": (("resid_*", "rp(512)"), ("mlp_post", "topk(64)"), ("*", "int8")),
}
HOOK_STEPS = {
    "hooks-1": "resid_pre",
    "hooks-2": "resid_pre,resid_mid,z",
    "hooks-3": "resid_pre,resid_mid,z,mlp_post",
}
LAYER_STEPS = {"layers-quarter": 4, "layers-half": 2}


def first_layers(model: str, share: int) -> str:
    """The selection FULL, but only of the first 1/share of the layers of a model."""
    from dmi_connector.hooks import HOOKS, parse_selection

    dims = fitted.dims_of(model)
    count = -(-dims.layers // share)
    selected = parse_selection(FULL, dims).hooks
    once = [name for name in selected if HOOKS[name].scope != "layer"]
    return ",".join([*once, *(f"{n}@0-{count - 1}" for n, ls in selected.items() if n not in once and ls[0] < count)])


def all_setups(curves: list[str], default_codec: str, model: str) -> list[Setup]:
    """All setups: stock, vLLM's own extraction, capture of small to large selections, then those of `curves`."""
    everything = ("decode1", "decode32", "decode128", "prefill32")
    null, none = (*everything, "prefill8"), ("decode1", "decode32", "prefill32", "prefill8")
    setups = [
        Setup("stock", "stock", cases=null),
        Setup("ehs", "ehs", cases=everything),
        Setup("hidden-states null", "hidden", HIDDEN, sink="null", cases=everything),
        Setup("hidden-states disk", "hidden", HIDDEN, codec=default_codec, cases=everything),
        Setup("full null", "full", FULL, sink="null", cases=(*null, "decode128x48")),
        Setup("full disk none", "full", FULL, codec="none", cases=none),
        Setup("full host", "full", FULL, sink="host", cases=(*everything, "prefill8", "prefill32x4", "decode128x48")),
        Setup("full disk lz4", "full", FULL, codec="lz4", cases=("prefill32",)),
        Setup("full disk zstd", "full", FULL, codec="zstd", cases=("prefill32",)),
        Setup("full disk slow block", "full", FULL, codec="none", slow=True, cases=_BOTH),
        Setup("full disk slow drop", "full", FULL, codec="none", policy="drop", slow=True, cases=_BOTH),
    ]
    decode = ("decode1", "decode32", "decode128")
    setups += [
        Setup("hidden-states disk unpaced", "hidden", HIDDEN, codec=default_codec, cases=decode[1:], share=1.0),
        Setup("full disk none unpaced", "full", FULL, codec="none", cases=_ONE, share=1.0),
    ]
    for name, rules in REDUCE.items():
        setups += [
            Setup(f"{name} null", name, FULL, sink="null", cases=(*decode, "prefill32"), reduce=rules),
            Setup(f"{name} disk none", name, FULL, codec="none", cases=("decode32", "prefill32"), reduce=rules),
        ]
    summaries = (("pattern", "attn(8)"),)
    setups.append(Setup("attn null", "attn", "pattern", sink="null", cases=(*decode, "prefill32"), reduce=summaries))
    if "hooks" in curves:
        setups += [Setup(name, name, hooks, sink="null", cases=_BOTH) for name, hooks in HOOK_STEPS.items()]
    if "layers" in curves:
        steps = {name: first_layers(model, share) for name, share in LAYER_STEPS.items()}
        setups += [Setup(name, name, hooks, sink="null", cases=_BOTH) for name, hooks in steps.items()]
    return setups


def choose(args: argparse.Namespace) -> list[Setup]:
    """The setups that the options select, each with its cases. Raises ValueError for names that do not exist.

    Stock gets the cases of all other setups, which are compared with it.
    """
    curves = _names("--curves", args.curves, [*CURVES])
    setups = all_setups(curves, args.default_codec, str(Path(args.model)))
    engines = _names("--engines", args.engines, [s.engine for s in setups])
    only = _names("--only", args.only, [s.name for s in setups])
    cases = _names("--cases", args.cases, list(CASES))
    if args.profile is not None:
        profiled = _names("--profile", args.profile, [s.name for s in setups])
        setups = [replace(s, profile=s.name in profiled) for s in setups]
    chosen = [s for s in setups if (not engines or s.engine in engines) and (not only or s.name in only)]
    chosen = [replace(s, cases=tuple(c for c in s.cases if c in (cases or _USUAL))) for s in chosen]
    others = {case for s in chosen if s.engine != "stock" for case in s.cases}
    if others:
        in_order = tuple(case for case in CASES if case in others)
        chosen = [replace(s, cases=in_order) if s.engine == "stock" else s for s in chosen]
    return [s for s in chosen if s.cases]


def with_before(setups: list[Setup]) -> list[Setup]:
    """Each setup, followed by the same setup with the code of another checkout if it captures."""
    both: list[Setup] = []
    for setup in setups:
        both.append(setup)
        if setup.hooks:
            both.append(replace(setup, name=setup.name + BEFORE, engine=setup.engine + BEFORE))
    return both


def in_sequence(setups: list[Setup]) -> list[Turn]:
    """The turns, ordered by engine, then by setup."""
    engines = dict.fromkeys(s.engine for s in setups)
    ordered = [s for engine in engines for s in setups if s.engine == engine]
    return [Turn(s, case) for s in ordered for case in (*s.cases, *([PROFILE] if s.profiled else []))]


def in_phases(setups: list[Setup]) -> list[Turn]:
    """The turns, ordered by phase, then by case. In each phase, a case is measured on stock, then on other setups."""
    stock = [s for s in setups if s.engine == "stock"]
    others = [s for s in setups if s.engine != "stock"] or stock
    turns = []
    for number, phase in enumerate(dict.fromkeys(s.phase for s in others)):
        members = [s for s in others if s.phase == phase]
        for case in CASES:
            having = [s for s in members if case in s.cases]
            turns += [Turn(s, case, number) for s in (dict.fromkeys([*stock, *having]) if having else ())]
        first = stock if number == 0 else []
        turns += [Turn(s, PROFILE, number) for s in dict.fromkeys([*first, *members]) if s.profiled]
    return turns


def in_groups(turns: list[Turn], together: bool) -> list[list[Turn]]:
    """Group turns whose rounds alternate: turns of one case and phase on different engines, if engines run together.

    Alternating rounds make ratios robust, because a machine may be slower for some seconds.
    """
    groups: list[list[Turn]] = []
    for turn in turns:
        before = groups[-1] if groups else []
        alike = (
            together
            and turn.case != PROFILE
            and all((t.phase, t.case) == (turn.phase, turn.case) and t.engine != turn.engine for t in before)
        )
        if before and alike:
            before.append(turn)
        else:
            groups.append([turn])
    return groups


def _names(option: str, text: str, known: list[str]) -> list[str]:
    """Parse comma-separated names. Raises ValueError for a name that is not in `known`."""
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise ValueError(f"{option}: {name!r} is unknown; choose from {', '.join(dict.fromkeys(known))}")
    return names


# ---- sustained load ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sustained(Setup):
    """A setup of `benchmarks.sustained`.

    graphs: CUDA graph mode of the engine; "": that of --engine-args. drafts: method of speculative decoding, one of
    `benchmarks.drafts.METHODS`. encoding: reduction of every hook, one of `benchmarks.fitted.ENCODINGS`. probes: one of
    `benchmarks.fitted.PROBES`. "" leaves each of these out.
    """

    graphs: str = ""
    drafts: str = ""
    encoding: str = ""
    probes: str = ""


def _narrow(model: str) -> str:
    """A selection that is common in interpretability: neurons and residual stream of four layers in the middle."""
    config = json.loads((Path(model) / "config.json").read_text())
    layers = config.get("num_hidden_layers") or len(config["layers_block_type"])
    first = max(0, layers // 2 - 2)
    last = min(layers - 1, first + 3)
    return f"mlp_post@{first}-{last},resid_post@{first}-{last}"


def sustained_setups(model: str) -> list[Sustained]:
    """All setups of `benchmarks.sustained`. Each has an engine of its own, with the same name."""

    def ours(name: str, hooks: str, codec: str = "", owner: str = "target", **more: Any) -> Sustained:
        return Sustained(name, name, hooks, "disk" if codec else "null", codec or "none", owner=owner, **more)

    pieces = "FULL_AND_PIECEWISE"
    int8 = REDUCE["int8"]
    setups = [
        Sustained("stock", "stock"),
        ours("hidden-states null", HIDDEN),
        ours("hidden-states zstd", HIDDEN, "zstd"),
        ours("hidden-states zstd draft", HIDDEN, "zstd", "draft"),
        ours("hidden-states lz4", HIDDEN, "lz4"),
        ours("hidden-states none", HIDDEN, "none"),
        ours("narrow zstd", _narrow(model), "zstd"),
        ours("full null", FULL),
        ours("full none", FULL, "none"),
        ours("int8 null", FULL, reduce=int8),
        ours("int8 none", FULL, "none", reduce=int8),
        ours("int8 lz4", FULL, "lz4", reduce=int8),
        ours("int8 none pool", FULL, "none", "pool", reduce=int8),
        ours("hidden-states null pool", HIDDEN, owner="pool"),
        ours("hidden-states zstd pool", HIDDEN, "zstd", "pool"),
        *(ours(f"{name} null", FULL, encoding=name) for name in fitted.ENCODINGS),
        *(ours(f"probe {kind}", "probe.p", "zstd", probes=kind) for kind in fitted.PROBES if kind != "keep"),
        ours("probe keep", f"{HIDDEN},probe.p", "zstd", probes="keep"),
        ours("attn null", "pattern", reduce=(("pattern", "attn(8)"),)),
        Sustained("stock pieces", "stock pieces", graphs=pieces),
        ours("hidden-states zstd pieces", HIDDEN, "zstd", graphs=pieces),
        ours("hidden-states zstd draft pieces", HIDDEN, "zstd", "draft", graphs=pieces),
        ours("full null pieces", FULL, graphs=pieces),
    ]
    for method in drafts.METHODS:
        setups.append(Sustained(f"stock {method}", f"stock {method}", drafts=method))
        setups.append(ours(f"hidden-states null {method}", HIDDEN, drafts=method))
        setups.append(replace(ours(f"hidden-states host {method}", HIDDEN, drafts=method), sink="host"))
        setups += [ours(f"hidden-states {codec} {method}", HIDDEN, codec, drafts=method) for codec in ("none", "zstd")]
    return setups
