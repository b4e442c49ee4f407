"""Sizes of published models, by name: settings of [model] that `model.preset` stands for. Pure.

Each is the config.json that was published with the weights. Training sequences have 2,048 tokens unless a run sets
another length; `max_positions` is the published maximum.

Sources: copies of these files in public code, read on 2026-11-24. litgpt's configurations for Llama, Mistral, Qwen,
Gemma, OLMo 2 (7B, 13B) and SmolLM2, Google's gemma_pytorch, AI2's training configurations for OLMo 2 7B and 13B, and
fairseq2's for OLMo 2 1B. Tied embeddings (tie_word_embeddings) and Mistral 0.3's rotary base: mlc-llm's model presets
(Llama 2, 3, 3.1, 3.2, Mistral, Qwen 3, SmolLM2), copies of single files (Qwen 2.5, Qwen 3 14B and 32B,
OLMo 2 13B), AI2's configuration and fairseq2's (OLMo 2 7B, 1B), and the defaults of transformers (Gemma, whose files
leave it out). Only Llama 3.1 405B's was not seen: with untied embeddings it has the published number of parameters.
"""


from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ranvier.errors import ConfigError

_Settings = Mapping[str, object]


_NAMES = ("num_layers", "hidden", "heads", "kv_heads", "intermediate", "vocab", "max_positions")


OF_WEIGHTS = (*_NAMES, "norm_epsilon", "head_dim", "activation", "bias", "tied", "untied", "patch_size", "norms",
              "norm_offset", "qk_norm", "query_pre_attn_scalar", "window", "full_every", "full_layers",
              "nope_layers", "rope_base", "window_rope_base", "rope_scaling", "rope_factor", "rope_positions",
              "rope_limits", "rope_magnitude", "embedding_scale", "residual_multiplier", "logits_scaling",
              "attention_softcap", "logit_softcap")
"""Settings of [model] that pretrained weights decide, whatever a recipe says."""


SEQUENCE = 2048
"""Tokens in a training sequence of a preset or a folder, where it has positions for so many."""
PRETRAINING: _Settings = MappingProxyType({
    "precision": "bf16", "train.steps": 1000, "train.learning_rate": 3e-4, "train.warmup_steps": 100,
    "train.schedule": "cosine", "train.final_learning_rate": 3e-5, "optim.betas": (0.9, 0.95),
    "optim.weight_decay": 0.1, "optim.clip_norm": 1.0})
"""Settings of `ranvier train PRESET`: as Llama's published runs (Touvron et al., 2023, section 2.3), for fewer
steps."""
FINE_TUNING: _Settings = MappingProxyType({
    "precision": "bf16", "train.steps": 1000, "train.learning_rate": 2e-5, "train.warmup_steps": 30,
    "train.schedule": "cosine", "optim.clip_norm": 1.0})
"""Settings of `ranvier train FOLDER`: as Alpaca's and Tulu's published fine-tuning of 7B models, with clipping."""


def _sizes(*sizes: int, **more: object) -> _Settings:
    """sizes: in the order of `_NAMES`."""
    named = dict(zip(_NAMES, sizes, strict=True))
    return {"family": "llama", **named, "sequence": min(named["max_positions"], SEQUENCE), "norm_epsilon": 1e-5, **more}


def _llama3(*sizes: int, factor: float = 8.0, tied: bool = False) -> _Settings:
    return _sizes(*sizes, 128256, 131072, rope_base=500000.0, rope_scaling="llama3", rope_factor=factor,
                  rope_positions=8192, rope_limits=[1.0, 4.0], tied=tied)


def _qwen2(*sizes: int, max_positions: int = 131072, tied: bool = True) -> _Settings:
    return _sizes(*sizes, max_positions, rope_base=1e6, norm_epsilon=1e-6, bias="qkv", tied=tied)


def _qwen3(*sizes: int, tied: bool = False) -> _Settings:
    return _sizes(*sizes, 151936, 40960, head_dim=128, rope_base=1e6, norm_epsilon=1e-6, qk_norm="head",
                  tied=tied)


def _gemma(*sizes: int, **more: object) -> _Settings:
    return _sizes(*sizes, 256000, 8192, **{
        "head_dim": 256, "norm_epsilon": 1e-6, "tied": True, "activation": "gelu-tanh", "norm_offset": 1,
        "embedding_scale": "sqrt-hidden", **more})


def _gemma2(*sizes: int, query_pre_attn_scalar: float = 256.0, head_dim: int = 256) -> _Settings:
    return _gemma(*sizes, norms="both", window=4096, full_every=2, attention_softcap=50.0, logit_softcap=30.0,
                  query_pre_attn_scalar=query_pre_attn_scalar, head_dim=head_dim)


def _olmo2(*sizes: int) -> _Settings:
    return _sizes(*sizes, 100352, 4096, rope_base=500000.0, norm_epsilon=1e-6, norms="after", qk_norm="all")


PRESETS: Mapping[str, _Settings] = MappingProxyType({
    "llama-2-7b": _sizes(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": _sizes(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": _sizes(80, 8192, 64, 8, 28672, 32000, 4096),
    "llama-3-8b": _sizes(32, 4096, 32, 8, 14336, 128256, 8192, rope_base=500000.0),
    "llama-3.1-8b": _llama3(32, 4096, 32, 8, 14336),
    "llama-3.1-70b": _llama3(80, 8192, 64, 8, 28672),
    "llama-3.1-405b": _llama3(126, 16384, 128, 8, 53248),
    "llama-3.2-1b": _llama3(16, 2048, 32, 8, 8192, factor=32.0, tied=True),
    "llama-3.2-3b": _llama3(28, 3072, 24, 8, 8192, factor=32.0, tied=True),
    "mistral-7b-v0.1": _sizes(32, 4096, 32, 8, 14336, 32000, 32768, window=4096),
    "mistral-7b": _sizes(32, 4096, 32, 8, 14336, 32768, 32768, rope_base=1e6),
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, 151936, max_positions=32768),
    "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, 151936),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944, 152064, tied=False),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 8, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 25600),
    "gemma-2b": _gemma(18, 2048, 8, 1, 16384),
    "gemma-7b": _gemma(28, 3072, 16, 16, 24576),
    "gemma-2-2b": _gemma2(26, 2304, 8, 4, 9216),
    "gemma-2-9b": _gemma2(42, 3584, 16, 8, 14336),
    "gemma-2-27b": _gemma2(46, 4608, 32, 16, 36864, query_pre_attn_scalar=144.0, head_dim=128),
    "olmo-2-1b": _olmo2(16, 2048, 16, 16, 8192),
    "olmo-2-7b": _olmo2(32, 4096, 32, 32, 11008),
    "olmo-2-13b": _olmo2(40, 5120, 40, 40, 13824),
    "smollm2-135m": _sizes(30, 576, 9, 3, 1536, 49152, 8192, rope_base=100000.0, tied=True),
    "smollm2-360m": _sizes(32, 960, 15, 5, 2560, 49152, 8192, rope_base=100000.0, tied=True),
    "smollm2-1.7b": _sizes(24, 2048, 32, 32, 8192, 49152, 8192, rope_base=130000.0, tied=True),
})
"""Name -> settings of [model], as a recipe has them."""


def settings_of(name: object) -> dict[str, object]:
    """Dotted settings of a preset, such as model.hidden. ConfigError where there is none of the name."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError("is not a preset", code="unknown-preset", where="model.preset", value=name,
                          remedy=f"Choose one of: {', '.join(PRESETS)}.")
    return {f"model.{setting}": value for setting, value in PRESETS[name].items()}
