"""Our parameters under Hugging Face's names and in its layout, in both directions, one by one or all at once.

    form         model_type    file
    GPT-2        gpt2          hf_gpt2.py
    BERT         bert          hf_bert.py
    ViT          vit           hf_vit.py
    DINOv2       dinov2        hf_vit.py; read only: what was trained is written as ViT, which computes the same

Each form says of every one of our parameters in which of its tensors it lies (`Place`). What it says are
rearrangements, so gradients travel through the same functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from ranvier.errors import ModelError
from ranvier.run import Transformer

_adapter = TypeAdapter(Transformer)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one of our parameters lies: `names` and `shapes` of tensors there, `shape` here; `join` and `part` are how
    those become ours, and the inverse."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    join: Callable[[Sequence[Tensor]], Tensor]
    part: Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Form:
    """A kind of model as Hugging Face has it.

    title: in messages. prefix: with which names in files begin, or not. places: (settings, head) -> our parameters
    without tied ends, and where they lie. read: content of config.json -> settings, and what of its training they do
    not have. write: (settings, head) -> content of config.json, None where none is written. keys: of config.json that
    are looked at. per_layer: tensors of a layer. class_of: head -> transformers' class; the first is that of files that
    say nothing of a head. tied: our parameters that are others, which own them. aside: names of tensors that are no
    parameters of ours, as a regular expression. layers_key: of config.json. any_head: files may have other heads than
    ours, or none.
    """

    title: str
    family: str
    prefix: str
    places: Callable[[Transformer, str], dict[str, Place]]
    read: Callable[[Mapping[str, object]], tuple[Transformer, list[str]]]
    write: Callable[[Transformer, str], dict[str, object]] | None
    keys: frozenset[str]
    per_layer: int
    class_of: Mapping[str, str]
    tied: Mapping[str, str]
    aside: str
    layers_key: str = "num_hidden_layers"
    any_head: bool = True


def form(model_type: object) -> Form:
    """The form that config.json calls `model_type`; ModelError for one that is not known."""
    from ranvier.models import hf_bert, hf_gpt2, hf_vit

    forms = {"gpt2": hf_gpt2.GPT2, "bert": hf_bert.BERT, "vit": hf_vit.VIT, "dinov2": hf_vit.DINOV2}
    if not isinstance(model_type, str) or model_type not in forms:
        raise ModelError(f"must be {', '.join(list(forms)[:-1])} or {list(forms)[-1]}",
                         where="model_type in config.json", value=model_type,
                         remedy="Name a model of one of these architectures: others are not known.")
    return forms[model_type]


def form_of(config: Transformer) -> Form:
    """The form in which models of a family are written."""
    return form({"auto": "gpt2", "gpt": "gpt2"}.get(config.family, config.family))


def tensors_there(place: Place, tensor: Tensor) -> list[Tensor]:
    """One of our parameters, or its gradient, as Hugging Face's tensors of `place.names`."""
    return [one.contiguous() for one in place.part(tensor)]


def tensor_here(place: Place, tensors: Sequence[Tensor]) -> Tensor:
    """The inverse of `tensors_there`."""
    return place.join(tensors)


# --- places ----------------------------------------------------------------------------------------------------------


def same(name: str, *shape: int, there: tuple[int, ...] | None = None) -> Place:
    """A tensor that is ours as it is, or in another shape there."""
    return Place(names=(name,), shapes=(there or shape,), shape=shape, join=partial(_reshaped, shape),
                 part=partial(_reshaped_one, there or shape))


def transposed(name: str, *shape: int) -> Place:
    return Place(names=(name,), shapes=(shape[::-1],), shape=shape, join=_transposed, part=_transposed_one)


