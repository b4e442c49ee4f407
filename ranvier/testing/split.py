"""Compares a model on rows and columns with the same model on one rank: outputs, the loss and every gradient, in fp64.

    check_split(model, (inputs, targets), loss=loss)       # raises SplitError, which names mesh, scheme and tensor

    ranvier check --split my_model:sample                  # sample() returns (model, sample) or (model, sample, loss)

Ranks are threads of this process. Each mesh and scheme runs the full chain of blocks forward and backward once.
Without a loss, floats [B, S, H] are passed in two ways: as a model's inputs, the same on every column, and as its
residual stream.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import sqrt
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ranvier import keyed_random
from ranvier.arguments import check_arguments
from ranvier.block import (
    Loss,
    Model,
    State,
    as_model,
    as_named_tensors,
    contents_besides_modules,
    from_named_tensors,
    initialise,
)
from ranvier.config.named_object import call_named
from ranvier.config.run import TensorParallel
from ranvier.errors import ConfigError, DivisibilityError, ModelError
from ranvier.layout import part
from ranvier.mesh import Mesh
from ranvier.pipeline.microbatch import Microbatch
from ranvier.plan.cut import split_model
from ranvier.tensor.activations import layout_of
from ranvier.tensor.columns import ColumnLayout, layout_of_tensor, mark, plain
from ranvier.tensor.layers import block_splits
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split.layers import rebind_attributes
from ranvier.tensor.splittable import Splittable, check_plain
from ranvier.testing.ranks import RanksFailed, run_ranks
from ranvier.world import World

Scheme = Literal["stationary", "summa", "megatron", "stationary-sequence", "megatron-sequence"]
SCHEMES: dict[Scheme, TensorParallel] = {
    "stationary": TensorParallel(scheme="stationary"), "summa": TensorParallel(scheme="summa"),
    "megatron": TensorParallel(scheme="megatron"),
    "stationary-sequence": TensorParallel(sequence_sharding=True),
    "megatron-sequence": TensorParallel(scheme="megatron", sequence_sharding=True)}
Feed = Literal["replicated", "stream"]
"""Meaning of floats [B, S, H]: the same on every column, or split like the scheme's residual stream."""
MESHES = ((1, 2), (2, 1), (2, 2), (2, 3))
"""Rows and columns."""
Sample = Microbatch | tuple[Any, ...] | Tensor | dict[str, Tensor]
"""A `Microbatch`, (inputs, targets), or inputs."""
_SEED = 0
_SMALL = 1e-3
"""Gradients smaller than this times the largest are compared on that scale: some are zero except for rounding, such as
that of the bias of keys."""
_DRAWS = ("draws random numbers, which ranks in one process cannot draw alike; Dropout of ranvier.tensor.layers can, "
          "and an engine compares what columns in processes of their own draw")
_NOTHING = 1e-5
"""The same for gradients relative to outputs and the loss: all gradients may be zero except for rounding."""


@dataclass(frozen=True, kw_only=True)
class SplitOutcome:
    """The result of one mesh and scheme."""

    row: int
    col: int
    scheme: Scheme
    status: Literal["agrees", "cannot be divided", "refused", "differs"]
    error: float | None = None
    """Largest relative error of a tensor, if the model ran."""
    tensor: str = ""
    """The tensor that has this error."""
    reason: str = ""
    """Why the model did not run."""
    inputs: Feed = "replicated"
    """How floats [B, S, H] were passed."""

    def __str__(self) -> str:
        about = self.reason.partition(" (got ")[0] if self.error is None else f"{self.error:.1e} ({self.tensor})"
        return f"{self.row} x {self.col}  {self.scheme:<19}  {self.status}{_describe_inputs(self)}: {about}"


class SplitError(ModelError):
    """A model that is refused on some mesh and scheme, or gives different results there. `outcomes` has all results."""

    outcomes: tuple[SplitOutcome, ...] = ()


