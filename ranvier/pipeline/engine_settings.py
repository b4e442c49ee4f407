"""An engine's settings, as sections of the configuration or in the spelling of earlier releases."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ranvier.config.run import Memory, Pipeline
from ranvier.pipeline.recomputation import Recompute
from ranvier.schedule.schedule import Policy

_FIELD_OF = {"policy": "Pipeline.policy", "in_flight": "Pipeline.in_flight", "boundaries": "Pipeline.boundaries",
             "partition": "Pipeline.partition", "defer_bytes": "Pipeline.defer_bytes", "checkpoint": "Memory.recompute"}
"""Arguments that `Engine` took by themselves -> the section and field that have them now."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What an engine takes from `Pipeline` and `Memory`; each field is documented there."""

    policy: str | Policy
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


def engine_settings(pipeline: Pipeline, memory: Memory, policy: Policy | str | None,
                    earlier: Mapping[str, object]) -> EngineSettings:
    """The settings of `pipeline` and `memory`, but for those that the caller gave in another way.

    policy: an object of the caller's own, in place of `pipeline.policy`. earlier: arguments of earlier releases by
    name, and `policy` by name; each is taken with a FutureWarning that names the new spelling. TypeError for arguments
    that never were.
    """
    old = dict(earlier)
    for name in old:
        if name not in _FIELD_OF:
            raise TypeError(f"Engine() got an unexpected keyword argument {name!r}")
    if isinstance(policy, str):
        old["policy"] = policy
    for name in old:
        section, field = _FIELD_OF[name].split(".")
        warnings.warn(f"Engine({name}=...) is Engine({section.lower()}={section}({field}=...)) now; the old spelling "
                      "works for one more release", FutureWarning, stacklevel=4)
    values: dict[str, Any] = {
        "policy": pipeline.policy if policy is None else policy, "in_flight": pipeline.in_flight,
        "boundaries": pipeline.boundaries, "partition": pipeline.partition, "defer_bytes": pipeline.defer_bytes,
        "deferred": pipeline.deferred, "defer_last": pipeline.defer_last, "memory": pipeline.memory,
        "look_ahead": pipeline.look_ahead, "recompute": memory.recompute}
    return EngineSettings(**{**values, **{_FIELD_OF[name].split(".")[1]: value for name, value in old.items()}})
