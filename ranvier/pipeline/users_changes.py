"""Detects changes of parameters, gradients and buffers by a user's program or a forward that would be lost or wrong.

    before a batch    gradients of others than the engine, parameters with old values or unfrozen ones, `eval()`
    after a batch     what was replaced, frozen or written during the batch, or got a gradient that is in no sum

Each is refused by name, or warned of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ranvier.errors import ModelError
from ranvier.layout import Layout
from ranvier.optim.gradients import Gradients, refuse_others
from ranvier.pipeline.held_parameters import HeldParameters
from ranvier.pipeline.shared_objects import SharedBufferChanges
from ranvier.pipeline.trained_elsewhere import TrainedElsewhere, used_from_outside


class UsersChanges:
    """parameters: those of this rank by key. names_in_whole: name -> those in the user's module. elsewhere: the modules
    that other ranks train. buffers: those that blocks of several stages share."""

    def __init__(self, layout: Layout, parameters: Mapping[str, nn.Parameter],
                 names_in_whole: Mapping[str, Sequence[str]], gradients: Gradients, *, held: HeldParameters,
                 elsewhere: TrainedElsewhere, buffers: SharedBufferChanges) -> None:
        self._names_in_whole, self._gradients, self._held = names_in_whole, gradients, held
        self._elsewhere, self._buffers = elsewhere, buffers
        self._frozen = [(name, one) for name, one in parameters.items() if not layout[name].trainable]
        """Frozen since the start."""

    def refuse_gradients(self, *, applied: bool) -> None:
        """Of `refuse_others`, for the parameters that this rank owns."""
        refuse_others(((self._name(spec.name), spec.parameter) for spec in self._gradients.owned()), self._gradients,
                      applied=applied)

    def check_start(self, *, training: bool) -> None:
        """ModelError where a batch cannot begin. Changes nothing."""
        if training:
            self.refuse_gradients(applied=False)
        self._elsewhere.check_start()

    def begin(self) -> None:
        """A training batch begins, after `HeldParameters.adopt`."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ModelError("was frozen when the engine was built, and is trainable now",
                                 code="parameter-unfrozen", where=f"parameter {self._name(name)}",
                                 remedy="Build a new engine to train more parameters.")
        self._buffers.begin()
        self._elsewhere.begin()
        self._held.begin()

    def check(self) -> None:
        """Its forwards and backwards have run. ModelError for what they must not do."""
        self._held.check_kept()
        for name in (*self._elsewhere.reached(), *self._gradients.late()):
            raise used_from_outside(self._name(name))
        self._elsewhere.check_of_no_block()
        self._buffers.check()

    def _name(self, name: str) -> str:
        return self._names_in_whole.get(name, (name,))[0]
