"""Buffers that blocks of several stages share by identity."""

from __future__ import annotations

from collections.abc import Mapping

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


def shared_buffer_error(name: str, other: str, module: str | None) -> ModelError:
    return ModelError(f"is also {other}, of a block on another stage, and training changes it: stages would not agree "
                      "on its value", code="shared-buffer-changes", where=f"buffer {name}", value=module,
                      remedy="Give each block its own buffer, put the blocks on one stage, or freeze the buffer "
                             "(a batch norm: module.eval()).")
