# SPDX-License-Identifier: Apache-2.0
"""Writes tiny random models with a tokenizer. Demo, tests and notebooks serve these models without a model hub.

Most models have 3 layers, a vocabulary of 512 tokens and head_dim 32, the smallest that vLLM's CPU attention supports.
The functions import torch and transformers when they are called, so that a caller can set `ENV` first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmi_connector.cli import tiny_families
from dmi_connector.cli.tiny_families import EXPERTS, FULL, ODD, ROPE, WINDOWS
from dmi_connector.cli.tiny_hybrids import CENTRED, HYBRIDS
from dmi_connector.cli.tiny_latent import LATENT, YARN
from dmi_connector.cli.tiny_vision import (
    TEXT_ONLY,
    TOKENS,
    VOCAB,
    WRAPPERS,
    fill_vision,
    is_vision,
    named_tokens,
    save_names,
    save_processor,
    wrapper_fields,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""Environment variables for serving such a model: no network, no usage reports, a small KV cache.

VLLM_CPU_NUM_OF_RESERVED_CPU leaves one core to the scheduler. By default vLLM with a KV connector leaves two cores, or
none if the machine has only two. Without a free core, the threads of vLLM's kernels share cores with the scheduler,
which waits in a loop. A step can then take four times as long.
"""

SPECIAL = ("<|pad|>", "<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Special tokens. The id of a token is its index. Qwen2Tokenizer would add <|endoftext|> if it were missing."""
PAD, BOS, EOS = 0, 1, 2

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
# Qwen2 and GPT-2 in vLLM derive head_dim as hidden_size / heads, so 128 gives the smallest head_dim, 32.
_GQA_128 = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
}
ARCHS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "tie_word_embeddings": True,
    },
    "qwen2": {**_GQA_128, "tie_word_embeddings": False},
    "llama": {**_GQA_128, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "mistral": {**_GQA_128, "head_dim": 32, "sliding_window": None, "tie_word_embeddings": False},
    "qwen3_moe": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "gpt2": {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 1024},
}

FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {**ODD, "num_attention_heads": 3, "num_key_value_heads": 1, "sliding_window": None},
    "ministral3": {**ODD, "num_key_value_heads": 3, "sliding_window": None},
    "qwen2_moe": {
        **EXPERTS,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "num_experts": 6,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 80,
        "mlp_only_layers": [1],
        "sliding_window": None,
    },
    "mixtral": {**ODD, "num_key_value_heads": 3, "num_local_experts": 5, "num_experts_per_tok": 3},
    "olmoe": {
        **EXPERTS,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "num_experts": 4,
        "norm_topk_prob": False,
    },
    "glm4_moe": {
        **EXPERTS,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
    **LATENT,
    "gemma": {**ODD, "tie_word_embeddings": True},
    "gemma3_text": {
        **ODD,
        **WINDOWS,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 24,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    "glm4": {**ODD, "attention_bias": True, "partial_rotary_factor": 0.5},
    "cohere2": {**ODD, **WINDOWS, "sliding_window_pattern": 2, "logit_scale": 0.5, "tie_word_embeddings": True},
    "gpt_oss": {
        **ODD,
        **WINDOWS,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {**YARN, "truncate": False},
    },
    "llama4_text": {
        **ODD,
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "intermediate_size_mlp": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 128,
        "use_qk_norm": True,
    },
    "opt": {
        "hidden_size": 96,
        "word_embed_proj_dim": 96,
        "num_attention_heads": 3,
        "ffn_dim": 160,
        "tie_word_embeddings": True,
    },
    "bloom": {"hidden_size": 96, "n_head": 3, "tie_word_embeddings": True},
    "gptj": {"hidden_size": 96, "num_attention_heads": 3, "rotary_dim": 16, "tie_word_embeddings": False},
    **tiny_families.DENSE,
    **tiny_families.SPARSE,
    **tiny_families.MIXED,
    # vLLM serves the following models through its Transformers backend. They are last, because vLLM's compilation hook
    # for them fails on other models that the same process compiles afterwards.
    "gpt_neox": {**FULL, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}},
    "phi": {**FULL, "intermediate_size": 384, "partial_rotary_factor": 0.5},
    "olmo2": {**ODD, "num_key_value_heads": 1},
    "olmo3": {**ODD, **WINDOWS, "num_attention_heads": 3, "num_key_value_heads": 3},
    "smollm3": {**ODD, "num_hidden_layers": 4, "no_rope_layer_interval": 2, "tie_word_embeddings": True},
    "starcoder2": {**FULL, "num_key_value_heads": 1, "sliding_window": 32, "tie_word_embeddings": True},
    # For some of the following models there is no row in `ARCHITECTURES`: hooks are found by the model's structure.
    "gpt_bigcode": {"hidden_size": 96, "n_head": 3, "n_inner": 160, "tie_word_embeddings": True},
    "olmo": {**ODD, "num_attention_heads": 3, "num_key_value_heads": 1, "clip_qkv": 1.5},
    "flex_olmo": {**ODD, "num_experts": 4, "num_experts_per_tok": 2},
    **tiny_families.BACKEND,
}
"""`model_type` -> configuration of a tiny model, for families that ARCHS lacks. Among them are models with numbers of
heads that are not powers of two, with a single KV head, with sliding windows, and with experts.
"""

