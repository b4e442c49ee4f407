"""Which architecture a run trains, and what everybody else asks of one: its blocks, faults, FLOPs, shapes of samples.

Each family is one file with the same five functions; a run's task says which head it has.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from ranvier.errors import ConfigError
from ranvier.models.block import Model, State
from ranvier.run import Run

Head = Literal["tokens", "classes", "span"]
"""What the last block gives: logits of the next token, of a sample's class, or of an answer's first and last token."""

_FAMILIES = {"lm": "gpt", "classification": "bert", "qa": "bert", "images": "vit"}
_HEADS: dict[str, Head] = {"lm": "tokens", "classification": "classes", "qa": "span", "images": "classes"}


def family_of(run: Run) -> str:
    """gpt, bert or vit."""
    return _FAMILIES[run.data.task] if run.model.family == "auto" else run.model.family


def head_of(task: str) -> Head:
    """What a model gives that learns `task`."""
    return _HEADS[task]


def module_of(family: str) -> ModuleType:
    """A family's file."""
    return import_module(f"ranvier.models.{family}")


def _module(run: Run) -> ModuleType:
    return module_of(family_of(run))


def model_of(run: Run, *, dtype: torch.dtype = torch.float32) -> Model:
    """The blocks of the run's model, its loss and its start; ConfigError for one that cannot be."""
    for problem in problems(run):
        raise problem
    return _module(run).model(run.model, head_of(run.data.task), dtype=dtype)


def problems(run: Run) -> list[ConfigError]:
    """Everything in the model's settings that cannot be."""
    family, needed = family_of(run), _FAMILIES[run.data.task]
    if family != needed:
        return [ConfigError(f"does not do the task {run.data.task}, which {needed} does", where="model.family",
                            value=family, remedy="Set --model.family auto, or another --data.task.")]
    return _module(run).problems(run.model)


def tokens_of(run: Run) -> int:
    """Positions of one sample: of an image its patches and what is put before them."""
    return _module(run).num_tokens(run.model) if family_of(run) == "vit" else run.model.sequence


def flops_per_sample(run: Run, *, recomputed: bool = False) -> float:
    """FLOPs of training on one sample, forward and backward."""
    return _module(run).flops_per_sequence(run.model, recomputed=recomputed)


def text(run: Run) -> str:
    """The model in words."""
    model = run.model
    sizes = [f"{family_of(run)}, {model.num_layers} layers, hidden {model.hidden}, {model.heads} heads"]
    if family_of(run) == "vit":
        sizes.append(f"images of {model.image_size} in patches of {model.patch_size}")
    else:
        sizes.append(f"vocabulary {model.vocab}, sequence {model.sequence}")
    return ", ".join(sizes)


def num_blocks(run: Run) -> int:
    """Embedding, two for each layer, head."""
    return 2 * run.model.num_layers + 2


def sample_of(run: Run, count: int) -> tuple[State, Tensor | dict[str, Tensor]]:
    """Inputs and targets of `count` samples; zeros, where a device context says."""
    return _module(run).sample(run.model, head_of(run.data.task), count)
