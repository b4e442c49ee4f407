"""Parameters of other stages that code of a stage reaches, by a list, a closure or a hook.

    class Head(nn.Module):
        def forward(self, x):
            scale = self.first[0].weight.norm().item()       an old value, where another rank has the block
            self.first[0].weight.mul_(0.99)                  lost there; on this rank, at a time of the schedule
            return scale * self.body(x)

A gradient that comes to them shows by itself (`pipeline/trained_elsewhere`). What is read or written without one, only
the operations show: forwards and backwards of stages that may reach such parameters run under this mode.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

from ranvier.errors import ModelError
from ranvier.originals.same_memory import ByMemory, storage_of
from ranvier.pipeline.trained_elsewhere import TrainedElsewhere

_NO_VALUES = frozenset({"new_empty", "new_full", "new_ones", "new_zeros", "empty_like", "full_like", "ones_like",
                        "rand_like", "randint_like", "randn_like", "zeros_like"})
"""Operations that take a tensor's form alone."""


class OthersParameters(TorchDispatchMode):
    """Inside, ModelError where code of one stage of this rank reads a parameter that another rank trains, or writes one
    of another stage.

    elsewhere: the user's modules that other ranks train. names_in_whole: name -> those in the user's module. here: name
    -> those of other stages of this rank. code: the blocks, and "loss", whose code reaches some of these.
    """

    def __init__(self, elsewhere: TrainedElsewhere, names_in_whole: Mapping[str, Sequence[str]],
                 here: Mapping[str, nn.Parameter], code: Collection[str]) -> None:
        TorchDispatchMode.__init__(self)
        self.code = code
        self._elsewhere, self._names_in_whole, self._here = elsewhere, names_in_whole, here
        self._read = self._written = ByMemory[str](())
        """Names of parameters."""
        self._before: list[tuple[str, nn.Parameter, tuple[int, bool]]] = []

    def __enter__(self) -> OthersParameters:
        elsewhere = [(name, one) for name, held in self._elsewhere.others if (one := held()) is not None]
        self._before = [(name, one, _form(one)) for name, one in (*elsewhere, *self._here.items())]
        self._written = ByMemory((*elsewhere, *self._here.items()))
        self._read = ByMemory(one for one in elsewhere if self._elsewhere.may_be_old and one[1].requires_grad)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        before, self._before = self._before, []
        for name, one, form in before if error is None else ():  # what no operation shows: one.data = other
            if _form(one) != form:
                raise self._error(name)

    def around(self, name: str) -> AbstractContextManager[object]:
        """The surroundings of a block, or of the loss: this mode for those that need it, and for others none, since
        torch.compile takes no code under a mode. Forwards that run again do so inside of the mode of a backward."""
        is_inside = _get_current_dispatch_mode() is self
        if (name in self.code) == is_inside:
            return nullcontext()
        return _pop_mode_temporarily() if is_inside else self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in _NO_VALUES:
            self._look(self._read, (args, kwargs))
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
            self._look(self._written, [given.get(one.name) for one in func._schema.arguments
                                       if one.alias_info is not None and one.alias_info.is_write])
        return func(*args, **kwargs)

    def _look(self, parameters: ByMemory[str], values: object) -> None:
        for one in tree_leaves(values) if parameters else ():
            for name in parameters.over(one) if isinstance(one, Tensor) else ():
                raise self._error(name)

    def _error(self, name: str) -> ModelError:
        return used_from_outside(self._names_in_whole.get(name, (name,))[0])


def _form(parameter: nn.Parameter) -> tuple[int, bool]:
    return storage_of(parameter), parameter.requires_grad


def used_from_outside(name: str) -> ModelError:
    """The error for a parameter that is in use where nobody has it."""
    return ModelError("is used by a block, or by a loss, that does not have it, and another stage trains it: its value "
                      "there is old, and its gradient from there, or what is written there, is lost",
                      code="parameter-used-from-outside", where=f"parameter {name}",
                      remedy="Make it, or its layer, an attribute of each block that uses it (self.other = layer, and "
                             "no list, closure or bound method), or of a loss that is a module: Ranvier ties "
                             "parameters that several blocks have. Or put the blocks on one stage "
                             "(Pipeline(boundaries=...)).")
