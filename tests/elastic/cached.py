"""A small frozen prefix, caches of its outputs, and what was computed for them."""

from __future__ import annotations

import torch
from torch import nn

from ranvier.elastic.cache import AutoCache
from ranvier.elastic.cache_file import RunFolder

NUM_SAMPLES = 40


class Shift(nn.Module):
    """Depends on a parameter and on a buffer; the same bits however many rows there are."""

    def __init__(self, number, width, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.scale = nn.Parameter(torch.rand(width, generator=generator).to(dtype) + 0.5, requires_grad=False)
        self.register_buffer("offset", torch.randn(width, generator=generator).to(dtype), persistent=False)

    def forward(self, state):
        if isinstance(state, dict):
            return state | {"x": self.forward(state["x"])}
        return torch.sin(state * self.scale) * 3 + self.offset


class Prefix:
    """Frozen blocks, their inputs by sample, and every call for a computation: (first block, rows)."""

    def __init__(self, depth=4, width=6, dtype=torch.float32, state="tensor"):
        self.depth = depth
        self.blocks = [(number, f"layer{number}", Shift(number, width, dtype)) for number in range(8)]
        self.x = torch.randn(NUM_SAMPLES + 3, 5, width, generator=torch.Generator().manual_seed(9)).to(dtype)
        self.state, self.calls = state, []

    @property
    def frozen(self):
        return self.blocks[:self.depth]

    def inputs(self, samples):
        x = self.x[torch.tensor(samples, dtype=torch.int64)]
        if self.state == "tensor":
            return x
        return {"x": x, "mask": x[:, :, 0] > 0, "place": (x * 1000).to(torch.int64), "scalar": x[:, 0, 0]}

    def compute(self, first, state, rows, *, other_keys=False):
        self.calls.append((first, None if rows is None else rows.tolist()))
        for _, _, module in self.frozen[first:]:
            state = module(state)
        return state

    def truth(self, samples):
        state = self.inputs(samples)
        for _, _, module in self.frozen:
            state = module(state)
        return state


class Cached:
    """A cache, used as the first stage uses it. knows: it has the format of a row from the check of its blocks."""

    def __init__(self, folder, prefix=None, *, token="run", knows=False, **options):
        self.prefix, self.told = prefix or Prefix(), []
        options = {"num_samples": NUM_SAMPLES, "precision": "full", "max_bytes": 1 << 24,
                   "device": torch.device("cpu"), "warn": self.told.append} | options
        self.folder = RunFolder(folder, token)
        self.cache = AutoCache(self.folder, blocks=self.prefix.frozen, **options)
        if knows:
            assert self.cache.problem(self.prefix.inputs([0]), self.prefix.compute) is None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.cache.close()

    def __call__(self, *samples):
        """The state of these samples, and the computations that it needed."""
        self.prefix.calls.clear()
        state = self.cache.forward(torch.tensor(samples, dtype=torch.int64), self.prefix.inputs(samples),
                                   self.prefix.compute)
        return state, list(self.prefix.calls)

    def right(self, *samples):
        """Check that the state is bit-identical to the uncached state; returns the computations that it needed."""
        state, calls = self(*samples)
        same(state, self.prefix.truth(samples))
        return calls

    def deepen(self, depth):
        self.prefix.depth = depth
        self.cache.set_blocks(self.prefix.frozen)


def same(state, truth):
    """Check that states are bit-identical, with the same formats and shapes."""
    if isinstance(truth, dict):
        assert list(state) == list(truth)
        for name in truth:
            same(state[name], truth[name])
        return
    assert state.dtype is truth.dtype and state.shape == truth.shape and not state.requires_grad
    plain = {"copy": True, "memory_format": torch.contiguous_format}
    assert torch.equal(*(each.flatten().to(each.dtype, **plain).view(torch.uint8) for each in (state, truth)))


def files(folder):
    """The cache files of all runs in a folder."""
    return sorted(folder.glob("*/*.rows"))


MISS, HIT = [(0, None)], []
