"""Compares a model on rows and columns with the same model on one rank: outputs, the loss and every gradient, in fp64.

    check_split(model, (inputs, targets), loss=loss)       # raises SplitError, which names mesh, scheme and tensor

    ranvier check --split my_model:sample                  # sample() returns (model, sample) or (model, sample, loss)

Ranks are threads of this process. Each mesh and scheme runs the whole chain of blocks forward and backward once.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ranvier import keyed_random
from ranvier.errors import ConfigError, DivisibilityError, ModelError, RanvierError
from ranvier.layout import part
from ranvier.mesh import Mesh
from ranvier.models.block import Loss, Model, State, as_model, initialise
from ranvier.models.carried_state import named
from ranvier.pipeline.build import split_model
from ranvier.pipeline.microbatch import Microbatch
from ranvier.run import TensorParallel
from ranvier.tensor.column_tensor import layout_of_tensor, mark, plain
from ranvier.tensor.layers import block_splits
from ranvier.tensor.mesh import TensorMesh
from ranvier.testing.ranks import RanksFailed, run_ranks
from ranvier.world import World

Scheme = Literal["stationary", "summa", "megatron", "megatron-sequence"]
SCHEMES: dict[Scheme, TensorParallel] = {
    "stationary": TensorParallel(scheme="stationary"), "summa": TensorParallel(scheme="summa"),
    "megatron": TensorParallel(scheme="megatron"),
    "megatron-sequence": TensorParallel(scheme="megatron", sequence_sharding=True)}
MESHES = ((1, 2), (2, 1), (2, 2), (2, 3))
"""Rows and columns."""
_SEED = 0
_SMALL = 1e-3
"""Gradients that are smaller than the largest by more than this are compared on its scale: some are zero but for
rounding, such as that of a bias of keys."""
_NOTHING = 1e-5
"""The same of gradients beside outputs and the loss: all of them may be zero but for rounding."""


@dataclass(frozen=True, kw_only=True)
class SplitOutcome:
    """What came of one mesh and scheme."""

    row: int
    col: int
    scheme: Scheme
    status: Literal["agrees", "cannot be divided", "refused", "differs"]
    error: float | None = None
    """Largest relative error of a tensor, where the model ran."""
    tensor: str = ""
    """The tensor that has it."""
    reason: str = ""
    """Why the model did not run."""

    def __str__(self) -> str:
        about = self.reason.partition(" (got ")[0] if self.error is None else f"{self.error:.1e} ({self.tensor})"
        return f"{self.row} x {self.col}  {self.scheme:<17}  {self.status}: {about}"


class SplitError(ModelError):
    """A model that is refused on some mesh and scheme, or gives other numbers there. `outcomes` has all of them."""

    outcomes: tuple[SplitOutcome, ...] = ()


def check_split(model: Model | nn.Module | Sequence[nn.Module], sample: Microbatch | tuple | Tensor | dict[str, Tensor],
                *, loss: Loss | None = None, meshes: Sequence[tuple[int, int]] = MESHES,
                schemes: Sequence[Scheme] = tuple(SCHEMES), tolerance: float = 1e-9,
                timeout_seconds: float = 60.0) -> tuple[SplitOutcome, ...]:
    """Run `model` on each mesh (rows, columns) with each scheme that the mesh allows, and on one rank, in fp64.

    Args:
        model: as for `Engine`, or one module; it is not changed. Parameters are taken with a little noise, so that
            none is zero; ends of a tie are compared apart.
        sample: a `Microbatch`, (inputs, targets), or inputs; two samples or more, shared by the rows. Floats of the
            inputs get gradients, which are compared, too.
        loss: of models that do not bring theirs; without any, outputs are compared, and gradients of a random weighting
            of them.
        tolerance: largest relative error of outputs, loss, and gradients of inputs and of each parameter.

    Raises ModelError for a sample that does not fit, SplitError where the model differs or is refused, with the first
    such mesh, scheme and tensor, or line of code. Sizes that a mesh cannot divide are no error, unless no mesh can
    divide them.
    """
    if isinstance(model, nn.Module) and not isinstance(model, (nn.Sequential, nn.ModuleDict, nn.ModuleList)):
        model = {"block": model}
    has_loss = loss is not None or (isinstance(model, Model))
    model = as_model(model, None if isinstance(model, Model) else loss or _no_loss)
    whole = _ready(model)
    batch = _doubled(sample if isinstance(sample, Microbatch) else Microbatch(*sample) if isinstance(sample, tuple)
                     else Microbatch(sample, None))
    if batch.inputs is None or not tree_leaves(batch.inputs):
        raise ModelError("has no inputs", where="sample", remedy="Give a microbatch's inputs, and targets for a loss.")
    if has_loss and batch.targets is None:
        raise ModelError("has no targets for the loss", where="sample", remedy="Give (inputs, targets).")
    expected = _run(whole, batch, None, has_loss)
    for name, x in expected.items():
        if not bool(torch.isfinite(x).all()):
            raise ModelError("is not finite on one rank, so that nothing can be compared", where=name,
                             remedy="Give another sample, or parameters with which the model computes numbers.")
    outcomes = tuple(_outcome(whole, batch, expected, mesh, scheme, has_loss, tolerance, timeout_seconds)
                     for mesh in meshes for scheme in schemes if mesh[0] == 1 or SCHEMES[scheme].scheme != "megatron")
    _raise_first(outcomes, tolerance)
    return outcomes


def check_named(target: str, *, as_json: bool = False) -> None:
    """`check_split` of what the function "module:function" returns; prints every outcome. SplitError as there,
    ConfigError for what is not such a function."""
    model, sample, loss = _called(target)
    try:
        outcomes, failed = check_split(model, sample, loss=loss), None
    except SplitError as error:
        outcomes, failed = error.outcomes, error
    print(json.dumps({"split": [asdict(one) for one in outcomes]}, indent=1) if as_json
          else "\n".join(map(str, outcomes)))
    if failed is not None:
        raise failed


def _called(target: str) -> tuple[Model | nn.Module, object, Loss | None]:
    module, _, function = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module), function)()
    except RanvierError:
        raise
    except Exception as error:
        raise ConfigError(f"cannot be called: {type(error).__name__}: {error}", where="split", value=target,
                          remedy="Name module:function, an importable module and a function that takes no arguments."
                          ) from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ConfigError("must return (model, sample) or (model, sample, loss)", where=f"split {target}",
                          value=type(made).__name__, remedy="See ranvier.testing.check_split for what a sample is.")
    return made if len(made) == 3 else (*made, None)


def _raise_first(outcomes: tuple[SplitOutcome, ...], tolerance: float) -> None:
    for status in ("differs", "refused", "cannot be divided"):
        found = [one for one in outcomes if one.status == status]
        if not found or (status == "cannot be divided" and len(found) < len(outcomes)):
            continue
        first = found[0]
        also = f" ({len(found)} of {len(outcomes)} meshes and schemes)"
        error = SplitError(
            f"{first.tensor} differs from one rank's by a relative error of {first.error:.1e}{also}"
            if status == "differs" else f"{status}: {first.reason}{also}",
            where=f"the model on {first.row} x {first.col} with {first.scheme}",
            remedy="Look for an operation over a dim that rows or columns share, for sizes that are written down, and "
                   "for random numbers without a key." if status == "differs" else
                   "Change what is named there, or leave out the meshes and schemes that are not wanted.")
        error.outcomes = outcomes
        raise error


def _no_loss(outputs: State, targets: object) -> tuple[Tensor, float]:
    raise AssertionError("outputs are compared")


def _ready(model: Model) -> Model:
    """The model with blocks that are there, in fp64, with a little noise; each block has its own copy of what is
    tied."""
    blocks = {}
    generator = torch.Generator().manual_seed(_SEED)
    for name, build in model.blocks.items():
        module = copy.deepcopy(build()).double().train()
        with torch.no_grad():
            for key, parameter in module.named_parameters():
                if model.initial is not None:
                    initialise(parameter, f"{name}.{key}", model.initial(f"{name}.{key}"), _SEED)
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        blocks[name] = module
    return replace(model, blocks={name: (lambda module=module: module) for name, module in blocks.items()}, tied=(),
                   initial=None, alike={})


def _doubled(batch: Microbatch) -> Microbatch:
    count = len(tree_leaves(batch.inputs)[0]) if batch.inputs is not None and tree_leaves(batch.inputs) else 0
    inputs, targets = tree_map(lambda x: x.detach().double() if isinstance(x, Tensor) and x.is_floating_point() else x,
                               (batch.inputs, batch.targets))
    return Microbatch(inputs, targets, torch.arange(count) if batch.samples is None else batch.samples)


# ---------------------------------------------------------------------- one run

def _run(model: Model, batch: Microbatch, mesh: TensorMesh | None, has_loss: bool) -> dict[str, Tensor]:
    """Every tensor to compare, by name: whole ones, or this rank's parts with their layouts."""
    inputs = tree_map(lambda x: x.clone().requires_grad_() if x.is_floating_point() else x, batch.inputs)
    blocks = {name: build() for name, build in model.blocks.items()}
    for block in blocks.values():
        for parameter in block.parameters():
            parameter.grad = None
    state = inputs
    for name, block in blocks.items():
        with keyed_random.scope(_SEED, 0, batch.samples, name):
            state = block(state)
    outputs = {f"output {name}".strip(): x for name, x in named(state, "the last block").items()}
    wanted = {name: x for name, x in outputs.items() if x.requires_grad}
    found = {name: _copied(x) for name, x in outputs.items()}  # a loss may write gradients over them
    if has_loss:
        total = model.loss(state, batch.targets)[0].reshape(())
        found["loss"] = total.detach().clone()
        if total.requires_grad:
            total.backward()
    elif wanted:
        torch.autograd.backward([plain(x) for x in wanted.values()],
                                [_own(_weighting(name, x, mesh), x, mesh) for name, x in wanted.items()])
    for name, x in named(inputs, "the inputs").items():
        if x.is_floating_point():
            found[f"gradient of input {name}".strip()] = torch.zeros_like(x) if x.grad is None else x.grad
    for block, module in blocks.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                found[f"gradient of {block}.{name}"] = torch.zeros_like(parameter) if parameter.grad is None \
                    else parameter.grad
    return found


