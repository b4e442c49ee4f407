"""Traces the parts of a module's forward that are around given submodules with torch.fx.

torch.fx runs the forward with symbolic values. Anything that would make the graph differ silently from the forward is
refused: conditions, types, loops over values, modes that the graph does not record, stored values, and random numbers
from Python or NumPy. Calls of torch functions without traced arguments, such as torch.rand(3), are part of the graph,
too.
"""

from __future__ import annotations

import ast
import dis
import linecache
import operator
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property

from ranvier.block import HOOKS
from ranvier.errors import ModelError, RanvierError
from ranvier.originals.read_attributes import Reads, reads_of, variables_of

REMEDY = ("Move this code into the forward of a submodule: modules without a cut inside are not traced "
          "(docs/own-model.md).")


_CONSTANT = "uses a tensor that is neither computed from its inputs nor a module's"

_ALONE = threading.Lock()
"""Held while tracing: torch.fx then patches the call of all modules of the process, and ranks may be threads."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The graph of a forward. starts: names of the blocks; a node's meta["block"] is the number of its block. reads:
    attributes whose values it contains."""

    graph: fx.Graph
    starts: list[str]
    reads: Reads


class _Value(fx.Proxy):
    """A symbolic value. Code that asks for its type is refused: the actual value has another type."""

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    @property  # type: ignore[misc]  # it is only read
    def __class__(self) -> Any:
        frame = sys._getframe(1)
        caller = frame.f_globals.get("__name__", "")
        if not caller.startswith(("torch.", "ranvier.")) and _running(frame).startswith("isinstance("):
            raise fx.proxy.TraceError("depends on the type of a value")
        return _Value  # also for argument parsers, which have no frame


def _inplace_operator(operation: str, value: Any, other: Any) -> Any:
    """`value += other`, and the like. fx would emit the operator itself as a statement, which changes a number for all
    its users."""
    return getattr(operator, operation)(value, other)


def _out_of_place(operation: str, value: Any, other: Any) -> Any:
    """`value += other`, and the like, as a new value of the same number format."""
    found = getattr(operator, f"__{operation.removeprefix('i')}__")(value, other)
    return found.to(value.dtype) if isinstance(value, Tensor) else found


def _traced_in_place(operation: str) -> Callable[[_Value, Any], fx.Proxy]:
    return lambda value, other: value.tracer.create_proxy(
        "call_function", _inplace_operator, (operation, value, other), {})


for _operation in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift",
                   "irshift"):
    setattr(_Value, f"__{_operation}__", _traced_in_place(_operation))


class _Tracer(fx.Tracer):
    """Traces modules that have a cut inside, and notes where blocks begin."""

    proxy_buffer_attributes = True

    def __init__(self, cuts: Sequence[str], inputs: Sequence[str], output: Callable[[Any], Any]) -> None:
        super().__init__()
        self._cuts, self._inputs, self._output = set(cuts), inputs, output
        self.starts = [""]
        self.calls: dict[str, int] = {}
        self._called = False
        self._modes, self._thread = _modes(), threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(name.startswith(f"{module_qualified_name}.") for name in self._cuts)

    def create_args_for_root(self, root_fn: Callable[..., Any], is_module: bool,
                             concrete_args: object = None) -> tuple[Any, list[Any]]:
        def forward() -> Any:
            return self._output(self.root.forward(**values))

        values = {name: self.create_proxy("placeholder", name, (), {}) for name in self._inputs}
        return forward, []

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...],
                    kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:  # another rank's thread, which is running its modules
            return forward(*args, **kwargs)
        self._check_modes()
        name = self.path_of_module(m)
        if name in self._cuts:
            self.calls[name] = self.calls.get(name, 0) + 1
            if self._called:
                self.starts.append(name)
            else:
                self.starts[-1] = name  # operations before the first module are not a separate block
        if self.is_leaf_module(m, name):
            self.starts[-1] = self.starts[-1] or name
            self._called = True
        return super().call_module(m, forward, args, kwargs)

    def _check_modes(self) -> None:
        if _modes() != self._modes:
            raise fx.proxy.TraceError("switches gradients or autocast on or off")

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        self._check_modes()
        node = super().create_node(*args, **kwargs)
        node.meta["block"] = len(self.starts) - 1
        return node

    def create_arg(self, a: Any) -> Any:
        found = super().create_arg(a)
        if isinstance(a, Tensor) and isinstance(found, fx.Node) and str(found.target).startswith("_tensor_constant"):
            raise fx.proxy.TraceError(_CONSTANT)
        return found

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        frame = sys._getframe(2)
        expected = _without_error(frame)
        if expected is None:
            raise fx.proxy.TraceError("depends on a value")
        holds = obj if expected else self.create_proxy("call_function", operator.not_, (obj,), {})
        self.create_proxy("call_function", torch._assert, (holds, _line(frame, frame.f_lineno)), {})
        return expected


