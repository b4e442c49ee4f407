"""The model contract: an ordered list of named blocks and a loss.

A block is an `nn.Module` whose forward takes and returns the *carried state*: one tensor, a dict of named tensors
(hidden states, a mask, positions), or a tuple or list. A block is never split over stages; a stage is a run of
consecutive blocks. The loss takes what the last block returns and the targets and gives (sum, weight): the sum of the
losses of the valid targets, and their number. Blocks are built lazily, so that a rank builds only the blocks it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import prod
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path

from ranvier import keyed_random
from ranvier.arguments import check_arguments
from ranvier.errors import ModelError
from ranvier.layout import frozen_blocks
from ranvier.sent_values import SENT, NotSent, dataclass_hint, pack, unpack

INITIAL_PIECE = {"cpu": 1 << 16, "cuda": 1 << 22}
"""Elements that are initialised together. On a CPU the fp64 and int64 temporaries of this many fit a core's cache; on a
GPU this many occupy the device, and their temporaries take some 200 MB."""

KEPT_IN_FP32 = ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")
"""Attributes of a model of transformers: names of what stays in fp32 with half precision, and with fp16 only."""

State = Tensor | dict[str, Tensor]
"""The carried state, which blocks pass on: one tensor, or a dict of named tensors. A block may also pass on a tuple,
NamedTuple, list or dict, also nested, with at least one tensor, and besides tensors None, sizes, whole numbers, devices
and dtypes (`sent_values`); anything else is refused."""

Loss = Callable[[Any, Any], tuple[Tensor, Tensor | float | int]]
"""(what the last block returns, targets) -> (sum of losses, weight). Both arguments are the user's own."""

Modules = nn.Sequential | nn.ModuleList | nn.ModuleDict | Sequence[nn.Module] | Mapping[str, nn.Module]
"""Existing blocks, in order."""


@dataclass(frozen=True)
class Initial:
    """Initial values of one parameter: `kind` "normal" (mean 0, standard deviation `scale`), "uniform" (between
    -`scale` and `scale`) or "constant" (`scale`)."""

    kind: Literal["normal", "uniform", "constant"]
    scale: float

    def __post_init__(self) -> None:
        check_arguments(Initial, vars(self))


@dataclass(frozen=True, kw_only=True)
class Model:
    """A network as an ordered list of blocks.

    blocks: name -> builder of the block's module; the order is the order of execution.
    loss: (what the last block returns, targets) -> (sum of losses, weight).
    tied: groups of full parameter names ("block.parameter") that are one parameter; the first is its owner.
    initial: full parameter name -> its initial values, drawn from the seed; None keeps the builders' values.
    layers: block names grouped into the layers that checkpoint intervals and freezing count; () if unknown.
    alike: block -> an earlier block with the same computation and parameters of the same shapes, both trainable or both
        frozen, so that counting one of them is enough.
    untied: parameter -> its former owner, if a tie has ended because one of the two is frozen (see `freeze`). It starts
        with the owner's values and optimizer states, and settings that name the owner apply to it.
    quantized: full name of a frozen weight [out, in] -> the number format, int8 or nf4, in which ranks store it.
    keep_fp32: names or patterns of modules, parameters and buffers, "block.name", that stay in fp32 with half
        precision.
    """

    blocks: Mapping[str, Callable[[], nn.Module]]
    loss: Loss
    tied: tuple[tuple[str, ...], ...] = ()
    initial: Callable[[str], Initial] | None = None
    layers: tuple[tuple[str, ...], ...] = ()
    alike: Mapping[str, str] = field(default_factory=dict)
    untied: Mapping[str, str] = field(default_factory=dict)
    quantized: Mapping[str, str] = field(default_factory=dict)
    keep_fp32: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_arguments(Model, vars(self))
        if isinstance(self.loss, type):
            raise ModelError("is a class, not a loss", code="loss-is-class", where="loss", value=self.loss.__name__,
                             remedy="Pass f with f(output, targets) -> (sum of losses, number of valid targets), or "
                                    "a callable object of the class.")
        if not self.blocks:
            raise ModelError("has no blocks", code="model-without-blocks", where="model",
                             remedy="Give at least one named block.")
        for name in self.blocks:
            if not name or not isinstance(name, str):
                raise ModelError("a block's name must be a non-empty text", code="block-name", where="model.blocks",
                                 value=name, remedy="Name each block, for example 'layer3.mlp'.")

    def build(self) -> nn.ModuleDict:
        """All blocks in one process, with the builders' initial values: for references and exports."""
        return nn.ModuleDict({name.replace(".", "__"): build() for name, build in self.blocks.items()})


