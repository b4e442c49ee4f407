"""Runs layers and full models on a row x col mesh and compares them with plain PyTorch; shared by this folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from benchmarks.slow_links import slowed
from ranvier import keyed_random
from ranvier.block import Model
from ranvier.config.run import TensorParallel as Settings
from ranvier.config.run import Transformer
from ranvier.layout import Layout, part
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split.layers import split_layers
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference, relative_error

SEED = 3
IGNORED = -100
TOLERANCE = 1e-10
SCHEMES = {"stationary": Settings(), "summa": Settings(scheme="summa"), "megatron": Settings(scheme="megatron"),
           "stationary-sequence": Settings(sequence_sharding=True),
           "sequence": Settings(scheme="megatron", sequence_sharding=True)}
SHAPES = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 3), (3, 2), (3, 3)]
"""Rows and columns."""
EACH = [(2, 3, "stationary"), (2, 2, "summa"), (1, 2, "megatron"), (2, 2, "stationary-sequence"), (1, 2, "sequence")]
"""(rows, columns, scheme): each scheme on one mesh."""
Batches = Sequence[Sequence[Microbatch]]
"""One sequence of full microbatches for each replica; rows take their shares of each microbatch."""


def legal(shapes: Sequence[tuple[int, int]] = SHAPES, schemes: Sequence[str] = tuple(SCHEMES)) -> list[tuple]:
    """All valid (rows, columns, scheme); only an even number of columns can share a sequence."""
    return [(rows, cols, scheme) for rows, cols in shapes for scheme in schemes
            if (rows == 1 or SCHEMES[scheme].scheme != "megatron")
            and (cols % 2 == 0 or scheme != "stationary-sequence")]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------------- layers alone

def on_tensor_mesh(rows: int, cols: int, settings: Settings, work: Callable[[TensorMesh], object], *,
                   panel_bytes: int | None = None) -> list:
    """`work(tensor mesh)` on every rank of a mesh; the results in rank order."""
    mesh = Mesh(row=rows, col=cols)

    def rank(world):
        over_rows, over_cols = (world.backend.group(axis, mesh.groups(axis)) for axis in ("row", "col"))
        return work(TensorMesh(over_rows, over_cols, settings, panel_bytes=panel_bytes))

    return run_ranks(rank, mesh.size)


def own(mesh: TensorMesh, whole: Tensor, dim: int, axis: str) -> Tensor:
    """This rank's part of `whole`, whose `dim` is split over `axis`."""
    count, index = (mesh.num_rows, mesh.row) if axis == "row" else (mesh.num_cols, mesh.col)
    start, stop = part(whole.shape[dim], count, index)
    return whole.narrow(dim, start, stop - start)


def stream_part(mesh: TensorMesh, whole: Tensor) -> Tensor:
    """This rank's part of the residual stream [B, S, H]."""
    mine = own(mesh, whole, 0, "row")
    dims = {"hidden": 2, "sequence": 1}
    return own(mesh, mine, dims[mesh.activations.name], "col") if mesh.activations.name in dims else mine


def inner_part(mesh: TensorMesh, whole: Tensor) -> Tensor:
    """This rank's part of activations between two products, and of logits: [B, S, F]."""
    return own(mesh, own(mesh, whole, 0, "row"), -1, "col")


def row_part(mesh: TensorMesh, whole: Tensor) -> Tensor:
    """The part that all ranks of a row have."""
    return own(mesh, whole, 0, "row")


Part = Callable[[TensorMesh, Tensor], Tensor]


def samples_of(count: int) -> Tensor:
    return torch.arange(count) + 100


def run_layer(layer, x: Tensor, dy: Tensor, samples: Tensor) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """(y, dx, gradients) of one layer, full or split. dy is not changed."""
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    with keyed_random.scope(SEED, 1, samples, "block"):
        y = layer(x)
    given = dy.clone()
    y.backward(given)
    assert torch.equal(given, dy), "a backward changed the gradient that it was given"
    return y.detach(), x.grad, {name: parameter.grad for name, parameter in layer.named_parameters()
                                if parameter.requires_grad}


