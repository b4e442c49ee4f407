"""`ColumnTensor`: a tensor that is sharded over the columns of a tensor mesh, with the sizes of the full tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, ClassVar, NoReturn, TypeVar, overload

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_map_only

from ranvier.errors import ModelError
from ranvier.tensor.columns.layout import ColumnLayout

Args = Sequence[Any]
"""Positional arguments of a torch function: whatever the caller gave."""
Kwargs = dict[str, Any]
Func = Callable[..., Any]

_T = TypeVar("_T")
_untracked = torch._C.DisableTorchFunctionSubclass
"""Inside it, torch functions do not call `__torch_function__` of subclasses."""


class ColumnTensor(Tensor):
    """A tensor of a split model on one of several columns. `mark` makes one, `plain` is the inverse.

    It has the sizes of the full tensor and no memory: `local`, an ordinary tensor, has this column's shard and its
    graph. Torch functions compute on `local` (`dispatch`). Code that bypasses them finds neither memory nor graph: an
    operation of torch's dispatcher is a ModelError, and the result of `autograd.Function.apply` has its own graph,
    which `plain` and `dispatch` refuse.
    """

    local: Tensor
    """This column's shard; the full tensor if it is replicated."""
    columns: ColumnLayout
    """Its layout over the columns."""
    dispatch: ClassVar[Callable[[Func, Args, Kwargs], Any]]
    """Computes a torch function and marks its results. The package binds it: the rules import this class."""

    @staticmethod
    def __new__(cls: type[ColumnTensor], local: Tensor, columns: ColumnLayout) -> ColumnTensor:
        sizes: Sequence[int] = local.shape
        if columns.dim is not None:  # `columns.whole_sizes`, without its calls
            sizes = list(sizes)
            sizes[columns.dim] = columns.size
        # It always requires a gradient, so that `Function.apply` gives its result a graph.
        x: ColumnTensor = Tensor._make_wrapper_subclass(
            cls, sizes, dtype=local.dtype, device=local.device,
            requires_grad=local.is_floating_point() or local.is_complex())
        torch._C._set_throw_on_mutable_data_ptr(x)  # its memory is a null pointer
        x.local, x.columns = local, columns
        return x

    @classmethod
    def __torch_function__(cls, func: Func, types: Iterable[type], args: Args = (),
                           kwargs: Kwargs | None = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # dynamo may leave the code to Python instead
            _refuse_compilation()
        with _untracked():
            return cls.dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls,  # type: ignore[override]
                           func: Func, types: Iterable[type], args: Args = (),
                           kwargs: Kwargs | None = None) -> Any:
        if func is torch.ops.aten.detach.default:  # hooks of saved tensors
            return ColumnTensor(args[0].local.detach(), args[0].columns)
        found = [tensor for tensor in tensors_in((*args, *(kwargs or {}).values())) if isinstance(tensor, ColumnTensor)]
        refuse(f"{func} is called past torch's Python functions (by vmap, jit, torch.tensor or a hook)",
               layouts_text(found), LOCAL_MAP)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ColumnTensor({self.columns.text(tuple(self.local.shape))}, {self.local!r})"

    def __format__(self, spec: str) -> str:
        return repr(self) if self.columns.dim is not None else format(self.local, spec)


@_disable_dynamo  # torch 2.11 cannot trace the raise of such an error
def _refuse_compilation() -> NoReturn:
    raise ModelError("is traced by torch.compile, which cannot follow layouts over columns",
                     code="columns-under-compile", where="a tensor between layers",
                     remedy="Compile only each column's own computation: local_map(compiled, x).")


def mark(x: Tensor, layout: ColumnLayout) -> ColumnTensor:
    """The tensor whose shard on this column is `x` (the full tensor, if `layout` is replicated). `x` is unchanged."""
    return ColumnTensor(x.local if isinstance(x, ColumnTensor) else x, layout)


def mark_all(result: _T, layout: ColumnLayout, changed: object = None) -> _T:
    """A torch function's result with every tensor marked. changed: the operand that the function may have changed in
    place, and then returns."""
    found: object = result
    if isinstance(result, Tensor):
        if isinstance(changed, ColumnTensor) and result is changed.local:
            if list(changed.size()) != (list(result.shape) if layout.dim is None else layout.whole_sizes(result.shape)):
                refuse("changes the sizes of a tensor in place", layouts_text([changed]),
                       "Use the form that returns a new tensor.")
            return changed  # type: ignore[return-value]
        found = ColumnTensor(result, layout)
    elif type(result) in (list, tuple):
        found = type(result)(mark_all(tensor, layout) for tensor in result)  # type: ignore[call-arg, attr-defined]
    elif isinstance(result, tuple):  # torch.return_types: topk, max
        found = type(result)([mark_all(tensor, layout) for tensor in result])
    return found  # type: ignore[return-value]


@overload
def plain(x: Tensor) -> Tensor: ...
@overload
def plain(x: _T) -> _T: ...
def plain(x: object) -> object:
    """`x`, a tensor or a tree of tensors, without layouts, as layers and the runtime compute with it."""
    if isinstance(x, ColumnTensor):
        refuse_own_graph(x)
        return x.local
    return x if isinstance(x, Tensor) else mapped(plain, x)


