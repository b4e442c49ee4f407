"""Several corpora or data sets in one run, by weight.

A weight is the share of a source in the samples of an epoch. The epoch ends with the source that is used up first; of
the others the next epoch takes the samples that follow, so that every sample of a source is taken once before any of it
is taken again. Without weights, an epoch has every sample of every source once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ranvier.block import State
from ranvier.config.run import Data
from ranvier.data.subset import Subset
from ranvier.data.task import Dataset, Share, Targets, padded_inputs, padded_targets, sample_lengths
from ranvier.errors import DataError

_Tensors = TypeVar("_Tensors", bound=Tensor | dict[str, Tensor])


@dataclass(frozen=True, kw_only=True)
class Source:
    """A part of a mixture. weight: relative to those of the others; None where no source has one."""

    name: str
    weight: float | None = None


def sources_of(data: Data, alone: str) -> list[Source]:
    """Sources of the run's data: its mixture, or `alone`. DataError for a weight that is no positive number, and where
    only some sources have one."""
    if not data.mixture:
        return [Source(name=alone)]
    found = [_source(entry) for entry in data.mixture]
    if len({source.weight is None for source in found}) > 1:
        raise DataError("has sources with and without a weight", code="mixture-partly-weighted", where="data.mixture",
                        value=", ".join(data.mixture), remedy="Give each of them a weight, as NAME=WEIGHT, or none.")
    names = [source.name for source in found]
    if len(set(names)) < len(names):
        raise DataError("has a source twice", code="mixture-source-twice", where="data.mixture",
                        value=", ".join(data.mixture), remedy="Name it once, with a larger weight.")
    return found


def _source(entry: str) -> Source:
    name, equals, text = entry.rpartition("=")
    if not equals:
        return Source(name=entry)
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not name or not 0 < weight < math.inf:
        raise DataError("is not NAME=WEIGHT with a positive number", code="malformed-mixture", where="data.mixture",
                        value=entry, remedy="Give for example wiki.jsonl=3.")
    return Source(name=name, weight=weight)


def shares(sources: Sequence[Source], sizes: Sequence[int]) -> tuple[Share, ...]:
    """Number of samples of each source in an epoch. sizes: samples of each. Empty for a single source."""
    if len(sources) == 1:
        return ()
    weights = [size if source.weight is None else source.weight for source, size in zip(sources, sizes, strict=True)]
    total = min(size * sum(weights) / weight for size, weight in zip(sizes, weights, strict=True))
    firsts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    return tuple(Share(first=int(first), count=size, taken=min(size, max(1, round(total * weight / sum(weights)))))
                 for first, size, weight in zip(firsts, sizes, weights, strict=True))


class Joined:
    """Several datasets as one: the samples of the second follow those of the first."""

    def __init__(self, parts: Sequence[Dataset]) -> None:
        self._parts = parts
        self._stops = np.cumsum([len(part) for part in parts])
        lengths = [sample_lengths(part) for part in parts]
        self.sample_lengths = None if any(one is None for one in lengths) else np.concatenate(
            [one for one in lengths if one is not None])

    def __len__(self) -> int:
        return int(self._stops[-1])

    def inputs(self, samples: np.ndarray, epochs: np.ndarray, length: int | None = None) -> State:
        """length: as `VariableLengthDataset.inputs` takes it."""
        return self._gather(samples, lambda part, own, rows: padded_inputs(part, own, epochs[rows], length))

    def targets(self, samples: np.ndarray, length: int | None = None) -> Targets:
        """length: as `VariableLengthDataset.targets` takes it."""
        return self._gather(samples, lambda part, own, rows: padded_targets(part, own, length))

    def _gather(self, samples: np.ndarray, read: Callable[[Dataset, np.ndarray, np.ndarray], _Tensors]) -> _Tensors:
        """Rows of all parts in the order of `samples`. read: (part, its own sample numbers, which rows they are)."""
        which = np.searchsorted(self._stops, samples, side="right")
        pieces, order = [], []
        for number in np.unique(which).tolist():
            rows = np.flatnonzero(which == number)
            own = samples[rows] - (self._stops[number - 1] if number else 0)
            pieces.append(read(self._parts[number], own, rows))
            order.append(rows)
        back = torch.from_numpy(np.argsort(np.concatenate(order)))

        def joined(*tensors: Tensor) -> Tensor:
            return torch.cat(tensors)[back]

        found: _Tensors = tree_map(joined, *pieces)
        return found


def join(parts: Sequence[Dataset]) -> Dataset:
    """One dataset of several; the only one as it is."""
    return parts[0] if len(parts) == 1 else Joined(parts)


def spread(parts: Sequence[Dataset]) -> Dataset:
    """The parts as one data set, as of `join`, with the samples of all parts evenly spread: an evaluation of the first
    ones sees each part."""
    if len(parts) == 1:
        return parts[0]
    places = np.concatenate([(np.arange(len(part)) + 0.5) / len(part) for part in parts])
    return Subset(Joined(parts), np.argsort(places, kind="stable"))
