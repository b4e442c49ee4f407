"""Selection of a set's samples: held-out ones where a set names none, and fewer than there are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from ranvier import keyed_random
from ranvier.block import State
from ranvier.config.run import Run
from ranvier.data.task import Dataset, Targets, padded_inputs, padded_targets, sample_lengths
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
    """Training samples, and those held out: of `held`, else of `train`, which may have none."""
    samples, own = train.read()
    if held is None:
        return samples, own
    first, second = held.read()
    return samples, first if second is None else second


def held_out(names: Sequence[str], count: int | None = None) -> np.ndarray:
    """[len(names)] bool: `count` samples, by default every tenth and at least one of two, by the hash of their names
    (a text, a path). Equal names lie together, but for those at the boundary."""
    hashes = [hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest() for name in names]
    order = sorted(range(len(names)), key=lambda number: (hashes[number], number))
    if count is None:
        count = max(1, len(names) // 10) if len(names) > 1 else 0
    chosen = np.zeros(len(names), dtype=bool)
    chosen[order[:count]] = True
    return chosen


def parted(samples: Sequence[_Sample], chosen: Sequence[bool] | np.ndarray) -> tuple[list[_Sample], list[_Sample]]:
    """(training samples, held-out ones): the latter are those that are chosen."""
    return ([one for one, here in zip(samples, chosen, strict=True) if not here],
            [one for one, here in zip(samples, chosen, strict=True) if here])


def check_parted(train: Sequence[object], held: Sequence[object], what: str, name: str) -> None:
    """DataError where there is nothing to train on, or nothing held out. what: the samples, in words; name: of the data
    set."""
    if not train or not held:
        raise DataError(f"has too few {what} to train on some and hold out others", code="too-few-samples",
                        where=f"data.train {name}", value=len(train) + len(held),
                        remedy="Give at least two, or more in `--data.eval`.")


def first_of_order(total: int, count: int | None, seed: int, setting: str) -> np.ndarray | None:
    """[count] int64: the first of `total` things by the seed's order, ascending; None is all. DataError where there are
    fewer. setting: the one that says `count`."""
    if count is None or count == total:
        return None
    if count > total:
        raise DataError(f"is more than the {total:,} that there are", code="more-samples-than-there-are", where=setting,
                        value=count, remedy=f"Set --{setting} {total} or less, or leave it out for all.")
    hashes = keyed_random.bits(keyed_random.key("subset", setting, seed), torch.arange(total, dtype=torch.int64))
    return torch.argsort(hashes, stable=True)[:count].sort().values.numpy()


class Subset:
    """Some samples of a set, renumbered from 0. Their lengths are known where the set has them."""

    def __init__(self, whole: Dataset, chosen: np.ndarray) -> None:
        self.whole, self.chosen = whole, chosen
        lengths = sample_lengths(whole)
        self.sample_lengths = None if lengths is None else lengths[chosen]

    def __len__(self) -> int:
        return len(self.chosen)

    def inputs(self, samples: np.ndarray, epochs: np.ndarray, length: int | None = None) -> State:
        """length: as `VariableLengthDataset.inputs` takes it; None is the whole's own."""
        return padded_inputs(self.whole, self.chosen[samples], epochs, length)

    def targets(self, samples: np.ndarray, length: int | None = None) -> Targets:
        """length: as `VariableLengthDataset.targets` takes it; None is the whole's own."""
        return padded_targets(self.whole, self.chosen[samples], length)


def numbers_taken(run: Run, totals: Sequence[int]) -> list[np.ndarray | None]:
    """Numbers of the samples that the run takes, of so many for training and held out; see `first_of_order`."""
    return [first_of_order(total, count, run.seed, f"data.{name}-samples") for total, name, count in zip(
        totals, ("train", "eval"), (run.data.train_samples, run.data.eval_samples), strict=True)]


def taken(run: Run, parts: Sequence[Dataset]) -> list[Dataset]:
    """The samples that the run takes of its training and its held-out part."""
    return [part if numbers is None else Subset(part, numbers)
            for part, numbers in zip(parts, numbers_taken(run, list(map(len, parts))), strict=True)]


def chosen(run: Run) -> tuple[object, ...]:
    """Settings that decide which samples the run takes, for fingerprints."""
    data = run.data
    return data.train_samples, data.eval_samples, run.seed if data.train_samples or data.eval_samples else None
