"""Training from a folder in Hugging Face's format: a run takes its sizes, and an engine its parameters.

Each rank reads the parameters of its own blocks, one at a time, and keeps its part of each, on any mesh. Parameters
that the folder does not have, such as a classifier, keep the values initialised from the seed. A run with a larger
`model.vocab` than the folder's gets additional rows (`with_rows`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from ranvier import keyed_random
from ranvier.checkpoint import state
from ranvier.checkpoint.hf import form as hf
from ranvier.checkpoint.hf.forms import check_head
from ranvier.checkpoint.hf.image_files import notes_on_images
from ranvier.checkpoint.hf.peft import with_adapter_settings
from ranvier.checkpoint.hf.pretrained import Pretrained, PretrainedConfig, without_weights
from ranvier.config.named_object import is_object_name
from ranvier.config.presets import COMPUTED
from ranvier.config.run import Run, Transformer
from ranvier.data.cache import cache_folder
from ranvier.data.offline.pretrained_models import described_by, has_weights, missing_package, sizes_of
from ranvier.errors import ConfigError, ModelError, RanvierError
from ranvier.models import families
from ranvier.models.any_transformers import TRANSFORMERS
from ranvier.models.any_transformers import sizes_of as sizes_there
from ranvier.models.lora import is_adapter

if TYPE_CHECKING:
    from ranvier.pipeline.engine import Engine

_POSITIONS = "embedding.position.weight"
_VOCABULARY = ("embedding.token.weight", "head.projection.weight")
_ROWS = 8192
_SIZES = ("family", "num_layers", "hidden", "heads", "vocab", "intermediate", "norm_epsilon")


def _sizes(config: Transformer) -> dict[str, Any]:
    """The settings that a folder determines."""
    more: tuple[str, ...] = {"vit": ("patch_size",), "gpt": ("untied",), "llama": (*COMPUTED, "max_positions")}.get(
        config.family, ())
    return {name: getattr(config, name) for name in (*_SIZES, *more) if config.family != "vit" or name != "vocab"}


def with_sizes(run: Run, pretrained: PretrainedConfig) -> Run:
    """The run with a model of the folder's sizes. Sequence, image size, dropout and classes stay the run's (positions
    are cut or resized), as does a vocabulary that is larger than the folder's. ConfigError if the sequence is longer
    than the folder's number of positions, and for rows of the vocabulary that would not train."""
    found = pretrained.config
    positions = found.max_positions or found.sequence
    _check_sequence(run, pretrained.folder, None if found.family == "vit" else positions, found.family == "llama")
    return replace(run, model=replace(run.model, **_with_vocabulary(run, _sizes(found))))


