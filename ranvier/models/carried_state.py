"""The carried state, which blocks hand on: one tensor, or a dict of named tensors. Anything else is refused."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ranvier.errors import ModelError

State = Tensor | dict[str, Tensor]


def named(state: State, where: str) -> dict[str, Tensor]:
    """A carried state as named tensors; a single tensor has the name "". ModelError for anything else."""
    if isinstance(state, Tensor):
        return {"": state}
    if isinstance(state, dict) and state and all(
            isinstance(name, str) and name and isinstance(tensor, Tensor) for name, tensor in state.items()):
        return state
    what, remedy = _refusal(state)
    raise ModelError(f"must return a tensor or a non-empty dict of named tensors{what}", where=where,
                     value=type(state).__name__, remedy=remedy)


def carried(tensors: Mapping[str, Tensor]) -> State:
    """The inverse of `named`."""
    return tensors[""] if "" in tensors else dict(tensors)


def wrapping_hint(state: object) -> str | None:
    """How to make a block of a module that returns `state`: the line that a module around it needs; None where it
    returns a carried state, or nothing that could be one."""
    taken = _tensor_in(state)
    return None if taken is None else ("Put a module around it with the line: def forward(self, state): return "
                                       f"self.module(state){taken}")


def _tensor_in(state: object) -> str | None:
    """The expression that takes a tensor out of what a module returned: [0] of nn.LSTM's tuple, or ["logits"]."""
    if isinstance(state, (tuple, list)):
        places = [f"[{place}]" for place, value in enumerate(state) if isinstance(value, Tensor)]
    elif isinstance(state, Mapping) and type(state) is not dict:
        places = [f'["{name}"]' for name, value in state.items() if isinstance(value, Tensor)]
    else:
        places = []
    return next(iter(places), None)


def _refusal(state: object) -> tuple[str, str]:
    """What of `state` is wrong, and what to do."""
    if (hint := wrapping_hint(state)) is not None:
        return "", f"{hint}."
    remedy = "Return the carried state that the next block takes."
    if isinstance(state, dict):
        for name, value in state.items():
            if not isinstance(name, str) or not name:
                return f", and one key is {name!r}", "Name every tensor with a non-empty text."
            if not isinstance(value, Tensor):
                return (f", and under the key {name!r} is a {type(value).__name__}",
                        "Make it a tensor, or leave it out of the carried state.")
    return "", remedy
