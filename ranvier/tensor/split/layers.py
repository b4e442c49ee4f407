"""Replaces the layers of a block with tensor-parallel ones, which hold this rank's shard of each parameter."""

from __future__ import annotations

import copy
import functools
import operator
import types
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.block import Loss
from ranvier.errors import DivisibilityError, ModelError
from ranvier.originals.same_memory import ByMemory
from ranvier.tensor.adapters import split_adapters
from ranvier.tensor.boundaries import checked_loss, guard_block, guard_layer, named_module, own_hooks
from ranvier.tensor.closed_parameters import close_parameters
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split.loss import SplitTokenLosses, TokenLosses, vocabulary_of
from ranvier.tensor.splittable import Splittable, check_plain, unsplit_parameter


def split_layers(module: nn.Module, mesh: TensorMesh, where: str, *, in_chain: bool = False) -> nn.Module:
    """A copy of `module` in which every `Splittable` layer is replaced by one for this rank's place on the mesh.

    Parameters on the meta device become empty ones on the default device; of others this rank gets its shard.

    where: the module's name in messages. in_chain: the module is a block of a model, whose inputs and outputs carry
    their layout. Otherwise it is called with plain tensors, this rank's part of the residual stream (or of a single
    layer's input), and returns plain tensors. Raises DivisibilityError for sizes that the mesh does not divide, and
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
    """The loss for the output of a split model's last block: logits may be sharded over the vocabulary."""
    whole = loss
    if isinstance(loss, nn.Module):
        done: dict[nn.Module, nn.Module] = {}
        whole = _split_modules(loss, mesh, "loss", done, alone=False)
        rebind_attributes(loss, done, "loss")
    return checked_loss(whole, mesh, vocabulary_of(loss))


def _split_modules(module: nn.Module, mesh: TensorMesh, where: str, done: dict[nn.Module, nn.Module],
                   alone: bool) -> nn.Module:
    """done: modules that have already been replaced, which may occur again. alone: the module is not in a block."""
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
    """Keep the full layer's sizes and settings, such as `out_features` and `eps`, which a block may read."""
    for name, value in whole.__dict__.items():
        if not name.startswith("_") and isinstance(value, (int, float, str, tuple)) and not hasattr(part_of_it, name):
            part_of_it.__dict__[name] = value


def _check_sharing(module: nn.Module, where: str) -> None:
    """Raise a ModelError for a parameter that two layers of a block share: it would become two parameters."""
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


# --- attributes -------------------------------------------------------------------------------------------------------

# References in a split module's attributes: methods and lists of the whole model's layers become those of its copy.
#
# A split module is a copy whose layers are this rank's. An attribute that still refers to the whole model's layers or
# parameters (`self.pair = [self.query, self.key]`, `self.run = lambda x: self.into(x)`) would compute with weights that
# are never trained, and with rows only nothing would fail.


_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = tuple(name for name in _OF_TORCH if name.endswith("_hooks"))


def rebind_attributes(whole: nn.Module, done: Mapping[nn.Module, nn.Module], where: str, *, check_only: bool = False
                      ) -> None:
    """Make the attributes of all copies refer to copies; ModelError for attributes that cannot be changed.

    done: modules of `whole` -> their copies. check_only: change nothing; for copies made by `copy.deepcopy`.
    """
    parameters = _Parameters(whole)
    for path, module in whole.named_modules():
        if module not in done or isinstance(module, Splittable):
            continue
        copied, named = done[module], f"{where}.{path}" if path else where
        for name, value in list(module.__dict__.items()):  # a copy has lost some
            if name not in _OF_TORCH and name != "_split_name":
                shown = name.replace("_compiled_call_impl", "compile()")
                if name == "forward" and not isinstance(value, types.MethodType):
                    _refuse(f"{named}.{shown}", module)
                found = _Rebinding(done, parameters, f"{named}.{shown}", module).rebind(value)
                if not check_only:
                    copied.__dict__[name] = found
        for name, buffer in module._buffers.items():
            _Rebinding(done, parameters, f"{named}.{name}", module).rebind(buffer)
        for name in _HOOKS:
            for hook in list((copied.__dict__.get(name) or {}).values()):
                _Rebinding(done, parameters, f"{named}.{name.strip('_')}", module).check(hook)


