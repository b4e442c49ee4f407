"""A user's modules that other ranks train: on this rank they keep the values from before.

A model that is given as modules is whole on every rank, and an engine trains the blocks of the rank's own stages. Who
computes with the others, or saves them, would get old values without an error. So these modules warn until new values
are written into them, and an engine that would train on from them refuses its first batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from weakref import ref

from torch import nn

from ranvier.errors import ModelError

_NOTE = "trained_elsewhere"
"""Attribute of a module, with its `_OldValues`."""


@dataclass(eq=False)
class _OldValues:
    """Hook of one module. known: name -> (identity, version) of a parameter when other ranks have last updated it."""

    told: list[str]
    known: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __call__(self, module: nn.Module, *_: object) -> None:
        old = old_names(module)
        if old and not self.told:
            self.told += old
            warnings.warn(f"{type(module).__name__}.{old[0]} has its values from before the training here: another "
                          "rank has trained it, and all that is not of this rank's stage. Before you use the model "
                          "or save it, call state = engine.full_state_dict() on all ranks and "
                          "model.load_state_dict(state) on rank 0", stacklevel=3)


def old_names(module: nn.Module) -> list[str]:
    """The parameters of its own that other ranks have trained, and nobody has written to here since."""
    note = vars(module).get(_NOTE)
    return [] if note is None else [name for name, known in note.known.items()
                                    if (one := module._parameters.get(name)) is not None
                                    and (id(one), one._version) == known]


class TrainedElsewhere:
    """given: all blocks that the user has made. own: the names of this rank's. held: the parameters of those."""

    def __init__(self, given: Mapping[str, nn.Module], own: Iterable[str], held: Iterable[nn.Parameter]) -> None:
        mine, self._here, self._told = set(own), {id(one) for one in held}, list[str]()
        self._others = [ref(module) for block in given if block not in mine for module in given[block].modules()
                        if any(one is not None and id(one) not in self._here for one in module._parameters.values())]
        """Not kept alive here: a program may drop the model, of which this rank needs a part only."""
        self._earlier = [(f"{block}.{path}".removesuffix("."), module) for block in given if block in mine
                         for path, module in given[block].named_modules() if _NOTE in vars(module)]
        """Of this rank, trained by others under an earlier engine."""

    def check_start(self) -> None:
        """ModelError where this rank would begin with old values: it has neither loaded nor been given others."""
        for path, module in self._earlier:
            for name in old_names(module):
                raise ModelError("has its values from before the training here: an earlier engine has trained it on "
                                 "another rank", code="parameter-trained-elsewhere", where=f"parameter {path}.{name}",
                                 remedy="Save a checkpoint with the earlier engine and load it with this one "
                                        "(ranvier.Checkpoints), or cut the model as before (Pipeline(boundaries=...)).")
        self.loaded()

    def loaded(self) -> None:
        """All values of this rank are those that they are to be."""
        for _, module in self._earlier:
            note = vars(module).pop(_NOTE, None)
            for hooks in (module._forward_pre_hooks, module._state_dict_pre_hooks):
                for number in [number for number, hook in hooks.items() if hook is note]:
                    del hooks[number]
        self._earlier = []

    def updated(self) -> None:
        """All ranks have updated what they train."""
        for module in filter(None, (one() for one in self._others)):
            note = vars(module).get(_NOTE)
            if note is None:
                note = vars(module)[_NOTE] = _OldValues(self._told)
                module.register_forward_pre_hook(note)
                module.register_state_dict_pre_hook(note)
            note.known |= {name: (id(one), one._version) for name, one in module._parameters.items()
                           if one is not None and one.requires_grad and id(one) not in self._here}
