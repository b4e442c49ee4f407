"""Parameters of split layers, which code of a block or a loss cannot read, because a rank has only a shard of each.

`layer.weight.norm()` in a block, or a penalty in a loss, would be computed from one rank's shard, and its gradient
would be, too. While a block or a loss runs, only the layer itself and this package read parameters. Between batches any
code may: optimizers, averages and saves compute with shards.
"""

from __future__ import annotations

import sys
from collections.abc import ItemsView, Iterator, Mapping, MutableMapping, ValuesView
from contextlib import contextmanager
from types import FrameType

from torch import nn

from ranvier.tensor.columns import refuse
from ranvier.tensor.mesh import TensorMesh

_Parameter = nn.Parameter | None


class ClosedParameters(MutableMapping[str, _Parameter]):
    """Replaces `_parameters` of a split layer and its parts: each read while code of a block runs is checked.

    It is not a dict, because `dict.__getitem__`, `dict(...)` and `{**...}` bypass the methods of a dict subclass.
    """

    def __init__(self, parameters: Mapping[str, _Parameter], mesh: TensorMesh) -> None:
        self._held, self.mesh = dict(parameters), mesh

    def __getitem__(self, name: str) -> _Parameter:
        if self.mesh.runs_user_code:
            self._check(sys._getframe(1), name)
        return self._held[name]

    def __setitem__(self, name: str, parameter: _Parameter) -> None:
        self._held[name] = parameter

    def __delitem__(self, name: str) -> None:
        del self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def get(self, name: str, default: _Parameter = None) -> _Parameter:  # type: ignore[override]
        """A parameter by its name."""
        if self.mesh.runs_user_code:
            self._check(sys._getframe(1), name)
        return self._held.get(name, default)

    def copy(self) -> dict[str, _Parameter]:
        """All parameters by name, in a plain dict."""
        if self.mesh.runs_user_code:
            self._check(sys._getframe(1), "parameters()")
        return dict(self._held)

    def items(self) -> ItemsView[str, _Parameter]:
        """All parameters by name: `parameters()` and `state_dict()` of a module read them."""
        if self.mesh.runs_user_code:
            self._check(sys._getframe(1), "parameters()")
        return self._held.items()

    def values(self) -> ValuesView[_Parameter]:
        """All parameters."""
        if self.mesh.runs_user_code:
            self._check(sys._getframe(1), "parameters()")
        return self._held.values()

    def _check(self, frame: FrameType | None, name: str) -> None:
        """ModelError unless the reading code is this package's or the layer's own; torch reads for its caller."""
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module.startswith("ranvier."):
                return
            if module != nn.Module.__module__:  # whose code reads for its caller
                reader = frame.f_locals.get("self")
                if isinstance(reader, nn.Module) and self._belongs_to(reader):
                    return
                if not module.startswith("torch."):
                    break
            frame = frame.f_back
        else:
            return
        refuse(f"{name} of a layer that is split over rows and columns is read outside of the layer",
               f"one of {self.mesh.num_rows} x {self.mesh.num_cols} ranks' parts",
               "Call the layer. A penalty on weights is optim.weight_decay.")

    def _belongs_to(self, module: nn.Module) -> bool:
        """Whether these are the parameters of a layer, or of a part of it."""
        return isinstance(module._parameters, ClosedParameters) and any(
            each._parameters is self for each in module.modules())


def close_parameters(layer: nn.Module, mesh: TensorMesh) -> None:
    """Let only the layer and its parts read their parameters while code of a block runs."""
    for module in layer.modules():
        module.__dict__["_parameters"] = ClosedParameters(module._parameters, mesh)


@contextmanager
def user_code(mesh: TensorMesh) -> Iterator[None]:
    """Inside, a loss runs, which cannot read parameters of split layers."""
    mesh.runs_user_code = True
    try:
        yield
    finally:
        mesh.runs_user_code = False
