"""The runtime context of one started rank: its backend, shared store, device and place on its machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from numbers import Real
from typing import Any, Literal, NoReturn, overload
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed import Store

from ranvier.arguments import check_arguments
from ranvier.comm.hang import HangDetector
from ranvier.comm.protocol import Backend, Group
from ranvier.comm.signed_store import SharedStore
from ranvier.errors import ConfigError, RanvierError
from ranvier.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class JoinPoint:
    """How ranks that join a run later reach its store. address, port: where it listens. secret: the key of its
    signatures."""

    address: str
    port: int
    secret: str = field(repr=False)


@dataclass(kw_only=True)
class World:
    """One started rank, as `ranvier.start` returns it.

    backend: connects it to the other ranks.
    store: key-value store shared by all ranks (current actions, the first failure); never used on a hot path.
    launcher: "local", "torchrun", "mpiexec" or "srun"; another word if it was not made by `start`.
    device: the device that it computes on.
    local_rank, local_size: its number among the ranks of its machine, and their count, from the launcher.
    local_ranks: the ranks on its machine in order, including itself. An empty tuple means consecutive numbers on each
        machine, which Slurm's cyclic distribution and Open MPI's local ranks do not have.
    launched: whether our own supervisor or another launcher started this process, and reports how it ended.
    mesh: the mesh given to `start`; None if there was none.
    hang: makes the detector for hanging actions; None if they are not checked.
    overdue: returns a description of a blocking wait that exceeds its time limit, or None.
    lost: returns a description of a peer whose connection has broken, if the waiting thread cannot see it, or None.
    sever: closes this rank's connections to the others, so that waits for them fail at both ends.
    members: names of the ranks, by their numbers. Numbers may change, names do not; initially they are equal.
    num_lost_ranks: number of lost ranks, without which the run has continued.
    joins: how ranks join later (`grow`); None if none may.
    torch_store: `store` without signatures, used to connect the backend of a new set of ranks; None if the set of
        ranks never changes.
    """

    backend: Backend
    store: SharedStore
    launcher: str
    device: torch.device
    local_rank: int
    local_size: int
    local_ranks: tuple[int, ...] = ()
    launched: bool = False
    mesh: Mesh | None = None
    hang: Callable[[], HangDetector] | None = None
    overdue: Callable[[], str | None] = lambda: None
    lost: Callable[[], str | None] = lambda: None
    sever: Callable[[], object] = lambda: None
    members: tuple[str, ...] = ()
    num_lost_ranks: int = 0
    joins: JoinPoint | None = None
    torch_store: Store | None = None
    num_calls: int = field(default=0, init=False, repr=False)
    """Collective calls outside of batches that this rank has begun."""
    _first: Backend | None = field(default=None, init=False, repr=False)
    _users: tuple[Backend, Group] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.members = self.members or tuple(map(str, range(self.size)))
        first = self.rank - self.local_rank
        self.local_ranks = self.local_ranks or tuple(range(first, min(first + self.local_size, self.size)))

    def __reduce__(self) -> NoReturn:
        raise RanvierError("is connected to running ranks, and can be neither copied nor saved", code="world-copied",
                           where="world", remedy="Copy or save world.rank and world.size.")

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        return self.backend.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.backend.size

    @property
    def is_alone(self) -> bool:
        """Whether this is the only rank, now and later."""
        return self.size == 1 and self.joins is None

    @property
    def is_whole_run(self) -> bool:
        """Whether this process is the entire run: the only rank, in the process of the user's command."""
        return self.is_alone and not self.launched

    def change(self, backend: Backend, members: Sequence[str]) -> None:
        """Replace the backend by one that connects `members`. Collective over the remaining ranks. Objects made from
        the first backend stay usable; later backends are closed."""
        local = {self.members[rank] for rank in self.local_ranks}
        before, self.backend, self.members = self.backend, backend, tuple(members)
        self.local_ranks = tuple(rank for rank, name in enumerate(self.members) if name in local)
        if self._first is None:
            self._first = before
        else:
            before.close()

    # ------------------------------------------------------------------ for users' metrics

    def _all_ranks(self) -> Group:
        """A group of all ranks for the calls below, opened by the first call."""
        self.num_calls += 1
        if self._users is None or self._users[0] is not self.backend:
            self._users = self.backend, self.backend.group("user", [range(self.size)])
        return self._users[1]

    @overload
    def all_reduce(self, value: Tensor, op: Literal["sum", "mean", "min", "max"] = "sum") -> Tensor: ...

    @overload
    def all_reduce(self, value: float, op: Literal["sum", "mean", "min", "max"] = "sum") -> float: ...

    def all_reduce(self, value: Tensor | float, op: Literal["sum", "mean", "min", "max"] = "sum") -> Tensor | float:
        """The sum, mean, minimum or maximum of all ranks' `value`: numbers, or tensors of the same shape, which are
        not modified. Sums of integers and booleans are int64, and their means fp64. Collective."""
        check_arguments(World.all_reduce, locals(), but=("value",))  # which may be NaN, and true
        if not isinstance(value, (Tensor, Real)):
            raise ConfigError("is neither a tensor nor a number", code="reduce-value", where="World.all_reduce(value)",
                              value=type(value).__name__, remedy="Pass torch.as_tensor(values), or one number.")
        reduced = _flat_copy(value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64,
                                                                                  device="cpu"))
        if op in ("sum", "mean") and not reduced.dtype.is_floating_point and not reduced.dtype.is_complex:
            reduced = reduced.to(torch.int64 if op == "sum" else torch.float64)
        ranks, shape = self._all_ranks(), list(value.shape) if reduced.numel() > 1 else []
        _check_kind(f"{op} of {_name(reduced.dtype)} {shape}", ranks)
        ranks.all_reduce(reduced, "sum" if op == "mean" else op).wait()
        if op == "mean":
            reduced = reduced / self.size
        return reduced.reshape(value.shape) if isinstance(value, Tensor) else float(reduced)

    def gather_objects(self, value: object) -> list[Any]:
        """Gather every rank's `value`, in the order of ranks: numbers, texts, lists, tuples and dicts, as JSON supports
        them. Collective; not for every step."""
        return [_unpacked(one) for one in self._all_ranks().gather_objects(_packed(value, "World.gather_objects"))]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the `value` of rank `source` on all ranks: a tensor, or a value as in `gather_objects`. What the other
        ranks pass does not matter. Collective."""
        check_arguments(World.broadcast, locals())
        if not 0 <= source < self.size:
            raise ConfigError(f"is not a rank; there are {self.size}", code="broadcast-source",
                              where="World.broadcast(source=...)", value=source, remedy="Give the number of a rank.")
        ranks, own = self._all_ranks(), None
        if self.rank == source:
            own = ([_name(value.dtype), list(value.shape), value.device.type] if isinstance(value, Tensor)
                   else [_packed(value, "World.broadcast")])
        found = ranks.gather_objects(own)[source]
        if len(found) == 1:
            return _unpacked(found[0])
        dtype, shape, device = found
        sent = (_flat_copy(value) if self.rank == source else
                torch.empty(prod(shape), dtype=getattr(torch, dtype), device="cpu" if device == "cpu" else self.device))
        ranks.broadcast(sent, source).wait()
        return sent.reshape(shape)

    def close(self) -> None:
        """Close the backend, and the one that this rank was started with. Idempotent; all ranks call it."""
        self.backend.close()
        if self._first is not None:
            self._first.close()


def _name(dtype: torch.dtype) -> str:
    """Name of `dtype` in torch."""
    return str(dtype).removeprefix("torch.")


def _check_kind(kind: str, ranks: Group) -> None:
    """Raise ConfigError, on every rank, unless all `ranks` reduce the same `kind`: sums of memory of other sizes and
    dtypes have no meaning."""
    if len(set(ranks.gather_number(crc32(kind.encode())))) > 1:
        of_ranks = ranks.gather_objects(kind)
        other = next(rank for rank, found in enumerate(of_ranks) if found != of_ranks[0])
        raise ConfigError(f"is not of the same kind on all ranks: {of_ranks[0]} on rank 0, {of_ranks[other]} on rank "
                          f"{other}", code="reduce-differs", where="World.all_reduce(value)", value=kind,
                          remedy="Give all ranks the same op, and tensors of one shape and dtype: zeros where a rank "
                                 "has nothing to add.")


def _packed(value: object, where: str) -> object:
    """`value` in JSON's types: tuples, which JSON lacks, and lists begin with whether they are tuples. Raises
    ConfigError for values that JSON does not support; other keys of dicts would come back as texts."""
    try:
        json.dumps(value)
        if (key := next(filter(lambda key: not isinstance(key, str), _keys(value)), None)) is not None:
            raise TypeError(f"the key {key!r} of a dict is not a text")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"takes numbers, texts, lists, tuples and dicts, as JSON has them: {error}",
                          code="value-not-json", where=where, value=type(value).__name__,
                          remedy="Give a tensor's tolist() or item(), and list(d.items()) of such a dict."
                          ) from error
    return _with_kinds(value)


def _with_kinds(value: object) -> object:
    if isinstance(value, dict):
        return {key: _with_kinds(part) for key, part in value.items()}
    return [isinstance(value, tuple), *map(_with_kinds, value)] if isinstance(value, list | tuple) else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unpacked(part) for key, part in value.items()}
    if isinstance(value, list):
        return (tuple if value[0] else list)(map(_unpacked, value[1:]))
    return value


def _keys(value: object) -> Iterator[object]:
    """The keys of all dicts in `value`."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _keys(part)


def _flat_copy(tensor: Tensor) -> Tensor:
    """A flat copy that collectives may overwrite."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
