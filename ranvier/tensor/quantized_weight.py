"""Frozen weights of linear layers in 8 or 4 bits, as under the adapters of QLoRA (Dettmers et al., 2023).

    int8   value = code / 127 * scale      codes from -127 to 127
    nf4    value = level[code] * scale     16 levels, the quantiles of a normal distribution; by bitsandbytes

A scale belongs to `BLOCK` consecutive inputs of one output and is their largest magnitude, in the weight's own number
format. Quantizing the dequantized values thus gives the same codes and scales: checkpoints, transitions and exports
carry values, in that number format, on any mesh that does not divide a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from ranvier.errors import ConfigError, ModelError
from ranvier.tensor.autograd import Function

BLOCK = 64
"""Number of elements that share a scale."""
_PER_BYTE = {"int8": 1, "nf4": 2}
_aten = torch.ops.aten


def quantized_bytes(elements: int, weight_format: str, dtype: torch.dtype) -> int:
    """Bytes of this many elements, a multiple of `BLOCK`, with their scales."""
    return elements // _PER_BYTE[weight_format] + elements // BLOCK * dtype.itemsize


def dequantization_bytes(elements: int, weight_format: str, dtype: torch.dtype) -> int:
    """Peak bytes of dequantizing this number of elements: int8 values are in fp32 before they are in half precision,
    and the scales of nf4 always."""
    wide = torch.promote_types(dtype, torch.float32)
    if weight_format == "nf4":
        return elements * dtype.itemsize + elements // BLOCK * wide.itemsize
    return elements * (dtype.itemsize + (wide.itemsize if wide is not dtype else 0))


class QuantizedWeight(Tensor):
    """A weight [out, in] that is stored in fewer bits, and computes with its dequantized values.

    `functional.linear` multiplies with these values, in the forward and again in the backward, and keeps none of them.
    Every other operation gets them as a new tensor. `copy_` quantizes its argument; other in-place operations are
    errors. Slices are views; slices of inputs must be at multiples of `BLOCK`.

    codes: uint8 [out, in / elements of a byte]. scales: [out, in / BLOCK], of the weight's number format.
    """

    codes: Tensor
    scales: Tensor
    weight_format: str

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, weight_format: str) -> QuantizedWeight:
        shape = (len(codes), codes.shape[1] * _PER_BYTE[weight_format])
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=scales.dtype, device=codes.device)
        made.codes, made.scales, made.weight_format = codes, scales, weight_format
        return made

    @classmethod
    def from_values(cls, values: Tensor, weight_format: str) -> QuantizedWeight:
        """The weight nearest to `values` [out, in]; `in` is a multiple of `BLOCK`. ConfigError if the quantization
        library is missing."""
        if values.dtype is torch.float64 and weight_format == "nf4":
            raise ConfigError("cannot quantize fp64", code="quantized-fp64", where="lora.base-format",
                              value=weight_format, remedy="Set another `--precision`, or `--lora.base-format int8`.")
        return cls(*_quantize(values.detach(), weight_format), weight_format)

    def values(self) -> Tensor:
        """The dequantized weight: [out, in] in its number format, in new memory."""
        return _dequantize(self.codes, self.scales, self.weight_format)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"QuantizedWeight({self.weight_format}, {tuple(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = _make(self.codes.clone(), self.scales.clone(), self.weight_format, isinstance(self, nn.Parameter))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _make, (self.codes, self.scales, self.weight_format, isinstance(self, nn.Parameter))

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["codes", "scales"], self.weight_format

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], weight_format: str, shape: object,
                             strides: object) -> QuantizedWeight:
        return QuantizedWeight(inner["codes"], inner["scales"], weight_format)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if func is functional.linear:
            return _linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors, except as the dispatch decides
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (),  # type: ignore[override]
                           kwargs: dict[str, Any] | None = None) -> Any:
        this = args[0] if args else None
        if isinstance(this, QuantizedWeight):
            if func in (_aten.detach.default, _aten.alias.default):
                return this._map_parts(lambda inner: inner)
            if func is _aten.clone.default:
                return this._map_parts(Tensor.clone)
            if func is _aten.slice.Tensor:
                return this._slice(*args[1:])
            if func is _aten.copy_.default:
                return this._set(args[1])
            if func is _aten._to_copy.default and set(kwargs or {}) <= {"device", "non_blocking"}:
                return this._map_parts(lambda inner: inner.to(**(kwargs or {})))
        if func._schema.is_mutable and any(
                isinstance(given, QuantizedWeight) and argument.alias_info is not None and argument.alias_info.is_write
                for given, argument in zip(args, func._schema.arguments, strict=False)):
            raise ModelError("is written in place, and a quantized weight has whole blocks only",
                             code="quantized-written-in-place", where="QuantizedWeight", value=func.name(),
                             remedy="Give it new values: weight.data.copy_(values).")
        return func(*dense(args), **dense(kwargs or {}))

    def _map_parts(self, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        return QuantizedWeight(change(self.codes), change(self.scales), self.weight_format)

    def _slice(self, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Tensor:
        first, last, _ = slice(start, stop).indices(self.shape[dim])
        if step != 1 or (dim % 2 and (first % BLOCK or last % BLOCK)):
            return self.values()[:, first:last:step] if dim % 2 else self.values()[first:last:step]
        if not dim % 2:
            return self._map_parts(lambda inner: inner[first:last])
        bytes_of = _PER_BYTE[self.weight_format]
        return QuantizedWeight(self.codes[:, first // bytes_of:last // bytes_of],
                               self.scales[:, first // BLOCK:last // BLOCK], self.weight_format)

    def _set(self, values: Tensor) -> QuantizedWeight:
        if isinstance(values, QuantizedWeight) and values.weight_format == self.weight_format \
                and values.dtype is self.dtype:
            codes, scales = values.codes, values.scales
        else:
            new_values = dense(values).to(device=self.device, dtype=self.dtype).expand(self.shape)
            codes, scales = _quantize(new_values, self.weight_format)
        self.codes.copy_(codes)
        self.scales.copy_(scales)
        return self


def dense(tree: Any) -> Any:
    """`tree`, which may be a single tensor, with quantized weights replaced by their values."""
    if isinstance(tree, Tensor):  # as at each product of a split layer
        return tree.values() if isinstance(tree, QuantizedWeight) else tree
    return tree_map_only(QuantizedWeight, QuantizedWeight.values, tree)


def stored_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold a parameter's memory."""
    return [tensor.codes, tensor.scales] if isinstance(tensor, QuantizedWeight) else [tensor]