def _with_vocabulary(run: Run, sizes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The sizes of a model, with the run's vocabulary if it is set and larger. ConfigError if adapters train."""
    size, wanted = sizes.get("vocab"), run.model.vocab
    if size is None or wanted in (Transformer.vocab, size) or wanted < size:
        return sizes
    if run.lora.rank or run.lora.adapters is not None:
        raise ConfigError(f"is larger than that of the pretrained model, {size}, and with adapters the embeddings of "
                          "further tokens would not train", code="vocab-above-pretrained", where="model.vocab",
                          value=wanted,
                          remedy="Leave it out and use the model's own tokenizer, or set `--lora.rank 0`.")
    return {**sizes, "vocab": wanted}


def with_model(run: Run, pretrained: PretrainedConfig) -> Run:
    """`with_sizes`; ConfigError if a setting of the run differs from the folder's."""
    found = with_sizes(run, pretrained)
    _check_same(run, {name: value for name, value in _sizes(found.model).items() if name != "family"})
    return found


def resolve_pretrained(run: Run) -> Run:
    """The run with the sizes of its pretrained model, and the settings of its adapters. For a model on the hub,
    config.json is fetched; for a known model, nothing; a folder needs no weights (`missing_weights`). RanvierError if
    there is no such model, or a setting of the run differs."""
    found = _with_known_sizes(run)
    if run.data.task in ("reward", "classification") and (config := families.config_of(found)).family == "llama":
        check_head(config, families.head_of(found))
    return with_adapter_settings(found)


def missing_weights(run: Run) -> list[RanvierError]:
    """The error for a local folder with sizes but without weights, or for a known model whose package is not installed:
    a run can be predicted from it, but cannot start."""
    if run.model.pretrained is not None:
        problem = missing_package(run.model.pretrained, cache_folder(run))
        if problem is not None:
            return [problem]
    folder = None if run.model.pretrained is None else Path(os.path.expanduser(run.model.pretrained))
    has_none = folder is not None and folder.is_dir() and not has_weights(folder)
    return [without_weights(folder)] if folder is not None and has_none else []


def _with_known_sizes(run: Run) -> Run:
    name = run.model.pretrained
    if name is None:
        return run
    if run.model.family == "transformers":
        return _with_sizes_there(run, name)
    sizes: Mapping[str, Any] = sizes_of(name)
    if not sizes:
        folder, is_whole = described_by(name, cache_folder(run))
        return with_model(run, Pretrained(folder) if is_whole else PretrainedConfig(folder))
    sizes = _with_vocabulary(run, sizes)
    _check_same(run, sizes)
    return replace(run, model=replace(run.model, **sizes))


def _with_sizes_there(run: Run, folder: str) -> Run:
    """The run with the sizes of a model that transformers builds."""
    for problem in TRANSFORMERS.problems(run.model, "tokens"):
        raise problem
    sizes = sizes_there(folder)
    _check_same(run, sizes)
    _check_sequence(run, folder, sizes.get("max_positions"))
    return replace(run, model=replace(run.model, **sizes))


def _check_sequence(run: Run, folder: Path | str, positions: int | None, is_rotary: bool = False) -> None:
    if positions is not None and run.model.sequence > positions:
        extension = (" To extend a rotary model's context, set max_position_embeddings, and rope_scaling if it needs "
                     "it, in the config.json of a copy.") if is_rotary else ""
        raise ConfigError(f"is longer than the {positions} positions of {folder}",
                          code="sequence-beyond-pretrained", where="model.sequence", value=run.model.sequence,
                          remedy=f"Set `--model.sequence {positions}`.{extension}")


def _check_same(run: Run, sizes: Mapping[str, object]) -> None:
    if is_object_name(run.model.family):
        raise ConfigError(f"cannot be read into the family {run.model.family}", code="family-without-pretrained",
                          where="model.pretrained", value=run.model.pretrained,
                          remedy="Leave it out: only shipped families can start from a folder in Hugging Face's form.")
    for name, size in sizes.items():
        wanted = getattr(run.model, name)
        if wanted not in (getattr(Transformer, name), size):
            raise ConfigError(f"is not that of the pretrained model, {size}",
                              code="differs-from-pretrained", where=f"model.{name.replace('_', '-')}", value=wanted,
                              remedy="Leave it out, or choose another `--model.pretrained`.")


def load_pretrained(engine: Engine, pretrained: Pretrained) -> list[str]:
    """Set every parameter of this rank that the folder has, and its master copy, to its part of the folder's.

    Call it on every rank, before the first step. Returns notes for the user, the same on every rank. ModelError for a
    parameter of another shape; CheckpointError for a value that is NaN or infinite.
    """
    owners = [parameter for parameter in engine.layout.parameters if parameter.is_owner]
    shapes = {parameter.name: parameter.shape for parameter in owners}
    names = {parameter.name: parameter.origin if parameter.origin is not None and parameter.name not in
             pretrained.places else parameter.name for parameter in owners}  # here -> in the folder
    notes = pretrained.notes_on_quantization()
    taken: set[str] = set()
    for name, shape in shapes.items():
        if names[name] in pretrained.places and _fits(pretrained, names[name], shape, notes):
            taken.add(name)
    left = [name for name in shapes if names[name] not in pretrained.places and not is_adapter(name)]
    if left:
        notes.append(f"not in {pretrained.folder}, so initialised from the seed: {', '.join(left)}")
    unused = [name for name in pretrained.places if name not in shapes]
    if unused or pretrained.left_out:
        notes.append(f"left out of {pretrained.folder}: {', '.join([*unused, *pretrained.left_out])}")
    if pretrained.config.family == "vit":
        notes += notes_on_images(pretrained.folder)
    dtype = next(iter(engine.named_parameters().values())).dtype if engine.named_parameters() else torch.float32

    def value(name: str) -> Tensor | None:
        if name not in taken:
            return None
        found = resized(pretrained.read(names[name]), name, shapes[name], pretrained.config.family)
        hf.finite(found.to(dtype), name, pretrained.folder)
        return found

    state.set_parameters(engine, value)
    return notes


def _fits(pretrained: Pretrained, name: str, shape: tuple[int, ...], notes: list[str]) -> bool:
    """Whether a parameter of the folder fits the run, if necessary cut or resized, which is added to `notes`."""
    there, family = pretrained.places[name].shape, pretrained.config.family
    if there == shape:
        return True
    if name == _POSITIONS and there[1] == shape[1]:
        if family == "vit":
            old, new = isqrt(there[0] - 1), isqrt(shape[0] - 1)
            notes.append(f"positions of {old} x {old} patches are resized to {new} x {new}")
            return True
        if shape[0] < there[0]:
            notes.append(f"the first {shape[0]} of {there[0]} positions are taken")
            return True
    if name in _VOCABULARY and shape[0] > there[0] and shape[1:] == there[1:]:
        notes.append(f"{shape[0] - there[0]} rows of {name} are new: they begin at the mean of the {there[0]} others")
        return True
    if name.startswith(("head.classifier.", "head.score.")):
        notes.append(f"{name} has the shape {there} in {pretrained.folder} and {shape} here: it is initialised "
                     "from the seed")
        return False
    raise ModelError(f"has another shape than in {pretrained.folder}, where it is {there}", code="pretrained-shape",
                     where=f"parameter {name}", value=shape,
                     remedy="Build the model with the folder's sizes: with_sizes(run, pretrained).")


def resized(value: Tensor, name: str, shape: tuple[int, ...], family: str) -> Tensor:
    """`value`, with position embeddings cut or resized to `shape`: for text, the first positions; for images, the grid
    of patches, bicubically interpolated as in transformers (interpolate_pos_encoding). A vocabulary gets additional
    rows.

    value: [positions, hidden] for position embeddings, with the class token first in an image model; [vocabulary,
    hidden] for a vocabulary.
    """
    if name in _VOCABULARY and len(value) < shape[0]:
        return with_rows(value, shape[0], name)
    if name != _POSITIONS or tuple(value.shape) == tuple(shape):
        return value
    if family != "vit":
        return value[:shape[0]]
    old, new = isqrt(len(value) - 1), isqrt(shape[0] - 1)
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    grid_1HGG = wide[1:].reshape(old, old, -1).permute(2, 0, 1)[None]
    grid_1HGG = functional.interpolate(grid_1HGG, size=(new, new), mode="bicubic", align_corners=False)
    return torch.cat([wide[:1], grid_1HGG[0].permute(1, 2, 0).flatten(0, 1)]).to(value.dtype)


def with_rows(value: Tensor, count: int, name: str) -> Tensor:
    """`value` [rows, hidden] with additional rows, up to `count`: [count, hidden].

    The new rows have the mean of the others and 1e-9 of their covariance, as in transformers (mean_resizing; Hewitt,
    Initializing new word embeddings for pretrained language models, 2021): the mean, plus a small part of a random
    row's difference from it. The same on every mesh; name: of the parameter, for the random key.
    """
    mean = torch.zeros(value.shape[1], dtype=torch.float64)
    for part in value.split(_ROWS):
        mean += part.double().sum(0)
    mean /= len(value)
    numbers = keyed_random.uniform(keyed_random.key("rows of the vocabulary", name), torch.arange(count - len(value)))
    others = value[(numbers * len(value)).long()].double()
    return torch.cat([value, (mean + _DEVIATION * (others - mean)).to(value.dtype)])


_DEVIATION = 1e-9 ** 0.5
"""Deviation of new rows from the mean, relative to the deviation of the others."""
