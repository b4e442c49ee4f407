"""A run's controller, with the freeze policy that the run names: one of Ranvier's, or a user's `module:name`."""

from __future__ import annotations

from functools import cache
from typing import cast

from ranvier.block import still_frozen, untrained_layers
from ranvier.config.named_object import make_object, missing_attribute
from ranvier.config.resolve import ResolvedRun
from ranvier.config.rules import manual_depth
from ranvier.config.run import Elastic
from ranvier.elastic.controller import Controller
from ranvier.elastic.freezing import Cap, FreezePolicy, GradientNorm, Manual, NoFreezing
from ranvier.errors import ConfigError
from ranvier.models import families

POLICY_METHODS = ("frozen_layers()",)
"""Methods that a user's policy must have."""


def controller_of(run: ResolvedRun, epoch_samples: int, *, policy: FreezePolicy | None = None,
                  eval_samples: int = 0) -> Controller:
    """The controller of a run, as it was started. policy: replaces the one that the run names. eval_samples: number of
    held-out samples, for a policy that compares the layers' outputs. ConfigError for an object that is not a policy."""
    if policy is not None and (missing := missing_attribute(policy, POLICY_METHODS)) is not None:
        raise ConfigError(f"has no {missing}", code="freezing-object-incomplete", where="train(freezing=...)",
                          value=type(policy).__name__, remedy="Give it what docs/extending.md describes.")
    named = policy_of(run.elastic) if policy is None else policy
    freezes = policy is not None or run.elastic.freeze != "none"
    return Controller(
        run, named, epoch_samples=epoch_samples, is_own=policy is not None,
        eval_samples=eval_samples if getattr(named, "needs_activations", False) else None,
        untrained=untrained_layers(families.model_of(run)) if freezes and not run.elastic.dry_run else 0,
        still_frozen=cache(lambda frozen: still_frozen(families.model_of(run), frozen)))


def policy_of(elastic: Elastic) -> FreezePolicy:
    """A new policy of the kind that `elastic.freeze` names. ConfigError for manual entries that cannot be read, and for
    a user's object that is not a policy."""
    match elastic.freeze:
        case "none" | "untrained":
            return NoFreezing()
        case "gradient-norm":
            return GradientNorm(elastic.alpha)
        case "cap":
            return Cap(elastic.alpha)
        case "manual":
            return Manual(tuple(manual_depth(text) for text in elastic.manual))
    return cast(FreezePolicy, make_object(elastic.freeze, "elastic.freeze", POLICY_METHODS, elastic.options))
