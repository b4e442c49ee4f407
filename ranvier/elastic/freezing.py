"""Freeze policies with one small interface, and the conditions that their answers must satisfy.

PipeTransformer (He et al., 2021, section 3.1) freezes a growing prefix of a model's layers while it is fine-tuned. At
evaluation T, with L layers of which L_f are frozen, and layers numbered from 0:

    L_f(T) = min(L_f + alpha (L - L_f), argmin over l in L_f .. L - 1 of norm_l)       layers 0 .. L_f(T) - 1 are frozen

A policy may also answer with fewer layers than are frozen: the others train again. Or with a set of layers: of frozen
layers above the first that trains, only the weights are frozen, and gradients pass through them. `decide` checks that
the answer of any policy, also a user's own, names existing layers, and adds the first `Facts.lowest`. Layers are
transformer layers; freezing layer 0 also freezes the blocks before it (the embedding), and the head is never frozen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import ceil, expm1, inf, isfinite, log1p, nan
from typing import Protocol, TypeGuard, runtime_checkable

from ranvier.elastic.inputs import depth_by_hand
from ranvier.errors import ConfigError

_SPURIOUS = 1e-9
"""Most by which a floating-point product may exceed the integer that it represents."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Input of a policy at one evaluation."""

    step: int
    """Optimizer steps done."""
    evaluation: int
    """T: evaluations of the policy in this run, including this one, so the first is 1."""
    frozen: int
    """Number of frozen layers: those numbered below it."""
    num_layers: int
    """Number of transformer layers, without embedding and head."""
    gradient_norms: tuple[float, ...]
    """L2 norm of each layer's gradient, averaged over the replicas; 0.0 for frozen layers."""
    lowest: int = 0
    """Number of layers that stay frozen, whatever the policy answers: nothing trains in them, or one of their weights
    was tied to a weight of the head until it froze."""
    loss: float = nan
    """Training loss, averaged over the valid targets of the steps since the last evaluation of the policy. NaN if there
    were none."""
    learning_rate: float = nan
    """Learning rate of the last step."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the newest evaluation on held-out data, by the names in metrics.jsonl: eval_loss, eval_accuracy, ...;
    empty before the first."""
    frozen_above: tuple[int, ...] = ()
    """Layers above the first one that trains whose weights are frozen."""
    stages: tuple[int, ...] = ()
    """Pipeline rank of each layer; with one stage per rank, its stage."""
    stage_seconds: tuple[float, ...] = ()
    """Seconds that each pipeline rank computed in a step, on average since the last transition; 0.0 if not measured."""
    activation_change: tuple[float, ...] | None = None
    """Change of each layer's outputs on the same held-out samples since the last evaluation of the policy
    (`ranvier.elastic.similarity`); NaN at the first evaluation. None unless the policy has `needs_activations`."""

    def __post_init__(self) -> None:
        assert 0 <= self.lowest <= self.frozen <= self.num_layers == len(self.gradient_norms) and self.evaluation >= 1


@dataclass(frozen=True)
class FrozenLayers:
    """The frozen layers: those numbered below `prefix`, and the weights of those `above`, in rising order."""

    prefix: int
    above: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.prefix + len(self.above)

    @property
    def layers(self) -> frozenset[int]:
        """All frozen layers."""
        return frozenset(range(self.prefix)) | frozenset(self.above)


NONE_FROZEN = FrozenLayers(0)


def layers_text(layers: Collection[int]) -> str:
    """Description of layers: "layer 3", "layers 0-2 and 5"."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    parts = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ("layer " if len(layers) == 1 else "layers ") + " and ".join([", ".join(parts[:-1])] * (len(parts) > 1)
                                                                       + parts[-1:])


def frozen_layers(layers: Collection[int]) -> FrozenLayers:
    """These layers as a prefix and the layers above it."""
    prefix = next(layer for layer in range(len(layers) + 1) if layer not in layers)
    return FrozenLayers(prefix, tuple(sorted(layer for layer in layers if layer > prefix)))


@runtime_checkable
class StatefulPolicy(Protocol):
    """A policy with a state, which checkpoints save: it has these two methods in addition to `frozen_layers`. The state
    is JSON-serialisable."""

    def state_dict(self) -> dict[str, object]:
        """State of the policy for a checkpoint."""

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore what `state_dict` returned."""