def _copied(x: Tensor) -> Tensor:
    """The values, and how they lie."""
    layout, values = layout_of_tensor(x), plain(x).detach().clone()
    return values if layout is None else mark(values, layout)


def _whole_shape(x: Tensor, mesh: TensorMesh | None) -> list[int]:
    """Of all rows' and columns' parts together."""
    layout, shape = layout_of_tensor(x), list(plain(x).shape)
    if layout is not None and layout.dim is not None:
        shape[layout.dim] = layout.size
    if mesh is not None and shape:
        shape[0] = sum(mesh.over_rows.gather_number(shape[0]))
    return shape


def _weighting(name: str, x: Tensor, mesh: TensorMesh | None) -> Tensor:
    """The gradient of one whole output, the same on every rank."""
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(_whole_shape(x, mesh), generator=generator, dtype=torch.float64)


def _own(whole: Tensor, mine: Tensor, mesh: TensorMesh | None) -> Tensor:
    """The part of a whole tensor that lies as `mine`."""
    if mesh is None:
        return whole
    layout, size = layout_of_tensor(mine), plain(mine).shape[0] if mine.dim() else 0
    if mine.dim():
        sizes = mesh.over_rows.gather_number(size)
        whole = whole.narrow(0, sum(sizes[:mesh.row]), size)
    if layout is not None and layout.dim is not None:
        start, stop = layout.own()
        whole = whole.narrow(layout.dim, start, stop - start)
    return whole


