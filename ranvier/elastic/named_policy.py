"""The freeze policy that a run names: one of Ranvier's, or a user's `module:name`."""

from __future__ import annotations

from typing import cast

from ranvier.config.named_object import make_object
from ranvier.config.rules import manual_depth
from ranvier.config.run import Elastic
from ranvier.elastic.freezing import Cap, FreezePolicy, GradientNorm, Manual, NoFreezing

POLICY_METHODS = ("frozen_layers()",)
"""What a user's policy must have."""


def policy_of(elastic: Elastic) -> FreezePolicy:
    """A new policy, which `elastic.freeze` names. ConfigError for manual entries that cannot be read, and for a user's
    object that is no policy."""
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
