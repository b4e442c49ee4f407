"""Values of any kind between blocks, as named tensors of the carried state."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_leaves,
    tree_leaves_with_path,
    tree_map,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from ranvier.errors import ModelError

SENT = ("tensors, sizes, devices, dtypes, None, whole numbers, and tuples, lists, dicts and NamedTuples (of a module's "
        "top level) of them")
"""Types that can be packed, besides all others with a serialised name in torch's pytree, such as ModelOutput."""
_CLASS = "\0class "
"""Prefix of the only key of the dict as which a NamedTuple is sent: {"\0class module:name": its fields}."""
_IN_JSON = "u0000class "
"""Its form in the text of a structure."""


class NotSent(ModelError):
    """A value that cannot be packed."""


def pack(name: str, value: Any, others: Sequence[Any]) -> dict[str, Tensor]:
    """Convert a value to named tensors: a tensor by its name, others by "name|number and kind|structure", where
    `_as_tensor` gives the kind, and the structure of a leaf is empty. others: values of which a tensor may give the
    device."""
    if isinstance(value, Tensor):
        return {name: value}
    like = next((leaf for leaf in tree_leaves([value, list(others)]) if isinstance(leaf, Tensor) and leaf.dim()), None)
    try:
        leaves, structure = _flatten(value)
        packed = [_as_tensor(leaf, like) for leaf in leaves]
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise NotSent(f"is used in a later block, and only {SENT} can be sent there", code="value-cannot-be-sent",
                      where=f"value {name}", value=type(value).__name__,
                      remedy=f"Cut elsewhere, or compute it in the block that uses it{dataclass_hint(value)}."
                      ) from error
    return {f"{name}|{number}{kind}|{structure}": tensor for number, (kind, tensor) in enumerate(packed)}


def dataclass_hint(value: object) -> str:
    """Advice on how to send a dataclass; empty if the value has none."""
    found = next((type(leaf) for leaf in tree_leaves(value) if is_dataclass(leaf)), None)
    return "" if found is None else (f', or register the dataclass on all ranks: torch.export.register_dataclass('
                                     f'{found.__name__}, serialized_type_name="{found.__name__}")')


def _flatten(value: Any) -> tuple[list[Any], str]:
    """The leaves of a value, and its structure as text, which is empty for a leaf."""
    leaves, spec = tree_flatten(value, is_leaf=_is_size)
    if spec.is_leaf():
        return leaves, ""
    try:
        structure = treespec_dumps(spec)
    except NotImplementedError:  # a NamedTuple, whose structure torch does not write
        leaves, spec = tree_flatten(_without_classes(value), is_leaf=_is_size)
        structure = treespec_dumps(spec)
    if _structure(structure) != spec:  # such as a dict whose keys are tuples
        raise TypeError("another structure")
    return leaves, structure


def _is_size(value: object) -> bool:
    return isinstance(value, torch.Size)


# --- NamedTuples ------------------------------------------------------------------------------------------------------


def _is_named_tuple(value: object) -> bool:
    """Whether a value is a NamedTuple for torch's pytree, which treats derived classes as leaves."""
    return type(value).__bases__ == (tuple,) and hasattr(value, "_fields")


def _without_classes(value: Any) -> Any:
    """Replace each NamedTuple in a value by a dict with the name of its class. Raises TypeError for a class that is not
    found by its name."""
    def without(value: Any) -> Any:
        if not _is_named_tuple(value):
            return value
        path = f"{type(value).__module__}:{type(value).__qualname__}"
        if _class_at(path) is not type(value):
            raise TypeError(path)
        return {_CLASS + path: [_without_classes(field) for field in value]}

    return tree_map(without, value, is_leaf=lambda value: _is_size(value) or _is_named_tuple(value))


def _with_classes(value: Any) -> Any:
    """The inverse of `_without_classes`. From the received text only NamedTuples whose modules this program has
    imported are made."""
    def path(value: object) -> str | None:
        return next(iter(value)).removeprefix(_CLASS) if type(value) is dict and len(value) == 1 and str(
            next(iter(value))).startswith(_CLASS) else None

    def back(one: Any) -> Any:
        name = path(one)
        if name is None:
            return one
        found = _class_at(name)
        if found is None:
            raise ModelError("is a NamedTuple in another module on the ranks before this one", code="value-of-no-class",
                             where="the carried state", value=name,
                             remedy="Define it in a module that all ranks import, or return a tuple or a dict.")
        return found._make(_with_classes(field) for field in one[_CLASS + name])

    return tree_map(back, value, is_leaf=lambda value: _is_size(value) or path(value) is not None)


def _class_at(path: str) -> Any:
    """The class of NamedTuples of this name in an imported module; None if there is none."""
    module, _, names = path.partition(":")
    found: Any = sys.modules.get(module)
    for name in names.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, type) and found.__bases__ == (tuple,) and hasattr(found, "_make") else None


# --- leaves -----------------------------------------------------------------------------------------------------------


def _as_tensor(leaf: Any, like: Tensor | None) -> tuple[str, Tensor]:
    """Convert a leaf to its kind and a tensor: values other than tensors are the shape, device or dtype of an empty
    tensor."""
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
    if not structure:
        return leaves[0]
    value = tree_unflatten(leaves, _structure(structure))
    return _with_classes(value) if _IN_JSON in structure else value


@functools.lru_cache
def _structure(text: str) -> Any:
    return treespec_loads(text)


def name_of(key: str) -> str:
    """The name of the value that a tensor of the carried state is, or of which it is a part."""
    return key.partition("|")[0]


def place_of(key: str) -> str:
    """Where the tensor of this name is in its value, as an expression: name, or name[1]["mask"]."""
    name, _, rest = key.partition("|")
    leaf, _, structure = rest.partition("|")
    if not structure:
        return name
    spec = _structure(structure)
    numbered = tree_unflatten(range(spec.num_leaves), spec)
    path = next(keystr(path) for path, number in tree_leaves_with_path(numbered) if number == int(leaf[:-1]))
    return name + re.sub(r"\['\\x00class [^']*'\]", "", path)
