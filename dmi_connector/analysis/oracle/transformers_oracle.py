# SPDX-License-Identifier: Apache-2.0
"""The expected values of every hook, from one forward of a transformers model over the whole sequence.

vLLM and transformers share no model code. So if a capture agrees with this oracle, tap points, rows and store are
correct. Tests, `dmi demo` and users call `compare`. This module needs torch and transformers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from dmi_connector.analysis.oracle.oracle_config import attention_layers, config_of, is_heterogeneous
from dmi_connector.analysis.oracle.oracle_twins import ABSENT, LLAMA, TWINS, Point
from dmi_connector.analysis.oracle.recorder import Recorder, seen_attention
from dmi_connector.captures.attention import image_blocks
from dmi_connector.captures.capture import Capture
from dmi_connector.hook_table import HOOKS
from dmi_connector.reduce import Keeps
from dmi_connector.store.format.completeness import Cause

logger = logging.getLogger(__name__)

_RUN = 1 << 20
"""Maximum number of rows of a slice of `Capture.runs`."""


class Oracle:
    """A transformers model with eager attention that computes every hook for a token sequence.

    For a model with a vision tower, the hooks are those of its language model. Prompts may have images.

    model_dir: directory of the model. dtype: dtype of the weights and of the computation. without: hooks to leave out.
    config: the config of the language model. architecture: name of the model's class in its config. layers: {hook:
    numbers of its layers}, after `run`.
    """

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float32, without: Sequence[str] = ()) -> None:
        config = config_of(model_dir)
        self.wraps = config.get_text_config() is not config
        auto = AutoModelForImageTextToText if self.wraps else AutoModelForCausalLM
        how: Any = {"text_config": "eager", "vision_config": "sdpa"} if self.wraps else "eager"
        self.model = auto.from_pretrained(
            model_dir, config=config, dtype=dtype, attn_implementation=how, local_files_only=True
        ).eval()
        self.architecture = str(self.model.config.architectures[0])
        self.config, self.without = self.model.config.get_text_config(), without
        self.layers: dict[str, list[int]] = {}
        if self.config.model_type == "bloom":
            for module in self.model.modules():
                if hasattr(module, "gelu_impl"):
                    module.gelu_impl = torch.nn.GELU()  # as in vLLM; transformers approximates GELU by tanh
        if self.model.config.model_type == "mistral3":
            # vLLM uses this epsilon for any config.
            self.model.model.multi_modal_projector.norm.variance_epsilon = 1e-5
        base = self.model.get_decoder() if self.wraps else self.model.base_model
        # For the text model of Llama 4, `base_model` returns the whole model.
        self._base = self.model.model if base is self.model else getattr(base, "model", base) if self.wraps else base
        self.twin = TWINS.get(self.config.model_type, LLAMA)
        if self.config.model_type == "granitemoehybrid":
            self.twin = replace(self.twin, rotary=self.config.position_embedding_type == "rope")
        if getattr(self.config, "use_parallel_residual", False):
            self.twin = self.twin.but(Point("resid_mid", ABSENT))
        if not getattr(self.config, "use_post_norm", True):
            self.twin = self.twin.but(Point("attn_proj", ABSENT), Point("mlp_proj", ABSENT))
        self._attention = attention_layers(self.config)
        self._layers: Any = self._base.get_submodule(self.twin.layers)
        config = self.config.per_layer_config[self._attention[0]] if is_heterogeneous(self.config) else self.config
        heads = config.num_attention_heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self._sizes = [heads * self._head_dim, *[kv_heads * self._head_dim] * 2]
        for name, module in self._base.named_modules():
            if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
                module.variance_epsilon = self.config.rms_norm_eps  # as in vLLM; transformers uses 1e-6

    @torch.no_grad()
    def run(
        self, token_ids: Sequence[int], images: Mapping[str, Any] | None = None, image_blocks: bool = False
    ) -> dict[str, np.ndarray]:
        """Compute every hook in one forward over `token_ids`. Returns {hook: values}.

        token_ids: the prompt, then the generated tokens. images: the output of the model's image processor for the
        images of the prompt, such as `pixel_values`. `token_ids` then contains placeholders. image_blocks: whether the
        tokens of an image attend to each other, as in Gemma 3 on a GPU. vLLM's CPU backend lacks this.

        Hooks of layers are float32 [layers, tokens, width]. The layer axis has only the layers that have the hook.
        Hooks that exist once are float32 [1, tokens, width]. `logits` is float32 [tokens, vocab], and row i predicts
        token i + 1. `token_ids` and `positions` are int32 [tokens]. Models with M-RoPE have `mrope_positions`, int32
        [1, tokens, axes].

        Models with experts have `router_logits` and `topk_weights` (float32) and `topk_ids` (int32). Experts are in
        descending order of weight, and experts of equal weight in ascending order of id. Models with an indexer have
        `indexer_topk`, int32 [layers, tokens, index_topk], in descending order of position.
        """
        with Recorder(len(token_ids)) as recorder:
            for point in self.twin.once:
                if not (self.wraps and point.name == "embed"):  # `_watch_inputs` records it with merged images
                    recorder.watch(self._base.get_submodule(point.module), point.name, point.side)
            for index, layer in enumerate(self._layers):
                self._watch_layer(recorder, index, layer)
            if self.wraps:
                self._watch_inputs(recorder)
            ids = torch.tensor([list(token_ids)], dtype=torch.long)
            with seen_attention(recorder.rows, self._attention) if self.twin.rotary else nullcontext():
                logits = self.model(ids, use_cache=False, **self._with_images(ids, images, image_blocks)).logits
        self.layers = dict(recorder.layers)
        # Widths of hooks that are left out may differ by layer. `_share_keys` needs all hooks of latent attention.
        without = () if self.twin.latent else self.without
        values = {name: torch.stack(parts) for name, parts in recorder.rows.items() if name not in without}
        if self.twin.scale:
            for name in {"attn_out", "mlp_out"} & values.keys():
                values[name] = values[name] * getattr(self.config, self.twin.scale)
        if self.twin.weights_scale and "topk_weights" in values:
            values["topk_weights"] = values["topk_weights"] / getattr(self.config, self.twin.weights_scale)
        if self.twin.values_scale:
            values["v"] = values["v"] * getattr(self.config, self.twin.values_scale)
        if self.config.model_type == "llama4_text":
            for name in {"q", "k", "q_rot", "k_rot"} & values.keys():
                values[name] = self._in_halves(values[name])
        if self.twin.latent:
            self._share_keys(values)
        if "indexer_topk" in values:
            values["indexer_topk"] = self._chosen(values["indexer_topk"])
        values["logits"] = logits[0]
        values = {name: value for name, value in values.items() if name not in self.without}
        integers = ("topk_ids", "mrope_positions", "indexer_topk")
        values = {name: value.int() if name in integers else value.float() for name, value in values.items()}
        values["token_ids"] = ids[0].int()
        values["positions"] = torch.arange(len(token_ids), dtype=torch.int32)
        return {name: value.numpy() for name, value in values.items()}

    @torch.no_grad()
    def greedy(self, token_ids: Sequence[int], n: int) -> list[int]:
        """The `n` tokens that greedy decoding appends to `token_ids`. It does not stop at an EOS token."""
        ids = list(token_ids)
        for _ in range(n):
            logits = self.model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits
            ids.append(int(logits[0, -1].argmax()))
        return ids[len(token_ids) :]

    def _with_images(self, ids: torch.Tensor, images: Mapping[str, Any] | None, image_blocks: bool) -> dict[str, Any]:
        """Keyword arguments of a forward over a prompt with images; {} without images. ids: [1, tokens]."""
        if not images:
            return {}
        pixels = {"pixel_values": images["pixel_values"].to(self.model.dtype)}
        names = ["mm_token_type_ids"] * ("image_grid_thw" in images) + ["token_type_ids"] * image_blocks
        return {**images, **pixels, **dict.fromkeys(names, (ids == self.model.config.image_token_id).int())}

    def _watch_inputs(self, recorder: Recorder) -> None:
        """Record the input embeddings of the language model, including images, and the positions of M-RoPE."""
        axes = len((getattr(self.config, "rope_parameters", None) or {}).get("mrope_section", ()))

        def before(_module: torch.nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            recorder.rows["embed"] = [kwargs["inputs_embeds"][0].clone()]
            if axes:
                positions = kwargs.get("position_ids")
                if positions is None:
                    positions = torch.arange(recorder.tokens).expand(axes, 1, -1)
                recorder.rows["mrope_positions"] = [positions[-axes:, 0].T.clone()]

        recorder.callback(self._base.register_forward_pre_hook(before, with_kwargs=True).remove)

    def _watch_layer(self, recorder: Recorder, index: int, layer: Any) -> None:
        """Record the hooks of one decoder layer. index: number of the layer."""
        present = dict(layer.named_modules())
        points = [point for point in self.twin.points if _is_there(point, present)]
        if index not in self._attention:
            points = [point for point in points if HOOKS[point.name].block != "attention"]
        for point in {point.name: point for point in points}.values():
            if " " in point.module:
                paths = point.module.split()
                recorder.watch_several([present[path] for path in paths if path != "+"], point.name, "+" in paths)
                continue
            pick = functools.partial(self._part, part=point.part) if point.part else None
            if self.twin.norms_heads and point.module.endswith(("q_norm", "k_norm", "q_layernorm", "k_layernorm")):
                pick = functools.partial(self._heads_last, width=self._sizes[0 if point.name == "q" else 1])
            recorder.watch(present[point.module], point.name, point.side, pick)
        if self.twin.attends:
            recorder.watch_method(present[self.twin.attn], self.twin.attends)
        if self.twin.gate in present:
            seen = any(point.name == "router_logits" for point in points)
            recorder.watch_router(present[self.twin.gate], getattr(self.config, "num_experts_per_tok", 0), not seen)
        recorder.watch_end(layer, index)

    def _part(self, value: torch.Tensor, part: str) -> torch.Tensor:
        """One part of the output of a fused projection, [tokens, width]. part: as in `Point`."""
        if part in ("gate", "up"):
            return value.chunk(2, -1)[part == "up"]
        index = "qkv".index(part)
        if self.twin.by_head:
            return value.unflatten(-1, (-1, 3, self._head_dim))[:, :, index].flatten(1)
        return value.split(self._sizes, -1)[index]

    def _heads_last(self, value: torch.Tensor, width: int) -> torch.Tensor:
        """Reorder values in the order [heads, tokens, head_dim] to rows [tokens, width]."""
        return value.reshape(width // self._head_dim, -1, self._head_dim).transpose(0, 1).flatten(1)

    def _share_keys(self, values: dict[str, torch.Tensor]) -> None:
        """Replace `k_rot` by `k_pe`, the rotated key that heads share. Make the two values of each pair adjacent."""
        rope = self.config.qk_rope_head_dim
        queries = values["q_rot"].unflatten(-1, (self.config.num_attention_heads, -1)).clone()
        key = values.pop("k_rot").unflatten(-1, (self.config.num_attention_heads, -1))[..., 0, -rope:]
        if getattr(self.config, "rope_interleave", hasattr(self.config, "index_topk")):
            queries[..., -rope:], key = (x.unflatten(-1, (2, -1)).mT.flatten(-2) for x in (queries[..., -rope:], key))
        values |= {"q_rot": queries.flatten(-2), "k_pe": key}
        self.layers["k_pe"] = self.layers["k_rot"]

    def _chosen(self, value: torch.Tensor) -> torch.Tensor:
        """Positions that the indexer chose, in descending order and filled up with -1, [layers, tokens, index_topk].

        Early tokens also choose later tokens, which attention masks. These positions become -1.
        """
        value = value.masked_fill(value > torch.arange(value.shape[1])[:, None], -1)
        full = torch.nn.functional.pad(value, (0, self.config.index_topk - value.shape[-1]), value=-1)
        return full.sort(-1, descending=True).values

    def _in_halves(self, value: torch.Tensor) -> torch.Tensor:
        """Reorder the values of each head as in vLLM: the first values of all rotated pairs, then the second values."""
        return value.unflatten(-1, (-1, self._head_dim // 2, 2)).transpose(-1, -2).flatten(-3)


def _is_there(point: Point, present: Mapping[str, Any]) -> bool:
    """Whether a layer has a point. present: the modules of the layer, by path."""
    wanted = {*point.module.split(), point.needs or point.module.split()[0]} - {"+"}
    return wanted <= present.keys() and not (point.unless and point.unless in present)


def compare(capture: Capture, oracle: Oracle, images: Mapping[str, Any] | None = None) -> dict[str, float]:
    """{hook: largest absolute difference between `capture` and `oracle`, over all layers and rows that are present}.

    The difference is NaN if either has a NaN, or both have the same infinity. Reduced hooks are decoded first, so that
    the difference includes the loss of the reduction. Hooks of `Oracle.without` are left out. With a warning, hooks
    without rows are left out, and hooks whose reduction does not keep their values, such as projections and probes.
    images: see `Oracle.run`.

    Raises ValueError if the capture does not begin at position 0, because its earlier tokens are then unknown. Raises
    ValueError for a capture without rows or token ids, for a hook that the oracle does not compute, for other shapes
    than those of the oracle, and if no hook can be compared.
    """
    rows = np.concatenate([np.arange(run.start, run.stop) for run in capture.runs(_RUN)] or [np.arange(0)])
    _check_comparable(capture, rows)
    expected = oracle.run(capture.token_ids.tolist(), images, image_blocks(capture))
    errors = {}
    for hook, entry in capture.attrs["hooks"].items():
        reduction = capture.reduction(hook)
        samples = capture.logits_positions if hook == "logits" else rows
        there = np.flatnonzero(samples >= 0)
        if hook in oracle.without:
            continue
        if reduction is not None and Keeps.VALUES not in reduction.keeps:
            kind = reduction.kind
            logger.warning("%s: %s holds rows of %s, not its values; it is not compared", capture.path, hook, kind)
            continue
        if not len(there):
            logger.warning("%s: %s holds no rows; it is not compared", capture.path, hook)
            continue
        if hook not in expected:
            raise ValueError(
                f"{capture.path}: the oracle computes no {hook}, only {', '.join(expected)}; give Oracle"
                f" without=[{hook!r}] to compare the others"
            )
        want = expected[hook]
        if entry["layers"]:
            layers = oracle.layers.get(hook, [])
            want = want[[index for index, layer in enumerate(layers) if layer in entry["layers"]]]
        have = capture.numpy(hook)
        if hook == "logits":
            have, want = have[there], want[samples[there]]
        else:
            have, want = have.reshape(-1, *have.shape[-2:])[:, rows], want[:, rows]
        if hook == "indexer_topk":  # the order of its positions has no meaning
            have = np.sort(have, -1)[..., ::-1]
        if have.shape != want.shape:
            raise ValueError(f"{capture.path}: {hook} has shape {have.shape}, the oracle's model gives {want.shape}")
        errors[hook] = float(np.abs(have.astype(np.float32) - want).max())
    if not errors:
        raise ValueError(f"{capture.path}: no hook can be compared; capture hooks in full, or as int8")
    return errors


def _check_comparable(capture: Capture, rows: np.ndarray) -> None:
    """Raise ValueError for a capture whose tokens are not all known. rows: the rows that are not missing."""
    if capture.attrs["start"] != 0:
        raise ValueError(f"{capture.path} begins at position {capture.attrs['start']}: its earlier tokens are unknown")
    if not len(rows):
        raise ValueError(f"{capture.path} holds no rows to compare; give a store with rows")
    if Cause.TOKEN_IDS_UNKNOWN.value[1] in (capture.reason or ""):
        raise ValueError(f"{capture.path} lacks token ids, so nothing can be computed from them; give another store")


def largest(errors: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The largest difference of each hook over several results of `compare`. NaN is the largest of all."""
    found: dict[str, float] = {}
    for one in errors:
        for hook, error in one.items():
            found[hook] = float(np.maximum(error, found.get(hook, 0.0)))
    return found