def refuse_own_graph(x: ColumnTensor, where: str | None = None) -> None:
    """Raise a ModelError for a result of an autograd.Function: its backward sees one column's shard alone. The graph of
    all other tensors is that of their shards.

    where: as in `refuse`.
    """
    with _untracked():
        graph = x.grad_fn
    if graph is not None:
        name = type(graph).__name__.removesuffix("Backward")
        what, remedy = _OF_TORCH.get(name, (f"the autograd.Function {name}", LOCAL_MAP))
        refuse(f"is the result of {what}, whose backward would compute from one column's shard", layouts_text([x]),
               remedy, where)


_OF_TORCH = {
    "CheckpointFunction": ("torch.utils.checkpoint with use_reentrant=True",
                           "Set use_reentrant=False, or let the engine recompute blocks: memory.recompute."),
    "BackwardHookFunction": ("a module with a backward hook",
                             "Leave the hook out: its gradients would be one column's."),
}
"""autograd.Functions of torch -> (what uses it, the remedy)."""


def on_local(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`call(x)`; for a `ColumnTensor`, `call` of this column's shard, which must keep its sizes and layout."""
    return mark(call(plain(x)), x.columns) if isinstance(x, ColumnTensor) else call(x)


def local(x: Any) -> Any:
    """This column's shard of a `ColumnTensor`; anything else as it is."""
    return x.local if isinstance(x, ColumnTensor) else x


def locals_of(args: Args, kwargs: Kwargs) -> tuple[tuple[Any, ...], Kwargs]:
    """A call's arguments, with `ColumnTensor`s replaced by their shards."""
    found = tuple([arg.local if isinstance(arg, ColumnTensor) else mapped(local, arg)
                   if isinstance(arg, (list, tuple, dict)) else arg for arg in args])
    return found, {name: mapped(local, arg) for name, arg in kwargs.items()} if kwargs else kwargs


def mapped(call: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with `call` applied to each tensor, like `tree_map_only`, whose registry of containers costs more time
    than the products of a small layer: it is used only for what is not a plain container, tensor or number."""
    if isinstance(tree, Tensor):
        return call(tree)
    kind = type(tree)
    if kind is tuple:
        return tuple([mapped(call, item) for item in tree])
    if kind is dict:
        return {name: mapped(call, item) for name, item in tree.items()}
    if kind is list:
        return [mapped(call, item) for item in tree]
    return tree if kind in _LEAVES else tree_map_only(Tensor, call, tree)


_LEAVES = frozenset({int, float, bool, complex, str, slice, type(None), type(...), torch.dtype, torch.device})
"""Leaf types, for which no registry lookup is needed."""


def layout_of_tensor(x: Tensor) -> ColumnLayout | None:
    """The layout of a `ColumnTensor`; None for a plain tensor."""
    return x.columns if isinstance(x, ColumnTensor) else None


def sharded_layout(x: Any) -> ColumnLayout | None:
    """The layout of a sharded tensor; None for a replicated or plain tensor and for other objects."""
    return x.columns if isinstance(x, ColumnTensor) and x.columns.dim is not None else None


def layouts_text(operands: Iterable[Tensor]) -> str:
    """Sizes and layouts of the operands of a call, for messages."""
    return " and ".join(operand.columns.text(tuple(operand.local.shape)) if isinstance(operand, ColumnTensor)
                        else f"{list(operand.shape)} without a layout" for operand in operands)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among a call's arguments, including those in lists and tuples, in order."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


# --- the error for what cannot be computed ----------------------------------------------------------------------------

# The error for an operation that cannot be computed on a sharded tensor; it names the module and the line.


LOCAL_MAP = ("Compute what each column can compute from its own shards by ranvier.tensor.layers.local_map(function, x)"
             ", which gives the function plain tensors; use the layers of ranvier.tensor.layers for what crosses a dim "
             "that is sharded over columns.")
"""The remedy for functions that have no rule."""
_INSIDE = ("torch.", "ranvier.tensor.column", "ranvier.tensor.boundaries", "ranvier.tensor.closed_parameters",
           "ranvier.optim.torch_functions", "contextlib", "functools")
"""Modules that are not a user's code."""


def refuse(what: str, layout: object, remedy: str, where: str | None = None) -> NoReturn:
    """Raise a ModelError for what cannot be computed from one column's shard.

    what: the fault, as a clause. layout: shapes and layouts of the operands, as text. where: the place in the model;
    None for the module and the line of the user's code that are running.
    """
    raise ModelError(what, code="not-over-columns", where=where or _running_module(), value=layout, remedy=remedy)


def _running_module() -> str:
    """The innermost running module of a split model, and the line of its code."""
    frame: FrameType | None = sys._getframe(2)
    line = name = None
    while frame is not None and (name is None or line is None):
        module = frame.f_globals.get("__name__", "")
        inside = module == "torch" or module.startswith(_INSIDE)
        if line is None and not inside:
            line = f"{frame.f_code.co_filename.rpartition('/')[2]}, line {frame.f_lineno}"
        owner = frame.f_locals.get("self")
        if name is None and isinstance(owner, nn.Module):
            name = owner.__dict__.get("_split_name")  # set by `ranvier.tensor.boundaries.named_module`
        frame = frame.f_back
    return f"{name or 'a split model'} ({line})"