def check_split(model: Model | nn.Module | Sequence[nn.Module], sample: Sample,
                *, loss: Loss | None = None, meshes: Sequence[tuple[int, int]] = MESHES,
                schemes: Sequence[Scheme] = tuple(SCHEMES), tolerance: float = 1e-9,
                timeout_seconds: float = 60.0, inputs: Feed | Literal["auto"] = "auto") -> tuple[SplitOutcome, ...]:
    """Compare `model` on each mesh (rows, columns) and each scheme of that mesh with itself on one rank, in fp64.

    Args:
        model: as for `Engine`, or one module; it is not changed. Parameters get a little noise, so that none is zero;
            ends of a tie are compared separately.
        sample: a `Microbatch`, (inputs, targets), or inputs; two samples or more, divided over the rows. Gradients of
            floating-point inputs are compared too.
        loss: for models that have none; without any loss, outputs are compared, and gradients of their random
        weighting.
        meshes: (rows, columns) pairs. schemes: names in `SCHEMES`.
        tolerance: largest relative error of outputs, loss, and gradients of inputs and of each parameter.
        timeout_seconds: longest wait for a message between the ranks, which are threads.
        inputs: the meaning of floats [B, S, H] of the sample. "stream": the residual stream, as for a block in the
            middle of a model; "replicated": the same on every column, as for its first block. "auto" is "replicated"
            with a loss, since the model begins with its data, and without a loss both, which must agree.

    Raises ModelError for a sample that does not fit, SplitError if the model differs or is refused, with the first
    such mesh, scheme and tensor, or line of code. Sizes that a mesh cannot divide are not an error, unless no mesh can
    divide them.
    """
    check_arguments(check_split, locals(), but=("model", "sample"))
    has_loss = loss is not None or isinstance(model, Model)
    blocks: Any = model  # as_model checks what it is
    if isinstance(model, nn.Module) and contents_besides_modules(model):
        blocks = {"block": model}
    whole = _prepare(as_model(blocks, None if isinstance(model, Model) else loss or _no_loss))
    batch = _to_double(sample if isinstance(sample, Microbatch) else Microbatch(*sample) if isinstance(sample, tuple)
                       else Microbatch(sample, None))
    if batch.inputs is None or not tree_leaves(batch.inputs):
        raise ModelError("has no inputs", code="sample-without-inputs", where="sample",
                         remedy="Give a microbatch's inputs, and targets for a loss.")
    if has_loss and batch.targets is None:
        raise ModelError("has no targets for the loss", code="sample-without-targets", where="sample",
                         remedy="Give (inputs, targets).")
    before = _random_states()
    expected = _run(whole, batch, None, has_loss)
    if draws := _random_states() != before:  # or a library that was just imported has drawn
        before = _random_states()
        _run(whole, batch, None, has_loss)
        draws = _random_states() != before
    for name, x in expected.items():
        if not bool(torch.isfinite(x).all()):
            raise ModelError("is not finite on one rank, so that nothing can be compared", code="sample-not-finite",
                             where=name,
                             remedy="Give another sample, or parameters with which the model computes numbers.")
    def worst(mesh: tuple[int, int], scheme: Scheme) -> SplitOutcome:
        feeds: list[Feed] = ["replicated"] if inputs == "auto" else [inputs]
        if inputs == "auto" and not has_loss and _has_stream(batch, mesh[1], scheme):
            feeds.append("stream")
        found = [_outcome(whole, batch, expected, mesh, scheme, has_loss, tolerance, timeout_seconds, feed)
                 for feed in feeds]
        one = max(found, key=lambda outcome: (_ORDER.index(outcome.status), outcome.error or 0.0))
        return replace(one, status="refused", reason=_DRAWS, error=None) if draws and one.error is not None else one

    outcomes = tuple(worst(mesh, scheme) for mesh in meshes for scheme in schemes if _differs(scheme, *mesh))
    _raise_first(outcomes, tolerance)
    return outcomes


def _random_states() -> tuple[object, ...]:
    """The states of the generators from which a block's code may draw."""
    _, words, *places = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), cast(np.ndarray, words).tobytes(), *places


_ORDER = ("agrees", "cannot be divided", "refused", "differs")
"""Statuses from best to worst."""


def _describe_inputs(outcome: SplitOutcome) -> str:
    return " with inputs as the residual stream" if outcome.inputs == "stream" else ""


