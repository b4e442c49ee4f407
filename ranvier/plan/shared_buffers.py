"""Buffers, and lists, dicts and sets, that blocks of several stages share by identity."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ranvier.errors import ModelError
from ranvier.layout import Layout

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def buffers_of_several_stages(layout: Layout, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Buffer or container, by full name -> one of a block on another stage that is the same object. ModelError where
    that is a running statistic of a batch norm that trains.

    modules: all blocks of the model, in order.
    """
    found: dict[str, str] = {}
    first: dict[int, tuple[str, int]] = {}
    for number, (block, module) in enumerate(modules.items()):
        for path, part in module.named_modules():
            buffers = list(part.named_buffers(recurse=False))
            for leaf, value in (*buffers, *containers_of(part)):
                name = ".".join(filter(None, (block, path, leaf)))
                other, stage = first.setdefault(id(value), (name, layout.stage_of(number)))
                if stage == layout.stage_of(number):
                    continue
                if isinstance(part, _NormBase) and part.training and buffers:
                    raise shared_buffer_error(name, other, f"nn.{type(part).__name__}")
                found |= {name: other, other: name}
    return found


def containers_of(module: nn.Module) -> Iterator[tuple[str, Collection[object]]]:
    """The lists, dicts and sets that a module of a user's has as attributes."""
    if not type(module).__module__.startswith("ranvier."):
        for name, value in vars(module).items():
            if isinstance(value, list | dict | set | deque) and name not in _OF_EVERY_MODULE:
                yield name, value


def shared_container_error(name: str, other: str) -> ModelError:
    return ModelError(f"is also {other}, of a block on another stage, and a forward adds tensors with gradients, which "
                      "the other stage does not see", code="shared-container-changes", where=f"attribute {name}",
                      remedy="Pass what later blocks need in the carried state, detach what is only logged, or put the "
                             "blocks on one stage.")


def shared_buffer_error(name: str, other: str, module: str | None) -> ModelError:
    return ModelError(f"is also {other}, of a block on another stage, and training changes it: stages would not agree "
                      "on its value", code="shared-buffer-changes", where=f"buffer {name}", value=module,
                      remedy="Give each block a buffer of its own, put the blocks on one stage, or freeze the buffer "
                             "(a batch norm: module.eval()).")
