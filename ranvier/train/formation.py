"""What of a run depends on its mesh: made at the start, and anew after each transition.

Ranks beyond the mesh are idle: they have no formation's engine, and wait for rank 0's order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ranvier.comm.protocol import Group
from ranvier.data.loader import Loader
from ranvier.data.sampler import Sampler
from ranvier.data.task import Prepared
from ranvier.mesh import Coordinates
from ranvier.models import families
from ranvier.models.block import Initial, Model
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.precision import DTYPES
from ranvier.run import Run
from ranvier.train.memory import Measured
from ranvier.world import World


@dataclass(frozen=True, kw_only=True, eq=False)
class Formation:
    """One rank's part of a run on one mesh. frozen: layers that do not train. own: whether its world is too."""

    run: Run
    frozen: int
    world: World
    ranks: Group
    engine: Engine
    train_data: Loader
    eval_data: Loader
    measured: Measured
    own: bool

    def work_share(self) -> float:
        """What of a step's operations is done, of those of one in which all layers train: frozen blocks have no
        backward, and of those that this rank reads from the cache nothing is computed."""
        flops = [cost.flops for cost in self.engine.stages.costs]
        left_out = 2 * sum(flops[:self.engine.frozen_blocks]) + sum(flops[:self.engine.cached_blocks])
        return 1.0 - left_out / (3 * sum(flops))

    def close(self) -> None:
        """Collective over its ranks: its communicators are freed, but for those of the world that was there before."""
        self.engine.close()
        self.ranks.close()
        if self.own:
            self.world.backend.close()


def formed(run: Run, whole: World, data: Prepared, *, frozen: int = 0, fresh: bool = True) -> Formation | None:
    """This rank's part of `run` with `frozen` layers; None on ranks that its mesh does not take. Collective over all.

    fresh: parameters start as the run says; without, they are about to be written, and start from zero.
    """
    whole.mesh = run.mesh
    own = not fresh or run.mesh.size < whole.size
    backend = whole.backend.subset(run.mesh.size) if own else whole.backend
    if backend is None:
        return None
    world = replace(whole, backend=backend, mesh=run.mesh)
    engine = build_engine(run, world, data.weight, frozen=frozen, fresh=fresh)
    train_data, eval_data = _loaders(run, engine, data)
    return Formation(run=run, frozen=frozen, world=world, engine=engine, train_data=train_data, eval_data=eval_data,
                     ranks=backend.group("train", [tuple(range(backend.size))]),
                     measured=Measured(engine, world.device, wanted=run.memory_report), own=own)


def build_engine(run: Run, world: World, weight: float, *, frozen: int, fresh: bool) -> Engine:
    """weight: of one sample in the loss."""
    size = run.batch.microbatch_size // run.mesh.row
    inputs, targets = families.sample_of(run, size)
    sample = Microbatch(inputs=inputs, targets=targets, samples=torch.arange(size))
    model = families.model_of(run)
    return Engine(model if fresh else _unwritten(model), world, mesh=run.mesh, optim=run.optim,
                  checkpoint=run.memory.checkpoint, policy=run.pipeline.policy, in_flight=run.pipeline.in_flight,
                  boundaries=run.pipeline.boundaries, partition=run.pipeline.partition,
                  defer_bytes=run.pipeline.defer_bytes, seed=run.seed, dtype=DTYPES[run.precision],
                  nominal_weight=run.batch.global_size * weight, timeout_seconds=run.comm.timeout_seconds,
                  sample=sample, tensor=run.tensor, guard=run.guard, frozen=frozen,
                  frozen_dropout=run.elastic.frozen_dropout, flags=True)


def _unwritten(model: Model) -> Model:
    return replace(model, initial=lambda name: Initial("constant", 0.0))


def _loaders(run: Run, engine: Engine, data: Prepared) -> tuple[Loader, Loader]:
    """Training samples in the seed's order, and held-out ones in their own, once through."""
    share = {"microbatch_size": run.batch.microbatch_size, "replica": engine.coordinates.data,
             "num_replicas": run.mesh.data, "row": engine.coordinates.row, "num_rows": run.mesh.row,
             "device": engine.world.device, "needs_inputs": engine.is_first_stage,
             "needs_targets": engine.is_last_stage}
    total = len(data.eval) if data.scoring is not None else min(run.train.eval_sequences, len(data.eval))
    at_once = total if data.scoring is None else min(total, max(run.batch.global_size, _EVAL_SAMPLES * run.mesh.data))
    nodes = _nodes(run, engine.world) if run.elastic.cache else ()
    return (Loader(data.train, Sampler(len(data.train), run.seed), global_size=run.batch.global_size, nodes=nodes,
                   **share),
            Loader(data.eval, Sampler(len(data.eval), None), global_size=at_once, total=total, **share))


def _nodes(run: Run, world: World) -> list[int]:
    """The machine of each replica's first stage."""
    return [run.mesh.rank(Coordinates(data=replica)) // world.local_size for replica in range(run.mesh.data)]


_EVAL_SAMPLES = 256
"""Samples of a replica that are in memory at once in an evaluation."""
