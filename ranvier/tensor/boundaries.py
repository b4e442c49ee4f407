"""Conversions between a block's own code and its tensor-parallel layers: layers take and give tensors of a known
layout.

    kind      x on a column                                    taken or given by
    stream    [B, S, H / c], [B, S / c, H] or [B, S, H]        Linear(stationary="input"), embeddings, norms, dropout
    inner     [B, S, F / c]                                    Linear(stationary="output")
    heads     any; a dim that is not the last is sharded       norms over a head's features
    whole     replicated                                       ClassifierHead, ReplicatedLinear
    ids       integers, the same on every column               embeddings

B batch, S sequence, H hidden width, F inner width; c columns.

Layers check and strip layouts on entry, and mark what they return, as hooks on blocks do: a user's hooks on either see
tensors with layouts. While a block runs, its code cannot read the weights of its layers
(`ranvier.tensor.closed_parameters`). A layer refuses by name any layout other than the one it takes; a replicated
tensor is converted to any layout. Between stages, and in the activation cache, the name of a tensor carries its
layout.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from ranvier.block import Loss
from ranvier.errors import ModelError
from ranvier.tensor import columns
from ranvier.tensor.closed_parameters import user_code
from ranvier.tensor.columns import ColumnLayout, ColumnTensor, layout_of_tensor, mapped, mark, plain, refuse
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.splittable import GUARDED, ActivationKind, GuardedLayer, SplitHook

_M = TypeVar("_M", bound=nn.Module)

_REMEDIES = {
    "stream": "Linear(stationary='input') leads back to the residual stream from activations between two Linears.",
    "inner": "Linear(stationary='output') leads from the residual stream to what Linear(stationary='input') takes.",
    "heads": "Give it [..., heads, ..., width]: unflatten(-1, (-1, width)) of what Linear(stationary='output') "
             "returns.",
    "whole": "ClassifierHead leads from the residual stream to a replicated tensor.",
}


def sharded_dim(mesh: TensorMesh, kind: ActivationKind, num_dims: int) -> int | None:
    """The sharded dim of a tensor of this kind with `num_dims` dims; None if the tensor is replicated."""
    if kind in ("inner", "vocabulary") or (kind == "stream" and mesh.activations.name == "hidden"):
        return num_dims - 1
    return num_dims - 2 if kind == "stream" and mesh.activations.name == "sequence" else None


def named_module(module: _M, where: str) -> _M:
    """`module`; messages about its computations call it `where` from now on."""
    module.__dict__["_split_name"] = where
    return module


class _OfMesh:
    """State of the hooks of a split module. A copy of the module shares it; like the mesh, it cannot be saved."""

    def __init__(self, mesh: TensorMesh) -> None:
        self._mesh = mesh

    def __deepcopy__(self, memo: dict[int, object]) -> _OfMesh:
        return self

    def __reduce__(self) -> NoReturn:
        self._mesh.__reduce__()


class _Hook(_OfMesh):
    """A function as a hook."""

    def __init__(self, mesh: TensorMesh, call: Callable[..., object]) -> None:
        super().__init__(mesh)
        self._call = call

    def __call__(self, *args: object) -> object:
        return self._call(*args)


def own_hooks(module: _M) -> _M:
    """`module`, a shallow copy, with its own dicts of hooks, so that the original's stay unchanged."""
    for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
                 "_forward_hooks_always_called"):
        module.__dict__[name] = copy.copy(module.__dict__[name])
    return module


# ---------------------------------------------------------------------- layers


def guard_layer(module: nn.Module, mesh: TensorMesh, where: str, takes: ActivationKind, gives: ActivationKind, *,
                alone: bool, vocab: int = 0) -> None:
    """Let a split layer check and strip the layouts of its inputs, and mark its outputs.

    alone: the layer is called with its own shard, as a plain tensor. vocab: the full vocabulary size of a layer that
    returns a shard of the vocabulary.
    """
    if mesh.check_order:
        module.register_forward_pre_hook(_Hook(mesh, lambda *_: mesh.order.compare_place(where)))
    guard: _RowGuard = _RowGuard(mesh, where) if mesh.num_cols == 1 else _LayerGuard(mesh, where, takes, gives,
                                                                                     alone=alone, vocab=vocab)
    hooks = tuple(hook for hook in module._forward_hooks.values() if isinstance(hook, SplitHook))
    for key in [key for key, hook in module._forward_hooks.items() if hook in hooks]:
        del module._forward_hooks[key]
    module.forward = GuardedForward(mesh, module, guard, hooks)


