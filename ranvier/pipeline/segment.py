"""One recomputed segment: its blocks run again in the backward, from what has entered them the first time.

    forward     state, buffers -> outputs     keeps the state, and what the buffers were that the blocks have changed
    backward    state, those buffers -> outputs, and from there the gradients

Blocks may put other tensors into their state, change buffers as BatchNorm and spectral norm do, and assign to their
attributes: the second run gets a copy of the state, and buffers (in memory of their own) and attributes as they were,
so that nothing is changed twice. What cannot be given back is refused: tensors of the state that are changed in place,
and hooks, which would be called twice. Under selective recomputation the second run finds outputs of expensive
operations in place of computing them (`ranvier.tensor.kept_outputs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from ranvier.block import State, carried, named
from ranvier.errors import ModelError
from ranvier.tensor.columns import plain
from ranvier.tensor.kept_outputs import KeptOutputs

_KNOWN_HOOKS = "ranvier.", "torch.nn.utils."
"""Modules whose hooks may run twice: they compute weights or outputs, and change at most buffers."""

_COMPUTED = nullcontext()
_Place = tuple[nn.Module, str]
"""A module and the name of its buffer, or of its attribute."""

_ABSENT = object()
"""The value of an attribute that a module does not have."""


class Segment:
    """blocks: (name, module), in order. selective: whether outputs of expensive operations are kept."""

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]], *, selective: bool = False) -> None:
        self._blocks, self._selective = blocks, selective
        first, last = blocks[0][0], blocks[-1][0]
        self._where = f"block {first}" if first == last else f"blocks {first} to {last}"
        self._changing: set[_Place] | None = None
        """Buffers that a forward changes in place; None before the first one, which shows it."""
        self.begin()
        self.check()

    def begin(self) -> None:
        """Before a batch."""
        self._modules = dict.fromkeys(module for _, block in self._blocks for module in block.modules())
        self._others = [module for module in self._modules if not any(
            kind.__module__.startswith("ranvier.") for kind in type(module).__mro__)]
        """Modules whose attributes are theirs alone: split layers keep what is under way in theirs."""
        self._weights = {parameter.untyped_storage()._cdata for module in self._modules
                         for parameter in module._parameters.values() if parameter is not None}

    def check(self) -> None:
        """ModelError for hooks of others, which recomputation would call twice."""
        for block, module in self._blocks:
            for name, part in module.named_modules(prefix=block):
                for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
                    if not _origin(hook).startswith(_KNOWN_HOOKS):
                        raise ModelError("has a forward hook, which recomputation would call twice",
                                         code="recompute-with-hook", where=name,
                                         value=getattr(hook, "__qualname__", type(hook).__name__),
                                         remedy="Remove the hook, do its work in the module's forward, or set "
                                                "`--memory.recompute none`.")

    def run(self, compute: Callable[[State], State], state: State) -> State:
        """`compute(state)`, whose insides are not kept but computed again. ModelError where it changes a tensor of the
        state in place, or a buffer that it did not change at first."""
        tensors = named(state, self._where)
        versions = {name: plain(tensor)._version for name, tensor in tensors.items()}
        before: dict[_Place, Tensor | None] = {}
        attributes: dict[_Place, object] = {}
        kept = KeptOutputs(self._weights) if self._selective else None
        ran = False

        def once_or_again(state: State) -> State:
            nonlocal ran
            inside = carried(named(state, self._where))
            if ran:
                self._check(tensors, versions, "after these blocks, which recomputation runs again")
                with self._buffers_of(before), self._attributes_of(attributes), (
                        _COMPUTED if kept is None else kept.replayed()):
                    return compute(inside)
            ran = True
            with self._noted(before), self._noted_attributes(attributes), (
                    _COMPUTED if kept is None else kept.recorded()):
                result = compute(inside)
            self._check(tensors, versions, "by these blocks, which recomputation runs again")
            return result

        return cast(State, checkpoint(once_or_again, state, use_reentrant=False))

    def _check(self, tensors: Mapping[str, Tensor], versions: Mapping[str, int], when: str) -> None:
        for name, version in versions.items():
            if plain(tensors[name])._version != version:
                what = f"tensor {name} of the carried state" if name else "the carried state"
                raise ModelError(f"needs {what}, which was changed in place {when}", code="recompute-input-changed",
                                 where=self._where,
                                 remedy="Put a new tensor in its place (x = x + y for x += y, relu(x) for relu_(x)), "
                                        "or set `--memory.recompute none`.")

    def _buffers(self) -> Iterator[tuple[_Place, Tensor | None]]:
        for module in self._modules:
            for name, buffer in module._buffers.items():
                yield (module, name), buffer

    @contextmanager
    def _noted(self, before: dict[_Place, Tensor | None]) -> Iterator[None]:
        """Put into `before` what the buffers were that the forward inside has changed. One that was replaced is still
        there; of one that is changed in place a copy is made beforehand: of all the first time, then of those that have
        changed, and of running statistics, whose kernels leave no trace of a change."""
        found, learns = list(self._buffers()), self._changing is None
        known = {place for place, _ in found if place in (self._changing or ()) or _is_statistic(place[0])}
        copies = {id(buffer): buffer.clone() for place, buffer in found
                  if buffer is not None and (learns or place in known)}
        versions = [buffer._version if buffer is not None else 0 for _, buffer in found]
        yield
        for (place, buffer), version in zip(found, versions, strict=True):
            if buffer is not None and place not in known and (
                    buffer._version != version or (learns and not torch.equal(buffer, copies[id(buffer)]))):
                known.add(place)
            if buffer is not None and place in known and id(buffer) not in copies:
                raise ModelError("was changed in place, and not by the first forward; recomputation cannot give it "
                                 "back as it was", code="recompute-buffer-changed",
                                 where=f"buffer {self._name_of(place)}",
                                 remedy="Put a new tensor in its place (self.x = self.x + y), or set "
                                        "`--memory.recompute none`.")
            if place in known or place[0]._buffers.get(place[1]) is not buffer:
                before[place] = copies[id(buffer)] if place in known else buffer
        self._changing = known

    @contextmanager
    def _buffers_of(self, before: Mapping[_Place, Tensor | None]) -> Iterator[None]:
        """The buffers as they were, in memory of their own; afterwards as they are now."""
        now = {(module, name): module._buffers.get(name) for module, name in before}
        again = {id(buffer): buffer.clone() for buffer in before.values() if buffer is not None}
        for (module, name), buffer in before.items():
            module._buffers[name] = None if buffer is None else again[id(buffer)]
        try:
            yield
        finally:
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer

    @contextmanager
    def _noted_attributes(self, before: dict[_Place, object]) -> Iterator[None]:
        """Put into `before` what the attributes were to which the forward inside has assigned."""
        found = [(module, dict(module.__dict__)) for module in self._others]
        yield
        for module, attributes in found:
            for name in attributes.keys() | module.__dict__.keys():
                value = attributes.get(name, _ABSENT)
                if module.__dict__.get(name, _ABSENT) is not value:
                    before[module, name] = value

    @contextmanager
    def _attributes_of(self, before: Mapping[_Place, object]) -> Iterator[None]:
        """The attributes as they were; afterwards as they are now."""
        now = {(module, name): module.__dict__.get(name, _ABSENT) for module, name in before}
        _assign(before)
        try:
            yield
        finally:
            _assign(now)

    def _name_of(self, place: _Place) -> str:
        return next(f"{name}.{place[1]}" for block, module in self._blocks
                    for name, part in module.named_modules(prefix=block) if part is place[0])


def _is_statistic(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.track_running_stats and module.training


def _assign(attributes: Mapping[_Place, object]) -> None:
    for (module, name), value in attributes.items():
        if value is _ABSENT:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = value


def _origin(hook: Any) -> str:
    """The Python module that has defined a hook."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")) + "."
