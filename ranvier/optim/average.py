"""Exponential moving average (EMA) of parameters: a state of the optimizer, which lies where the others lie.

After update t the average is decay x average + (1 - decay) x parameters; after the first it is the parameters, as in
torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn. It is in fp32 (fp64 for fp64 parameters), and averages
the master copies where there are some. As a state it is sharded, offloaded, saved and moved as the moments are.
"""

from __future__ import annotations

from torch import Tensor

from ranvier.config.run import Optim

EMA = "ema"
"""Name of the state, and its kind in a checkpoint."""


def averages_of(optim: Optim) -> tuple[str, ...]:
    """Names of the states that average parameters."""
    return (EMA,) if optim.ema else ()


def update_average(average: Tensor, parameters: Tensor, *, step: int, decay: float) -> None:
    """Update number `step` (from 1) of all elements of a bucket, those of frozen parameters too."""
    if step == 1:
        average.copy_(parameters)
    else:
        average.lerp_(parameters.to(average.dtype), 1.0 - decay)
