"""Keys and values of earlier tokens, so that a decoder computes only each new token (a KV cache).

A block that mixes positions has a `DecodingCache`, which is closed while the model trains. Generation opens it; the
block then gets only the new tokens, and finds the keys and values of the same samples' earlier tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ranvier import keyed_random


class DecodingCache(nn.Module):
    """Keys and values that one block keeps of each text that is being generated, by the samples of the microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self._is_open = False
        self._lengths: dict[tuple[int, ...], int] = {}
        self._kept: dict[tuple[int, ...], tuple[Tensor, ...]] = {}

    def open(self) -> None:
        """Begin to continue texts: in each call, a block has seen the tokens of earlier calls."""
        self._is_open = True

    def close(self) -> None:
        """Forget all texts; each call is again a complete sequence."""
        self._is_open = False
        self._lengths.clear()
        self._kept.clear()

    def forget(self, samples: Iterable[int]) -> None:
        """Free the entries of a microbatch of these samples, whose texts are complete."""
        key = tuple(samples)
        self._lengths.pop(key, None)
        self._kept.pop(key, None)

    def advance(self, length: int) -> int:
        """The number of tokens before these `length` new ones of the current samples; 0 while closed."""
        if not self._is_open:
            return 0
        key = keyed_random.current_samples()
        before = self._lengths.get(key, 0)
        self._lengths[key] = before + length
        return before

    def extend(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Tensors [B, heads, S, D] of the earlier tokens followed by the new ones, in newly allocated memory; while
        closed, `new` itself."""
        if not self._is_open:
            return new
        key = keyed_random.current_samples()
        if key in self._kept:
            new = tuple(torch.cat(pair, dim=2) for pair in zip(self._kept[key], new, strict=True))
        self._kept[key] = new
        return new


class WholeTexts(nn.Module):
    """A block that mixes positions but has no `DecodingCache`: it is called with all tokens of a text."""


def caches_of(blocks: nn.Module) -> list[DecodingCache]:
    """The caches of a rank's blocks."""
    return [module for module in blocks.modules() if isinstance(module, DecodingCache)]
