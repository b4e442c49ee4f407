"""Tensors of a carried state that share memory, such as {"hidden": y, "residual": y}, or have hooks; notes about both;
and gradients with respect to what an earlier stage has sent.

Within a stage an in-place change of one changes the others; on the next stage they are separate. So that results do not
depend on the cut, a block that changes such a tensor in place is refused, wherever the model is cut. A tensor in the
memory of a buffer may be changed on the buffer's stage.

    block 0 -> {"a": y, "b": y} -> | {"a": y, "b": y, a note of both} | -> block 1: a.add_(1)      refused
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ranvier.errors import ModelError
from ranvier.originals.same_memory import ByMemory, overlaps
from ranvier.sent_values import place_of


def sharing(state: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors whose memory, from the first to the last element, overlaps that of another."""
    if len(state) < 2:
        return []
    tensors = {name: tensor for name, tensor in state.items() if tensor.layout is torch.strided}
    return [name for name, tensor in tensors.items()
            if any(_share(tensor, two) for other, two in tensors.items() if other != name)]


def in_buffers(state: Mapping[str, Tensor], blocks: Iterable[nn.Module]) -> set[str]:
    """Names of the tensors that lie over the memory of a buffer."""
    buffers = ByMemory((None, buffer) for block in blocks for buffer in block.buffers())
    return {name for name, tensor in state.items() if buffers.overlapping(tensor)}


def _share(tensor: Tensor, other: Tensor) -> bool:
    return tensor.untyped_storage()._cdata == other.untyped_storage()._cdata and overlaps(tensor, other)


