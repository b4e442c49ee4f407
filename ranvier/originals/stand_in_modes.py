"""How modules of a block follow the modes of the modules that they stand for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn


class StandInModes:
    """How modules of a block follow the modes of modules of a user's model that they stand for, and that the block does
    not have: once an original is in another mode than before, so is its stand-in.

    A block has it as its attribute `stand_in_modes`. Copies of a block, and saved ones, follow no other module.

    Args:
        pairs: (original, stand-in), which is put in the original's mode.
    """

    def __init__(self, pairs: Iterable[tuple[nn.Module, nn.Module]] = ()) -> None:
        self._pairs = [(weakref.ref(original), weakref.ref(stand_in)) for original, stand_in in pairs]
        self._seen: list[bool | None] = [None] * len(self._pairs)
        self.follow()

    def follow(self) -> None:
        """Take over the modes that have changed."""
        for place, (original, stand_in) in enumerate(self._pairs):
            one, other = original(), stand_in()
            if one is not None and other is not None and one.training != self._seen[place]:
                other.training = self._seen[place] = one.training

    def __reduce__(self) -> tuple[type[StandInModes], tuple[()]]:
        return StandInModes, ()
