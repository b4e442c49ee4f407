"""Shared by contenders that are one `nn.Module` under autograd, with torch.distributed's default group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from benchmarks.pipeline.contender import Place


class AutogradStack:
    """A `Stack` around `network`, which has the parameters' names.

    dim: the dim of [B, S, H] that is sharded over the ranks of the default group; None if all ranks have everything.
    """

    def __init__(self, network: nn.Module, dim: int | None) -> None:
        self.network, self._dim = network, dim
        self._x: Any = None
        self._y: Any = None

    def share(self, whole: Tensor) -> Tensor:
        if self._dim is None:
            return whole
        return whole.chunk(dist.get_world_size(), self._dim)[dist.get_rank()].clone()

    def forward(self, x_local: Tensor) -> Tensor:
        self._x = x_local.detach().requires_grad_()
        self._y = self.network(self._x)
        return self._y.detach()

    def backward(self, dy_local: Tensor) -> Tensor:
        x, y, self._x, self._y = self._x, self._y, None, None
        y.backward(dy_local)
        return x.grad

    def finish(self) -> None:
        pass

    def clear(self) -> None:
        for parameter in self.network.parameters():
            parameter.grad = None

    def wait(self) -> None:
        dist.barrier()

    def saved_bytes(self, x_local: Tensor) -> int:
        return saved_bytes(self, x_local, self.network.parameters())

    def assemble(self, local: Tensor) -> Tensor:
        if self._dim is None:
            return local
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local.contiguous())
        return torch.cat(parts, self._dim)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.network.named_parameters():
            grad = parameter.grad
            yield name, grad.full_tensor() if is_traceable_wrapper_subclass(grad) else grad  # a DTensor


@contextmanager
def default_group(place: Place) -> Iterator[None]:
    """torch.distributed over Gloo; an initialised default group is used and left alone."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=place.store, rank=place.rank, world_size=place.size)
    yield
    dist.barrier()  # a rank that closes its connections early can leave the other's destructors waiting
    dist.destroy_process_group()


def saved_bytes(stack, x_local: Tensor, parameters) -> int:
    """Bytes of the storages that autograd keeps after `stack.forward`, each counted once, without those of
    `parameters`.

    Storages that are released before the forward ends, such as parameters gathered for one layer, do not count.
    """
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.update({storage._cdata: storage for storage in _storages(tensor)})
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y_local = stack.forward(x_local)
    for parameter in parameters:
        for storage in _storages(parameter):
            kept.pop(storage._cdata, None)
    nbytes = sum(storage.nbytes() for storage in kept.values())
    kept.clear()
    stack.backward(torch.zeros_like(y_local))
    stack.clear()
    return nbytes


def _storages(tensor: object) -> list[torch.UntypedStorage]:
    """The tensor's storage; for a wrapper of other tensors, their storages; for anything else, none."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [storage for name in names for storage in _storages(getattr(tensor, name))]
    return [tensor.untyped_storage()] if isinstance(tensor, Tensor) else []
