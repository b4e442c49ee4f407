"""What a batch gives back: numbers that are the same on every rank and are waited for only when read."""

from __future__ import annotations

from torch import Tensor

from ranvier.comm.protocol import Work


class BatchResult:
    """Loss, weight and gradient norm of one batch over the whole mesh.

    stats: [2] fp64, (sum of losses, weight), being summed over all ranks by `stats_work`.
    squared_norm: [1] fp64, being summed by `norm_work`; None after an evaluation.
    """

    def __init__(self, stats: Tensor, stats_work: Work, squared_norm: Tensor | None, norm_work: Work | None, *,
                 stepped: bool) -> None:
        self._stats, self._stats_work = stats, stats_work
        self._squared_norm, self._norm_work = squared_norm, norm_work
        self.stepped = stepped
        """Whether the batch had a valid target, so that its gradients could be used."""

    @property
    def weight(self) -> float:
        """Valid targets in the global batch."""
        self._stats_work.wait()
        return float(self._stats[1])

    @property
    def loss(self) -> float:
        """Sum of losses over the weight of the global batch; nan when the weight is zero."""
        return float(self._stats[0]) / self.weight if self.weight else float("nan")

    @property
    def grad_norm(self) -> float | None:
        """L2 norm of the gradients of the mean loss, each parameter counted once; None after an evaluation."""
        if self._norm_work is None:
            return None
        self._norm_work.wait()
        return float(self._squared_norm.sqrt())

    def __repr__(self) -> str:
        return f"BatchResult(loss={self.loss:.6g}, weight={self.weight:g})"
