"""Selection of samples: held-out samples, if a set names none, subsets, and mixtures of several sources by weight."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ranvier import keyed_random
from ranvier.block import State
from ranvier.config.run import Data, Run
from ranvier.data.task import Dataset, Share, Targets, padded_inputs, padded_targets, sample_lengths
from ranvier.errors import DataError

_Sample = TypeVar("_Sample")


@dataclass(frozen=True, kw_only=True)
class Part(Generic[_Sample]):
    """A data set. fingerprint: of its content, known without parsing it; read: (training, held out), where held out is
    None if the data set has no such part."""

    name: str
    fingerprint: str
    read: Callable[[], tuple[list[_Sample], list[_Sample] | None]]


def read_parts(train: Part[_Sample], held: Part[_Sample] | None) -> tuple[list[_Sample], list[_Sample] | None]:
    """Training samples, and held-out samples: those of `held`, else those of `train`, which may have none."""
    samples, own = train.read()
    if held is None:
        return samples, own
    first, second = held.read()
    return samples, first if second is None else second


def held_out(names: Sequence[str], count: int | None = None) -> np.ndarray:
    """[len(names)] bool: `count` samples, by default every tenth and at least one of two, by the hash of their names
    (a text, a path). Equal names stay together, except at the boundary."""
    hashes = [hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest() for name in names]
    order = sorted(range(len(names)), key=lambda number: (hashes[number], number))
    if count is None:
        count = max(1, len(names) // 10) if len(names) > 1 else 0
    chosen = np.zeros(len(names), dtype=bool)
    chosen[order[:count]] = True
    return chosen


def split_held_out(samples: Sequence[_Sample], chosen: Sequence[bool] | np.ndarray
                   ) -> tuple[list[_Sample], list[_Sample]]:
    """(training samples, held-out samples): the chosen ones are held out."""
    return ([sample for sample, here in zip(samples, chosen, strict=True) if not here],
            [sample for sample, here in zip(samples, chosen, strict=True) if here])


def check_parted(train: Sequence[object], held: Sequence[object], what: str, name: str) -> None:
    """DataError if there is nothing to train on, or nothing held out. what: the samples, in words; name: of the data
    set."""
    if not train or not held:
        raise DataError(f"has too few {what} to train on some and hold out others", code="too-few-samples",
                        where=f"data.train {name}", value=len(train) + len(held),
                        remedy="Give at least two, or more in `--data.eval`.")


def first_of_order(total: int, count: int | None, seed: int, setting: str) -> np.ndarray | None:
    """[count] int64: the numbers of the first `count` of `total` items in the seed's order, ascending; None is all.
    DataError if there are fewer items. setting: the name of the setting with `count`."""
    if count is None or count == total:
        return None
    if count > total:
        raise DataError(f"is more than the {total:,} available", code="more-samples-than-there-are", where=setting,
                        value=count, remedy=f"Set --{setting} {total} or less, or leave it out for all.")
    hashes = keyed_random.bits(keyed_random.key("subset", setting, seed), torch.arange(total, dtype=torch.int64))
    return torch.argsort(hashes, stable=True)[:count].sort().values.numpy()


class Subset:
    """Some samples of a set, renumbered from 0, with their lengths, if the set has them."""

    def __init__(self, whole: Dataset, chosen: np.ndarray) -> None:
        self.whole, self.chosen = whole, chosen
        lengths = sample_lengths(whole)
        self.sample_lengths = None if lengths is None else lengths[chosen]

    def __len__(self) -> int:
        return len(self.chosen)

    def inputs(self, samples: np.ndarray, epochs: np.ndarray, length: int | None = None) -> State:
        """length: as in `VariableLengthDataset.inputs`; None is the default of `whole`."""
        return padded_inputs(self.whole, self.chosen[samples], epochs, length)

    def targets(self, samples: np.ndarray, length: int | None = None) -> Targets:
        """length: as in `VariableLengthDataset.targets`; None is the default of `whole`."""
        return padded_targets(self.whole, self.chosen[samples], length)


def numbers_taken(run: Run, totals: Sequence[int]) -> list[np.ndarray | None]:
    """Numbers of the samples that the run takes for training and held out. totals: existing samples; see
    `first_of_order`."""
    return [first_of_order(total, count, run.seed, f"data.{name}-samples") for total, name, count in zip(
        totals, ("train", "eval"), (run.data.train_samples, run.data.eval_samples), strict=True)]


def take_subsets(run: Run, parts: Sequence[Dataset]) -> list[Dataset]:
    """The samples of the training and the held-out part that the run takes."""
    return [part if numbers is None else Subset(part, numbers)
            for part, numbers in zip(parts, numbers_taken(run, list(map(len, parts))), strict=True)]


def subset_settings(run: Run) -> tuple[object, ...]:
    """Settings that decide which samples the run takes, for fingerprints."""
    data = run.data
    return data.train_samples, data.eval_samples, run.seed if data.train_samples or data.eval_samples else None


# --- mixtures ---------------------------------------------------------------------------------------------------------

# Several corpora or data sets in one run, by weight.
# A weight is the share of a source in the samples of an epoch. The epoch ends with the source that is used up first;
# the next epoch continues with the following samples of the other sources, so that every sample of a source is taken
# once before any is taken again. Without weights, an epoch has every sample of every source once.


_Tensors = TypeVar("_Tensors", bound=Tensor | dict[str, Tensor])


@dataclass(frozen=True, kw_only=True)
class Source:
    """A part of a mixture. weight: relative to the other sources; None if no source has one."""

    name: str
    weight: float | None = None


def sources_of(data: Data, alone: str) -> list[Source]:
    """Sources of the run's data: its mixture, or `alone`. DataError for a weight that is not a positive number, and if
    only some sources have a weight."""
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
        self.sample_lengths = None if any(length is None for length in lengths) else np.concatenate(
            [length for length in lengths if length is not None])

    def __len__(self) -> int:
        return int(self._stops[-1])

    def inputs(self, samples: np.ndarray, epochs: np.ndarray, length: int | None = None) -> State:
        """length: as in `VariableLengthDataset.inputs`."""
        return self._gather(samples, lambda part, own, rows: padded_inputs(part, own, epochs[rows], length))

    def targets(self, samples: np.ndarray, length: int | None = None) -> Targets:
        """length: as in `VariableLengthDataset.targets`."""
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
    """Several datasets as one; a single dataset is returned unchanged."""
    return parts[0] if len(parts) == 1 else Joined(parts)


def spread(parts: Sequence[Dataset]) -> Dataset:
    """The parts as one data set, as in `join`, with the samples of all parts evenly spread, so that an evaluation of
    the first samples sees each part."""
    if len(parts) == 1:
        return parts[0]
    places = np.concatenate([(np.arange(len(part)) + 0.5) / len(part) for part in parts])
    return Subset(Joined(parts), np.argsort(places, kind="stable"))