def all_like_first(layers: Sequence[Sequence[str]]) -> dict[str, str]:
    """`Model.alike` if all layers are like the first."""
    return {block: first for layer in layers[1:] for block, first in zip(layer, layers[0], strict=True)}


def alike_by_kind(kinds: Mapping[str, Hashable]) -> dict[str, str]:
    """`Model.alike` if blocks of one kind are alike. kinds: of each block, in order."""
    first: dict[Hashable, str] = {}
    return {name: earlier for name, kind in kinds.items() if (earlier := first.setdefault(kind, name)) != name}


def frozen_prefix(model: Model, num_layers: int) -> int:
    """Number of blocks that are frozen with the first `num_layers` layers (see `ranvier.layout.frozen_blocks`).
    Raises ModelError if the model does not declare its layers, or has fewer."""
    if not 0 <= num_layers <= len(model.layers):
        raise ModelError(f"is not a number of layers that the model has ({len(model.layers)})",
                         code="frozen-layers-count", where="frozen layers", value=num_layers,
                         remedy="Freeze fewer layers, or declare them: Model(layers=...).")
    return frozen_blocks(model.layers, list(model.blocks), num_layers)


def untrained_layers(model: Model) -> int:
    """Number of leading layers without trainable parameters, for example with adapters in the upper layers only.
    Freezing them changes nothing."""
    names, trains = list(model.blocks), len(model.blocks)
    for place, build in enumerate(model.blocks.values()):
        with meta_device():
            if any(parameter.requires_grad for parameter in build().parameters()):
                trains = place
                break
    return max(depth for depth in range(len(model.layers) + 1) if frozen_blocks(model.layers, names, depth) <= trains)


def still_frozen(model: Model, num_layers: int) -> int:
    """Number of layers, of the first `num_layers`, which are frozen, that must stay frozen, because with fewer a tie
    that has ended would be restored."""
    ended = _ties_with_frozen(model, num_layers)[:2]
    return min(depth for depth in range(num_layers + 1) if _ties_with_frozen(model, depth)[:2] == ended)


def freeze(model: Model, num_layers: int, above: Sequence[int] = ()) -> Model:
    """Return the model with its first layers (see `frozen_prefix`) frozen, and the weights of the layers in `above`.
    Raises ModelError if one of these shares a weight with a trainable block.

    A tie between parameters that freeze at different depths, or never, ends when the first of them freezes. That one
    keeps its values, and the others continue with separate weights (`Model.untied`), which start from the tied values;
    in a model without `initial`, and without a state to load, from those of their builders. A tie of parameters that
    are not trained anyway stays, as with adapters.
    """
    names = {*list(model.blocks)[:frozen_prefix(model, num_layers)]}
    for layer in above:
        names |= _blocks_above(model, num_layers, layer)
    tied, untied, copied = _ties_with_frozen(model, num_layers)
    alike = alike_by_kind({name: (model.alike.get(name, name), name in names) for name in model.blocks})
    return replace(model, alike=alike, tied=tied, untied=untied, blocks={
        **model.blocks, **{name: partial(_build_frozen, model.blocks[name], copied.get(name, ())) for name in names}})


