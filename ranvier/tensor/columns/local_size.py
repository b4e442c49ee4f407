"""The size of a sharded dim as code of a model reads it from a tensor's shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from ranvier.tensor.columns.refusal import refuse

MISUSE = "uses the local size of a dim that is sharded over columns as if it were the global size"


class LocalSize(int):
    """The local size of a sharded dim: an int that carries the global size too.

    Sums, differences, products and floor divisions of it are `LocalSize`s. A float of it (an average, a scale) would
    differ from that on one rank, so conversions to float and true division raise a ModelError.
    """

    whole: int
    """The global size: what one rank reads in its place."""

    def __new__(cls, value: int, whole: int) -> LocalSize:
        size = super().__new__(cls, value)
        size.whole = whole
        return size

    def __float__(self) -> NoReturn:
        refuse(MISUSE, f"{int(self)} of {self.whole}",
               "Take the number from the model's settings, or use a layer of ranvier.tensor.layers that divides by it.")

    def _no_float(self, *_: object) -> NoReturn:
        self.__float__()

    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _no_float

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def _on_both_sizes(name: str) -> Callable[..., object]:
    """The operation of int called `name`, applied to local and to global sizes."""
    of_int: Callable[..., int] = getattr(int, name)

    def operation(self: LocalSize, *other: int) -> object:
        if not all(isinstance(one, int) for one in other):
            if any(isinstance(one, float) for one in other):
                float(self)
            return NotImplemented  # [0] * size: Python asks the list
        value, whole = (of_int(int(self), *map(int, other)),
                        of_int(self.whole, *(getattr(one, "whole", one) for one in other)))
        return value if value is NotImplemented or whole is NotImplemented else LocalSize(value, whole)

    return operation


for _name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__floordiv__", "__mod__",
              "__neg__"):
    setattr(LocalSize, _name, _on_both_sizes(_name))
