"""An engine's settings of its pipeline and memory, from the sections of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ranvier.config.run import Memory, Pipeline
from ranvier.errors import ConfigError
from ranvier.pipeline.recomputation import Recompute
from ranvier.schedule.policies import policy_named
from ranvier.schedule.schedule import Policy


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What an engine takes from `Pipeline` and `Memory`; each field is documented there."""

    policy: Policy
    in_flight: int | Literal["auto"]
    boundaries: Sequence[int] | None
    partition: Literal["cost", "uniform"]
    defer_bytes: int | Literal["auto"]
    deferred: tuple[int, ...] | None
    defer_last: int | None
    memory: float | None
    look_ahead: int | Literal["auto"]
    recompute: Recompute

    @property
    def sets_deferral(self) -> bool:
        """Whether weight gradients are deferred because the caller wants it so."""
        return self.defer_bytes not in ("auto", 0) or any(self.deferred or ())


def engine_settings(pipeline: Pipeline, memory: Memory, policy: Policy | None) -> EngineSettings:
    """The settings of `pipeline` and `memory`.

    policy: an object of the caller's own, in place of `pipeline.policy`. ConfigError where it is a name.
    """
    if isinstance(policy, str):
        raise ConfigError("is no policy of your own", code="policy-object-is-a-name", where="Engine(policy=...)",
                          value=policy, remedy="Name a policy in Pipeline(policy=...).")
    return EngineSettings(
        policy=policy_named(pipeline.policy) if policy is None else policy, in_flight=pipeline.in_flight,
        boundaries=pipeline.boundaries, partition=pipeline.partition, defer_bytes=pipeline.defer_bytes,
        deferred=pipeline.deferred, defer_last=pipeline.defer_last, memory=pipeline.memory,
        look_ahead=pipeline.look_ahead, recompute=memory.recompute)
