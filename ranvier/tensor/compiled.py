"""Blocks compiled by torch.compile, each as one graph, with the queue of weight gradients outside of it.

A queue inside a compiled backward would keep tensors whose memory the compiler uses again. So the operands of the
deferred products are outputs of the two graphs:

    forward   state, taps -> state, x of each linear layer
    backward  dstate      -> dstate, dy of each linear layer, as the gradient of its tap

A tap is an input without values or memory that has the shape of the layer's output. Its own backward, outside of the
graph, has x and dy, and gives them to the queue as an uncompiled layer does. Shapes of taps come from one run of the
block on fake tensors (shapes without memory) for each shape of its inputs.

Keys of dropout masks are inputs of the graph, too, so that a new step does not recompile. Blocks with the same
computation share their code, and a second shape makes the code independent of sizes.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ranvier import keyed_random
from ranvier.block import State, as_named_tensors
from ranvier.errors import ModelError
from ranvier.system.compilation import watch
from ranvier.tensor import float8
from ranvier.tensor.autograd import Function
from ranvier.tensor.deferred_linear import DeferringForwards, add_gradients, is_deferrable
from ranvier.tensor.state_snapshot import StateSnapshot
from ranvier.tensor.weight_gradients import WeightGradients

Backend = str | Callable[..., Any]
"""A backend of torch.compile."""
BACKEND: Backend = "inductor"

_NOT_FAKE = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException,
             fake_tensor.UnsupportedFakeTensorException, fake_tensor.UnsupportedOperatorException)
_OFTEN = torch._dynamo.exc.FailOnRecompileLimitHit
_CANNOT = (*_NOT_FAKE, _OFTEN, torch._dynamo.exc.TorchDynamoException)


@dataclass(eq=False)
class _Call:
    """Inputs and outputs of a block's linear layers in one forward."""

    taps: Sequence[Tensor] = ()
    inputs: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Shapes:
    """Properties of a block for inputs of certain shapes: its deferrable products with their outputs' shapes, and the
    number of its dropout calls."""

    products: tuple[tuple[nn.Linear, tuple[int, ...]], ...]
    sites: int


class _Operand:
    """The input of one linear layer, which is known after the forward."""

    x: Tensor | None = None


class _Tap(Function):
    """An input of the graph whose gradient is dy; its backward computes or defers the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, bias: nn.Parameter | None, shape: Sequence[int], operand: _Operand,
                gradients: WeightGradients, in_float8: bool = False) -> Tensor:
        ctx.weight, ctx.bias, ctx.operand, ctx.gradients = weight, bias, operand, gradients
        ctx.in_float8 = in_float8
        return weight.new_zeros(()).expand(shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x, ctx.operand.x = ctx.operand.x, None  # freed now instead of with the graph
        if x is None:
            raise RuntimeError("a compiled block cannot run its backward twice: set --model.compile false")
        if ctx.gradients.in_pass():
            grown = [ctx.weight] if ctx.bias is None or not ctx.bias.requires_grad else [ctx.weight, ctx.bias]
            ctx.gradients.add(grown, (x, dy), partial(add_gradients, ctx.weight, ctx.bias,
                                                           in_float8=ctx.in_float8))
            return None, None, None, None, None, None
        rows, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        db = rows.sum(0) if ctx.needs_input_grad[1] else None
        dw = float8.weight_gradient(x, rows, ctx.weight.dtype) if ctx.in_float8 else rows.t().mm(x)
        return dw, db, None, None, None, None


class _TappedLinear(Function):
    """functional.linear inside the graph, where its weight and bias have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tap: Tensor, in_float8: bool) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.in_float8 = in_float8
        return float8.forward_product(x, weight, bias) if in_float8 else functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, Tensor, None]:
        weight, = ctx.saved_tensors
        return float8.input_gradient(dy, weight) if ctx.in_float8 else dy.matmul(weight), None, None, dy, None


def _tapped_forward(module: nn.Linear, input: Tensor) -> Tensor:
    """The forward of a deferrable layer in the graph."""
    if torch.is_autocast_enabled(input.device.type):
        return functional.linear(input, module.weight, module.bias)
    call: _Call = module.__dict__["_compiled_call"]
    tap = call.taps[len(call.inputs)]
    call.inputs.append(input.detach())  # an output with a gradient would get zeros, to be added
    return _TappedLinear.apply(input, module.weight.detach(), None if module.bias is None else module.bias.detach(),
                               tap, torch.is_grad_enabled() and bool(module.__dict__["_compiled_float8"]))


