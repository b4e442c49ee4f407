"""How many layers are frozen: known answers, invariants of all policies, and all refusals."""

import importlib
import re
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from math import ceil, inf, nan
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.published_freezing import StageBalance
from ranvier.config.rules import freeze_problems, manual_depth
from ranvier.config.run import Elastic
from ranvier.elastic.freezing import (
    Cap,
    Facts,
    FrozenLayers,
    GradientNorm,
    Manual,
    NoFreezing,
    decide,
    layers_text,
)
from ranvier.elastic.named_policy import policy_of
from ranvier.errors import ConfigError
from ranvier.layout import frozen_blocks
from tests.errors import check, raises


def facts(norms, *, frozen=0, evaluation=1, step=0):
    return Facts(step=step, evaluation=evaluation, frozen=frozen, num_layers=len(norms), gradient_norms=tuple(norms))


def depths(policy, all_norms):
    """The depth after each evaluation of a run."""
    frozen, found = 0, []
    for evaluation, norms in enumerate(all_norms, 1):
        frozen = decide(policy, facts([0.0] * frozen + list(norms[frozen:]), frozen=frozen, evaluation=evaluation,
                                      step=10 * evaluation)).prefix
        found.append(frozen)
    return found


# ---------------------------------------------------------------------- the rules

@pytest.mark.parametrize(("alpha", "norms", "frozen", "expected"), [
    (1 / 3, [9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1], 0, 4),  # the cap: a third of 12
    (1 / 3, [9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1], 4, 7),  # 4 + 8 / 3 is 6.67, rounded up
    (1 / 2, [9, 8, 1, 6, 5, 4], 0, 2),  # the argmin, exclusive: layers 0 and 1
    (1 / 2, [1, 8, 9, 6, 5, 4], 0, 0),  # the lowest has the smallest gradient: nothing
    (1 / 2, [0, 0, 5, 6, 5, 4], 2, 4),  # norms of frozen layers do not count
    (1 / 2, [0, 0, 3, 6, 5, 4], 2, 2),
    (1 / 2, [5, 1, 1, 5], 0, 1),  # a tie goes to the first
    (1 / 2, [0, 0, 0, 5], 3, 3),  # the last layer is never frozen
    (1 / 2, [0, 0, 0, 0], 4, 4),  # a fully frozen model stays frozen
    (0.01, [2, 1], 0, 1),  # at least one layer if one can freeze
    (1 / 2, [4, nan, 1, 5], 0, 2), (1 / 2, [nan, nan, nan], 0, 0), (1 / 2, [4, -inf, 3, 2], 0, 2)])
def test_gradient_norm_rule(alpha, norms, frozen, expected):
    assert decide(GradientNorm(alpha), facts(norms, frozen=frozen)).prefix == expected


@pytest.mark.parametrize(("alpha", "layers", "most"), [
    *((1 / parts, 7 * parts, 7) for parts in range(2, 12)), (0.07, 100, 7), (0.28, 25, 7), (0.55, 100, 55)])
@pytest.mark.parametrize("frozen", [0, 2])
def test_a_cap_that_is_whole_is_not_rounded_up(alpha, layers, most, frozen):
    """Although the product of floats may be slightly more, as 0.07 * 100 is."""
    norms = [0.0] * frozen + [1.0 + layers - layer for layer in range(layers)]
    assert GradientNorm(alpha).frozen_layers(facts(norms, frozen=frozen)) == frozen + most


@pytest.mark.parametrize(("alpha", "layers", "expected"), [
    (1 / 3, 12, [4, 7, 9, 10, 11, 11, 12]), (1 / 2, 12, [6, 9, 11, 12, 12]), (1 / 3, 27, [9, 15, 19, 22]),
    (1 / 5, 25, [5, 9, 13, 15]), (0.1, 10, [1, 2, 3, 4, 5])])
def test_cap(alpha, layers, expected):
    assert depths(Cap(alpha), [[1.0] * layers] * len(expected)) == expected


@given(st.integers(2, 9), st.integers(1, 100), st.integers(1, 30), st.data())
def test_cap_is_the_formula_in_exact_arithmetic(parts, layers, evaluation, data):
    share = Fraction(data.draw(st.integers(1, parts - 1)), parts)
    exact = layers * (1 - (1 - share) ** evaluation)
    expected = ceil(exact) if ceil(exact) - exact < 1 - Fraction(1, 10**8) else ceil(exact) - 1
    assert Cap(float(share)).frozen_layers(facts([1.0] * layers, evaluation=evaluation)) == expected


