"""How many layers are frozen: policies behind one small interface, and what their answers must satisfy.

PipeTransformer (He et al., 2021, section 3.1) freezes a growing prefix of a model's layers while it is fine-tuned. At
evaluation T, with L layers of which L_f are frozen, and layers numbered from 0:

    L_f(T) = min(L_f + alpha (L - L_f), argmin over l in L_f .. L - 1 of norm_l)       layers 0 .. L_f(T) - 1 are frozen

A depth never falls and never exceeds L; `decide` holds every policy to that, a user's own too. Layers are transformer
layers; freezing layer 0 freezes what comes before it (the embedding), and the head is never frozen.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, expm1, inf, isfinite, log1p
from typing import Protocol, runtime_checkable

from ranvier.config.rules import manual_depth
from ranvier.config.run import Elastic
from ranvier.errors import ConfigError

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
    """A policy with a state, which checkpoints keep: it has these two methods beside `frozen_layers`. The state is
    JSON-serialisable."""

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint keeps of the policy."""

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore what `state_dict` returned."""


class FreezePolicy(Protocol):
    """Decides how many layers to freeze. It is called on one rank, which broadcasts the answer."""

    def frozen_layers(self, facts: Facts) -> int:
        """The number of layers to freeze from now on, between `facts.frozen` and `facts.num_layers`."""


@dataclass(frozen=True)
class NoFreezing:
    """No further layers freeze; those that are frozen stay so, and those in which nothing trains are."""

    def frozen_layers(self, facts: Facts) -> int:
        """See `FreezePolicy`."""
        return facts.frozen


@dataclass(frozen=True)
class GradientNorm:
    """The paper's rule, at most `alpha` of the active layers at a time.

    The argmin is the layer whose gradient is smallest, the first of them in a tie, and that layer itself stays active:
    those below it are frozen. So nothing is frozen while the lowest active layer has the smallest gradient, and the
    last layer is never frozen. The paper's formula says so when layers are numbered from 0. Numbered from 1 it would
    range over the last frozen layer too, whose norm is 0, and never freeze anything.

    The first term is rounded up, so that it is at least one layer while there are active ones (rounded down the rule
    would stop for good at 1 / alpha layers). A norm that is not finite counts as infinitely large.
    """

    alpha: float

    def frozen_layers(self, facts: Facts) -> int:
        """See `FreezePolicy`."""
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
        """See `FreezePolicy`."""
        share = -expm1(facts.evaluation * log1p(-self.alpha))
        return max(facts.frozen, ceil(facts.num_layers * share - _SPURIOUS))


@dataclass(frozen=True)
class Manual:
    """Depths at given steps: `depths` has (step, layers) in rising order, each from that step on."""

    depths: tuple[tuple[int, int], ...]

    def frozen_layers(self, facts: Facts) -> int:
        """See `FreezePolicy`."""
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

def policy_of(elastic: Elastic) -> FreezePolicy:
    """The policy that `elastic.freeze` names. ConfigError for manual entries that cannot be read."""
    match elastic.freeze:
        case "none" | "untrained":
            return NoFreezing()
        case "gradient-norm":
            return GradientNorm(elastic.alpha)
        case "cap":
            return Cap(elastic.alpha)
        case "manual":
            return Manual(tuple(manual_depth(text) for text in elastic.manual))
