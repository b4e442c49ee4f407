"""Whether all ranks were given the same settings, where others would go unnoticed: replicas whose optimizers differ
drift apart, and so do ranks that clip, freeze or judge differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from ranvier.config.run import Guard, Optim
from ranvier.errors import ConfigError

_OF_THE_RANK = frozenset({"offload", "offload_share", "buckets_in_flight"})
"""Where a rank has its states, which changes no result."""


def settings_of(optim: Optim, guard: Guard | None, **others: object) -> dict[str, str]:
    """Setting -> value, as texts. others: further arguments of the engine."""
    sections: dict[str, Optim | Guard] = {"optim": optim, "guard": guard or Guard(bad_step="none")}
    found = {f"{section}.{one.name.replace('_', '-')}": repr(getattr(values, one.name))
             for section, values in sections.items() for one in fields(values) if one.name not in _OF_THE_RANK}
    return found | {f"Engine({name}=...)": repr(value) for name, value in others.items()}


def check_same(of_ranks: Sequence[Mapping[str, str]], rank: int) -> None:
    """ConfigError, on every rank, for the first setting that differs between ranks."""
    for name, first in of_ranks[0].items():
        others = [number for number, found in enumerate(of_ranks) if found.get(name) != first]
        if others:
            raise ConfigError(f"is not the same on all ranks: {first} on rank 0, and {of_ranks[others[0]].get(name)} "
                              f"on rank {others[0]}", code="settings-differ", where=name,
                              value=of_ranks[rank].get(name),
                              remedy="Give all ranks the same value; world.broadcast gives them that of one rank.")