# ---------------------------------------------------------------------- one mesh and scheme


def _outcome(whole: Model, batch: Microbatch, expected: dict[str, Tensor], shape: tuple[int, int], scheme: Scheme,
             has_loss: bool, tolerance: float, timeout_seconds: float) -> SplitOutcome:
    mesh, settings = Mesh(row=shape[0], col=shape[1]), SCHEMES[scheme]

    def rank(world: World) -> dict[str, tuple[float, float]]:
        groups = (world.backend.group(axis, mesh.groups(axis)) for axis in ("row", "col"))
        return _compared(whole, batch, expected, TensorMesh(*groups, settings, check_order=True), has_loss)

    where = dict(row=mesh.row, col=mesh.col, scheme=scheme)
    try:
        ranks = run_ranks(rank, mesh.size, timeout_seconds=timeout_seconds)
    except DivisibilityError as error:
        return SplitOutcome(status="cannot be divided", reason=str(error), **where)
    except RanksFailed as error:
        return SplitOutcome(status="refused", reason=str(error).partition("\n")[0], **where)
    except Exception as error:  # of the model's own code, which does not go through with parts of tensors
        kind = "" if isinstance(error, ModelError) else f"{type(error).__name__}: "
        return SplitOutcome(status="refused", reason=f"{kind}{str(error).partition(chr(10))[0]}", **where)
    errors = {}
    together = {name: [sqrt(sum(one[name][which] ** 2 for one in ranks)) for which in (0, 1)] for name in expected}
    largest = max((norm for name, (_, norm) in together.items() if name.startswith("gradient")), default=0.0)
    size = max(norm for name, (_, norm) in together.items() if not name.startswith("gradient"))
    for name, (difference, norm) in together.items():
        scale = max(norm, _SMALL * largest, _NOTHING * size) if name.startswith("gradient") else norm
        errors[name] = difference / scale if scale else difference
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    return SplitOutcome(status="agrees" if errors[worst] <= tolerance else "differs", error=errors[worst], tensor=worst,
                        **where)


