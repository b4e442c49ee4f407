"""Conformance test of your own model family, in seconds on a CPU.

    check_family(MyFamily(), Transformer(num_layers=3, hidden=16, vocab=50, sequence=8), head="tokens")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ranvier.block import Model, State, initialise
from ranvier.config.named_object import missing_attribute
from ranvier.config.run import Transformer
from ranvier.errors import RanvierError
from ranvier.models.family import FAMILY_ATTRIBUTES, ModelFacts, ModelFamily, Targets
from ranvier.plan.block_costs import block_costs

_FLOPS_WITHIN = 3.0
"""Counts of operations omit different small parts; a ratio above this is a mistake."""


def check_family(family: ModelFamily, settings: Transformer, head: str) -> None:
    """Build and run `family` with small, valid `settings`.

    AssertionError, with the method at fault, if the family lacks a method, contradicts itself or its settings, builds
    other blocks on the meta device or in another dtype, mixes the samples of a microbatch, or has a count of FLOPs that
    is far off.
    """
    missing = missing_attribute(family, FAMILY_ATTRIBUTES)
    assert missing is None, f"{type(family).__name__} has no {missing}"
    problems = list(family.problems(settings, head))
    assert not problems, f"problems: these settings should have none, and have: {problems[0]}"
    facts = family.describe(settings)
    assert isinstance(facts, ModelFacts), f"describe: returns a {type(facts).__name__}, and no ModelFacts"
    assert facts.text and "\n" not in facts.text, "describe: text must be one line"
    assert facts.tokens >= 1, f"describe: tokens must be at least 1, not {facts.tokens}"
    model = _model(family, settings, head, torch.float64)
    names = list(model.blocks)
    assert len(model.layers) in (0, settings.num_layers), (
        f"model: declares {len(model.layers)} layers, and the settings say {settings.num_layers}")
    places = [names.index(block) for layer in model.layers for block in layer]
    assert all(first < second for first, second in pairwise(places)), "model: blocks of layers are not in their order"
    for block, first in model.alike.items():
        assert first in names and block in names and names.index(first) < names.index(block), (
            f"model: alike has {block}: {first}, which is no earlier block")
    _check_meta(family, settings, head)
    _check_samples(family, settings, head)
    blocks = _build(model)
    _check_parameters(model, blocks)
    _check_independence(family, model, blocks, settings, head)
    with torch.device("meta"):
        inputs, targets = family.sample(settings, head, 1)
    costs = block_costs(_model(family, settings, head, torch.float32), inputs, targets)
    counted, declared = 3.0 * sum(cost.flops for cost in costs), family.flops_per_sample(settings)
    assert counted / _FLOPS_WITHIN <= declared <= counted * _FLOPS_WITHIN, (
        f"flops_per_sample: says {declared:.4g}, and the operations counted are {counted:.4g}")
    assert family.flops_per_sample(settings,
                                   recomputed=True) >= declared, "flops_per_sample: recomputation adds nothing"


def _model(family: ModelFamily, settings: Transformer, head: str, dtype: torch.dtype) -> Model:
    model = family.model(settings, head, dtype=dtype)
    assert isinstance(model, Model), f"model: returns a {type(model).__name__}, and no ranvier.Model"
    again = family.model(settings, head, dtype=dtype)
    assert list(again.blocks) == list(model.blocks), "model: gives other blocks when it is called again"
    return model


def _check_meta(family: ModelFamily, settings: Transformer, head: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with torch.device("meta"):
            blocks = _build(_model(family, settings, head, dtype))
            state, _ = family.sample(settings, head, 2)
        for name, block in blocks.items():
            for inner, parameter in block.named_parameters():
                assert parameter.device.type == "meta", f"model: {name}.{inner} ignores the device context"
                assert parameter.dtype == dtype, f"model: {name}.{inner} is {parameter.dtype} instead of {dtype}"
            with _blame(f"block {name} on the meta device in {dtype}"):
                state = block(state)


def _check_samples(family: ModelFamily, settings: Transformer, head: str) -> None:
    for count in (1, 3):
        for leaf in tree_leaves(family.sample(settings, head, count)):
            assert isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == count, (
                f"sample: a tensor of shape {tuple(getattr(leaf, 'shape', ()))} for {count} samples")
        inputs, targets = family.sample(settings, head, count)
        assert isinstance(inputs, Tensor | Mapping), f"sample: inputs are a {type(inputs).__name__}"
        assert all(leaf.dtype == torch.int64 for leaf in tree_leaves(targets)), "sample: targets must be int64"


def _build(model: Model) -> dict[str, nn.Module]:
    return {name: build().eval() for name, build in model.blocks.items()}


def _check_parameters(model: Model, blocks: Mapping[str, nn.Module]) -> None:
    """Check that parameters have initial values, that ties name existing parameters, and that alike blocks have the
    same shapes."""
    parameters = {f"{name}.{inner}": parameter for name, block in blocks.items()
                  for inner, parameter in block.named_parameters()}
    for group in model.tied:
        for name in group:
            assert name in parameters, f"model: tied names {name}, which no block has"
        assert len({parameters[name].shape for name in group}) == 1, f"model: {group} are tied, and differ in shape"
    for block, first in model.alike.items():
        one, other = ([parameter.shape for parameter in blocks[name].parameters()] for name in (block, first))
        assert one == other, f"model: {block} and {first} are alike, and differ in their parameters' shapes"
    if model.initial is not None:
        for name, parameter in parameters.items():
            with _blame(f"initial({name!r})"):
                initialise(parameter, name, model.initial(name), seed=0)


def _check_independence(family: ModelFamily, model: Model, blocks: Mapping[str, nn.Module], settings: Transformer,
                        head: str) -> None:
    """Check that the loss of three samples is the sum of their own losses, and that gradients are finite."""
    inputs, targets = _varied_samples(family, settings, head)
    total, weight = _loss(model, blocks, inputs, targets)
    assert torch.isfinite(total), f"loss: is {float(total.detach())} for a sample"
    assert float(weight) > 0, "loss: a sample has the weight 0"
    value = float(total.detach())
    alone = [_loss(model, blocks, *tree_map(lambda leaf, place=place: leaf[place:place + 1], (inputs, targets)))
             for place in range(3)]
    summed, weights = sum(float(one.detach()) for one, _ in alone), sum(float(one) for _, one in alone)
    assert abs(summed - value) <= 1e-6 * max(1.0, abs(summed)), (
        f"loss: of three samples is {value}, and the sum of their own losses {summed}: samples must not mix, "
        "and the loss is a sum")
    assert abs(weights - float(weight)) <= 1e-9 * weights, (
        f"loss: the weight of three samples is {float(weight)}, and the sum of their own {weights}")
    torch.autograd.backward(total)
    for name, block in blocks.items():
        for inner, parameter in block.named_parameters():
            assert parameter.grad is None or torch.isfinite(parameter.grad).all(), (
                f"block {name}: the gradient of {inner} is not finite")


def _varied_samples(family: ModelFamily, settings: Transformer, head: str) -> tuple[State, Targets]:
    """Three samples that differ in their floating point inputs."""
    generator = torch.Generator().manual_seed(0)

    def vary(leaf: Tensor) -> Tensor:
        return torch.randn(leaf.shape, generator=generator, dtype=torch.float64) if leaf.is_floating_point() else leaf

    inputs, targets = family.sample(settings, head, 3)
    varied: State = tree_map(vary, inputs)
    return varied, targets


def _loss(model: Model, blocks: Mapping[str, nn.Module], inputs: State, targets: Targets) -> tuple[Tensor, Tensor]:
    state = inputs
    for name, block in blocks.items():
        with _blame(f"block {name}"):
            state = block(state)
        assert isinstance(state, Tensor | Mapping), f"block {name}: returns a {type(state).__name__}"
    with _blame("loss"):
        total, weight = model.loss(state, targets)
    assert isinstance(total, Tensor) and total.ndim == 0, "loss: must return (a sum without dims, a weight)"
    return total, torch.as_tensor(weight)


@contextmanager
def _blame(where: str) -> Iterator[None]:
    try:
        yield
    except (AssertionError, RanvierError):
        raise
    except Exception as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
