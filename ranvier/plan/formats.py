"""The number formats of a block's tensors, by the `dtype` of an engine.

Parameters and buffers are cast as by `module.to(dtype)`, which BatchNorm and positional tables need. With a `dtype` of
half precision these stay in fp32:

    what `keep_fp32` of the engine or model names
    what a model of transformers declares to keep: `_keep_in_fp32_modules_strict`, in fp16 `_keep_in_fp32_modules` too
    fp32 buffers of modules of transformers that are not part of its state, such as `inv_freq` of rotary embeddings

Complex tensors stay complex: no half-precision format can represent them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from ranvier.block import KEPT_IN_FP32, Model, names_of_same_tensor
from ranvier.errors import ConfigError, ModelError
from ranvier.precision import is_half

_TRANSFORMERS = ("transformers", "transformers_modules")
"""Packages of transformers' modules, and of modules that it loads from a model's folder."""


Moved = dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]]
"""Identity of a buffer and its format -> the buffer, kept so that its identity is not reused, and the moved buffer."""


@dataclass(frozen=True, kw_only=True)
class BlockFormats:
    """The formats of one block's tensors.

    dtype: of floating-point tensors in general. kept: names of tensors that stay in fp32.
    """

    dtype: torch.dtype
    kept: frozenset[str] = frozenset()

    @classmethod
    def from_block(cls, model: Model, block: str, module: nn.Module, dtype: torch.dtype) -> BlockFormats:
        """module: the block of that name."""
        if not is_half(dtype):
            return cls(dtype=dtype)
        names = dict(_floating(module))
        kept = {name for name in names if any(_is_named(f"{block}.{name}", pattern) for pattern in model.keep_fp32)}
        for path, submodule in module.named_modules(remove_duplicate=False):
            inside = f"{path}." if path else ""
            for part in _kept_parts(submodule, dtype):
                kept |= {name for name in names if name.startswith(inside) and part.search(name.removeprefix(inside))}
            kinds = getattr(submodule, "stands_for", type(submodule)).__mro__
            if any(kind.__module__.partition(".")[0] in _TRANSFORMERS for kind in kinds):
                kept |= {inside + name for name in submodule._non_persistent_buffers_set
                         if inside + name in names and names[inside + name].dtype is torch.float32}
        ids = {id(names[name]) for name in kept}
        return cls(dtype=dtype, kept=frozenset(name for name, one in names.items() if id(one) in ids))

    def format_of(self, name: str, tensor: Tensor) -> torch.dtype:
        """The format of the block's tensor of that name."""
        return self._cast(tensor.dtype, name in self.kept)

    def cast(self, module: nn.Module, device: torch.device, moved: Moved | None = None) -> dict[str, torch.dtype]:
        """Move the block to `device` and cast it, in place. Returns buffers that have lost precision, with their
        earlier formats. moved: the buffers of earlier blocks, to which those of this block are added.

        A buffer with several names, or of several blocks, remains one buffer, as a parameter does; `module.to` would
        make several of it.
        """
        moved = {} if moved is None else moved
        tensors = dict(_floating(module))
        kept = {id(tensor) for name in self.kept
                for tensor in (tensors[name], tensors[name].grad) if tensor is not None}
        before = dict(module.named_buffers())
        buffers = {id(buffer) for buffer in before.values()}
        here: dict[int, Tensor] = {}

        def move(tensor: Tensor) -> Tensor:
            if (found := here.get(id(tensor))) is not None:
                return found
            dtype = self._cast(tensor.dtype, id(tensor) in kept)
            if id(tensor) not in buffers:
                return tensor.to(device, dtype)
            _, result = moved.get((id(tensor), dtype)) or (tensor, tensor.to(device, dtype))
            moved[id(tensor), dtype] = tensor, result
            here[id(tensor)] = here[id(result)] = result  # a module under several names moves several times
            return result

        module._apply(move)
        return {name: before[name].dtype for name, buffer in module.named_buffers()
                if buffer.is_floating_point() and buffer.dtype.itemsize < before[name].dtype.itemsize}

    def _cast(self, dtype: torch.dtype, is_kept: bool) -> torch.dtype:
        if dtype.is_complex:
            return torch.complex128 if self.dtype is torch.float64 else torch.complex64
        return dtype if not dtype.is_floating_point else torch.float32 if is_kept else self.dtype


