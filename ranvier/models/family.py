"""The protocol of a model family: what a run needs from an architecture, whether Ranvier ships it or a user wrote it.

A family is a stateless object. All its results follow from the settings in the section [model] and from the task's
head, so `check`, `plan`, `simulate` and every rank of a run get the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranvier.block import Initial, Model, State, alike_by_kind
from ranvier.config.run import Transformer
from ranvier.errors import ConfigError, ModelError, RanvierError, counted
from ranvier.tensor import layers as tensor

Targets = Tensor | dict[str, Tensor]
FAMILY_ATTRIBUTES = ("problems()", "model()", "sample()", "flops_per_sample()", "describe()")
"""Attributes that an object must have to be a family."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """text: the architecture and its sizes, for the heading of a run. tokens: positions of one sample that the blocks
    compute, such as the tokens of a sequence or the patches of an image; throughput is counted in them."""

    text: str
    tokens: int


class ModelFamily(Protocol):
    """A model architecture that a run can train. Subclass it to inherit a `problems` that finds none.

    settings: the section [model]. A family uses the sizes in it that it supports, and takes others as keyword arguments
    of the function that makes it (`model.options`). head: kind of the last block's output, from the task
    (`ranvier.config.task_form.TaskForm`).
    """

    def problems(self, settings: Transformer, head: str) -> Sequence[RanvierError]:
        """All problems of `settings` for this family, such as sizes that do not divide each other or a head that it
        lacks, in one list and without building anything."""
        return []

    def model(self, settings: Transformer, head: str, *, dtype: torch.dtype) -> Model:
        """The blocks, loss, tied parameters and initial values.

        Builders of blocks honour `torch.device(...)` contexts, "meta" included. `Model.layers` has
        `settings.num_layers` layers, or none, in which case layers cannot be frozen. Called with settings without
        `problems`; `check` also calls it with others, to count the blocks: do in the builders whatever may fail.
        """

    def sample(self, settings: Transformer, head: str, count: int) -> tuple[State, Targets]:
        """Inputs and targets of `count` samples, in the shapes and dtypes of the task; values may be anything, such as
        zeros. Honours `torch.device(...)` contexts."""

    def flops_per_sample(self, settings: Transformer, *, recomputed: bool = False) -> float:
        """FLOPs of training on one sample, forward and backward: about 6 for each weight and position. recomputed: with
        every layer's forward computed twice. Used for utilisation and plans; training results do not depend on it."""

    def describe(self, settings: Transformer) -> ModelFacts:
        """The architecture in words, and the positions of a sample."""


def wrong_head(family: str, head: str, heads: Sequence[str]) -> list[RanvierError]:
    """A problem if a family lacks the head of the run's task, otherwise none."""
    if head in heads:
        return []
    return [ConfigError(f"has no head {head!r}, which the task needs", code="family-without-head", where="model.family",
                        value=family,
                        remedy=f"Choose a `--data.task` with the head {' or '.join(map(repr, heads))}, or another "
                               "family.")]


def heads_problem(settings: Transformer, other: str = "") -> list[ConfigError]:
    """A problem if the heads do not divide the width. other: an alternative, appended to the remedy."""
    if settings.hidden % settings.heads == 0:
        return []
    near = next(heads for heads in range(min(settings.heads, settings.hidden), 0, -1) if settings.hidden % heads == 0)
    return [ConfigError(f"does not divide `model.hidden` {settings.hidden}", code="heads-do-not-divide-hidden",
                        where="model.heads", value=settings.heads, remedy=f"Set `--model.heads {near}`{other}.")]


def build_blocks(family: ModelFamily, config: Transformer, head: str, *, dtype: torch.dtype = torch.float32) -> Model:
    """The blocks of a model of a family. Builders honour `torch.device(...)` contexts, "meta" included. RanvierError
    for settings with problems."""
    for problem in family.problems(config, head):
        raise problem
    return family.model(config, head, dtype=dtype)


def decoder_initial(config: Transformer, name: str) -> Initial:
    """GPT-2's initialization of a parameter: projections into the residual stream are smaller by sqrt(2 num_layers)."""
    if name.endswith((".attention.projection.weight", ".mlp.fc2.weight")):
        return Initial("normal", 0.02 / (2 * config.num_layers) ** 0.5)
    return initial(config, name)


def initial(config: Transformer, name: str) -> Initial:
    """BERT's and ViT's initialization of one parameter."""
    if name.endswith(".bias"):
        return Initial("constant", 0.0)
    return Initial("constant", 1.0) if name.endswith(".norm.weight") else Initial("normal", 0.02)


