"""Other spellings of settings: names and values that were used before, or that papers and scripts use.

A spelling that others rely on stays for good, in silence; any other one works for one release, with a warning that
names the new one. Recipes, run files, flags, checkpoints and Python all come through here; what is written uses the new
spelling. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ranvier.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Alias:
    """Another name of a setting, or (where `value_of` is set) another spelling of one of its values.

    old, new: dotted names with underscores, or values of the setting `name`. stays: no warning.
    """

    old: str
    new: str
    value_of: str | None = None
    stays: bool = False


ALIASES = (
    Alias(old="memory.checkpoint", new="memory.recompute", stays=True),
    Alias(old="paper", new="axonn", value_of="memory.recompute", stays=True),
    Alias(old="guard.explode", new="guard.loss_spike_factor"),
    Alias(old="guard.most_bad_steps", new="guard.max_bad_steps"),
    Alias(old="model.head_width", new="model.head_dim"),
    Alias(old="model.query_width", new="model.query_pre_attn_scalar"),
    Alias(old="back", new="rollback", value_of="guard.bad_step"),
)
_NAMES = {alias.old: alias for alias in ALIASES if alias.value_of is None}
_VALUES = {(alias.value_of, alias.old): alias for alias in ALIASES if alias.value_of is not None}


@dataclass(frozen=True, kw_only=True)
class Current:
    """A setting in its new spelling, and the aliases that led there."""

    name: str
    value: object
    used: tuple[Alias, ...] = ()


def old_names() -> Mapping[str, str]:
    """Old name -> new name, of all settings that have one."""
    return {alias.old: alias.new for alias in _NAMES.values()}


def current(name: str, value: object) -> Current:
    """A setting by whatever name, with whatever value, in its new spelling."""
    used = []
    if name in _NAMES:
        used.append(_NAMES[name])
        name = _NAMES[name].new
    if isinstance(value, str) and (name, value) in _VALUES:
        used.append(_VALUES[name, value])
        value = _VALUES[name, value].new
    return Current(name=name, value=value, used=tuple(used))


def current_values(values: Mapping[str, object]) -> dict[str, object]:
    """Settings by dotted name, in their new spellings."""
    found = (current(name, value) for name, value in values.items())
    return {setting.name: setting.value for setting in found}


def warning(alias: Alias, origin: str) -> ConfigError | None:
    """That an old spelling was used in `origin`; None for one that stays."""
    if alias.stays:
        return None
    where = alias.old if alias.value_of is None else alias.value_of
    new = alias.new.replace("_", "-")
    return ConfigError(f"is an old spelling, in {origin}, and will be refused by the next release", code="old-spelling",
                       where=where.replace("_", "-"), value=None if alias.value_of is None else alias.old,
                       remedy=f"Write {new} instead.")
