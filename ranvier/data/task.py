"""The protocols of a task: a run's data, as numbered samples, and how its outputs are judged.

    settings --Task.prepare--> Prepared --Dataset--> inputs and targets of samples --> the loader, the loop, the cache
                                        --Scoring--> the scores of an evaluation

The loader, the loop and the cache use nothing else of a task, whether it ships with Ranvier (`ranvier.data.lm`,
`classification`, `qa`, `images`) or is a user's (`--data.task module:function`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
from torch import Tensor

from ranvier.block import State
from ranvier.config.run import Run
from ranvier.config.task_form import TaskForm
from ranvier.data.cache import Progress
from ranvier.errors import DataError, RanvierError

Targets = Tensor | dict[str, Tensor]
"""Targets of a loss: one tensor or several by name, with the samples in dim 0."""


class AnyTokenizer(Protocol):
    """A tokenizer, of any kind: stored in the run's folder, and compared by its fingerprint."""

    vocab: int
    """Token numbers are below this."""
    fingerprint: str
    """Equal if tokenizers give equal numbers."""

    def text(self) -> str:
        """Its tokenizer.json."""


@runtime_checkable
class TokenizerWithFiles(AnyTokenizer, Protocol):
    """A tokenizer with several files, such as one with a chat template."""

    def files_beside(self) -> Mapping[str, str]:
        """Name -> text of the files that belong next to its tokenizer.json."""


class Dataset(Protocol):
    """Samples by number, from 0; every rank has the same. Samples may be read in any order and by any thread."""

    def __len__(self) -> int:
        """Number of samples."""

    def inputs(self, samples: np.ndarray, epochs: np.ndarray) -> State:
        """The first block's inputs of these samples, on the CPU: tensors [len(samples), ...], of one shape for all of a
        run (`VariableLengthDataset` for others).

        samples: [n] int64. epochs: [n] int64, of each sample, counted from 0, for augmentation keyed by it.
        """

    def targets(self, samples: np.ndarray) -> Targets:
        """The targets that the loss takes, on the CPU: int64 tensors [len(samples), ...];
        `ranvier.tensor.split.loss.IGNORED` where there is no target."""


class VariableLengthDataset(Dataset, Protocol):
    """Samples of different lengths: a microbatch is padded to its longest sample (`--data.padding longest`)."""

    sample_lengths: np.ndarray
    """[len(self)] int64: positions of each sample, from 1 to the model's number of positions."""

    def inputs(self, samples: np.ndarray, epochs: np.ndarray, length: int | None = None) -> State:
        """Inputs as of `Dataset.inputs`, with `length` positions in dim 1 of each tensor; None is the model's maximum.
        The result at a sample's own positions must not depend on how many positions follow."""

    def targets(self, samples: np.ndarray, length: int | None = None) -> Targets:
        """Targets as of `Dataset.targets`; those of positions are `IGNORED` from the sample's length on."""


def sample_lengths(data: Dataset) -> np.ndarray | None:
    """[len(data)] int64, the positions of each sample; None if all samples have the same length."""
    lengths: np.ndarray | None = getattr(data, "sample_lengths", None)
    return lengths


def padded_inputs(data: Dataset, samples: np.ndarray, epochs: np.ndarray, length: int | None) -> State:
    """Inputs of `length` positions. None: the dataset's own number."""
    if length is None:
        return data.inputs(samples, epochs)
    return cast(VariableLengthDataset, data).inputs(samples, epochs, length)


def padded_targets(data: Dataset, samples: np.ndarray, length: int | None) -> Targets:
    """Targets for `padded_inputs` of the same length."""
    return data.targets(samples) if length is None else cast(VariableLengthDataset, data).targets(samples, length)


