"""Kernels of a block, counted on the meta device: the operations that reach the dispatcher, by storage.

What a device runs differs from this count by fusion: of attention, of chains that are compiled, and of the loss on
CUDA, which is one pass over the logits. `Counting` says which of these apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ranvier.config.run import Run
from ranvier.cost import kernels
from ranvier.cost.blocks import Repeated
from ranvier.cost.kernels import Kernel, Kernels
from ranvier.system.meta_operations import run_on_meta
from ranvier.tensor import float8
from ranvier.tensor.columns import plain
from ranvier.tensor.fused import Fused, use_calls
from ranvier.tensor.kept_outputs import KeptOutputs

FUSED_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Represents the fused kernel of any device."""
_MOVES_NOTHING = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "scalar_tensor",
                            "promote_types", "lift_fresh"})
_PRODUCTS = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "convolution"})
INTO_WIDER = frozenset({torch.ops.aten.mm.dtype_out, torch.ops.aten.addmm.dtype_out, torch.ops.aten.bmm.dtype_out})
"""Products of half-precision operands whose result is in fp32."""
_LOOKUPS = frozenset({"embedding", "index_select", "gather", "index", "take"})
_SCATTERS = frozenset({"scatter", "scatter_", "scatter_add", "scatter_add_", "index_put", "index_put_", "index_add",
                       "index_add_", "index_copy_"})
_NORMS = frozenset({"native_layer_norm", "_fused_rms_norm"})
_FILLS = frozenset({"zero_", "fill_", "uniform_", "normal_", "bernoulli_", "random_"})
_COPIES = _LOOKUPS | _SCATTERS | _FILLS | {
    "copy_", "clone", "_to_copy", "cat", "stack", "add", "add_", "sub", "sub_", "constant_pad_nd", "zeros", "ones",
    "full", "zeros_like", "ones_like", "arange", "mul_", "slice_scatter", "repeat", "roll", "flip"}
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Counting:
    """Which operations a device fuses into one kernel.

    compiles: full blocks are compiled; compiles_chains: chains of layers are compiled, on several rows and columns.
    on_cuda: the loss is one pass. has_scores: attention writes its scores. float8: products of the blocks between the
    first and the last are in float8. is_live: live bytes of forward and backward are counted, on one row and column; a
    backward runs code of the blocks, which a user's own modules would notice.
    """

    compiles: bool = False
    compiles_chains: bool = False
    on_cuda: bool = False
    has_scores: bool = False
    float8: bool = False
    is_live: bool = False


AS_WRITTEN = Counting()
"""Nothing is compiled, on a CPU."""


def counting_of(run: Run, *, device: str, stage_size: int) -> Counting:
    """The counting that a run's settings imply on such devices (cuda or cpu)."""
    compiles = run.model.compile is True or (run.model.compile == "auto" and device == "cuda")
    return Counting(compiles=compiles and stage_size == 1 and run.memory.recompute != "selective",
                    compiles_chains=compiles and stage_size > 1, is_live=stage_size == 1,
                    on_cuda=device == "cuda", float8=run.model.float8,
                    has_scores=run.model.attention_kernel == "math" and device == "cuda")


