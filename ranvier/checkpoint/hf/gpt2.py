"""GPT in Hugging Face's format, as its GPT-2: names, layout, config.json.

Hugging Face stores these weights as [in, out], and the rows of all queries before all keys before all values; here
weights are [out, in], and one head's query, key and value rows are together.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ranvier.checkpoint.hf.form import Form, TensorMapping, left_out, linear, read_settings, same, transposed, wrong_key
from ranvier.config.run import Transformer


def places(config: Transformer, head: str = "tokens") -> dict[str, TensorMapping]:
    """Our parameters, in our order, and their places there."""
    hidden = config.hidden
    found = {"embedding.token.weight": same("transformer.wte.weight", config.vocab, hidden),
             "embedding.position.weight": same("transformer.wpe.weight", config.sequence, hidden)}
    for layer in range(config.num_layers):
        prefix = f"transformer.h.{layer}"
        of_layer = {
            **linear("attention.norm", f"{prefix}.ln_1", hidden),
            "attention.qkv.weight": _qkv(f"{prefix}.attn.c_attn.weight", config.heads, 3 * hidden, hidden),
            "attention.qkv.bias": _qkv(f"{prefix}.attn.c_attn.bias", config.heads, 3 * hidden),
            **_conv1d("attention.projection", f"{prefix}.attn.c_proj", hidden, hidden),
            **linear("mlp.norm", f"{prefix}.ln_2", hidden),
            **_conv1d("mlp.fc1", f"{prefix}.mlp.c_fc", 4 * hidden, hidden),
            **_conv1d("mlp.fc2", f"{prefix}.mlp.c_proj", hidden, 4 * hidden)}
        found |= {f"layer{layer}.{name}": place for name, place in of_layer.items()}
    found |= linear("head.norm", "transformer.ln_f", hidden)
    return found | ({"head.projection.weight": same("lm_head.weight", config.vocab, hidden)} if config.untied else {})


def tied(config: Transformer) -> Mapping[str, str]:
    """The head's projection, if it is tied to the token embedding."""
    return {} if config.untied else {"head.projection.weight": "embedding.token.weight"}


def _conv1d(ours: str, theirs: str, *shape: int) -> dict[str, TensorMapping]:
    return {f"{ours}.weight": transposed(f"{theirs}.weight", *shape), f"{ours}.bias": same(f"{theirs}.bias", shape[0])}


def _qkv(name: str, heads: int, *shape: int) -> TensorMapping:
    def swapped(rows: Tensor, outer: int, inner: int) -> Tensor:
        return rows.reshape(outer, inner, -1, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)

    return TensorMapping(names=(name,), shapes=(shape[::-1],), shape=shape,
                         join=lambda tensors: swapped(tensors[0].t(), 3, heads),
                         part=lambda tensor: [swapped(tensor, heads, 3).t()])


# --- config.json -----------------------------------------------------------------------------------------------------

_SIZES = {"vocab_size": "vocab", "n_positions": "sequence", "n_embd": "hidden", "n_layer": "num_layers",
          "n_head": "heads"}
_FUNCTION = {
    "activation_function": ("gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
    "layer_norm_epsilon": (1e-5, (1e-5,)), "tie_word_embeddings": (True, (True, False)),
    "scale_attn_weights": (True, (True,)), "scale_attn_by_inverse_layer_idx": (False, (False,)),
    "add_cross_attention": (False, (False,)), "is_causal": (True, (True,)),
}


def write(config: Transformer, head: str = "tokens") -> dict[str, object]:
    """The content of config.json, the arguments of transformers.GPT2Config, for the same function as `config`'s."""
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": config.vocab,
        "n_positions": config.sequence, "n_embd": config.hidden, "n_layer": config.num_layers, "n_head": config.heads,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": not config.untied,
        "embd_pdrop": config.dropout, "resid_pdrop": config.dropout, "attn_pdrop": 0.0,
    }


def read(document: Mapping[str, object]) -> tuple[Transformer, list[str]]:
    """The inverse of `write`, for any config.json: (settings, notes on what they leave out).

    ModelError for a GPT-2 that does not compute the same as ours.
    """
    config = read_settings(document, _SIZES, _FUNCTION,
                           {"family": "gpt", "dropout": document.get("resid_pdrop", 0.1),
                            "untied": not document.get("tie_word_embeddings", True)})
    if document.get("n_inner") not in (None, 4 * config.hidden):
        raise wrong_key("gpt2-inner-size", "n_inner", f"must be null or 4 n_embd = {4 * config.hidden}",
                        document["n_inner"], "Name a model whose MLPs are four times as wide as its hidden size.")
    return config, left_out(document, config, {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1})


GPT2 = Form(title="GPT-2's language model", family="gpt", prefix="transformer.", places=places, read=read, write=write,
            per_layer=12, class_of={"tokens": "GPT2LMHeadModel"}, layers_key="n_layer",
            tied=tied,
            aside=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)", any_head=False)
"""aside: the causal mask, which old files list among the parameters."""