def _floating(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All floating-point parameters and buffers, under all their names."""
    for name, tensor in (*module.named_parameters(remove_duplicate=False),
                         *module.named_buffers(remove_duplicate=False)):
        if tensor.is_floating_point():
            yield name, tensor


def _kept_parts(module: nn.Module, dtype: torch.dtype) -> list[re.Pattern[str]]:
    """Patterns of the names of tensors that a model of transformers keeps in fp32 with this `dtype`."""
    names = [name for attribute in (KEPT_IN_FP32 if dtype is torch.float16 else KEPT_IN_FP32[:1])
             for name in getattr(module, attribute, None) or ()]
    return [re.compile(rf"(^|\.){re.escape(name).replace(re.escape('*'), '.*')}(\.|$)") for name in names]


def _is_named(name: str, pattern: str) -> bool:
    """Whether `pattern` names the tensor, or a module that has it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def check_formats(model: Model, modules: Mapping[str, nn.Module], dtype: torch.dtype, *, own: bool,
                  accumulates_half: bool) -> None:
    """Refuse, identically on every rank, formats that differ from the requested ones. modules: all blocks, with or
    without storage. own: whether Ranvier's optimizer updates them. accumulates_half: whether gradients add up in
    `dtype`."""
    full = [f"{block}.{name}" for block, module in modules.items() for name, _ in _floating(module)]
    for pattern in model.keep_fp32:
        if not any(_is_named(name, pattern) for name in full):
            raise ConfigError("names no floating-point parameter, buffer or module of the model",
                              code="keep-fp32-without-match", where="keep_fp32", value=pattern,
                              remedy=f"Names begin with a block's: {', '.join(full[:3])}.")
    formats = {block: BlockFormats.from_block(model, block, module, dtype) for block, module in modules.items()}
    kept = {f"{block}.{name}" for block, one in formats.items() for name in one.kept}
    buffers = names_of_same_tensor(pair for block, module in modules.items() for pair in module.named_buffers(
        prefix=block, remove_duplicate=False) if pair[1].is_floating_point())
    for what, how, groups in (("parameter", "tied to", model.tied), ("buffer", "also", buffers)):
        for group in groups:
            if 0 < len(found := kept.intersection(group)) < len(group):
                odd = min(set(group) - found)
                raise ModelError(f"is {how} {min(found)}, which stays in fp32", code="keep-fp32-partly",
                                 where=f"{what} {odd}", value=dtype, remedy=f'Add "{odd}" to keep_fp32.')
    if not (own or accumulates_half):
        return
    for block, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and name in formats[block].kept:
                remedy = "Pass optimizer= instead of optim=, which updates both, or freeze it." if own else \
                    "Set accumulate='fp32'."
                raise ConfigError(f"trains in fp32, together with parameters in {dtype}, "
                                  f"{'whose buffer' if own else 'in which gradients add up, and it'} has one format",
                                  code="trains-in-two-formats", where=f"parameter {block}.{name}", value=torch.float32,
                                  remedy=remedy)


def cast_warning(cast: Mapping[str, torch.dtype], dtype: torch.dtype, shown: int = 4) -> str:
    """The warning about buffers that have lost precision. cast: name -> format before."""
    names: Sequence[str] = list(cast)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return (f"dtype={dtype} casts buffers of {next(iter(cast.values()))}: {', '.join(names[:shown])}{more}. "
            f"Engine(keep_fp32=[...]) takes names or patterns of buffers and modules that stay in fp32")
