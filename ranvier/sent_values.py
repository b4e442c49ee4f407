"""Values of any kind between blocks, as named tensors of the carried state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten, treespec_dumps, treespec_loads

from ranvier.errors import ModelError

SENT = "tensors, sizes, devices, dtypes, None, whole numbers, and tuples, lists and dicts of them"
"""Types that can be packed."""


class NotSent(ModelError):
    """A value that cannot be packed."""


def pack(name: str, value: Any, others: Sequence[Any]) -> dict[str, Tensor]:
    """A value as named tensors: a tensor by its name, others by "name|number and kind|structure", where `_as_tensor`
    gives the kind, and the structure of a leaf is empty. others: values, of which a tensor gives the device."""
    if isinstance(value, Tensor):
        return {name: value}
    like = next((one for one in tree_leaves([value, list(others)]) if isinstance(one, Tensor) and one.dim()), None)
    leaves, spec = tree_flatten(value, is_leaf=lambda one: isinstance(one, torch.Size))
    try:
        structure = "" if spec.is_leaf() else treespec_dumps(spec)
        if structure and _structure(structure) != spec:  # such as a dict whose keys are tuples
            raise TypeError("another structure")
        packed = [_as_tensor(leaf, like) for leaf in leaves]
    except (NotImplementedError, TypeError, ValueError) as error:
        raise NotSent(f"is used in a later block, and only {SENT} can be sent there", code="value-cannot-be-sent",
                      where=f"value {name}", value=type(value).__name__,
                      remedy="Cut elsewhere, or compute it in the block that uses it.") from error
    return {f"{name}|{number}{kind}|{structure}": tensor for number, (kind, tensor) in enumerate(packed)}


def _as_tensor(leaf: Any, like: Tensor | None) -> tuple[str, Tensor]:
    """A leaf as its kind and a tensor: other values than tensors are the shape, device or dtype of an empty one."""
    if isinstance(leaf, Tensor):
        return "t", leaf
    if like is None:
        raise TypeError("no tensor")
    shape: tuple[int, ...] = (len(like), 0)
    dtype = torch.uint8
    if leaf is None or isinstance(leaf, torch.device):
        kind = "n" if leaf is None else "d"
    elif isinstance(leaf, torch.dtype):
        kind, dtype = "y", leaf
    elif isinstance(leaf, torch.Size):
        kind, shape = "s", (*shape, *leaf)
    elif type(leaf) in (bool, int) and leaf >= 0:
        kind, shape = "b" if isinstance(leaf, bool) else "i", (*shape, int(leaf))
    else:
        raise TypeError(type(leaf).__name__)
    return kind, like.new_empty(shape, dtype=dtype)


_LEAVES: dict[str, Callable[[Tensor], Any]] = {
    "t": lambda tensor: tensor, "n": lambda tensor: None, "d": lambda tensor: tensor.device,
    "y": lambda tensor: tensor.dtype, "s": lambda tensor: tensor.shape[2:], "b": lambda tensor: bool(tensor.shape[2]),
    "i": lambda tensor: tensor.shape[2]}


def unpack(name: str, state: Mapping[str, Tensor], block: str) -> Any:
    """The inverse of `pack`."""
    if name in state:
        return state[name]
    found: list[tuple[int, str, str, Tensor]] = []
    for key, tensor in state.items():
        if key.startswith(f"{name}|"):
            _, leaf, structure = key.split("|", 2)
            found.append((int(leaf[:-1]), leaf[-1], structure, tensor))
    if not found:
        raise ModelError("was not sent by the blocks before it", code="value-not-sent",
                         where=f"value {name} of block {block}", value=sorted({key.partition("|")[0] for key in state}),
                         remedy="Let frozen blocks compute the same values in evaluation as in training.")
    found.sort(key=lambda one: one[0])
    leaves = [_LEAVES[kind](tensor) for _, kind, _, tensor in found]
    structure = found[0][2]
    return tree_unflatten(leaves, _structure(structure)) if structure else leaves[0]


@functools.lru_cache
def _structure(text: str) -> Any:
    return treespec_loads(text)


def name_of(key: str) -> str:
    """The value that a tensor of the carried state is, or is a part of."""
    return key.partition("|")[0]
