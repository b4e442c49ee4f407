"""Pairs of answers as samples, and how a model is judged by them.

A sample is a pair: one sequence with the chosen answer, its prompt before it, and then the rejected one, likewise. They
are packed as `ranvier.data.token_samples.PackedSamples` packs: attention stays within each, and positions restart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ranvier.block import State
from ranvier.config.run import Preference
from ranvier.data.subset import Subset
from ranvier.data.task import Dataset, Targets
from ranvier.data.token_samples import PackedSamples, TokenSamples
from ranvier.tensor.split.loss import token_losses
from ranvier.tensor.split.preference_loss import answer_sums, checked_targets, last_scores, rewards


class PreferencePairs:
    """answers: those of pair i are 2 i, the chosen one, and 2 i + 1; a pair has at most `answers.longest` positions.

    inputs: {"ids", "segments"}, [b, length] int64 each. targets: {"tokens": [b, length], "rejected_from": [b]} int64.
    """

    def __init__(self, answers: TokenSamples) -> None:
        self._packed = PackedSamples(answers, np.arange(len(answers)) // 2)
        self._chosen_lengths = answers.sample_lengths[0::2]
        self.sample_lengths = self._chosen_lengths + answers.sample_lengths[1::2]
        assert not len(answers) % 2 and (not len(answers) or self.sample_lengths.max() <= answers.longest)

    def __len__(self) -> int:
        return len(self._packed)

    def inputs(self, samples: np.ndarray, epochs: np.ndarray, length: int | None = None) -> State:
        """length: positions, behind which both answers lie; None is the most."""
        found = self._packed.inputs(samples)
        return {name: tensor[:, :length] for name, tensor in found.items()}

    def targets(self, samples: np.ndarray, length: int | None = None) -> Targets:
        """length: as `inputs` takes it."""
        return {"tokens": self._packed.targets(samples)[:, :length],
                "rejected_from": torch.from_numpy(self._chosen_lengths[samples])}


class ScoredPairs(PreferencePairs):
    """Pairs whose answers have a position for each token, also for the last one, whose score is the answer's reward.

    margins: [len(self)], of each pair; None without. targets: those of `RewardLoss`.
    """

    def __init__(self, answers: TokenSamples, margins: np.ndarray | None = None) -> None:
        super().__init__(answers)
        self._margins = margins

    def targets(self, samples: np.ndarray, length: int | None = None) -> Targets:
        """length: has no effect."""
        ends = np.stack([self._chosen_lengths[samples], self.sample_lengths[samples]], 1)
        found = {"last": torch.from_numpy(ends - 1)}
        return found if self._margins is None else found | {"margin": torch.from_numpy(self._margins[samples])}


class WithReference(Subset):
    """Pairs with log p of both answers under a reference, which are known once the run has computed them.

    targets: those of `pairs`, and then {"reference": [b, 2] float64}: chosen, rejected.
    """

    def __init__(self, pairs: Dataset) -> None:
        super().__init__(pairs, np.arange(len(pairs)))
        self.reference: np.ndarray | None = None
        """[len(self), 2] float64; set once, before the first step."""

    def targets(self, samples: np.ndarray, length: int | None = None) -> Targets:
        """length: as `PreferencePairs.inputs` takes it."""
        found = super().targets(samples, length)
        assert isinstance(found, dict)
        return found if self.reference is None else found | {"reference": torch.from_numpy(self.reference[samples])}


@torch.no_grad()
def answer_log_p(logits_BSV: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """[B, 2]: log p of the chosen and of the rejected answer."""
    return answer_sums(-token_losses(logits_BSV, targets["tokens"]), targets["rejected_from"])


class PreferenceScoring:
    """The share of pairs whose chosen answer has the larger reward, and the mean margin between both rewards. Sums
    stay on the device until `part`. settings: of the loss; None for scores of a reward model."""

    def __init__(self, settings: Preference | None) -> None:
        self._settings = settings
        self._sums: list[Tensor] = []

    def add(self, output: State, targets: dict[str, Tensor], samples: Tensor) -> None:
        """output: logits [b, S, V], or scores [b, S, 1]; targets: those of `PreferenceLoss`, or of `RewardLoss`."""
        assert isinstance(output, Tensor)  # of a decoder
        if self._settings is None:
            rewards_B2, counted_B = last_scores(output, targets)
        else:
            found = checked_targets(targets, self._settings)
            rewards_B2, counted_B = rewards(answer_log_p(output, found), found, self._settings)
        margin_B = (rewards_B2[:, 0] - rewards_B2[:, 1]).double().where(counted_B, 0)
        self._sums.append(torch.stack([(margin_B > 0).sum().double(), margin_B.sum(), counted_B.sum().double()]))

    def part(self) -> list[float]:
        """Pairs whose chosen answer has the larger reward, the sum of margins, and pairs, that this rank has seen."""
        found: list[float] = torch.stack(self._sums).sum(0).tolist() if self._sums else [0.0, 0.0, 0.0]
        return found

    def total(self, parts: Sequence[list[float]]) -> dict[str, float]:
        """"eval_accuracy" and "eval_reward_margin" over all ranks' pairs (NaN without any), and "eval_count"."""
        right, margin, count = (sum(part[place] for part in parts) for place in range(3))
        return {"eval_accuracy": right / count if count else math.nan,
                "eval_reward_margin": margin / count if count else math.nan, "eval_count": count}
