"""Conformance test of your own update rule, in a second.

    class Signs:                                       # a `ranvier.optim.rules.ElementwiseRule`
        states = ()
        def update(self, parameters, gradients, states, *, step, learning_rate, weight_decay):
            parameters.sub_(gradients.sign(), alpha=learning_rate)

    check_rule(Signs())
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ranvier.config.named_object import missing_attribute
from ranvier.layout import Box, index_of, whole_box
from ranvier.mesh import Mesh
from ranvier.optim.rules import ElementwiseRule, TensorRule, check_state_name
from ranvier.optim.tensor_update import TensorSplit, TensorUpdate
from ranvier.testing.ranks import run_ranks
from ranvier.world import World

_SHAPES = ((6, 4), (4, 8), (12,), (3, 2, 4), ())
_STEPS = 3


def check_rule(rule: ElementwiseRule | TensorRule, *, seed: int = 0) -> None:
    """Update a few tensors in fp64 and in fp32, whole and in parts.

    An elementwise rule must give the same result whatever the cut, and a tensor rule the same on two rows and two
    columns as on one rank. Both must change only parameters and states, in place, and must not use random numbers.
    AssertionError, with what differs, otherwise.
    """
    for dtype in (torch.float64, torch.float32):
        tolerance = 1e-12 if dtype is torch.float64 else 1e-4
        if missing_attribute(rule, ("applies_to()", "state_shapes()", "update_tensors()")) is None:
            _check_tensors(rule, dtype, seed, tolerance)  # type: ignore[arg-type]  # by its attributes
        else:
            _check_elements(rule, dtype, seed, tolerance)  # type: ignore[arg-type]  # likewise


def _draw_values(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _assert_alike(tensor: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    assert bool(tensor.isfinite().all()), f"{what} are not finite"
    error = float((tensor - expected).double().norm() / expected.double().norm().clamp(min=1e-30))
    assert error <= tolerance, f"{what} differ, by {error:.1e} of their norm"


# --- elementwise rules -----------------------------------------------------------------------------------------------


def _elements(rule: ElementwiseRule, cuts: tuple[int, ...], seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Parameters and states of 37 elements after a few steps in pieces that end at `cuts`."""
    parameters = _draw_values((37,), seed, dtype)
    states = {name: torch.zeros_like(parameters) for name in rule.states}
    for step in range(1, _STEPS + 1):
        gradients = _draw_values((37,), seed + step, dtype)
        given = gradients.clone()
        for start, stop in zip((0, *cuts), (*cuts, 37), strict=True):
            parts = {name: state[start:stop] for name, state in states.items()}
            rule.update(parameters[start:stop], gradients[start:stop], parts, step=step, learning_rate=1e-2,
                        weight_decay=0.1)
            assert set(parts) == set(states), f"states were added or removed: {set(parts) ^ set(states)}"
        assert torch.equal(gradients, given), "gradients were changed, which others may still read"
    return [parameters, *states.values()]


def _check_elements(rule: ElementwiseRule, dtype: torch.dtype, seed: int, tolerance: float) -> None:
    assert isinstance(rule.states, tuple), f"states must be a tuple of names, and is a {type(rule.states).__name__}"
    for name in rule.states:
        check_state_name(name, type(rule).__name__)
    expected = _elements(rule, (), seed, dtype)
    assert not torch.equal(expected[0],
                           _draw_values((37,), seed, dtype)), "no parameter has changed: update works in place"
    for cuts in ((), (1, 8, 36), (16, 32)):
        for name, one, other in zip(("parameters", *rule.states), _elements(rule, cuts, seed, dtype), expected,
                                    strict=True):
            _assert_alike(one, other, tolerance, f"{name} in pieces that end at {cuts or 37}")


# --- rules for whole tensors -----------------------------------------------------------------------------------------


def _halves(shape: tuple[int, ...], mesh: Mesh) -> list[Box]:
    """The box that each rank of a 2 x 2 mesh holds: the last two dims are halved."""
    boxes = []
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        box = list(whole_box(shape))
        for dim, index in ((-2, at.row), (-1, at.col)):
            half = shape[dim] // 2
            box[dim] = (index * half, half + index * half)
        boxes.append(tuple(box))
    return boxes


def _tensors(rule: TensorRule, mesh: Mesh, seed: int, dtype: torch.dtype, world: World) -> dict[str, list[Tensor]]:
    """Name -> this rank's part of a parameter and its states after a few steps."""
    group = world.backend.group("update", mesh.groups("row", "col")) if mesh.size > 1 else None
    updates: dict[str, TensorUpdate] = {}
    for step in range(1, _STEPS + 1):
        for number, shape in enumerate(_SHAPES):
            name = f"tensor{number}"
            is_split = group is not None and len(shape) > 1
            box = _halves(shape, mesh)[world.rank] if is_split else whole_box(shape)
            split = TensorSplit(group=group, boxes=_halves(shape, mesh), device=torch.device("cpu")) \
                if is_split and group is not None else None
            if not rule.applies_to(name, shape, in_layer=True):
                continue
            index = index_of(box, whole_box(shape))
            if step == 1:
                parameter = _draw_values(shape, seed + number, dtype)[index].clone()
                states = {state: torch.zeros(parameter.shape if own is None else own, dtype=dtype)
                          for state, own in rule.state_shapes(shape).items()}
            else:
                parameter, states = updates[name].parameter, dict(updates[name].states)
            updates[name] = TensorUpdate(
                shape=shape, parameter=parameter,
                gradient=_draw_values(shape, seed + 100 * step + number, dtype)[index],
                states=states, step=step, learning_rate=1e-2, weight_decay=0.1, split=split)
        rule.update_tensors(updates)
    return {name: [tensor.parameter, *tensor.states.values()] for name, tensor in updates.items()}


def _check_tensors(rule: TensorRule, dtype: torch.dtype, seed: int, tolerance: float) -> None:
    for shape in _SHAPES:
        for name in rule.state_shapes(shape) if rule.applies_to("tensor", shape, in_layer=True) else ():
            check_state_name(name, type(rule).__name__)
    work = partial(_tensors, rule, Mesh(), seed, dtype)
    (expected,), (again,) = run_ranks(work, 1), run_ranks(work, 1)
    assert expected, "applies_to refuses every tensor, so that nothing is updated"
    for name, tensors in expected.items():
        shape = _SHAPES[int(name.removeprefix("tensor"))]
        assert not torch.equal(tensors[0], _draw_values(shape, seed + int(name.removeprefix("tensor")), dtype)), \
            f"{name} has not changed: update_tensors works in place"
        for one, other in zip(again[name], tensors, strict=True):
            assert torch.equal(one, other), f"{name} differs from run to run"
    mesh = Mesh(row=2, col=2)
    for rank, found in enumerate(run_ranks(partial(_tensors, rule, mesh, seed, dtype), mesh.size)):
        for name, tensors in found.items():
            shape = _SHAPES[int(name.removeprefix("tensor"))]
            for one, other in zip(tensors, expected[name], strict=True):
                part = one.shape != other.shape
                mine = other[index_of(_halves(shape, mesh)[rank], whole_box(shape))] if part else other
                _assert_alike(one, mine, tolerance, f"elements of {name} of shape {shape} on 2 rows and 2 columns")
