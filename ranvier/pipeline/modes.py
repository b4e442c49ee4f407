"""Training and evaluation mode of a rank's blocks, module by module.

Training changes no mode: a BatchNorm or dropout that a user has put in `eval()` computes as in evaluation. For an
evaluation all modules are in `eval()`, and afterwards each one is back in its own mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from ranvier.originals.stand_in_modes import StandInModes


def follow_originals(blocks: Iterable[nn.Module]) -> None:
    """Modules that stand for modules of a user's model take over how the modes of these have changed."""
    for block in blocks:
        if isinstance(modes := vars(block).get("stand_in_modes"), StandInModes):
            modes.follow()


def put_in_evaluation(blocks: Sequence[nn.Module]) -> dict[nn.Module, bool]:
    """Call `eval()` of the blocks in which a module is in training. Returns the modes of all their modules before, for
    `restore`."""
    training = [block for block in blocks if any(module.training for module in block.modules())]
    before = {module: module.training for block in training for module in block.modules()}
    for block in training:
        block.eval()
    return before


def restore(modes: Mapping[nn.Module, bool]) -> None:
    """Put every module in its mode of these, from the outside in. `train` is called, because modules override it."""
    for module, mode in modes.items():
        if module.training != mode:
            module.train(mode)
    for module, mode in modes.items():  # a module that shares children with a later one
        module.training = mode


def some_train(blocks: Iterable[nn.Module]) -> bool:
    """Whether a dropout, or a module with parameters of its own, is in training mode. The mode of others, such as a
    module that only calls such modules, says little."""
    return any(module.training for block in blocks for module in block.modules()
               if module._parameters or isinstance(module, nn.modules.dropout._DropoutNd))