class FreezePolicy(Protocol):
    """Decides which layers are frozen. It is called on one rank, which broadcasts the answer. A policy whose attribute
    `needs_activations` is True also gets `Facts.activation_change`, which costs a forward of a few samples at each
    evaluation."""

    def frozen_layers(self, facts: Facts) -> int | Collection[int]:
        """The number of first layers that are frozen from now on, 0 to `facts.num_layers`: `facts.frozen` changes
        nothing, a greater number freezes layers, and a smaller one lets layers train again. Or a collection of layer
        numbers, from 0, not necessarily the first ones; if a later answer is a number, all layers from that number on
        train again."""


@dataclass(frozen=True)
class NoFreezing:
    """Freezes no further layers; frozen layers, and those in which nothing trains, stay frozen."""

    def frozen_layers(self, facts: Facts) -> int:
        """See `FreezePolicy`."""
        return facts.frozen


@dataclass(frozen=True)
class GradientNorm:
    """The paper's rule, at most `alpha` of the active layers at a time.

    The argmin is the layer with the smallest gradient, the first one in a tie. That layer stays active, and the layers
    below it are frozen. So nothing is frozen while the lowest active layer has the smallest gradient, and the last
    layer is never frozen. The paper's formula means this if layers are numbered from 0. With numbers from 1 it would
    include the last frozen layer, whose norm is 0, and never freeze anything.

    The first term is rounded up, so that it is at least one layer while there are active layers (rounded down, the rule
    would stop permanently at 1 / alpha layers). A norm that is not finite counts as infinitely large.
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

    Once T is large enough this is L, and only the head trains. (The paper's released code freezes by the cap alone,
    once per epoch.)
    """

    alpha: float

    def frozen_layers(self, facts: Facts) -> int:
        """See `FreezePolicy`."""
        share = -expm1(facts.evaluation * log1p(-self.alpha))
        return max(facts.frozen, ceil(facts.num_layers * share - _SPURIOUS))


@dataclass(frozen=True)
class Manual:
    """Depths at given steps: `depths` has (step, layers) in the order of steps, each valid from that step on."""

    depths: tuple[tuple[int, int], ...]

    def frozen_layers(self, facts: Facts) -> int:
        """See `FreezePolicy`."""
        wanted = depth_by_hand(self.depths, facts.step)
        return facts.frozen if wanted is None else wanted


def decide(policy: FreezePolicy, facts: Facts) -> FrozenLayers:
    """The policy's answer, with the first `facts.lowest` layers. ConfigError unless it is an int in 0 ..
    `facts.num_layers`, or a set, list or tuple of layers."""
    answer = policy.frozen_layers(facts)
    if _is_whole(answer) and 0 <= answer <= facts.num_layers:
        return FrozenLayers(max(answer, facts.lowest))
    if isinstance(answer, (set, frozenset, list, tuple)) and all(
            _is_whole(layer) and 0 <= layer < facts.num_layers for layer in answer):
        return frozen_layers({*answer, *range(facts.lowest)})
    raise ConfigError(f"must be a whole number of layers from 0 to the model's {facts.num_layers}, or a set of layers "
                      f"from 0 to {facts.num_layers - 1}", code="freeze-policy-result",
                      where=f"answer of the freeze policy {type(policy).__name__} at step {facts.step}",
                      value="None" if answer is None else answer,
                      remedy="Return facts.frozen from frozen_layers to change nothing.")


def _is_whole(answer: object) -> TypeGuard[int]:
    return isinstance(answer, int) and not isinstance(answer, bool)
