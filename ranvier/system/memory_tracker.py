"""Counts live bytes of tensors by category, so that memory can be measured on a CPU as on a small device.

A CUDA allocator reports how much a step needs at its peak, but not what for, and only on a GPU. Here every storage is
counted from the operation that creates it until its last owner, often autograd, frees it.

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
import resource
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from ranvier.errors import ConfigError
from ranvier.system.meta_operations import run_on_meta

MemoryPlace = Literal["device", "host"]
"""Whether a storage counts as device or as host memory, wherever it is."""
StorageKind = tuple[MemoryPlace, str]
"""MemoryPlace and category of a storage."""


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of storages, each once, however many tensors view it.

    Inside `with tracker:` it counts new storages that operations of this thread return, including those of backward on
    a CPU. Other storages, such as another thread's message or a tensor created before, count after `tag`. Only one
    thread may enter and query a tracker; storages may be freed in any thread.

    Not counted: what an operation allocates and frees before it returns; allocators' rounding;
    `untyped_storage().resize_` until an operation next takes or returns the storage, or it is tagged; tensors on the
    meta device, unless with `on_meta` those alone. Tensor subclasses that wrap others count as those. Sparse tensors
    have no storage of their own, and raise ConfigError.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoid torch's wrapper, whose first call imports the compiler."""
        return False

    def __init__(self, *, on_meta: bool = False) -> None:
        TorchDispatchMode.__init__(self)
        self._on_meta = on_meta
        self._counted: dict[weakref.ref[torch.UntypedStorage], tuple[StorageKind, int]] = {}
        self._live: Counter[StorageKind] = Counter()
        self._peaks: dict[MemoryPlace, dict[str, int]] = {}
        self._new: StorageKind = ("device", "activations")
        # A storage may be freed in any thread, between any two instructions: its callback does one atomic append, and
        # the tracker's own thread subtracts. Every sum does so first, so no peak includes freed bytes.
        self._dead: deque[weakref.ref[torch.UntypedStorage]] = deque()
        self.reset_peak()

    def tag(self, tensors: Iterable[Tensor], category: str, *, place: MemoryPlace = "device") -> None:
        """Count the storages of `tensors` under `category` from now on, whatever their category was before.

        Raises ConfigError for anything other than a tensor with a storage, and for an unknown place.
        """
        _check(place, "MemoryTracker.tag(place=...)")
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise ConfigError("is not a tensor", code="tag-not-tensor", where="MemoryTracker.tag(tensors=...)",
                                  value=tensor, remedy="Give tensors, as in model.parameters() or state.values().")
            for storage in self._storages(tensor):
                self._count(storage, (place, category))

    @contextlib.contextmanager
    def category(self, category: str, *, place: MemoryPlace = "device") -> Iterator[None]:
        """Count new storages under `category` inside, instead of "activations". Raises ConfigError for an unknown
        place."""
        _check(place, "MemoryTracker.category(place=...)")
        before, self._new = self._new, (place, category)
        try:
            yield
        finally:
            self._new = before

    @property
    def live(self) -> dict[StorageKind, int]:
        """Live bytes by (place, category), without empty categories."""
        while self._dead:
            kind, nbytes = self._counted.pop(self._dead.popleft())
            self._live[kind] -= nbytes
        return {kind: nbytes for kind, nbytes in self._live.items() if nbytes}

    def peak_bytes(self, place: MemoryPlace = "device") -> int:
        """The largest number of live bytes since the start or `reset_peak`. Raises ConfigError for an unknown place."""
        return sum(self.at_peak(place).values())

    def at_peak(self, place: MemoryPlace = "device") -> dict[str, int]:
        """Bytes by category at the first moment of the highest total. Raises ConfigError for an unknown place."""
        _check(place, "MemoryTracker.at_peak(place)")
        return dict(self._peaks[place])

    def reset_peak(self) -> None:
        """Start a new measurement: the live bytes are the peak so far."""
        self._peaks = {place: self._current_bytes(place) for place in get_args(MemoryPlace)}

    def __torch_dispatch__(self, func: Callable[..., object], types: Sequence[type], args: tuple[object, ...] = (),
                           kwargs: dict[str, object] | None = None) -> object:
        kwargs = kwargs or {}
        # Constructors such as torch.tensor pass a new storage, which no operation has created, through lift_fresh.
        given = [] if func is torch.ops.aten.lift_fresh.default else self._storages((args, kwargs))
        result = run_on_meta(func, args, kwargs) if self._on_meta else func(*args, **kwargs)
        for storage in (*given, *self._storages(result)):
            kind, _ = self._counted.get(weakref.ref(storage), (None, 0))
            # An untracked input storage does not become new because the operation returns a view of it.
            if kind is None and not any(storage is other for other in given):
                kind = self._new
            if kind is not None:
                self._count(storage, kind)
        return result

    def _count(self, storage: torch.UntypedStorage, kind: StorageKind) -> None:
        known, known_bytes = self._counted.get(weakref.ref(storage), (kind, None))
        nbytes = storage.nbytes()
        if (known, known_bytes) == (kind, nbytes):
            return  # as for most arguments of operations
        self._live[known] -= known_bytes or 0
        self._live[kind] += nbytes
        # Assignment keeps the dict's existing key: of equal weak references, only the first one's callback will run.
        self._counted[weakref.ref(storage, self._dead.append)] = (kind, nbytes)
        place, _ = kind
        if sum((now := self._current_bytes(place)).values()) > sum(self._peaks[place].values()):
            self._peaks[place] = now

    def _current_bytes(self, place: MemoryPlace) -> dict[str, int]:
        return {category: nbytes for (at, category), nbytes in self.live.items() if at == place}

    def _storages(self, tree: object) -> list[torch.UntypedStorage]:
        return [storage for storage in _storages(tree) if (storage.device.type == "meta") == self._on_meta]