def assert_layer_parity(make: Callable, x: Tensor, dy: Tensor, rows: int, cols: int, scheme: str, *, enter: Part,
                        leave: Part, panel_bytes: int | None = None, tolerance: float = TOLERANCE,
                        prepare: Callable = lambda layer: None, settings: Settings | None = None) -> None:
    """Check that y, dx and every parameter's gradient on every rank are the right parts of the full layer's.

    enter, leave: which part of inputs and of outputs a rank has. dy: gradient of the full output. prepare: called with
    the split layer.
    """
    settings = settings or SCHEMES[scheme]
    whole = make()
    wide = make().double()
    wide.load_state_dict({name: value.double() for name, value in whole.state_dict().items()})
    samples = samples_of(len(x))
    expected_y, expected_dx, expected = run_layer(wide, x.double() if x.is_floating_point() else x, dy.double(),
                                                  samples)
    splits = whole.splits(settings)
    dtype = next((parameter.dtype for parameter in whole.parameters()), x.dtype)

    def work(mesh: TensorMesh):
        layer = make()
        layer.load_state_dict(whole.state_dict())
        layer = split_layers(layer, mesh, "block")
        prepare(layer)
        y, dx, gradients = run_layer(layer, enter(mesh, x).to(dtype if x.is_floating_point() else x.dtype),
                                     leave(mesh, dy).to(dtype), own(mesh, samples, 0, "row"))
        errors = {"y": relative_error(y.double(), leave(mesh, expected_y))}
        if dx is not None:
            errors["dx"] = relative_error(dx.double(), enter(mesh, expected_dx))
        assert set(gradients) == set(expected)
        for name, gradient in gradients.items():
            gradient = gradient.double().contiguous()
            for axis, group in (("row", mesh.over_rows), ("col", mesh.over_cols)):
                if axis in splits[name].summed:
                    group.all_reduce(gradient).wait()
            box = splits[name].box(expected[name].shape, (mesh.num_rows, mesh.num_cols), (mesh.row, mesh.col))
            errors[name] = relative_error(gradient, expected[name][tuple(slice(*edges) for edges in box)])
        return errors

    for rank, errors in enumerate(on_tensor_mesh(rows, cols, settings, work, panel_bytes=panel_bytes)):
        wrong = {name: error for name, error in errors.items() if not error <= tolerance}
        assert not wrong, f"rank {rank}: relative errors {wrong}"


# ---------------------------------------------------------------------- whole models

def tiny_gpt(*, tied: bool = False, **changed) -> Model:
    """A GPT in fp64 that every mesh of this folder can split, with a vocabulary that no mesh divides."""
    config = dict(num_layers=1, hidden=36, heads=12, vocab=61, sequence=8, dropout=0.1) | changed
    model = gpt(Transformer(**config), dtype=torch.float64)
    return model if tied else replace(model, tied=())


def token_batches(mesh: Mesh, *, count: int = 2, per_row: int = 1, vocab: int = 61, length: int = 8,
                  seed: int = 0) -> Batches:
    """`count` microbatches for each replica; later samples have more ignored targets. In the first microbatch all
    targets of the last row are ignored."""
    batches = []
    for replica in range(mesh.data):
        batches.append([])
        for number in range(count):
            generator = torch.Generator().manual_seed(1000 * seed + 10 * replica + number)
            size = per_row * mesh.row
            ids = torch.randint(0, vocab, (size, length + 1), generator=generator)
            targets = ids[:, 1:].clone()
            ignored = (torch.arange(size) + replica) / (size + mesh.data)
            targets[torch.rand(targets.shape, generator=generator) < ignored[:, None]] = IGNORED
            if mesh.row > 1 and number == 0:
                targets[-per_row:] = IGNORED
            first = (replica * count + number) * size
            batches[-1].append(Microbatch(ids[:, :-1].contiguous(), targets, torch.arange(first, first + size)))
    return batches


def row_share(microbatch: Microbatch, mesh: Mesh, row: int) -> Microbatch:
    """A row's sequences of a full microbatch."""
    return Microbatch(*(tree_map(lambda tensor: tensor.chunk(mesh.row)[row].contiguous(), value)
                        for value in (microbatch.inputs, microbatch.targets, microbatch.samples)))


def weight_of(microbatch: Microbatch) -> int:
    """Number of targets that count; both ends of a span are one target."""
    targets = microbatch.targets
    counted = [one != IGNORED for one in (targets.values() if isinstance(targets, dict) else [targets])]
    return int(torch.stack(counted).all(0).sum())


def share(engine: Engine, batches: Batches) -> list[Microbatch]:
    """Exactly the part of its replica's microbatches that this rank needs."""
    found = [row_share(one, engine.mesh, engine.coordinates.row) for one in batches[engine.coordinates.data]]
    return [Microbatch(one.inputs if engine.is_first_stage else None, one.targets if engine.is_last_stage else None,
                       one.samples) for one in found]


def every(batches: Batches) -> list[Microbatch]:
    return [one for replica in batches for one in replica]


def on_mesh(make: Callable[[], Model], mesh: Mesh, work: Callable[[Engine], object], *, scheme: str = "stationary",
            settings: Settings | None = None, dtype: torch.dtype = torch.float64, throttle=None,
            run_seconds: float = 120.0, **options) -> list:
    """`work(engine)` on every rank; the results in rank order."""
    def rank(world):
        engine = Engine(make(), world, mesh=mesh, seed=SEED, dtype=dtype, tensor=settings or SCHEMES[scheme], **options)
        result = work(engine)
        engine.close()
        return result

    return run_ranks(slowed(rank, throttle), mesh.size, timeout_seconds=run_seconds)


