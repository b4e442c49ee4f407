"""The vision transformer, and DINOv2 as one, in Hugging Face's format: names, layout, config.json.

Queries, keys and values are separate tensors there; here the rows of one head are together. The projection of patches
is a convolution there. DINOv2's layer scales are multiplied into the projections before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ranvier.checkpoint.hf import form as hf
from ranvier.config.run import Transformer
from ranvier.models.family import inner_width, num_classes
from ranvier.models.vit import CHANNELS, NORM_EPSILON, num_tokens

_VIT = {"norm1": "layernorm_before", "norm2": "layernorm_after", "fc1": "intermediate.dense", "fc2": "output.dense"}
_DINOV2 = {"norm1": "norm1", "norm2": "norm2", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}


def places(config: Transformer, head: str = "classes", *, dinov2: bool = False) -> dict[str, hf.TensorMapping]:
    """Our parameters, in our order, and their places there. dinov2: with its names, and without a classifier."""
    hidden, width, patch = config.hidden, inner_width(config), config.patch_size
    base, called = ("dinov2", _DINOV2) if dinov2 else ("vit", _VIT)
    projection = f"{base}.embeddings.patch_embeddings.projection"
    tokens = num_tokens(config)
    found = {
        "embedding.patch.weight": hf.same(f"{projection}.weight", hidden, CHANNELS * patch ** 2,
                                          theirs=(hidden, CHANNELS, patch, patch)),
        "embedding.patch.bias": hf.same(f"{projection}.bias", hidden),
        "embedding.patch.first": hf.same(f"{base}.embeddings.cls_token", hidden, theirs=(1, 1, hidden)),
        "embedding.position.weight": hf.same(f"{base}.embeddings.position_embeddings", tokens, hidden,
                                             theirs=(1, tokens, hidden))}
    for layer in range(config.num_layers):
        prefix = f"{base}.encoder.layer.{layer}"
        for kind, columns in (("weight", (hidden,)), ("bias", ())):
            wide = (width,) if columns else ()
            output, fc2 = f"{prefix}.attention.output.dense.{kind}", f"{prefix}.{called['fc2']}.{kind}"
            of_layer = {
                "attention.norm": hf.same(f"{prefix}.{called['norm1']}.{kind}", hidden),
                "attention.qkv": hf.parts_of_heads([f"{prefix}.attention.attention.{part}.{kind}" for part in (
                    "query", "key", "value")], config.heads, 3 * hidden, *columns),
                "attention.projection": hf.scaled(output, f"{prefix}.layer_scale1.lambda1", hidden, *columns)
                if dinov2 else hf.same(output, hidden, *columns),
                "mlp.norm": hf.same(f"{prefix}.{called['norm2']}.{kind}", hidden),
                "mlp.fc1": hf.same(f"{prefix}.{called['fc1']}.{kind}", width, *columns),
                "mlp.fc2": hf.scaled(fc2, f"{prefix}.layer_scale2.lambda1", hidden, *wide)
                if dinov2 else hf.same(fc2, hidden, *wide),
            }
            found |= {f"layer{layer}.{name}.{kind}": place for name, place in of_layer.items()}
    found |= hf.linear("head.norm", f"{base}.layernorm", hidden)
    return found if dinov2 else found | hf.linear("head.classifier", "classifier", num_classes(config), hidden)


_SIZES = {"hidden_size": "hidden", "num_hidden_layers": "num_layers", "num_attention_heads": "heads",
          "image_size": "image_size", "patch_size": "patch_size"}
_FUNCTION = {"hidden_act": ("gelu", ("gelu",)), "qkv_bias": (True, (True,)), "num_channels": (3, (3,))}
_DROPS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def write(config: Transformer, head: str = "classes") -> dict[str, object]:
    """The content of config.json, the arguments of transformers.ViTConfig, for the same function as `config`'s."""
    return {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": config.hidden,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.heads,
        "intermediate_size": inner_width(config), "hidden_act": "gelu", "qkv_bias": True,
        "layer_norm_eps": config.norm_epsilon or NORM_EPSILON, "image_size": config.image_size,
        "patch_size": config.patch_size, "num_channels": CHANNELS, "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0, **hf.numbered_labels(num_classes(config)),
    }


def _read_vit(document: Mapping[str, object]) -> tuple[Transformer, list[str]]:
    """The inverse of `write`, for any config.json: (settings, notes on what they leave out).

    ModelError for a ViT that does not compute the same as ours.
    """
    config = hf.read_settings(document, _SIZES | {"intermediate_size": "intermediate"}, _FUNCTION, {
        "family": "vit", "dropout": document.get("hidden_dropout_prob", 0.0),
        "norm_epsilon": document.get("layer_norm_eps", 1e-12), "num_classes": hf.num_labels(document)})
    _check_patches(config)
    return config, hf.left_out(document, config, _DROPS)


def _read_dinov2(document: Mapping[str, object]) -> tuple[Transformer, list[str]]:
    ratio, hidden = document.get("mlp_ratio", 4), document.get("hidden_size")
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio < 1e6:
        raise hf.wrong_key("vit-mlp-ratio", "mlp_ratio", "must be a positive number", ratio)
    width = int(hidden * ratio) if isinstance(hidden, int) and 0 < hidden < 1e9 else None
    config = hf.read_settings(document, _SIZES, _FUNCTION | {"use_swiglu_ffn": (False, (False,))}, {
        "family": "vit", "dropout": document.get("hidden_dropout_prob", 0.0),
        "norm_epsilon": document.get("layer_norm_eps", 1e-6), "intermediate": width})
    _check_patches(config)
    return config, hf.left_out(document, config, _DROPS | {"drop_path_rate": 0.0})


def _check_patches(config: Transformer) -> None:
    if config.image_size % config.patch_size:
        raise hf.wrong_key("vit-image-size", "image_size", f"is not a multiple of patch_size {config.patch_size}",
                           config.image_size)


VIT = hf.Form(title="ViT", family="vit", prefix="vit.", places=places, read=_read_vit, write=write,
              per_layer=16, class_of={"classes": "ViTForImageClassification"},
              aside=r"(vit\.)?(embeddings\.mask_token|pooler\.dense\.(weight|bias))")
DINOV2 = hf.Form(title="DINOv2", family="vit", prefix="dinov2.", places=partial(places, dinov2=True), read=_read_dinov2,
                 write=None, per_layer=18, class_of={"classes": "Dinov2Model"},
                 aside=r"(dinov2\.)?embeddings\.mask_token")
"""aside: the token that replaces masked patches in pretraining, and a pooler that the classifier does not use."""
