"""Where a block's own code and its split layers meet: layers take and give tensors of a known layout.

    kind      x on a column                                    on the meshes of
    stream    [B, S, H / c], [B, S / c, H] or [B, S, H]        Linear(stationary="input"), embeddings, norms, dropout
    inner     [B, S, F / c]                                    Linear(stationary="output")
    heads     any, its last dim whole, another one cut         norms over a head's features
    whole     every column has all of it                       TokenLinear, WholeLinear
    ids       integers, the same on every column               embeddings

A layer that is given another layout than it takes refuses it by name; what every column has is converted to any.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ranvier.errors import ModelError
from ranvier.tensor.column_tensor import ColumnTensor, layout_of_tensor, mark, plain
from ranvier.tensor.columns import ColumnLayout, own_part_of, refuse

if TYPE_CHECKING:
    from ranvier.tensor.mesh import TensorMesh

Kind = Literal["stream", "inner", "heads", "whole", "ids", "vocabulary", "same"]
"""same: what a layer of a user's own gives that says nothing: what it took."""

_REMEDIES = {
    "stream": "Linear(stationary='input') leads back to the residual stream from what is between two Linears.",
    "inner": "Linear(stationary='output') leads from the residual stream to what Linear(stationary='input') takes.",
    "heads": "Give it [..., heads, ..., width]: unflatten(-1, (-1, width)) of what Linear(stationary='output') "
             "returns.",
    "whole": "TokenLinear leads from the residual stream to what every column has.",
}


def cut_dim(mesh: TensorMesh, kind: Kind, dims: int) -> int | None:
    """The dim that columns share of a tensor of so many dims; None for none."""
    if kind in ("inner", "vocabulary") or (kind == "stream" and mesh.activations.name == "hidden"):
        return dims - 1
    return dims - 2 if kind == "stream" and mesh.activations.name == "sequence" else None


def named_module(module: nn.Module, where: str) -> nn.Module:
    """Messages about what it computes say so."""
    module.__dict__["_split_name"] = where
    return module


class _Hook:
    """A hook of a split module. A copy of the module calls it, too; like the mesh, it cannot be saved."""

    def __init__(self, mesh: TensorMesh, call: Callable) -> None:
        self._mesh, self._call = mesh, call

    def __call__(self, *args: object) -> object:
        return self._call(*args)

    def __deepcopy__(self, memo: dict) -> _Hook:
        return self

    def __reduce__(self):
        return self._mesh.__reduce__()


def own_hooks(module: nn.Module) -> nn.Module:
    """A shallow copy's hooks, apart from the original's."""
    for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
                 "_forward_hooks_always_called"):
        module.__dict__[name] = copy.copy(module.__dict__[name])
    return module


# ---------------------------------------------------------------------- layers


