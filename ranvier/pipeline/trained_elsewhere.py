"""A user's modules that other ranks train: on this rank they keep the old values.

A model that is given as modules exists in full on every rank, and an engine trains the blocks of the rank's own stages.
A program that computes with the others, or saves them, would get old values without an error. So these modules warn
until new values are written into them, and an engine that would compute with them refuses the batch. Code of this
rank's blocks or loss that reaches one of them, for example through a list or a closure, gives its parameters gradients
that are lost.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

from ranvier.errors import ModelError
from ranvier.originals.same_memory import ByMemory, storage_of
from ranvier.tensor.splittable import SplitHook


@dataclass(eq=False)
class _OldValues(SplitHook):
    """Hook of one module. known: name -> (parameter, version) when other ranks first updated it. told: contains names
    once the engine has warned. rewritten: list to which the module is added when it has no old values any more."""

    told: list[str]
    rewritten: list[ref[nn.Module]]
    known: dict[str, tuple[ref[nn.Parameter], int]]

    def __call__(self, module: nn.Module, *_: object) -> None:
        """Warn that the module is used, if it has old values."""
        self.look(module)
        self._warn(type(module).__name__)

    def look(self, module: nn.Module, *_: object) -> None:
        """Remove the hooks if new values have been written: hooks interfere with torch.compile and torch.jit."""
        old = {name: (reference, version) for name, (reference, version) in self.known.items()
               if (held := reference()) is not None and held is module._parameters.get(name)
               and held._version == version}
        if not old:
            self.remove(module)
        self.known = old

    def _warn(self, module: str) -> None:
        if self.known and not self.told:
            self.told += self.known
            warnings.warn(f"{module}.{self.told[0]} has its values from before the training here: another rank has "
                          "trained it, and all that is not on this rank's stage. Before you use or save the model, "
                          "call state = engine.full_state_dict() on all ranks and model.load_state_dict(state) on "
                          "rank 0", stacklevel=4)

    def attach(self, module: nn.Module) -> None:
        """Register for calls when the module computes, returns its state, and has been loaded."""
        module.register_forward_pre_hook(self)
        module.register_state_dict_pre_hook(self)
        module.register_load_state_dict_post_hook(self.look)

    def remove(self, module: nn.Module) -> None:
        """Remove these hooks from the module."""
        if self.known:
            self.rewritten.append(ref(module))
        self.known = {}
        hooks: dict[int, Any]
        for hooks in (module._forward_pre_hooks, module._state_dict_pre_hooks, module._load_state_dict_post_hooks):
            for number in [number for number, hook in hooks.items() if hook in (self, self.look)]:
                if hooks is module._forward_pre_hooks or number == next(reversed(hooks)):
                    del hooks[number]  # torch iterates over these now, and would skip the next one

    def __deepcopy__(self, memo: dict[int, Any]) -> _OldValues:
        """Return the record of a copied module, whose values are equally old."""
        copies = {name: (memo.get(id(reference())), version == getattr(reference(), "_version", None))
                  for name, (reference, version) in self.known.items()}
        return _OldValues(self.told, [],
                          {name: (ref(reference), reference._version) for name, (reference, is_old) in copies.items()
                                          if reference is not None and is_old})

    def __reduce__(self) -> tuple[object, ...]:
        """Return an empty record: the module is saved in full."""
        if any(getattr(reference(), "_version", None) == version for reference, version in self.known.values()):
            self._warn("the module")
        return _OldValues, ([], [], {})


def _notes(module: nn.Module) -> list[_OldValues]:
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _OldValues)]


def gradient_state(parameter: nn.Parameter) -> tuple[bool, int, int]:
    """A value that changes whenever something is added to a parameter's gradient, or it is frozen or unfrozen."""
    grad = parameter.grad
    return parameter.requires_grad, id(grad), 0 if grad is None else grad._version