def without_gradients(model: Model) -> Model:
    """Return the model for forwards only: none of its parameters trains, so no rank allocates gradients."""
    return replace(model, blocks={name: partial(_build_frozen, build, ()) for name, build in model.blocks.items()})


def _blocks_above(model: Model, num_layers: int, layer: int) -> set[str]:
    """The blocks of a layer above the first trainable one, `num_layers`. Raises ModelError if it is not such a layer,
    or shares a weight with other blocks."""
    if not num_layers < layer < len(model.layers):
        raise ModelError(f"is not a layer above the first one that trains, {num_layers}, of {len(model.layers)} layers",
                         code="frozen-above-layer", where="frozen_above", value=layer,
                         remedy="Count the first layers in `frozen`.")
    blocks = set(model.layers[layer])
    for name in (name for group in model.tied for name in group):
        if any(name.startswith(f"{block}.") for block in blocks):
            raise ModelError(f"has a weight that other blocks share, {name}, and can freeze only with all layers "
                             "before it", code="frozen-shared-weight", where=f"layer {layer}",
                             remedy="Let the freeze policy return a number of layers.")
    return blocks


def _build_frozen(build: Callable[[], nn.Module], copied: Sequence[str]) -> nn.Module:
    """Build a frozen block. copied: parameters that it shares with another block, which may be trainable."""
    module = build()
    for name in copied:
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, nn.Parameter(module.get_parameter(name).detach().clone()))
    return module.requires_grad_(False)


def _ties_with_frozen(model: Model, num_layers: int) -> tuple[
        tuple[tuple[str, ...], ...], dict[str, str], dict[str, list[str]]]:
    """`Model.tied` and `Model.untied` with the first layers frozen, and block -> its frozen parameters that are the
    same object as one of another group. Which ends stay together depends only on depths, not on when layers froze."""
    blocks = list(model.blocks)
    counts = [frozen_blocks(model.layers, blocks, depth) for depth in range(len(model.layers) + 1)]
    tied: list[tuple[str, ...]] = []
    untied, copied = dict(model.untied), dict[str, list[str]]()
    for group in model.tied:
        parts: dict[int, list[str]] = {}
        for name in group:
            place = next((place for place, block in enumerate(blocks) if name.startswith(f"{block}.")), len(blocks))
            depth = sum(count <= place for count in counts)  # frozen layers from which on it is frozen
            parts.setdefault(min(depth, num_layers + 1), []).append(name)
        parameters = _parameters_of(model, group) if len(parts) > 1 else {}
        if not any(parameter.requires_grad for parameter in parameters.values()):
            tied.append(group)
            continue
        for depth, part in parts.items():
            tied += [tuple(part)] if len(part) > 1 else []
            if part[0] != group[0]:
                untied[part[0]] = group[0]
            others = {parameters[name] for name in group if name in parameters and name not in part}
            for name in part if depth <= num_layers else ():
                if parameters.get(name) in others:
                    block = next(block for block in blocks if name.startswith(f"{block}."))
                    copied.setdefault(block, []).append(name.removeprefix(f"{block}."))
    return tuple(tied), untied, copied


def _parameters_of(model: Model, names: Sequence[str]) -> dict[str, nn.Parameter]:
    """These parameters, without storage if their blocks are built lazily; names that no block has are left out."""
    found: dict[str, nn.Parameter] = {}
    for block, build in model.blocks.items():
        if any(name.startswith(f"{block}.") for name in names):
            with meta_device():
                parameters = dict(build().named_parameters(remove_duplicate=False))
            found |= {name: parameters[inner]
                      for name in names if (inner := name.removeprefix(f"{block}.")) in parameters}
    return found