def _float8_forward(module: nn.Linear, input: Tensor) -> Tensor:
    """The forward, inside the graph, of a float8 layer whose weight gradient is accumulated by autograd."""
    if (not (torch.is_grad_enabled() and module.weight.requires_grad)
            or torch.is_autocast_enabled(input.device.type)):
        return functional.linear(input, module.weight, module.bias)
    return float8.Float8Linear.apply(input, module.weight, module.bias)


def _recording_forward(record: Callable[[nn.Linear, Tensor, Tensor], None], module: nn.Linear, input: Tensor) -> Tensor:
    """The forward of a deferrable layer on fake tensors."""
    y = functional.linear(input, module.weight, module.bias)
    if not torch.is_autocast_enabled(input.device.type):
        record(module, input, y)
    return y


def _run(module: nn.Module, call: _Call, state: State, taps: Sequence[Tensor]) -> tuple[State, list[Tensor]]:
    """The graph."""
    call.taps, call.inputs = taps, []
    state = module(state)
    inputs, call.taps, call.inputs = call.inputs, (), []
    return state, inputs


class CompiledBlocks:
    """The compiled forwards of a stage's blocks.

    Args:
        how: True: a block that cannot be compiled is a ModelError; "auto": it runs uncompiled, with a warning.
        forwards: which layers' weight gradients may be deferred.
        recomputed: blocks whose forward runs again before their backward. Their graphs are dynamic in all sizes from
            the start: the second forward must not find a newer graph that another microbatch's size has caused.
        watched: names of blocks whose individual operations must be seen, which cannot be compiled.
    """

    def __init__(self, how: Literal[True, "auto"], gradients: WeightGradients, forwards: DeferringForwards,
                 recomputed: Collection[nn.Module] = (), watched: Collection[str] = ()) -> None:
        self._how, self._gradients, self._forwards, self._recomputed = how, gradients, forwards, set(recomputed)
        self._watched = watched
        self._compiled: dict[object, Callable[..., tuple[State, list[Tensor]]]] = {}
        self._alone: set[nn.Module] = set()
        """Blocks whose code has its own graphs: code shared by many blocks that differ in a number has too many."""
        self._shapes: dict[tuple[nn.Module, object], _Shapes] = {}
        self._call = _Call()
        watch()
        self.uncompiled: dict[nn.Module, str] = {}
        """Blocks that cannot be compiled, and why."""

    def __call__(self, module: nn.Module, name: str, state: State, scope: keyed_random.Scope) -> State:
        """`module(state)`, compiled. ModelError if compilation is required but not possible."""
        if name in self._watched and module not in self.uncompiled:
            self._cannot(module, name, NotImplementedError("its code reaches parameters of blocks of other stages"))
        if module in self.uncompiled:
            return module(state)  # type: ignore[no-any-return]
        try:
            with _without_wide_gradients(module):
                shapes = self._shapes_of(module, state, scope)
                scope.calls, scope.keys = 0, _site_keys(scope, shapes.sites, state)
                return self._run(module, state, shapes)
        except _CANNOT as error:
            if isinstance(error, _OFTEN) and module not in self._alone:
                self._alone.add(module)
                return self(module, name, state, scope)
            self._cannot(module, name, error if not isinstance(error, _OFTEN) else NotImplementedError(
                "it has a graph for each value of a number that its code reads, and there are too many"))
            scope.calls, scope.keys = 0, None
            return module(state)  # type: ignore[no-any-return]

    def _cannot(self, module: nn.Module, name: str, error: Exception) -> None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        if self._how is True:
            raise ModelError(f"cannot be compiled: {lines[0]}", code="block-not-compilable", where=f"block {name}",
                             value=type(module).__name__,
                             remedy="Set `--model.compile false`, or change the block so that torch.compile(block, "
                                    "fullgraph=True) takes it.") from error
        self.uncompiled[module] = lines[0]
        warnings.warn(f"block {name} runs uncompiled, because torch.compile cannot take it: {lines[0]} "
                      "(--model.compile true shows the whole error)", stacklevel=2)

    def _run(self, module: nn.Module, state: State, shapes: _Shapes) -> State:
        operands = [_Operand() for _ in shapes.products]
        taps = [_Tap.apply(linear.weight, linear.bias, shape, operand, self._gradients,
                           self._forwards.is_in_float8(linear))
                for (linear, shape), operand in zip(shapes.products, operands, strict=True)]
        kind = module in self._recomputed, module if module in self._alone else _kind_of(module)
        if kind not in self._compiled:
            self._compiled[kind] = torch.compile(_copy_of(_run), fullgraph=True, backend=BACKEND,
                                                 dynamic=True if module in self._recomputed else None)
        with self._install_forward(module, _tapped_forward if taps else None):
            result, inputs = self._compiled[kind](module, self._call, state, taps)
        for (_, shape), operand, x in zip(shapes.products, operands, inputs, strict=True):
            operand.x = x
            size = x.element_size()
            self._gradients.forward_bytes += x.numel() * size + torch.Size(shape).numel() * size
        return result

    @contextmanager
    def _install_forward(self, module: nn.Module, forward: Callable[..., Tensor] | None) -> Iterator[None]:
        """Inside, the block's deferrable layers have this forward, or (None) their own."""
        queued = self._forwards.layers_of(module)
        layers = [*queued, *(layer for layer in self._forwards.float8_forwards if layer in {*module.modules()})]
        before = [layer.__dict__.pop("forward", None) for layer in layers]
        for layer in layers[len(queued):]:
            layer.__dict__["forward"] = types.MethodType(_float8_forward, layer)
        for layer in queued:
            if forward is not None and is_deferrable(layer):
                layer.__dict__["_compiled_call"] = self._call
                layer.__dict__["_compiled_float8"] = self._forwards.is_in_float8(layer)
                layer.__dict__["forward"] = types.MethodType(forward, layer)
            elif self._forwards.is_in_float8(layer) and not is_deferrable(layer):
                layer.__dict__["forward"] = types.MethodType(_float8_forward, layer)
        try:
            yield
        finally:
            for layer, former in zip(layers, before, strict=True):
                layer.__dict__.pop("_compiled_call", None)
                layer.__dict__.pop("_compiled_float8", None)
                layer.__dict__.pop("forward", None)
                if former is not None:
                    layer.__dict__["forward"] = former

    def _shapes_of(self, module: nn.Module, state: State, scope: keyed_random.Scope) -> _Shapes:
        """`_Shapes` of a block for inputs like these and the parameters that are currently trained."""
        tensors = as_named_tensors(state, "the carried state")
        modes = tuple(submodule.training for submodule in module.modules())
        key = (module, (torch.is_grad_enabled(), modes, tuple(map(is_deferrable, self._forwards.layers_of(
            module))), tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())))
        if key not in self._shapes:
            self._shapes[key] = self._examine(module, state, scope)
        return self._shapes[key]

    def _examine(self, module: nn.Module, state: State, scope: keyed_random.Scope) -> _Shapes:
        products: list[tuple[nn.Linear, tuple[int, ...]]] = []
        seen: list[tuple[Tensor, int]] = []

        def record(layer: nn.Linear, x: Tensor, y: Tensor) -> None:
            products.append((layer, tuple(y.shape)))
            seen.append((x, x._version))

        mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())
        has_products = trains and any(map(is_deferrable, self._forwards.layers_of(module)))
        # A recomputed segment has none, and a graph of fake tensors would count as saved by the segment.
        with self._install_forward(module, partial(_recording_forward, record) if has_products else None), \
                _restore_block(module), mode, torch.set_grad_enabled(has_products):
            inputs = tree_map_only(Tensor, mode.from_tensor, state)
            before = _tensors(module)
            if trains:
                before |= {tensor: tensor._version for tensor in as_named_tensors(inputs, "the carried state").values()
                           if not tensor.requires_grad}
            reads = _Reads(as_named_tensors(inputs, "the carried state").values())
            with reads:
                module(inputs)
            found = _Shapes(tuple(products), scope.calls)
            after = _tensors(module)
            if after.keys() - before.keys():  # which a second forward may change in place
                with reads:
                    module(inputs)
        mode.allow_non_fake_inputs = False  # a fake tensor that the block has stored must not pass for real
        if any(x._version != version for x, version in seen):
            raise torch._dynamo.exc.Unsupported("the input of a linear layer is changed in place after the layer")
        # Torch up to 2.13 may use the new value in gradients of operations that read the old one. No counter is read.
        if any(tensor._version != version and (tensor.requires_grad or tensor not in before or reads.contains(tensor))
               for held in (before, after) for tensor, version in held.items()):
            raise torch._dynamo.exc.Unsupported("an input of the block, a buffer or another tensor that it has is "
                                                "changed in place instead of being replaced")
        return found


