"""A task of your own for a shipped model: `ranvier train examples.own_task:recipe --run-dir runs/own-task`.

A task gives samples by index and scores outputs. This one is artificial: does the sum of a row of digits exceed its
mean? BERT reads the digits as tokens. `ranvier.testing.tasks.check_task` checks that a task implements the protocol.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ranvier.config.task_form import TaskForm
from ranvier.data.class_numbers import Accuracy
from ranvier.data.task import Prepared, Task
from ranvier.errors import DataError


class Digits:
    """Sample n is a row of digits that depends on n only: the same on every rank and in any order."""

    def __init__(self, first, count, length):
        chance = np.random.default_rng(first)
        self.digits = chance.integers(0, 10, (count, length))

    def __len__(self):
        return len(self.digits)

    def inputs(self, samples, epochs):
        ids = torch.from_numpy(self.digits[samples])
        return {"ids": ids, "mask": torch.ones_like(ids), "types": torch.zeros_like(ids)}

    def targets(self, samples):
        return torch.from_numpy((self.digits[samples].sum(1) > 4.5 * self.digits.shape[1]).astype(np.int64))


@dataclass(frozen=True)
class LargeSums(Task):
    """The fields are its settings: `--data.options count=500`."""

    count: int = 2000
    form = TaskForm(family="bert", head="classes", targets="rows", samples="rows")

    def problems(self, run, *, elsewhere):
        if run.model.vocab >= 10:
            return []
        return [DataError("is less than ten digits need", where="model.vocab", value=run.model.vocab,
                          remedy="Set --model.vocab 10.")]

    def prepare(self, run, progress):
        length = run.model.sequence
        return Prepared(train=Digits(0, self.count, length), eval=Digits(1, 200, length), weight=1.0, num_classes=2,
                        class_names=("small", "large"), scoring=Accuracy, fingerprint=f"digits {self.count} {length}",
                        about=f"{self.count} rows of {length} digits", transform=f"{length} digits")


def recipe():
    """Two stages."""
    return {"mesh": {"pipe": 2}, "batch": {"global_size": 32, "microbatch_size": 8},
            "model": {"num_layers": 2, "hidden": 32, "heads": 2, "vocab": 10, "sequence": 8},
            "data": {"task": "examples.own_task:LargeSums", "options": ["count=1000"]},
            "train": {"epochs": 3, "learning_rate": 3e-3}}
