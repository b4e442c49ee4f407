"""The loss of preference tuning: the chosen one of two answers to a prompt becomes more likely than the rejected one.

The reward of an answer compares its likelihood with that under a reference model, and the margin is the chosen answer's
reward minus the rejected answer's reward:

    dpo      reward  beta (log p - log p_reference)               loss  -log sigmoid(margin)
    ipo      reward  beta (log p - log p_reference) / tokens      loss  (margin / beta - 1 / (2 beta))^2
    simpo    reward  beta log p / tokens                          loss  -log sigmoid(margin - gamma)

dpo: Rafailov et al., 2023, equation 7; with label smoothing e the loss of the reversed pair has weight e, that of the
pair weight 1 - e (Mitchell, 2023). ipo: Azar et al., 2023, equation 17, over the mean of an answer's tokens, as TRL
computes it. simpo: Meng et al., 2024, equation 6; it needs no reference.

Both answers of a pair are one row of the batch, so that no microbatch separates them: the chosen one comes first, and
attention stays within each (`ranvier.models.packed_sequences`). The loss needs log p alone, so it works on logits whose
vocabulary is sharded over columns.

A reward model gives each token a score; the score of an answer's last token is its reward (`RewardLoss`).

B pairs, S positions, V vocabulary; dims of size 2 are chosen, rejected.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranvier.config.run import Preference
from ranvier.errors import ModelError
from ranvier.tensor.split.loss import IGNORED, TokenLosses, last_logits


class PreferenceLoss(nn.Module):
    """Sum of the losses of pairs, and their number; a pair without a target does not count.

    targets: {"tokens": [B, S] int64, `IGNORED` where none, "rejected_from": [B] int64, the first position of the
    rejected answer, "reference": [B, 2] float64, the log p of the reference, if the loss has one}. Losses are fp32 for
    half-precision logits, else in their dtype. ModelError if targets lack an entry or do not fit.
    """

    def __init__(self, vocab: int, settings: Preference) -> None:
        super().__init__()
        self.losses, self.settings = TokenLosses(vocab), settings

    def forward(self, logits_BSV: Tensor, targets: object) -> tuple[Tensor, Tensor]:
        """logits [B, S, V], targets as above."""
        found = checked_targets(targets, self.settings)
        log_p_B2 = answer_sums(-self.losses(logits_BSV, found["tokens"]), found["rejected_from"])
        rewards_B2, counted_B = rewards(log_p_B2, found, self.settings)
        losses_B = pair_losses(rewards_B2, self.settings)
        return losses_B.where(counted_B, 0).sum(), counted_B.sum()


class RewardLoss(nn.Module):
    """Sum over pairs of -log sigmoid(chosen answer's score - rejected answer's score), and the number of pairs
    (Bradley and Terry, 1952; Ouyang et al., 2022, equation 1). A pair's margin is subtracted from the difference
    (Touvron et al., Llama 2, 2023, equation 2).

    targets: {"last": [B, 2] int64}, the position of each answer's last token, or `IGNORED` where there is no pair;
    "margin": [B] float64, if pairs have one. Number formats as in `PreferenceLoss`; on a mesh every column has all
    scores. ModelError if targets lack "last".
    """

    def forward(self, scores_BS1: Tensor, targets: object) -> tuple[Tensor, Tensor]:
        """scores [B, S, 1], targets as above."""
        rewards_B2, counted_B = last_scores(scores_BS1, targets)
        difference_B = rewards_B2[:, 0] - rewards_B2[:, 1]
        if isinstance(targets, dict) and "margin" in targets:
            difference_B = difference_B - targets["margin"].to(difference_B.dtype)
        losses_B = -functional.logsigmoid(difference_B)
        return losses_B.where(counted_B, 0).sum(), counted_B.sum()


def last_scores(scores_BS1: Tensor, targets: object) -> tuple[Tensor, Tensor]:
    """[B, 2], the score of each answer's last token, and [B], whether there is a pair."""
    rewards_B21, found = last_logits(scores_BS1, targets)
    return rewards_B21.squeeze(-1), (found["last"] != IGNORED).all(1)


def checked_targets(targets: object, settings: Preference) -> dict[str, Tensor]:
    """The targets. ModelError if one is missing."""
    needed = {"tokens", "rejected_from"} | ({"reference"} if settings.needs_reference else set())
    if not isinstance(targets, dict) or not needed <= targets.keys():
        has = sorted(targets) if isinstance(targets, dict) else type(targets).__name__
        raise ModelError(f"lack some of {', '.join(sorted(needed))}", code="targets-of-pairs",
                         where="targets of the preference loss", value=has,
                         remedy="The reference's log-probabilities are computed at the start of a run; without a "
                                "reference, set `--preference.loss simpo`.")
    return targets


def answer_sums(values_BS: Tensor, rejected_from_B: Tensor) -> Tensor:
    """[B, 2]: the sums over the positions of the chosen and of the rejected answer."""
    is_rejected_BS = torch.arange(values_BS.shape[1], device=values_BS.device) >= rejected_from_B[:, None]
    return torch.stack([values_BS.where(~is_rejected_BS, 0).sum(1), values_BS.where(is_rejected_BS, 0).sum(1)], 1)


def rewards(log_p_B2: Tensor, targets: dict[str, Tensor], settings: Preference) -> tuple[Tensor, Tensor]:
    """[B, 2], the reward of each answer, and [B], whether the pair counts, that is, both answers have targets."""
    counts_B2 = answer_sums((targets["tokens"] != IGNORED).long(), targets["rejected_from"])
    found_B2 = log_p_B2
    if settings.needs_reference:
        found_B2 = found_B2 - targets["reference"].to(log_p_B2.dtype)
    if settings.loss != "dpo":
        found_B2 = found_B2 / counts_B2.clamp(min=1)
    return settings.beta * found_B2, (counts_B2 > 0).all(1)


def pair_losses(rewards_B2: Tensor, settings: Preference) -> Tensor:
    """[B]: the loss of each pair."""
    margin_B = rewards_B2[:, 0] - rewards_B2[:, 1]
    if settings.loss == "ipo":
        return torch.square((margin_B - 0.5) / settings.beta)
    if settings.loss == "simpo":
        margin_B = margin_B - settings.gamma
    smoothing = settings.label_smoothing
    return -(1 - smoothing) * functional.logsigmoid(margin_B) - smoothing * functional.logsigmoid(-margin_B)
