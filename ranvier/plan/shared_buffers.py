"""Buffers that blocks of several stages share by identity; parameters that share memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ranvier.errors import ModelError
from ranvier.layout import Layout


def buffers_of_several_stages(layout: Layout, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Buffer by full name -> its name on another stage, whose block has the same buffer. Raises ModelError for a
    running statistic of a batch norm that trains.

    modules: all blocks of the model, in order.
    """
    found: dict[str, str] = {}
    first: dict[int, tuple[str, int]] = {}
    stages = {block: layout.stage_of(number) for number, block in enumerate(modules)}
    for block, module in modules.items():
        for path, part in module.named_modules():
            buffers = list(part.named_buffers(recurse=False))
            for leaf, value in buffers:
                name = ".".join(filter(None, (block, path, leaf)))
                other, stage = first.setdefault(id(value), (name, stages[block]))
                if stage == stages[block]:
                    continue
                if isinstance(part, _NormBase) and part.training:
                    raise shared_buffer_error(name, other, f"nn.{type(part).__name__}")
                found |= {name: other, other: name}
    return found


def refuse_parameters_over_one_memory(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ModelError if a trainable parameter shares elements with another parameter: an update of one changes both
    while they are on the same stage, and neither gradient is that of both."""
    places: dict[int, list[tuple[str, nn.Parameter, int, int]]] = {}
    for name, parameter in parameters.items():
        if (type(parameter) is not nn.Parameter or parameter.is_meta or parameter.layout is not torch.strided
                or not parameter.numel()):
            continue
        start = parameter.data_ptr()
        is_dense = parameter.numel() == 1 + sum((n - 1) * step
                                                for n, step in zip(parameter.shape, parameter.stride(), strict=True))
        stop = start + (parameter.nbytes if is_dense else 1)
        group = places.setdefault(parameter.untyped_storage()._cdata, [])
        for other, two, first, last in group:
            if two is not parameter and start < last and first < stop and (
                    parameter.requires_grad or two.requires_grad):
                raise ModelError(f"has its values in the memory of {other}, and is a separate parameter",
                                 code="parameters-over-one-memory", where=f"parameter {name}",
                                 value=tuple(parameter.shape),
                                 remedy="Tie them as one parameter (one.weight = other.weight), or give each its "
                                        "own memory: nn.Parameter(other.weight.detach().clone()).")
        group.append((name, parameter, start, stop))


def shared_buffer_error(name: str, other: str, module: str | None) -> ModelError:
    return ModelError(f"is also {other}, of a block on another stage, and training changes it: stages would not agree "
                      "on its value", code="shared-buffer-changes", where=f"buffer {name}", value=module,
                      remedy="Give each block its own buffer, put the blocks on one stage, or freeze the buffer "
                             "(a batch norm: module.eval()).")
