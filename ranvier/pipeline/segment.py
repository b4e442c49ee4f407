"""One recomputed segment: its blocks run again in the backward, from what has entered them the first time.

    forward     state, buffers -> outputs     keeps the state, and the old values of buffers that the blocks change
    backward    state, those buffers -> outputs, and from there the gradients

Blocks may put other tensors into their state, change buffers as BatchNorm and spectral norm do, change attributes and
draw random numbers: the second run gets a copy of the state, and buffers (in their own memory), attributes and
generators as they were, so that nothing is changed twice, and neither other microbatches in between nor other blocks
that share them have an effect. A hook that a block puts on a tensor of the state is put on an alias the second time, so
that it runs once. What cannot be restored is refused: tensors of the state that are changed in place, parameters that
the second run would change again or find with other values, and hooks of modules, which would be called twice. Under
selective recomputation the second run reuses outputs of expensive operations instead of computing them
(`ranvier.tensor.kept_outputs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ranvier.block import LossBlock, State, as_named_tensors, from_named_tensors
from ranvier.errors import ModelError
from ranvier.originals.same_memory import copies_of
from ranvier.pipeline.held_parameters import BATCHES_BY_VALUE, changed_norms, with_norms
from ranvier.sent_values import place_of
from ranvier.tensor.columns import plain
from ranvier.tensor.kept_outputs import KeptOutputs
from ranvier.tensor.state_snapshot import StateSnapshot

_KNOWN_HOOKS = "ranvier.", "torch.nn.utils."
"""Modules whose hooks may run twice: they compute weights or outputs, and change at most buffers."""

_FILLS_LATER = frozenset({"rrelu", "rrelu_"})
"""Functions that save a tensor for the backward before they fill it. Torch stops a second run as soon as all is saved.
"""

_COMPUTED = nullcontext()
_Place = tuple[nn.Module, str]
"""A module and the name of its buffer, or of an attribute that is a tensor."""


class _Left(NamedTuple):
    """A tensor that a first run has found at a place, and not changed. version: its version. copied: a copy, if a block
    outside of the segment may have changed it in place before it is known that forwards do so."""

    place: _Place
    tensor: Tensor | None
    version: int
    copied: Tensor | None


class _Moved(NamedTuple):
    """A parameter that a first run has changed. changes: number of changes, by its versions; 0 for a write through its
    `data`.
    value: a copy of its values afterwards."""

    parameter: nn.Parameter
    changes: int
    value: Tensor


class _Reads(TorchDispatchMode):
    """Watches a second run. early: the parameters that it reads before it has made as many changes to them as the first
    run."""

    def __init__(self, moved: Sequence[_Moved]) -> None:
        TorchDispatchMode.__init__(self)
        self._ready = [(entry.parameter, entry.parameter._version + entry.changes) for entry in moved if entry.changes]
        self._unwritten = {entry.parameter: entry.parameter.data_ptr() for entry in moved if not entry.changes}
        self.early: set[nn.Parameter] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            kinds = [bool(argument.alias_info and argument.alias_info.is_write) for argument in func._schema.arguments]
            read = [value for value, is_written in zip(args, kinds, strict=False) if not is_written]
            unready = [parameter for parameter, version in self._ready if parameter._version != version]
            unready += [parameter for parameter, place in self._unwritten.items() if parameter.data_ptr() == place]
            for tensor in tree_leaves((read, kwargs)):
                self.early.update(_parameters_under(tensor, unready))
            for tensor, is_written in zip(args, kinds, strict=False):
                for parameter in _parameters_under(tensor, self._unwritten) if is_written else ():
                    del self._unwritten[parameter]
        return func(*args, **(kwargs or {}))


def _parameters_under(tensor: object, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters in whose memory a tensor begins."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        return []
    return [parameter for parameter in parameters if 0 <= tensor.data_ptr() - parameter.data_ptr() < parameter.nbytes]


class ChangedInPlace:
    """Buffers, and tensors that are attributes, that forwards change in place: one for all segments of a stage."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        """blocks: all of the stage."""
        self._modules: dict[nn.Module, None] = {}
        self.places: set[_Place] = set()
        found: dict[int, Tensor] = {}
        self.shared: dict[int, Tensor] = {}
        """Identity of a tensor that several blocks have -> the tensor."""
        for block in blocks:
            own = {id(tensor): tensor for module in block.modules() for _, tensor in _tensors_of(module)}
            self.shared |= {key: tensor for key, tensor in own.items() if key in found}
            found |= own
            self._modules |= dict.fromkeys(block.modules())

    def add(self, changed: Tensor) -> None:
        """Note that this tensor is changed in place, at all of its places."""
        self.places |= {(module, name) for module in self._modules for name, tensor in _tensors_of(module)
                        if tensor is changed}


class Segment:
    """Blocks that are recomputed together. blocks: (name, module), in order. selective: whether outputs of expensive
    operations are kept. changing: what forwards of all blocks of the stage change in place; default: of these
    blocks."""

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]], *, selective: bool = False,
                 changing: ChangedInPlace | None = None) -> None:
        # The stage computes a loss after its segments, once.
        self._blocks = [(name, block) for name, block in blocks if not isinstance(block, LossBlock)]
        self._selective = selective
        self._changing = changing or ChangedInPlace(block for _, block in blocks)
        first, last = blocks[0][0], blocks[-1][0]
        self._where = f"block {first}" if first == last else f"blocks {first} to {last}"
        codes = (getattr(module.forward, "__code__", None) for _, block in self._blocks for module in block.modules())
        self._stops_early = all(code is None or _FILLS_LATER.isdisjoint(code.co_names) for code in codes)
        self._seen: set[_Place] = set()
        """Buffers that a forward has found: the first forward shows whether forwards change them."""
        self._num_batches = -1
        self._written: set[nn.Parameter] = set()
        """Parameters that forwards change without a new version."""
        self.begin()
        self.check()

    def begin(self) -> None:
        """Begin a batch."""
        self._modules = dict.fromkeys(module for _, block in self._blocks for module in block.modules())
        self._others = [module for module in self._modules if not _is_ours(module)]
        """Modules whose attributes are the user's alone: split layers keep work in progress in theirs."""
        self._parameters = [parameter for module in self._modules for parameter in module._parameters.values()
                            if parameter is not None]
        self._num_batches, self._looked = self._num_batches + 1, False
        self._values: dict[int, Tensor] = {}
        """Identity of a parameter -> its values after the last forward that has changed them."""
        self._weights = {parameter.untyped_storage()._cdata for parameter in self._parameters}

    def check(self) -> None:
        """Raise ModelError for users' hooks, which recomputation would call twice."""
        for block, module in self._blocks:
            for name, part in module.named_modules(prefix=block):
                for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
                    if not _origin(hook).startswith(_KNOWN_HOOKS):
                        raise ModelError("has a forward hook, which recomputation would call twice",
                                         code="recompute-with-hook", where=name,
                                         value=_name(hook),
                                         remedy="Remove the hook, do its work in the module's forward, or set "
                                                "`--memory.recompute none`.")

    def run(self, compute: Callable[[State], State], state: State) -> State:
        """Return `compute(state)`, whose activations are not kept but recomputed. Raises ModelError if it changes in
        place a tensor of the state, or a buffer that it did not change at first."""
        tensors = as_named_tensors(state, self._where)
        versions = {name: plain(tensor)._version for name, tensor in tensors.items()}
        before: dict[_Place, Tensor | None] = {}
        looks = not self._looked and self._num_batches <= BATCHES_BY_VALUE
        self._looked = True
        then = StateSnapshot(self._others, common=bool(self._others), arrays=looks)  # ours draw from neither
        kept = KeptOutputs(self._weights) if self._selective else None
        left: list[_Left] = []
        moved: list[_Moved] = []
        unmoved: list[tuple[nn.Parameter, int]] = []
        ran = False
        failed: list[BaseException] = []

        def once_or_again(state: State) -> State:
            nonlocal ran
            entering = as_named_tensors(state, self._where)
            if ran:
                self._check(tensors, versions, "after these blocks, which recomputation runs again")
                aliases = {name: tensor.view_as(tensor) if type(tensor) is Tensor and tensor.requires_grad else tensor
                           for name, tensor in entering.items()}
                for parameter, version in unmoved:
                    if parameter._version != version:
                        raise self._changed_parameter(parameter)
                with then.restored(), self._buffers_of(before | self._changed_by_others(left)), \
                        _COMPUTED if kept is None else kept.replaying(), self._moved_again(moved):
                    return compute(from_named_tensors(aliases))
            ran = True
            weights = [parameter._version for parameter in self._parameters]
            norms = self._norms(looks)
            with self._note_changes(before, left), _COMPUTED if kept is None else kept.recording():
                result = compute(from_named_tensors(entering))
            then.forget_unmoved()
            if (held := then.changed_in_place()) is not None:
                raise ModelError("leads to a tensor or array, in a list, dict or object, that was changed in place, "
                                 "and that recomputation would change twice", code="recompute-held-changed",
                                 where=f"attribute {self._path(*held)}",
                                 remedy="Make it a buffer or an attribute of the module, put a new one in its place "
                                        "(x = x + y), or set `--memory.recompute none`.")
            rewritten = set(changed_norms(norms))
            for parameter, version in zip(self._parameters, weights, strict=True):
                changes = parameter._version - version
                if (changes or parameter in rewritten) and not parameter.is_meta:
                    moved.append(_Moved(parameter, changes, self._value_of(parameter)))
                    self._written |= set() if changes else {parameter}
                else:
                    unmoved.append((parameter, version))
            self._check(tensors, versions, "by these blocks, which recomputation runs again")
            return result

        def returning(state: State) -> State:
            """Torch 2.11 would leave the hooks of a first run that raises on the thread, for all later forwards."""
            again = ran
            try:
                return once_or_again(state)
            except BaseException as error:
                if again:
                    raise
                failed.append(error)
                return state

        try:
            result = checkpoint(returning, state, use_reentrant=False, early_stop=self._stops_early)
            if failed:
                raise failed.pop()  # not held by this frame, which its traceback holds
            return cast(State, result)
        except RuntimeError as error:
            if "support saved tensor hooks" not in str(error):
                raise
            raise ModelError("calls torch.func.grad or another transform in reverse mode, which torch cannot recompute",
                             code="recompute-with-transform", where=self._where,
                             remedy="Use torch.func.jvp or jacfwd, or set `--memory.recompute none`.") from error

    def _check(self, tensors: Mapping[str, Tensor], versions: Mapping[str, int], when: str) -> None:
        for name, version in versions.items():
            if plain(tensors[name])._version != version:
                what = f"tensor {place_of(name)} of the carried state" if name else "the carried state"
                raise ModelError(f"needs {what}, which was changed in place {when}", code="recompute-input-changed",
                                 where=self._where,
                                 remedy="Put a new tensor in its place (x = x + y for x += y, relu(x) for relu_(x)), "
                                        "or set `--memory.recompute none`.")

    def _norms(self, looks: bool) -> list[tuple[Tensor, Tensor]]:
        """Norms of the parameters that forwards have changed without a new version; in the first forwards of the first
        batches (looks) of all parameters, to see whether forwards do so."""
        return with_norms(self._parameters if looks else self._written)

    def _value_of(self, parameter: nn.Parameter) -> Tensor:
        """Return a copy, shared by runs that leave the same value."""
        value = self._values.get(id(parameter))
        if value is None or not torch.equal(value, parameter):
            value = self._values[id(parameter)] = parameter.detach().clone()
        return value

    @contextmanager
    def _moved_again(self, moved: Sequence[_Moved]) -> Iterator[None]:
        """Context for the second run: raises ModelError unless it finds the same values as the first run in all
        parameters that the first run has changed. It does if it changes them to the same values before it reads
        them."""
        reads = _Reads(moved) if moved else None
        try:
            with _COMPUTED if reads is None else reads:
                yield
        finally:
            for entry in moved:
                if (reads is not None and entry.parameter in reads.early) or not torch.equal(
                        entry.parameter, entry.value):
                    raise self._changed_parameter(entry.parameter)

    def _changed_parameter(self, changed: nn.Parameter) -> ModelError:
        name = next(f"{block}.{name}" for block, module in self._blocks for name, parameter in module.named_parameters()
                    if parameter is changed)
        return ModelError("was changed in place by a forward, which recomputation runs again and which would then "
                          "find other values", code="recompute-parameter-changed", where=f"parameter {name}",
                          remedy="Change it between batches, or set `--memory.recompute none`.")

    def _buffers(self) -> Iterator[tuple[_Place, Tensor | None]]:
        """Buffers, and tensors that are attributes."""
        for module in self._modules:
            for name, buffer in module._buffers.items():
                yield (module, name), buffer
        for module in self._others:
            for name, value in _attributes_of(module):
                yield (module, name), value

    @contextmanager
    def _note_changes(self, before: dict[_Place, Tensor | None], left: list[_Left]) -> Iterator[None]:
        """Put the earlier values of buffers that the forward inside has changed into `before`, and all other buffers
        into `left`. A replaced buffer still exists; a buffer that is changed in place is copied beforehand: each one
        the first time, later those that have changed, and running statistics, whose kernels leave no trace of a
        change."""
        found = list(self._buffers())
        new = {place for place, buffer in found if buffer is not None and place not in self._seen}
        known = {place for place, _ in found if place in self._changing.places or _is_statistic(place[0])}
        copies = copies_of(buffer for place, buffer in found
                           if buffer is not None and (place in new or place in known))
        versions = [buffer._version if buffer is not None else 0 for _, buffer in found]
        yield
        for (place, buffer), version in zip(found, versions, strict=True):
            if buffer is not None and place not in known and (
                    buffer._version != version or (place in new and not torch.equal(buffer, copies[id(buffer)]))):
                known.add(place)
                self._changing.add(buffer)
            if buffer is not None and place in known and id(buffer) not in copies:
                raise self._changed_buffer(place)
            module, name = place
            if place in known or (name not in module.__dict__ and module._buffers.get(name) is not buffer):
                before[place] = copies[id(buffer)] if place in known else buffer
            else:
                left.append(_Left(place, buffer, version, copies[id(buffer)] if place in new and id(
                    buffer) in self._changing.shared else None))
        self._seen |= new

    def _changed_by_others(self, left: Sequence[_Left]) -> dict[_Place, Tensor | None]:
        """The earlier tensors where blocks outside of the segment have put another one, or changed one, since the first
        run."""
        found: dict[_Place, Tensor | None] = {}
        for place, tensor, version, copied in left:
            if tensor is not None and (tensor._version != version or (
                    copied is not None and not torch.equal(tensor, copied))):
                if copied is None:
                    raise self._changed_buffer(place)
                self._changing.add(tensor)
                found[place] = copied
            elif _home(place).get(place[1]) is not tensor:
                found[place] = tensor
        return found

    @contextmanager
    def _buffers_of(self, before: Mapping[_Place, Tensor | None]) -> Iterator[None]:
        """Context with the buffers as they were, in their own memory; afterwards they are as now."""
        now = {place: _home(place).get(place[1]) for place in before}
        again = copies_of(buffer for buffer in before.values() if buffer is not None)
        for place, buffer in before.items():
            _home(place)[place[1]] = None if buffer is None else again[id(buffer)]
        try:
            yield
        finally:
            for place, buffer in now.items():
                _home(place)[place[1]] = buffer

    def _changed_buffer(self, place: _Place) -> ModelError:
        kind = "buffer" if place[1] in place[0]._buffers else "attribute"
        return ModelError("was changed in place, and not by the first forward that found it; recomputation cannot "
                          "restore it", code="recompute-buffer-changed", where=f"{kind} {self._path(*place)}",
                          remedy="Put a new tensor in its place (self.x = self.x + y), or set "
                                 "`--memory.recompute none`.")

    def _path(self, owner: nn.Module, attribute: str) -> str:
        return next(f"{name}.{attribute}" for block, module in self._blocks
                    for name, part in module.named_modules(prefix=block) if part is owner)


def _is_ours(module: nn.Module) -> bool:
    return any(kind.__module__.startswith("ranvier.") for kind in type(module).__mro__)


def _attributes_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Attributes that are tensors."""
    return [(name, value) for name, value in module.__dict__.items()
            if type(value) is Tensor and value.layout == torch.strided and not value.is_inference()]


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers, and attributes that are tensors unless the module is one of ours."""
    buffers = [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]
    return buffers if _is_ours(module) else buffers + _attributes_of(module)


def _is_statistic(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.track_running_stats and module.training


def _home(place: _Place) -> dict[str, Any]:
    """The dict of a module that holds the attribute."""
    module, name = place
    return module._buffers if name in module._buffers else module.__dict__


def hook_of_all_modules() -> str | None:
    """The name of a forward hook that a user has registered for all modules; None if there is none."""
    hooks = (*_module._global_forward_pre_hooks.values(), *_module._global_forward_hooks.values())
    return next((_name(hook) for hook in hooks if not _origin(hook).startswith((*_KNOWN_HOOKS, "torch."))), None)


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))


def _origin(hook: Any) -> str:
    """The Python module that has defined a hook."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")) + "."
