"""A run's reaction to bad steps and to replicas that diverge.

    stop       the step is reported, with the block and microbatch where the problem began, and the run ends
    skip       the step is reported in a note; the next step takes the next batch
    rollback   the last checkpoint is loaded; the steps since then are repeated on the data after the bad batch

Every rank knows at the end of a step whether it was bad, since nothing is updated before that is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from ranvier.config.run import Guard
from ranvier.errors import RanvierError
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.examine import Cause
from ranvier.pipeline.microbatch import Microbatch
from ranvier.pipeline.result import BatchResult
from ranvier.train.events import Event, NoteEvent


class Guards:
    """One run's guard, called after every step on every rank.

    Args:
        tell: receives an event.
        barrier: returns when every rank has called it.
        counts: `state` of the guards on the previous mesh.
    """

    def __init__(self, guard: Guard, engine: Engine, *, tell: Callable[[Event], None], barrier: Callable[[], None],
                 counts: Mapping[str, int] | None = None) -> None:
        self._guard, self._engine, self._tell, self._barrier = guard, engine, tell, barrier
        self._in_a_row, self._last_bad = (counts["in_a_row"], counts["last_bad"]) if counts else (0, 0)

    def state(self) -> dict[str, int]:
        """State that all ranks of the mesh share, for JSON."""
        return {"in_a_row": self._in_a_row, "last_bad": self._last_bad}

    def after_step(self, step: int, result: BatchResult, microbatches: Sequence[Microbatch], *,
                   publish: Callable[[], None], rollback: Callable[[], int | None]) -> int:
        """Check a finished step; returns the step at which the run is now: `step`, or after a rollback the
        checkpoint's. Collective.

        publish: reports all numbers of this step; called only before a rollback and before the run ends. rollback:
        loads the last checkpoint on all ranks and returns its step; None without a checkpoint. RanvierError, on every
        rank, if the run ends.
        """
        if result.bad is not None:
            return self._after_bad(step, result, self._engine.examine(microbatches), publish, rollback)
        if step > self._last_bad:  # up to there the run repeats steps; a run that never gets past them must end
            self._in_a_row = 0
        if self._guard.compare_every and step % self._guard.compare_every == 0:
            self._compare(step, publish)
        return step

    def _after_bad(self, step: int, result: BatchResult, cause: Cause, publish: Callable[[], None],
                   rollback: Callable[[], int | None]) -> int:
        self._in_a_row, self._last_bad = self._in_a_row + 1, max(step, self._last_bad)
        self._tell(_note(step, result, cause))
        if self._guard.bad_step == "stop":
            self._stop(step, result, cause, publish)
        if self._in_a_row >= self._guard.max_bad_steps:
            self._stop(step, result, cause, publish, f", bad step {self._in_a_row} in a row")
        if self._guard.bad_step == "skip":
            return step
        publish()
        reached = rollback()
        if reached is None:
            self._stop(step, result, cause, lambda: None, ", and there is no checkpoint to go back to")
        self._tell(NoteEvent(step=step, event="went-back", fields={"to_step": reached},
                             text=f"rolled back to the checkpoint of step {reached}; the data continues after the "
                                  "batch of this step"))
        return reached

    def _stop(self, step: int, result: BatchResult, cause: Cause, publish: Callable[[], None],
              more: str = "") -> NoReturn:
        publish()
        self._barrier()  # a failing rank ends the others, so it waits until rank 0 has written the step
        raise RanvierError(f"{result.bad}{more}; nothing was updated. {_text(result, cause)}", code="bad-step",
                           where=f"step {step}", remedy=_remedy(cause, self._engine.learning_rate, self._guard))

    def _compare(self, step: int, publish: Callable[[], None]) -> None:
        try:
            self._engine.compare_replicas()
        except RanvierError as error:
            self._tell(NoteEvent(step=step, event="replicas-differ", text=str(error)))
            publish()
            self._barrier()
            raise


def _note(step: int, result: BatchResult, cause: Cause) -> NoteEvent:
    fields = {"loss": result.loss if math.isfinite(result.loss) else None, "cause": cause.kind, "block": cause.block,
              "parameter": cause.parameter, "microbatch": cause.microbatch, "replica": cause.replica,
              "rank": cause.rank}
    return NoteEvent(step=step, event="bad-step", text=f"{result.bad}; nothing was updated. {_text(result, cause)}",
                     fields={name: value for name, value in fields.items() if value is not None})


def _text(result: BatchResult, cause: Cause) -> str:
    """The cause, or that the problem did not occur again when the same batch ran a second time."""
    assert result.grad_norm is not None  # of a training batch
    if cause.kind == "largest loss" and not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
        return "It did not come again when the same batch ran a second time: a device or its memory may be at fault, " \
               "or only the sum of all gradients is too large"
    text = str(cause)
    return text[0].upper() + text[1:]


def _remedy(cause: Cause, learning_rate: float, guard: Guard) -> str:
    """What a user should do about `cause`."""
    others = "" if guard.bad_step != "stop" else "; `--guard.bad-step skip` or rollback continues without such steps"
    match cause.kind:
        case "inputs" | "targets":
            return f"Look at the data of this microbatch{others}."
        case "parameter":
            return "Resume from a checkpoint of an earlier step: `--resume PATH`."
        case _:
            return (f"Lower `--train.learning-rate` (it was {learning_rate:g} at this step) or raise "
                    f"`--train.warmup-steps`{others}.")
