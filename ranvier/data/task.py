"""What a run learns from, whatever it is: samples by number, and how outputs are judged.

A task (ranvier.data.lm, classification, qa, images) turns a run's settings into a `Prepared`; the loader, the loop and
the cache know nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from ranvier.models.block import State

Targets = Tensor | dict[str, Tensor]


class AnyTokenizer(Protocol):
    """Whatever turns text into token numbers: for the run's folder and for what depends on it."""

    vocab: int
    fingerprint: str

    def text(self) -> str:
        """Its tokenizer.json."""


class Dataset(Protocol):
    """Samples by number, from 0; every rank has the same. Any sample may be asked for, in any order, by any thread."""

    def __len__(self) -> int: ...

    def inputs(self, samples: np.ndarray, epochs: np.ndarray) -> State:
        """What enters the first block, on the CPU: tensors whose first dim is `samples`, of one shape for all of a run.
        epochs: of each sample, counted from 0, for augmentation keyed by it."""

    def targets(self, samples: np.ndarray) -> Targets:
        """What the loss takes, on the CPU: int64 tensors whose first dim is `samples`; `ranvier.tensor.loss.IGNORED`
        where there is no target."""


class Scoring(Protocol):
    """How good outputs are, in one evaluation: every rank of the last stage adds what it sees, rank 0 sums up."""

    def add(self, output: State, targets: Targets, samples: Tensor) -> None:
        """Outputs of one microbatch, on any device. Rows without a target are padding and do not count."""

    def part(self) -> object:
        """What this rank has seen, as JSON can hold it."""

    def total(self, parts: Sequence[object]) -> dict[str, float]:
        """All ranks' parts together: "eval_accuracy", "eval_count" (samples), and what else the task is judged by."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The data of a run.

    about: in words, for the heading of a run. weight: of one sample in the loss (its targets). num_classes: what a head
    tells apart, where the task has classes; class_names: what these are called, by number. transform: fingerprint of
    what makes inputs of a sample; repeats: whether a sample has the same inputs in every epoch. fingerprint: equal
    where all of this is, wherever the files lie.
    """

    train: Dataset
    eval: Dataset
    fingerprint: str
    about: str
    weight: float
    tokenizer: AnyTokenizer | None = None
    num_classes: int | None = None
    class_names: tuple[str, ...] = ()
    transform: str = ""
    repeats: bool = True
    scoring: Callable[[], Scoring] | None = None
