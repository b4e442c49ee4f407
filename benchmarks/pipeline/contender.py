"""The contenders: the names on the command line, and their meanings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch.distributed import Store

Kind = Literal["times", "plain", "ddp", "torch", "ours"]
Launch = Literal["processes", "mpi"]

TORCH_SCHEDULES = {"torch-gpipe": "ScheduleGPipe", "torch-1f1b": "Schedule1F1B",
                   "torch-interleaved-1f1b": "ScheduleInterleaved1F1B",
                   "torch-interleaved-zb": "ScheduleInterleavedZeroBubble"}
POLICIES = ("message-driven", "1f1b", "gpipe")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One line of the table: a way to do the work of `Workload`.

    settings: JSON values for the module of this `kind`.
    """

    name: str
    kind: Kind
    ranks: int
    launch: Launch = "processes"
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank of a contender, and the store that the contender's ranks share."""

    rank: int
    size: int
    store: Store


def contenders(ranks: int, cores: int, policies: tuple[str, ...] = POLICIES) -> list[Contender]:
    """All contenders for `ranks` ranks, in the order of the table."""
    loops = min(ranks, cores)
    found = [Contender(name="ceiling", kind="plain", ranks=loops),
             Contender(name="one-process", kind="plain", ranks=1),
             Contender(name="one-process-whole", kind="plain", ranks=1, settings={"whole_batch": True}),
             Contender(name="ddp", kind="ddp", ranks=ranks)]
    found += [Contender(name=name, kind="torch", ranks=ranks, settings={"schedule": schedule})
              for name, schedule in TORCH_SCHEDULES.items()]
    found += [ours(policy, transport, ranks) for transport in ("mpi", "gloo") for policy in policies]
    if "message-driven" in policies:
        found += [ours("message-driven", transport, ranks, suffix, **settings) for transport in ("mpi", "gloo")
                  for suffix, settings in (("-rule", {"memory": None}), ("-v-shape", {"stages_per_rank": 2}),
                                           ("-interleaved", {"stages_per_rank": 2, "placement": "interleaved",
                                                             "memory": 1.5}))]
    return found


def ours(policy: str, transport: str, ranks: int, suffix: str = "", **settings: object) -> Contender:
    """Ranvier with one policy over one transport; `settings` as in benchmarks.pipeline.ours."""
    return Contender(name=f"ours-{policy}-{transport}{suffix}", kind="ours", ranks=ranks,
                     launch="mpi" if transport == "mpi" else "processes",
                     settings={"policy": policy, "transport": transport, **settings})
