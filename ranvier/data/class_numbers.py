"""Class numbers of a pretrained model, which data with the same classes uses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ranvier.block import State
from ranvier.config.run import Run
from ranvier.data.cache import Progress, cache_folder, fingerprint
from ranvier.data.offline.pretrained_models import folder_of
from ranvier.data.subset import Subset
from ranvier.data.task import Dataset, Prepared, Targets
from ranvier.system.untrusted_file import member, read_json
from ranvier.tensor.split.loss import IGNORED, last_logits

_CONFIG_BYTES = 16 << 20
_MOST_NAMED = 10
_CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification")


def labels_in(folder: Path) -> tuple[str, ...]:
    """The names of classes, by number, of a classifier in Hugging Face's format (id2label); empty if it has none."""
    try:
        document: Any = read_json(member(folder, "config.json"), _CONFIG_BYTES)
        names = document["id2label"]
        is_classifier = any(str(kind).endswith(_CLASSIFIERS) for kind in document["architectures"])
        return tuple(str(names[str(number)]) for number in range(len(names))) if is_classifier else ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()


def named_labels_in(folder: Path) -> tuple[str, ...]:
    """`labels_in`, but empty if the folder has only the names that transformers makes up."""
    found = labels_in(folder)
    return () if any(name == f"LABEL_{number}" for number, name in enumerate(found)) else found


def numbers_of(classes: Sequence[str], labels: Sequence[str], *, all_there: bool = True) -> list[int] | None:
    """The number of each of the data's classes among a model's labels: by its name, or, if the classes are the numbers
    of all labels (all_there) or of some of them, that number. None if the classes differ."""
    if set(classes) <= set(labels):
        return [labels.index(name) for name in classes]
    numbers = {str(number): number for number in range(len(labels))}
    return [numbers[name] for name in classes] if set(classes) <= numbers.keys() and (
        len(classes) == len(labels) or not all_there) else None


def with_labels(data: Prepared, labels: tuple[str, ...], *, all_there: bool = True) -> Prepared | None:
    """The data with the model's labels as its classes; None if its classes differ. all_there: see
    `numbers_of`."""
    numbers = numbers_of(data.class_names, labels, all_there=all_there)
    if numbers is None or data.class_names == labels:
        return None if numbers is None else data
    train, held = (Renumbered(part, numbers) for part in (data.train, data.eval))
    return replace(data, train=train, eval=held, num_classes=len(labels), class_names=labels,
                   fingerprint=fingerprint(data.fingerprint, *labels))


def with_labels_of_model(data: Prepared, run: Run, progress: Progress) -> Prepared:
    """`with_labels` of the model that training starts from, if it has the data's classes. If it has the same
    number of other classes, its head is used, and `progress` gets a note."""
    if run.model.pretrained is None:
        return data
    folder = folder_of(run.model.pretrained, cache_folder(run), progress)
    found = with_labels(data, labels_in(folder))
    if found is None and len(labels := named_labels_in(folder)) == len(data.class_names):
        progress(f"{folder} has other classes than the data: {', '.join(data.class_names[:_MOST_NAMED])} begin with "
                 f"the weights of {', '.join(labels[:_MOST_NAMED])}")
    return found or data


class Renumbered(Subset):
    """Samples with renumbered classes. numbers: the new number for each number that `whole` gives."""

    def __init__(self, whole: Dataset, numbers: Sequence[int]) -> None:
        super().__init__(whole, np.arange(len(whole)))
        self._numbers = torch.tensor(numbers)

    def targets(self, samples: np.ndarray, length: int | None = None) -> Targets:
        """Targets as of `Subset.targets`: a tensor of classes, or a dict with one."""
        found = super().targets(samples, length)
        return self._numbers[found] if isinstance(found, Tensor) else found | {"class": self._numbers[found["class"]]}


# --- accuracy ---------------------------------------------------------------------------------------------------------

# Accuracy of a classifier: the share of samples that it classifies correctly.


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
        """The numbers of this rank's samples that were classified correctly, and of its samples with a class."""
        return {"right": sum(int(right) for right in self._right), "count": sum(int(count) for count in self._count)}

    def total(self, parts: Sequence[dict[str, int]]) -> dict[str, float]:
        """"eval_accuracy" over all ranks' samples (NaN without any) and "eval_count"."""
        right, count = (sum(part[name] for part in parts) for name in ("right", "count"))
        return {"eval_accuracy": right / count if count else math.nan, "eval_count": count}
