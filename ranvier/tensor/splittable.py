"""The `Splittable` protocol of tensor-parallel modules, and the base class of the layers of `ranvier.tensor.layers`.

A splittable module declares how each of its parameters is sharded over the row x col mesh (`splits`), which of its
sizes the mesh must divide (`divisibility_constraints`), and builds the module that replaces it on one rank (`split`).
Layouts of parameters follow from `splits` alone, so checkpoints and cost counts need no running mesh.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import nn

from ranvier.config.run import TensorParallel
from ranvier.errors import ModelError
from ranvier.layout import Split
from ranvier.tensor.activations import layout_of
from ranvier.tensor.layer_order import Pass
from ranvier.tensor.mesh import TensorMesh

ActivationKind = Literal["stream", "inner", "heads", "whole", "ids", "vocabulary", "same"]
"""Kind of an activation, which decides its layout over columns; see `ranvier.tensor.boundaries`. same: a user's own
layer that declares nothing returns the kind of its input."""
Constraint = tuple[str, int, str, int]
"""(what is divided, its size, the mesh axis, the axis' size)."""
_LAYERS = "ranvier.tensor.layers."


class SplitHook:
    """Base of forward hooks that a layer's split form either also has (`ranvier.tensor.adapters`) or does not need."""


GUARDED = "guarded_forward"


class GuardedLayer:
    """Base of a forward that checks a layer's inputs (`ranvier.tensor.boundaries`) and wraps the forward that
    computes."""


def forward_slot(layer: nn.Module) -> str:
    """The attribute through which the computing forward is replaced: inside the guard, if the layer is guarded."""
    return GUARDED if isinstance(layer.__dict__.get("forward"), GuardedLayer) else "forward"


@runtime_checkable
class Splittable(Protocol):
    """A module whose parameters can be sharded over a tensor mesh.

    The module that replaces it is called with this rank's part as a plain tensor, and returns a plain tensor. A class
    whose output differs from its input in shape or layout has the attributes `takes` and `gives`: "stream", "inner" or
    "whole" (see `ranvier.tensor.boundaries`).
    """

    def splits(self, settings: TensorParallel) -> dict[str, Split]:
        """Name of each of its own parameters -> how it is sharded over the mesh."""

    def divisibility_constraints(self, mesh: TensorMesh) -> Iterable[Constraint]:
        """Sizes that the mesh must divide: (what, its size, axis, the axis' size).

        A "vocabulary" need not be divided evenly, but must not be smaller than the axis.
        """

    def split(self, mesh: TensorMesh) -> nn.Module:
        """The module that replaces it, with this rank's shard of each parameter under the same name."""


class Layer(nn.Module):
    """Base of the layers of `ranvier.tensor.layers`: each has the methods of `Splittable`."""

    takes: ActivationKind = "stream"
    """Kind of its input."""
    gives: ActivationKind = "stream"
    """Kind of its output."""

    def splits(self, settings: TensorParallel) -> dict[str, Split]:
        """See `Splittable`. No parameters unless a layer says otherwise."""
        return {}

    def divisibility_constraints(self, mesh: TensorMesh) -> Iterable[Constraint]:
        """See `Splittable`. None unless a layer says otherwise."""
        return ()

    def split(self, mesh: TensorMesh) -> nn.Module:
        """See `Splittable`. Unless a layer says otherwise, a copy that computes on the mesh what the layer computes
        unsplit, with this rank's shards of the parameters."""
        copied = copy.copy(self)
        copied._parameters = _own_parts(self, mesh)
        return copied


def check_plain(layer: Splittable, where: str) -> None:
    """Raise a ModelError for one of our layers that does more than its split form, such as run a hook."""
    if not isinstance(layer, Layer):
        return
    ours = next((kind for kind in type(layer).__mro__ if kind.__module__.startswith(_LAYERS)), None)
    if ours is None or type(layer).split is not getattr(ours, "split"):  # noqa: B009
        return
    more = {"a custom forward": type(layer).forward is not getattr(ours, "forward"),  # noqa: B009
            "hooks": bool(layer._backward_hooks or layer._backward_pre_hooks or any(
                not isinstance(hook, SplitHook) for hooks in (layer._forward_pre_hooks, layer._forward_hooks)
                for hook in hooks.values())),
            "max_norm": getattr(layer, "max_norm", None) is not None,
            "scale_grad_by_freq": getattr(layer, "scale_grad_by_freq", False),
            "a hook on a parameter": any(map(has_hooks, layer.parameters())),
            "several normalized dims": len(getattr(layer, "normalized_shape", (1,))) > 1}
    for what, has in more.items():
        if has:
            raise ModelError(f"has {what}, which would be lost on rows and columns", code="layer-state-lost",
                             where=where, value=type(layer).__name__,
                             remedy="Leave it out, or give the layer its own split(mesh).")


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether the parameter has a user's hook, which would see one rank's shard of the gradient, or none."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def block_splits(block: str, module: nn.Module, settings: TensorParallel, num_cols: int = 1
                 ) -> dict[str, Split]:
    """Parameter's name within the block -> how it is sharded over `num_cols` columns. ModelError for parameters that no
    layer splits."""
    found: dict[str, Split] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, Splittable):
            check_plain(layer, f"block {block}.{path}" if path else f"block {block}")
            for name, split in layer.splits(settings).items():
                found[f"{path}.{name}" if path else name] = split.for_cols(num_cols)
    for name, _ in module.named_parameters():
        if name not in found:
            raise unsplit_parameter(f"{block}.{name}", module, module.get_submodule(name.rpartition(".")[0]))
    return found