def parts_of_heads(names: Sequence[str], heads: int, *shape: int) -> Place:
    """Queries, keys and values there apart, here those of one head together."""
    return Place(names=tuple(names), shapes=((shape[0] // 3, *shape[1:]),) * 3, shape=shape,
                 join=partial(_heads_together, heads), part=partial(_heads_apart, heads))


def scaled(name: str, scale: str, *shape: int) -> Place:
    """A weight or bias whose rows are there multiplied by another tensor's numbers, here already."""
    return Place(names=(name, scale), shapes=(shape, shape[:1]), shape=shape, join=_scaled, part=_unscaled)


def _reshaped(shape: tuple[int, ...], tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].reshape(shape)


def _reshaped_one(shape: tuple[int, ...], tensor: Tensor) -> list[Tensor]:
    return [tensor.reshape(shape)]


def _transposed(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].t().contiguous()


def _transposed_one(tensor: Tensor) -> list[Tensor]:
    return [tensor.t()]


def _heads_together(heads: int, tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.unflatten(0, (heads, -1)) for tensor in tensors], dim=1).flatten(0, 2)


def _heads_apart(heads: int, tensor: Tensor) -> list[Tensor]:
    return [part.flatten(0, 1) for part in tensor.unflatten(0, (heads, 3, -1)).unbind(1)]


def _scaled(tensors: Sequence[Tensor]) -> Tensor:
    weight, scale = tensors
    return weight * scale.view(-1, *[1] * (weight.dim() - 1))


def _unscaled(tensor: Tensor) -> list[Tensor]:
    return [tensor, tensor.new_ones(len(tensor))]


# --- config.json -----------------------------------------------------------------------------------------------------


def read_settings(document: Mapping[str, object], sizes: Mapping[str, str], functions: Mapping[str, tuple],
                  more: Mapping[str, object]) -> Transformer:
    """The settings that config.json tells.

    sizes: its keys -> ours; functions: what else decides what is computed: key -> (transformers' default, the values
    that are what we compute); more: our settings that were found already. ModelError for what cannot be.
    """
    for key, (default, allowed) in functions.items():
        value = document.get(key, default)
        if not isinstance(value, (str, int, float, type(None))) or value not in allowed:
            raise ModelError(f"must be {' or '.join(map(str, allowed))}", where=f"{key} in config.json", value=value,
                             remedy="Name another model: others of its architecture's functions are not known.")
    for key in sizes:
        if key not in document:
            raise ModelError("is missing", where=f"{key} in config.json",
                             remedy="Take config.json from where the model comes from.")
    try:
        # Of JSON, strict reading takes no text or truth value for a number, but a dict for a dataclass.
        config = _adapter.validate_json(json.dumps({**{ours: document[key] for key, ours in sizes.items()}, **more}),
                                        strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        ours = str(first["loc"][0])
        theirs = {name: key for key, name in sizes.items()} | {"dropout": next(
            (key for key in ("hidden_dropout_prob", "resid_pdrop") if key in document), "dropout"),
            "norm_epsilon": "layer_norm_eps"}
        raise ModelError(f"cannot be: {first['msg']}", where=f"{theirs.get(ours, ours)} in config.json",
                         value=first["input"], remedy="Take config.json from where the model comes from.") from error
    if config.hidden % config.heads:
        key_of = {ours: key for key, ours in sizes.items()}
        raise ModelError(f"does not divide {key_of['hidden']} {config.hidden}", where=f"{key_of['heads']} in "
                         "config.json", value=config.heads, remedy="Take config.json from where the model comes from.")
    return config


def num_labels(document: Mapping[str, object]) -> object:
    """Classes of a classifier."""
    labels = document.get("id2label")
    return len(labels) if isinstance(labels, dict) and labels else document.get("num_labels", 2)


def left_out(document: Mapping[str, object], config: Transformer, defaults: Mapping[str, float]) -> list[str]:
    """Notes on the chances of dropping something that our training does not have. defaults: key -> transformers'."""
    found = []
    for key, default in defaults.items():
        value = document.get(key, default)
        ours = 0 if key in ("attn_pdrop", "attention_probs_dropout_prob", "drop_path_rate") else config.dropout
        if value is not None and value != ours:
            found.append(f"{key} {value} is left out: here dropout is {config.dropout:g} for embeddings and sublayers, "
                         f"and attention has none")
    return found
