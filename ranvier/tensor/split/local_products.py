"""Matrix products on one rank.

Half-precision operands may have an fp32 result: a product that is added to others, of other panels or other ranks, is
rounded once, after the last addition. Rounding before each addition would multiply the error: by 5.8 for 64 panels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

if TorchVersion(torch.__version__) < "2.13":
    # In torch 2.11 the batched product into fp32 has no meta kernel, and that of the added product fails. The result is
    # in `out`, so for tensors without values there is nothing to do.
    def _nothing(*_: Any, out: Tensor, **__: Any) -> Tensor:
        return out

    _META_KERNELS = torch.library.Library("aten", "IMPL", "Meta")
    _META_KERNELS.impl("bmm.dtype_out", _nothing)
    _META_KERNELS.impl("addmm.dtype_out", _nothing, allow_override=True)


def multiply(out: Tensor, a: Tensor, b: Tensor, *, adds: bool = False, bias: Tensor | None = None) -> None:
    """out = a b (+ bias), or out += a b; out [m, n] in the format of a [m, k] and b [k, n], or (without bias) in
    fp32."""
    a, b = _operands(out, a, b)
    if out.dtype is not a.dtype:
        if adds:
            torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
        else:
            torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
    elif adds:
        out.addmm_(a, b)
    elif bias is not None:
        torch.addmm(bias, a, b, out=out)
    else:
        torch.mm(a, b, out=out)


def multiply_rows(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    """out = a b (+ bias) for a matrix b; out [n, m, F] or a [n, m, K] may be rows of a panel, with gaps between them,
    and the other tensor has the same tokens. Formats as in `multiply`."""
    if out.shape[0] == a.shape[0] == 1:
        multiply(out[0], a[0], b, bias=bias)
        return
    a, b = _operands(out, a, b)
    batches = max(len(out), len(a))
    a, out = (matrix if len(matrix) == batches else matrix.view(batches, -1, matrix.shape[-1]) for matrix in (a, out))
    _multiply_batches(out, a, b.expand(batches, *b.shape), bias)


def multiply_slabs(slabs: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    """slabs [k, m, F / k] = a b for a matrix b [K, F], with the result cut by features, in one call; a [1, m, K]. A
    single slab is like `out` of `multiply_rows`, and may have a bias."""
    if len(slabs) == 1:
        multiply_rows(slabs, a, b, bias)
        return
    assert bias is None
    a, b = _operands(slabs, a, b)
    _multiply_batches(slabs, a.expand(len(slabs), -1, -1), b.unflatten(1, (len(slabs), -1)).movedim(1, 0), None)


def _operands(out: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The operands, on a CPU in the format of `out`, since its library multiplies equal formats only."""
    return (a.to(out.dtype), b.to(out.dtype)) if a.device.type == "cpu" else (a, b)


def _multiply_batches(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    if out.dtype is not a.dtype:
        torch.ops.aten.bmm.dtype_out(a, b, out.dtype, out=out)
    elif bias is not None:
        torch.baddbmm(bias, a, b, out=out)
    else:
        torch.bmm(a, b, out=out)
