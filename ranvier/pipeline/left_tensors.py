"""Tensors that blocks leave in attributes, for a loss that has the modules of these blocks.

    self.aux = balance(scores)                                                   a block of the first stage
    loss = lambda y, t: (criterion(y, t) + sum(m.aux for m in experts), n)       the last stage: another value, or none

The loss runs on the last stage, where modules of earlier stages have never run. What a plain loop would add to the loss
would be left out without notice, so a training batch in which a block leaves a tensor with a gradient where the loss
may look for it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from ranvier.errors import ModelError
from ranvier.pipeline.shared_objects import tensors_with_gradients

_MOST_DEPTH = 4


class LeftTensors:
    """loss: the user's. blocks: (number in the model, name, module) of this rank's stages that do not compute it."""

    def __init__(self, loss: Callable[..., Any], blocks: Sequence[tuple[int, str, nn.Module]]) -> None:
        known = {id(part) for module in _modules_of(loss, 0, set()) for part in module.modules()} if blocks else set()
        self._modules = [(path, part) for _, block, module in blocks
                         for path, part in module.named_modules(prefix=block) if id(part) in known]

    def check(self) -> None:
        """A training batch has run. ModelError where a block has left a tensor with a gradient."""
        for path, module in self._modules:
            for name, value in vars(module).items():
                if name not in _OF_EVERY_MODULE and any(
                        one.grad_fn is not None for one in tensors_with_gradients([value])):
                    raise ModelError("is a tensor with a gradient that a block leaves in an attribute. The loss has "
                                     "the block's module, and on its own stage would find another value, or none",
                                     code="loss-reads-attribute", where=f"{path}.{name}",
                                     remedy='Pass it on to the loss in the carried state, {"x": x, "aux": aux}. If the '
                                            "loss does not read it, detach() it.")


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _modules_of(value: object, depth: int, seen: set[int]) -> Iterator[nn.Module]:
    """The modules that a function can reach by its closure, defaults, arguments, globals and object."""
    if depth > _MOST_DEPTH or id(value) in seen:
        return
    seen.add(id(value))
    inner: list[object] = []
    if isinstance(value, nn.Module):
        yield value
        inner = [one for name, one in vars(value).items() if name not in _OF_EVERY_MODULE]
    elif isinstance(value, partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType):
        inner = [value.__self__, value.__func__]
    elif isinstance(value, FunctionType):
        if not (value.__module__ or "").startswith(("torch.", "ranvier.")):
            inner = [*_contents(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(),
                     *(value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__)]
    elif isinstance(value, list | tuple | set):
        inner = list(value)
    elif isinstance(value, dict):
        inner = list(value.values())
    elif not isinstance(value, type | ModuleType | Tensor):
        inner = list(getattr(value, "__dict__", {}).values())
    for one in inner:
        yield from _modules_of(one, depth + 1, seen)


def _contents(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it has none yet
            continue


def _names(code: CodeType) -> set[str]:
    """Global names that a function's code uses, that of functions inside of it, too."""
    return set(code.co_names).union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))