class _Recorder(TorchFunctionMode):
    """Records calls of torch functions that take no traced value, such as torch.rand(3), and parts of plain tensors up
    to a traced size: self.table[:x.shape[1]]."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if func is Tensor.__getitem__ and _is_traced(args[1]):
            return self._tracer.create_proxy("call_function", operator.getitem, args, {})
        if isinstance(func, type) or is_tensor_method_or_property(func) or func is torch._C._set_grad_enabled:
            return func(*args, **kwargs or {})
        return self._tracer.create_proxy("call_function", func, args, kwargs or {})


def _is_traced(index: Any) -> bool:
    """Whether a traced value is part of an index."""
    found: list[Any] = []
    fx.node.map_aggregate(index, found.append)
    return any(type(one) is _Value for one in found)


def _free_given_values(graph: fx.Graph) -> None:
    """Make in-place operators on an earlier block's value out of place, if no value that may share its memory is used
    afterwards: neither those that it was computed from, nor those computed from them or from it."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        value = node.args[1] if node.target is _inplace_operator else None
        if not isinstance(value, fx.Node) or (value.meta["block"] == node.meta["block"] and value.op != "placeholder"):
            continue
        related = {value}
        for neighbours in (lambda node: node.all_input_nodes, lambda node: [*node.users]):
            waiting = [*related]
            while waiting:
                new = {neighbour for neighbour in neighbours(waiting.pop()) if neighbour is not node} - related
                related |= new
                waiting += new
        if all(order[user] <= order[node] for neighbour in related if order[neighbour] < order[node]
               for user in neighbour.users):
            node.target = _out_of_place


_SIZES_ONE_BY_ONE = ("ones", "zeros", "empty", "rand", "randn")
"""Functions of torch that take a size as one tuple or as single numbers; only a tuple may contain traced numbers."""


def _join_sizes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with traced sizes that are given as single numbers passed as one tuple."""
    def call(*size: Any, **options: Any) -> Any:
        return function(size, **options) if any(type(one) is _Value for one in size) else function(*size, **options)
    return call


@contextmanager
def _sizes_joined() -> Iterator[None]:
    plain = {name: getattr(torch, name) for name in _SIZES_ONE_BY_ONE}
    try:
        for name, function in plain.items():
            setattr(torch, name, _join_sizes(function))
        yield
    finally:
        for name, function in plain.items():
            setattr(torch, name, function)


def _modes() -> tuple[bool, ...]:
    """Modes that a graph does not record."""
    return torch.is_grad_enabled(), *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


_DRAWING_TRACES = 5
"""Number of traces that must draw numbers before the module is blamed: another thread may have drawn in one."""


def _random_states() -> tuple[object, ...]:
    """States of the generators whose numbers a graph does not record."""
    parts = numpy.random.get_state(legacy=False)["state"].values()
    return random.getstate(), *(part.tobytes() if isinstance(part, numpy.ndarray) else part for part in parts)


def _without_error(frame: FrameType) -> bool | None:
    """The value of the condition evaluated by `frame` for which the code does not raise: for an assertion, or for an
    `if` or `elif` whose first branch only raises. None for other conditions."""
    if not any("JUMP" in instruction.opname
               for instruction in dis.get_instructions(frame.f_code) if instruction.offset == frame.f_lasti):
        return None
    for node in ast.walk(ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))):
        raises = isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise)
        if isinstance(node, ast.If | ast.Assert) and (raises or isinstance(node, ast.Assert)) and (
                node.test.lineno <= frame.f_lineno <= (node.test.end_lineno or 0)):
            values = set(_operand_values(node.test, not raises))
            return values.pop() if len(values) == 1 else None
    return None


def _operand_values(test: ast.expr, value: bool) -> Iterator[bool | None]:
    """The values of all operands of `test` for which it has `value`; None for those that are not determined."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _operand_values(test.operand, not value)
    elif isinstance(test, ast.BoolOp):
        for operand in test.values if isinstance(test.op, ast.And) == value else ():
            yield from _operand_values(operand, value)
        if isinstance(test.op, ast.And) != value:
            yield None
    else:
        chained = isinstance(test, ast.Compare) and len(test.ops) > 1 and not value
        yield None if chained or any(isinstance(node, ast.IfExp) for node in ast.walk(test)) else value


def _running(frame: FrameType) -> str:
    """The source of the expression that `frame` evaluates, up to the end of its first line."""
    line, _, column, _ = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    text = linecache.getline(frame.f_code.co_filename, line or 0).encode()
    return text[column or 0:].decode(errors="replace").strip()


def _line(frame: FrameType, number: int) -> str:
    """The line of this number in the file of `frame`, with its place."""
    file = frame.f_code.co_filename
    return f"{Path(file).name}:{number}: {linecache.getline(file, number).strip()}"