_CORPUS = """
the model reads a prompt and answers with one token after another, and every layer adds something to the
residual stream: attention moves information between positions, while the feed forward block works on each
position alone. a capture keeps what a hook saw, for prompt and generated tokens, in a store that anyone can
open later. hello world, this is a small test of a tokenizer; numbers such as 0 1 2 3 10 42 100 are split.
once upon a time there was a quick brown fox who jumped over the lazy dog near river banks in early spring.
people write questions: what is the capital of france? how many planets circle the sun? why does it rain?
please explain quantum physics, music theory, history, cooking, gardening and chess to young children today.
"""
"""Text to train the tokenizer on. It has enough words for the 251 merges that fill the vocabulary."""


def make_tokenizer(more: Sequence[str] = (), named: Mapping[str, str] | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly VOCAB tokens, plus those in `more`, with a chat template.

    more: additional tokens, with ids starting at VOCAB. named: attribute of the tokenizer -> its token, one of `more`.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS.strip().splitlines(), trainer)
    if core.get_vocab_size() != VOCAB:
        raise ValueError(f"the corpus gives {core.get_vocab_size()} tokens, not {VOCAB}: add words to it")
    core.add_tokens([AddedToken(token, special=not token.isspace(), normalized=False) for token in more])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SPECIAL[PAD],
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        additional_special_tokens=list(SPECIAL[3:]),
        model_specific_special_tokens=dict(named or {}),
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(arch: str, dir: str | Path, dtype: str = "float32", seed: int = 0, **config: Any) -> Path:
    """Write a random model with its tokenizer into the directory `dir`. Returns `dir`.

    arch: a key of ARCHS, FAMILIES, HYBRIDS, WRAPPERS or TEXT_ONLY. Models of WRAPPERS have a vision tower; for them the
    configuration of an image processor is written too. seed: of the weights. The same arguments write the same weights.
    dtype: "float32", or "bfloat16" for the same weights rounded. config: overrides fields of the transformers
    configuration. Raises ValueError for an unknown `arch`.
    """
    wrapped = {**WRAPPERS, **TEXT_ONLY}
    known = {**ARCHS, **FAMILIES, **HYBRIDS, **wrapped}
    if arch not in known:
        raise ValueError(f"arch {arch!r} is unknown: known architectures are {', '.join(known)}")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

    fields = wrapper_fields(arch, config) if arch in wrapped else {**_COMMON, **known[arch], **config}
    auto = AutoModelForImageTextToText if arch in wrapped else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(arch, **fields), dtype=torch.float32)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        _fill(model, generator)
        if arch in wrapped:
            fill_vision(model, generator)
    model.to(getattr(torch, dtype))
    model.config.dtype = dtype
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    path = Path(dir)
    model.save_pretrained(path, safe_serialization=True)
    tokenizer = make_tokenizer(TOKENS.get(arch, ()), named_tokens(arch))
    tokenizer.save_pretrained(path)
    save_processor(arch, path)
    save_names(arch, path)
    return path


