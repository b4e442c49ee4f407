"""All stages of one rank: one, or with `pipeline.stages_per_rank` several, which share its gradients, its messages and
its memory, and take turns by the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ranvier.originals.read_attributes import read_attributes_of
from ranvier.originals.stand_in_tensors import StandIns
from ranvier.pipeline.result import LastOutputs
from ranvier.pipeline.stage import Blocks, Stage


class RankStages:
    """The stages of one rank. stages: by ascending number; an action's `turn` is the index of its stage among them.
    eval_blocks: numbers of blocks that compute as in evaluation even while others train."""

    def __init__(self, stages: Sequence[Stage], *, eval_blocks: range = range(0)) -> None:
        self.all, self._eval_blocks = tuple(stages), eval_blocks
        self.first, self.last = stages[0], stages[-1]
        """The stage with the lowest number, the only one that can have frozen blocks with cached outputs, and the one
        with the highest, the only one that can have the loss."""
        self.blocks: Blocks = [block for stage in stages for block in stage.blocks]
        """Of all stages: (number in the model, name, module)."""
        self._modes: dict[nn.Module, bool] = {}
        """Own modes of the modules that are in evaluation mode for this batch."""

    def check(self, *, training: bool) -> None:
        """Raise ModelError, before anything has begun, if blocks are in a state in which they cannot compute or
        train."""
        for read in read_attributes_of(module for _, _, module in self.blocks):
            read.check()
        for stage in self.all if training else ():
            stage.check()

    def begin(self, training: bool, num_microbatches: int, wanted: LastOutputs | None) -> None:
        """Begin a batch: an evaluation with all blocks in evaluation mode, training in their present modes. wanted:
        takes what the last block returns."""
        self.last.wanted = wanted
        follow_originals(module for _, _, module in self.blocks)
        self._modes = put_in_evaluation([module for number, _, module in self.blocks
                                         if not training or number in self._eval_blocks])
        for stage in self.all:
            stage.begin(training, num_microbatches)

    def end(self) -> None:
        """End a batch, also after an error: the blocks are plain modules again, in their own modes."""
        for stage in self.all:
            stage.end()
        self.last.wanted = None
        restore(self._modes)
        self._modes = {}

    def forget_weights(self) -> None:
        """Release weights that stay gathered: they may have changed, or are no longer needed."""
        for stage in self.all:
            stage.forget_weights()

    def gathered_weights(self) -> list[torch.Tensor]:
        """Weights that stay gathered between microbatches."""
        return [weight for stage in self.all for weight in stage.gathered_weights()]

    def clear(self) -> None:
        """Forget all microbatches: the batch has failed."""
        for stage in self.all:
            stage.clear()


# --- modes of modules -------------------------------------------------------------------------------------------------

# Training and evaluation mode of a rank's blocks, module by module.
#
# Training changes no mode: a BatchNorm or dropout that a user has put in `eval()` computes as in evaluation. For an
# evaluation all modules are in `eval()`, and afterwards each one is back in its own mode.


def follow_originals(blocks: Iterable[nn.Module]) -> None:
    """Apply mode changes of a user's modules to the modules that stand in for them."""
    for block in blocks:
        if isinstance(stand_ins := vars(block).get("stand_ins"), StandIns):
            stand_ins.follow_modes()


def put_in_evaluation(blocks: Sequence[nn.Module]) -> dict[nn.Module, bool]:
    """Call `eval()` on the blocks in which a module is in training mode. Returns the earlier modes of all their
    modules, for `restore`."""
    training = [block for block in blocks if any(module.training for module in block.modules())]
    before = {module: module.training for block in training for module in block.modules()}
    for block in training:
        block.eval()
    return before


def restore(modes: Mapping[nn.Module, bool]) -> None:
    """Put every module into its mode in `modes`, from the outside in. Calls `train`, because modules override it."""
    for module, mode in modes.items():
        if module.training != mode:
            module.train(mode)
    for module, mode in modes.items():  # a module that shares children with a later one
        module.training = mode


def some_train(blocks: Iterable[nn.Module]) -> bool:
    """Whether a dropout, or a module with its own parameters, is in training mode. The mode of others, such as a module
    that only calls such modules, says little."""
    return any(module.training for block in blocks for module in block.modules()
               if module._parameters or isinstance(module, nn.modules.dropout._DropoutNd))
