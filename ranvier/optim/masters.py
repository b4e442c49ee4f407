"""fp32 master copies for a user's torch optimizer, which updates them in place of half-precision parameters.

    gradients (fp32, or half) -> master.grad -> optimizer.step() -> parameter = master, rounded

An update is often smaller than the distance between two half-precision numbers: without a copy of full precision it is
rounded away (Micikevicius et al., 2018, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ranvier.precision import wide


class MasterCopies:
    """Puts a master copy in the place of every parameter that `optimizer` has.

    The optimizer is built with the parameters themselves, so that its groups may depend on which they are; groups and
    states that it has made by then take the copies instead.

    Args:
        parameters: of half precision; those that the optimizer does not have get no copy.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        has = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        self.of = {parameter: nn.Parameter(parameter.detach().to(wide(parameter.dtype)))
                   for parameter in parameters if parameter in has}
        """Parameter -> its master copy."""
        for group in optimizer.param_groups:
            group["params"][:] = [self.of.get(parameter, parameter) for parameter in group["params"]]
        for parameter, master in self.of.items():
            if parameter in optimizer.state:
                optimizer.state[master] = {
                    name: value.to(wide(value.dtype)) if isinstance(value, Tensor) and value.is_floating_point()
                    else value for name, value in optimizer.state.pop(parameter).items()}

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """Master copies of elements that someone has written since become what these are now."""
        for parameter, master in self.of.items():
            follow(master, parameter)

    def take_gradients(self, factor: float) -> None:
        """Each copy has its parameter's gradient times `factor`, in fp32; without one where that is None."""
        for parameter, master in self.of.items():
            if parameter.grad is None:
                master.grad = None
            elif parameter.grad.dtype is master.dtype:
                master.grad = parameter.grad.mul_(factor) if factor != 1.0 else parameter.grad
            else:
                master.grad = parameter.grad.to(master.dtype).mul_(factor)

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Parameters become their updated copies, rounded. Those without a gradient stay: whoever froze them may have
        set them."""
        for parameter, master in self.of.items():
            if master.grad is not None:
                parameter.copy_(master)


def follow(master: Tensor, values: Tensor) -> None:
    """Elements of a master copy become `values` where these are not the copy, rounded: someone has written them, by
    whatever way (a write through `parameter.data` leaves no trace). Others keep their bits."""
    values = values.to(master.device)
    master.copy_(torch.where(values == master.to(values.dtype), master, values))
