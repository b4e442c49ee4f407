"""GPT parameters under Hugging Face's GPT-2 names, in both directions, one by one or all at once.

Hugging Face stores these weights as [in, out], and the rows of all queries before all keys before all values; here
weights are [out, in], and one head's query, key and value rows lie together. Both are rearrangements, so gradients
travel through the same functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from ranvier.errors import ModelError
from ranvier.models import gpt
from ranvier.run import Transformer

_LAYER = {
    "attention.norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.projection": "attn.c_proj",
    "mlp.norm": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
}
TIED = {"head.projection.weight": "embedding.token.weight"}
"""Our parameters that are others, which own them."""


def names(config: Transformer) -> dict[str, str]:
    """Our full parameter names -> Hugging Face's, in our order."""
    pairs = {"embedding.token.weight": "transformer.wte.weight", "embedding.position.weight": "transformer.wpe.weight"}
    for layer in range(config.num_layers):
        for ours, theirs in _LAYER.items():
            for kind in ("weight", "bias"):
                pairs[f"layer{layer}.{ours}.{kind}"] = f"transformer.h.{layer}.{theirs}.{kind}"
    for kind in ("weight", "bias"):
        pairs[f"head.norm.{kind}"] = f"transformer.ln_f.{kind}"
    return pairs | {"head.projection.weight": "lm_head.weight"}


def shape(ours: str, config: Transformer) -> tuple[int, ...]:
    """The shape of one of our parameters, computed without building anything, so that no size is too large for it."""
    hidden = config.hidden
    if ours in ("embedding.token.weight", "head.projection.weight"):
        return (config.vocab, hidden)
    if ours == "embedding.position.weight":
        return (config.sequence, hidden)
    rows, columns = {"qkv": (3 * hidden, hidden), "projection": (hidden, hidden), "fc1": (4 * hidden, hidden),
                     "fc2": (hidden, 4 * hidden), "norm": (hidden, 0)}[ours.split(".")[-2]]
    return (rows, columns) if _is_transposed(ours) else (rows,)


def shape_there(ours: str, config: Transformer) -> tuple[int, ...]:
    """The shape that Hugging Face gives the parameter that we call `ours`."""
    return shape(ours, config)[::-1] if _is_transposed(ours) else shape(ours, config)


def tensor_to_hf(ours: str, tensor: Tensor, config: Transformer) -> Tensor:
    """Our parameter `ours` (or its gradient) in Hugging Face's layout."""
    if ".qkv." in ours:
        tensor = tensor.unflatten(0, (config.heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return tensor.t().contiguous() if _is_transposed(ours) else tensor


def tensor_from_hf(ours: str, tensor: Tensor, config: Transformer) -> Tensor:
    """The inverse of `tensor_to_hf`."""
    tensor = tensor.t().contiguous() if _is_transposed(ours) else tensor
    if ".qkv." in ours:
        tensor = tensor.unflatten(0, (3, config.heads, -1)).transpose(0, 1).flatten(0, 2)
    return tensor


def to_hf(parameters: Mapping[str, Tensor], config: Transformer) -> dict[str, Tensor]:
    """Parameters (or gradients) under Hugging Face's names and in its layout. ModelError when one is missing."""
    return {theirs: tensor_to_hf(ours, _take(parameters, ours), config) for ours, theirs in names(config).items()}


def from_hf(parameters: Mapping[str, Tensor], config: Transformer) -> dict[str, Tensor]:
    """The inverse of `to_hf`. A missing `lm_head.weight` is the token embedding, to which it is tied."""
    parameters = {"lm_head.weight": parameters.get("transformer.wte.weight"), **parameters}
    return {ours: tensor_from_hf(ours, _take(parameters, theirs), config) for ours, theirs in names(config).items()}


# --- config.json -----------------------------------------------------------------------------------------------------

_SIZES = {"vocab_size": "vocab", "n_positions": "sequence", "n_embd": "hidden", "n_layer": "num_layers",
          "n_head": "heads"}
_FUNCTION = {
    "model_type": (None, ("gpt2",)), "activation_function": ("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
    "layer_norm_epsilon": (1e-5, (1e-5,)), "tie_word_embeddings": (True, (True,)),
    "scale_attn_weights": (True, (True,)), "scale_attn_by_inverse_layer_idx": (False, (False,)),
    "add_cross_attention": (False, (False,)),
}
"""What else decides the function: Hugging Face's default, and the values that are what `gpt` computes."""
CONFIG_KEYS = frozenset({*_SIZES, *_FUNCTION, "n_inner", "embd_pdrop", "resid_pdrop", "attn_pdrop"})
"""The keys of config.json that are looked at."""
_adapter = TypeAdapter(Transformer)


def gpt2_config(config: Transformer) -> dict[str, object]:
    """The content of config.json, the arguments of transformers.GPT2Config, for the same function as `config`'s."""
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": config.vocab,
        "n_positions": config.sequence, "n_embd": config.hidden, "n_layer": config.num_layers, "n_head": config.heads,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
        "embd_pdrop": config.dropout, "resid_pdrop": config.dropout, "attn_pdrop": 0.0,
    }


def from_gpt2_config(document: Mapping[str, object]) -> tuple[Transformer, list[str]]:
    """The inverse of `gpt2_config`, for any config.json: the model, and what of the training it does not have.

    ModelError when it is of another architecture, or of a GPT-2 that computes something else than `gpt`.
    """
    for key, (default, allowed) in _FUNCTION.items():
        value = document.get(key, default)
        if not isinstance(value, (str, int, float)) or value not in allowed:
            raise ModelError(f"must be {' or '.join(map(str, allowed))}", where=f"{key} in config.json", value=value,
                             remedy="Import a GPT-2: other architectures, and others of its functions, are not known.")
    for key in _SIZES:
        if key not in document:
            raise ModelError("is missing", where=f"{key} in config.json",
                             remedy="Take config.json from where the model comes from.")
    dropouts = {key: document.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    try:
        # Of JSON, strict reading takes no text or truth value for a number, but a dict for a dataclass.
        config = _adapter.validate_json(json.dumps({**{ours: document[key] for key, ours in _SIZES.items()},
                                                    "dropout": dropouts["resid_pdrop"]}), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        ours = str(first["loc"][0])
        key = next((key for key, name in _SIZES.items() if name == ours), "resid_pdrop")
        raise ModelError(f"cannot be: {first['msg']}", where=f"{key} in config.json", value=first["input"],
                         remedy="Take config.json from where the model comes from.") from error
    if document.get("n_inner") not in (None, 4 * config.hidden):
        raise ModelError(f"must be null or 4 n_embd = {4 * config.hidden}", where="n_inner in config.json",
                         value=document["n_inner"], remedy="Import a model whose MLPs are four times as wide as it is.")
    for problem in gpt.problems(config):
        raise ModelError(f"does not divide n_embd {config.hidden}", where="n_head in config.json", value=config.heads,
                         remedy="Take config.json from where the model comes from.") from problem
    return config, [f"{key} {value} is left out: here dropout is {config.dropout:g} for embeddings and sublayers, and "
                    f"attention has none" for key, value in dropouts.items()
                    if value != (0 if key == "attn_pdrop" else config.dropout)]


def _is_transposed(ours: str) -> bool:
    linear = ours.startswith("layer") and ".norm." not in ours
    return linear and ours.endswith(".weight")


def _take(parameters: Mapping[str, Tensor | None], name: str) -> Tensor:
    tensor = parameters.get(name)
    if tensor is None:
        raise ModelError("is missing", where=f"parameter {name}",
                         remedy="Give all parameters of a GPT-2 language model with model.num_layers layers.")
    return tensor