def test_cap_ends_with_all_layers():
    assert Cap(1 / 5).frozen_layers(facts([1.0] * 12, evaluation=10**6)) == 12


def test_cap_does_not_take_back_what_is_frozen():
    assert Cap(1 / 3).frozen_layers(facts([1.0] * 12, frozen=8, evaluation=1)) == 8


def test_manual():
    policy = Manual(((0, 1), (20, 3), (40, 3), (50, 6)))
    at = [policy.frozen_layers(facts([1.0] * 6, step=step)) for step in (0, 19, 20, 49, 50, 1000)]
    assert at == [1, 1, 3, 3, 6, 6]
    assert policy.frozen_layers(facts([1.0] * 6, frozen=5, step=20)) == 3
    assert Manual(((9, 1),)).frozen_layers(facts([1.0] * 6, frozen=5, step=8)) == 5
    assert Manual(((10, 2),)).frozen_layers(facts([1.0] * 6, step=9)) == 0


def test_no_freezing_keeps_what_is_frozen():
    assert NoFreezing().frozen_layers(facts([1.0] * 4, frozen=2)) == 2


@settings(deadline=None)
@given(st.data())
def test_depths_never_fall(data):
    layers = data.draw(st.integers(1, 12))
    alpha = data.draw(st.floats(0.001, 0.999))
    norms = st.lists(st.floats(), min_size=layers, max_size=layers)
    policy = data.draw(st.sampled_from([NoFreezing(), GradientNorm(alpha), Cap(alpha)]))
    found = depths(policy, data.draw(st.lists(norms, min_size=1, max_size=8)))
    assert found == sorted(found) and found[-1] <= layers
    if isinstance(policy, GradientNorm):
        assert found[-1] < layers
    if isinstance(policy, Cap):
        assert found[0] >= 1


# ---------------------------------------------------------------------- a user's policy

@pytest.mark.parametrize("answer", [5, -1, 3.0, True, None, "3", nan, {4}, {-1}, (0, True), [1.0]])
def test_answers_that_are_none(answer):
    class Backwards:
        def frozen_layers(self, facts):
            return answer

    says = (r"^answer of the freeze policy Backwards at step 7: must be a whole number of layers from 0 to the "
            r"model's 4, or a set of layers from 0 to 3 \(got "
            + re.escape(repr("None" if answer is None else answer))
            + r"\). Return facts.frozen from frozen_layers to change nothing.$")
    with pytest.raises(ConfigError, match=says):
        decide(Backwards(), facts([0.0, 0.0, 1.0, 1.0], frozen=2, step=7))


def test_a_truth_value_is_no_number_of_layers():
    class Yes:
        def frozen_layers(self, facts):
            return True

    with raises("freeze-policy-result"):
        decide(Yes(), facts([1.0, 1.0]))


@pytest.mark.parametrize(("answer", "lowest", "expected"), [
    (3, 0, FrozenLayers(3)), (0, 2, FrozenLayers(2)), (set(), 1, FrozenLayers(1)),
    ({1, 3}, 0, FrozenLayers(0, (1, 3))),
    ([0, 1, 3], 0, FrozenLayers(2, (3,))), ((3, 1), 1, FrozenLayers(2, (3,))),
    (frozenset(range(4)), 0, FrozenLayers(4))], ids=str)
def test_numbers_and_sets_of_layers(answer, lowest, expected):
    class Answers:
        def frozen_layers(self, facts):
            return answer

    given = Facts(step=0, evaluation=1, frozen=2, num_layers=4, gradient_norms=(1.0,) * 4, lowest=lowest)
    assert decide(Answers(), given) == expected and len(expected) == len(expected.layers)


@pytest.mark.parametrize(("layers", "text"), [([3], "layer 3"), ([0, 1, 2], "layers 0-2"), ([4, 1], "layers 1 and 4"),
                                              ([0, 2, 3, 6], "layers 0, 2-3 and 6")])
def test_layers_in_words(layers, text):
    assert layers_text(layers) == text


