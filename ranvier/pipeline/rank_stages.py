"""All stages of one rank: one, or with `pipeline.stages_per_rank` several, which share its gradients, its messages and
its memory, and take turns by the schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ranvier.block import State
from ranvier.pipeline.stage import Blocks, Stage


class RankStages:
    """stages: by rising number; an action's `turn` is the place of its stage among them."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = tuple(stages)

    def __getitem__(self, turn: int) -> Stage:
        return self._stages[turn]

    def __len__(self) -> int:
        return len(self._stages)

    @property
    def first(self) -> Stage:
        """The one with the lowest number, which alone can have frozen blocks whose outputs are cached."""
        return self._stages[0]

    @property
    def last(self) -> Stage:
        """The one with the highest number, which alone can have the loss."""
        return self._stages[-1]

    @property
    def blocks(self) -> Blocks:
        """Of all stages: (number in the model, name, module)."""
        return [block for stage in self._stages for block in stage.blocks]

    @property
    def stored(self) -> int:
        """Microbatches whose graph is kept now, over all stages."""
        return sum(stage.stored for stage in self._stages)

    @property
    def loss_and_weight(self) -> Tensor:
        """As `Stage.loss_and_weight`, of the last stage."""
        return self.last.loss_and_weight

    @property
    def outputs(self) -> list[State]:
        """As `Stage.outputs`, of the last stage."""
        return self.last.outputs

    def set_loss_factor(self, factor: float) -> None:
        """What the loss is multiplied by before the backward."""
        self.last.loss_factor = factor

    def observe(self, outputs: Callable[[int, State], None] | None) -> None:
        """Give `outputs` each microbatch's number and what the last block returns for it; None: no more."""
        self.last.observe = outputs

    def begin(self, training: bool) -> None:
        """A new batch."""
        for stage in self._stages:
            stage.begin(training)

    def end(self) -> None:
        """The batch has ended, or failed: the blocks are plain modules again."""
        for stage in self._stages:
            stage.end()

    def forget_weights(self) -> None:
        """Weights may have changed, or be wanted no more: those that stay gathered are let go."""
        for stage in self._stages:
            stage.forget_weights()

    def gathered_weights(self) -> list[torch.Tensor]:
        """What stays gathered between microbatches."""
        return [weight for stage in self._stages for weight in stage.gathered_weights()]

    def clear(self) -> None:
        """Forget all microbatches: the batch has failed."""
        for stage in self._stages:
            stage.clear()
