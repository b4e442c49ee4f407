"""How many layers are frozen: policies behind one small interface, and what their answers must satisfy.

PipeTransformer (He et al., 2021, section 3.1) freezes a growing prefix of a model's layers while it is fine-tuned. At
evaluation T, with L layers of which L_f are frozen, and layers numbered from 0:

    L_f(T) = min(L_f + alpha (L - L_f), argmin over l in L_f .. L - 1 of norm_l)       layers 0 .. L_f(T) - 1 are frozen

A depth never falls and never exceeds L; `decide` holds every policy to that, a user's own too. Layers are transformer
layers; freezing layer 0 freezes what comes before it (the embedding), and the head is never frozen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, expm1, inf, isfinite, log1p
from typing import Protocol, runtime_checkable

from ranvier.errors import ConfigError, ModelError
from ranvier.layout import Parameter, frozen_blocks

_SPURIOUS = 1e-9
"""What a product of floats may be above the integer that it stands for."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a policy decides on, at one evaluation."""

    step: int
    """Optimizer steps done."""
    evaluation: int
    """T: evaluations of the policy in this run with this one, so the first is 1."""
    frozen: int
    """Layers that are frozen now: those numbered below it."""
    num_layers: int
    """Transformer layers, without embedding and head."""
    gradient_norms: tuple[float, ...]
    """L2 norm of each layer's gradient, averaged over the replicas; 0.0 for frozen layers."""

    def __post_init__(self) -> None:
        assert 0 <= self.frozen <= self.num_layers == len(self.gradient_norms) and self.evaluation >= 1


@runtime_checkable
class Remembers(Protocol):
    """A policy that knows something from one evaluation to the next: it goes into checkpoints, and comes back from
    them, where the policy has these two beside `frozen_layers`. What they exchange is JSON-serialisable."""

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state: dict[str, object]) -> None: ...


class FreezePolicy(Protocol):
    """Answers how many layers shall be frozen. It is asked on one rank, which tells the others."""

    def frozen_layers(self, facts: Facts) -> int:
        """The number of layers to freeze from now on, between `facts.frozen` and `facts.num_layers`."""


@dataclass(frozen=True)
class NoFreezing:
    """Every layer goes on training; what is frozen already stays."""

    def frozen_layers(self, facts: Facts) -> int:
        return facts.frozen


@dataclass(frozen=True)
class GradientNorm:
    """The paper's rule, at most `alpha` of the active layers at a time.

    The argmin is the layer whose gradient is smallest, the first of them in a tie, and that layer itself stays active:
    those below it are frozen. So nothing is frozen while the lowest active layer has the smallest gradient, and the
    last layer is never frozen. The paper's formula says so when layers are numbered from 0. Numbered from 1 it would
    range over the last frozen layer too, whose norm is 0, and never freeze anything.

    The first term is rounded up, so that it is at least one layer while there are active ones (rounded down the rule
    would stop for good at 1 / alpha layers). A norm that is no finite number counts as infinitely large.
    """

    alpha: float

    def frozen_layers(self, facts: Facts) -> int:
        active = range(facts.frozen, facts.num_layers)
        if not active:
            return facts.frozen
        norms = [norm if isfinite(norm) else inf for norm in facts.gradient_norms]
        most = facts.frozen + ceil(self.alpha * len(active) - _SPURIOUS)
        return min(most, min(active, key=lambda layer: norms[layer]))


@dataclass(frozen=True)
class Cap:
    """The cap of the paper's rule alone, whatever the gradients are: ceil(L (1 - (1 - alpha)^T)).

    Once T is large enough that is L: then only the head trains. (The paper's released code freezes by the cap alone,
    once an epoch.)
    """

    alpha: float

    def frozen_layers(self, facts: Facts) -> int:
        share = -expm1(facts.evaluation * log1p(-self.alpha))
        return max(facts.frozen, ceil(facts.num_layers * share - _SPURIOUS))


@dataclass(frozen=True)
class Manual:
    """Depths at given steps: `depths` has (step, layers) in rising order, each from that step on."""

    depths: tuple[tuple[int, int], ...]

    def frozen_layers(self, facts: Facts) -> int:
        return max([facts.frozen, *(layers for step, layers in self.depths if step <= facts.step)])