class _Reads(TorchDispatchMode):
    """Inside, records the tensors that operations read. known: tensors that are read anyway."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        TorchDispatchMode.__init__(self)
        self._memory = {*map(_memory_of, known)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        read = [given.get(argument.name) for argument in func._schema.arguments
                if argument.alias_info is None or not argument.alias_info.is_write]
        self._memory |= {_memory_of(leaf) for leaf in tree_leaves(read) if isinstance(leaf, Tensor)}
        return func(*args, **(kwargs or {}))

    def contains(self, tensor: Tensor) -> bool:
        """Whether one of the recorded tensors lies in the memory of `tensor`."""
        return _memory_of(tensor) in self._memory


def _memory_of(tensor: Tensor) -> int:
    """An identifier of its storage; for a sparse tensor, of the tensor itself."""
    try:
        number: int = tensor.untyped_storage()._cdata
    except RuntimeError:
        return id(tensor)
    return number


@contextmanager
def _without_wide_gradients(module: nn.Module) -> Iterator[None]:
    """Inside, parameters have no gradients of a dtype other than their own, such as fp32 for bf16: torch up to 2.13
    cannot make fake tensors of such parameters, and any call may compile."""
    wide = [(parameter, parameter.grad) for parameter in module.parameters() if parameter.grad is not None
            and parameter.grad.dtype != parameter.dtype]
    for parameter, _ in wide:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in wide:
            parameter.grad = gradient


def _site_keys(scope: keyed_random.Scope, sites: int, state: State) -> Tensor | None:
    """[sites, b] int64 on the device of the block, or None without dropout."""
    if not sites:
        return None
    device = next(iter(as_named_tensors(state, "the carried state").values())).device
    return torch.stack([scope.site_keys(site) for site in range(sites)]).to(device, non_blocking=True)


@contextmanager
def _restore_block(block: nn.Module) -> Iterator[None]:
    """Inside, a forward on fake tensors leaves the block's modules as they were: its assignments are undone afterwards,
    and its writes to buffers (operations without fake tensors are real) go to copies."""
    modules = list(block.modules())
    then, before = StateSnapshot(modules), [(module, dict(module._buffers)) for module in modules]
    copies = {id(buffer): buffer.clone() for _, buffers in before for buffer in buffers.values() if buffer is not None}
    for module, buffers in before:
        module._buffers.update({name: None if buffer is None else copies[id(buffer)]
                                for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for module, buffers in before:
            module._buffers.clear()
            module._buffers.update(buffers)
        then.restore()


def _tensors(block: nn.Module) -> dict[Tensor, int]:
    """The tensors of a block and their versions, except the statistics of norms, which have no gradients."""
    seen: set[int] = set()

    def again(one: Any) -> bool:  # a container that contains itself
        known = id(one) in seen
        seen.add(id(one))
        return known

    held = tree_leaves([vars(module) for module in block.modules() if not isinstance(module, _NormBase)],
                       is_leaf=again)
    return {tensor: tensor._version for tensor in held if isinstance(tensor, Tensor) and not tensor.is_inference()}


def _kind_of(module: nn.Module) -> object:
    """A key that is equal for blocks that may share their code. torch checks everything else that code depends on."""
    return type(module), module.training, tuple((name, parameter.shape, parameter.dtype, parameter.requires_grad)
                                                for name, parameter in module.named_parameters())


def _copy_of(function: Any) -> types.FunctionType:
    """The same function with its own code object: torch counts compilations for each code object."""
    copied = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__,
                                function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
