"""Costs of one block: numbers that `ranvier.planner.count` and the engine count on the meta device. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, TypeVar

from ranvier.cost.kernels import Kernel, Kernels

_Object = TypeVar("_Object")

_CPU_BALANCE = 4.0
"""Operations that a core does in the time of writing one byte: nominal, for the cut and the order of work."""
_CUDA_BALANCE, _CUDA_BALANCE_FP32 = 250.0, 20.0
"""Operations that a GPU does in the time of moving one byte, for products in half precision and others: nominal,
too."""


class ById(Generic[_Object]):
    """An object as a key: equal only to itself."""

    def __init__(self, it: _Object) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.it is other.it

    def __hash__(self) -> int:
        return id(self.it)


def _weight(device: str, kernels: Kernels, number_bytes: int, flops: int, written_bytes: int) -> float:
    """Relative time, in floating-point operations: on a GPU each kernel takes as long as it computes or moves bytes."""
    if device != "cuda":
        return flops + _CPU_BALANCE * written_bytes
    balance = _CUDA_BALANCE if number_bytes <= 2 else _CUDA_BALANCE_FP32
    return _kernels_weight(ById(kernels), balance)


@lru_cache(maxsize=1024)  # equal blocks share their kernels, and each cut needs all of them
def _kernels_weight(kernels: ById[Kernels], balance: float) -> float:
    return sum(max(kernel.flops, balance * kernel.moved_bytes) for kernel in kernels.it)


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """The part of a block that runs again in its backward under selective recomputation, and the data kept for it."""

    kept_bytes: int = 0
    """Bytes of the kept outputs of expensive operations."""
    inside_bytes: int = 0
    """Bytes that autograd keeps of the second run in addition to them."""
    written_bytes: int = 0
    """Bytes that operations of the second run write."""
    kernels: Kernels = ()


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """Cost of one microbatch in one block, forward pass only; a training step costs three times the flops if all
    parameters are trained."""

    name: str
    flops: int
    """Model FLOPs: attention counts in full, and recomputation does not count."""
    written_bytes: int
    """Bytes that the block's operations write."""
    forward_bytes: int
    """Peak live bytes of its forward, inputs included, besides those that it keeps. If they are not counted
    (`Counting.is_live`), these are all bytes of new memory that it writes."""
    backward_bytes: int
    """The same for its backward, with the gradient of its output, but without gradients of weights."""
    kept_bytes: int
    """Bytes of activations that autograd keeps for the backward, parameters aside."""
    loss_bytes: int = 0
    """Bytes that the loss after the last block keeps for its backward, such as the logits."""
    loss_forward_bytes: int = 0
    loss_backward_bytes: int = 0
    """The loss's `forward_bytes` and `backward_bytes`, besides those that it keeps."""
    target_bytes: int = 0
    """Bytes of the targets, if the loss follows."""
    operand_bytes: int = 0
    """The part of these bytes that products and attention read or write."""
    input_bytes: int
    """Bytes of the carried state that enters the block."""
    unsaved_input_bytes: int = 0
    """The part of these bytes that autograd does not keep."""
    output_bytes: int
    """Bytes of the carried state that leaves the block."""
    num_parameters: int
    num_trainable: int
    """Number of these parameters that need a gradient."""
    num_owned: int
    """Number of these that the block owns: the first end of a tied parameter owns it."""
    weight_elements: int = 0
    """Elements of the largest trainable weight of a plain linear layer."""
    plain_elements: int = 0
    """The same for torch's own layers, whose full gradient a backward computes if they queue no products."""
    table_elements: int = 0
    """The same for its other trainable parameters, such as lookup tables, whose full gradient a backward computes."""
    weight_share: float = 1.0
    """FLOPs of weight gradients as a share of the forward's: 1 if all weights need gradients, or none does; less if
    some of the block's weights are frozen, as with adapters."""
    defers: bool = True
    """Whether products for weights' gradients may be deferred: only if some weight of a linear layer trains."""
    float8_products: tuple[tuple[int, int, int], ...] = ()
    """(tokens, inputs, outputs) of the products of its linear layers that could be computed in float8."""
    kernels: tuple[Kernel, ...] = ()
    """Kernels of its forward; the last block has those of the loss, too."""
    num_repeated: int | None = None
    """Number of them that run again if the block ends a recomputed segment: a second run stops at the last tensor that
    the backward needs, and so before the last product. None means all, as for a block that is compiled as a whole."""
    number_bytes: int = 4
    """Bytes of an element of its parameters."""
    repeated: Repeated = Repeated()
    """Under selective recomputation."""
    is_selective: bool = False
    """Whether its recomputation is selective."""

    @property
    def weight_flops(self) -> int:
        """Operations of the backward's second half."""
        return self.flops if self.weight_share == 1.0 else round(self.weight_share * self.flops)

    @property
    def kept_outputs_bytes(self) -> int:
        """Bytes of kept outputs inside the block, if it is recomputed selectively."""
        return self.repeated.kept_bytes if self.is_selective else 0

    @property
    def inside_bytes(self) -> int:
        """Bytes that its second run keeps in addition to kept outputs."""
        return self.repeated.inside_bytes if self.is_selective else self.kept_bytes

    @property
    def repeated_kernels(self) -> Kernels:
        """Kernels of its second run."""
        return self.repeated.kernels if self.is_selective else self.kernels

    @property
    def last_repeated_kernels(self) -> Kernels:
        """Kernels of its second run if it ends a recomputed segment."""
        return self.repeated.kernels if self.is_selective else self.kernels[:self.num_repeated]

    @property
    def repeated_flops(self) -> int:
        """Operations of products of its second run."""
        return sum(kernel.flops for kernel in self.repeated.kernels) if self.is_selective else self.flops

    def repeated_weight(self, device: str = "cpu", *, ends: bool = False) -> float:
        """`weight` of its second run. ends: it ends a recomputed segment."""
        if self.is_selective:
            return _weight(device, self.repeated.kernels, self.number_bytes, self.repeated_flops,
                           self.repeated.written_bytes)
        if not ends or self.num_repeated is None:
            return self.weight(device)
        left_out = self.kernels[self.num_repeated:]
        return self.weight(device) - _weight(
            device, left_out, self.number_bytes, sum(kernel.flops for kernel in left_out),
            sum(access.bytes for kernel in left_out for access in kernel.writes))

    def weight(self, device: str = "cpu") -> float:
        """Relative time, in floating-point operations."""
        return _weight(device, self.kernels, self.number_bytes, self.flops, self.written_bytes)


Stages = Sequence[Sequence[BlockCost]]
"""The blocks of each stage."""


def selectively(costs: Iterable[BlockCost]) -> list[BlockCost]:
    """The same blocks with selective recomputation."""
    return [replace(cost, is_selective=True) for cost in costs]