def as_model(model: Model | Modules, loss: Loss | None) -> Model:
    """Convert any list of blocks to a `Model`. Parameters that two blocks share are declared as tied. A loss with
    parameters or buffers becomes an additional last block.

    Raises ModelError for anything else, and if the loss is missing or given twice.
    """
    if isinstance(model, Model):
        if loss is not None:
            raise ModelError("was given although the Model has one", code="loss-given-twice", where="loss",
                             remedy="Leave the loss out, or build the Model with it.")
        return _with_loss_block(model)
    if loss is None:
        raise ModelError("is missing", code="loss-missing", where="loss",
                         remedy="Pass loss=f with f(output, targets) -> (sum of losses, number of valid targets).")
    if isinstance(model, nn.Module):
        modules = dict(_modules_of(model))
    elif isinstance(model, Mapping):
        modules = dict(model)
    elif isinstance(model, Sequence):
        modules = {str(index): module for index, module in enumerate(model)}
    else:
        raise ModelError("is not a list of blocks", code="model-not-blocks", where="model", value=type(model).__name__,
                         remedy="Pass a ranvier.Model, an nn.Sequential, a list of modules, or a dict of them.")
    for name, module in modules.items():
        if not isinstance(module, nn.Module):
            raise ModelError("is not an nn.Module", code="block-not-module", where=f"block {name}",
                             value=type(module).__name__,
                             remedy="Wrap plain functions in a module with a forward method.")
    if _has_state(loss):
        modules[_free_name(modules)] = LossBlock(loss)
    tied = names_of_same_tensor(pair for name, module in modules.items()
                                for pair in module.named_parameters(prefix=name))
    return Model(blocks={name: partial(_existing_block, module) for name, module in modules.items()}, loss=loss,
                 tied=tied)


