"""A program's objects with their own `state_dict`, such as learning-rate schedulers, in a checkpoint.

    Checkpoints(engine, folder, objects={"scheduler": scheduler})

The state of each rank's object is written as JSON, with its tensors separately (kind "object"). On the mesh that wrote
it, each rank loads its own state; on another mesh, all ranks load the state, which must have been the same on all
ranks. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ranvier.checkpoint.manifest import ITEM_BYTES, Saved
from ranvier.checkpoint.state import OBJECT, Piece, dtype_name
from ranvier.errors import CheckpointError
from ranvier.mesh import Mesh

_DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_LISTS: dict[str, type[list[Any]] | type[tuple[Any, ...]]] = {"list": list, "tuple": tuple}


@runtime_checkable
class Stateful(Protocol):
    """An object that can be saved and loaded, as torch's schedulers can."""

    def state_dict(self) -> dict[str, Any]:
        """Its state: numbers, texts, tensors, lists, tuples and dicts."""

    def load_state_dict(self, state_dict: Any) -> object:
        """Load what `state_dict` has returned."""


class SavedObjects:
    """The objects of one rank.

    objects: name -> object, or None on a rank that has none. CheckpointError for an object without these methods.
    """

    def __init__(self, objects: Mapping[str, object], mesh: Mesh, rank: int) -> None:
        for name, found in objects.items():
            if not (found is None or isinstance(found, Stateful)):
                raise CheckpointError("has no state_dict and load_state_dict", code="object-without-state",
                                      where="Checkpoints(objects=...)", value=f"{name}: {type(found).__name__}",
                                      remedy="Give objects={'scheduler': scheduler}.")
        self._names = set(objects)
        self._objects = {name: found for name, found in objects.items() if isinstance(found, Stateful)}
        self._mesh, self._rank = str(mesh), rank

    def pieces(self) -> list[Piece]:
        """The pieces that this rank writes. CheckpointError for a state of unsupported types."""
        pieces: list[Piece] = []
        for name, found in self._objects.items():
            tensors: list[Tensor] = []
            state, where = found.state_dict(), f"objects[{name!r}]"
            try:
                text = json.dumps(_encode(state, tensors, where)).encode()
            except RecursionError:
                raise _unsupported_error(where, "something that contains itself") from None
            tensors.insert(0, torch.frombuffer(bytearray(text), dtype=torch.uint8))
            pieces += [Piece.from_tensor(OBJECT, json.dumps([name, self._mesh, self._rank, number]), tensor.detach())
                       for number, tensor in enumerate(tensors)]
        return pieces

    def load(self, saved: Saved) -> list[str]:
        """Load the objects' states. Returns the names of saved objects that this program does not have. CheckpointError
        if a state is missing, or was different on the ranks of another mesh."""
        states: dict[str, dict[tuple[str, int], list[str]]] = {}
        for key in saved.manifest.tensors.get(OBJECT, {}):
            name, mesh, rank, _ = json.loads(key)
            states.setdefault(name, {}).setdefault((mesh, rank), []).append(key)
        for name, found in self._objects.items():
            if name not in states:
                raise CheckpointError(f"has no state of the object {name}", code="checkpoint-without-object",
                                      where=f"checkpoint {saved.folder}", value=sorted(states),
                                      remedy="Load it without this object: Checkpoints(objects=...) of the program "
                                             "that wrote it has the names.")
            found.load_state_dict(self._state(saved, name, states[name]))
        return sorted(set(states) - self._names)

    def _state(self, saved: Saved, name: str, states: Mapping[tuple[str, int], Sequence[str]]) -> Any:
        """The state that this rank loads."""
        own = states.get((self._mesh, self._rank))
        if own is None:
            first, *others = [_read(saved, keys) for keys in states.values()]
            if any(len(other) != len(first) or not all(map(torch.equal, other, first)) for other in others):
                raise CheckpointError(f"has different states of the object {name} for the ranks of its mesh",
                                      code="object-states-differ", where=f"checkpoint {saved.folder}",
                                      value=next(iter(states))[0],
                                      remedy="Load it on that mesh, or leave the object out.")
            own = next(iter(states.values()))
        text, *tensors = _read(saved, own)
        return _decode(json.loads(bytes(text.tolist())), tensors)


def _read(saved: Saved, keys: Sequence[str]) -> list[Tensor]:
    return [saved.read(OBJECT, key) for key in sorted(keys, key=lambda key: int(json.loads(key)[3]))]


def _encode(value: object, tensors: list[Tensor], where: str) -> object:
    """A state as JSON; tensors are numbered. A value that is not plain becomes a list that begins with its kind."""
    kind = type(value).__name__
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_meta or dtype_name(value) not in ITEM_BYTES:
            raise _unsupported_error(where, f"a tensor of {value.dtype}, {value.layout}, {value.device}")
        tensors.append(value)
        return ["tensor", len(tensors)]
    if type(value) in _LISTS.values() and isinstance(value, (list, tuple)):
        return [kind, *(_encode(item, tensors, f"{where}[{number}]") for number, item in zip(count(), value))]
    if type(value) in _DICTS.values() and isinstance(value, dict):
        return [kind, *([_encode(key, tensors, where), _encode(item, tensors, f"{where}[{key!r}]")]
                        for key, item in value.items())]
    raise _unsupported_error(where, kind)


def _unsupported_error(where: str, value: str) -> CheckpointError:
    return CheckpointError("cannot be saved in a checkpoint, in which nothing is pickled", code="object-state-type",
                           where=where, value=value,
                           remedy="Keep numbers, texts, tensors, lists, tuples and dicts in its state_dict. Tensors "
                                  f"are dense, of {', '.join(ITEM_BYTES)}.")


def _decode(value: Any, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "tensor":
        return tensors[rest[0] - 1]
    if kind in _LISTS:
        return _LISTS[kind](_decode(item, tensors) for item in rest)
    return _DICTS[kind]({_decode(key, tensors): _decode(item, tensors) for key, item in rest})