class KernelCount(TorchDispatchMode):
    """Counts kernels, their operations, the bytes that operations write, and separately those in new memory, including
    bare allocations.

    flops: of products and attention (causal attention counts in full here); weight_flops: of products with weights.
    weights: storages of the block's parameters (`_cdata`) -> whether they train. others_train: whether other second
    operands of 2-D products, such as gathered weights, train. kept_outputs: outputs that selective recomputation keeps.
    """

    def __init__(self, weights: Mapping[int, bool] | None = None, *, others_train: bool = True,
                 kept_outputs: KeptOutputs | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's stub has no types
        self.kernels: list[Kernel] = []
        self.written = self.allocated = self.flops = self.weight_flops = 0
        self._weights, self._others_train = dict(weights or {}), others_train
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self.kept_outputs = KeptOutputs() if kept_outputs is None else kept_outputs
        self._written_again = self._saved_at = self._written_when_saved = 0
        """Bytes written by operations whose outputs are not kept; number of kernels, and such bytes, when a tensor was
        last saved."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoid torch's wrapper, whose first call imports the compiler: a second or two of every rank's start."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        before = len(self.kept_outputs)
        result = self.kept_outputs.first_run(func, args, kwargs, run=run_on_meta)
        given, returned = tensors_in((args, kwargs)), tensors_in(result)
        if func.is_view or not self.counts(given or returned):
            return result
        is_kept = self.kept_outputs.is_inside or len(self.kept_outputs) > before
        storages = {self.storage_of(leaf) for leaf in given}
        new = [self.storage_of(leaf) not in storages for leaf in returned]
        self.allocated += sum(tensor_bytes(leaf) for leaf, is_new in zip(returned, new, strict=True) if is_new)
        self.written += (written := sum(map(tensor_bytes, returned)))
        self._written_again += 0 if is_kept else written
        writes_in_place = any(argument.alias_info is not None and argument.alias_info.is_write
                              for argument in func._schema.arguments)
        name = func.overloadpacket.__name__
        if returned and name not in _MOVES_NOTHING and (any(new) or writes_in_place):
            kernel = self._kernel(func, args, kwargs, returned)
            self.kernels.append(replace(kernel, is_kept=True) if is_kept else kernel)
        return result

    def counts(self, tensors: Sequence[Tensor]) -> bool:
        """Whether to count an operation: tensors with values, such as tables of angles, are computed once for all
        blocks."""
        return any(plain(leaf).is_meta for leaf in tensors)

    def sums(self) -> tuple[int, ...]:
        """The counts so far, for `repeat`."""
        return (len(self.kernels), self.allocated, self.written, self.flops, self.weight_flops, self._written_again)

    def repeat(self, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        """Count again what was counted between these two states: the same kernels."""
        (begins, *sums), (ends, *later) = before, after
        self.kernels += self.kernels[begins:ends]
        _, *now = self.sums()
        self.allocated, self.written, self.flops, self.weight_flops, self._written_again = (
            each + two - one for each, one, two in zip(now, sums, later, strict=True))

    def note_saved(self) -> None:
        """Note that autograd saves a tensor: a recomputation ends with the last one."""
        self._saved_at, self._written_when_saved = len(self.kernels), self._written_again

    def until_saved(self) -> list[Kernel]:
        """Kernels before the last tensor that autograd saves."""
        return self.kernels[:self._saved_at]

    def recomputed_kernels(self, counting: Counting, element_bytes: int, kept_bytes: int,
                           inside_bytes: int) -> Repeated:
        """Kernels that run again if the block is recomputed selectively. element_bytes: as for `run_kernels`."""
        found = _with_scores(self.until_saved(), counting, element_bytes)
        return Repeated(kernels=tuple(kernel for kernel in found if not kernel.is_kept), kept_bytes=kept_bytes,
                        inside_bytes=inside_bytes, written_bytes=self._written_when_saved)

    def storage_of(self, tensor: Tensor) -> int:
        """The number of a tensor's storage, which is kept alive, since an address may be reused."""
        return self.number_of(plain(tensor).untyped_storage())

    def number_of(self, storage: torch.UntypedStorage) -> int:
        """The number of a storage."""
        return self._storages.setdefault(storage._cdata, (len(self._storages), storage))[0]

    def operands(self) -> set[int]:
        """Storages (`_cdata`) of what products and attention read and write."""
        found = {access.storage for kernel in self.kernels if kernel.kind in ("product", "attention")
                 for access in (*kernel.reads, *kernel.writes)}
        return {key for key, (number, _) in self._storages.items() if number in found}

    @property
    def weights(self) -> set[int]:
        """The numbers of the block's parameters."""
        return {self._storages[address][0] for address in self._weights if address in self._storages}

    def _access(self, tensor: Tensor, most: int | None = None) -> kernels.Access:
        size = max(1, plain(tensor).untyped_storage().nbytes())
        found = distinct_bytes(tensor)
        return kernels.Access(self.storage_of(tensor), found if most is None else min(found, most), size)

    def _kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Sequence[Tensor]) -> Kernel:
        name = func.overloadpacket.__name__
        if func.overloadpacket is FUSED_ATTENTION:
            return self._attention(args, kwargs, returned)
        if name in _PRODUCTS:
            return self._product(name, args, returned)
        most = sum(map(tensor_bytes, returned)) if name in _LOOKUPS else None
        sources = [] if name in _FILLS else tensors_in(_read_of(func, args, kwargs))
        kind: kernels.Kind = "copy" if name in _COPIES else "pointwise"
        reads = tuple(self._access(leaf, most if place == 0 else None) for place, leaf in enumerate(sources))
        written = None
        if name in _SCATTERS:  # only what is scattered is written
            reads, written = reads[1:], sum(map(distinct_bytes, sources[1:]))
        scales = name in _NORMS and args[2] is not None and self._trains(args[2])
        trains = [self._weights.get(plain(leaf).untyped_storage()._cdata) for leaf in sources]
        of_weights = kind == "copy" and bool(trains) and None not in trains
        writes = tuple(self._access(leaf, written) for leaf in returned)
        most = max((access.bytes for access in reads), default=0)
        reduces = kind == "pointwise" and any(kernels.REDUCES * access.bytes < most for access in writes)
        return Kernel(kind=kind, reads=reads, writes=writes, is_reduction=reduces or name in _NORMS,
                      weight="trains" if scales or (of_weights and any(trains)) else "frozen" if of_weights else "none")

    def _trains(self, weight: Tensor) -> bool:
        return self._weights.get(plain(weight).untyped_storage()._cdata, self._others_train)

    def _product(self, name: str, args: tuple[Any, ...], returned: Sequence[Tensor]) -> Kernel:
        added = name in ("addmm", "addmm_", "baddbmm", "baddbmm_")
        first, second = args[1:3] if added else args[:2]
        reads = tuple(self._access(leaf) for leaf in (first, second, *tensors_in(args[0] if added else args[2:])))
        out, is_cut = plain(returned[0]), False
        if name == "convolution":
            flops = flop_registry[torch.ops.aten.convolution](*args, out_val=returned[0])
            n = out.shape[1]
            batch, m = 1, out.numel() // max(1, n)
            k = flops // max(1, 2 * m * n)
        else:
            *batches, m, k = plain(first).shape
            n, batch = plain(second).shape[-1], prod(batches)
            is_cut = batch > 1 and plain(first).stride(0) == 0  # one product, whose result is split by features
            n, batch = (n * batch, 1) if is_cut else (n, batch)
        weight = plain(second).untyped_storage()._cdata
        # A weight of a batch of products is an expanded one.
        is_weight = (plain(first).dim() == 2 or is_cut or name == "convolution" or weight in self._weights
                     or (batch > 1 and plain(second).stride(0) == 0))
        flops = 2 * batch * m * n * k
        self.flops += flops
        self.weight_flops += flops if is_weight and name != "convolution" else 0
        return Kernel(kind="product", flops=flops, reads=reads, shape=(batch, m, n, k),
                      writes=tuple(self._access(leaf) for leaf in returned), has_bias=name == "addmm",
                      weight="none" if not is_weight else "trains" if self._trains(second) else "frozen")

    def _attention(self, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Sequence[Tensor]) -> Kernel:
        query, key, value = args[:3]
        *batch, queries, width = plain(query).shape
        keys, out = plain(key).shape[-2], plain(value).shape[-1]
        flops = 2 * prod(batch) * queries * keys * (width + out)
        self.flops += flops
        if len(args) > 4 and args[4]:  # causal: each query with the keys up to its position
            flops = flops * (2 * keys - min(queries, keys) + 1) // (2 * keys)
        sources = [query, key, value, *tensors_in(kwargs)]
        return Kernel(kind="attention", flops=flops, reads=tuple(map(self._access, sources)),
                      writes=tuple(map(self._access, returned)), shape=(prod(batch), queries, keys, width))

    @contextmanager
    def chains(self, counting: Counting) -> Iterator[None]:
        """Context in which chains that layers compile count as one pass, if they are compiled."""
        if not counting.compiles_chains:
            yield
            return
        with use_calls(_Chains(self)):
            yield