def unsplit_parameter(name: str, module: nn.Module, owner: nn.Module) -> ModelError:
    """The error for a parameter in `module` whose own module, `owner`, is not splittable."""
    instead = next((layers for kind, layers in _INSTEAD.items() if isinstance(owner, kind)), "")
    if not instead and not type(owner).__module__.startswith("torch."):
        instead = "Scale, Scalar or BiasTable"  # for the block's own parameters
    return ModelError("belongs to a layer that cannot be split over rows and columns", code="layer-cannot-be-split",
                      where=f"parameter {name}", value=type(module).__name__,
                      remedy=f"Use {instead or 'the layers'} of ranvier.tensor.layers in its place, or set `--mesh.row "
                             "1` `--mesh.col 1`.")


_INSTEAD: dict[type[nn.Module], str] = {
    nn.Linear: "Linear or ClassifierHead", nn.Embedding: "Embedding, PositionEmbedding or BiasTable",
    nn.LayerNorm: "LayerNorm", nn.RMSNorm: "RMSNorm", nn.Conv1d: "DepthwiseConv1d"}
"""A torch module -> the layers that replace it."""


# ---------------------------------------------------------------------- what several layers declare


def feature_split(settings: TensorParallel) -> Split:
    """Sharding of a parameter with one value for each feature of the residual stream (of a norm, a bias).

    summed: axes over whose ranks the gradient is all-reduced, as sequence parallelism requires for norms.
    """
    return {"hidden": Split((("col",),), summed=("row",)), "sequence": Split(((),), summed=("row", "col")),
            "whole": Split(((),))}[layout_of(settings)]


def hidden_constraint(mesh: TensorMesh, size: int, what: str = "features") -> Iterator[Constraint]:
    """Columns divide the features of the residual stream, if they are sharded."""
    if mesh.activations.name == "hidden":
        yield what, size, "col", mesh.num_cols


def vocabulary_constraints(size: int, mesh: TensorMesh) -> Iterator[Constraint]:
    """A vocabulary may be divided unevenly, but every rank needs a part."""
    for axis, count in (("col", mesh.num_cols), ("row", mesh.num_rows)):
        if size < count:
            yield "vocabulary", size, axis, count


# --- the parts of one rank --------------------------------------------------------------------------------------------

# The shard of a layer's parameters that one rank holds.


def own_part(parameter: nn.Parameter, split: Split, mesh: TensorMesh) -> nn.Parameter:
    """This rank's shard of a full parameter; uninitialised on the default device if that is on the meta device."""
    box = split.for_cols(mesh.num_cols).box(parameter.shape, (mesh.num_rows, mesh.num_cols), (mesh.row, mesh.col))
    if parameter.is_meta:
        values = torch.empty([stop - start for start, stop in box], dtype=parameter.dtype)
    else:
        values = parameter.detach()[tuple(slice(start, stop) for start, stop in box)].clone()
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _own_parts(layer: Layer, mesh: TensorMesh) -> dict[str, nn.Parameter | None]:
    splits = layer.splits(mesh.settings)
    return {name: None if parameter is None else own_part(parameter, splits[name], mesh)
            for name, parameter in layer._parameters.items()}


class SplitLayer(nn.Module):
    """Base of tensor-parallel layers: this rank's shards of a layer's parameters, and its place on the mesh."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, layer: Layer, mesh: TensorMesh) -> None:
        super().__init__()
        self.mesh = mesh
        for name, parameter in _own_parts(layer, mesh).items():
            self.register_parameter(name, parameter)

    def begins(self, what: Pass) -> None:
        """Record that this layer begins to communicate over the mesh, which all ranks must do in the same order. Its
        forward is recorded by `GuardedForward`."""
        if self.mesh.num_rows > 1 or self.mesh.num_cols > 1:
            self.mesh.order.record(self.__dict__.get("_split_name", type(self).__name__), what)