_NORM = 0.5  # gain of the norms of the residual stream
_QK = 1.3  # scale of queries and keys: attention logits have a standard deviation of about 1.7
# scales of other weights, 1 by default, so that attention and routing are far from uniform, and MLPs contribute
_GAIN = {"q_proj": _QK / _NORM, "k_proj": _QK / _NORM, "v_proj": 0.5, "gate": 3.0, "router": 3.0, "down_proj": 2.0}
_GAIN["query_key_value"] = 1.6  # queries, keys and values are interleaved by head
_GAIN |= {"q_b_proj": _QK / _NORM, "kv_a_proj_with_mqa": _QK / _NORM, "kv_b_proj": 1.6}  # latent attention
_LAST_NORMS = ("norm", "ln_f")
_POSITIONS = ("wpe", "embed_positions")
_EMBEDDINGS = ("embed_tokens", "embed_in", "word_embeddings", "wte", "embed_tokens_per_layer", "lm_head", *_POSITIONS)
_XIELU = {"alpha_p": 0.388671875, "alpha_n": -1.140625}
"""Parameters of Apertus' activation. vLLM computes with them in bfloat16, where these values give small errors."""
_ROUTING_BIAS = ("expert_bias", "e_score_correction_bias")
_INPUT_FIRST = ("gpt_oss", "llama4_text")
"""Models whose expert weights are [experts, in, out] instead of [experts, out, in]."""


def _fill(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Draw all parameters outside the vision tower at random.

    Their scales keep rounding errors small and attention far from uniform. Attention kernels differ by a relative error
    of about 1e-6, and every layer propagates the error. Values are small, and layers add little to the embedding, so
    two float32 implementations stay within 1e-5 of each other. Norm gains and biases are random, so that tests detect a
    hook on the wrong side of a norm.
    """
    import torch

    whole: Any = model.config
    config, tied = whole.get_text_config(), getattr(whole, "tie_word_embeddings", False)
    gemma = config.model_type.startswith("gemma")
    centred = config.model_type.startswith(CENTRED) or config.model_type == "nemotron"
    centred = centred and not config.model_type.startswith("gemma4")
    embed = 0.3 / math.sqrt(config.hidden_size) if gemma else 0.3  # Gemma multiplies embeddings by sqrt(hidden_size)
    for name, weight in sorted(model.named_parameters()):
        if config is not whole and is_vision(name):
            continue
        leaf = name.split(".")[-2] if name.endswith((".weight", ".bias")) else name.split(".")[-1]
        noise = torch.randn(weight.shape, generator=generator)
        offset = 1.0 if centred and not name.endswith(".linear_attn.norm.weight") else 0.0
        if name.endswith(".bias"):
            weight.copy_(0.05 * noise)
        elif leaf in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"):
            size = (
                weight.shape[-1] ** -0.25 if config.model_type.startswith("gemma4") else 1.0
            )  # Gemma 4 does not scale attention logits
            weight.copy_(size * (_QK + 0.2 * noise) - offset)
        elif leaf in _XIELU:
            weight.fill_(_XIELU[leaf])
        elif leaf in _ROUTING_BIAS:
            weight.copy_((0.0 if config.model_type == "laguna" else 0.2) * noise)  # vLLM 0.32 does not load Laguna's
        elif weight.dim() == 1:
            gain = _NORM + 0.1 * noise
            # With gains of one sign and tied embeddings, every token would predict itself.
            weight.copy_((gain * noise.roll(1).sign() if leaf in _LAST_NORMS else gain) - offset)
        elif leaf in _EMBEDDINGS:
            weight.copy_((0.15 if leaf == "lm_head" else embed) * noise)
            if leaf == "lm_head" or (tied and leaf not in _POSITIONS):
                weight[: len(SPECIAL)] *= 0.1  # so that greedy decoding does not end early
                weight[VOCAB:] *= 0.1  # and generates no image tokens
        else:
            first = config.model_type == "gpt2" or (config.model_type in _INPUT_FIRST and weight.dim() == 3)
            axis = -2 if first else -1
            weight.copy_(_GAIN.get(leaf, 1.0) * noise / math.sqrt(weight.shape[axis]))
            if leaf in ("c_attn", "qkv_proj"):
                heads = weight.T if leaf == "c_attn" else weight
                values = config.num_attention_heads if leaf == "c_attn" else config.num_key_value_heads
                size = values * (getattr(config, "head_dim", None) or weight.shape[0] // values)
                heads[:-size] *= _GAIN["q_proj"]
                heads[-size:] *= _GAIN["v_proj"]
    for name, bias in sorted(model.named_buffers()):
        if name.endswith(_ROUTING_BIAS):
            bias.copy_(0.2 * torch.randn(bias.shape, generator=generator))
        elif name.endswith("layer_scalar"):
            bias.copy_(0.8 + 0.1 * torch.randn(bias.shape, generator=generator))
