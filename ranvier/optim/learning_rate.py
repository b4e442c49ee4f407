"""The learning rate of each step: a warmup, then constant, linear, cosine or warmup-stable-decay."""

from __future__ import annotations

import math
from typing import assert_never

from ranvier.config.run import Train
from ranvier.errors import counted


def learning_rate(train: Train, step: float) -> float:
    """The learning rate of `step` (from 1).

    It rises linearly to train.learning_rate over the warmup. linear and cosine (Loshchilov and Hutter, 2017, without
    restarts) decay from there to train.final_learning_rate in the last step. wsd (Hu et al., 2024) stays constant and
    decays in the last train.decay_share of the steps; 1-sqrt is the form of Haegele et al. (2024).
    """
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    if train.schedule == "constant":
        return train.learning_rate
    start = decay_start(train)
    done = max(0.0, (step - start) / max(1, train.steps - start))
    match train.decay_shape if train.schedule == "wsd" else train.schedule:
        case "linear":
            left = 1.0 - done
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * done))
        case "1-sqrt":
            left = 1.0 - math.sqrt(done)
        case unknown:
            assert_never(unknown)
    return train.final_learning_rate + left * (train.learning_rate - train.final_learning_rate)


def decay_start(train: Train) -> int:
    """The last step before the learning rate decays."""
    if train.schedule != "wsd":
        return train.warmup_steps
    return max(train.warmup_steps, train.steps - max(1, round(train.decay_share * train.steps)))


def describe(train: Train) -> str:
    """The schedule in words: "wsd, 0.001 after 10 steps of warmup, 1-sqrt decay from step 80 to 0 at step 100"."""
    warmup = f" after {counted(train.warmup_steps, 'step')} of warmup" if train.warmup_steps else ""
    if train.warmup_steps >= train.steps:
        return f"{train.schedule}, {train.learning_rate:g}{warmup}, of which the run has {train.steps}"
    if train.schedule == "constant":
        return f"constant, {train.learning_rate:g}{warmup}"
    how = f"{train.decay_shape} " if train.schedule == "wsd" else ""
    return (f"{train.schedule}, {train.learning_rate:g}{warmup}, {how}decay from step {decay_start(train)} to "
            f"{train.final_learning_rate:g} at step {train.steps}")
