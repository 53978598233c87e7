# SPDX-License-Identifier: Apache-2.0
"""Adds the probes of an engine to the hooks of its model. A probe is a hook that the engine computes from another one.

Nothing here imports torch or vllm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dmi_connector.hooks import ALIASES, HOOKS, PROBE, Hook, ModelDims
from dmi_connector.option_values import OptionError, refuse
from dmi_connector.ranks import shard_of
from dmi_connector.reduce import ReduceError, summaries
from dmi_connector.reduce.latents import Latents
from dmi_connector.reduce.probe import Probe
from dmi_connector.reduce.probe_option import parse_probe
from dmi_connector.wording import suggest

AnyProbe = Probe | Latents
_RESID_POST = "resid_post"


def with_probes(dims: ModelDims, probes: Sequence[tuple[str, str]], tp: int) -> tuple[ModelDims, dict[str, AnyProbe]]:
    """Add `probes` to the hooks of a model. Returns (`dims` with the hooks of the probes, {hook name: probe}).

    probes: (name, text) of each probe, as in the server option `probes`. tp: tensor-parallel size. Raises OptionError
    for a probe that does not fit the model.
    """
    hooks: list[Hook] = []
    computed: dict[str, AnyProbe] = {}
    for name, text in probes:
        try:
            probe = parse_probe(name, text)
            hook, layers = _source(name, probe, dims)
            shard = shard_of(hook, dims, tp, 0)
            computed[PROBE + name] = probe.bind(hook.name, layers, shard.width, shard.shards)
        except ReduceError as error:
            raise OptionError(str(error)) from error
        hooks.append(replace(hook, name=PROBE + name, doc=f"probe of {hook.name}", source=hook.name, layers=layers))
    return replace(dims, probes=tuple(hooks)), computed


def check_alerts(alerts: Sequence[tuple[str, float]], computed: Mapping[str, AnyProbe]) -> None:
    """Raise OptionError if a norm in the option `probe_alerts` has a score in several layers.

    The layers of a norm are known only with the model. computed: the result of `with_probes`.
    """
    for name, _ in alerts:
        probe = computed[PROBE + name]
        if isinstance(probe, Probe) and not probe.one_score:
            what = f"has a score in each of {len(probe.layers)} layers"
            raise refuse("probe_alerts", name, f"{what}; name a probe of one output in one layer")


def _source(name: str, probe: AnyProbe, dims: ModelDims) -> tuple[Hook, tuple[int, ...]]:
    """(the hook from which a probe is computed, its layers). Raises ReduceError if the probe does not fit the model."""
    what = f"probes: {name!r} ({probe.path}) is of {probe.source}"
    source, layers = ALIASES.get(probe.source, probe.source), probe.layers
    if probe.width is None and source == _RESID_POST:
        fix = f"{probe.form}(resid_pre), and {probe.form}(resid_final) for the last layer"
        raise ReduceError(f"{what} in all layers; give {fix}")
    if probe.width is None and source in HOOKS:
        layers = dims.layers_of(HOOKS[source]) or (0,)
    if source == _RESID_POST:
        if len(layers) != 1:
            raise ReduceError(f"{what} in {len(layers)} layers; name resid_pre, and make each layer number one larger")
        source, layers = ("resid_final", (0,)) if layers[0] == dims.layers - 1 else ("resid_pre", (layers[0] + 1,))
    hook = HOOKS.get(source)
    if hook is None:
        raise ReduceError(f"{what}, which is not a hook{suggest(source, HOOKS) or ';'} hooks: {', '.join(HOOKS)}")
    if hook.dtype == "int32" or hook.scope == "sampled" or source in summaries():
        why = "which holds integers" if hook.dtype == "int32" else "which has no row of values for each token"
        raise ReduceError(f"{what}, {why}; make a probe of another hook")
    if hook.scope == "layer" and not layers:
        raise ReduceError(f"{what}, and names no layer; give one")
    layers, there = layers or (0,), dims.layers_of(hook)
    if lacking := [layer for layer in layers if layer not in there]:
        if hook.scope != "layer" and there:
            raise ReduceError(f"{what} in layer {lacking[0]}, but {source} exists once; make layers of the probe empty")
        where = f" in layer {lacking[0]}" if there else ""
        has = f"{source} is in layers {', '.join(map(str, there))}" if where else f"{dims.architecture} has no {source}"
        raise ReduceError(f"{what}, which does not exist{where}: {has}; give a probe of this model")
    if probe.width not in (None, dims.width(hook)):
        raise ReduceError(
            f"{what} with {probe.width} values, but here it has {dims.width(hook)}; give a probe of this model"
        )
    return hook, layers