class TrainedElsewhere:
    """Marks a user's modules that other ranks train. modules: all blocks that the user has made. own: the names of this
    rank's blocks. held: their parameters. splits: the rank trains parts, on rows and columns, so that no rank trains
    the user's blocks themselves."""

    def __init__(self, modules: Mapping[str, nn.Module], own: Iterable[str], held: Iterable[nn.Parameter], *,
                 splits: bool = False) -> None:
        own_blocks, self._here, self._told = set(own), {id(parameter) for parameter in held}, list[str]()
        self._rewritten = [ref(module) for block in modules if splits or block not in own_blocks
                           for module in modules[block].modules()
                           if any(parameter is not None and id(parameter) not in self._here
                                  for parameter in module._parameters.values())]
        """Modules trained elsewhere that have no old values until the next update. Not kept alive here: a program may
        drop the model, of which this rank needs only a part."""
        self._own = [(f"{block}.{path}".removesuffix("."), module) for block in modules if block in own_blocks
                     for path, module in modules[block].named_modules()]
        self.blocks = [(block, ref(module)) for block, module in modules.items() if block not in own_blocks]
        self.others = [(f"{block}.{name}", ref(parameter)) for block in modules if block not in own_blocks
                        for name, parameter in modules[block].named_parameters() if id(parameter) not in self._here]
        """Name and parameter of all parameters that this rank does not hold."""
        self.may_be_old = False
        """Whether other ranks may have newer values than this rank by now."""
        self._optimizer: torch.optim.Optimizer | None = None
        self._copies: Mapping[nn.Parameter, Tensor] = {}
        self._num_updated = 0
        self._of_no_block: list[tuple[None, ref[nn.Parameter]]] = []
        """Parameters in the user's optimizer that no block has."""
        self._at_start: list[tuple[str | None, ref[nn.Parameter], tuple[bool, int, int]]] = []
        """`gradient_state` of all these when the batch began; the name is None for parameters of no block."""

    def note_optimizer(self, optimizer: torch.optim.Optimizer | None, copies: Mapping[nn.Parameter, Tensor]) -> None:
        """Set the optimizer whose parameters are checked. copies: tensors that replace parameters in it."""
        self._optimizer, self._copies = optimizer, copies

    def _look_at_optimizer(self) -> None:
        """Update the list of what the optimizer updates, to which a program may add."""
        updated = [parameter for group in getattr(self._optimizer, "param_groups", ()) for parameter in group["params"]]
        if len(updated) != self._num_updated:
            known = self._here.union((id(reference()) for _, reference in self.others), map(id, self._copies.values()))
            self._of_no_block = [(None, ref(parameter)) for parameter in updated if id(parameter) not in known]
            self._num_updated = len(updated)

    def begin(self) -> None:
        """Begin a training batch."""
        self.may_be_old = True
        self._look_at_optimizer()
        self._at_start = [(name, reference, gradient_state(held))
                          for name, reference in (*self.others, *self._of_no_block)
                          if (held := reference()) is not None]

    def reached_parameters(self) -> Iterator[str]:
        """Yield the parameters of other ranks that have got a gradient from the batch on this rank, or were frozen
        here. Raises ModelError for a parameter that the optimizer updates and no block has: its gradient is that of the
        sum of this rank's losses."""
        for name, reference, before in self._at_start:
            if (held := reference()) is None or gradient_state(held) == before:
                continue
            if name is None:
                raise ModelError("has a parameter that no block has, and the batch gives it a gradient, which is "
                                 "neither summed over replicas nor divided by the weight of the batch",
                                 code="parameter-of-no-block", where="optimizer", value=tuple(held.shape),
                                 remedy="Make it an attribute of a block, or of a loss that is a module, and give the "
                                        "optimizer only its argument: optimizer=lambda parameters: "
                                        "torch.optim.AdamW(parameters).")
            yield name

    def check_start(self) -> None:
        """Raise ModelError if this rank would begin with old values, which another engine has trained elsewhere and
        which were neither loaded nor written since."""
        for path, module in self._own:
            for note in self._notes_of_others(module) if module._forward_pre_hooks else ():
                note.look(module)
                for name in note.known:
                    raise ModelError("has its values from before the training here: another engine has "
                                     "trained it on another rank", code="parameter-trained-elsewhere",
                                     where=f"parameter {path}.{name}",
                                     remedy="Save a checkpoint with that engine and load it with this one "
                                            "(ranvier.Checkpoints), write the full state into the model on all ranks "
                                            "(model.load_state_dict), or cut the model as in that engine "
                                            "(Pipeline(boundaries=...)).")

    def after_load(self) -> None:
        """Called when all values of this rank have been loaded."""
        self.may_be_old = True
        for _, module in self._own:
            for note in self._notes_of_others(module):
                note.remove(module)

    def _notes_of_others(self, module: nn.Module) -> list[_OldValues]:
        """The records of other engines."""
        return [note for note in _notes(module) if note.rewritten is not self._rewritten]

    def after_update(self) -> None:
        """Called when all ranks have updated what they train. Costs time only after the first update and after new
        values."""
        rewritten, self._rewritten[:] = self._rewritten[:], []
        for module in filter(None, (reference() for reference in rewritten)):
            known = {name: (ref(parameter), parameter._version) for name, parameter in module._parameters.items()
                     if parameter is not None and parameter.requires_grad and id(parameter) not in self._here}
            for note in _notes(module):
                if note.known.keys() <= known.keys():  # of an earlier engine
                    note.remove(module)
            if known:
                _OldValues(self._told, self._rewritten, known).attach(module)


