"""Selective recomputation: outputs of expensive operations are kept when blocks run again in their backward.

    kept        products with weights; batched products whose result is no larger than their operands; attention in
                one kernel; on rows and columns the products of layers, whose messages are then not sent again either
    run again   all else: norms, activations, dropout, casts, the scores of attention that is not a single kernel

The second run calls the same operations in the same order. It computes an output that it does not find (because the
output was changed in place, or used by an inner call of autograd), so values never depend on what is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ranvier.tensor.columns import plain

_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default})
_BATCHED = frozenset({_aten.bmm.default, _aten.baddbmm.default})
_ATTENTION = frozenset(getattr(_aten, name).default for name in (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu", "_flash_attention_forward",
    "_efficient_attention_forward"))
_SAVES_NOTHING = frozenset({_aten.add.Tensor, _aten.add_.Tensor, _aten.sub.Tensor, _aten._to_copy.default,
                            _aten.clone.default, _aten.copy_.default, _aten.cat.default, _aten._unsafe_view.default})
"""Operations for which autograd saves no tensor, in addition to views."""


class _Kept(NamedTuple):
    """The output of one operation. watched: (tensor, version when it was kept) of its memory. key: identifies the
    operation."""

    output: Any
    watched: list[tuple[Tensor, int]]
    key: Hashable


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


class KeptOutputs:
    """The kept outputs of one run of some blocks. weights: storages (`_cdata`) of the blocks' parameters."""

    def __init__(self, weights: Collection[int] = ()) -> None:
        self._weights = weights
        self._found: list[_Kept | None] = []
        self._of_memory: dict[int, _Kept] = {}
        """Entries by the memory of their tensors, in the first run."""
        self._place = 0
        self._records = self._is_last = self.is_inside = False
        """During the first run; whether nothing was saved since the last output; while a layer multiplies."""

    def __len__(self) -> int:
        return len(self._found)

    @property
    def tensors(self) -> list[Tensor]:
        """All that are kept."""
        return [leaf for kept in self._found if kept is not None for leaf in _tensors(kept.output)]

    @contextmanager
    def recording(self, *, by_caller: bool = False) -> Iterator[None]:
        """The first run. If nothing is saved after the last output, it is dropped: the second run never reaches its
        operation. by_caller: a mode of the caller passes all operations to `first_run`."""
        self._records = True
        with _use(self), nullcontext() if by_caller else _Mode(self.first_run):
            yield
        self._records = False
        self._of_memory.clear()
        if self._is_last:
            self._found.pop()
        self._found = [kept if kept is not None and _is_as_it_was(kept) else None for kept in self._found]

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """The second run."""
        if self._records:  # a block calls autograd itself during its first run
            self._records = self._is_last = False
            self._found.clear()
            self._of_memory.clear()
        self._place = 0
        with _use(self), _Mode(self._second_run):
            yield

    def product(self, layer: object, compute: Callable[[], Tensor]) -> Tensor:
        """`compute()` of a layer on rows and columns, or what it returned in the first run."""
        before, self.is_inside = self.is_inside, True
        try:
            if not self._records:
                found: Tensor = self._next(id(layer), compute)
                return found
            y = compute()
            self._keep(y.detach(), id(layer))
            return y
        finally:
            self.is_inside = before

    def note_call(self) -> None:
        """Record that something other than an operation was called, which may save tensors."""
        self._is_last = False

    def first_run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *,
                  run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] = _run) -> Any:
        """`func(*args, **kwargs)`, computed by `run`, and kept if it is expensive."""
        out = run(func, args, kwargs)
        if self.is_inside or not self._records:
            return out
        if _is_expensive(func, args, kwargs):
            self._keep(tree_map(_detach, out), self._key(func, args))
        elif not func.is_view:
            for leaf in _tensors(out):
                if (one := self._of_memory.get(_memory(leaf))) is not None:  # with its own version: `_unsafe_view`
                    one.watched.append(_with_version(_detach(leaf)))
            self._is_last &= func in _SAVES_NOTHING
        return out

    def _second_run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        compute = partial(func, *args, **kwargs)
        if self.is_inside or not _is_expensive(func, args, kwargs):
            return compute()
        return self._next(self._key(func, args), compute)

    def _keep(self, output: Any, key: Hashable) -> None:
        one = _Kept(output, [_with_version(each) for each in _tensors(output)], key)
        self._found.append(one)
        self._of_memory |= {_memory(each): one for each in _tensors(output)}
        self._is_last = True

    def _next(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """The next output; `compute()` if it is not kept, or was changed. After an operation that differs from the
        first run's, all outputs are computed."""
        if self._place >= len(self._found):
            return compute()
        found, self._found[self._place] = self._found[self._place], None
        if found is not None and found.key != key:
            self._found.clear()
            return compute()
        self._place += 1
        return compute() if found is None or not _is_as_it_was(found) else found.output

    def _key(self, func: Any, args: tuple[Any, ...]) -> Hashable:
        operands = [plain(leaf) for leaf in args if isinstance(leaf, Tensor)]
        storages = [leaf.untyped_storage()._cdata for leaf in operands]
        return func, *(leaf.shape for leaf in operands), *(each for each in storages if each in self._weights)


class _Nothing(KeptOutputs):
    """Used when nothing is recomputed selectively."""

    def product(self, layer: object, compute: Callable[[], Tensor]) -> Tensor:
        return compute()


class _Mode(TorchDispatchMode):
    """Passes every operation to a function."""

    def __init__(self, call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's stub has no types
        self._call = call

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled chains run compiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, so that torch's wrapper is not used: its first call imports the compiler, a second or two per rank."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        return self._call(func, args, kwargs or {})


def _is_expensive(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func in _PRODUCTS:
        return True
    if func in _BATCHED:
        first, second = map(plain, args[-2:])
        return bool(first.shape[:2].numel() * second.shape[2] <= first.numel() + second.numel())
    # Attention with dropout advances the generator of the masks that are drawn after it.
    return func in _ATTENTION and not _argument(func, args, kwargs, "dropout_p")


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    names = [argument.name for argument in func._schema.arguments]
    place = names.index(name) if name in names else len(args)
    return args[place] if place < len(args) else kwargs.get(name)


def _detach(leaf: Any) -> Any:
    """The same memory and version, without a graph: the tensor that is returned gets one."""
    if not isinstance(leaf, Tensor):
        return leaf
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return leaf.detach()


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    address: int = plain(tensor).untyped_storage()._cdata
    return address


def _with_version(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, tensor._version


def _is_as_it_was(kept: _Kept) -> bool:
    return all(tensor._version == version for tensor, version in kept.watched)


class _Current(threading.local):
    """State of each thread: ranks may be threads, and recomputation runs a block in one of autograd's threads."""

    kept: KeptOutputs = _Nothing()


_current = _Current()


def current() -> KeptOutputs:
    """The kept outputs of the blocks that are running."""
    return _current.kept


@contextmanager
def _use(kept: KeptOutputs) -> Iterator[None]:
    before, _current.kept = _current.kept, kept
    try:
        yield
    finally:
        _current.kept = before
