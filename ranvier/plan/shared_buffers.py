"""Buffers that blocks of several stages share by identity."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ranvier.errors import ModelError
from ranvier.layout import Layout


def buffers_of_several_stages(layout: Layout, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Buffer, by full name -> a buffer of a block on another stage that is the same object. ModelError where that is a
    running statistic of a batch norm that trains.

    modules: all blocks of the model, in order.
    """
    found: dict[str, str] = {}
    first: dict[Tensor, tuple[str, int]] = {}
    for number, (block, module) in enumerate(modules.items()):
        for path, part in module.named_modules():
            for leaf, buffer in part.named_buffers(recurse=False):
                name = ".".join(filter(None, (block, path, leaf)))
                other, stage = first.setdefault(buffer, (name, layout.stage_of(number)))
                if stage == layout.stage_of(number):
                    continue
                if isinstance(part, _NormBase) and part.training:
                    raise shared_buffer_error(name, other, f"nn.{type(part).__name__}")
                found |= {name: other, other: name}
    return found


def shared_buffer_error(name: str, other: str, module: str | None) -> ModelError:
    return ModelError(f"is also {other}, of a block on another stage, and training changes it: stages would not agree "
                      "on its value", code="shared-buffer-changes", where=f"buffer {name}", value=module,
                      remedy="Give each block a buffer of its own, put the blocks on one stage, or freeze the buffer "
                             "(a batch norm: module.eval()).")
