"""Detection of bad steps: the same answer on every rank, from numbers that all ranks have anyway.

A step is bad when its loss or the norm of its gradients is not finite, or when its loss is far above the usual. Actions
that check before the update (stop, skip and rollback) do not update from a bad step. An overflow in fp16 is not a bad
step but handled by the loss scale, unless the loss itself is not finite: a smaller scale would not change that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from ranvier.config.run import Guard

USUAL_STEPS = 20
"""Number of good steps whose losses define the usual loss."""


class BadSteps:
    """Decides whether each step is bad, and keeps the losses of good steps.

    loss: waits for the mean loss of the global batch.
    """

    def __init__(self, guard: Guard, loss: Callable[[], float]) -> None:
        self._factor, self._loss = guard.loss_spike_factor, loss
        self._usual: deque[float] = deque(maxlen=USUAL_STEPS)
        self._last = 0.0

    def bad_loss(self) -> str | None:
        """Description of a bad loss ("loss is nan"), or None."""
        loss = self._last = self._loss()
        if not math.isfinite(loss):
            return f"loss is {loss}"
        usual = median(self._usual) if self._usual else 0.0
        if self._factor and usual > 0 and loss > self._factor * usual:
            return (f"loss is {loss:.6g}, more than {self._factor:g} times {usual:.6g}, the median of the last "
                    f"{len(self._usual)} good ones")
        return None

    def check_norm(self, norm: float) -> str | None:
        """After `bad_loss` has returned None: description of a bad gradient norm, or None; the step is then good."""
        if not math.isfinite(norm):
            return f"gradient norm is {norm}"
        self.note_good()
        return None

    def note_good(self) -> None:
        """Note that the step last checked by `bad_loss` was good: its loss counts as usual."""
        self._usual.append(self._last)

    def state(self) -> dict[str, object]:
        """State for a checkpoint: a short list of numbers. JSON-serialisable, the same on every rank."""
        return {"losses": list(self._usual)}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore what `state` returned."""
        self._usual = deque(state.get("losses", ()), maxlen=USUAL_STEPS)
