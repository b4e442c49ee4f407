"""Stages that are slowed down: the effect of a weaker device or a busy machine, by settings rather than by chance.

After each action the stage sleeps for a share of the time that the action took. In that time messages move as they
would between two blocks of a longer computation. The shares are a pure function of the action, the same at every step,
so the simulator can be given exactly the same machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

from ranvier.pipeline.engine import Engine
from ranvier.schedule.schedule import Action

Slowness = Callable[[int, str, int], float]
"""(stage, kind of action, microbatch) -> factor on its time, at least 1."""

_SLICE_SECONDS = 0.005


def slowness(settings: Mapping[str, float]) -> Slowness:
    """Settings: `stage` and `factor` for one slow stage, or `jitter` for random factors between 1 and 1 + jitter."""
    if "jitter" in settings:
        return lambda stage, kind, microbatch: 1.0 + settings["jitter"] * random.Random(
            f"{stage} {kind} {microbatch}").random()
    return lambda stage, kind, microbatch: settings["factor"] if stage == settings["stage"] else 1.0


def simulated_slowness(factor: Slowness) -> Callable[[int, Action], float]:
    """`factor` in the form that the simulator takes."""
    return lambda stage, action: factor(stage, action.kind, action.microbatch)


def slow_down(engine: Engine, factor: Slowness) -> None:
    """Have every forward, backward and weight action of the engine take `factor` times as long."""
    stage, transport, index = engine._stages.first, engine._connections.transport, engine.coordinates.pipe

    def slowed(run: Callable, kind: str) -> Callable:
        def slower(microbatch: int, *arguments, **named):
            started = time.monotonic()
            result = run(microbatch, *arguments, **named)
            now = time.monotonic()
            until = now + (factor(index, kind, microbatch) - 1.0) * (now - started)
            while (left := until - time.monotonic()) > 0.0:
                time.sleep(min(left, _SLICE_SECONDS))
                transport.progress()
            return result
        return slower

    stage.forward = slowed(stage.forward, "F")
    stage.backward = slowed(stage.backward, "B")
    stage.weight = slowed(stage.weight, "W")
