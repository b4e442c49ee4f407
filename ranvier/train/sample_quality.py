"""What a reader can expect of a run's sample text, from the held-out loss."""

from __future__ import annotations

import math

import numpy as np
import torch

from ranvier.data.task import Dataset
from ranvier.tensor.split.loss import IGNORED

COUNTED_TOKENS = 1 << 18
"""Training tokens that `frequency_entropy` counts, at most about."""


def frequency_entropy(data: Dataset) -> float:
    """Entropy in nats of the frequencies of single tokens, over samples from all of `data`, whose targets are tokens.

    A model with this loss has learnt how frequent each token is, and nothing of their order.
    """
    first = data.targets(np.zeros(1, np.int64))
    assert isinstance(first, torch.Tensor)  # of a task that writes text
    samples = np.unique(np.linspace(0, len(data) - 1, max(1, COUNTED_TOKENS // first.numel())).astype(np.int64))
    targets = data.targets(samples)
    assert isinstance(targets, torch.Tensor)
    counts = torch.bincount(targets[targets != IGNORED])
    frequencies = counts[counts > 0].double() / counts.sum()
    return -float((frequencies * frequencies.log()).sum())


def expectation(loss: float | None, entropy: float) -> str:
    """One sentence above the sample text. loss: held-out, in nats per token. entropy: of `frequency_entropy`."""
    if loss is None or not math.isfinite(loss):
        return "sample text (no held-out loss says how good it can be):"
    if loss >= entropy:
        return (f"sample text: expect random tokens. The held-out loss is {loss:.2f} per token, and the frequencies of "
                f"single tokens alone give {entropy:.2f}: the model has not learnt their order yet; train longer.")
    return (f"sample text: the held-out loss is {loss:.2f} per token, as uncertain as a choice among "
            f"{math.exp(loss):,.0f} tokens; the frequencies of single tokens alone give {entropy:.2f}.")