def _modules_of(model: nn.Module) -> Mapping[str, Any]:
    """The modules of a container that is used as a list of blocks. Raises ModelError for any other module."""
    if not isinstance(model, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        raise ModelError("is not a list of blocks", code="module-not-blocks", where="model", value=type(model).__name__,
                         remedy="Pass ranvier.blocks_of(model), or a list of modules that are called one after the "
                                "other.")
    if lost := contents_besides_modules(model):
        remedy = "Pass ranvier.blocks_of(model), which takes a module with its own forward."
        if type(model) in CONTAINERS:
            remedy = "Give these to its modules, or to a module around it that ranvier.blocks_of takes."
        raise ModelError(f"has more than modules, which blocks would lose: {', '.join(lost)}",
                         code="model-holds-more-than-modules", where="model", value=type(model).__name__, remedy=remedy)
    return model._modules  # named_children() leaves out the second occurrence of a module


CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Only exactly these classes are split into their modules: a subclass may do anything."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module with hooks that run when it is called, which do not run for its parts."""


def contents_besides_modules(container: nn.Module) -> list[str]:
    """What a module has besides its submodules, which would be lost if they replaced it; empty for a plain
    container."""
    found = [] if type(container) in CONTAINERS else [f"the class {type(container).__name__}"]
    found += ["a forward"] if "forward" in vars(container) else []
    found += [f"the parameter {name}" for name, parameter in container._parameters.items() if parameter is not None]
    found += [f"the buffer {name}" for name, buffer in container._buffers.items() if buffer is not None]
    return found + [name.strip("_").replace("_", " ") for name in HOOKS if getattr(container, name)]


def existing_blocks(model: Model) -> dict[str, nn.Module]:
    """The existing blocks of a model that was given as modules, without what other builders add."""
    found: dict[str, nn.Module] = {}
    for block, build in model.blocks.items():
        while isinstance(build, partial) and build.func is not _existing_block and build.args:
            build = build.args[0]
        if isinstance(build, partial) and build.func is _existing_block:
            found[block] = build.args[0]
    return found


def keep_names(whole: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Record in each block of `whole` the names of its parameters and buffers there, for `names_in_whole`."""
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(whole):
        names.setdefault(id(tensor), []).append(name)
    for block in blocks:
        vars(block)["names_in_whole"] = {name: tuple(names.get(id(tensor), ()))
                                         for name, tensor in named_tensors(block)}


def names_in_whole(model: Model) -> dict[str, tuple[str, ...]]:
    """"block.parameter", and "block.buffer" -> its names in the module that the blocks were made of (`keep_names`), or
    in its block if it has several."""
    found: dict[str, tuple[str, ...]] = {}
    for block, module in existing_blocks(model).items():
        found |= {names[0]: names for names in names_of_same_tensor(
            (f"{block}.{name}", tensor) for name, tensor in named_tensors(module))}
        found |= {f"{block}.{name}": names for name, names in getattr(module, "names_in_whole", {}).items() if names}
    return found


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and all buffers, including those that are not saved: what a module computes also depends on
    them."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


class LossBlock(nn.Module):
    """A block that returns its input. It holds the loss, so that the loss's parameters are trained and its buffers are
    saved; its stage, the last one, computes the loss."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, state: State) -> State:
        """Return `state`."""
        return state


def _has_state(loss: Loss) -> TypeGuard[nn.Module]:
    """Whether a loss is a module with parameters or buffers."""
    return isinstance(loss, nn.Module) and any(True for _ in chain(loss.parameters(), loss.buffers()))


def _free_name(blocks: Collection[str]) -> str:
    """An unused name for the block of a loss."""
    name = "loss"
    while name in blocks:
        name += "_"
    return name


def _with_loss_block(model: Model) -> Model:
    """Return the model with a block for its loss, if that has parameters or buffers, and no block yet."""
    if not _has_state(model.loss):
        return model
    with meta_device():
        last = list(model.blocks.values())[-1]()
    if isinstance(last, LossBlock):
        return model
    if model.initial is not None:
        raise ModelError("has parameters or buffers, which Model(initial=...) does not initialise",
                         code="loss-with-parameters", where="loss", value=type(model.loss).__name__,
                         remedy="Leave `initial` out, or move them into the last block.")
    return replace(model, blocks={**model.blocks, _free_name(model.blocks): partial(
        _existing_block, LossBlock(model.loss))})


def _existing_block(module: nn.Module) -> nn.Module:
    """The builder of an existing block."""
    return module


def names_of_same_tensor(named: Iterable[tuple[str, Tensor]]) -> tuple[tuple[str, ...], ...]:
    """Groups of names that stand for the same tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


@torch.no_grad()
def initialise(parameter: Tensor, name: str, initial: Initial, seed: int,
               shape: Sequence[int] | None = None, box: Sequence[tuple[int, int]] | None = None) -> None:
    """Fill `parameter` with its initial values: `box` (by default all) of a parameter of `shape`, piece by piece.

    The numbers are drawn on the parameter's device.
    """
    if initial.kind == "constant":
        parameter.fill_(initial.scale)
        return
    shape = tuple(parameter.shape if shape is None else shape)
    box = [(0, size) for size in shape] if box is None else list(box)
    key = keyed_random.key("initial", seed, name)
    draw = keyed_random.normal if initial.kind == "normal" else keyed_random.signed_uniform
    if not shape:
        parameter.copy_(draw(key, torch.zeros((), dtype=torch.int64, device=parameter.device)) * initial.scale)
        return
    if box[1:] == [(0, size) for size in shape[1:]] and parameter.is_contiguous():  # full rows: one range of numbers
        width = prod(shape[1:])
        shape, box, parameter = (shape[0] * width,), [(box[0][0] * width, box[0][1] * width)], parameter.view(-1)
    first, last = box[0]
    width = max(1, parameter.numel() // max(1, last - first))
    rows = max(1, INITIAL_PIECE.get(parameter.device.type, INITIAL_PIECE["cpu"]) // width)
    for start in range(first, last, rows):
        stop = min(start + rows, last)
        index = keyed_random.global_index(shape, [(start, stop), *box[1:]], parameter.device)
        parameter[start - first:stop - first].copy_(draw(key, index) * initial.scale)


class _NoInitialValues(TorchFunctionMode):
    """Leaves tensors on the meta device as they are instead of filling them."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__wrapped__", func) in _FILLS:  # engines wrap those of torch.nn.init
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


_FILLS = {Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.constant_,
          nn.init.kaiming_uniform_}


@contextmanager
def meta_device() -> Iterator[None]:
    """Context in which built blocks have no storage, as under `torch.device("meta")`, and no initial values.

    Torch draws numbers on the meta device in Python, which takes longer than the rest of building a block, and loads
    its compiler for the first ones, which takes a second.
    """
    with torch.device("meta"), _NoInitialValues():
        yield


# --- the carried state ------------------------------------------------------------------------------------------------


def as_named_tensors(state: object, where: str, *, is_input: bool = False) -> dict[str, Tensor]:
    """Convert a carried state to named tensors. A single tensor has the name "", and anything but a tensor or a dict of
    named tensors is packed (`sent_values`). Raises ModelError if that is not possible, or if there is no tensor.
    is_input: whether the program gives it, and not a block."""
    if isinstance(state, Tensor):
        return {"": state}
    if type(state) is dict and state and all(
            isinstance(name, str) and name and not name.startswith(_PACKED) and isinstance(tensor, Tensor)
            for name, tensor in state.items()):
        return state
    try:
        packed = pack("", state, ())
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(state)):
            return packed
    except NotSent:
        pass
    if is_input:
        raise ModelError(f"must be a tensor, or {SENT}, with at least one tensor{_unsendable_part(state)}",
                         code="inputs-type", where=where, value=type(state).__name__,
                         remedy="Give other values as tensors, such as torch.tensor(0.5) or torch.from_numpy(array).")
    odd, hint = _unsendable_part(state), dataclass_hint(state)
    remedy = ("Return it as a tensor, such as torch.tensor(0.5), or leave it out." if odd and not hint else
              f"Return the carried state that the next block takes, such as a tuple or a dict{hint}.")
    if isinstance(state, Mapping) and (line := wrapping_hint(state)) is not None:
        remedy = f"{line}."
    raise ModelError(f"must return a tensor, or {SENT}, with at least one tensor{odd}",
                     code="block-output-type", where=where, value=type(state).__name__, remedy=remedy)