class GuardedForward(_OfMesh, GuardedLayer):
    """The forward of one layer with the package's own `hooks`. If these were module hooks, a user's hooks on the layer
    would see inputs without layouts."""

    def __init__(self, mesh: TensorMesh, module: nn.Module, guard: _RowGuard, hooks: Sequence[Callable[..., Any]]
                 ) -> None:
        super().__init__(mesh)
        self._module, self._guard, self.hooks = ref(module), guard, hooks

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        module = self._module()
        assert module is not None
        args, kwargs = self._guard.before(args, kwargs)
        computes = module.__dict__.get(GUARDED)
        y = type(module).forward(module, *args, **kwargs) if computes is None else computes(*args, **kwargs)
        for hook in self.hooks:
            y = hook(module, args, y)
        return self._guard.after(y)

    def __deepcopy__(self, memo: dict[int, Any]) -> GuardedForward:
        return GuardedForward(self._mesh, memo[id(self._module())], self._guard, self.hooks)


class _RowGuard:
    """The guard of one layer on a mesh of rows only, where tensors have no layouts."""

    def __init__(self, mesh: TensorMesh, where: str) -> None:
        self._mesh, self._where, self._in_block = mesh, where, False

    def before(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Called at the layer's start: code of its block does not run until the layer returns."""
        self._mesh.order.record(self._where, "forward")
        self._in_block, self._mesh.runs_user_code = self._mesh.runs_user_code, False
        return args, kwargs

    def after(self, y: object) -> object:
        """Called at the layer's end: code of its block runs again."""
        self._mesh.runs_user_code = self._in_block
        return y


class _LayerGuard(_RowGuard):
    """The same on columns, with the layer's last input. It runs twice for each layer of each microbatch, so the time
    of its calls matters with small layers."""

    def __init__(self, mesh: TensorMesh, where: str, takes: ActivationKind, gives: ActivationKind, *, alone: bool,
                 vocab: int) -> None:
        super().__init__(mesh, where)
        self._takes, self._gives, self._alone, self._vocab = takes, gives, alone, vocab
        self._needs_sequence = mesh.activations.name == "sequence" and "stream" in (takes, gives)
        self._entered: tuple[ColumnLayout, torch.Size] | None = None
        self._sequences = 0
        """Number of sequences in the flattened tokens of the input; 0 if the input was not flattened."""
        self._fitted: tuple[ColumnLayout | None, torch.Size, torch.dtype] | None = None
        """An input that was accepted unchanged: so is the next similar one, as the inputs of all microbatches are."""

    def before(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The layer's arguments without layouts."""
        super().before(args, kwargs)
        self._entered, self._sequences, take = None, 0, self._take
        return (tuple([take(arg) if isinstance(arg, Tensor) else mapped(take, arg) for arg in args]),
                mapped(take, kwargs) if kwargs else kwargs)

    def after(self, y: object) -> object:
        """Its output, marked."""
        self._mesh.runs_user_code = self._in_block
        if self._alone:
            return y
        if type(y) is Tensor and not self._sequences:
            return mark(y, self._output_layout(y))
        return mapped(self._mark_output, y)

    def _take(self, x: Tensor) -> Tensor:
        layout = None
        if isinstance(x, ColumnTensor):
            layout, x = x.columns, plain(x)
        like = layout, x.shape, x.dtype
        if layout is not None and like == self._fitted:
            self._entered = self._entered or (layout, x.shape)
            return x
        if self._takes == "ids" or not (x.is_floating_point() or x.is_complex()):
            if layout is not None and layout.dim is not None:
                refuse("takes integers that are the same on every column, and was given a shard",
                       layout.text(tuple(x.shape)),
                       "Compute them from the block's inputs, or from what a ClassifierHead returns.", self._where)
            return x
        if self._needs_sequence:
            x, layout = self._to_sequences(x, layout)
        if layout is None and self._alone:
            return x
        taken = _as_taken(x, layout, self._mesh, self._takes, self._where)
        if taken is x and not self._sequences:
            self._fitted = like
        self._entered = self._entered or (layout or ColumnLayout(self._mesh), taken.shape)
        return taken

    def _to_sequences(self, x: Tensor, layout: ColumnLayout | None) -> tuple[Tensor, ColumnLayout | None]:
        """x as [batch, sequence, features]. Flattened tokens [tokens, features] become the number of sequences that
        they came from, or one. Any division is right: the tokens end up where the layout of the result says."""
        if x.dim() == 3:
            tokens = x.shape[0] * (layout.size if layout is not None and layout.dim == 1 else x.shape[1])
            self._mesh.sequences[tokens] = x.shape[0]
            return x, layout
        if x.dim() != 2:
            refuse("takes [batch, sequence, features] or [tokens, features] where the sequence is sharded over columns",
                   f"{list(x.shape)}", "Bring the dims into this order, or set `--tensor.sequence-sharding false`.",
                   self._where)
        sharded = layout is not None and layout.dim == 0
        tokens = layout.size if layout is not None and sharded else x.shape[0]
        count = layout.blocks if layout is not None and sharded else self._mesh.sequences.get(tokens, 1)
        if tokens // count % self._mesh.num_cols:
            refuse("takes tokens that the columns can share", f"{tokens} tokens on {self._mesh.num_cols} columns",
                   "Give it all tokens of whole sequences, or set `--tensor.sequence-sharding false`.", self._where)
        self._sequences = self._mesh.sequences[tokens] = count
        if layout is not None and layout.dim is not None:
            layout = layout.moved(1, tokens // count, 1) if sharded else layout.moved(2)
        return x.reshape(count, x.shape[0] // count, x.shape[1]), layout

    def _flatten_output(self, y: Tensor, layout: ColumnLayout) -> ColumnTensor:
        """An output of flattened tokens: [tokens, features]."""
        if y.dim() != 3:
            refuse("cannot take flattened tokens", f"{list(y.shape)}", "Give it [batch, sequence, features].",
                   self._where)
        if layout.dim == 1:
            layout = layout.moved(0, layout.size * y.shape[0], y.shape[0])
        elif layout.dim is not None:
            layout = layout.moved(1)
        return mark(y.flatten(0, 1), layout)

    def _mark_output(self, y: Tensor) -> Tensor:
        if type(y) is not Tensor:
            return y
        return self._flatten_output(y, self._output_layout(y)) if self._sequences else mark(y, self._output_layout(y))

    def _output_layout(self, y: Tensor) -> ColumnLayout:
        mesh, gives = self._mesh, self._gives
        if gives == "same" and (self._entered is None or self._entered[1] != y.shape):
            raise ModelError("does not declare the layout of its output over columns", code="block-output-layout",
                             where=self._where, value=f"{list(y.shape)} of {self._entered and list(self._entered[1])}",
                             remedy="Give the layer attributes `takes` and `gives`: 'stream', 'inner' or 'whole'.")
        if gives in ("same", "heads"):
            assert self._entered is not None
            return self._entered[0]
        if gives == "vocabulary":
            return ColumnLayout(mesh, y.dim() - 1, self._vocab)
        dim = sharded_dim(mesh, gives, y.dim())
        return ColumnLayout(mesh) if dim is None else ColumnLayout(mesh, dim, y.shape[dim] * mesh.num_cols)


def _as_taken(x: Tensor, layout: ColumnLayout | None, mesh: TensorMesh, kind: ActivationKind, where: str) -> Tensor:
    """A layer's input, a plain tensor that had `layout`, in the layout that the layer takes."""
    if layout is None and (x.requires_grad or isinstance(x, nn.Parameter)):
        refuse("was given a parameter of another layer, or a tensor computed from one",
               f"{list(x.shape)} without a layout",
               "Call the layer that the parameter belongs to.", where)
    dim, expected = None if layout is None else layout.dim, sharded_dim(mesh, kind, x.dim())
    if kind == "same":
        return x
    if kind == "heads":
        fits = dim not in (None, x.dim() - 1)
    else:
        fits = dim == expected and (layout is None or dim is None or (
            layout.size == x.shape[dim] * mesh.num_cols and layout.blocks == 1))
    if fits:
        return x
    if dim is None and expected is not None and x.dim() > 1 and x.shape[expected] % mesh.num_cols == 0:
        return columns.own_part_of(x, expected, ColumnLayout(mesh, expected, x.shape[expected]))
    shown = ColumnLayout(mesh) if layout is None else layout
    refuse(f"takes {_title(kind)}, and was given something else", shown.text(tuple(x.shape)), _REMEDIES[kind], where)


def _title(kind: ActivationKind) -> str:
    """A kind of tensor in messages."""
    return {"stream": "the residual stream", "inner": "activations between two Linears", "heads": "heads",
            "whole": "a replicated tensor"}[kind]


# ---------------------------------------------------------------------- blocks


def guard_block(module: nn.Module, mesh: TensorMesh, where: str, *, in_chain: bool) -> None:
    """Install hooks on a split block: they mark its inputs with their layout.

    in_chain: the block is part of a model: plain inputs are replicated, others carry their layout, and so do outputs.
    Otherwise the caller passes this rank's shard of the residual stream as plain tensors, and gets plain tensors.
    """
    outside: list[bool] = []

    def begin(*_: object) -> None:
        outside.append(mesh.runs_user_code)  # True in a stage, where a user's hooks are called last
        mesh.runs_user_code = True

    module.register_forward_pre_hook(_Hook(mesh, begin))
    module.register_forward_hook(_Hook(mesh, lambda *_: setattr(
        mesh, "runs_user_code", bool(outside) and outside.pop())), always_call=True)
    if mesh.check_order:
        module.register_forward_hook(_Hook(mesh, lambda *_: mesh.order.compare_place(f"the end of {where}")))
    if mesh.num_cols == 1:
        return

    def enter(x: Tensor) -> Tensor:
        if isinstance(x, ColumnTensor) or not x.is_floating_point():
            return x
        dim = None if in_chain or x.dim() < 2 else sharded_dim(mesh, "stream", x.dim())
        return mark(x, ColumnLayout(mesh) if dim is None else ColumnLayout(
            mesh, dim, x.shape[dim] * mesh.num_cols))

    def before(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return mapped(enter, args), mapped(enter, kwargs)

    def leave(_: nn.Module, args: Any, output: object) -> object:
        return mapped(lambda x: _checked_output(x, where), output) if in_chain else plain(output)

    module.register_forward_pre_hook(_Hook(mesh, before), prepend=True, with_kwargs=True)
    module.register_forward_hook(_Hook(mesh, leave))


def _checked_output(x: Tensor, where: str) -> Tensor:
    """A block's output. ModelError for a plain output that requires a gradient: its layout is unknown."""
    if isinstance(x, ColumnTensor):
        columns.refuse_own_graph(x, where)
    elif x.requires_grad:
        refuse("returns a tensor without a layout over the columns", f"{list(x.shape)}",
               "Compute it with torch's functions and ranvier.tensor.layers.", where)
    return x


def checked_loss(loss: Loss, mesh: TensorMesh, vocab: int | None) -> Loss:
    """`loss`, which cannot read weights of layers, with the layout of its input checked and stripped: only logits of a
    sharded `vocab` may be sharded."""
    def closed(output: Any, targets: object) -> tuple[Tensor, Tensor | float | int]:
        with user_code(mesh):
            return loss(output, targets)

    if mesh.num_cols == 1:
        return closed

    def on_plain(output: Tensor | dict[str, Tensor], targets: object) -> tuple[Tensor, Tensor | float | int]:
        def take(x: Tensor) -> Tensor:
            layout = layout_of_tensor(x)
            if vocab is not None and layout is not None and (layout.dim, layout.size) != (x.dim() - 1, vocab):
                refuse("takes logits that are sharded over the vocabulary, and was given something else",
                       layout.text(tuple(x.shape)), "Let a VocabularyLinear be the last layer of the last block.",
                       "loss")
            return plain(x) if vocab is not None or layout is None or layout.dim is None else x

        def check(x: Tensor) -> Tensor:
            layout = layout_of_tensor(x)
            if layout is not None and layout.dim is not None:
                refuse("differs from column to column", layout.text(tuple(x.shape)), _REMEDIES["whole"], "loss")
            return plain(x)

        checked: tuple[Tensor, Tensor | float | int] = mapped(check, closed(mapped(take, output), targets))
        return checked

    return on_plain


# ---------------------------------------------------------------------- between stages, and in the cache

_SEPARATOR = "|columns share dim "
"""Part of the format of messages and of the activation cache's files."""


def detached_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Named tensors as plain ones, whose names carry the layout of sharded ones: for messages and files."""
    return {name if (layout := layout_of_tensor(x)) is None or layout.dim is None
            else f"{name}{_SEPARATOR}{layout.dim} of {layout.size}" + f" of {layout.blocks}" * (layout.blocks > 1):
            plain(x) for name, x in state.items()}


def is_replicated_name(name: str) -> bool:
    """Whether the tensor with this name is the same on all columns."""
    return _SEPARATOR not in name


def with_layouts(state: dict[str, Tensor], mesh: TensorMesh | None) -> dict[str, Tensor]:
    """The inverse of `detached_names`."""
    if mesh is None:
        return state
    found = {}
    for full, x in state.items():
        name, separator, text = full.partition(_SEPARATOR)
        if separator:
            x = mark(x, ColumnLayout(mesh, *map(int, text.split(" of "))))
        found[name] = x
    return found
