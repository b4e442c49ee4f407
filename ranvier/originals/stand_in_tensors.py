"""Copies tensors that a user writes into modules, and the modules' modes, to their stand-ins in blocks.

    model.eval()                                                              another mode
    model.tok = nn.Parameter(x); model.load_state_dict(state, assign=True)    another parameter in the user's module
    model.temperature = x                                                     another buffer
    model.temperature.fill_(x)                                                the same, of which the block may have a
                                                                              copy on its device and in its dtype

Between batches the user's module gets training's changes of buffers, so that changes by its own forward add to these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from ranvier.errors import ModelError


class StandIns:
    """Parameters, buffers and modes that stand-ins take from their originals. A block has it as its attribute
    `stand_ins`; copies of a block, and saved blocks, follow no other module.

    pairs: (original, stand-in), which have the same tensors at first. The stand-in is put in the original's mode.
    """

    def __init__(self, pairs: Iterable[tuple[nn.Module, nn.Module]] = ()) -> None:
        self._pairs = [(ref(original), ref(stand_in), _note_tensors(original, stand_in))
                       for original, stand_in in pairs]
        self._modes: list[bool | None] = [None] * len(self._pairs)
        self.follow_modes()

    def follow_modes(self) -> None:
        """Copy the modes (training or evaluation) that have changed to the stand-ins."""
        for place, (original, stand_in, _) in enumerate(self._pairs):
            one, other = original(), stand_in()
            if one is not None and other is not None and one.training != self._modes[place]:
                other.training = self._modes[place] = one.training

    def follow(self) -> None:
        """Put replaced parameters into the stand-ins, too, and copy the values of buffers that have been written.
        ModelError for a buffer with another shape."""
        for original, stand_in, name, noted, now, mine in self._tensors():
            seen, _ = noted[name]
            if isinstance(now, nn.Parameter) and now is not mine and seen.tensor() is not now:
                setattr(stand_in, name, now)
            if isinstance(now, nn.Parameter) or now is mine or (
                    seen.tensor() is now and seen.version == _version(now)):
                continue
            if now.shape != mine.shape:
                raise ModelError(f"was replaced by a buffer of shape {tuple(now.shape)}, and its block has "
                                 f"{tuple(mine.shape)}", code="buffer-replaced-by-other-shape",
                                 where=f"buffer {name} of {type(original).__name__}",
                                 remedy="Give a value of the same shape, or build blocks and engine again.")
            with torch.no_grad():
                mine.copy_(now)
            noted[name] = _Seen.from_tensor(now), _Seen.from_tensor(mine)

    def write_back(self, given: dict[tuple[nn.Module, str], Tensor]) -> None:
        """Give originals the stand-ins' parameters, which have the new values, and the values of buffers that blocks
        have changed. given: original and name of a buffer -> the tensor of the stand-in that has set it, which other
        stand-ins follow next."""
        for original, _, name, noted, now, mine in self._tensors():
            before, seen = noted[name]
            if isinstance(now, nn.Parameter):
                if before.tensor() is not now:
                    setattr(original, name, mine)
                    now = mine
            elif now is not mine and (seen.tensor() is not mine or seen.version != _version(mine)):
                giver = given.get((original, name))
                if giver is None:
                    given[original, name] = mine
                    with torch.no_grad():
                        now.copy_(mine)
                elif giver is not mine:
                    continue
            noted[name] = _Seen.from_tensor(now), _Seen.from_tensor(mine)

    def _tensors(self) -> Iterator[tuple[nn.Module, nn.Module, str, _Noted, Tensor, Tensor]]:
        """Original, stand-in, name, the noted state, and the tensors of this name in both."""
        for original, stand_in, noted in self._pairs:
            if (one := original()) is not None and (two := stand_in()) is not None:
                for name in noted:
                    if (now := _tensor(one, name)) is not None and (mine := _tensor(two, name)) is not None:
                        yield one, two, name, noted, now, mine

    def __reduce__(self) -> tuple[type[StandIns], tuple[()]]:
        return StandIns, ()


class _Seen(NamedTuple):
    """A tensor and its version, which grows with each change in place; inference tensors have no version."""

    tensor: ref[Tensor]
    version: int

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> _Seen:
        return cls(ref(tensor), _version(tensor))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


_Noted = dict[str, tuple[_Seen, _Seen]]
"""Name -> the tensor of the original and that of the stand-in, as last seen."""


def _tensor(module: nn.Module, name: str) -> Tensor | None:
    found = module._parameters.get(name)
    return module._buffers.get(name) if found is None else found


def _note_tensors(original: nn.Module, stand_in: nn.Module) -> _Noted:
    return {name: (_Seen.from_tensor(one), _Seen.from_tensor(two))
            for name in (*stand_in._parameters, *stand_in._buffers)
            if (one := _tensor(original, name)) is not None and (two := _tensor(stand_in, name)) is not None}
