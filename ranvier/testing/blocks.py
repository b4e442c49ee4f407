"""Compares a module with its blocks in fp64: outputs, every gradient, and buffers.

    check_blocks(module, ranvier.blocks_of(module, cut=["layer1", "layer2"]), inputs)     # raises ModelError

Blocks run one after the other in this process, but as on stages: each gets a copy of the state, and the gradients of
its state return to the previous block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ranvier.arguments import check_arguments
from ranvier.block import State, as_named_tensors, from_named_tensors
from ranvier.errors import ModelError
from ranvier.models.blocks_of import carried_output

_SEED = 0
_SMALL = 1e-3
"""Tensors smaller than this times the largest of their kind are compared on that scale."""


def check_blocks(module: nn.Module, blocks: Mapping[str, nn.Module], sample: State, *,
                 output: Callable[[Any], State] | None = None, training: bool = True,
                 tolerance: float = 1e-9) -> float:
    """Compare `module` with its blocks, as `ranvier.blocks_of` returns them; neither is changed.

    Args:
        sample: inputs as in a microbatch: a tensor, or a dict by names of forward's arguments.
        output: as for `blocks_of`.
        training: the mode. Dropout draws from torch's generator, with one seed for both.
        tolerance: largest relative error of outputs, buffers, and gradients of a random weighting of the outputs.

    Returns the largest relative error. ModelError names the tensor that differs.
    """
    check_arguments(check_blocks, locals(), but=("sample",))
    inputs = tree_map(lambda x: x.detach().double() if x.is_floating_point() else x, sample)
    runs = []
    for whole in (True, False):
        copied, parts = copy.deepcopy((module, dict(blocks)))  # together, so that they share parameters
        for block in (copied, *parts.values()):
            block.double().train(training).zero_grad()
        torch.manual_seed(_SEED)
        found = _run_whole(copied, inputs, output or carried_output) if whole else _parts(parts, inputs)
        found |= {f"buffer {name}": buffer.double() for name, buffer in copied.named_buffers()}
        runs.append(found | {
            f"gradient of {name}": torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in copied.named_parameters()})
    expected, found = runs
    if set(expected) != set(found):
        raise ModelError("is not returned by both the module and its blocks", code="blocks-return-others",
                         where="output", value=sorted(set(expected) ^ set(found)),
                         remedy="Pass the output= that blocks_of was given.")
    errors = {name: _error(found[name], tensor, expected, name.partition(" ")[0]) for name, tensor in expected.items()}
    for name, error in errors.items():
        if not error <= tolerance:
            raise ModelError(f"differs between the module and its blocks by a relative error of {error:.1e}",
                             code="blocks-differ", where=name,
                             remedy="Look for state outside of buffers, random numbers that do not come from torch's "
                                    "generator, and changes in place of tensors that share memory.")
    return max(errors.values())


def _error(found: Tensor, expected: Tensor, among: Mapping[str, Tensor], kind: str) -> float:
    """The error relative to the tensor, or to a small share of the largest tensor of its kind."""
    scale = max(float(tensor.norm()) for name, tensor in among.items() if name.startswith(kind))
    difference = float((found - expected).norm()) if found.shape == expected.shape else float("inf")
    return difference / (max(float(expected.norm()), _SMALL * scale) or 1.0)


def _leaves(state: State) -> State:
    return tree_map(lambda x: x.detach().clone().requires_grad_(x.is_floating_point()), state)  # type: ignore[no-any-return]


def _backward(outputs: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    names = [name for name in gradients if outputs[name].requires_grad]
    if names:
        torch.autograd.backward([outputs[name] for name in names], [gradients[name] for name in names])


def _weighting(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A random gradient of each floating-point output."""
    generator = torch.Generator().manual_seed(_SEED)
    return {name: torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.device)
            for name, output in outputs.items() if output.is_floating_point()}


def _results(outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {f"output {name}".strip(): output.detach().double() for name, output in outputs.items()}
    return found | {f"gradient of input {name}".strip(): torch.zeros_like(tensor) if tensor.grad is None
                    else tensor.grad
                    for name, tensor in inputs.items() if tensor.is_floating_point()}


def _run_whole(module: nn.Module, inputs: State, output: Callable[[Any], State]) -> dict[str, Tensor]:
    leaves = _leaves(inputs)
    outputs = as_named_tensors(output(module(leaves) if isinstance(leaves, Tensor) else module(**leaves)), "the module")
    _backward(outputs, _weighting(outputs))
    return _results(outputs, as_named_tensors(leaves, "the sample"))


def _parts(blocks: Mapping[str, nn.Module], inputs: State) -> dict[str, Tensor]:
    entered: list[dict[str, Tensor]] = []
    left: list[dict[str, Tensor]] = []
    state = inputs
    for name, block in blocks.items():
        leaves = _leaves(state)
        entered.append(as_named_tensors(leaves, name))
        state = block(leaves)
        left.append(as_named_tensors(state, f"block {name}"))
    gradients = _weighting(left[-1])
    for before, after in zip(reversed(entered), reversed(left), strict=True):
        _backward(after, gradients)
        gradients = {name: parameter.grad for name, parameter in before.items() if parameter.grad is not None}
    return _results(as_named_tensors(from_named_tensors(left[-1]), "the last block"), entered[0])
