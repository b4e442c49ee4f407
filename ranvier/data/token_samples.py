"""Samples of different lengths from one long row of tokens, one per sequence or packed; and texts for an encoder.

    TokenSamples     one sample a sequence, padded     inputs ids [B, L]                               targets [B, L]
    PackedSamples    several samples a sequence        inputs {"ids": [B, S], "segments": [B, S]}      targets [B, S]
    EncoderTexts     one or two texts, padded          inputs {"ids", "mask", "types"}, [B, L] each

A sample of n + 1 tokens has n positions, each with the next token as its target. Packed samples attend only to
themselves (`ranvier.models.packed_sequences`), so that both forms give the same losses and gradients.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ranvier.block import State
from ranvier.data.arrays import Arrays, Tokens
from ranvier.tensor.split.loss import IGNORED


class TokenSamples:
    """Samples that are consecutive parts of one row of tokens.

    tokens: [T], any integers, which may be a memory map or a token file. starts, stops: [N] int64, first token of each
    sample and the one after its last. is_target: [T], whether the model learns to write this token; None if it learns
    all of them.
    longest: positions to which samples are padded by default; no sample has more.
    """

    def __init__(self, tokens: np.ndarray | Tokens, starts: np.ndarray, stops: np.ndarray, longest: int,
                 is_target: np.ndarray | None = None) -> None:
        self._tokens, self._starts, self._is_target, self.longest = tokens, starts, is_target, longest
        self.sample_lengths = np.asarray(stops - starts - 1, dtype=np.int64)
        assert len(starts) == 0 or 1 <= self.sample_lengths.min() <= self.sample_lengths.max() <= longest

    def __len__(self) -> int:
        return len(self._starts)

    def inputs(self, samples: np.ndarray, epochs: np.ndarray | None = None, length: int | None = None) -> Tensor:
        """ids [b, length] int64, with token 0 as padding, which no token before it attends to."""
        place, exists = self._places(samples, self.longest if length is None else length)
        return torch.from_numpy(np.where(exists, self._tokens[place].astype(np.int64), 0))

    def targets(self, samples: np.ndarray, length: int | None = None) -> Tensor:
        """[b, length] int64: the token after each position, or IGNORED."""
        place, exists = self._places(samples, self.longest if length is None else length)
        place = place + exists
        if self._is_target is not None:
            exists = exists & (self._is_target[place] != 0)
        return torch.from_numpy(np.where(exists, self._tokens[place].astype(np.int64), IGNORED))

    def num_targets(self) -> int:
        """The number of targets of all samples."""
        if self._is_target is None:
            return int(self.sample_lengths.sum())
        counts = np.concatenate([[0], np.cumsum(self._is_target != 0)])
        return int((counts[self._starts + self.sample_lengths + 1] - counts[self._starts + 1]).sum())

    def _places(self, samples: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """[b, length]: the places of tokens in the row, and whether the sample has this position."""
        place = np.arange(length)
        exists = place < self.sample_lengths[samples, None]
        return np.where(exists, self._starts[samples, None] + place, self._starts[samples, None]), exists


class PackedSamples:
    """Sequences of `samples.longest` positions, each with several consecutive samples.

    bins: [N] int64, the sequence of each sample, numbered from 0 without a gap.
    """

    def __init__(self, samples: TokenSamples, bins: np.ndarray) -> None:
        self.samples = samples
        self._members = np.argsort(bins, kind="stable")
        self._firsts = np.concatenate([[0], np.cumsum(np.bincount(bins))])

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def members(self, sequence: int) -> np.ndarray:
        """Numbers of the samples in a sequence, in their order."""
        return self._members[self._firsts[sequence]:self._firsts[sequence + 1]]

    def inputs(self, samples: np.ndarray, epochs: np.ndarray | None = None) -> dict[str, Tensor]:
        """{"ids", "segments"}, [b, S] int64 each. samples: numbers of sequences."""
        ids = torch.zeros(len(samples), self.samples.longest, dtype=torch.int64)
        segments = torch.zeros_like(ids)
        for row, segment, place, member, length in self._places(samples):
            ids[row, place], segments[row, place] = self.samples.inputs(member, length=length)[0], segment
        return {"ids": ids, "segments": segments}

    def targets(self, samples: np.ndarray) -> Tensor:
        """[b, S] int64: the token after each position in its own sample, or IGNORED."""
        targets = torch.full((len(samples), self.samples.longest), IGNORED, dtype=torch.int64)
        for row, _, place, member, length in self._places(samples):
            targets[row, place] = self.samples.targets(member, length=length)[0]
        return targets

    def _places(self, sequences: np.ndarray) -> Iterator[tuple[int, int, slice, np.ndarray, int]]:
        """Row, number from 1, positions, number among all, and length of each sample in these sequences."""
        for row, sequence in enumerate(sequences.tolist()):
            start = 0
            for number, member in enumerate(self.members(sequence), start=1):
                length = int(self.samples.sample_lengths[member])
                yield row, number, slice(start, start + length), np.array([member]), length
                start += length


class EncoderTexts:
    """Texts, or pairs of texts, with special tokens: ids [N, S], lengths [N], firsts [N] (place of the second text's
    first token)."""

    def __init__(self, arrays: Arrays) -> None:
        self._ids, self.firsts = arrays.arrays["ids"], arrays.arrays["firsts"]
        self.sample_lengths = np.asarray(arrays.arrays["lengths"], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ids)

    def inputs(self, samples: np.ndarray, epochs: np.ndarray | None = None, length: int | None = None) -> State:
        """length: tokens to which samples are padded, at least as many as each has; None is the sequence."""
        ids = self._ids[samples, :length].astype(np.int64)
        place = np.arange(ids.shape[1])
        mask = place < self.sample_lengths[samples, None]
        types = mask & (place >= self.firsts[samples, None])
        return {"ids": torch.from_numpy(ids), "mask": torch.from_numpy(mask).long(),
                "types": torch.from_numpy(types).long()}


def best_fit(lengths: np.ndarray, size: int) -> np.ndarray:
    """[N] int64: the bin of `size` that each item goes into, by best-fit decreasing (Johnson, 1974): the fullest bin
    with enough space, the longest items first. The same lengths always give the same bins.

    lengths: [N], from 1 to `size`.
    """
    bins = np.empty(len(lengths), dtype=np.int64)
    spaces: list[int] = []  # spaces left in open bins, ascending
    open_bins: dict[int, list[int]] = {}
    count = 0
    for number in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[number])
        place = bisect_left(spaces, length)
        if place == len(spaces):
            chosen, left, count = count, size - length, count + 1
        else:
            space = spaces[place]
            chosen, left = open_bins[space].pop(), space - length
            if not open_bins[space]:
                del open_bins[space], spaces[place]
        bins[number] = chosen
        if left:
            if left not in open_bins:
                insort(spaces, left)
            open_bins.setdefault(left, []).append(chosen)
    return bins


def cut_runs(starts: np.ndarray, stops: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut runs of tokens into samples of at most `longest` positions without losing any: the last token of a piece is
    the first of the next one. Runs of a single token, which have no target, are left out."""
    starts, stops = starts[stops - starts > 1], stops[stops - starts > 1]
    counts = -(-(stops - starts - 1) // longest)
    first = np.repeat(starts, counts)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    pieces = first + number * longest
    return pieces, np.minimum(pieces + longest + 1, np.repeat(stops, counts))
