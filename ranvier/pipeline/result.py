"""Result of a batch: numbers that are the same on every rank and are waited for only when read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ranvier.block import State
from ranvier.comm.collectives import CompletedWork
from ranvier.comm.protocol import Work
from ranvier.errors import ModelError
from ranvier.optim.step import GradientStatus, StepVerdict
from ranvier.tensor.columns import gather_whole


class LastOutputs:
    """The last block's outputs in a batch, for a call that wants them: on the ranks of the last stage, in full on every
    column. All columns want them, or none does.

    observe: called with each microbatch's number and outputs, which then are not kept. has_loss: whether the loss is
    also computed and kept: `sums` are (sum of losses, weight).
    """

    def __init__(self, observe: Callable[[int, State], None] | None = None, *, has_loss: bool = True) -> None:
        self._observe, self.has_loss = observe, has_loss
        self.outputs: list[State] = []
        self.sums: list[tuple[Tensor, Tensor | float | int]] = []

    def take(self, number: int, state: State) -> None:
        """Take `state`, which the last block has returned for microbatch `number`."""
        whole = gather_whole(state)
        if self._observe is not None:
            before = _versions(whole)
            self._observe(number, whole)
            if self.has_loss and _versions(whole) != before:
                raise ModelError("has modified the outputs, from which the loss is yet to be computed",
                                 code="observe-modifies", where="Engine.evaluate(observe=...)",
                                 remedy="Let it modify a copy: outputs.clone().")
        else:  # a loss may reuse the memory of what it is given
            self.outputs.append(tree_map_only(Tensor, lambda leaf: leaf.clone(), whole) if self.has_loss else whole)

    def take_loss(self, total: Tensor, weight: Tensor | float | int) -> None:
        """Take what the loss has returned for the same microbatch."""
        if self._observe is None:
            self.sums.append((total.detach().clone(), weight))


def _versions(state: State) -> list[int]:
    """Version counters of the tensors of `state`."""
    return [leaf._version for leaf in tree_leaves(state) if isinstance(leaf, Tensor) and not leaf.is_inference()]


class BatchResult:
    """Loss, weight and gradient norm of one batch over the whole mesh.

    stats: [2] fp64, (sum of losses, weight), being summed over all ranks by `stats_work`.
    status: what is known of the gradients; None after an evaluation. kept: of `train_batch(keep_outputs=True)`, on the
        ranks of the last stage.
    """

    def __init__(self, stats: Tensor, stats_work: Work, status: GradientStatus | None,
                 kept: LastOutputs | None = None) -> None:
        self._stats, self._stats_work = stats, stats_work
        self.status, self._kept = status, kept

    def __getstate__(self) -> dict[str, Any]:
        """Values, for copies and pickle; waits for them."""
        self._stats_work.wait()
        status = self.status
        if status is not None:
            status.work.wait()
            status = replace(status, work=CompletedWork(), is_undecided=False,
                             verdict=partial(StepVerdict, bad=status.bad, overflow=status.overflow))
        return {**vars(self), "_stats_work": CompletedWork(), "status": status}

    @property
    def outputs(self) -> list[State] | None:
        """The last block's output for each microbatch of this rank, with `train_batch(keep_outputs=True)` on the ranks
        of the last stage; None elsewhere."""
        return None if self._kept is None else self._kept.outputs

    @property
    def losses(self) -> list[float] | None:
        """The mean loss of each microbatch, if there are `outputs`; nan for a microbatch without a valid target."""
        if self._kept is None:
            return None
        return [float(total) / float(weight) if weight else float("nan") for total, weight in self._kept.sums]

    @property
    def stepped(self) -> bool:
        """Whether the gradients could be used: the batch had a valid target, nothing overflowed in fp16, and the step
        was not bad."""
        return self.status is not None and self.status.updates

    @property
    def bad(self) -> str | None:
        """Why nothing was updated from this step: "loss is nan", or, if the engine has a guard, "gradient norm is inf"
        or a loss that explodes. None for any other step."""
        return None if self.status is None else self.status.bad

    @property
    def overflow(self) -> bool:
        """Whether a gradient was not finite in fp16, so that the step is skipped and the loss scale halved."""
        return self.status is not None and self.status.overflow

    @property
    def weight(self) -> float:
        """Valid targets in the global batch."""
        self._stats_work.wait()
        return float(self._stats[1])

    @property
    def loss(self) -> float:
        """Sum of losses divided by the weight of the global batch; nan if the weight is zero."""
        return float(self._stats[0]) / self.weight if self.weight else float("nan")

    @property
    def grad_norm(self) -> float | None:
        """L2 norm of the gradients of the mean loss before clipping, each parameter counted once; None after an
        evaluation."""
        return None if self.status is None else self.status.norm

    def __repr__(self) -> str:
        return f"BatchResult(loss={self.loss:.6g}, weight={self.weight:g})"
