"""Transfers between ranks after which every rank has the elements that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ranvier.errors import ModelError
from ranvier.layout.boxes import Box, intersection, without


@dataclass(frozen=True)
class Move:
    """Elements that `destination` needs and `source` has. Equal ranks: a copy on the spot."""

    parameter: str
    box: Box
    source: int
    destination: int


Places = Mapping[str, Sequence[tuple[int, Box]]]
"""Name of a tensor -> (rank, box) of its parts, none of them empty."""


def moves(have: Places, need: Places) -> list[Move]:
    """The transfers after which every rank has what it needs, each element once. The source is the destination itself
    where it has the elements, else the lowest rank that has them. ModelError where no rank has them."""
    result = []
    for name, wanted in need.items():
        for destination, box in wanted:
            missing = [box]
            for source, present in sorted(have.get(name, []), key=lambda item: (item[0] != destination, item[0])):
                left = []
                for piece in missing:
                    common = intersection(piece, present)
                    if common is None:
                        left.append(piece)
                    else:
                        result.append(Move(name, common, source, destination))
                        left += without(piece, common)
                missing = left
                if not missing:
                    break
            if missing:
                raise ModelError("is needed but held by no rank of the old layout", code="element-held-nowhere",
                                 where=f"parameter {name}", value=missing[0],
                                 remedy="Move between layouts of the same model.")
    return result