class FusedAttention(nn.Module):
    """The layers of attention whose `qkv` has the rows of one head's query, key and value together (N, 3, D), so that a
    range of heads is one slice. norm: the norm before; None if it comes after. parts: of `qkv`, for adapters."""

    def __init__(self, config: Transformer, dtype: torch.dtype, norm: nn.Module | None, parts: tuple[str, ...] = ()
                 ) -> None:
        super().__init__()
        self.head_dim = config.hidden // config.heads
        if norm is not None:
            self.norm = norm
        self.qkv = tensor.Linear(config.hidden, 3 * config.hidden, stationary="output", units=config.heads, parts=parts,
                                 dtype=dtype)
        self.projection = tensor.Linear(config.hidden, config.hidden, stationary="input", units=config.heads,
                                        dtype=dtype)
        self.dropout = tensor.Dropout(config.dropout)

    def heads(self, qkv_BSF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [B, N, S, D] each, of the heads on this column."""
        q_BSND, k_BSND, v_BSND = qkv_BSF.unflatten(-1, (-1, 3, self.head_dim)).unbind(3)
        return q_BSND.transpose(1, 2), k_BSND.transpose(1, 2), v_BSND.transpose(1, 2)

    def attend(self, qkv_BSF: Tensor, mask_BS: Tensor | None = None) -> Tensor:
        """Attention of every token to all tokens, or to those of the mask, within the heads on this column."""
        mask_B11S = None if mask_BS is None else mask_BS[:, None, None]
        y_BNSD = functional.scaled_dot_product_attention(*self.heads(qkv_BSF), attn_mask=mask_B11S)
        return y_BNSD.transpose(1, 2).flatten(2)


class TwoLayerMLP(nn.Module):
    """The layers of a perceptron with this inner width. norm: as in `FusedAttention`."""

    def __init__(self, config: Transformer, dtype: torch.dtype, norm: nn.Module | None, width: int) -> None:
        super().__init__()
        if norm is not None:
            self.norm = norm
        self.fc1 = tensor.Linear(config.hidden, width, stationary="output", dtype=dtype)
        self.fc2 = tensor.Linear(width, config.hidden, stationary="input", reuse_input=True, dtype=dtype)
        self.dropout = tensor.Dropout(config.dropout)


def check_length(length: int, longest: int) -> None:
    """Raise a ModelError for inputs that are longer than a model's position embeddings allow."""
    if length > longest:
        raise ModelError("is longer than the number of positions of the model", code="sequence-beyond-positions",
                         where="sequence of the inputs", value=length,
                         remedy=f"Pass at most {longest} tokens, or set `--model.sequence {length}`.")


def inner_width(config: Transformer) -> int:
    """Features between the two linear layers of an MLP."""
    return config.intermediate or 4 * config.hidden


def stack_layers(config: Transformer, dtype: torch.dtype, embedding: type[nn.Module], attention: type[nn.Module],
                 mlp: type[nn.Module], head: Callable[..., nn.Module], *, loss: nn.Module,
                 initial: Callable[[Transformer, str], Initial], tied: tuple[tuple[str, ...], ...] = (),
                 variant: Callable[[int], tuple[object, ...]] = lambda layer: ()) -> Model:
    """A model of layers of these kinds of blocks. variant: further arguments of a layer's attention, by its number;
    layers with equal arguments are identical."""
    kinds: dict[str, tuple[Any, ...]] = {"embedding": (embedding,)}
    layers = tuple((f"layer{number}.attention", f"layer{number}.mlp") for number in range(config.num_layers))
    for number, names in enumerate(layers):
        kinds |= zip(names, ((attention, *variant(number)), (mlp,)), strict=True)
    kinds["head"] = (head,)
    return Model(blocks={name: partial(kind, config, dtype, *more) for name, (kind, *more) in kinds.items()}, loss=loss,
                 layers=layers, initial=partial(initial, config), alike=alike_by_kind(kinds), tied=tied)


def transformer_in_words(family: str, settings: Transformer) -> str:
    """The sizes that all transformers have."""
    return (f"{family}, {counted(settings.num_layers, 'layer')}, hidden {settings.hidden}, "
            f"{counted(settings.heads, 'head')}")


def text_transformer_in_words(family: str, settings: Transformer) -> str:
    """The sizes of a transformer that reads tokens."""
    return f"{transformer_in_words(family, settings)}, vocabulary {settings.vocab}, sequence {settings.sequence}"


def num_classes(config: Transformer) -> int:
    """Number of classes of the head; 2 if the data has not been read."""
    return 2 if config.num_classes == "auto" else config.num_classes