def _stream_layout(x: object, cols: int, settings: TensorParallel) -> tuple[int, int] | None:
    """(the dim of x that columns would split if x were the residual stream, its size); None where they do not."""
    dim = {"hidden": -1, "sequence": -2}.get(layout_of(settings))
    if cols == 1 or dim is None or not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() != 3 \
            or x.shape[dim] % cols:
        return None
    return x.dim() + dim, x.shape[dim]


def _has_stream(batch: Microbatch, cols: int, scheme: Scheme) -> bool:
    """Whether an input could be the residual stream, and columns split the stream."""
    return any(_stream_layout(x, cols, SCHEMES[scheme]) is not None for x in tree_leaves(batch.inputs))


def _differs(scheme: Scheme, row: int, col: int) -> bool:
    """Whether the scheme exists on the mesh, and differs from other schemes there."""
    settings = SCHEMES[scheme]
    return row == 1 if settings.scheme == "megatron" else col > 1 or not settings.shards_sequence


def check_named(target: str, *, as_json: bool = False) -> None:
    """Run `check_split` on the result of the function "module:function", and print every outcome. SplitError as in
    `check_split`, ConfigError if there is no such function."""
    model, sample, loss = _call_target(target)
    try:
        outcomes, failed = check_split(model, sample, loss=loss), None
    except SplitError as error:
        outcomes, failed = error.outcomes, error
    print(json.dumps({"split": [asdict(outcome) for outcome in outcomes]}, indent=1) if as_json
          else "\n".join(map(str, outcomes)))
    if failed is not None:
        raise failed


def _call_target(target: str) -> tuple[Model | nn.Module, Sample, Loss | None]:
    """Result of the function "module:function", with None for an omitted loss."""
    made = call_named(target, "split", "split-function-raised")
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ConfigError("must return (model, sample) or (model, sample, loss)", code="split-function-result",
                          where=f"split {target}", value=type(made).__name__,
                          remedy="See ranvier.testing.check_split for what a sample is.")
    model, sample, loss = made if len(made) == 3 else (*made, None)
    return model, sample, loss


def _raise_first(outcomes: tuple[SplitOutcome, ...], tolerance: float) -> None:
    for status in ("differs", "refused", "cannot be divided"):
        found = [outcome for outcome in outcomes if outcome.status == status]
        if not found or (status == "cannot be divided" and len(found) < len(outcomes)):
            continue
        first = found[0]
        also = f" ({len(found)} of {len(outcomes)} meshes and schemes)"
        error = SplitError(
            f"{first.tensor} differs from one rank's by a relative error of {first.error:.1e}{also}"
            if status == "differs" else f"{status}: {first.reason}{also}",
            code="split-differs" if status == "differs" else "split-refused",
            where=f"the model on {first.row} x {first.col} with {first.scheme}"
                  f"{_describe_inputs(first).replace(' with', ',', 1)}",
            remedy="Look for an operation over a dim that rows or columns share, in local_map too, and for random "
                   "numbers without a key." if status == "differs" else
                   "Change what is named there, or leave out the meshes and schemes that are not wanted"
                   + (", or set inputs='replicated' if these are the model's own inputs." if first.inputs == "stream"
                      else "."))
        error.outcomes = outcomes
        raise error


def _no_loss(outputs: State, targets: object) -> tuple[Tensor, float]:
    """Placeholder for a loss if outputs are compared: never called."""
    raise AssertionError("outputs are compared")


def _prepare(model: Model) -> Model:
    """The model with built blocks, in fp64, with a little noise; each end of a tie has its own copy."""
    blocks: dict[str, nn.Module] = {}
    generator = torch.Generator().manual_seed(_SEED)
    for name, build in model.blocks.items():
        built = build()
        for path, layer in built.named_modules():
            if isinstance(layer, Splittable):  # a copy loses its parameters' hooks
                check_plain(layer, f"{name}.{path}" if path else name)
        module = copy.deepcopy(built).double().train()
        rebind_attributes(built, dict(zip(built.modules(), module.modules(), strict=True)), name, check_only=True)
        with torch.no_grad():
            for key, parameter in module.named_parameters():
                if model.initial is not None:
                    initialise(parameter, f"{name}.{key}", model.initial(f"{name}.{key}"), _SEED)
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        blocks[name] = module
    builders = {name: partial(blocks.__getitem__, name) for name in blocks}
    return replace(model, blocks=builders, tied=(), initial=None, alike={})