def decide(policy: FreezePolicy, facts: Facts) -> int:
    """The policy's answer, if it is one: ConfigError unless it is an int in `facts.frozen` .. `facts.num_layers`."""
    answer = policy.frozen_layers(facts)
    if isinstance(answer, int) and not isinstance(answer, bool) and facts.frozen <= answer <= facts.num_layers:
        return answer
    raise ConfigError(f"must be a whole number of layers from {facts.frozen}, which are frozen already, to the model's "
                      f"{facts.num_layers}", where=f"answer of the freeze policy {type(policy).__name__} at step "
                      f"{facts.step}", value="None" if answer is None else answer,
                      remedy="Let frozen_layers return an int between facts.frozen and facts.num_layers.")


# ---------------------------------------------------------------------- from the configuration

class Settings(Protocol):
    """What is read here of the configuration's section `elastic`."""

    @property
    def freeze(self) -> str: ...

    @property
    def alpha(self) -> float: ...

    @property
    def manual(self) -> tuple[str, ...]: ...


def policy_of(elastic: Settings) -> FreezePolicy:
    """The policy that `elastic.freeze` names. ConfigError for manual entries that cannot be read."""
    match elastic.freeze:
        case "none":
            return NoFreezing()
        case "gradient-norm":
            return GradientNorm(elastic.alpha)
        case "cap":
            return Cap(elastic.alpha)
        case "manual":
            return Manual(tuple(manual_depth(text) for text in elastic.manual))
    raise ConfigError("is not a freeze policy", where="elastic.freeze", value=elastic.freeze,
                      remedy="Choose one of none, gradient-norm, cap, manual.")


def manual_depth(text: str) -> tuple[int, int]:
    """(step, layers) of a text STEP:LAYERS. ConfigError when it is none."""
    found = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
    if found is None:
        raise ConfigError("is not of the form STEP:LAYERS", where="elastic.manual", value=text,
                          remedy="Give entries such as 100:4, which freezes the first 4 layers after step 100.")
    return int(found[1]), int(found[2])


def problems(elastic: Settings, num_layers: int) -> Iterator[ConfigError]:
    """What is wrong with the freezing that is asked for, for a model of so many layers."""
    if elastic.freeze != "manual":
        if elastic.manual:
            yield ConfigError(f"is given, but elastic.freeze is {elastic.freeze}", where="elastic.manual",
                              value=elastic.manual, remedy="Set --elastic.freeze manual, or leave out the entries.")
        return
    if not elastic.manual:
        yield ConfigError("needs entries", where="elastic.freeze", value="manual",
                          remedy="Give --elastic.manual entries such as 100:4, which freezes the first 4 layers after "
                                 "step 100.")
    depths = []
    for text in elastic.manual:
        try:
            depths.append((text, *manual_depth(text)))
        except ConfigError as problem:
            yield problem
    for text, _, layers in depths:
        if layers > num_layers:
            yield ConfigError(f"freezes more than the model's {num_layers} layers", where="elastic.manual", value=text,
                              remedy=f"Freeze {num_layers} layers or fewer.")
    for (before, earlier, fewer), (text, step, layers) in pairwise(depths):
        if step <= earlier:
            yield ConfigError(f"is not later than the entry before it, {before}", where="elastic.manual", value=text,
                              remedy="Give the entries in the order of their steps, one for each step.")
        elif layers < fewer:
            yield ConfigError(f"has fewer layers than the entry before it, {before}, and frozen layers stay frozen",
                              where="elastic.manual", value=text, remedy="Let the number of layers rise.")


# ---------------------------------------------------------------------- layers and blocks

def tie_problem(parameters: Sequence[Parameter], layers: Sequence[Sequence[str]], blocks: Sequence[str],
                frozen: int) -> ModelError | None:
    """Why the first `frozen` layers cannot be frozen: a trainable parameter that is tied to one behind them.

    parameters: the layout's; layers, blocks: the names of the model's. None where nothing is in the way.
    """
    stop = frozen_blocks(layers, blocks, frozen)
    ends: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        ends.setdefault(parameter.owner, []).append(parameter)
    for group in ends.values():
        inside = [end.name for end in group if end.block < stop]
        outside = [end.name for end in group if end.block >= stop]
        if inside and outside and any(end.trainable for end in group):
            first = "the first layer" if frozen == 1 else f"the first {frozen} layers"
            return ModelError(f"would be frozen with {first}, and is tied to {outside[0]}, which goes on training",
                              where=f"parameter {inside[0]}",
                              remedy="Untie the two in the model, or freeze both with requires_grad=False.")
    return None
