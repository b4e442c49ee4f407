"""A language model in a GGUF file, written once as a folder in Hugging Face's format. Read and dequantised by `gguf`.

    architecture    model_type    what differs in GGUF
    llama           llama         rows of queries and keys are in pairs, as its rotary embedding needs them
    llama           mistral       the same, with a sliding window
    qwen2, qwen3, olmo2           only names
    gemma, gemma2                 norms have the 1 added that the model adds; Gemma 2's scale of scores is left out

Tensors are written one at a time: those in F16 and BF16 as they are, all others in fp32. Keys of the file that this
module does not know are refused, since they may change what is computed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ranvier.data.offline.gguf_tokenizer import write_tokenizer
from ranvier.errors import DataError
from ranvier.system.tensor_file import Slot, write_model

SHARD_BYTES = 1_000_000_000
ENDING = ".gguf"
"""Ending of the names of such files."""

_CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
            "qwen3": "Qwen3ForCausalLM", "olmo2": "Olmo2ForCausalLM", "gemma": "GemmaForCausalLM",
            "gemma2": "Gemma2ForCausalLM"}
_ARCHITECTURES = ("llama", "qwen2", "qwen3", "olmo2", "gemma", "gemma2")
_GEMMA = ("gemma", "gemma2")
_LAYERS_OF_27B = 46
"""Layers of Gemma 2 27B, the only one whose scores are scaled by hidden / heads instead of the width of a head, as in
llama.cpp."""
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
             "attn_k_norm": "self_attn.k_norm", "post_attention_norm": "post_attention_layernorm",
             "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
             "ffn_down": "mlp.down_proj", "post_ffw_norm": "post_feedforward_layernorm"}
_IN_GEMMA2 = {"ffn_norm": "pre_feedforward_layernorm"}
_FREQUENCIES = "rope_freqs.weight"
"""Divisors of the rotary frequencies, in which GGUF has Llama 3's scaling."""
_SIZES = {"embedding_length": "hidden_size", "block_count": "num_hidden_layers",
          "attention.head_count": "num_attention_heads", "feed_forward_length": "intermediate_size",
          "context_length": "max_position_embeddings"}
