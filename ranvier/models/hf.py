"""GPT parameters under Hugging Face's GPT-2 names, in both directions.

Hugging Face stores these weights as [in, out], and the rows of all queries before all keys before all values; here
weights are [out, in], and one head's query, key and value rows lie together. Both are rearrangements, so gradients
travel through the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ranvier.errors import ModelError
from ranvier.run import GPT

_LAYER = {
    "attention.norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.projection": "attn.c_proj",
    "mlp.norm": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
}


def names(config: GPT) -> dict[str, str]:
    """Our full parameter names -> Hugging Face's, in our order."""
    pairs = {"embedding.token.weight": "transformer.wte.weight", "embedding.position.weight": "transformer.wpe.weight"}
    for layer in range(config.num_layers):
        for ours, theirs in _LAYER.items():
            for kind in ("weight", "bias"):
                pairs[f"layer{layer}.{ours}.{kind}"] = f"transformer.h.{layer}.{theirs}.{kind}"
    for kind in ("weight", "bias"):
        pairs[f"head.norm.{kind}"] = f"transformer.ln_f.{kind}"
    return pairs | {"head.projection.weight": "lm_head.weight"}


def to_hf(parameters: Mapping[str, Tensor], config: GPT) -> dict[str, Tensor]:
    """Parameters (or gradients) under Hugging Face's names and in its layout. ModelError when one is missing."""
    found = {}
    for ours, theirs in names(config).items():
        tensor = _take(parameters, ours)
        if ".qkv." in ours:
            tensor = tensor.unflatten(0, (config.heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        found[theirs] = tensor.t().contiguous() if _is_transposed(ours) else tensor
    return found


def from_hf(parameters: Mapping[str, Tensor], config: GPT) -> dict[str, Tensor]:
    """The inverse of `to_hf`. A missing `lm_head.weight` is the token embedding, to which it is tied."""
    parameters = {"lm_head.weight": parameters.get("transformer.wte.weight"), **parameters}
    found = {}
    for ours, theirs in names(config).items():
        tensor = _take(parameters, theirs)
        tensor = tensor.t().contiguous() if _is_transposed(ours) else tensor
        if ".qkv." in ours:
            tensor = tensor.unflatten(0, (3, config.heads, -1)).transpose(0, 1).flatten(0, 2)
        found[ours] = tensor
    return found


def gpt2_config(config: GPT) -> dict[str, object]:
    """The content of config.json, the arguments of transformers.GPT2Config, for the same function as `config`'s."""
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": config.vocab,
        "n_positions": config.sequence, "n_embd": config.hidden, "n_layer": config.num_layers, "n_head": config.heads,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
        "embd_pdrop": config.dropout, "resid_pdrop": config.dropout, "attn_pdrop": 0.0,
    }


def _is_transposed(ours: str) -> bool:
    linear = ours.startswith("layer") and ".norm." not in ours
    return linear and ours.endswith(".weight")


def _take(parameters: Mapping[str, Tensor | None], name: str) -> Tensor:
    tensor = parameters.get(name)
    if tensor is None:
        raise ModelError("is missing", where=f"parameter {name}",
                         remedy="Give all parameters of a GPT-2 language model with model.num_layers layers.")
    return tensor
