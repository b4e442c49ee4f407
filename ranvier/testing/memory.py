"""Live bytes by category, counted where tensors are made, so that a CPU can stand for a device with little memory.

A CUDA allocator says how much a step needs at its peak, but not what for, and only where there is a GPU. Here every
storage is counted from the operation that makes it until its last owner, often autograd, lets go of it.

    tracker = MemoryTracker()
    tracker.tag(model.parameters(), "parameters")
    with tracker:
        loss = model(inputs).sum()
        with tracker.category("gradients"):
            loss.backward()
    tracker.peak_bytes(), tracker.at_peak()         # 1234, {"parameters": 1000, "activations": 234}
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ranvier.errors import ConfigError

Place = Literal["device", "host"]
Kind = tuple[Place, str]
"""Where a storage is, and its category."""


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of storages, each once however many tensors view it.

    Inside `with tracker:` it counts what operations of this thread return in new storages, those of backward on a CPU
    included. Storages from elsewhere, such as another thread's message or a tensor made before, count once tagged. One
    thread enters a tracker and asks it; storages may be freed in any thread.

    Not seen: what an operation allocates and frees before it returns; allocators' rounding; `untyped_storage().resize_`
    until an operation next takes or returns the storage, or it is tagged. Tensors on meta count nothing. Sparse tensors
    and tensor subclasses that wrap others have no storage of their own and raise ConfigError.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counted: dict[weakref.ref[torch.UntypedStorage], tuple[Kind, int]] = {}
        self._live: Counter[Kind] = Counter()
        self._peaks: dict[Place, dict[str, int]] = {}
        self._new: Kind = ("device", "activations")
        # A storage dies in any thread and between any two instructions: its callback does one atomic append, and the
        # tracker's own thread subtracts. Every sum does so first, hence no peak holds the bytes of the dead.
        self._dead: deque[weakref.ref[torch.UntypedStorage]] = deque()
        self.reset_peak()

    def tag(self, tensors: Iterable[Tensor], category: str, *, place: Place = "device") -> None:
        """Count the storages of `tensors` under `category` from now on, whatever they were counted as before.

        Raises ConfigError for anything that is no tensor with a storage, and for an unknown place.
        """
        _check(place, "MemoryTracker.tag(place=...)")
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise ConfigError("is not a tensor", where="MemoryTracker.tag(tensors=...)", value=tensor,
                                  remedy="Give tensors, as in model.parameters() or state.values().")
            for storage in _storages(tensor):
                self._count(storage, (place, category))

    @contextlib.contextmanager
    def category(self, category: str, *, place: Place = "device") -> Iterator[None]:
        """Count new storages under `category` inside, instead of "activations". ConfigError for an unknown place."""
        _check(place, "MemoryTracker.category(place=...)")
        before, self._new = self._new, (place, category)
        try:
            yield
        finally:
            self._new = before

    @property
    def live(self) -> dict[Kind, int]:
        """Bytes now, by (place, category); without categories that have none."""
        while self._dead:
            kind, nbytes = self._counted.pop(self._dead.popleft())
            self._live[kind] -= nbytes
        return {kind: nbytes for kind, nbytes in self._live.items() if nbytes}

    def peak_bytes(self, place: Place = "device") -> int:
        """The most bytes at any moment since the start, or since `reset_peak`. ConfigError for an unknown place."""
        return sum(self.at_peak(place).values())

    def at_peak(self, place: Place = "device") -> dict[str, int]:
        """Bytes by category at the first moment of the highest total. ConfigError for an unknown place."""
        _check(place, "MemoryTracker.at_peak(place)")
        return dict(self._peaks[place])

    def reset_peak(self) -> None:
        """Forget the peaks: what lives now is the highest so far."""
        self._peaks = {place: self._now(place) for place in get_args(Place)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # lift_fresh is how constructors such as torch.tensor hand over a storage that no operation made.
        given = [] if func is torch.ops.aten.lift_fresh.default else list(_storages((args, kwargs)))
        result = func(*args, **kwargs)
        for storage in (*given, *_storages(result)):
            kind, _ = self._counted.get(weakref.ref(storage), (None, 0))
            # A storage that came in untagged is not new because a view of it comes out.
            if kind is None and not any(storage is other for other in given):
                kind = self._new
            if kind is not None:
                self._count(storage, kind)
        return result

    def _count(self, storage: torch.UntypedStorage, kind: Kind) -> None:
        known, known_bytes = self._counted.get(weakref.ref(storage), (kind, 0))
        nbytes = storage.nbytes()
        self._live[known] -= known_bytes
        self._live[kind] += nbytes
        # A dict keeps the key that it has: of a storage's equal references, only the first one's callback will run.
        self._counted[weakref.ref(storage, self._dead.append)] = (kind, nbytes)
        place, _ = kind
        if sum((now := self._now(place)).values()) > sum(self._peaks[place].values()):
            self._peaks[place] = now

    def _now(self, place: Place) -> dict[str, int]:
        return {category: nbytes for (at, category), nbytes in self.live.items() if at == place}


def _check(place: str, where: str) -> None:
    if place not in get_args(Place):
        raise ConfigError("is not a place", where=where, value=place,
                          remedy="Choose one of " + ", ".join(get_args(Place)) + ".")


def _storages(tree: object) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            if leaf.layout != torch.strided or is_traceable_wrapper_subclass(leaf):
                raise ConfigError("has no storage of its own to count", where="MemoryTracker",
                                  value=f"{type(leaf).__name__}, {leaf.layout}",
                                  remedy="Use dense tensors, or count the tensors inside.")
            if (storage := leaf.untyped_storage()).device.type != "meta":
                yield storage
