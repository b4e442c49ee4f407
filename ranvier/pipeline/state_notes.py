"""Notes about tensors of a carried state that travel with it to the next stage, as names of empty tensors.

    {"a": y, "b": y}     ->  {"a": y, "b": y, NOTE + "shared" + "a" + "b": empty}     a and b share memory
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

SHARED, HOOKED = "shared", "hooked"
"""Kinds of notes: the tensors share memory with others, or have a hook on their gradient."""

_NOTE = "\0"
"""Prefix of a note's name, and separator of its words. No name of a tensor begins so."""


def with_notes(state: dict[str, Tensor], notes: Mapping[str, Sequence[str]], device: torch.device) -> dict[str, Tensor]:
    """The state that leaves a stage, with the notes on its tensors."""
    if not any(notes.values()):
        return state
    return state | {_NOTE + _NOTE.join((what, *names)): torch.empty(0, dtype=torch.uint8, device=device)
                    for what, names in notes.items() if names}


def notes_of(tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], dict[str, list[str]]]:
    """Separate the state that enters a stage from its notes."""
    notes = [name for name in tensors if name.startswith(_NOTE)]
    if not notes:
        return tensors, {}
    words = (note.removeprefix(_NOTE).split(_NOTE) for note in notes)
    return {name: tensor for name, tensor in tensors.items() if name not in notes}, {
        what: names for what, *names in words}
