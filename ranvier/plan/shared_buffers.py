"""Buffers that blocks of several stages share, or whose memory they share."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ranvier.errors import ModelError
from ranvier.layout import Layout
from ranvier.originals.same_memory import ByMemory


def buffers_of_several_stages(layout: Layout, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Buffer by full name -> its name on another stage, whose block has the same buffer, or one over the same memory.
    Raises ModelError for a running statistic of a batch norm that trains.

    modules: all blocks of the model, in order.
    """
    found: dict[str, str] = {}
    first: dict[int, int] = {}
    stages = {block: layout.stage_of(number) for number, block in enumerate(modules)}
    buffers = [(".".join(filter(None, (block, path, leaf))), stages[block], part, value)
               for block, module in modules.items() for path, part in module.named_modules()
               for leaf, value in part.named_buffers(recurse=False)]
    memory = ByMemory(enumerate(value for *_, value in buffers))
    for number, (name, stage, part, value) in enumerate(buffers):
        alike = [first.setdefault(id(value), number), *memory.overlapping(value)]
        other = next((buffers[one][0] for one in alike if one < number and buffers[one][1] != stage), None)
        if other is None:
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
