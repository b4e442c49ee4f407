"""The contenders, and what each changes in the task's run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from ranvier.config.run import Elastic, Lora, Run
from ranvier.mesh import Mesh

PEER = "ddp-torch"
ENDS = ("none", "all")
"""Contenders that are compared over all seeds."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One line of a table. microbatch_size, lora, learning_rate: None is the run's. length: length of the run,
    including the learning rate schedule, as a share of the others' length. peer: a loop over transformers' model, under
    torch's DDP where `data` is above 1."""

    name: str
    data: int = 1
    pipe: int = 4
    policy: str = "message-driven"
    microbatch_size: int | None = None
    elastic: Elastic = field(default_factory=Elastic)
    lora: Lora | None = None
    learning_rate: float | None = None
    length: Fraction = Fraction(1)
    peer: bool = False

    def applied(self, base: Run) -> Run:
        """The run of this contender."""
        size, train = self.microbatch_size or base.batch.microbatch_size, base.train
        return replace(base, mesh=Mesh(data=self.data, pipe=self.pipe), elastic=self.elastic,
                       lora=self.lora or base.lora, train=replace(
                           train, learning_rate=self.learning_rate or train.learning_rate,
                           steps=max(1, round(self.length * train.steps)),
                           epochs=None if train.epochs is None else max(1, round(self.length * train.epochs)),
                           warmup_steps=round(self.length * train.warmup_steps)),
                       pipeline=replace(base.pipeline, policy=self.policy),
                       batch=replace(base.batch, microbatch_size=size))


def contenders(base: Run, *, ranks: int = 4, alpha: float = 1 / 3, cut: str = "exact", every: int = 0
               ) -> list[Contender]:
    """All contenders, in the order of the table. Frozen layers have no dropout, with and without the cache. every:
    steps between evaluations of the policy, 0 for an epoch."""
    frozen = Elastic(freeze="cap", alpha=alpha, frozen_dropout=False, every=every)
    packed = replace(frozen, auto_pipe=True, cut=cut)
    share = base.batch.global_size // ranks
    return [
        Contender(name="none", pipe=ranks),
        Contender(name="gpipe-dp", data=ranks // 2, pipe=2, policy="gpipe"),
        Contender(name="freeze", pipe=ranks, elastic=frozen),
        Contender(name="pipe-cache", pipe=ranks, elastic=replace(packed, cache=True)),
        Contender(name="pipe-dp", pipe=ranks, elastic=replace(packed, auto_dp=True)),
        Contender(name="all", pipe=ranks, elastic=replace(packed, auto_dp=True, cache=True)),
        Contender(name="ddp-cache", data=ranks, pipe=1, microbatch_size=share, elastic=replace(frozen, cache=True)),
        Contender(name=PEER, data=ranks, pipe=1, microbatch_size=share, peer=True),
    ]


def named(found: Sequence[Contender], names: Sequence[str]) -> list[Contender]:
    """The contenders with these names, in the order of `found`. ValueError for an unknown name."""
    unknown = sorted(set(names) - {one.name for one in found})
    if unknown:
        raise ValueError(f"no contender is called {', '.join(unknown)}; there are "
                         f"{', '.join(one.name for one in found)}")
    return [one for one in found if one.name in names]
