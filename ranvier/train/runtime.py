"""The part of a run that depends on its mesh, on one rank: built at the start, and again after each transition.

Ranks beyond the mesh are idle: they have no runtime, and wait for commands of rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from ranvier.block import Initial, freeze
from ranvier.comm.protocol import Group
from ranvier.config.resolve import ResolvedRun
from ranvier.data.loader import Loader
from ranvier.data.sampler import Sampler
from ranvier.data.task import Dataset, Prepared
from ranvier.elastic.freezing import NONE_FROZEN, FrozenLayers
from ranvier.inference import evaluation
from ranvier.models import families
from ranvier.pipeline.engine import Engine
from ranvier.plan.plan import make_for_run
from ranvier.planner.conditions import conditions_of
from ranvier.precision import DTYPES
from ranvier.train.memory import Measured
from ranvier.world import World


@dataclass(frozen=True, kw_only=True, eq=False)
class RankRuntime:
    """One rank's part of a run on one mesh. own: whether `world` belongs to this mesh alone."""

    run: ResolvedRun
    frozen: FrozenLayers
    world: World
    ranks: Group
    engine: Engine
    train_data: Loader
    eval_data: Mapping[str, Loader]
    """Evaluation data by the name of its set; "" for the run's own held-out data, which comes first."""
    measured: Measured
    own: bool

    def work_share(self) -> float:
        """The operations of a step, as a share of those of a step that trains all layers on samples of the model's
        length: frozen blocks have no backward, frozen weights no gradients, blocks that this rank reads from the cache
        are not computed, and padding does not count."""
        costs = self.engine.stages.costs
        assert costs is not None  # `build_engine` gives a sample
        flops = [cost.flops for cost in costs]
        frozen = self.engine.frozen_blocks
        left_out = 2 * sum(flops[:frozen]) + sum(flops[:self.engine.cached_blocks])
        left_out += sum(cost.flops - (cost.weight_flops if cost.num_trainable else 0) for cost in costs[frozen:])
        lengths = self.train_data.lengths
        share = 1.0 if lengths is None else float(lengths.mean()) / families.tokens_of(self.run)
        return share * (1.0 - left_out / (3 * sum(flops)))

    def close(self) -> None:
        """Free the communicators, except those of a world that is not its own. Collective over its ranks."""
        self.engine.close()
        self.engine.forget_states()
        self.ranks.close()
        if self.own:
            self.world.backend.close()


def build_runtime(run: ResolvedRun, whole: World, data: Prepared, *, frozen: FrozenLayers = NONE_FROZEN,
                  fresh: bool = True) -> RankRuntime | None:
    """This rank's part of `run` with these layers frozen; None on ranks that its mesh does not use. Collective over all
    ranks.

    fresh: whether parameters are initialised as the run says; otherwise they are zero, and about to be overwritten.
    """
    whole.mesh = run.mesh
    own = not fresh or run.mesh.size < whole.size
    backend = whole.backend.subset(run.mesh.size) if own else whole.backend
    if backend is None:
        return None
    world = replace(whole, backend=backend, mesh=run.mesh)
    engine = build_engine(run, world, data.weight, frozen=frozen, fresh=fresh)
    train_data, eval_data = _loaders(run, engine, data)
    return RankRuntime(run=run, frozen=frozen, world=world, engine=engine, train_data=train_data, eval_data=eval_data,
                     ranks=backend.group("train", [tuple(range(backend.size))]),
                     measured=Measured(engine, world.device, wanted=run.memory_report), own=own)


def with_frozen(runtime: RankRuntime, data: Prepared, frozen: FrozenLayers) -> RankRuntime:
    """A runtime on the same mesh with other frozen layers; its parameters are about to be overwritten. Collective over
    its ranks."""
    runtime.engine.close()
    runtime.engine.forget_states()
    engine = build_engine(runtime.run, runtime.world, data.weight, frozen=frozen, fresh=False)
    train_data, eval_data = _loaders(runtime.run, engine, data)
    return replace(runtime, frozen=frozen, engine=engine, train_data=train_data, eval_data=eval_data,
                   measured=Measured(engine, runtime.world.device, wanted=runtime.run.memory_report))


def build_engine(run: ResolvedRun, world: World, weight: float, *, frozen: FrozenLayers, fresh: bool) -> Engine:
    """Build the engine of `run` on this rank. weight: weight of one sample in the loss."""
    model = families.model_of(run)
    if not fresh:
        model = replace(model, initial=lambda name: Initial("constant", 0.0))
    plan = make_for_run(run, freeze(model, frozen.prefix, frozen.above),
                        families.sample_of(run, run.row_microbatch_size), device=world.device.type,
                        conditions=partial(conditions_of, run))
    return Engine(model, world, plan=plan, guard=run.guard, seed=run.seed, dtype=DTYPES[run.precision],
                  nominal_weight=run.batch.global_size * weight, timeout_seconds=run.comm.timeout_seconds,
                  frozen=frozen.prefix, frozen_above=frozen.above, frozen_dropout=run.elastic.frozen_dropout,
                  flags=True, compile=run.model.compile, float8=run.model.float8)


def _loaders(run: ResolvedRun, engine: Engine, data: Prepared) -> tuple[Loader, dict[str, Loader]]:
    """Training samples in the seed's order, and held-out ones in their own, once through."""
    nodes = [run.mesh.rank(run.mesh.place(replica=replica)) // engine.world.local_size  # of each replica's first stage
             for replica in range(run.mesh.num_replicas)] if run.elastic.cache else ()
    sampler = Sampler(len(data.train), run.seed, lengths=evaluation.lengths_of(run, data.train), shares=data.shares)
    return (Loader(data.train, sampler, global_size=run.batch.global_size, nodes=nodes,
                   lengths=evaluation.padded_lengths(run, data.train),
                   **evaluation.loader_options(engine, run.batch.microbatch_size, evaluation.length_multiple(run))),
            {"": _eval_loader(run, engine, data.eval, is_scored=data.scoring is not None),
             **{name: _eval_loader(run, engine, eval_set.data, is_scored=eval_set.scoring is not None)
                for name, eval_set in data.eval_sets.items()}})


def _eval_loader(run: ResolvedRun, engine: Engine, data: Dataset, *, is_scored: bool) -> Loader:
    """The held-out samples of one evaluation: all of them where the task has a scoring."""
    if not is_scored:
        total = min(run.train.eval_sequences, len(data))
        return evaluation.evaluation_loader(run, engine, data, total, at_once=total)
    at_once = max(run.batch.global_size, evaluation.SAMPLES_AT_ONCE * run.mesh.num_replicas)
    return evaluation.evaluation_loader(run, engine, data, len(data), at_once=at_once)
