"""Choice of the rows and columns of a tensor mesh that minimizes the bytes that ranks receive.

A layer receives a A + w W bytes per rank (`ranvier.cost.volume`), with A = E / row - E / ranks and W = H / col -
H / ranks for E = b s h and H = h^2. So the best row / col is near a E / (w H), for stationary products a little below
b s / (3 h). Pure.
"""

from __future__ import annotations

from ranvier.cost.volume import Recompute, Scheme, block_volume, transformer_layer
from ranvier.errors import ConfigError
from ranvier.mesh import divisors


def best_shape(ranks: int, *, batch: int, sequence: int, hidden: int, heads: int, scheme: Scheme,
               recompute: Recompute = "none") -> tuple[int, int]:
    """(row, col) with row col = ranks and the fewest bytes per layer, forward and backward; fewer rows if equal.

    batch: sequences of a microbatch. Rows hold whole sequences and columns whole heads, so row divides batch, and col
    heads; row col divides hidden, so that each weight is cut evenly. megatron: one row. With sequence sharding col
    divides sequence. ConfigError when there are no such row and col.
    """
    legal = [(row, col) for row in (divisors(batch) if not scheme.startswith("megatron") else [1])
             for col in divisors(heads) if hidden % (row * col) == 0
             and (not scheme.endswith("sequence") or sequence % col == 0)]
    shapes = [(row, col) for row, col in legal if row * col == ranks]
    if not shapes:
        nearest = min((row * col for row, col in legal), key=lambda size: (abs(size - ranks), size))
        raise ConfigError(_fault(ranks, batch, sequence, hidden, heads, scheme), code="no-tensor-mesh",
                          where="tensor mesh", value=f"{ranks} ranks", remedy=f"Use {nearest} ranks per stage.")
    return min(shapes, key=lambda shape: (block_volume(
        transformer_layer(hidden), scheme, row=shape[0], col=shape[1], batch=batch, sequence=sequence, hidden=hidden,
        itemsize=1, recompute=recompute).total, shape))


def _fault(ranks: int, batch: int, sequence: int, hidden: int, heads: int, scheme: Scheme) -> str:
    """The size that rows or columns do not divide."""
    if hidden % ranks:
        return f"does not divide the hidden size {hidden}"
    if not scheme.startswith("megatron"):
        return (f"is not a product of rows, which divide the {batch} sequences of a microbatch, and columns, "
                f"which divide the {heads} heads"
                f"{f' and the sequence length {sequence}' if scheme.endswith('sequence') else ''}")
    if heads % ranks:
        return f"does not divide the {heads} heads"
    return f"does not divide the sequence length {sequence}"
