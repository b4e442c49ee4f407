"""The family `transformers`: a causal language model of any architecture, in a folder, as transformers' own modules.

`from_transformers` cuts it for the data and pipe axes. A process builds the full model in host memory, with the
weights of the folder, and each rank copies the blocks of its stages, which share nothing with the full model. No code
in the folder is run.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.block import Model
from ranvier.config.run import Transformer
from ranvier.errors import ConfigError, ModelError, RanvierError
from ranvier.models.family import ModelFacts, text_transformer_in_words, wrong_head
from ranvier.models.from_transformers import from_transformers
from ranvier.models.stand_ins import ModuleElsewhere
from ranvier.system.untrusted_file import member, read_json
from ranvier.tensor.split.loss import NextTokenLoss

_BUILDING = threading.RLock()
"""Held while transformers builds models under process-wide settings."""
CONFIG_BYTES = 1 << 20
_OWN_KERNELS = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention", "grouped_mm",
                "batched_mm")
_SIZES = {"num_hidden_layers": "num_layers", "hidden_size": "hidden", "num_attention_heads": "heads",
          "vocab_size": "vocab"}

_OWN = ("dropout", "intermediate", "norm_epsilon")
"""Settings of other families that are decided by the folder alone, and not read here."""


@dataclass(frozen=True, kw_only=True)
class CutModel:
    """A model cut into blocks, whose builders copy `modules`. names: full name of a parameter here -> its name in the
    folder, for owners of ties only. shapes: by the name here."""

    blocks: Model
    modules: Mapping[str, nn.Module]
    names: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]


def cut_model(folder: str, dtype: torch.dtype) -> CutModel:
    """The model in `folder`, cut. Do not change its parameters. ModelError if it cannot be built or cut, or does not
    have exactly the tensors in the folder."""
    with _BUILDING:
        return _cut_model(folder, dtype)


@lru_cache(maxsize=1)
def _cut_model(folder: str, dtype: torch.dtype) -> CutModel:
    transformers = _transformers()
    _config(folder)  # with its checks
    with quiet(transformers), torch.device("cpu"), torch.random.fork_rng(devices=()):
        with _building(folder):
            model, found = transformers.AutoModelForCausalLM.from_pretrained(
                _path(folder), dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True,
                ignore_mismatched_sizes=True, output_loading_info=True)  # mismatches are refused below, by name
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := sorted(map(str, found[kind])):
                raise ModelError(f"is not what the folder has: {kind.replace('_', ' ')} {', '.join(names[:3])}",
                                 code="transformers-tensors-differ", where=f"{type(model).__name__} in {folder}",
                                 value=len(names), remedy="Name a complete folder written by `save_pretrained`.")
        cut = from_transformers(model.train(), loss=NextTokenLoss(int(model.config.get_text_config().vocab_size)))
    modules = {name: build() for name, build in cut.blocks.items()}
    there = {id(parameter): name for name, parameter in model.named_parameters()}
    placed = {f"{block}.{name}": parameter for block, module in modules.items()
              for name, parameter in module.named_parameters() if f"{block}.{name}" not in {
                  other for group in cut.tied for other in group[1:]}}
    return CutModel(
        blocks=replace(cut, blocks={name: partial(_block, folder, dtype, name) for name in modules}), modules=modules,
        names={name: there[id(parameter)] for name, parameter in placed.items()},
        shapes={name: tuple(parameter.shape) for name, parameter in placed.items()})


def release() -> None:
    """Free the full model once blocks are built. It is built again if it is needed again."""
    _cut_model.cache_clear()


def _block(folder: str, dtype: torch.dtype, name: str) -> nn.Module:
    """A copy of a block on the device of the context; tensors of modules in other blocks are copied without data."""
    block, device = cut_model(folder, dtype).modules[name], torch.empty(0).device
    own = (*block.parameters(), *block.buffers())
    others = (tensor for submodule in block.modules() if isinstance(submodule, ModuleElsewhere)
              for module in submodule._module
              for tensor in (*module.parameters(), *module.buffers()))
    memo: dict[int, Any] = {id(value): value for name, value in vars(block).items() if name in ("_call", "_calls")}
    for tensors, place in ((own, device), (others, torch.device("meta"))):
        for tensor in tensors:
            if id(tensor) not in memo:
                moved = tensor.detach().to(place, copy=True)
                memo[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if isinstance(
                    tensor, nn.Parameter) else moved
    return copy.deepcopy(block, memo)


@lru_cache(maxsize=8)
def sizes_of(folder: str) -> Mapping[str, Any]:
    """The settings that a folder decides. ModelError if its config.json is not of a supported model."""
    config = _config(folder)
    found = {ours: getattr(config, theirs, None) for theirs, ours in _SIZES.items()}
    found["max_positions"] = getattr(config, "max_position_embeddings", None)
    for name, value in found.items():
        if not isinstance(value, int) and (value is not None or name in ("num_layers", "hidden", "vocab")):
            raise ModelError(f"does not say its {name}", code="transformers-size-missing",
                             where=f"config.json in {folder}", value=value,
                             remedy="Cut the model in a loop of your own: `ranvier.from_transformers(model)`.")
    return {name: value for name, value in found.items() if value is not None}


@lru_cache(maxsize=8)
def _num_parameters(folder: str) -> int:
    """The number of parameters, without embeddings unless the head shares them."""
    with _BUILDING, torch.device("meta"), torch.random.fork_rng(devices=()), _building(folder):
        model = _transformers().AutoModelForCausalLM.from_config(_config(folder), trust_remote_code=False)
    head = getattr(model.get_output_embeddings(), "weight", None)
    return sum(int(parameter.numel()) for parameter in model.parameters()) - sum(
        module.weight.numel() for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight is not head)


def _config(folder: str) -> Any:
    _check_files(_path(folder))
    with _building(folder):
        config = _transformers().AutoConfig.from_pretrained(_path(folder), local_files_only=True,
                                                            trust_remote_code=False)
    if getattr(config, "quantization_config", None):
        raise ModelError("has quantized weights, which cannot be trained", code="transformers-model-quantized",
                         where=f"config.json in {folder}", remedy="Name a folder of its weights in bf16 or fp32.")
    return config.get_text_config()


def _check_files(folder: Path) -> None:
    """Raise a ModelError for files that are links out of the folder, and if config.json names kernels, which may be
    code from the hub."""
    try:
        for path in (*folder.glob("*.json"), *folder.glob("*.safetensors")):
            member(folder, path.name)
        document = read_json(folder / "config.json", CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot be read: {error}", code="transformers-folder-unreadable", where=f"model in {folder}",
                         remedy="Name a complete folder written by `save_pretrained`.") from error
    for key, value in _items(document):
        if key.lstrip("_") in ("attn_implementation", "experts_implementation") and value not in _OWN_KERNELS:
            raise ModelError("names kernels that are not transformers' own", code="transformers-kernels",
                             where=f"{key} in {folder / 'config.json'}", value=value, remedy="Remove the key.")


def _items(document: object) -> Iterator[tuple[str, object]]:
    """Keys and values of a JSON document, nested ones included."""
    if isinstance(document, dict):
        yield from document.items()
    for item in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        yield from _items(item)


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Inside, transformers shows no progress bars and reports nothing while it loads a model."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModelError("needs the package `transformers`, which is not installed",
                         code="transformers-not-installed", where="model.family", value="transformers",
                         remedy="Run `pip install transformers`.") from error
    return transformers


def _path(folder: str) -> Path:
    return Path(os.path.expanduser(folder))


@contextmanager
def _building(folder: str) -> Iterator[None]:
    """Inside, errors of transformers become ModelErrors."""
    try:
        yield
    except RanvierError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0].rstrip('.')}"
        raise ModelError(f"is not a causal language model that transformers can build: {reason}",
                         code="transformers-model-not-built", where=f"model in {folder}",
                         remedy="Install the transformers that it was made for (`pip install -U transformers`), or "
                                "name another model. Code in a folder is not run.") from error


class _Transformers:
    """The family: the head "tokens", inputs ids_BS and targets_BS int64."""

    def problems(self, settings: Transformer, head: str) -> list[RanvierError]:
        folder = settings.pretrained
        if folder is None or not (_path(folder) / "config.json").is_file() or not any(
                _path(folder).glob("*.safetensors")):
            return [ConfigError("is not a folder with config.json and safetensors, which the family transformers needs",
                                code="transformers-needs-folder", where="model.pretrained", value=folder,
                                remedy="Fetch the model first (`hf download OWNER/NAME --local-dir FOLDER`), and name "
                                       "its folder.")]
        own = next((name for name in _OWN if getattr(settings, name) != getattr(Transformer, name)), None)
        return [*wrong_head("transformers", head, ("tokens",)), *([] if own is None else [ConfigError(
            "is set by the folder: the family transformers trains its modules unmodified",
            code="setting-of-transformers-folder", where=f"model.{own.replace('_', '-')}", value=getattr(settings, own),
            remedy="Leave it out, and change config.json in a copy of the folder.")])]

    def model(self, settings: Transformer, head: str, *, dtype: torch.dtype = torch.float32) -> Model:
        assert settings.pretrained is not None, "a problem"
        blocks = cut_model(settings.pretrained, dtype).blocks
        return replace(blocks, tied=()) if settings.untied else blocks

    def sample(self, settings: Transformer, head: str, count: int) -> tuple[Tensor, Tensor]:
        ids_BS = torch.zeros(count, settings.sequence, dtype=torch.int64)
        return ids_BS, ids_BS

    def flops_per_sample(self, settings: Transformer, *, recomputed: bool = False) -> float:
        """FLOPs per sample; all experts of a mixture are counted."""
        assert settings.pretrained is not None, "a problem"
        s = settings.sequence
        forward = 2 * s * _num_parameters(settings.pretrained) + 4 * s * s * settings.hidden * settings.num_layers
        return float((4 if recomputed else 3) * forward)

    def describe(self, settings: Transformer) -> ModelFacts:
        kind = _config(settings.pretrained).model_type if settings.pretrained else ""
        return ModelFacts(text=text_transformer_in_words(f"transformers' {kind}", settings), tokens=settings.sequence)


TRANSFORMERS = _Transformers()