class _Parameters:
    """The parameters of a whole module."""

    def __init__(self, whole: nn.Module) -> None:
        self._found = {id(parameter) for parameter in whole.parameters()}
        self._trained = ByMemory((None, parameter) for parameter in whole.parameters() if parameter.requires_grad)

    def contain(self, value: Tensor) -> bool:
        """Whether `value` is one of them, or shares memory with one that is trained."""
        return id(value) in self._found or bool(self._trained.overlapping(value))


class _Rebinding:
    """Rebinds one attribute of `module`."""

    def __init__(self, done: Mapping[nn.Module, nn.Module], parameters: _Parameters, where: str, module: nn.Module
                 ) -> None:
        self._done, self._parameters, self._where, self._module = done, parameters, where, module
        self._memo: dict[int, Any] = {}

    def rebind(self, value: Any) -> Any:
        """`value` with the whole model's modules replaced by copies; `value` itself if it refers to none."""
        if isinstance(value, nn.Module):
            return self._done.get(value, value)
        if isinstance(value, Tensor):
            if self._parameters.contain(value):
                raise ModelError("keeps a parameter of a layer, or its memory, of which each rank has a part",
                                 code="layer-parameter-kept", where=self._where, value=type(self._module).__name__,
                                 remedy="Call the layer. A penalty on weights is optim.weight_decay.")
            return value
        if isinstance(value, types.MethodType):
            owner = self.rebind(value.__self__)
            if owner is value.__self__ and isinstance(owner, nn.Module):
                self._refuse()  # bound to a module outside the block
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if type(value) in (list, tuple, dict):
            return self._container(value)
        if type(value) is weakref.ref and (target := value()) is not None:
            return value if self.rebind(target) is target else weakref.ref(self.rebind(target))
        if type(value) is functools.partial:
            call, args, named = self.rebind(value.func), self.rebind(value.args), self.rebind(value.keywords)
            changed = call is not value.func or args is not value.args or named is not value.keywords
            return functools.partial(call, *args, **named) if changed else value
        self.check(value)
        return value

    def check(self, value: Any) -> None:
        """ModelError if a function or an object refers to a module or parameter of the whole model."""
        if id(value) in self._memo:
            return
        self._memo[id(value)] = value
        for one in _inside(value):
            if self.rebind(one) is not one:
                self._refuse()

    def _container(self, value: Any) -> Any:
        if id(value) in self._memo:
            return self._memo[id(value)]
        self._memo[id(value)] = value  # for a container that contains itself
        before = list(value.values()) if isinstance(value, dict) else value
        parts = [self.rebind(one) for one in before]
        if not all(map(operator.is_, parts, before)):
            self._memo[id(value)] = dict(zip(value, parts, strict=True)) if isinstance(value, dict) \
                else type(value)(parts)
        return self._memo[id(value)]

    def _refuse(self) -> None:
        _refuse(self._where, self._module)


def _inside(value: Any) -> Iterable[Any]:
    """The values to which a function's closure, or an object of a user's class, refers."""
    if isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, types.FunctionType):
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType())
    elif isinstance(value, (list, tuple, set, frozenset, functools.partial)):
        yield from value if not isinstance(value, functools.partial) else (value.func, value.args, value.keywords)
    elif isinstance(value, Mapping):
        yield from value.values()
    elif not isinstance(value, type) and not type(value).__module__.startswith(("torch.", "ranvier.", "builtins")):
        yield from getattr(value, "__dict__", {}).values()


def _refuse(where: str, module: nn.Module) -> None:
    raise ModelError("has a function that would run the layers of the whole model, as torch.compile and lambda make "
                     "them", code="function-of-whole-layers", where=where, value=type(module).__name__,
                     remedy="Define a method that calls the layers, or set `--model.compile`, which compiles the "
                            "layers' own chains.")
