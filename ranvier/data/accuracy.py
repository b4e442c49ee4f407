"""Accuracy of a classifier: the share of samples whose class it finds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ranvier.block import State
from ranvier.tensor.split.loss import IGNORED, last_logits


class Accuracy:
    """The share of samples whose class has the largest logit. Counts stay on the device until `part`."""

    def __init__(self) -> None:
        self._right: list[Tensor] = []
        self._count: list[Tensor] = []

    def add(self, output: State, targets: Tensor | dict[str, Tensor], samples: Tensor) -> None:
        """output: [b, classes], or a dict of this one tensor; targets: [b]. Or [b, S, classes] with the targets of
        `LastTokenLoss`."""
        logits = output if isinstance(output, Tensor) else next(iter(output.values()))
        if isinstance(targets, dict):
            logits, targets = last_logits(logits, targets)[0], targets["class"]
        self._right.append((logits.argmax(-1) == targets).sum())
        self._count.append((targets != IGNORED).sum())

    def part(self) -> dict[str, int]:
        """Samples whose class was found, and samples with a class, that this rank has seen."""
        return {"right": sum(int(right) for right in self._right), "count": sum(int(count) for count in self._count)}

    def total(self, parts: Sequence[dict[str, int]]) -> dict[str, float]:
        """"eval_accuracy" over all ranks' samples (NaN without any) and "eval_count"."""
        right, count = (sum(part[name] for part in parts) for name in ("right", "count"))
        return {"eval_accuracy": right / count if count else math.nan, "eval_count": count}
