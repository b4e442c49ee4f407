"""Sizes of published models, by name: settings of [model] that `model.preset` stands for (`presets.toml`).

Training sequences have 2,048 tokens unless a run sets another length.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from importlib import resources
from types import MappingProxyType

from ranvier.errors import ConfigError
from ranvier.system.untrusted_file import parse_toml

_Settings = Mapping[str, object]

_SIZES = ("num_layers", "hidden", "heads", "kv_heads", "intermediate")
COMPUTED = ("vocab", "hidden", "num_layers", "heads", "kv_heads", "head_dim", "intermediate", "norm_epsilon",
            "activation", "bias", "tied", "norms", "norm_offset", "qk_norm", "query_pre_attn_scalar", "window",
            "full_every", "full_layers", "nope_layers", "rope_base", "window_rope_base", "rope_scaling", "rope_factor",
            "rope_positions", "rope_limits", "rope_magnitude", "embedding_scale", "residual_multiplier",
            "logits_scaling", "attention_softcap", "logit_softcap")
"""Settings of [model] that determine what a Llama computes."""
OF_WEIGHTS = (*COMPUTED, "max_positions", "untied", "patch_size")
"""Settings of [model] that pretrained weights determine, regardless of the recipe."""

SEQUENCE = 2048
"""Tokens in a training sequence of a preset or a folder, if the model has that many positions."""
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


def _read() -> Iterator[tuple[str, _Settings]]:
    text = (resources.files("ranvier") / "config" / "presets.toml").read_text(encoding="utf-8")
    for group in parse_toml(text).values():
        models = group.pop("models")
        for name, own in models.items():
            settings = {"family": "llama", **dict(zip(_SIZES, own.pop("sizes"), strict=True)), **group, **own}
            yield name, MappingProxyType(settings | {"sequence": min(settings["max_positions"], SEQUENCE)})


PRESETS: Mapping[str, _Settings] = MappingProxyType(dict(_read()))
"""Name -> settings of [model], in a recipe's form."""


def settings_of(name: object) -> dict[str, object]:
    """Dotted settings of a preset, such as model.hidden. ConfigError if there is no preset of this name."""
    if not isinstance(name, str) or name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, n=1, cutoff=0.4)
        raise ConfigError("is not a preset", code="unknown-preset", where="model.preset", value=name,
                          remedy=f"{f'Did you mean {near[0]}? ' if near else ''}Choose one of: {', '.join(PRESETS)}.")
    return {f"model.{setting}": value for setting, value in PRESETS[name].items()}