def _compared(whole: Model, batch: Microbatch, expected: dict[str, Tensor], mesh: TensorMesh, has_loss: bool
              ) -> dict[str, tuple[float, float]]:
    """Name -> norms of the difference and of what is expected, of this rank's part."""
    start, stop = part(len(batch.samples), mesh.num_rows, mesh.row)
    count = len(batch.samples)
    inputs, targets = tree_map(lambda x: x[start:stop] if isinstance(x, Tensor) and x.dim() and len(x) == count else x,
                               (batch.inputs, batch.targets))
    mine = Microbatch(inputs, targets, batch.samples[start:stop])
    splits = {f"gradient of {block}.{name}": split for block, build in whole.blocks.items()
              for name, split in block_splits(block, build(), mesh.settings).items()}
    found = _run(split_model(whole, mesh), mine, mesh, has_loss)
    errors = {}
    for name, wanted in expected.items():
        x = found[name]
        if name in splits:
            x = x.clone(memory_format=torch.contiguous_format)
            for axis, group in (("row", mesh.over_rows), ("col", mesh.over_cols)):
                if axis in splits[name].summed:
                    group.all_reduce(x).wait()
            box = splits[name].box(wanted.shape, (mesh.num_rows, mesh.num_cols), (mesh.row, mesh.col))
            wanted = wanted[tuple(slice(*edges) for edges in box)]
        elif name == "loss":
            x = x.clone()
            mesh.over_rows.all_reduce(x).wait()
        else:
            wanted = _own(wanted, x, mesh)
        x = plain(x).detach()
        if x.shape != wanted.shape:
            raise ModelError(f"has another shape than one rank's part, {list(wanted.shape)}", where=name,
                             value=list(x.shape), remedy="Read sizes from tensors; do not write them down.")
        errors[name] = (float((x.double() - wanted.double()).norm()), float(wanted.double().norm()))
    return errors