def _to_double(batch: Microbatch) -> Microbatch:
    """The microbatch with floats in fp64, and with sample numbers."""
    count = len(tree_leaves(batch.inputs)[0]) if batch.inputs is not None and tree_leaves(batch.inputs) else 0
    inputs, targets = tree_map(lambda x: x.detach().double() if isinstance(x, Tensor) and x.is_floating_point() else x,
                               (batch.inputs, batch.targets))
    return Microbatch(inputs, targets, torch.arange(count) if batch.samples is None else batch.samples)


# ---------------------------------------------------------------------- one run

def _run(model: Model, batch: Microbatch, mesh: TensorMesh | None, has_loss: bool,
         feed: Feed = "replicated") -> dict[str, Tensor]:
    """Every tensor to compare, by name: full tensors, or (with a mesh) this rank's parts with their layouts."""
    given = as_named_tensors(cast(State, batch.inputs), "the inputs")
    layouts = {name: ColumnLayout(mesh, *split) for name, x in given.items()
               if mesh is not None and feed == "stream"
               and (split := _stream_layout(x, mesh.num_cols, mesh.settings)) is not None}
    parts = {name: _shard(x, layouts[name]) if name in layouts else x for name, x in given.items()}
    inputs = {name: x.clone().requires_grad_() if x.is_floating_point() else x for name, x in parts.items()}
    blocks = {name: build() for name, build in model.blocks.items()}
    for block in blocks.values():
        for parameter in block.parameters():
            parameter.grad = None
    state = from_named_tensors({name: mark(x, layouts[name]) if name in layouts else x for name, x in inputs.items()})
    for name, block in blocks.items():
        with keyed_random.scope(_SEED, 0, _samples(batch), name):
            state = block(state)
    outputs = {f"output {name}".strip(): x for name, x in as_named_tensors(state, "the last block").items()}
    wanted = {name: x for name, x in outputs.items() if x.requires_grad}
    found = {name: _copy(x) for name, x in outputs.items()}  # a loss may overwrite them with gradients
    if has_loss:
        total = model.loss(state, batch.targets)[0].reshape(())
        found["loss"] = total.detach().clone()
        if total.requires_grad:
            torch.autograd.backward(total)
    elif wanted:
        torch.autograd.backward([plain(x) for x in wanted.values()],
                                [_own_part(_weighting(name, x, mesh), x, mesh) for name, x in wanted.items()])
    for name, x in inputs.items():
        if x.is_floating_point():
            gradient = torch.zeros_like(x) if x.grad is None else x.grad
            found[f"gradient of input {name}".strip()] = mark(gradient, layouts[name]) if name in layouts else gradient
    for name, block in blocks.items():
        for own_name, parameter in block.named_parameters():
            if parameter.requires_grad:
                found[f"gradient of {name}.{own_name}"] = torch.zeros_like(parameter) if parameter.grad is None \
                    else parameter.grad
    return found


def _samples(batch: Microbatch) -> Tensor:
    """The numbers of the samples, which `_to_double` adds if the user has not given them."""
    assert batch.samples is not None
    return batch.samples


def _copy(x: Tensor) -> Tensor:
    """A copy of the values, with the same layout."""
    layout, values = layout_of_tensor(x), plain(x).detach().clone()
    return values if layout is None else mark(values, layout)


def _weighting(name: str, x: Tensor, mesh: TensorMesh | None) -> Tensor:
    """The gradient of one full output, of all rows' parts together, the same on every rank."""
    shape = list(x.shape)
    if mesh is not None and shape:
        shape[0] = sum(mesh.over_rows.gather_number(shape[0]))
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)