def assemble(found: Sequence[dict[str, Tensor]], layout: Layout) -> dict[str, Tensor]:
    """Full tensors from the parts of all ranks; parts that several ranks hold must be bit-identical."""
    whole: dict[str, Tensor] = {}
    for rank, tensors in enumerate(found):
        at = layout.mesh.coordinates(rank)
        for name, tensor in tensors.items():
            parameter = layout[name]
            total = whole.setdefault(name, torch.full(parameter.shape, torch.nan, dtype=tensor.dtype))
            place = total[tuple(slice(*edges) for edges in layout.box(parameter, at.position))]
            assert place.shape == tensor.shape, f"{name} has shape {tuple(tensor.shape)} on rank {rank}"
            known = ~place.isnan()
            assert torch.equal(place[known], tensor[known]), f"{name} of rank {rank} differs from another rank's"
            place.copy_(tensor)
    assert not [name for name, tensor in whole.items() if tensor.isnan().any()]
    return whole


def gradients_of(engine: Engine) -> dict[str, Tensor]:
    return {name: gradient.clone() for name, gradient in engine.gradients().items()}


def weights_of(engine: Engine) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.named_parameters().items()
            if engine.layout[name].is_owner}


@dataclass
class Outcome:
    """The results of a mesh: full gradients by owner's name, each rank's parts of them, and each rank's numbers."""

    gradients: dict[str, Tensor]
    of_ranks: list[dict[str, Tensor]]
    losses: list[float]
    weights: list[float]
    norms: list[float]
    others: list


def gradients_on(make: Callable[[], Model], batches: Batches, mesh: Mesh,
                 also: Callable[[Engine], object] = lambda engine: None, **options) -> Outcome:
    """Gradients, loss, weight and norm of one batch on `mesh`; also: called with the engine before the batch."""
    def work(engine: Engine):
        other = also(engine)
        result = engine.forward_backward(share(engine, batches))
        return gradients_of(engine), result.loss, result.weight, result.grad_norm, other, engine.layout

    found, losses, weights, norms, others, layouts = zip(*on_mesh(make, mesh, work, **options), strict=True)
    return Outcome(assemble(found, layouts[0]), list(found), list(losses), list(weights), list(norms), list(others))


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE,
                 least: float = 0.0) -> None:
    """Check for exactly the expected tensors, each within the tolerance.

    least: errors are relative to at least this share of the largest norm, for gradients that are zero in exact terms.
    """
    assert set(actual) == set(expected)
    norms = {name: float(tensor.detach().norm()) for name, tensor in expected.items()}
    floor = least * max(norms.values())
    errors = {name: relative_error(actual[name], expected[name].detach()) * (
        norms[name] / floor if norms[name] < floor else 1) for name in expected}
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"relative errors {wrong}"


def assert_parity(make: Callable[[], Model], batches: Batches, mesh: Mesh, *, least: float = 0.0,
                  **options) -> Outcome:
    """Check that raw gradients, loss, weight and norm on every rank of `mesh` equal those of plain PyTorch."""
    reference = Reference(make(), seed=SEED, dtype=torch.float64)
    loss = reference.forward_backward(every(batches))
    outcome = gradients_on(make, batches, mesh, **options)
    expected = reference.gradients()
    assert_close(outcome.gradients, expected, least=least)
    norm = sum(float((gradient ** 2).sum()) for gradient in expected.values()) ** 0.5
    weight = sum(map(weight_of, every(batches)))
    assert all(abs(found - loss) <= TOLERANCE * abs(loss) for found in outcome.losses)
    assert all(abs(found - norm) <= TOLERANCE * norm for found in outcome.norms)
    assert outcome.weights == [weight] * mesh.size
    return outcome


def assert_predictions(make: Callable[[], Model], batches: Batches, mesh: Mesh, scheme: str) -> None:
    """Every rank of a row predicts the full outputs of its samples; an evaluation afterwards uses its part again."""
    reference = Reference(make(), seed=SEED, dtype=torch.float64)
    expected, loss = reference.predict(batches[0]), reference.evaluate(batches[0])

    def work(engine: Engine) -> None:
        found = engine.predict(share(engine, batches))
        assert abs(engine.evaluate(share(engine, batches)).loss - loss) <= TOLERANCE * abs(loss)
        assert (found is not None) == engine.is_last_stage
        for mine, whole in zip(found or [], expected if engine.is_last_stage else [], strict=True):
            assert relative_error(mine, whole.chunk(mesh.row)[engine.coordinates.row]) <= TOLERANCE

    on_mesh(make, mesh, work, scheme=scheme)