class _Chains(Fused):
    """Counts each chain as one kernel when it runs."""

    def __init__(self, count: KernelCount) -> None:
        super().__init__(False)
        self._count = count

    def __call__(self, function: Callable[..., _Result], *args: Any) -> _Result:
        begins = len(self._count.kernels)
        result = function(*args)
        outputs = {self._count.storage_of(leaf) for leaf in tensors_in(result)}
        self._count.kernels[begins:] = kernels.fuse_chains(self._count.kernels[begins:], outputs)
        return result


def kept_bytes(count: KernelCount, saved: Iterable[torch.UntypedStorage], counting: Counting) -> int:
    """Bytes that a block keeps for its backward. saved: what autograd saves in a forward that is not compiled, without
    parameters; chains that layers compile save the same as uncompiled."""
    kept = {count.number_of(storage): storage.nbytes() for storage in saved}
    if not counting.compiles:
        return sum(kept.values())
    chains = [kernel for kernel in count.kernels if kernel.kind in ("pointwise", "copy")]
    operands = {access.storage for kernel in count.kernels if kernel.kind in ("product", "attention")
                for access in (*kernel.reads, *(kernel.writes if kernel.kind == "attention" else ()))}
    return kernels.kept_by_compiler(chains, kept, operands & kept.keys() | count.weights)


