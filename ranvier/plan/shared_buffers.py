"""Buffers, and objects that may hold tensors, that blocks of several stages, or a loss, share by identity."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ranvier.errors import ModelError
from ranvier.layout import Layout
from ranvier.plan.reached_objects import Reached, reached_from


def buffers_of_several_stages(layout: Layout, modules: Mapping[str, nn.Module], loss: object = None) -> dict[str, str]:
    """Buffer, or object in which a forward may leave tensors, by full name -> a name of it on another stage, where a
    block or the loss reaches the same. ModelError where that is a running statistic of a batch norm that trains.

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
    if len(set(stages.values())) > 1:
        found |= _reached_from_several_stages(stages, modules, loss)
    return found


def _reached_from_several_stages(stages: Mapping[str, int], modules: Mapping[str, nn.Module], loss: object
                                 ) -> dict[str, str]:
    """A module counts where another stage reaches it without having it: of what it has, each stage has its own."""
    places: dict[int, list[tuple[Reached, int]]] = {}
    for name, root, stage in (*((name, module, stages[name]) for name, module in modules.items()),
                              ("loss", loss, max(stages.values()))):
        for one in reached_from(name, root):
            places.setdefault(id(one.value), []).append((one, stage))
    found: dict[str, str] = {}
    for group in places.values():
        for one, stage in group:
            for other, others_stage in group:
                if others_stage != stage and not (one.is_part and other.is_part):
                    found.setdefault(one.name, other.name)
    return found


def refuse_parameters_over_one_memory(parameters: Mapping[str, nn.Parameter]) -> None:
    """ModelError where one trains and another parameter has elements of it: an update of one changes both, as long as
    they are on one stage, and no gradient is that of both."""
    places: dict[int, list[tuple[str, nn.Parameter, int, int]]] = {}
    for name, one in parameters.items():
        if type(one) is not nn.Parameter or one.is_meta or one.layout is not torch.strided or not one.numel():
            continue
        start = one.data_ptr()
        is_dense = one.numel() == 1 + sum((n - 1) * step for n, step in zip(one.shape, one.stride(), strict=True))
        stop = start + (one.nbytes if is_dense else 1)
        group = places.setdefault(one.untyped_storage()._cdata, [])
        for other, two, first, last in group:
            if two is not one and start < last and first < stop and (one.requires_grad or two.requires_grad):
                raise ModelError(f"has its values in the memory of {other}, and is a parameter of its own",
                                 code="parameters-over-one-memory", where=f"parameter {name}", value=tuple(one.shape),
                                 remedy="Tie them as one parameter (one.weight = other.weight), or give each a memory "
                                        "of its own: nn.Parameter(other.weight.detach().clone()).")
        group.append((name, one, start, stop))


def shared_container_error(name: str, other: str) -> ModelError:
    return ModelError(f"is also {other}, for code of another stage, and a forward leaves tensors with gradients there, "
                      "which the other stage does not see", code="shared-container-changes", where=f"attribute {name}",
                      remedy="Pass what later blocks or the loss need in the carried state, detach what is only logged,"
                             " or put the blocks on one stage.")


def shared_buffer_error(name: str, other: str, module: str | None) -> ModelError:
    return ModelError(f"is also {other}, of a block on another stage, and training changes it: stages would not agree "
                      "on its value", code="shared-buffer-changes", where=f"buffer {name}", value=module,
                      remedy="Give each block a buffer of its own, put the blocks on one stage, or freeze the buffer "
                             "(a batch norm: module.eval()).")
