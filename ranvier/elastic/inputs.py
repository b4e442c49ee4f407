"""Inputs of an elastic run's decisions: the settings, the state of the run, and facts of its blocks. Pure.

A run fills these with its ranks' measurements (`ranvier.train.measured_blocks`), a plan with predictions from a
cluster's constants (`ranvier.planner.elastic_plan`). All decisions are functions of these inputs
(`ranvier.elastic.controller`):

    how deep to freeze            `ranvier.elastic.freezing`         when: `EvaluationSchedule`
    which meshes are candidates   `ranvier.elastic.mesh_candidates`  how each is cut: `ranvier.elastic.auto_pipe`
    which candidate is selected   `ranvier.elastic.mesh_candidates`, by the ledger's rule
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from ranvier.config.resolve import ResolvedRun
from ranvier.layout import frozen_blocks
from ranvier.mesh import Mesh

LINKS: Mapping[str, tuple[float, float]] = {"in-process": (inf, 0.0), "mpi": (4e9, 20e-6), "torch": (3e9, 200e-6)}
"""Nominal bytes per second and seconds of latency between two ranks on one machine, by backend."""


@dataclass(frozen=True)
class ElasticRules:
    """The rules that follow from settings. run: as it was started, so its mesh, batch and microbatch are the initial
    ones."""

    run: ResolvedRun

    def step_samples(self, data: int) -> int:
        """Samples of a step with this many replicas."""
        size = self.run.samples_of(1)
        return size if self.run.elastic.global_batch == "keep" else max(1, size * data // self.run.mesh.num_replicas)

    def caches(self, frozen: int, refused_at: int) -> bool:
        """Whether outputs of `frozen` layers would be cached, as far as known. refused_at: number of frozen layers at
        which the cache did not save time; with "auto" it is tried again with more layers."""
        cache_from = self.run.elastic.cache_from
        return self.run.elastic.cache and frozen > (refused_at if cache_from == "auto" else cache_from - 1)

    def cached_blocks(self, present: PresentMesh, depth: int, *, epoch_samples: int, asked_after: int) -> int:
        """Number of frozen blocks that most of the next `asked_after` steps, until the policy is evaluated again, read
        from the cache if `depth` layers are frozen and cached. If there are more than before, an epoch computes and
        writes them, and reads only the blocks that were cached before."""
        frozen, writes = present.frozen_blocks(depth), -(-epoch_samples // present.global_size)
        reads_all = depth <= present.frozen or asked_after >= 2 * writes
        return frozen if reads_all else min(frozen, present.cached_blocks)


@dataclass(frozen=True, kw_only=True)
class PresentMesh:
    """The present state of a run: its mesh, its cut, and what is frozen and cached."""

    mesh: Mesh
    boundaries: tuple[int, ...]
    """First block of each stage after the first."""
    frozen: int
    """Frozen layers."""
    cached_blocks: int
    """Blocks whose outputs are read from the cache."""
    global_size: int
    layers: tuple[tuple[str, ...], ...]
    """Names of the blocks of each transformer layer."""
    block_names: tuple[str, ...]

    def frozen_blocks(self, depth: int) -> int:
        """Blocks of the prefix that does not train with `depth` frozen layers."""
        return frozen_blocks(self.layers, self.block_names, depth)


@dataclass(frozen=True, kw_only=True)
class BlockFacts:
    """Costs and sizes of a model's blocks on these ranks. Tuples have one entry for each block."""

    forward_seconds: tuple[float, ...]
    """Seconds of one sample on a rank that computes alone; with row x col > 1, of a rank's share of a sample."""
    backward_seconds: tuple[float, ...]
    """As `forward_seconds`, for the backward of blocks that train, including any recomputation."""
    update_seconds: tuple[float, ...]
    """Seconds of the optimizer's step, on a rank that has all of the block's states."""
    output_bytes: tuple[int, ...]
    """Bytes that leave each block, per sample."""
    num_parameters: tuple[int, ...]
    parameter_bytes: tuple[int, ...]
    """Bytes of each block's parameters; also of its gradients when replicas average them."""
    state_bytes: tuple[int, ...]
    """Bytes of the optimizer's states."""
    cores: float | None
    """Cores that all ranks share, in units of the cores of one rank; None if each rank has a device."""
    bandwidth: float
    """Bytes per second between two ranks."""
    latency_seconds: float
    """Seconds of latency of one message."""
    seconds: float | None = None
    """Predicted seconds of a step on the present mesh."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSchedule:
    """When the freeze policy is evaluated."""

    every: int
    """Steps between evaluations; 0 evaluates after each epoch."""
    epoch_samples: int
    depths: Sequence[tuple[int, int]] | None = None
    """(step, layers) of a manual policy, in the order of steps; None: another policy decides."""
    dry_run: bool = False

    def is_due(self, step: int, before: int, after: int, frozen: int, lowest: int = 0) -> bool:
        """Whether the policy is evaluated after `step`, which takes the data from sample `before` to `after`. lowest:
        number of layers that stay frozen whatever it answers."""
        return self.steps_until_due(step - 1, before, after - before, frozen, lowest) == 1

    def steps_until_due(self, step: int, samples: int, size: int, frozen: int, lowest: int = 0) -> int | None:
        """Steps of `size` samples after `step` and `samples` until the policy is evaluated; None: never again."""
        if self.depths is not None:
            wanted = depth_by_hand(self.depths, step)
            is_late = wanted is not None and max(wanted, lowest) != frozen and not self.dry_run
            return 1 if is_late else min((at - step for at, _ in self.depths if at > step), default=None)
        if self.every:
            return self.every - step % self.every
        return -(-(self.epoch_samples - samples % self.epoch_samples) // size)


def depth_by_hand(depths: Sequence[tuple[int, int]], step: int) -> int | None:
    """Frozen layers after `step` by manual (step, layers), in the order of steps; None before the first."""
    return next((layers for at, layers in reversed(depths) if at <= step), None)
