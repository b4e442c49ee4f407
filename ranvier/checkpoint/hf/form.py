"""Parameters under Hugging Face's names and in its layout, in both directions.

    form         model_type    file
    GPT-2        gpt2          gpt2.py
    BERT         bert          bert.py
    ViT          vit           vit.py
    DINOv2       dinov2        vit.py; import only: a trained model is exported as ViT, which computes the same
    Llama        llama, mistral, phi3, qwen2, qwen3, gemma, gemma2, gemma3_text, olmo2, olmo3, smollm3,
                 granite; llama.py: one block with settings

"Here" and "ours" mean Ranvier's names and layout, "there" means Hugging Face's. A form gives, for each of our
parameters, the tensors there that hold it (`TensorMapping`). All conversions are linear, so the same functions convert
gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from ranvier.config.run import Transformer
from ranvier.errors import CheckpointError, ModelError

_adapter = TypeAdapter(Transformer)
OTHER_MODEL = "Name another model: other variants of its architecture are not supported."
CLASSIFIERS = frozenset({"head.classifier.weight", "head.score.weight"})
"""Our parameters with a row for each class."""


@dataclass(frozen=True, kw_only=True)
class TensorMapping:
    """Place of a parameter in a folder in Hugging Face form: names and shapes of its tensors there, its shape here.
    join: tensors there -> ours; part: the inverse."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    join: Callable[[Sequence[Tensor]], Tensor]
    part: Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Form:
    """An architecture in Hugging Face's format. To add one, create an object of this class in its own file.

    Attributes:
        title: its name in messages.
        family: ours.
        prefix: of names in files; a file may leave it out.
        places: (settings, head) -> our parameters, without tied ones, and their places there.
        read: content of config.json -> (settings, notes on training options that they leave out). ModelError if the
            model there does not compute the same.
        write: (settings, head) -> content of config.json; None if the form is import only.
        per_layer: smallest number of tensors of a layer there.
        class_of: head -> class of transformers; the first head is assumed for files that do not name one.
        tied: settings -> our tied parameter -> the parameter that owns its values.
        aside: regular expression for names of tensors that are ignored.
        layers_key: key of config.json with the number of layers.
        any_head: whether files may have other heads than ours, or none.
    """

    title: str
    family: str
    prefix: str
    places: Callable[[Transformer, str], dict[str, TensorMapping]]
    read: Callable[[Mapping[str, object]], tuple[Transformer, list[str]]]
    write: Callable[[Transformer, str], dict[str, object]] | None
    per_layer: int
    class_of: Mapping[str, str]
    aside: str
    layers_key: str = "num_hidden_layers"
    any_head: bool = True
    tied: Callable[[Transformer], Mapping[str, str]] = lambda config: {}


def tensors_there(place: TensorMapping, tensor: Tensor) -> list[Tensor]:
    """One of our parameters, or its gradient, as the tensors `place.names`."""
    return [one.contiguous() for one in place.part(tensor)]


def tensor_here(place: TensorMapping, tensors: Sequence[Tensor]) -> Tensor:
    """The inverse of `tensors_there`."""
    return place.join(tensors)


def finite(tensor: Tensor, name: str, where: Path) -> Tensor:
    """`tensor`. CheckpointError if an element is NaN or infinite. name, where: of the parameter, for the error."""
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"has a value that is NaN or infinite in {str(tensor.dtype).removeprefix('torch.')}",
                              code="export-not-finite", where=f"{name} in {where}",
                              remedy="Use an earlier checkpoint, or a number format with a wider range, such as fp32.")
    return tensor


# --- places ----------------------------------------------------------------------------------------------------------


def same(name: str, *shape: int, theirs: tuple[int, ...] | None = None) -> TensorMapping:
    """A tensor that is equal in both models. theirs: its shape there, if it differs."""
    theirs = theirs or shape
    return TensorMapping(names=(name,), shapes=(theirs,), shape=shape, join=lambda tensors: tensors[0].reshape(shape),
                         part=lambda tensor: [tensor.reshape(theirs)])


def linear(ours: str, theirs: str, *shape: int, bias: bool = True) -> dict[str, TensorMapping]:
    """The mappings of a weight and, with `bias`, a bias; also for a norm."""
    found = {f"{ours}.weight": same(f"{theirs}.weight", *shape)}
    return found | ({f"{ours}.bias": same(f"{theirs}.bias", shape[0])} if bias else {})


def transposed(name: str, *shape: int) -> TensorMapping:
    """A matrix that is transposed there."""
    return TensorMapping(names=(name,), shapes=(shape[::-1],), shape=shape,
                         join=lambda tensors: tensors[0].t().contiguous(), part=lambda tensor: [tensor.t()])


