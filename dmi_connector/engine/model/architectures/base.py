# SPDX-License-Identifier: Apache-2.0
"""`Architecture`, one row of the table of architectures: it says which modules of a model are tapped."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dmi_connector.hooks import HOOKS, USUAL, ModelDims

MODELS = "vllm.model_executor.models"
TRANSFORMERS = f"{MODELS}.transformers"
"""Python module of vLLM's Transformers backend, which builds models of the transformers library with vLLM's layers."""
TRANSFORMERS_CLASSES = ("TransformersForCausalLM", "TransformersMoEForCausalLM")
"""The classes of text models in TRANSFORMERS."""

FORWARD = "forward"
"""The value of `positions` for models in which position ids are read from the arguments of the model's forward."""
QK_NORM: dict[str, Any] = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
"""Fields of an `Architecture` that has norms of q and k."""


def ungated(up_proj: str) -> dict[str, Any]:
    """Fields of an `Architecture` whose MLP has no gate. up_proj: the module whose output enters the activation."""
    return {"up_proj": up_proj, "gated_mlp": False}


@dataclass(frozen=True)
class Architecture:
    """Module paths of one vLLM model class. The defaults are those of Llama.

    `language`, `layers`, `embed`, `final_norm` and `positions` are paths in the model. All other paths are relative to
    a layer. "" stands for a module that the model does not have.

    The model:
        name: the architecture in `config.json`. base: ``module:Class`` of vLLM's model.
        uncaptured: ``module:Class`` that vLLM runs without capture, if its fused kernels hide values; "": `base`.
        language: path of the language model in a model with other parts, such as a vision tower. Token ids and
            embeddings then both enter the forward, and embeddings are computed before it.
        positions: the module that gets the position ids. "": the layers. FORWARD: layers may not get them, so they are
            read from the arguments of the model's forward.
        positions_at, positions_as: index and keyword of the position ids among the arguments of `positions`.

    Norms. A fused add-and-norm returns a tuple (normed, residual stream). A plain norm returns only normed values, and
    its input is the residual stream. Taps distinguish them by the output.
        ln1, ln2, final_norm: norms before attention, before the MLP and after the last layer. Without them the stream
            is read at the input of the layer, the input of the MLP and the output of the last layer.
        stream_at: index of the layer's input among its arguments, for layers without ln1.
        plain_norms: norms return (normed, something else), but are plain: their input is the residual stream.
        attn_norm, mlp_norm: norms of a block's output, before it is added to the stream.

    Attention:
        qkv: the projection that returns q, k and v concatenated. gated: it also returns a gate next to the queries of
            each head. qkv_by_head: q, k and v of one head, or of one group of heads, are adjacent in its output.
        q_norm, k_norm: norms of q and k. heads_first: these norms get [heads, tokens, head_dim].
        v_at_attn: v is changed between qkv and attention. It is then read as the third argument of attention.
        attn: vLLM's attention layer. o_proj: the output projection. rotary: whether q and k are rotated.
        kv_norm: norm of the latent in latent attention. indexer: the module that chooses which tokens are attended to.

    Mixers, in the layers of hybrid models that have one instead of attention:
        mix_first, mix_in: input projections, in the order in which they run. mix_norm: the gated norm that gets the
            output of the core (the recurrence of the mixer). mix_out: the output projection.
        fills: a mixer that runs as one opaque op. The op writes its output to its second argument.

    MLP:
        up_proj: returns gate and up concatenated; only up if gate_proj is set; the input of the activation if gated_mlp
            is False. down_proj: gets the neurons.
        mlp: returns the output of the block. mlp_first: a module whose output is added to that of `mlp`.
        moe_gate, moe_experts: router and experts, in layers that have them.

    Residual stream:
        parallel: whether attention and MLP read the same stream, and both are added to it.
        sums: whether a layer changes the stream only by adding the outputs of its blocks.
        scale: field of the config by which the output of a block is multiplied before it is added.
        embed_scaled: whether embeddings are multiplied by the square root of their width.
        float16_divisor: field of the config by which vLLM divides the stream, or the output of shared experts, in
            float16.

    Hooks:
        only: the hooks that can be captured; (): all. lacks: hooks that cannot be captured. Most of them are not the
            input or output of any module.
        one_rank: hooks that tensor parallelism excludes: each rank has another part than capture expects, or all.
    """

    adds_in_place: ClassVar[bool] = False
    """Whether the model adds the residual stream to the output of attention in place."""

    name: str
    base: str
    uncaptured: str = ""
    language: str = ""
    layers: str = "model.layers"
    embed: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    positions: str = ""
    positions_at: int = 0
    positions_as: str = "positions"
    stream_at: int = 0
    ln1: str = "input_layernorm"
    plain_norms: bool = False
    qkv: str = "self_attn.qkv_proj"
    qkv_by_head: bool = False
    q_norm: str = ""
    k_norm: str = ""
    v_at_attn: bool = False
    kv_norm: str = ""
    indexer: str = ""
    heads_first: bool = False
    attn: str = "self_attn.attn"
    o_proj: str = "self_attn.o_proj"
    attn_norm: str = ""
    ln2: str = "post_attention_layernorm"
    mlp: str = "mlp"
    gate_proj: str = ""
    up_proj: str = "mlp.gate_up_proj"
    gated_mlp: bool = True
    down_proj: str = "mlp.down_proj"
    mlp_norm: str = ""
    moe_gate: str = "mlp.gate"
    moe_experts: str = "mlp.experts"
    rotary: bool = True
    parallel: bool = False
    sums: bool = True
    mix_first: str = ""
    mix_in: str = ""
    mix_norm: str = ""
    mix_out: str = ""
    fills: str = ""
    gated: bool = False
    mlp_first: str = ""
    scale: str = ""
    embed_scaled: bool = False
    one_rank: tuple[str, ...] = ()
    float16_divisor: str = ""
    only: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    def fit(self, config: Any) -> Architecture:
        """This row, adapted to one model. Override it if fields depend on the config.

        config: Hugging Face text config. Raises ValueError with the reason if the model cannot be captured.
        """
        row = self
        if self.q_norm and not getattr(config, "use_qk_norm", True):
            row = replace(row, q_norm="", k_norm="")
        if self.attn_norm and not getattr(config, "use_post_norm", True):
            row = replace(row, attn_norm="", mlp_norm="")
        return row

    def of_layer(self, index: int, dims: ModelDims) -> Architecture:
        """This row, adapted to layer `index`. Override it if layers differ. dims: the sizes of the model."""
        return self

    @property
    def attn_name(self) -> str:
        """The name of attention in vLLM's table of cache layers, relative to the layer. The default is its path."""
        return self.attn

    @property
    def in_transformers(self) -> bool:
        """Whether vLLM's Transformers backend serves the model, which then has the modules of transformers."""
        return self.base.startswith(f"{TRANSFORMERS}:")

    @property
    def layer(self) -> str:
        """The path of the layer itself. `path` strips the dots."""
        return "."

    @property
    def before_mlp(self) -> str:
        """The module whose input is the input of the MLP."""
        return self.mlp

    def path(self, index: int, module: str) -> str:
        """The path in the model of a module of layer `index`. module: the attribute with its path in the layer."""
        return f"{self.layers}.{index}.{getattr(self, module)}".rstrip(".")

    @property
    def features(self) -> frozenset[str]:
        """The features of `hooks.FEATURES` that a model with this row has."""
        lacks = {
            "rotary": not self.rotary,
            "sequential": self.parallel,
            "input_norm": not self.ln1,
            "mlp_norm": not self.ln2,
        }
        has = {
            "post_norms": bool(self.attn_norm),
            "gated_mixer": bool(self.mix_norm),
            "ungated_mlp": not self.gated_mlp,
        }
        return USUAL - {name for name, absent in lacks.items() if absent} | {
            name for name, there in has.items() if there
        }

    def dims(self, config: Any) -> ModelDims:
        """The sizes of a model. Override it if the config names them otherwise. config: Hugging Face text config."""
        layers = config.num_hidden_layers
        heads = config.num_attention_heads
        hidden = config.hidden_size
        experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") or 0
        return ModelDims(
            architecture=self.name,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or hidden // heads,
            intermediate=_first(config, *_INTERMEDIATE) or 4 * hidden,
            vocab=config.vocab_size,
            experts=experts,
            top_k=_first(config, "num_experts_per_tok", "top_k_experts") or 0 if experts else 0,
            moe_layers=_moe_layers(config, layers) if experts else (),
            features=self.features,
            only=frozenset(self.only or HOOKS).difference(self.lacks) if self.only or self.lacks else None,
        )

    def block_scale(self, config: Any) -> float:
        """Factor of a block's output before it is added to the residual stream. config: Hugging Face text config."""
        return float(getattr(config, self.scale)) if self.scale else 1.0

    def visual_layers(self, config: Any) -> int:
        """Number of first layers after which visual features are added (deepstack). config: of the whole model."""
        vision = getattr(config, "vision_config", None) if self.language else None
        return len(getattr(vision, "deepstack_visual_indexes", None) or ())