def _check(place: str, where: str) -> None:
    if place not in get_args(MemoryPlace):
        raise ConfigError("is not a place", code="unknown-memory-place", where=where, value=place,
                          remedy="Choose one of " + ", ".join(get_args(MemoryPlace)) + ".")


def _storages(tree: object) -> Iterator[torch.UntypedStorage]:
    for leaf in _leaves(tree):
        if isinstance(leaf, Tensor):
            if is_traceable_wrapper_subclass(leaf):
                names, _ = leaf.__tensor_flatten__()
                yield from _storages([getattr(leaf, name) for name in names])
                continue
            if leaf.layout != torch.strided:
                raise ConfigError("has no storage of its own to count", code="tensor-without-storage",
                                  where="MemoryTracker", value=f"{type(leaf).__name__}, {leaf.layout}",
                                  remedy="Use dense tensors, or count the tensors inside.")
            yield leaf.untyped_storage()


def _leaves(tree: object) -> Iterator[object]:
    """Yield the leaves of what operations take and return, in a fraction of the time of torch's pytrees, which support
    more kinds."""
    if isinstance(tree, (tuple, list)):
        for each in tree:
            yield from _leaves(each)
    elif isinstance(tree, dict):
        yield from _leaves(list(tree.values()))
    else:
        yield tree


def free_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that new tensors may use: free memory, and memory that torch's allocator keeps of freed
    tensors, such as those of a closed engine."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def release_cached_memory(device: torch.device) -> None:
    """Return memory that torch's allocator keeps of freed tensors to the driver of a CUDA device, from which
    communicators and other libraries allocate."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def forget_trials(device: torch.device) -> None:
    """Release memory that was used only for measurements on a device, and reset peaks, so that neither counts for the
    run."""
    release_cached_memory(device)
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory in bytes: on CUDA of tensors on the device, elsewhere the process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts kilobytes except on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