def from_named_tensors(tensors: Mapping[str, Tensor]) -> State:
    """The inverse of `as_named_tensors`."""
    if "" in tensors:
        return tensors[""]
    packed: State = unpack("", tensors, "") if any(name.startswith(_PACKED) for name in tensors) else dict(tensors)
    return packed


_PACKED = "|"
"""Prefix of the names of packed values."""


def wrapping_hint(state: object) -> str | None:
    """The line by which a wrapping module takes a tensor out of a module's output; None if the output is already a
    tensor, or holds none."""
    taken = _tensor_in(state)
    return None if taken is None else ("Wrap it in a module with the line: def forward(self, state): return "
                                       f"self.module(state){taken}")


def _tensor_in(state: object) -> str | None:
    """The expression that takes a tensor out of what a module returned: [0] of nn.LSTM's tuple, or ["logits"]."""
    if isinstance(state, (tuple, list)):
        places = [f"[{place}]" for place, value in enumerate(state) if isinstance(value, Tensor)]
    elif isinstance(state, Mapping) and type(state) is not dict:
        places = [f'["{name}"]' for name, value in state.items() if isinstance(value, Tensor)]
    else:
        places = []
    return next(iter(places), None)


def _unsendable_part(state: object) -> str:
    """Description of the part of `state` that cannot be sent."""
    for path, leaf in tree_leaves_with_path(state):
        try:
            pack("", leaf, [torch.empty(1)])
        except NotSent:
            return f"; {keystr(path)} is a {type(leaf).__name__}" if path else ""
    return ""