class SharedMemory:
    """Watches tensors that share memory while the blocks of a stage run on one microbatch."""

    def __init__(self) -> None:
        self._watched: list[tuple[str, Tensor, int]] = []

    def watch(self, state: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """Watch these tensors for in-place changes."""
        self._watched += [(name, state[name], state[name]._version) for name in names
                          if not state[name].is_inference()]

    def names_in(self, state: Mapping[str, Tensor]) -> list[str]:
        """Names of the tensors of what leaves a stage that share memory, or have shared it before an earlier stage."""
        if not self._watched:
            return sharing(state)
        return sorted({*sharing(state), *(name for name, tensor in state.items()
                                          if any(_share(tensor, other) for _, other, _ in self._watched))})

    def check(self) -> None:
        """Raise ModelError if a watched tensor has been changed, and stop watching all of them."""
        watched, self._watched = self._watched, []
        for name, tensor, version in watched:
            if tensor._version != version:
                raise ModelError("is changed in place, and shares its memory with another tensor of the carried state, "
                                 "which is separate on a next stage, or with a buffer of an earlier stage, which does "
                                 "not change", code="shared-state-changed",
                                 where=f'tensor "{place_of(name)}" of the carried state',
                                 remedy="Write the operation out of place, or let the block before clone it.")


# --- hooks ------------------------------------------------------------------------------------------------------------

# Tensors of the carried state with a hook on their gradient, such as an implicit layer's, which solves for it.
#
#     y = f(x); y.register_hook(solve); return y                     block 0
#     slope, = torch.autograd.grad(energy(y), y)                     block 1: solve(slope) in plain PyTorch
#
# A hook runs for every gradient of its tensor, also for one that a later block computes itself. On another stage that
# block has a tensor without the hook. So that results do not depend on the cut, such a call is refused wherever the
# model is cut; in the stage's own backward, hooks run where they were registered.


class _Refusing:
    """A hook that refuses gradients outside of the stage's own backward."""

    def __init__(self, name: str, in_pass: Callable[[], bool]) -> None:
        self._name, self._in_pass = name, in_pass

    def __call__(self, gradient: Tensor) -> None:
        if not self._in_pass():
            what = f'tensor "{place_of(self._name)}" of the carried state' if self._name else "the carried state"
            raise ModelError("has a hook of an earlier block on its gradient, which a block computes itself; on "
                             "another stage the hook would not run", code="hook-on-earlier-state", where=what,
                             remedy="Differentiate with respect to the block's own tensor, x = x.view_as(x), for which "
                                    "the hook never runs.")


def hooked_tensors(state: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors on which a block has put a hook, here or on an earlier stage."""
    return [name for name, tensor in state.items() if tensor.requires_grad and tensor._backward_hooks and any(
        isinstance(hook, _Refusing) or not str(getattr(hook, "__module__", "")).startswith("ranvier.")
        for hook in tensor._backward_hooks.values())]


def refuse_outside(state: Mapping[str, Tensor], names: Sequence[str], in_pass: Callable[[], bool]) -> None:
    """Refuse gradients of these tensors outside of the stage's own backward; `in_pass` tells whether it runs."""
    for name in names:
        if state[name].requires_grad:
            state[name].register_hook(_Refusing(name, in_pass))


def refuse_between_blocks(state: object, in_pass: Callable[[], bool]) -> None:
    """Refuse such gradients of tensors with hooks in the state that the next block is given."""
    tensors = {"": state} if isinstance(state, Tensor) else state if isinstance(state, dict) else dict(enumerate(
        tree_leaves(state)))
    found = {str(name): tensor
             for name, tensor in tensors.items() if isinstance(tensor, Tensor) and tensor._backward_hooks}
    if found:
        refuse_outside(found, hooked_tensors(found), in_pass)


# --- gradients with respect to what an earlier stage has sent ---------------------------------------------------------

# A block or loss that differentiates with respect to a tensor of the carried state, as gradient penalties and forces
# do.
#
#     x.requires_grad_(); return {"x": x, "h": f(x)}                 stage 0
#     slope, = torch.autograd.grad(g(h, x).sum(), x)                 stage 1: without the part that goes through f
#
# On stage 1 no tensor that has arrived depends on another. If only one has arrived, a gradient with respect to it is
# complete.


def refuse_partial(state: Mapping[str, Tensor], names: Collection[str], in_pass: Callable[[], bool]) -> None:
    """Refuse gradients with respect to these tensors, which an earlier stage has sent, outside of the stage's own
    backward."""
    def hook(gradient: Tensor) -> None:
        if not in_pass():
            raise partial_gradient("the carried state")

    for name in names if len(names) > 1 else ():
        state[name].register_hook(hook)


class RefuseUnused(TorchFunctionMode):
    """Refuses gradients with respect to tensors in `entered`, which an earlier stage has sent, with allow_unused or
    materialize_grads: if the graph here does not have the tensor, no hook runs and torch raises no error. It is used in
    the first microbatch of the first batches."""

    def __init__(self, entered: Mapping[str, Tensor]) -> None:
        TorchFunctionMode.__init__(self)
        self._entered = entered

    def __torch_function__(self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad and (kwargs["allow_unused"] or kwargs["materialize_grads"]) and any(
                wanted is tensor for wanted in args[1] for tensor in self._entered.values()):
            raise partial_gradient("the carried state")
        return func(*args, **kwargs)


def partial_gradient(where: str) -> ModelError:
    """The error for a gradient with respect to a tensor from which an earlier stage may have computed others."""
    return ModelError("has a gradient with respect to a tensor that an earlier stage has sent, without the part "
                      "through what that stage has computed from it", code="partial-gradient", where=where,
                      remedy="Put the blocks from that tensor to this gradient on one stage "
                             "(Pipeline(boundaries=...)), or into one block.")


# --- notes for the next stage -----------------------------------------------------------------------------------------

# Notes about tensors of a carried state that travel with it to the next stage, as names of empty tensors.
#
# {"a": y, "b": y}     ->  {"a": y, "b": y, NOTE + "shared" + "a" + "b": empty}     a and b share memory


SHARED, HOOKED = "shared", "hooked"
"""Kinds of notes: the tensors share memory with others, or have a hook on their gradient."""

_NOTE = "\0"
"""Prefix of a note's name, and separator of its words. No tensor's name begins with it."""


def with_notes(state: dict[str, Tensor], shared: SharedMemory, device: torch.device, *,
               buffers: Collection[str] = ()) -> dict[str, Tensor]:
    """The state that leaves a stage, with the notes on its tensors. buffers: names of tensors in the memory of a
    buffer."""
    names = shared.names_in(state)
    if buffers:
        names = sorted({*names, *state.keys() & buffers})
    notes = {SHARED: names, HOOKED: hooked_tensors(state)}
    if not any(notes.values()):
        return state
    return state | {_NOTE + _NOTE.join((what, *names)): torch.empty(0, dtype=torch.uint8, device=device)
                    for what, names in notes.items() if names}


def notes_of(tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], dict[str, list[str]]]:
    """Separate the state that enters a stage from its notes."""
    notes = [name for name in tensors if name.startswith(_NOTE)]
    if not notes:
        return tensors, {}
    words = (note.removeprefix(_NOTE).split(_NOTE) for note in notes)
    return {name: tensor for name, tensor in tensors.items() if name not in notes}, {
        what: names for what, *names in words}
