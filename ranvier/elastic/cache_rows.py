"""Rows of a microbatch and the different samples among them: states are cut, joined and repeated by row here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ranvier.elastic.cache_form import Unfit
from ranvier.models.carried_state import State, carried, named

WHERE = "the frozen blocks"


class Rows:
    """The rows of one microbatch, whose samples may repeat.

    numbers: the different samples that may be kept (0 <= number < num_samples), in the order of their first rows.
    firsts: [n] int64, a row of each, and after them every row whose number is none of the data set's.
    repeats: [n] int64, how many rows each stands for.
    """

    def __init__(self, samples: Sequence[int], num_samples: int) -> None:
        self.count = len(samples)
        places: dict[int, int] = {}
        for sample in samples:
            if 0 <= sample < num_samples:
                places.setdefault(sample, len(places))
        self.numbers = list(places)
        firsts, inverse = [-1] * len(places), []
        for row, sample in enumerate(samples):
            place = places.get(sample, len(firsts))
            if place == len(firsts):
                firsts.append(row)
            elif firsts[place] < 0:
                firsts[place] = row
            inverse.append(place)
        self.firsts, self._inverse = (torch.tensor(list_, dtype=torch.int64) for list_ in (firsts, inverse))
        self.repeats = torch.bincount(self._inverse, minlength=len(firsts))
        self.plain = inverse == list(range(len(firsts)))
        """Whether every row is a sample of its own, in order."""

    def expanded(self, state: State) -> State:
        """All rows, from one of each sample (in the order of `firsts`)."""
        return state if self.plain else select(state, self._inverse)

    def reduced(self, state: State) -> State:
        """One row of each sample, from all rows. Unfit when the state's first dim is not the rows."""
        check_rows(state, self.count)
        return state if self.plain else select(state, self.firsts)


def check_rows(state: State, count: int) -> None:
    """Unfit unless every tensor of `state` has `count` rows."""
    if any(not tensor.dim() or len(tensor) != count for tensor in named(state, WHERE).values()):
        raise Unfit("the first dim of a state's tensor is not the samples")


def select(state: State, rows: Tensor) -> State:
    """Rows of a state, by their places (int64, on the cpu)."""
    return carried({name: tensor.index_select(0, rows.to(tensor.device))
                    for name, tensor in named(state, WHERE).items()})


def joined(pieces: Sequence[tuple[Tensor, State]], count: int) -> State:
    """One state of `count` rows from pieces and the places (int64, ascending, on the cpu) of their rows; Unfit when
    pieces differ in form, or have other rows than places."""
    for places, state in pieces:
        check_rows(state, len(places))
    if len(pieces) == 1 and len(pieces[0][0]) == count:
        return pieces[0][1]
    states = [named(state, WHERE) for _, state in pieces]
    shapes = [{name: (tensor.shape[1:], tensor.dtype) for name, tensor in state.items()} for state in states]
    if any(shape != shapes[0] for shape in shapes):
        raise Unfit("the state's shapes differ between microbatches")
    whole = {name: tensor.new_empty((count, *tensor.shape[1:])) for name, tensor in states[0].items()}
    for (places, _), state in zip(pieces, states, strict=True):
        for name, tensor in state.items():
            whole[name].index_copy_(0, places.to(tensor.device), tensor)
    return carried(whole)
