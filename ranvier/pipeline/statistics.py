"""Loss and weight of the current batch, over all ranks, and of earlier batches of the same step.

Only code that divides by the weight waits for these sums, which run asynchronously from a rank's last forward on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ranvier.comm.collectives import ChainedWork, CompletedWork, TwoRoundWork
from ranvier.comm.protocol import Group, Work
from ranvier.errors import ModelError
from ranvier.pipeline.left_values import SameValueCheck
from ranvier.pipeline.microbatch import Microbatch
from ranvier.pipeline.same_on_ranks import SAME_TARGETS, OwnSamples, SameRates, SameTargets
from ranvier.pipeline.ties import TiedParameters
from ranvier.system.pinned_memory import HostCopy


def calls_differ(what: str) -> ModelError:
    """The error for ranks that call different methods of the engine with one batch. what: which ranks call what."""
    return ModelError(f"are different on different ranks: {what}; nothing was updated", code="calls-differ",
                      where="calls of the engine",
                      remedy="Call train_batch, forward_backward, evaluate and predict on all ranks. Only printing and "
                             "saving may be done on rank 0 alone.")


class BatchStatistics:
    """The sums of one engine. ranks: a group of all ranks; each calls `begin` and `reduce` once per batch. on_device:
    whether all ranks compute on CUDA devices."""

    sums: Tensor
    """[15 or more] fp64: sum of losses, weight, the number of ranks that have found their gradients set to zero (plus
    ranks + 1 times those that have gradients; after the reduction, whether earlier batches belong to another step), the
    number that train (ranks + 1 times those that then update, and the square of that times those that predict), the
    checksums of `SameTargets`, 0 if all have made the same number of updates, the number that add to an earlier batch,
    and the checksums of `SameRates`, `SameValueCheck`, `TiedParameters` and `OwnSamples`."""
    work: Work
    """The reduction of `sums`."""

    def __init__(self, ranks: Group, same_targets: SameTargets, same_rates: SameRates, same_left: SameValueCheck,
                 ties: TiedParameters, own_samples: OwnSamples, *, on_device: bool = False) -> None:
        self._ranks, self._same_targets, self._on_device = ranks, same_targets, on_device
        self._same_rates, self._same_left, self._ties = same_rates, same_left, ties
        self._own_samples, self._samples = own_samples, own_samples.numbers(())
        self._targets = torch.zeros(SAME_TARGETS, dtype=torch.float64)
        self._accumulated: Tensor | None = None  # losses and weights of batches since the last step
        self._earlier: Tensor | None = None  # the same, while another batch of that step runs
        self._training = self._updates = self._predicts = False
        self._zeroed: bool | None = None  # on this rank; None if it has no gradients
        self.num_accumulated = 0
        """Batches since the last step, whose gradients the next one applies."""
        self.num_updates = 0
        """Updates of this rank since the start, or since parameters were loaded."""

    # ------------------------------------------------------------------ several batches of one step

    @property
    def continues_a_step(self) -> bool:
        """Whether the current batch adds to earlier ones."""
        return self._earlier is not None

    def begin_training(self, were_zeroed: Callable[[], bool | None], *, updates: bool, rate: float | None,
                       users: torch.optim.Optimizer | None) -> None:
        """Begin a training batch. were_zeroed: whether the gradients of this rank have been set to zero since the last
        one, which ends the accumulation if no rank has any left; None if there were none. updates: whether a step
        follows. rate, users: as for `SameRates.begin`."""
        self._same_rates.begin(rate, users)
        self._updates = updates
        self._earlier, self._accumulated = self._accumulated, None  # which a batch that fails would leave unusable
        self._zeroed = None if self._earlier is None else were_zeroed()

    def keep(self) -> None:
        """Keep the sums of a batch, whose gradients stay for the next batch of the same step."""
        self._accumulated, self._earlier = self.sums[:2].clone(), None
        self.num_accumulated = 1 if self.sums[2] else self.num_accumulated + 1

    def after_step(self, updated: bool) -> None:
        """Called after a step. updated: whether it has changed the parameters."""
        self.forget()
        self.num_updates += updated

    def forget(self) -> None:
        """Forget earlier batches after a step, or if gradients are discarded: the next batch starts a new sum."""
        self._accumulated = self._earlier = None
        self.num_accumulated = 0

    # ------------------------------------------------------------------ the current batch

    def begin(self, batch: Sequence[Microbatch], *, training: bool, predicts: bool) -> None:
        """Begin a batch, whose targets ranks compare. predicts: whether it has no loss."""
        self._training, self._predicts = training, predicts
        self._targets = self._same_targets.numbers(() if predicts else batch)
        self._samples = self._own_samples.numbers(batch if training else ())

    def reduce(self, own: Tensor | None, *, at_once: bool = False) -> None:
        """Start the sum over all ranks. own: [2] fp64 of this rank, None if another rank counts the same. at_once:
        begin it now, even if the host waits for a device; otherwise the step asks for the weight before any other
        collective."""
        earlier, ranks, ties = self._earlier, self._ranks, self._ties
        same_targets, same_rates, same_left = self._same_targets, self._same_rates, self._same_left
        own_samples = self._own_samples
        size, of_targets = len(ranks.ranks), slice(4, 4 + SAME_TARGETS)
        of_training = [self.num_updates * (-1 if ranks.index else size - 1), earlier is not None, same_rates.number(),
                       same_left.number()] if self._training else [0, 0, 0, 0]
        self.sums = sums = torch.tensor([
            0, 0, 0 if self._zeroed is None else 1 if self._zeroed else size + 1,
            self._training * (size + 1 if self._updates else 1) + self._predicts * (size + 1) ** 2,
            *[0] * SAME_TARGETS,
            *of_training, ties.number(), *self._samples],
            dtype=torch.float64)  # in one call: it costs host time in every step

        def add_earlier() -> None:
            _, weight, zeroed, calls, *numbers = sums.tolist()
            sums[2] = ends_earlier = 0 < zeroed <= size  # zeroed on a rank, and no rank has gradients
            updates, continuing, rates, left, of_ties, *samples = numbers[SAME_TARGETS:]
            predicting, training = divmod(int(calls), (size + 1) ** 2)
            updating, others = divmod(training, size + 1)
            if size not in (counts := (predicting, updating, others, size - predicting - updating - others)):
                raise calls_differ(f"of {size} ranks " + ", ".join(f"{count} are in {call}" for count, call in zip(
                    counts, ("predict", "train_batch", "forward_backward", "evaluate"), strict=True) if count))
            if 0 < continuing < size:
                raise calls_differ(f"of {size} ranks {continuing:g} add to the gradients of the batch before, and "
                                   f"{size - continuing:g} have called step or zero_grad since")
            if updates:
                raise calls_differ(f"some of {size} ranks have updated their parameters and others have not, as if one "
                                   "has called step and another zero_grad")
            same_targets.check(numbers[:SAME_TARGETS])
            same_rates.check(rates, ranks)
            same_left.check(left)
            ties.check(of_ties)
            own_samples.check(*samples)
            if weight < 0 or math.isinf(weight):
                raise ModelError("has a negative or infinite weight, which would reverse its gradient or lose it",
                                 code="loss-weight-range", where="loss", value=f"{weight:.4g} in the batch",
                                 remedy="Return the number of valid targets with the sum of losses.")
            if earlier is not None and not ends_earlier:
                sums[:2].add_(earlier)

        parts = [(self._targets, sums[of_targets])] if own is None else [
            (own, sums[:2]), (self._targets, sums[of_targets])]
        waits, copies = self._on_device and not at_once, list[tuple[HostCopy, Tensor]]()
        for source, target in parts:
            if waits and source.is_cuda:
                copies.append((HostCopy(source), target))
            else:
                target.copy_(source)
        if waits:
            def begin() -> Work:
                for copy, target in copies:
                    target.copy_(copy.read())
                return ranks.all_reduce(sums)
            self.work = TwoRoundWork(CompletedWork(), begin, add_earlier)  # begun when the program waits for it
            return
        self.work = ChainedWork(ranks.all_reduce(sums), add_earlier)

    def weight(self) -> float:
        """The weight of the global batch; waits for it."""
        self.work.wait()
        return float(self.sums[1])

    def earlier_weight(self) -> float:
        """The part of `weight` from earlier batches of this step."""
        self.work.wait()
        return 0.0 if self._earlier is None or self.sums[2] else float(self._earlier[1])

    def loss(self) -> float:
        """The mean loss of the global batch, whose weight is not zero."""
        weight = self.weight()
        return float(self.sums[0]) / weight

    def bad_loss(self, *, is_scaled: bool) -> str | None:
        """"loss is nan", if the mean loss of the global batch is not finite. is_scaled: gradients are fp16, and show an
        overflow, which an infinite loss may be."""
        loss = self.loss()
        good = not math.isnan(loss) if is_scaled else math.isfinite(loss)
        return None if good else f"loss is {loss}"


# --- the expected weight ----------------------------------------------------------------------------------------------

# The expected weight of a global batch, from the first microbatches of the first one.
#
# In fp16 a loss must be divided by about its weight before the backward, and multiplied by the loss scale: a sum over
# thousands of targets times that scale overflows, and a run would skip steps until the scale has come down. The weight
# of the full batch is known only after its last forward, so the ranks agree on an estimate before the first backward.


class NominalWeight:
    """One agreement among all ranks, batch after batch until one has a valid target.

    ranks: a group of all ranks. Every rank calls `start` once a batch, at the same place in its order of collectives.
    """

    def __init__(self, ranks: Group) -> None:
        self._ranks = ranks
        self._sum = torch.zeros(1, dtype=torch.float64)
        self._work: Work | None = None

    @property
    def started(self) -> bool:
        """Whether this rank has contributed to the estimate for this batch."""
        return self._work is not None

    def start(self, weight: float) -> None:
        """Contribute this rank's part of the estimate; 0 if another rank counts the same targets, or nothing is
        known."""
        self._sum.fill_(weight)
        self._work = self._ranks.all_reduce(self._sum)

    def agree(self) -> float | None:
        """The power of two nearest to the sum of all parts, so that dividing by it is exact; None if no rank has a
        valid target. Waits for all ranks' first forward."""
        assert self._work is not None, "agree comes after start"
        self._work.wait()
        self._work = None
        estimate = float(self._sum)
        return 2.0 ** round(math.log2(estimate)) if 0 < estimate < math.inf else None
