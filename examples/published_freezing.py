"""Two published freeze policies, which look at more than gradient norms: `ranvier train ... --elastic.freeze
examples.published_freezing:Plasticity --elastic.options alpha=0.25`, and `StageBalance` likewise.

`Plasticity` asks for the change of the layers' outputs, has a state that checkpoints keep, and has layers train again.
`StageBalance` answers with a set of layers, by the time that each stage takes.
"""

from collections.abc import Sequence
from math import ceil as round_up
from math import expm1, inf, isfinite, log1p
from statistics import fmean
from typing import Any

from ranvier.elastic.freezing import Facts

_SPURIOUS = 1e-9  # what a product of floats may be above the integer that it stands for


def ceil(number: float) -> int:
    return round_up(number - _SPURIOUS)


class Plasticity:
    """Freezes the first layers whose outputs have stopped changing, as Egeria does (Wang et al., EuroSys 2023).

    The outputs of each layer on the same samples are compared with those of the last evaluation by the
    similarity-preserving loss (Tung and Mori, 2019). A layer has converged when the slope of this change, averaged over
    `window` evaluations, has stayed below `tolerance` of the layer's first change for `patience` evaluations; layers
    freeze from the first on, one at a time at most `alpha` of those that train. All train again when the learning rate
    has dropped to a tenth of what it was when the first of them froze.

    Egeria compares with a snapshot of the model that it runs beside the training. Here the samples are always the same,
    so the snapshot's outputs are kept instead, as one matrix of samples by samples for each layer.
    """

    needs_activations = True

    def __init__(self, alpha: float = 1 / 3, *, window: int = 3, tolerance: float = 0.1, patience: int = 2) -> None:
        self.alpha, self.window, self.tolerance, self.patience = alpha, window, tolerance, patience
        self.changes: list[list[float]] = []  # of each layer, the newest last
        self.settled: list[int] = []  # evaluations in a row at which each layer had converged
        self.rate: float | None = None  # learning rate at which the first of the frozen layers froze

    def frozen_layers(self, facts: Facts) -> int:
        self.changes = self.changes or [[] for _ in range(facts.num_layers)]
        self.settled = self.settled or [0] * facts.num_layers
        if self.rate is not None and facts.learning_rate <= 0.1 * self.rate:
            self.changes, self.settled, self.rate = [], [], None
            return facts.lowest
        for layer, change in enumerate(facts.activation_change or ()):
            if layer >= facts.frozen and isfinite(change):
                self.changes[layer].append(change)
                self.settled[layer] = self.settled[layer] + 1 if self.is_flat(self.changes[layer]) else 0
        depth, most = facts.frozen, facts.frozen + ceil(self.alpha * (facts.num_layers - facts.frozen))
        while depth < min(most, facts.num_layers) and self.settled[depth] >= self.patience:
            depth += 1
        if depth > facts.frozen and self.rate is None and isfinite(facts.learning_rate):
            self.rate = facts.learning_rate
        return depth

    def is_flat(self, changes: Sequence[float]) -> bool:
        """Whether the moving average of the last changes hardly falls or rises any more."""
        if len(changes) <= self.window:
            return False
        before, now = fmean(changes[-self.window - 1:-1]), fmean(changes[-self.window:])
        return abs(now - before) <= self.tolerance * changes[0]

    def state_dict(self) -> dict[str, object]:
        """The policy's state in a checkpoint."""
        return {"changes": self.changes, "settled": self.settled, "rate": self.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.changes, self.settled, self.rate = state["changes"], state["settled"], state["rate"]


class StageBalance:
    """Freezes weights where the pipeline is slowest, as TimelyFreeze does: stages with much work have more of their
    layers frozen, so that none keeps the others waiting. After evaluation T, ceil(L (1 - (1 - alpha)^T)) of L layers
    are frozen, as with `--elastic.freeze cap`.

    The next layer is always one of the slowest stage, that with the smallest gradient norm, until all of that stage
    are frozen. A layer whose weights are frozen takes two thirds of one that trains (no product for the weights'
    gradients), and one third where no gradient passes through it either. (TimelyFreeze solves a linear program for the
    share of each action's parameters, which it draws anew in each step; here whole layers stay frozen, and need no
    states.)
    """

    def __init__(self, alpha: float = 1 / 3) -> None:
        self.alpha = alpha

    def frozen_layers(self, facts: Facts) -> set[int]:
        found = set(range(facts.frozen)) | set(facts.frozen_above)
        wanted = ceil(facts.num_layers * -expm1(facts.evaluation * log1p(-self.alpha)))
        norms = [norm if isfinite(norm) else inf for norm in facts.gradient_norms]
        of_stage: dict[int, list[int]] = {}
        for layer, stage in enumerate(facts.stages):
            of_stage.setdefault(stage, []).append(layer)
        thirds = {stage: sum(1 if layer < facts.frozen else 2 if layer in found else 3 for layer in layers)
                  for stage, layers in of_stage.items()}
        third = {stage: (facts.stage_seconds[stage] or thirds[stage]) / thirds[stage] for stage in of_stage}
        while len(found) < wanted:
            slowest = max(of_stage, key=lambda stage: third[stage] * thirds[stage])
            trained = [layer for layer in of_stage[slowest] if layer not in found]
            if not trained:
                break
            found.add(min(trained, key=lambda layer: norms[layer]))
            thirds[slowest] -= 1
        return found