def test_stages_with_much_work_have_more_layers_frozen():
    """Two layers a stage; the second stage takes twice as long, so each of its layers saves twice as much."""
    given = Facts(step=0, evaluation=1, frozen=0, num_layers=6, gradient_norms=(1.0, 2.0, 5.0, 4.0, 1.0, nan),
                  stages=(0, 0, 1, 1, 2, 2), stage_seconds=(3.0, 6.0, 3.3))
    assert StageBalance(0.1).frozen_layers(given) == {3} and StageBalance(0.3).frozen_layers(given) == {2, 3}
    # with two layers frozen the slowest stage, of 4 s, has nothing left to freeze
    assert StageBalance(0.9).frozen_layers(given) == {2, 3}
    even = replace(given, stage_seconds=(0.0, 0.0, 0.0))
    assert StageBalance(0.5).frozen_layers(even) == {0, 3, 4}
    assert StageBalance(0.5).frozen_layers(replace(even, frozen=1, frozen_above=(3,), evaluation=2)) >= {0, 3, 4}


# ---------------------------------------------------------------------- the configuration

@pytest.mark.parametrize(("elastic", "policy"), [
    (Elastic(), NoFreezing()), (Elastic(freeze="gradient-norm", alpha=0.25), GradientNorm(0.25)),
    (Elastic(freeze="cap"), Cap(1 / 3)),
    (Elastic(freeze="manual", manual=("10:1", "020:3")), Manual(((10, 1), (20, 3))))], ids=str)
def test_policy_of(elastic, policy):
    assert policy_of(elastic) == policy
    assert not [*freeze_problems(elastic, 3)]


@pytest.mark.parametrize("text", ["", "10", "10:", ":3", "10:3:1", "a:b", "-1:3", "1.5:2", " 1:2", "1:2\n", "²:1",
                                  "9" * 19 + ":1"])
def test_manual_entries_that_cannot_be_read(text):
    with raises("malformed-manual-freeze", where="elastic.manual", value=text):
        manual_depth(text)
    with raises("malformed-manual-freeze"):
        policy_of(Elastic(freeze="manual", manual=(text,)))
    problem, = freeze_problems(Elastic(freeze="manual", manual=("1:1", text, "5:2")), 2)
    check(problem, "malformed-manual-freeze", value=text)


@pytest.mark.parametrize(("settings", "expected"), [
    (dict(freeze="cap", manual=("10:1",)), [("manual-freeze-unused", ("10:1",))]),
    (dict(freeze="manual"), [("manual-freeze-missing", "manual")]),
    (dict(freeze="manual", manual=("1:7", "2:8")), [("manual-freeze-layers", "1:7"), ("manual-freeze-layers", "2:8")]),
    (dict(freeze="manual", manual=("5:3", "5:4")), [("manual-freeze-order", "5:4")])], ids=str)
def test_problems(settings, expected):
    assert [(problem.code, problem.value) for problem in freeze_problems(Elastic(**settings), 6)] == expected


# ---------------------------------------------------------------------- layers, blocks and ties

BLOCKS = ("embedding", "layer0.attention", "layer0.mlp", "layer1.attention", "layer1.mlp", "head")
LAYERS = (("layer0.attention", "layer0.mlp"), ("layer1.attention", "layer1.mlp"))


def test_frozen_blocks_are_a_prefix():
    assert [frozen_blocks(LAYERS, BLOCKS, frozen) for frozen in (0, 1, 2)] == [0, 3, 5]


# ---------------------------------------------------------------------- the example

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
def test_own_freezing_freezes_and_learns(tmp_path):
    done = subprocess.run([sys.executable, str(EXAMPLES / "own_freezing.py")], cwd=tmp_path, capture_output=True,
                          text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^step (\d+): froze layers? .*\(GradientChange, evaluation (\d)\)$", done.stdout, re.MULTILINE)
    assert told and all(int(step) == 8 * int(evaluation) and int(evaluation) > 1 for step, evaluation in told)
    assert re.search(r"^done in .* held-out 0\.[0-4]", done.stdout, re.MULTILINE), done.stdout


def test_own_freezing_is_autofreeze(monkeypatch):
    """Changes of 1, 5, 50 and 90 %: the median is 27.5 %, so two layers have converged; then neither of the others."""
    monkeypatch.syspath_prepend(EXAMPLES)
    policy = importlib.import_module("own_freezing").GradientChange()
    assert policy.frozen_layers(facts([10.0, 10.0, 10.0, 10.0])) == 0
    assert policy.frozen_layers(facts([9.9, 10.5, 15.0, 1.0])) == 2
    assert policy.frozen_layers(facts([0.0, 0.0, 1.0, 1.0], frozen=2)) == 2
    assert policy.frozen_layers(facts([0.0] * 4, frozen=4)) == 4
