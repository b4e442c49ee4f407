"""Which steps are bad: the same answer on every rank, from numbers that all of them have anyway.

A step is bad when its loss or the norm of its gradients is no finite number, or when its loss is far above the usual.
Whoever looks before it updates (stop, skip and back) updates nothing from a bad step. An overflow in fp16 is no bad
step but the loss scale's business, unless the loss itself is no number: a smaller scale would not change that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

from ranvier.errors import ConfigError
from ranvier.run import Guard, Optim

USUAL_STEPS = 20
"""Good steps whose losses say what is usual."""


class BadSteps:
    """Says of each step whether it is bad, and remembers the losses of good ones.

    loss: waits for the mean loss of the global batch.
    """

    def __init__(self, guard: Guard, loss: Callable[[], float]) -> None:
        self._explode, self._loss = guard.explode, loss
        self._usual: deque[float] = deque(maxlen=USUAL_STEPS)

    def by_loss(self) -> str | None:
        """What is bad about the loss ("loss is nan"), or None."""
        loss = self._loss()
        if not math.isfinite(loss):
            return f"loss is {loss}"
        usual = median(self._usual) if self._usual else 0.0
        if self._explode and usual > 0 and loss > self._explode * usual:
            return (f"loss is {loss:.6g}, more than {self._explode:g} times {usual:.6g}, the median of the last "
                    f"{len(self._usual)} good ones")
        return None

    def by_norm(self, norm: float) -> str | None:
        """What is bad about the gradients' norm, or None."""
        return None if math.isfinite(norm) else f"gradient norm is {norm}"

    def good(self) -> None:
        """The step was good: its loss is one of the usual."""
        self._usual.append(self._loss())

    def state(self) -> dict[str, object]:
        """What a checkpoint keeps: a short list of numbers. JSON-serialisable, the same on every rank."""
        return {"losses": list(self._usual)}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on from a `state`."""
        self._usual = deque(state.get("losses", ()), maxlen=USUAL_STEPS)


def looks_before_update(guard: Guard, optim: Optim) -> bool:
    """Whether steps are judged before they are applied. Blocks that are updated in the backward are changed before
    anything is known of the step: there stop is what none is."""
    return guard.bad_step != "none" and not optim.update_in_backward


def guard_problems(guard: Guard, optim: Optim) -> Iterator[ConfigError]:
    """What a guard cannot do with these settings."""
    if optim.update_in_backward and guard.bad_step in ("skip", "back"):
        yield ConfigError("cannot look at a step before blocks are updated: optim.update-in-backward is set",
                          where="guard.bad-step", value=guard.bad_step,
                          remedy="Set --guard.bad-step stop, or leave --optim.update-in-backward out.")
    elif guard.explode and not looks_before_update(guard, optim):
        why = "guard.bad-step is none" if guard.bad_step == "none" else "optim.update-in-backward is set"
        yield ConfigError(f"has no effect where nobody looks at a step before it is applied: {why}",
                          where="guard.explode", value=guard.explode,
                          remedy="Set --guard.explode 0, or let the guard look.")