def trace_forward(module: nn.Module, cuts: Sequence[str], inputs: Sequence[str], output: Callable[[Any], Any],
                  training: bool, strict: bool) -> Trace:
    """Trace in one mode. strict: refuse cuts that are not called exactly once; otherwise ignore them."""
    tracer = _Tracer(cuts, inputs, output)
    traced = [(name, submodule) for name, submodule in module.named_modules()
              if not tracer.is_leaf_module(submodule, name) or submodule is module]
    for name, one in traced:
        one.training = training
        if any(getattr(one, hooks) for hooks in HOOKS):
            raise ModelError("has hooks, which its blocks would not call", code="cut-module-with-hooks",
                             where=name or type(module).__name__,
                             remedy="Remove them, or register them on submodules without a cut inside.")
    for _ in range(_DRAWING_TRACES):
        tracer = _Tracer(cuts, inputs, output)
        try:
            with _ALONE, _sizes_joined(), reads_of(module.named_modules()) as reads, _Recorder(tracer):
                states = _random_states()
                graph = tracer.trace(module)
                _free_given_values(graph)
                draws = _random_states() != states
        except RanvierError:
            raise
        except Exception as error:
            raise _untraceable(module, error) from error
        if not draws:
            break
    else:
        raise ModelError("draws random numbers of Python or NumPy, which would be constants in its blocks",
                         code="forward-draws-numbers", where=f"forward of {type(module).__name__}",
                         remedy=f"Draw them with torch.rand or similar. Or m{REMEDY[1:]}")
    wrong = {name: tracer.calls.get(name, 0) for name in cuts if tracer.calls.get(name, 0) != 1}
    if not wrong:
        reads |= variables_of([value() for value in reads.values()])  # of forwards, and methods that they call
        return Trace(graph=graph, starts=tracer.starts, reads=reads)
    if not strict:
        return trace_forward(module, [name for name in cuts if name not in wrong], inputs, output, training, strict)
    name, count = next(iter(wrong.items()))
    raise ModelError(f"is called {count} times, and a block begins where a submodule is called once" if count else
                     "is not called", code="cut-not-called-once", where="cut", value=name,
                     remedy="Cut at another submodule.")


def _untraceable(module: nn.Module, error: Exception) -> ModelError:
    """The error for code that could not be traced, with its place."""
    own = [frame for frame, _ in traceback.walk_tb(error.__traceback__)
           if not frame.f_globals.get("__name__", "").startswith(("torch.", "ranvier."))]
    lines = [_line(*place) for place in traceback.walk_tb(error.__traceback__) if own and place[0] is own[-1]]
    where = lines[-1] if lines else f"forward of {type(module).__name__}"
    reason = str(error) if isinstance(error, fx.proxy.TraceError) else f"{type(error).__name__}: {error}"
    reason = reason.partition("\n")[0].partition(". ")[0]
    names = {id(submodule): name for name, submodule in module.named_modules()}
    traced = [names[id(frame.f_locals["self"])] for frame, _ in traceback.walk_tb(error.__traceback__)
              if frame.f_code.co_name == "forward" and id(frame.f_locals.get("self")) in names]
    inner = traced[-1] if traced else ""
    code = f"the code of {inner}" if inner else "this code"
    better = "Write x.shape[0] instead of len(x). Otherwise m" if "'len'" in reason else (
        "Make a constant a buffer (self.register_buffer), and return values that a submodule computes. Otherwise m"
        if reason == _CONSTANT else "M")
    return ModelError(f"cannot be cut into blocks, because {code} is traced without values ({reason})",
                      code="forward-not-traceable", where=where,
                      remedy=f'Cut at "{inner}" itself, which is then called unchanged. Or m{REMEDY[1:]}' if inner else
                      better + REMEDY[1:])


@contextmanager
def refuse_changes(module: nn.Module) -> Iterator[None]:
    """Afterwards, restore attributes of all submodules, buffers, and contents of lists, dicts and sets. ModelError if
    the traced code has changed one, other than a mode: in a graph the change would be a constant, or lost."""
    before = [(submodule, name, container, kind(container)) for submodule in module.modules()
              for name, container in [("", vars(submodule)), *vars(submodule).items()]
              for kind in (dict, list, set) if isinstance(container, kind)]
    try:
        yield
        for one, name, container, contents in before:
            changed = {str(key) for key, *_ in _entries(container) ^ _entries(contents)} - {"training"}
            if changed:
                attribute = name if name and not name.startswith("_") else min(changed)  # the buffer in `_buffers`
                raise ModelError("is changed by the forward; in its blocks the change would be a constant, or lost",
                                 code="forward-stores-attribute", where=f"{type(one).__name__}.{attribute}",
                                 remedy=REMEDY)
    finally:
        for _, _, container, contents in before:
            if _entries(container) != _entries(contents):  # unchanged ones may be of a kind that cannot be written
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(contents)


def _entries(container: dict[Any, Any] | list[Any] | set[Any]) -> set[tuple[Any, type, Any]]:
    """Entries of a container: numbers and strings by value, since storing an equal one changes nothing, and others by
    identity."""
    pairs = container.items() if isinstance(container, dict) else enumerate(container) if isinstance(
        container, list) else ((id(entry), entry) for entry in container)
    return {(key, type(value), value if isinstance(value, (int, float, str)) else id(value)) for key, value in pairs}