def guard_layer(module: nn.Module, mesh: TensorMesh, where: str, takes: Kind, gives: Kind, *, alone: bool,
                vocab: int = 0) -> None:
    """Have a split layer's calls check and strip what they take, and say how what they give lies.

    alone: it is called with its own part, as a plain tensor. vocab: whole width of what gives a vocabulary.
    """
    if mesh.check_order and mesh.num_rows > 1:
        module.register_forward_pre_hook(_Hook(mesh, lambda *_: _same_on_rows(mesh, where)))
    if mesh.num_cols == 1:
        return
    entered: list[tuple[ColumnLayout, torch.Size]] = []

    def before(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        entered.clear()
        return tree_map(take, args), tree_map(take, kwargs)

    def take(x: object) -> object:
        if not isinstance(x, Tensor):
            return getattr(x, "whole", x)  # a `LocalSize`
        layout = layout_of_tensor(x)
        if takes == "ids" or not (x.is_floating_point() or x.is_complex()):
            if layout is not None and layout.dim is not None:
                refuse("takes numbers that every column has, and was given a part", layout.text(tuple(x.shape)),
                       "Make them of the block's inputs, or of what a TokenLinear returns.", where)
            return plain(x)
        if mesh.activations.name == "sequence" and "stream" in (takes, gives) and x.dim() != 3:
            refuse("takes [batch, sequence, features] where columns share the sequence", f"{list(x.shape)}",
                   "Keep the three dims apart, or set --tensor.sequence-sharding false.", where)
        if layout is None and alone:
            return x
        x = _taken(x, layout, mesh, takes, where)
        entered.append((layout or ColumnLayout(mesh), x.shape))
        return x

    def after(_: nn.Module, args: tuple, y: object) -> object:
        return mark(y, given(y)) if type(y) is Tensor and not alone else y

    def given(y: Tensor) -> ColumnLayout:
        if gives == "same" and (not entered or entered[0][1] != y.shape):
            raise ModelError("does not say how what it returns lies on the columns", where=where,
                             value=f"{list(y.shape)} of {[list(shape) for _, shape in entered]}",
                             remedy="Give the layer attributes `takes` and `gives`: 'stream', 'inner' or 'whole'.")
        if gives in ("same", "heads"):
            return entered[0][0]
        if gives == "vocabulary":
            return ColumnLayout(mesh) if mesh.whole_outputs else ColumnLayout(mesh, y.dim() - 1, vocab)
        dim = cut_dim(mesh, gives, y.dim())
        return ColumnLayout(mesh) if dim is None else ColumnLayout(mesh, dim, y.shape[dim] * mesh.num_cols)

    module.register_forward_pre_hook(_Hook(mesh, before), with_kwargs=True)
    module.register_forward_hook(_Hook(mesh, after))


def _same_on_rows(mesh: TensorMesh, where: str) -> None:
    places = mesh.over_rows.gather_objects(where)
    if len(set(places)) > 1:
        raise ModelError("is called by some rows only", value=dict(enumerate(places)),
                         where=min(places, key=lambda place: place.startswith("the end")),
                         remedy="Call every layer on every row, with no tokens (x[:0]) where a row has none for it.")


def _taken(x: Tensor, layout: ColumnLayout | None, mesh: TensorMesh, kind: Kind, where: str) -> Tensor:
    """A layer's input of any layout as plain memory of the layout that the layer takes."""
    if layout is None and (x.requires_grad or isinstance(x, nn.Parameter)):
        refuse("was given a parameter of another layer, or what was made of one", f"{list(x.shape)} without a layout",
               "Call the layer that the parameter belongs to.", where)
    x, cut, expected = plain(x), None if layout is None else layout.dim, cut_dim(mesh, kind, x.dim())
    if kind == "same":
        return x
    if kind == "heads":
        fits = cut not in (None, x.dim() - 1)
    else:
        fits = cut == expected and (cut is None or layout.size == x.shape[cut] * mesh.num_cols)
    if fits:
        return x
    if cut is None and expected is not None and x.dim() > 1 and x.shape[expected] % mesh.num_cols == 0:
        return own_part_of(x, expected, ColumnLayout(mesh, expected, x.shape[expected]))
    shown = ColumnLayout(mesh) if layout is None else layout
    refuse(f"takes {_title(kind)}, and was given something else", shown.text(tuple(x.shape)), _REMEDIES[kind], where)


def _title(kind: Kind) -> str:
    return {"stream": "the residual stream", "inner": "what lies between two Linears", "heads": "heads",
            "whole": "what every column has"}[kind]


# ---------------------------------------------------------------------- blocks


def guard_block(module: nn.Module, mesh: TensorMesh, where: str, *, in_chain: bool) -> None:
    """Have a block's calls know how their inputs lie.

    in_chain: the block is one of a model's: plain inputs are the same on every column, others know their layout, and so
    do outputs. Otherwise somebody calls it with his part of the residual stream as plain tensors, and gets plain ones.
    """
    if mesh.check_order and mesh.num_rows > 1:
        module.register_forward_hook(_Hook(mesh, lambda *_: _same_on_rows(mesh, f"the end of {where}")))
    if mesh.num_cols == 1:
        return

    def enter(x: object) -> object:
        if not isinstance(x, Tensor) or isinstance(x, ColumnTensor) or not x.is_floating_point():
            return x
        dim = None if in_chain or x.dim() < 2 else cut_dim(mesh, "stream", x.dim())
        return mark(x.view_as(x), ColumnLayout(mesh) if dim is None else ColumnLayout(
            mesh, dim, x.shape[dim] * mesh.num_cols))

    def before(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return tree_map(enter, args), tree_map(enter, kwargs)

    def leave(_: nn.Module, args: tuple, output: object) -> object:
        return tree_map(lambda x: _left(x, where) if isinstance(x, Tensor) else x, output) if in_chain \
            else plain(output)

    module.register_forward_pre_hook(_Hook(mesh, before), prepend=True, with_kwargs=True)
    module.register_forward_hook(_Hook(mesh, leave))


def _left(x: Tensor, where: str) -> Tensor:
    if not isinstance(x, ColumnTensor) and x.requires_grad:
        refuse("returns a tensor whose layout over the columns nobody knows", f"{list(x.shape)}",
               "Compute it with torch's functions and the layers of ranvier.tensor.", where)
    return x


def checked_loss(loss: Callable, mesh: TensorMesh, vocab: int | None) -> Callable:
    """The loss of what the last block returns, which is cut only where it is logits of a `vocab` that columns share."""
    if mesh.num_cols == 1:
        return loss

    def of(output: object, targets: object) -> object:
        def take(x: Tensor) -> Tensor:
            layout = layout_of_tensor(x)
            if vocab is not None and layout is not None and (layout.dim, layout.size) != (x.dim() - 1, vocab):
                refuse("takes logits whose vocabulary columns share, and was given something else",
                       layout.text(tuple(x.shape)), "Let a VocabularyLinear be the last layer of the last block.",
                       "loss")
            return plain(x) if vocab is not None or layout is None or layout.dim is None else x

        def check(x: Tensor) -> Tensor:
            layout = layout_of_tensor(x)
            if layout is not None and layout.dim is not None:
                refuse("is another one on each column", layout.text(tuple(x.shape)), _REMEDIES["whole"], "loss")
            return plain(x)

        found = loss(tree_map(lambda x: take(x) if isinstance(x, Tensor) else x, output), targets)
        return tree_map(lambda x: check(x) if isinstance(x, Tensor) else x, found)

    return of


# ---------------------------------------------------------------------- between stages, and in the cache

_SEPARATOR = "|columns share dim "


def detached_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Named tensors as plain ones, whose names say how they lie: for messages and files."""
    return {name if (layout := layout_of_tensor(x)) is None or layout.dim is None
            else f"{name}{_SEPARATOR}{layout.dim} of {layout.size}": plain(x) for name, x in state.items()}


def with_layouts(state: dict[str, Tensor], mesh: TensorMesh | None) -> dict[str, Tensor]:
    """The inverse of `detached_names`."""
    found = {}
    for full, x in state.items():
        name, separator, text = full.partition(_SEPARATOR)
        if separator:
            dim, _, size = text.partition(" of ")
            x = mark(x.view_as(x), ColumnLayout(mesh, int(dim), int(size)))
        found[name] = x
    return found