class Scoring(Protocol):
    """The scores of one evaluation: every rank of the last stage adds its outputs, and rank 0 computes the total."""

    def add(self, output: State, targets: Any, samples: Tensor) -> None:
        """Add the outputs of one microbatch, on any device. targets: the task's `Targets`; rows without a target are
        padding and do not count. samples: [b] int64."""

    def part(self) -> object:
        """This rank's part of the score, for JSON."""

    def total(self, parts: Sequence[Any]) -> dict[str, float]:
        """The scores of all ranks' parts together: "eval_accuracy", "eval_count" (samples), and the task's other
        metrics."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """A part of a mixture: `count` consecutive samples from number `first` on, of which an epoch takes `taken`. Over
    several epochs, each sample is taken once before any is taken again."""

    first: int
    count: int
    taken: int


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """A named evaluation set. fingerprint, scoring: as of `Prepared`."""

    data: Dataset
    scoring: Callable[[], Scoring] | None
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The data of a run."""

    train: Dataset
    eval: Dataset
    fingerprint: str
    """Equal if all of the data are equal, wherever the files are. Ranks and resumed runs compare it."""
    about: str
    """The data in words, for the heading of a run."""
    padding: str = ""
    """The share of padding in words (`ranvier.data.padding`); empty if nothing is padded."""
    warnings: tuple[RanvierError, ...] = ()
    """Warnings about data that is used differently than the user probably intends; every run and `check` print them."""
    weight: float
    """Targets of one sample, over which the loss is averaged: 1, or the tokens of a sequence."""
    tokenizer: AnyTokenizer | None = None
    first_tokens: Sequence[int] = ()
    """The first held-out tokens, from which a sample of text takes its prompt, if the task writes one."""
    num_classes: int | None = None
    """Number of classes, if the task has classes."""
    class_names: tuple[str, ...] = ()
    """Names of the classes, by number."""
    transform: str = ""
    """Fingerprint of the transform from samples to inputs."""
    repeats: bool = True
    """Whether a sample has the same inputs in every epoch."""
    shares: tuple[Share, ...] = ()
    """Number of samples of each part of a mixture in an epoch. Empty: every sample once."""
    scoring: Callable[[], Scoring] | None = None
    """Makes the scoring of one evaluation over all held-out samples. None: evaluations give the loss of
    `train.eval_sequences` samples."""
    eval_sets: Mapping[str, EvalSet] = field(default_factory=dict)
    """Further evaluation sets by name (`data.eval_sets`); `ranvier.data.prepare` adds them."""

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch."""
        return sum(share.taken for share in self.shares) or len(self.train)


class Task(Protocol):
    """Turns the settings of a run into its data. Subclass it to inherit `problems` and `warnings`, which return
    none."""

    form: TaskForm
    """The model that it needs, and the unit that it counts."""

    def problems(self, run: Run, *, elsewhere: bool) -> Sequence[RanvierError]:
        """All problems of the data settings that can be found without reading much.

        elsewhere: the run is checked for another machine, which may have files that are missing here.
        """
        return []

    def warnings(self, run: Run) -> Sequence[RanvierError]:
        """Warnings about settings that work, but probably not as the user means."""
        return []

    def prepare(self, run: Run, progress: Progress) -> Prepared:
        """The samples of the run, made unless they are in the cache (`ranvier.data.cache.cache_folder`).

        Called by all ranks at the same time; ranks that share a cache let one of them write
        (`ranvier.data.cache.one_writer`). progress: takes lines about the progress. DataError when something is
        missing, damaged or too small.
        """


# --- named evaluation sets --------------------------------------------------------------------------------------------

# Named evaluation sets: further held-out data of a run, each evaluated on its own.


_AnyRun = TypeVar("_AnyRun", bound=Run)
_NAME = re.compile(r"[A-Za-z]\w*")


def eval_set_runs(run: _AnyRun) -> dict[str, _AnyRun]:
    """Name -> the run with this set as its only held-out data. DataError for an entry that is not NAME=DATA, or a
    duplicate name."""
    found: dict[str, _AnyRun] = {}
    for entry in run.data.eval_sets:
        name, _, source = entry.partition("=")
        if not _NAME.fullmatch(name) or not source or name in found:
            raise DataError("is not NAME=DATA with a different name for each", code="malformed-eval-set",
                            where="data.eval-sets", value=entry,
                            remedy="Give for example wiki=wiki.jsonl,code=code.jsonl; names have letters, digits and "
                                   "underscores.")
        found[name] = replace(run, data=replace(run.data, eval=source, eval_sets=()))
    return found


def metric_name(name: str, metric: str) -> str:
    """Name of a metric of a named set: eval_NAME_loss for eval_loss. The set of the run itself has no name."""
    return metric if not name else f"eval_{name}_{metric.removeprefix('eval_')}"
