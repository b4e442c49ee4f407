"""Settings in a model's generation_config.json, which transformers applies by default."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ranvier.system.untrusted_file import json_object

_FILE = "generation_config.json"
_MOST_BYTES = 1 << 24
_FLAGS: Mapping[str, object] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
"""Sampling fields that are flags of `generate`, each with its neutral value."""
_SAMPLING: Mapping[str, object] = {"min_p": 0.0, "typical_p": 1.0, "top_h": None, "epsilon_cutoff": 0.0,
                                   "eta_cutoff": 0.0}
"""Sampling fields that are not supported, each with its neutral value."""
_LENGTHS: Mapping[str, object] = {"max_new_tokens": None, "max_length": 20}
"""Limits in place of which `generate` has `--max-tokens`, each with transformers' default."""
_OTHERS: Mapping[str, object] = {
    "num_beams": 1, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0,
    "min_length": 0, "min_new_tokens": 0, "bad_words_ids": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "sequence_bias": None,
    "exponential_decay_length_penalty": None, "guidance_scale": 1.0, "stop_strings": None, "penalty_alpha": 0.0,
    "dola_layers": None, "watermarking_config": None, "token_healing": False, "constraints": None,
    "force_words_ids": None}
"""Other fields that are not supported, each with its neutral value."""


def repetition_penalty(folder: Path) -> float:
    """The repetition penalty of the model in `folder`; 1 if it has no valid one."""
    found = json_object(folder / _FILE, _MOST_BYTES).get("repetition_penalty")
    return float(found) if isinstance(found, int | float) and 0 < found < float("inf") else 1.0


def not_followed(folder: Path, *, samples: bool, given: Collection[str]) -> str:
    """A line for the user about the settings of the model in `folder` that `generate` does not apply; empty if there
    are none. samples: tokens are drawn. given: flags that the user has set, which override the settings."""
    settings = json_object(folder / _FILE, _MOST_BYTES)
    draws = samples and settings.get("do_sample") is True
    flags = {name: value for name, value in _changing(settings, _FLAGS).items() if draws and name not in given}
    others = _changing(settings, {**(_SAMPLING if draws else {}), **_OTHERS})
    lengths = {} if "max_tokens" in given else _changing(settings, _LENGTHS)
    parts = []
    if others:
        parts.append(f"{', '.join(f'{name} {value}' for name, value in others.items())}: not supported by generate")
    if flags:
        words = (f"--{name.replace('_', '-')} {value}" for name, value in flags.items())
        parts.append(f"{', '.join(flags)}: not read, give {' '.join(words)}")
    if lengths:
        parts.append(f"{', '.join(f'{name} {value}' for name, value in lengths.items())}: not read, give --max-tokens")
    return f"{folder / _FILE} names {'; '.join(parts)}" if parts else ""


def _changing(settings: Mapping[str, Any], neutral: Mapping[str, object]) -> dict[str, object]:
    """The fields of `neutral` that have another value than the neutral one."""
    return {name: settings[name] for name, none in neutral.items() if settings.get(name) not in (None, none, [])}