# --- code that computes with them -------------------------------------------------------------------------------------

# Parameters of other stages that code of a stage reaches, through a list, a closure or a hook.
#
#     class Head(nn.Module):
#         def forward(self, x):
#             scale = self.first[0].weight.norm().item()       an old value, if another rank has the block
#             self.first[0].weight.mul_(0.99)                  lost there; on this rank, at a time of the schedule
#             return scale * self.body(x)
#
# A gradient of such a parameter is noticed without it. Reads and writes without a gradient show only in the operations:
# forwards and backwards of stages that may reach such parameters run under this mode.


_NO_VALUES = frozenset({"new_empty", "new_full", "new_ones", "new_zeros", "empty_like", "full_like", "ones_like",
                        "rand_like", "randint_like", "randn_like", "zeros_like"})
"""Operations that use only a tensor's shape and format."""


class OthersParameters(TorchDispatchMode):
    """Mode that raises ModelError if code of one stage of this rank reads a parameter that another rank trains, or
    writes a parameter of another stage.

    elsewhere: the user's modules that other ranks train. names_in_whole: name -> names in the user's module. here: name
    -> parameters of other stages of this rank. code: the blocks, and "loss", whose code reaches some of these.
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
        self._before = [(name, parameter, _form(parameter)) for name, parameter in (*elsewhere, *self._here.items())]
        self._written = ByMemory((*elsewhere, *self._here.items()))
        self._read = ByMemory(one for one in elsewhere if self._elsewhere.may_be_old and one[1].requires_grad)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        before, self._before = self._before, []
        for name, parameter, form in before if error is None else ():  # which no operation shows: one.data = other
            if _form(parameter) != form:
                raise self._error(name)

    def around(self, name: str) -> AbstractContextManager[object]:
        """The context of a block, or of the loss: this mode if it needs the check, else none, since torch.compile does
        not work under a mode. Recomputed forwards run inside the mode of a backward."""
        is_inside = _get_current_dispatch_mode() is self
        if (name in self.code) == is_inside:
            return nullcontext()
        return _pop_mode_temporarily() if is_inside else self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in _NO_VALUES:
            self._look(self._read, (args, kwargs))
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            self._look(self._written, [given.get(argument.name) for argument in func._schema.arguments
                                       if argument.alias_info is not None and argument.alias_info.is_write])
        return func(*args, **kwargs)

    def _look(self, parameters: ByMemory[str], values: object) -> None:
        for leaf in tree_leaves(values) if parameters else ():
            for name in parameters.overlapping(leaf) if isinstance(leaf, Tensor) else ():
                raise self._error(name)

    def _error(self, name: str) -> ModelError:
        return used_from_outside(self._names_in_whole.get(name, (name,))[0])


def _form(parameter: nn.Parameter) -> tuple[int, bool]:
    return storage_of(parameter), parameter.requires_grad


def used_from_outside(name: str) -> ModelError:
    """The error for a parameter that is used by code whose block does not have it."""
    return ModelError("is used by a block, or by a loss, that does not have it, and another stage trains it: its value "
                      "there is old, and its gradient from there, or what is written there, is lost",
                      code="parameter-used-from-outside", where=f"parameter {name}",
                      remedy="Make it, or its layer, an attribute of each block that uses it (self.other = layer, and "
                             "no list, closure or bound method), or of a loss that is a module: Ranvier ties "
                             "parameters that several blocks have. Or put the blocks on one stage "
                             "(Pipeline(boundaries=...)).")