def _own_part(whole: Tensor, part: Tensor, mesh: TensorMesh | None) -> Tensor:
    """The part of a full tensor that has the place and layout of `part`."""
    if mesh is None:
        return whole
    layout, size = layout_of_tensor(part), part.shape[0] if part.dim() else 0
    if part.dim():
        sizes = mesh.over_rows.gather_number(size)
        whole = whole.narrow(0, sum(sizes[:mesh.row]), size)
    if layout is None or layout.dim is None or whole.shape[layout.sharded_dim] != layout.size:
        return whole  # the result of local_map is not a shard of it: its shape or its values will differ
    return _shard(whole, layout)


def _shard(whole: Tensor, layout: ColumnLayout) -> Tensor:
    """This column's shard."""
    return layout.shard(whole, layout.sharded_dim)


# ---------------------------------------------------------------------- one mesh and scheme


def _outcome(whole: Model, batch: Microbatch, expected: dict[str, Tensor], shape: tuple[int, int], scheme: Scheme,
             has_loss: bool, tolerance: float, timeout_seconds: float, feed: Feed) -> SplitOutcome:
    mesh, settings = Mesh(row=shape[0], col=shape[1]), SCHEMES[scheme]
    outcome = partial(SplitOutcome, row=shape[0], col=shape[1], scheme=scheme, inputs=feed)

    def rank(world: World) -> dict[str, tuple[float, float]]:
        over_rows = world.backend.group("row", mesh.groups("row"))
        over_cols = world.backend.group("col", mesh.groups("col"))
        return _compare(whole, batch, expected, TensorMesh(over_rows, over_cols, settings, check_order=True), has_loss,
                        feed)

    try:
        ranks = run_ranks(rank, mesh.size, timeout_seconds=timeout_seconds)
    except DivisibilityError as error:
        return outcome(status="cannot be divided", reason=str(error))
    except RanksFailed as error:
        return outcome(status="refused", reason=str(error).partition("\n")[0])
    except Exception as error:  # from the model's own code, which fails on parts of tensors
        kind = "" if isinstance(error, ModelError) else f"{type(error).__name__}: "
        return outcome(status="refused", reason=f"{kind}{str(error).partition(chr(10))[0]}")
    errors = {}
    together = {name: [sqrt(sum(one[name][which] ** 2 for one in ranks)) for which in (0, 1)] for name in expected}
    largest = max((norm for name, (_, norm) in together.items() if name.startswith("gradient")), default=0.0)
    size = max(norm for name, (_, norm) in together.items() if not name.startswith("gradient"))
    for name, (difference, norm) in together.items():
        scale = max(norm, _SMALL * largest, _NOTHING * size) if name.startswith("gradient") else norm
        errors[name] = difference / scale if scale else difference
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    return outcome(status="agrees" if errors[worst] <= tolerance else "differs", error=errors[worst], tensor=worst)


def _compare(whole: Model, batch: Microbatch, expected: dict[str, Tensor], mesh: TensorMesh, has_loss: bool,
             feed: Feed) -> dict[str, tuple[float, float]]:
    """Name -> (norm of the difference, norm of the expected tensor), each for this rank's part."""
    samples = _samples(batch)
    count = len(samples)
    start, stop = part(count, mesh.num_rows, mesh.row)
    inputs, targets = tree_map(lambda x: x[start:stop] if isinstance(x, Tensor) and x.dim() and len(x) == count else x,
                               (batch.inputs, batch.targets))
    own_part = Microbatch(inputs, targets, samples[start:stop])
    splits = {f"gradient of {block}.{name}": split for block, build in whole.blocks.items()
              for name, split in block_splits(block, build(), mesh.settings, mesh.num_cols).items()}
    found = _run(split_model(whole, mesh), own_part, mesh, has_loss, feed)
    errors = {}
    for name, wanted in expected.items():
        if name not in found:
            raise ModelError("is missing in the split model", code="split-parameter-missing", where=name,
                             remedy="Let split(mesh) return a module with the same parameters.")
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
            wanted = _own_part(wanted, x, mesh)
        x = plain(x).detach()
        if x.shape != wanted.shape:
            raise ModelError(f"has another shape than one rank's part, {list(wanted.shape)}",
                             code="split-parameter-shape", where=name, value=list(x.shape),
                             remedy="Return from local_map this column's shard alone.")
        errors[name] = (float((x.double() - wanted.double()).norm()), float(wanted.double().norm()))
    return errors
