"""Repeated operations on the meta device: they return what torch returns, with their own memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ranvier.system import meta_operations
from ranvier.system.meta_operations import run_on_meta

aten = torch.ops.aten


class Known(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run_on_meta(func, args, kwargs or {})


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def forms(result):
    tensors = result if isinstance(result, (tuple, list)) else [result]
    return type(result), [(one.shape, one.stride(), one.dtype, one.storage_offset(), one.untyped_storage().nbytes())
                          if isinstance(one, torch.Tensor) else one for one in tensors]


NEW = {
    "product": lambda: meta(3, 4) * meta(3, 4),
    "transposed": lambda: meta(4, 3).T * 2.0,
    "broadcast": lambda: meta(2, 3, 4) + meta(4),
    "int": lambda: meta(3, dtype=torch.int64) * 2,
    "float": lambda: meta(3, dtype=torch.int64) * 2.0,
    "bool": lambda: meta(3, dtype=torch.bool) * True,
    "int of bool": lambda: meta(3, dtype=torch.bool) * 1,
    "norm": lambda: torch.native_layer_norm(meta(2, 3, 4), [4], meta(4), meta(4), 1e-5),
    "format": lambda: meta(3).to(torch.bfloat16),
    "list": lambda: torch._foreach_mul([meta(3), meta(2, 2)], 2.0),
    "attention": lambda: aten._scaled_dot_product_flash_attention_for_cpu(*[meta(1, 2, 8, 4)] * 3, 0.0, True),
}


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_results_are_torchs(default):
    """Also for numbers that are equal but of other types, and with another default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        expected = {name: forms(operation()) for name, operation in NEW.items()}
        for _ in range(2):
            with Known():
                assert {name: forms(operation()) for name, operation in NEW.items()} == expected
    finally:
        torch.set_default_dtype(before)


def test_torch_runs_each_once(monkeypatch):
    monkeypatch.setattr(meta_operations, "_known", {})
    x, seen, form_of_new = meta(3, 4), [], meta_operations._form_of_new
    monkeypatch.setattr(meta_operations, "_form_of_new", lambda *args: seen.append(args) or form_of_new(*args))
    with Known():
        first, second, other = x * x, x * x, x * 2.0
    assert len(seen) == 2
    assert len({one.untyped_storage()._cdata for one in (x, first, second, other)}) == 4


def test_what_shares_or_writes_memory_is_torchs_each_time():
    x, y = meta(3, 4), torch.ones(3)
    for _ in range(2):
        with Known():
            shared = x.view(12), aten._unsafe_view(x, [12]), x.add_(1.0), x.detach(), *aten.split(x, 1)
            summed = y + y
        assert all(one.untyped_storage()._cdata == x.untyped_storage()._cdata for one in shared)
        assert torch.equal(summed, torch.full((3,), 2.0))


def test_another_mode_beneath_is_given_every_operation():
    class Beneath(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen, x = [], meta(3, 4)
    with Known():
        x * x
    with Beneath(), Known():
        x * x
    assert seen == [aten.mul.Tensor]
