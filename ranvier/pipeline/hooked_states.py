"""Tensors of the carried state with a hook on their gradient, such as an implicit layer's, which solves for it.

    y = f(x); y.register_hook(solve); return y                     block 0
    slope, = torch.autograd.grad(energy(y), y)                     block 1: solve(slope) in plain PyTorch

A hook runs for every gradient of its tensor, also for one that a later block computes for itself. On another stage that
block has a tensor without the hook. So that the cut decides nothing, such a call is refused wherever the model is cut;
in the stage's own backward hooks run where they were put.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ranvier.errors import ModelError


class _Refusing:
    """A hook that refuses gradients outside of the stage's own backward."""

    def __init__(self, name: str, in_pass: Callable[[], bool]) -> None:
        self._name, self._in_pass = name, in_pass

    def __call__(self, gradient: Tensor) -> None:
        if not self._in_pass():
            what = f'tensor "{self._name}" of the carried state' if self._name else "the carried state"
            raise ModelError("has a hook of an earlier block on its gradient, which a block computes for itself; on "
                             "another stage the hook would not run", code="hook-on-earlier-state", where=what,
                             remedy="Differentiate with respect to a tensor of the block's own, x = x.view_as(x), for "
                                    "which the hook runs nowhere.")


def hooked(state: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors on which a block has put a hook, here or on an earlier stage."""
    return [name for name, tensor in state.items() if tensor.requires_grad and tensor._backward_hooks and any(
        isinstance(hook, _Refusing) or not str(getattr(hook, "__module__", "")).startswith("ranvier.")
        for hook in tensor._backward_hooks.values())]


def refuse_outside(state: Mapping[str, Tensor], names: Sequence[str], in_pass: Callable[[], bool]) -> None:
    """Refuse gradients of these tensors outside of the stage's own backward, of which `in_pass` tells."""
    for name in names:
        if state[name].requires_grad:
            state[name].register_hook(_Refusing(name, in_pass))


def between_blocks(state: object, in_pass: Callable[[], bool]) -> None:
    """Refuse so what the next block is given of tensors with hooks."""
    tensors = {"": state} if isinstance(state, Tensor) else state if isinstance(state, dict) else dict(enumerate(
        tree_leaves(state)))
    found = {str(name): one for name, one in tensors.items() if isinstance(one, Tensor) and one._backward_hooks}
    if found:
        refuse_outside(found, hooked(found), in_pass)
