"""Training and evaluation modes of a block's modules, which follow those of the user's modules."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn


class StandInModes:
    """Copies the modes of a user's modules to the block's modules that stand in for them: when the mode of an original
    changes, so does that of its stand-in.

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
