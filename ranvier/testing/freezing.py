"""Conformance test of your own freeze policy, in a second.

    check_freeze_policy(MyPolicy)
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable

from ranvier.arguments import check_arguments
from ranvier.config.run import Positive
from ranvier.elastic.freezing import Facts, FreezePolicy, FrozenLayers, StatefulPolicy, decide


def check_freeze_policy(make: Callable[[], FreezePolicy], *, cases: Positive = 100, seed: int = 0) -> None:
    """Evaluate fresh policies from `make` in synthetic runs of many depths, with gradients that vanish, grow or are
    NaN, falling losses and learning rates, and outputs that change less and less.

    AssertionError, with the run, if an answer is neither a number of layers nor a set of layers, or if a policy that is
    restored from its state answers differently from the original.
    """
    check_arguments(check_freeze_policy, locals())
    for case in range(cases):
        choose = random.Random(f"{seed} {case}")
        policy, frozen, layers = make(), FrozenLayers(0), choose.randint(1, 12)
        for evaluation in range(1, choose.randint(2, 16)):
            facts = _facts(choose, evaluation, frozen, layers, getattr(policy, "needs_activations", False))
            text = f"{type(policy).__name__}, case {case}: {facts}"
            restored = _restore(policy, make, text)
            try:
                frozen = decide(policy, facts)
                again = frozen if restored is None else decide(restored, facts)
            except Exception as error:
                raise AssertionError(f"{text}: {error}") from error
            assert frozen == again, f"{text}: answers {frozen}, and {again} where it was restored from its state"


def _facts(choose: random.Random, evaluation: int, frozen: FrozenLayers, layers: int, needs_activations: bool
           ) -> Facts:
    kinds = (0.0, choose.random(), choose.random() * 1e-9, choose.random() * 1e9, math.nan, math.inf)
    weights = (1, 20, 2, 2, 1, 1)
    norms = tuple(0.0 if layer in frozen.layers else choose.choices(kinds, weights)[0] for layer in range(layers))
    changes = tuple(math.nan if evaluation == 1 else choose.random() / evaluation for _ in range(layers))
    stages = choose.randint(1, layers)
    return Facts(step=10 * evaluation, evaluation=evaluation, frozen=frozen.prefix, num_layers=layers,
                 gradient_norms=norms, lowest=choose.randint(0, frozen.prefix), frozen_above=frozen.above,
                 stages=tuple(layer * stages // layers for layer in range(layers)),
                 stage_seconds=tuple(choose.choice((0.0, choose.random())) for _ in range(stages)),
                 loss=choose.choice([math.nan, 2.0 / evaluation]),
                 learning_rate=0.1 * choose.random() ** evaluation,
                 metrics=choose.choice([{}, {"eval_loss": 2.5 / evaluation, "eval_accuracy": choose.random()}]),
                 activation_change=changes if needs_activations else None)


def _restore(policy: FreezePolicy, make: Callable[[], FreezePolicy], text: str) -> FreezePolicy | None:
    """A fresh policy with the state of this one; None if policies keep no state."""
    if not isinstance(policy, StatefulPolicy):
        return None
    try:
        state = json.loads(json.dumps(policy.state_dict()))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{text}: state_dict is not serialisable as JSON: {error}") from error
    fresh = make()
    assert isinstance(fresh, StatefulPolicy)
    fresh.load_state_dict(state)
    return fresh
