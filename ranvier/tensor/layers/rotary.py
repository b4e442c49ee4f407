"""Rotary position embeddings (Su et al., 2021) and their scalings to longer sequences.

B batch, N heads, S sequence, D width of a head. Features i and i + D / 2 of a head form a plane, which is rotated by
position x frequency i: the order of features in Hugging Face's files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ranvier.arguments import check_arguments
from ranvier.tensor.autograd import Function
from ranvier.tensor.columns import layout_of_tensor, mark, plain
from ranvier.tensor.fused import Fused, current

Scaling = Literal["none", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """The angles of rotary embeddings.

    Attributes:
        width: features of a head, D; even.
        base: of the frequencies base^(-2 i / D).
        scaling: linear divides all frequencies by `factor` (Chen et al., 2023). dynamic raises the base for sequences
            that are longer than `positions` (NTK-aware). llama3 divides low frequencies, with a smooth transition
            (Llama 3.1). yarn does so by the number of turns within `positions`, and scales queries and keys (Peng et
            al., 2023).
        factor: by which sequences become longer.
        positions: number of positions of the model before scaling.
        limits: llama3: low and high frequency factors, below and above which frequencies are divided and kept (1, 4).
            yarn: turns within `positions` below which frequencies are divided, and above which they are kept (1, 32).
        magnitude: yarn: factor of rotated queries and keys; None is 0.1 ln(factor) + 1.
        whole_limits: yarn: whether the limits are rounded to whole features.
    """

    width: int
    base: float = 10000.0
    scaling: Scaling = "none"
    factor: float = 1.0
    positions: int = 0
    limits: tuple[float, float] | None = None
    magnitude: float | None = None
    whole_limits: bool = True

    def __post_init__(self) -> None:
        check_arguments(Rotary, vars(self))

    def frequencies(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """[D / 2], fp64, for sequences of `length`."""
        base, exponents = self.base, torch.arange(0, self.width, 2, dtype=torch.float64, device=device) / self.width
        if self.scaling == "dynamic" and length > self.positions:
            base *= (self.factor * length / self.positions - (self.factor - 1)) ** (self.width / (self.width - 2))
        frequencies = base ** -exponents
        match self.scaling:
            case "linear":
                return frequencies / self.factor
            case "llama3":
                kept = self._kept_by_wavelength(frequencies)
            case "yarn":
                kept = self._kept_by_turns(device)
            case _:
                return frequencies
        return frequencies / self.factor * (1 - kept) + frequencies * kept

    def _kept_by_wavelength(self, frequencies: Tensor) -> Tensor:
        """llama3: share of each frequency that is not divided."""
        low, high = self.limits or (1.0, 4.0)
        turns = self.positions * frequencies / (2 * math.pi)
        return ((turns - low) / (high - low)).clamp(0, 1)

    def _kept_by_turns(self, device: torch.device | str) -> Tensor:
        """yarn: share of each frequency that is not divided."""
        slow, fast = self.limits or (1.0, 32.0)

        def feature(turns: float) -> float:
            """Place of the frequency with this number of turns within `positions`."""
            return self.width * math.log(self.positions / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        first, last = feature(fast), feature(slow)
        if self.whole_limits:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.width - 1)
        places = torch.arange(self.width // 2, dtype=torch.float64, device=device)
        return 1 - ((places - first) / (last - first or 0.001)).clamp(0, 1)

    @property
    def scale(self) -> float:
        """Factor of rotated queries and keys."""
        if self.scaling != "yarn":
            return 1.0
        return self.magnitude if self.magnitude is not None else max(1.0, 0.1 * math.log(self.factor) + 1)

    def __call__(self, x: Tensor, positions: Tensor | None = None, *, longest: int | None = None) -> Tensor:
        """x [B, N, S, D] with each head rotated by the angles of its position.

        positions: [B, S] int64; by default 0, 1, ... S - 1. longest: exceeds the largest position, S by default.
        """
        if torch.compiler.is_dynamo_compiling() and longest is None:
            return self._compiled(x, positions)
        values, layout = plain(x), layout_of_tensor(x)
        length = longest or values.shape[-2]
        if longest is not None and self.scaling != "dynamic":
            length = 1 << (longest - 1).bit_length()  # few tables, while a text becomes longer
        # A tensor without values (`ranvier.tensor.compiled`) has tables without values, which must not stay.
        made = _tables if type(values) is Tensor else _tables.__wrapped__
        tables = made(self, length, values.dtype, values.device)
        y = _Rotated.apply(values, tables, positions, current())
        return y if layout is None else mark(y, layout)

    def _compiled(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """The same in a compiled graph, which computes the angles of the positions itself."""
        length = x.shape[-2]
        places = torch.arange(length, device=x.device) if positions is None else positions.unsqueeze(1)
        angles = places.to(torch.float64).unsqueeze(-1) * self.frequencies(length, x.device)
        return _rotate(x, *((part * self.scale).to(x.dtype) for part in (angles.cos(), angles.sin())))


@lru_cache(maxsize=32)
def _tables(rotary: Rotary, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, D / 2], which all layers share. They are rounded once, from fp64; for the meta device none
    are computed."""
    with torch.inference_mode(False):
        if device.type == "meta":
            one = torch.zeros((), dtype=dtype, device="cpu").expand(length, rotary.width // 2)
            return one.to(device), one.to(device)
        angles = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * rotary.frequencies(length)
        cosine, sine = ((part * rotary.scale).to(dtype).to(device) for part in (angles.cos(), angles.sin()))
        return cosine, sine


class _Rotated(Function):
    """A rotation whose gradient is rotated back by the same angles. The tables are cached, so only positions are
    saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tables: tuple[Tensor, Tensor], positions: Tensor | None, fused: Fused) -> Tensor:
        ctx.tables, ctx.fused = tables, fused
        ctx.save_for_backward(positions)
        return fused(_rotate, x, *_at(positions, tables))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (positions,) = ctx.saved_tensors
        return ctx.fused(_turned_back, dy, *_at(positions, ctx.tables)), None, None, None


def _at(positions: Tensor | None, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Angles [B, 1, S, D / 2] of positions [B, S]; the whole tables without positions."""
    cosine, sine = tables
    return tables if positions is None else (cosine[positions].unsqueeze(1), sine[positions].unsqueeze(1))


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cosine - b * sine, a * sine + b * cosine], dim=-1)


def _turned_back(dy: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return _rotate(dy, cosine, -sine)
