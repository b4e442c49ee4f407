"""The learning rate of each step: a warm-up, then constant, linear or cosine."""

from __future__ import annotations

import math

from ranvier.run import Train


def learning_rate(train: Train, step: int) -> float:
    """The learning rate of `step` (from 1).

    It rises linearly to train.learning_rate over the warm-up; linear and cosine (Loshchilov and Hutter, 2017, without
    restarts) fall from there to train.final_learning_rate, which the last step has.
    """
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    if train.schedule == "constant":
        return train.learning_rate
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    left = 1.0 - done if train.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return train.final_learning_rate + left * (train.learning_rate - train.final_learning_rate)