def _make(codes: Tensor, scales: Tensor, weight_format: str, is_parameter: bool) -> Tensor:
    found = QuantizedWeight(codes, scales, weight_format)
    return nn.Parameter(found, requires_grad=False) if is_parameter else found


class _QuantizedLinear(Function):
    """functional.linear of a frozen quantized weight, which is dequantized again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        ctx.weight, ctx.features = weight, len(weight)
        return functional.linear(x, weight.values(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        wants_input, _, wants_bias = ctx.needs_input_grad
        return (dy.matmul(ctx.weight.values().to(dy.dtype)) if wants_input else None, None,
                dy.reshape(-1, ctx.features).sum(0) if wants_bias else None)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, QuantizedWeight):
        return functional.linear(dense(x), weight, dense(bias))
    y: Tensor = _QuantizedLinear.apply(x, weight, bias)
    return y


# ---------------------------------------------------------------------- values <-> codes and scales


def _quantize(values: Tensor, weight_format: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of values [out, in]."""
    rows, features = values.shape
    blocks = values.reshape(-1, BLOCK)
    if weight_format == "int8":
        wide, scales = torch.promote_types(values.dtype, torch.float32), blocks.abs().amax(1, keepdim=True)
        divisors = scales.to(wide).clamp_min(torch.finfo(torch.float32).tiny)  # of a block of zeros
        codes = blocks.to(wide).div(divisors).mul_(127).round_()
        return (codes.to(torch.int8).view(torch.uint8).view(rows, features), scales.view(rows, -1))
    packed, state = _bitsandbytes().quantize_4bit(blocks.contiguous(), blocksize=BLOCK, quant_type="nf4")
    return packed.view(rows, features // 2), state.absmax.to(values.dtype).view(rows, -1)


def _dequantize(codes: Tensor, scales: Tensor, weight_format: str) -> Tensor:
    """The values [out, in] of codes and scales."""
    rows, dtype = len(codes), scales.dtype
    if weight_format == "int8":
        wide = torch.promote_types(dtype, torch.float32)
        values = codes.contiguous().view(torch.int8).view(-1, BLOCK).to(wide).div_(127)
        return values.mul_(scales.reshape(-1, 1)).to(dtype).view(rows, -1)
    functions = _bitsandbytes()
    shape = torch.Size((rows, codes.shape[1] * 2))
    state = functions.QuantState(absmax=scales.reshape(-1).float(), shape=shape, blocksize=BLOCK, quant_type="nf4",
                                 code=functions.get_4bit_type("nf4", device=codes.device), dtype=dtype)
    found: Tensor = functions.dequantize_4bit(codes.reshape(-1, 1), state)
    return found


def check_available(weight_format: str) -> None:
    """Raise a ConfigError if the package that a format needs is not installed."""
    if weight_format == "nf4":
        _bitsandbytes()


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes.functional
    except ImportError as error:
        raise ConfigError("needs the package bitsandbytes", code="bitsandbytes-missing", where="lora.base-format",
                          value="nf4",
                          remedy="Run pip install 'ranvier[quantized]', or set `--lora.base-format int8`.") from error
    return bitsandbytes.functional