def run_kernels(count: KernelCount, outputs: object, counting: Counting, element_bytes: int) -> Kernels:
    """The kernels that a device runs for a block's counted ones. outputs: what leaves the block."""
    found = _with_scores(count.kernels, counting, element_bytes)
    if counting.compiles:
        found = kernels.fuse_chains(found, {count.storage_of(leaf) for leaf in tensors_in(outputs)})
    return found


def num_repeated(count: KernelCount, counting: Counting, element_bytes: int) -> int | None:
    """Number of `run_kernels` that run again until the recomputation has produced all that autograd saves. None: all,
    since a compiled block saves when it has run."""
    if counting.compiles:
        return None
    return len(_with_scores(count.until_saved(), counting, element_bytes))


def _with_scores(found: Sequence[Kernel], counting: Counting, element_bytes: int) -> Kernels:
    return kernels.with_scores(found, element_bytes) if counting.has_scores else tuple(found)


def loss_kernels(count: KernelCount, outputs: object, counting: Counting) -> Kernels:
    """Kernels of the loss: as counted; on CUDA one pass over the last block's outputs."""
    if not counting.on_cuda:
        return tuple(count.kernels)
    reads = tuple(kernels.Access(number, size := tensor_bytes(leaf), max(1, size)) for number, leaf in enumerate(
        tensors_in(outputs)))
    return (Kernel(kind="pointwise", reads=reads),)


def float8_kernels(found: Kernels, counting: Counting) -> Kernels:
    """The same kernels with products of linear layers in float8."""
    return kernels.to_float8(found, float8.MULTIPLE, fuses=counting.compiles)


def _read_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation reads, without those that it only writes."""
    if func.overloadpacket.__name__ == "copy_":
        return list(args[1:])
    names = {argument.name for argument in func._schema.arguments if argument.is_out}
    return [*args, *(value for name, value in kwargs.items() if name not in names)]


def tensors_in(tree: object) -> list[Tensor]:
    """The tensors among the leaves of a tree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of this column's part of a tensor, by its shape."""
    return plain(tensor).numel() * tensor.element_size()


def distinct_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor that are in memory: expanded dims count once."""
    own = plain(tensor)
    return prod(size for size, stride in zip(own.shape, own.stride(), strict=True) if stride) * own.element_size() \
        if own.numel() else 0
