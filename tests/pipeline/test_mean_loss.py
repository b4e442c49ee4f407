"""A loss that is a mean over its targets causes a warning: the engine divides it by their number again."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.mean_loss import is_mean
from ranvier.system.memory_tracker import MemoryTracker
from ranvier.testing.ranks import run_ranks

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
MEANS: dict[str, Loss] = {
    "cross-entropy": lambda x, y, t: F.cross_entropy(x, t),
    "smoothed": lambda x, y, t: F.cross_entropy(x, t, label_smoothing=0.1),
    "probabilities": lambda x, y, t: F.cross_entropy(x, y.softmax(1)),
    "mean": lambda x, y, t: (x - y).abs().mean(),
    "of samples": lambda x, y, t: ((x - y) ** 2).sum(1).mean(),
    "over dimensions": lambda x, y, t: (x - y).abs().mean((0, 1)).float().reshape(()),
    "batchmean": lambda x, y, t: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
    "quotient": lambda x, y, t: ((x - y) ** 2).sum() / len(x),
    "policy gradient": lambda x, y, t: -(x.log_softmax(1) * y).sum(1).mean(),
    "half and negative": lambda x, y, t: -0.5 * (1 + x - x.exp()).mean(),
    "similarity": lambda x, y, t: 1 - F.cosine_similarity(x, y).mean(),
    "entropy": lambda x, y, t: F.cross_entropy(x, t) - 0.1 * x.softmax(1).square().mean(),
    "two": lambda x, y, t: F.mse_loss(x, y) + 0.1 * F.cross_entropy(x, t),
}
SUMS: dict[str, Loss] = {
    "sum": lambda x, y, t: F.cross_entropy(x, t, reduction="sum"),
    "mean times count": lambda x, y, t: F.cross_entropy(x, t) * len(x),
    "means of features": lambda x, y, t: ((x - y) ** 2).mean(1).sum(),
    "means of samples": lambda x, y, t: sum((F.mse_loss(a, b) for a, b in zip(x, y, strict=True)), torch.zeros(())),
    "minus halves": lambda x, y, t: 1 - ((x - y) ** 2).sum() - x.sum() / 2,
    "halved": lambda x, y, t: ((x - y) ** 2).sum() / 2,
    "mean of ensemble": lambda x, y, t: torch.stack([(x - y).square().sum(), (x - y).abs().sum()]).mean(),
}


@pytest.mark.parametrize(("loss", "expected"), [*((loss, True) for loss in MEANS.values()),
                                                *((loss, False) for loss in SUMS.values())], ids=[*MEANS, *SUMS])
def test_a_mean_is_known_by_its_graph(loss: Loss, expected: bool) -> None:
    x = torch.randn(8, 9, requires_grad=True)
    assert is_mean(loss(x, torch.randn(8, 9), torch.arange(8)), 8) is expected
    with MemoryTracker():  # as when a run measures its memory
        assert is_mean(loss(x, torch.randn(8, 9), torch.arange(8)), 8) is expected


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_rank_warns_of_a_mean(reduction: str) -> None:
    def run(world):
        def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
            return F.mse_loss(outputs, targets, reduction=reduction), targets.numel()

        engine = Engine([nn.Linear(3, 4), nn.Linear(4, 2)], world, mesh=Mesh(data=2, pipe=2), loss=loss)
        for _ in range(2):
            engine.forward_backward([(torch.ones(4, 3), torch.arange(8.0).reshape(4, 2))])
        engine.close()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run_ranks(run, 4)
    assert sum("the loss is a mean" in str(one.message) for one in told) == (reduction == "mean")


def test_the_mean_of_two_heads_of_two_samples_is_none():
    x = torch.randn(2, 2, requires_grad=True)
    assert not is_mean(x.square().sum() / 2, 2) and not is_mean(x.square().sum(1).mean(), 2)
