"""A user's torch optimizer in a checkpoint: the settings of its groups, such as learning rates, by parameter.

A rank has the groups of its own parameters, which differ on another mesh, so settings are saved by parameter name. A
group loads the settings that its parameters had. State that cannot be saved is refused when the checkpoint is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.checkpoint.manifest import OptimizerGroup
from ranvier.errors import CheckpointError

_BESIDE = ("params", "param_names")
_SCHEDULED = {"lr", "momentum", "betas"}


def groups_of(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> list[OptimizerGroup]:
    """The groups in a JSON-serialisable form. names: of the engine's parameters. CheckpointError for settings or states
    that cannot be saved in a checkpoint."""
    for key in optimizer.state_dict().keys() - {"state", "param_groups"}:
        raise _error("optimizer-part-of-its-own", f"has an additional part in its state_dict, {key}",
                     type(optimizer).__name__)
    found = []
    for group in optimizer.param_groups:
        numbers = {kind for parameter in group["params"] for kind, value in optimizer.state.get(parameter, {}).items()
                   if _is_number(kind, value)}
        found.append(OptimizerGroup(settings=_settings_of(group), numbers=tuple(sorted(numbers)), parameters=tuple(
            names[parameter] for parameter in group["params"] if parameter in names)))
    for parameter in optimizer.state:
        if not isinstance(parameter, Tensor) and optimizer.state[parameter]:
            raise _error("optimizer-state-of-no-parameter", "has a state that belongs to no parameter", str(parameter))
    return found


def _settings_of(group: Mapping[str, Any]) -> dict[str, object]:
    return {key: _to_plain(key, value) for key, value in group.items() if key not in _BESIDE}


def _to_plain(key: str, value: object) -> object:
    if isinstance(value, Tensor) and not value.dim():
        return value.item()
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        raise _error("optimizer-setting-not-json", f"has a setting {key} in its groups that is not JSON",
                     type(value).__name__) from None


def _is_number(kind: str, value: object) -> bool:
    if value is None or isinstance(value, Tensor):
        return False
    if isinstance(value, (bool, int, float)):
        return True
    raise _error("optimizer-state-type", f"has a state {kind} that is neither a tensor nor a number",
                 type(value).__name__)


def _error(code: str, what: str, value: str) -> CheckpointError:
    return CheckpointError(f"{what}, which cannot be saved in a checkpoint", code=code,
                           where="the optimizer", value=value,
                           remedy="Save its state_dict on each rank yourself, or use optim=.")


def merge_groups(groups: Iterable[Mapping[str, Any]]) -> tuple[OptimizerGroup, ...]:
    """Merge the groups of all ranks, parsed from JSON, into those of the full model."""
    found: dict[str, OptimizerGroup] = {}
    for each in groups:
        group = OptimizerGroup(**{**each, **{key: tuple(each[key]) for key in ("numbers", "parameters")}})
        key = json.dumps([group.settings, group.numbers], sort_keys=True)
        known = found.get(key, group).parameters
        found[key] = replace(group, parameters=tuple(sorted({*known, *group.parameters})))
    return tuple(found.values())


def saved_groups(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], saved: Iterable[OptimizerGroup],
                 where: str) -> list[tuple[dict[str, Any], OptimizerGroup]]:
    """Each group of the optimizer with parameters that are in the checkpoint, and the saved group; if all were frozen
    there, the only saved group like it that is not that of a group with other settings. CheckpointError if their
    settings differ there, if several groups are like it, or if it has parameters of this rank that no group has."""
    saved = tuple(saved)
    of = {name: group for group in saved for name in group.parameters}
    found: list[tuple[dict[str, Any], OptimizerGroup]] = []
    for parameter in names.keys() - {parameter for group in optimizer.param_groups for parameter in group["params"]}:
        if names[parameter] in of:
            raise CheckpointError(f"has {names[parameter]} in a group of the optimizer, and this optimizer lacks it",
                                  code="optimizer-lacks-parameter", where=where, value=type(optimizer).__name__,
                                  remedy="Call add_param_group before load, as the program that wrote it did.")
    for number, group in enumerate(optimizer.param_groups):
        known = {id(of[name]): (of[name], name) for parameter in group["params"]
                 if (name := names.get(parameter)) in of and name is not None}
        if len(known) > 1:
            (_, one), (_, other), *_ = known.values()
            raise CheckpointError(f"has {one} and {other} in groups with different settings, and group {number} of "
                                  "this optimizer has both", code="optimizer-groups-differ", where=where,
                                  value=type(optimizer).__name__,
                                  remedy="Group parameters as the program that wrote it did.")
        found += [(group, saved_group) for saved_group, _ in known.values()]
    by_likeness: list[tuple[dict[str, Any], OptimizerGroup]] = []
    for number, group in enumerate(optimizer.param_groups):
        alike = [] if any(other is group for other, _ in found) else [
            each for each in _groups_like(group, saved) if not _is_of_others(each, group, found)]
        if len(alike) > 1 and any(parameter in names for parameter in group["params"]):
            raise CheckpointError(f"has none of the parameters of group {number} of this optimizer in a group, and "
                                  f"{len(alike)} groups like it, with other learning rates or momenta",
                                  code="optimizer-groups-alike", where=where, value=type(optimizer).__name__,
                                  remedy="Give each group a name of its own when you make the optimizer, as in "
                                         '{"params": ..., "name": "biases"}, before the checkpoint is written.')
        by_likeness += [(group, saved_group) for saved_group in alike if len(alike) == 1]
    return found + [(group, saved_group) for group, saved_group in by_likeness
                    if not _is_of_others(saved_group, group, by_likeness)]


def _is_of_others(saved_group: OptimizerGroup, group: Mapping[str, Any],
                  found: Iterable[tuple[Mapping[str, Any], OptimizerGroup]]) -> bool:
    """Whether a saved group is that of a group with other settings than `group`."""
    return any(each.settings == saved_group.settings and _settings_of(other) != _settings_of(group)
               for other, each in found)


def _groups_like(group: Mapping[str, Any], saved: Iterable[OptimizerGroup]) -> list[OptimizerGroup]:
    """The saved groups with the settings of `group`, or, if none has all of them, those that differ only in what a
    schedule changes. Schedulers also add settings."""
    own = _settings_of(group)
    alike = {json.dumps(each.settings, sort_keys=True): each for each in saved
             if all(each.settings[key] == own[key] for key in each.settings.keys() & own.keys() - _SCHEDULED)}
    same = [each for each in alike.values() if each.settings == own]
    return same or list(alike.values())


def take_settings(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Set a group's settings to the saved ones, in the types that the group has."""
    for key, value in settings.items():
        now = group.get(key)
        if isinstance(now, Tensor):
            now.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(now, tuple) else value


def state_on_device(kind: str, value: Tensor, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Move a state that is one number to the device where torch's optimizers expect it: step counts on the CPU, unless
    the update runs only on the device."""
    if kind == "step" and not (group.get("capturable") or group.get("fused")):
        return value
    return value.to(parameter.device)