class MayNorm(Architecture):
    """Architectures whose models have some norms only if their config says so.

    They are the norms of q and k, and with `sandwich_norm` (openPangu) norms after attention and after the MLP.
    """

    def fit(self, config: Any) -> Architecture:
        normed = getattr(config, "use_qk_norm", False) or getattr(config, "qk_norm", False)
        row = self if normed else replace(self, q_norm="", k_norm="")
        if getattr(config, "sandwich_norm", False):
            row = replace(row, attn_norm=row.ln2, ln2="pre_mlp_layernorm", mlp_norm="post_mlp_layernorm")
        return row


_INTERMEDIATE = ("prefix_dense_intermediate_size", "intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner")
"""Fields of configs for the width of a dense MLP, in order of precedence."""


def _first(config: Any, *names: str) -> Any:
    """The value of the first of these fields that is set (and not 0) in a config; None if none is."""
    return next((value for name in names if (value := getattr(config, name, None))), None)


def _moe_layers(config: Any, layers: int) -> tuple[int, ...]:
    """The layers with experts: all layers that the config does not declare dense."""
    if listed := getattr(config, "moe_layers", None):  # Llama 4
        return tuple(listed)
    types = getattr(config, "mlp_layer_types", None)
    # If this field is set, vLLM ignores the types, except for K-EXAONE.
    counted = getattr(config, "first_k_dense_replace", None) is not None and config.model_type != "exaone_moe"
    if types and not counted:
        return tuple(i for i, name in enumerate(types) if name == "sparse")
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    step = _first(config, "decoder_sparse_step", "moe_layer_interval") or 1  # Qwen, ERNIE
    first = _first(config, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index") or 0
    last = getattr(config, "moe_layer_end_index", -1)  # ERNIE; -1: the last layer
    every = getattr(config, "moe_layer_freq", 1)
    if isinstance(every, list):  # MiMo V2
        return tuple(i for i, sparse in enumerate(every) if sparse)
    return tuple(
        i
        for i in range(first, layers if last == -1 else last + 1)
        if i not in dense and (i + 1) % step == 0 and (every == 1 or i % every == 0)
    )
