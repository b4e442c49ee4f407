"""Conformance test of your own task, in seconds.

    check_task(MyTask(), run, output=lambda targets: torch.randn(len(targets), 2))
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ranvier.block import State
from ranvier.config.named_object import missing_attribute
from ranvier.config.run import Run
from ranvier.config.task_form import TASK_ATTRIBUTES, TaskForm
from ranvier.data.task import Dataset, Prepared, Targets, Task, padded_inputs, padded_targets, sample_lengths
from ranvier.errors import RanvierError
from ranvier.tensor.split.loss import IGNORED

_LOOKED_AT = 8


def check_task(task: Task, run: Run, output: Callable[[Targets], State] | None = None) -> Prepared:
    """Prepare the data of `run`, which should be small, and check its samples and scores. Returns the data.

    output: makes random outputs of the model for targets, so that the scoring is tested too. AssertionError, with the
    method at fault, if the task lacks a method, or gives samples that depend on the order or on other samples, tensors
    of wrong shapes, or scores that depend on how samples are divided among ranks.
    """
    missing = missing_attribute(task, TASK_ATTRIBUTES)
    assert missing is None, f"{type(task).__name__} has no {missing}"
    assert isinstance(task.form, TaskForm), f"form: is a {type(task.form).__name__}, and no TaskForm"
    for elsewhere in (False, True):
        found = list(task.problems(run, elsewhere=elsewhere))
        assert not found, f"problems: these settings should have none, and have: {found[0]}"
    assert all(isinstance(warning, RanvierError) for warning in task.warnings(run)), "warnings: must be RanvierErrors"
    data, again = (task.prepare(run, lambda line: None) for _ in range(2))
    assert isinstance(data, Prepared), f"prepare: returns a {type(data).__name__}, and no Prepared"
    assert data.fingerprint == again.fingerprint, "prepare: another fingerprint when it is called again"
    assert data.weight > 0 and data.about, "prepare: weight must be positive, and about say what the data is"
    assert len(data.class_names) in (0, data.num_classes), "prepare: class_names must be as many as num_classes"
    for name in ("train", "eval"):
        _check_samples(name, getattr(data, name), getattr(again, name), data.repeats or name == "eval")
    if data.scoring is not None and output is not None:
        _check_scoring(data, output)
    return data


def _check_samples(name: str, data: Dataset, again: Dataset, repeats: bool) -> None:
    total = len(data)
    assert total > 0, f"{name}: has no samples"
    assert len(again) == total, f"{name}: has another number of samples when it is prepared again"
    numbers = np.unique(np.linspace(0, total - 1, _LOOKED_AT, dtype=np.int64))
    whole = _take_samples(data, numbers)
    for leaf in tree_leaves(whole):
        assert isinstance(leaf, Tensor) and leaf.device.type == "cpu", f"{name}: gives something else than CPU tensors"
        assert leaf.ndim and leaf.shape[0] == len(numbers), (
            f"{name}: a tensor of shape {tuple(leaf.shape)} for {len(numbers)} samples")
    assert all(leaf.dtype == torch.int64 for leaf in tree_leaves(whole[1])), f"{name}: targets must be int64"
    order = np.arange(len(numbers))[::-1].copy()
    others = {"in another order": _take_samples(data, numbers[order]),
              "prepared again": _take_samples(again, numbers[order])}
    for text, other in others.items():
        for first, second in zip(tree_leaves(whole), tree_leaves(other), strict=True):
            assert torch.equal(first, second[order]), f"{name}: samples are others {text}"
    for place, number in enumerate(numbers):
        for first, second in zip(tree_leaves(whole), tree_leaves(_take_samples(data, numbers[place:place + 1])),
                                 strict=True):
            assert torch.equal(first[place:place + 1], second), f"{name}: sample {number} is another one alone"
    _check_lengths(name, data, numbers)
    if repeats:
        for first, second in zip(tree_leaves(whole), tree_leaves(_take_samples(data, numbers, epoch=3)), strict=True):
            assert torch.equal(first, second), f"{name}: samples differ between epochs, and Prepared.repeats is true"


def _check_lengths(name: str, data: Dataset, numbers: np.ndarray) -> None:
    """Check that samples of different lengths are the same with less padding."""
    lengths = sample_lengths(data)
    if lengths is None:
        return
    assert lengths.shape == (len(data),) and lengths.min() > 0, f"{name}: sample_lengths must be positive, one a sample"
    length, epochs = int(lengths[numbers].max()), np.zeros_like(numbers)
    whole = tree_leaves(_take_samples(data, numbers))
    padded = tree_leaves((padded_inputs(data, numbers, epochs, length), padded_targets(data, numbers, length)))
    for first, second in zip(whole, padded, strict=True):
        cut = first[:, :length] if first.ndim > 1 else first
        assert torch.equal(cut, second), f"{name}: samples are others when they are padded to {length} positions"


def _take_samples(data: Dataset, numbers: np.ndarray, epoch: int = 0) -> tuple[State, Targets]:
    return data.inputs(numbers, np.full_like(numbers, epoch)), data.targets(numbers)


def _check_scoring(data: Prepared, output: Callable[[Targets], State]) -> None:
    """Check that one rank with all samples gives the same scores as two ranks that share them, with or without
    padding."""
    assert data.scoring is not None
    numbers = np.arange(min(len(data.eval), 2 * _LOOKED_AT))
    targets, samples = data.eval.targets(numbers), torch.from_numpy(numbers)
    outputs = output(targets)
    alone = data.scoring()
    alone.add(outputs, targets, samples)
    parts = []
    for half in (slice(0, _LOOKED_AT), slice(_LOOKED_AT, None)):
        one = data.scoring()
        one.add(*tree_map(lambda leaf, half=half: leaf[half], (outputs, targets, samples)))
        padding = tree_map(lambda leaf: torch.full_like(leaf[:1], IGNORED), targets)
        one.add(tree_map(lambda leaf: leaf[:1], outputs), padding, samples[:1])
        parts.append(json.loads(json.dumps(one.part())))
    scores, shared = (data.scoring().total(found) for found in ([json.loads(json.dumps(alone.part()))], parts))
    assert set(scores) == set(shared) and all(abs(scores[name] - shared[name]) < 1e-9 for name in scores), (
        f"scoring: one rank gives {scores}, and two ranks with padding {shared}")
    assert "eval_count" in scores, "scoring: total must say eval_count, the number of samples"