def parts_of_heads(names: Sequence[str], heads: int, *shape: int) -> TensorMapping:
    """Three tensors of queries, keys and values there; here the rows of one head are together."""
    def join(tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([tensor.reshape(heads, -1, *tensor.shape[1:]) for tensor in tensors], dim=1).flatten(0, 2)

    def part(tensor: Tensor) -> list[Tensor]:
        return [part.flatten(0, 1) for part in tensor.reshape(heads, 3, -1, *tensor.shape[1:]).unbind(1)]

    return TensorMapping(names=tuple(names), shapes=((shape[0] // 3, *shape[1:]),) * 3, shape=shape, join=join,
                         part=part)


def scaled(name: str, scale: str, *shape: int) -> TensorMapping:
    """A weight or bias whose rows are multiplied by another tensor there (a layer scale); here the product."""
    return TensorMapping(names=(name, scale), shapes=(shape, shape[:1]), shape=shape,
                         join=lambda tensors: tensors[0] * tensors[1].view(-1, *[1] * (len(shape) - 1)),
                         part=lambda tensor: [tensor, tensor.new_ones(len(tensor))])


# --- config.json -----------------------------------------------------------------------------------------------------


def read_settings(document: Mapping[str, object], sizes: Mapping[str, str],
                  functions: Mapping[str, tuple[object, tuple[object, ...]]],
                  more: Mapping[str, object]) -> Transformer:
    """The settings in config.json.

    Args:
        document: its content.
        sizes: keys there -> our settings.
        functions: keys that select what is computed -> (default of transformers, values that we compute).
        more: further settings of ours.

    ModelError if a key is missing, or a value is invalid or selects something that we do not compute.
    """
    for key, (default, allowed) in functions.items():
        value = document.get(key, default)
        if not isinstance(value, (str, int, float, type(None))) or value not in allowed:
            raise wrong_key("config-json-value", key, f"must be {' or '.join(map(str, allowed))}", value, OTHER_MODEL)
    for key in sizes:
        if key not in document:
            raise wrong_key("config-json-missing", key, "is missing")
    try:
        # From JSON, strict validation accepts no string or bool as a number, but accepts a dict for a dataclass.
        config = _adapter.validate_json(json.dumps({**{ours: document[key] for key, ours in sizes.items()}, **more}),
                                        strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        ours = str(first["loc"][0])
        theirs = {name: key for key, name in sizes.items()} | {"dropout": next(
            (key for key in ("hidden_dropout_prob", "resid_pdrop") if key in document), "dropout"),
            "norm_epsilon": "layer_norm_eps"} | {ours: key for key, ours in sizes.items()}
        raise wrong_key("config-json-invalid", theirs.get(ours, ours), f"is invalid: {first['msg']}",
                        first["input"]) from error
    if config.head_dim is None and config.hidden % config.heads:
        key_of = {ours: key for key, ours in sizes.items()}
        raise wrong_key("config-json-heads", key_of["heads"], f"does not divide {key_of['hidden']} {config.hidden}",
                        config.heads)
    return config


def wrong_key(code: str, key: str, what: str, value: object = None,
              remedy: str = "Fetch config.json again from the model's source.") -> ModelError:
    """The error for a key of config.json."""
    return ModelError(what, code=code, where=f"{key} in config.json", value=value, remedy=remedy)


def label_keys(names: Sequence[str]) -> dict[str, object]:
    """The names of classes, by their numbers, in the form of config.json."""
    return {"id2label": {str(number): name for number, name in enumerate(names)},
            "label2id": {name: number for number, name in enumerate(names)}}


def numbered_labels(count: int) -> dict[str, object]:
    """`label_keys` of the names that transformers gives to classes without names."""
    return label_keys([f"LABEL_{number}" for number in range(count)])


def num_labels(document: Mapping[str, object]) -> object:
    """The number of classes of a classifier. ModelError for a classifier whose scores are not logits of classes."""
    labels, kind = document.get("id2label"), document.get("problem_type")
    found = len(labels) if isinstance(labels, dict) and labels else document.get("num_labels", 2)
    if kind not in (None, "single_label_classification") and (kind != "regression" or found != 1):
        raise wrong_key("problem-type", "problem_type",
                        "must be single_label_classification, or regression of a single score", kind,
                        "Take a model that gives each text one class.")
    return found


def left_out(document: Mapping[str, object], config: Transformer, defaults: Mapping[str, float | None]) -> list[str]:
    """Notes on dropout that our training leaves out. defaults: key -> the default of transformers."""
    found = []
    for key, default in defaults.items():
        value = document.get(key, default)
        ours = 0 if key in ("attn_pdrop", "attention_probs_dropout_prob", "drop_path_rate") else config.dropout
        if value is not None and value != ours:
            found.append(f"{key} {value} is left out: here dropout is {config.dropout:g} for embeddings and sublayers, "
                         f"and attention has none")
    return found