_READ = {*_SIZES, "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length",
         "attention.value_length", "attention.sliding_window", "rope.freq_base", "rope.dimension_count",
         "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""Soft caps of Gemma 2, under the same names in both formats, with llama.cpp's values for files that have none."""
_WITHOUT_EFFECT = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout"}
_REMEDY = "Name the model's folder in Hugging Face's format instead."


@dataclass(frozen=True, kw_only=True)
class _File:
    """A GGUF file. values: of its keys; tensors: of `gguf`, by their names in the file."""

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture"))

    def architecture_keys(self) -> dict[str, Any]:
        """The keys of its architecture, without that prefix."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix): value for key, value in self.values.items() if key.startswith(prefix)}

    def error(self, code: str, what: str, value: object = None, remedy: str = _REMEDY) -> DataError:
        return DataError(what, code=code, where=str(self.path), value=value, remedy=remedy)


def write_folder(path: Path, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the model in the GGUF file `path` to the empty folder `folder`: config.json, safetensors, tokenizer, chat
    template and generation configuration.

    DataError if it is damaged, its architecture, quantisation or tokenizer is not supported, or `gguf` is missing;
    OSError if the folder cannot be written. shard_bytes: size of the largest file of tensors, unless one tensor is
    larger.
    """
    file = _open(path)
    config = _config(file)
    names = _names(file)
    ends = write_tokenizer(file.values, folder, str(path), max_length=config["max_position_embeddings"])
    (folder / "config.json").write_text(json.dumps({**config, **ends}, indent=2) + "\n", encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n", encoding="utf-8")
    write_model(folder, _slots(file, names), _values(file, names, config), shard_bytes)


def _open(path: Path) -> _File:
    try:
        import gguf
    except ImportError as error:
        raise DataError("is a GGUF file, and the package `gguf`, which reads it, is not installed",
                        code="gguf-package-missing", where=str(path),
                        remedy="Run pip install 'ranvier[hub]', or name a folder in Hugging Face's format.") from error
    try:
        reader = _reader(gguf, path)
        values = {name: field.contents() for name, field in reader.fields.items()}
        file = _File(path=path, values=values, tensors={tensor.name: tensor for tensor in reader.tensors})
    except Exception as error:  # the package raises many kinds for damaged files
        raise DataError("is not a GGUF file, or is damaged", code="gguf-damaged", where=str(path),
                        value=f"{type(error).__name__}: {error}", remedy="Fetch it again.") from error
    if file.values.get("split.count", 1) not in (0, 1):
        raise file.error("gguf-of-several-files", "is one of several files of a model", file.values["split.count"],
                         "Merge them (llama-gguf-split --merge), and name the merged file.")
    if file.architecture not in _ARCHITECTURES:
        raise file.error("gguf-architecture",
                         f"has an architecture that is not read from GGUF: {', '.join(_ARCHITECTURES)} are",
                         file.architecture)
    return file


def _reader(gguf: Any, path: Path) -> Any:
    """Open the file with the package's reader. It reads nothing, without an error, beyond the end of a file, so a
    damaged length of an array would make it read, and its lists grow, endlessly."""

    class Reader(gguf.GGUFReader):  # type: ignore[misc]  # the package has no types
        def _get(self, offset: int, dtype: Any, count: int = 1, *more: Any, **named: Any) -> Any:
            found = super()._get(offset, dtype, count, *more, **named)
            if len(found) != count:
                raise ValueError("the file ends early")
            return found

    return Reader(path)


# --- config.json -----------------------------------------------------------------------------------------------------


def _config(file: _File) -> dict[str, Any]:
    """The content of config.json."""
    own = file.architecture_keys()
    for key, value in own.items():
        known = _READ | _WITHOUT_EFFECT | (set(_CAPS) if file.architecture == "gemma2" else set())
        if key not in known and value not in ((True,) if key == "attention.causal" else (0, False)):
            raise file.error("gguf-setting-not-supported",
                             f"has a setting {file.architecture}.{key} that is not supported", str(value)[:80])
    for key in ("attention.head_count", "block_count", "embedding_length", "feed_forward_length", "context_length",
                "attention.layer_norm_rms_epsilon"):
        if isinstance(own.get(key), bool) or not isinstance(own.get(key), (int, float)) or not own[key] > 0:
            raise file.error("gguf-size-missing",
                             f"has no positive number {file.architecture}.{key}, the same in all layers", own.get(key))
    heads, hidden = own["attention.head_count"], own["embedding_length"]
    width = own.get("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, width) != width:
            raise file.error("gguf-head-width",
                             f"has a {file.architecture}.{key} other than the width {width} of a head", own[key])
    kv_heads = own.get("attention.head_count_kv", heads)
    if not isinstance(kv_heads, int) or not 0 < kv_heads <= heads:
        raise file.error("gguf-kv-heads",
                         f"has no number {file.architecture}.attention.head_count_kv that fits {heads} heads", kv_heads)
    if "token_embd.weight" not in file.tensors or len(file.tensors["token_embd.weight"].shape) != 2:
        raise file.error("gguf-without-embedding", "has no matrix token_embd.weight")
    window = own.get("attention.sliding_window")
    model_type = "mistral" if file.architecture == "llama" and window else file.architecture
    config = {
        "model_type": model_type, "architectures": [_CLASSES[model_type]],
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]), **{theirs: own[key] for key, theirs in
                                                                         _SIZES.items()},
        "num_key_value_heads": kv_heads, "head_dim": width,
        "rms_norm_eps": _shortest(own["attention.layer_norm_rms_epsilon"]), "hidden_act": "silu",
        "rope_theta": _shortest(own.get("rope.freq_base", 10000.0)), "rope_scaling": _rope(file, own, width),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors}
    if window and model_type not in ("mistral", "gemma2"):
        raise file.error("gguf-sliding-window", "has a sliding window, which is not supported with this architecture",
                         window)
    if model_type in _GEMMA:
        config |= _gemma(file, own, width)
    return config | ({"sliding_window": window} if window else {})


def _gemma(file: _File, own: Mapping[str, Any], width: int) -> dict[str, object]:
    """Keys of config.json that only Gemma and Gemma 2 have."""
    config: dict[str, object] = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    if file.architecture == "gemma2":
        is_27b = own["block_count"] == _LAYERS_OF_27B
        config["query_pre_attn_scalar"] = own["embedding_length"] // own["attention.head_count"] if is_27b else width
        config |= {cap: _shortest(value) if (value := own.get(cap, usual)) else None for cap, usual in _CAPS.items()}
    return config


def _shortest(value: float) -> float:
    """The decimal number that an fp32 number stands for: 1e-05 for 9.999999747e-06."""
    return float(str(np.float32(value)))


def _rope(file: _File, own: Mapping[str, Any], width: int) -> dict[str, object] | None:
    """rope_scaling of config.json."""
    kind = own.get("rope.scaling.type", "none")
    if _FREQUENCIES in file.tensors:
        if kind != "none":
            raise file.error("gguf-two-rope-scalings", f"has two kinds of rotary scaling: {kind}, and {_FREQUENCIES}")
        return _llama3(file, np.asarray(file.tensors[_FREQUENCIES].data, np.float64), own, width)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise file.error("gguf-rope-scaling", "has a rotary scaling that is not supported", kind)
    found: dict[str, object] = {"rope_type": kind, "factor": _shortest(own.get("rope.scaling.factor", 1.0))}
    if kind == "yarn":
        found["original_max_position_embeddings"] = own.get("rope.scaling.original_context_length",
                                                            own["context_length"])
    return found


def _llama3(file: _File, divisors: np.ndarray, own: Mapping[str, Any], width: int) -> dict[str, object]:
    """Llama 3's scaling. GGUF stores only its result; its other numbers are the same in all published models."""
    factor, low, high, positions = float(divisors.max(initial=1.0)), 1.0, 4.0, 8192
    frequencies = own.get("rope.freq_base", 10000.0) ** -(np.arange(0, width, 2) / width)
    smooth = np.clip((positions * frequencies / (2 * np.pi) - low) / (high - low), 0, 1)
    if divisors.shape != smooth.shape or not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
        raise file.error("gguf-rope-frequencies", f"has a rotary scaling ({_FREQUENCIES}) that is not Llama 3's")
    return {"rope_type": "llama3", "factor": _shortest(factor), "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": positions}


# --- tensors ---------------------------------------------------------------------------------------------------------


def _names(file: _File) -> dict[str, str]:
    """Names in GGUF -> names in Hugging Face's format."""
    found, in_layer = {}, _IN_LAYER | (_IN_GEMMA2 if file.architecture == "gemma2" else {})
    for name in file.tensors:
        if name == _FREQUENCIES:
            continue
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        outside = re.fullmatch(r"(\w+)\.weight", name)
        if layer and layer[2] in _IN_LAYER:
            found[name] = f"model.layers.{int(layer[1])}.{in_layer[layer[2]]}.{layer[3]}"
        elif outside and outside[1] in _OUTSIDE:
            found[name] = f"{_OUTSIDE[outside[1]]}.weight"
        else:
            raise file.error("gguf-unknown-tensor",
                             f"has a tensor that {file.architecture} does not have, or that is not supported", name)
    return found


_AS_THEY_ARE = {"F16": torch.float16, "BF16": torch.bfloat16}


def _slots(file: _File, names: Mapping[str, str]) -> list[Slot]:
    """Slots of the tensors to write; GGUF has sizes in the opposite order."""
    return [Slot(name=called, dtype=_AS_THEY_ARE.get(file.tensors[name].tensor_type.name, torch.float32),
                 shape=tuple(map(int, reversed(file.tensors[name].shape)))) for name, called in names.items()]


def _values(file: _File, names: Mapping[str, str], config: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors of these names, as transformers has them."""
    for name in names:
        value = _dequantize(file, name)
        if file.architecture == "llama" and (found := re.search(r"attn_([qk])\.", name)):
            heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
            if len(value) % (2 * heads):
                raise file.error("gguf-rotary-rows", f"has a tensor {name} whose rows are not pairs of {heads} heads",
                                 len(value))
            # Rows of queries or keys as transformers rotates them, the first half of a head with its second; in GGUF's
            # order each row is next to the row with which it is rotated.
            value = value.view(heads, -1, 2, *value.shape[1:]).transpose(1, 2).flatten(0, 2)
        if file.architecture in _GEMMA and "norm" in name:
            value -= 1
        yield value


def _dequantize(file: _File, name: str) -> Tensor:
    from gguf.quants import dequantize

    tensor = file.tensors[name]
    kind: str = tensor.tensor_type.name
    if kind == "F16":
        return torch.from_numpy(np.array(tensor.data))
    try:
        value = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), np.float32))
    except ValueError as error:
        raise file.error("gguf-tensor-damaged", f"has a tensor {name} that is damaged", str(error),
                         "Fetch it again.") from error
    except NotImplementedError as error:
        raise file.error("gguf-quantisation",
                         f"has a tensor {name} in a quantisation that the package `gguf` cannot undo", kind,
                         "Take the model in another one, such as Q8_0 or F16.") from error
    return value.bfloat16() if kind == "BF16" else value
