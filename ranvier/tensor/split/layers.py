"""Replaces the layers of a block by tensor-parallel ones, which hold this rank's shard of each parameter."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ranvier.block import Loss
from ranvier.errors import DivisibilityError, ModelError
from ranvier.tensor.adapters import split_adapters
from ranvier.tensor.boundaries import checked_loss, guard_block, guard_layer, named_module, own_hooks
from ranvier.tensor.closed_parameters import close_parameters
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split.attributes import rebind_attributes
from ranvier.tensor.split.loss import SplitTokenLosses, TokenLosses, vocabulary_of
from ranvier.tensor.splittable import Splittable, check_plain, unsplit_parameter


def split_layers(module: nn.Module, mesh: TensorMesh, where: str, *, in_chain: bool = False) -> nn.Module:
    """A copy of `module` in which every `Splittable` layer is replaced by one for this rank's place on the mesh.

    Parameters on the meta device become empty ones on the default device; of others this rank gets its shard.

    where: the module's name in messages. in_chain: it is a block of a model, whose inputs and outputs carry their
    layout. Otherwise it is called with plain tensors, this rank's part of the residual stream (or, a layer by itself,
    of what it takes), and returns such. Raises DivisibilityError for sizes that the mesh does not divide, and
    ModelError for layers that cannot be split, each by name.
    """
    _check_sharing(module, where)
    alone = isinstance(module, Splittable) and not in_chain
    done: dict[nn.Module, nn.Module] = {}
    found = _split_modules(module, mesh, where, done, alone)
    rebind_attributes(module, done, where)
    if not alone and vocabulary_of(module) is None:
        guard_block(found, mesh, where, in_chain=in_chain)
    return found


def split_loss(loss: Loss, mesh: TensorMesh) -> Loss:
    """The loss of what a split model's last block returns: logits may be sharded over the vocabulary."""
    whole = loss
    if isinstance(loss, nn.Module):
        done: dict[nn.Module, nn.Module] = {}
        whole = _split_modules(loss, mesh, "loss", done, alone=False)
        rebind_attributes(loss, done, "loss")
    return checked_loss(whole, mesh, vocabulary_of(loss))


def _split_modules(module: nn.Module, mesh: TensorMesh, where: str, done: dict[nn.Module, nn.Module],
                   alone: bool) -> nn.Module:
    """done: modules that have been replaced already, for those that occur twice. alone: no block is around it."""
    if module in done:
        return done[module]
    if isinstance(module, Splittable):
        _check_sizes(module, mesh, where)
        check_plain(module, where)
        part_of_it = module.split(mesh)
        split_adapters(module, part_of_it, mesh)
        if any(parameter.is_meta for parameter in part_of_it.parameters()):  # parameters that are not sharded
            part_of_it.to_empty(device=torch.get_default_device())
        done[module] = named_module(own_hooks(copy.copy(part_of_it)), where)
        _keep_sizes(module, done[module])
        close_parameters(done[module], mesh)
        guard_layer(done[module], mesh, where, getattr(module, "takes", "same"), getattr(module, "gives", "same"),
                    alone=alone, vocab=getattr(module, "out_features", 0))
        return done[module]
    if isinstance(module, TokenLosses):
        done[module] = SplitTokenLosses(module, mesh)
        return done[module]
    if isinstance(module, (nn.modules.dropout._DropoutNd, nn.RReLU)):
        raise ModelError("draws different random numbers on each rank", code="random-layer-on-columns",
                         where=f"{where} (nn.{type(module).__name__})", value=getattr(module, "p", None),
                         remedy="Use ranvier.tensor.layers.Dropout, whose masks are keyed by place.")
    for name, _ in module.named_parameters(recurse=False):
        raise unsplit_parameter(f"{where}.{name}", module, module)
    copied = done[module] = named_module(own_hooks(copy.copy(module)), where)
    copied._buffers = dict(module._buffers)
    copied._modules = {name: child and _split_modules(child, mesh, f"{where}.{name}", done, alone=False)
                       for name, child in module._modules.items()}
    return copied


def _keep_sizes(whole: nn.Module, part_of_it: nn.Module) -> None:
    """A block may read its layers' numbers, such as `out_features` and `eps`: they are those of the whole layer."""
    for name, value in whole.__dict__.items():
        if not name.startswith("_") and isinstance(value, (int, float, str, tuple)) and not hasattr(part_of_it, name):
            part_of_it.__dict__[name] = value


def _check_sharing(module: nn.Module, where: str) -> None:
    """ModelError for a parameter that two layers of a block share: it would become two."""
    holders: dict[nn.Parameter, nn.Module] = {}
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if holders.setdefault(parameter, layer) is not layer:
                raise ModelError("is shared by two layers of a block, and would become two parameters on a mesh",
                                 code="parameter-shared-by-layers", where=f"parameter {name} in {where}",
                                 value=type(layer).__name__,
                                 remedy="Share the layer itself, or put the layers into two blocks and declare them as "
                                        "tied.")


def _check_sizes(layer: Splittable, mesh: TensorMesh, where: str) -> None:
    for what, size, axis, count in layer.divisibility_constraints(mesh):
        if size % count if what != "vocabulary" else size < count:
            problem = "is smaller than" if what == "vocabulary" else "cannot be divided by"
            raise DivisibilityError(f"{what} {problem} mesh.{axis} {count}", code="layer-not-divisible", where=where,
                                    value=size, remedy=f"Set `--mesh.{axis}` to a divisor, or change the model's size.")
