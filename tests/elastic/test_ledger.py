"""Whether a transition pays, judged by the costs of earlier ones and by the times of steps."""

import json
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.elastic.ledger import Entry, Ledger
from ranvier.elastic.state import ElasticState

MESHES = dict(old="pipe 4 x data 1", new="pipe 2 x data 2")


def entry(moved_bytes=0, **settings):
    return Entry(**{"step": 7, **MESHES, "moved_bytes": moved_bytes, "seconds_before": 2.0, "seconds_after": 1.5,
                    "remaining_steps": 10, "expected_cost": 1.0, **settings})


def asked(ledger, **settings):
    return ledger.decide(**{"step": 420, **MESHES, "seconds_before": 0.5, "model_before": 0.4, "model_after": 0.276,
                          "remaining_steps": 80, "moved_bytes": 0, **settings})


def test_the_prior_is_a_second_and_what_moves():
    assert Ledger().expected_cost(0) == 1.0
    assert Ledger().expected_cost(1_000_000_000) == 3.0


def test_costs_follow_measured_ones():
    """The median ratio of measured cost to prior: a tenth, a half, three."""
    ledger = Ledger()
    for moved, cost in ((0, 0.1), (500_000_000, 6.0), (0, 0.5)):
        ledger = ledger.with_entry(entry(moved)).with_measured(cost=cost)
    assert ledger.expected_cost(0) == 0.5 and ledger.expected_cost(1_000_000_000) == 1.5
    assert ledger.with_entry(entry()).expected_cost(0) == 0.5, "an entry without a measurement does not count"
    assert ledger.with_entry(entry()).with_measured(cost=nan, after=inf) == ledger.with_entry(entry())


def test_a_prediction_is_the_measured_time_scaled_as_the_model_is():
    decision = asked(Ledger())
    assert decision.entry.seconds_after == pytest.approx(0.345)


def test_the_line_of_a_log():
    ledger = Ledger().with_entry(entry()).with_measured(cost=0.6)
    yes = asked(ledger)
    assert yes.pays and yes.text == ("pipe 4 x data 1 -> pipe 2 x data 2 would gain 12.4 s over 80 steps and cost "
                                "about 0.6 s")
    assert yes.entry == Entry(step=420, **MESHES, moved_bytes=0, seconds_before=0.5,
                              seconds_after=yes.entry.seconds_after, remaining_steps=80, expected_cost=0.6)
    no = asked(ledger, remaining_steps=1)
    assert not no.pays and no.text == ("pipe 4 x data 1 -> pipe 2 x data 2 would gain 0.2 s over 1 step and cost "
                                  "about 0.6 s")
    worse = asked(ledger, model_after=0.8)
    assert not worse.pays and "would lose 40.0 s over 80 steps and cost" in worse.text


@pytest.mark.parametrize("settings", [
    dict(model_before=0.0), dict(model_after=nan), dict(seconds_before=inf), dict(model_before=inf),
    dict(model_after=0.0), dict(seconds_before=-1.0)], ids=str)
def test_what_cannot_be_judged_is_refused(settings):
    decision = asked(Ledger(), **settings)
    assert not decision.pays
    assert decision.text.startswith("pipe 4 x data 1 -> pipe 2 x data 2 cannot be judged: a step takes ")
    assert decision.text.endswith(" s were predicted")


def test_an_entry_in_words():
    assert str(entry()) == ("step 7: pipe 4 x data 1 -> pipe 2 x data 2: 2 s a step before (1.5 s were predicted)")
    assert str(Ledger().with_entry(entry()).with_measured(cost=0.5, after=1.6).entries[0]) == (
        "step 7: pipe 4 x data 1 -> pipe 2 x data 2: cost 0.5 s, 2 s a step before, 1.6 s after (1.5 s were predicted)")


def test_measurements_go_to_the_last_transition():
    ledger = Ledger().with_entry(entry(1)).with_entry(entry(2)).with_measured(cost=3.0).with_measured(after=4.0)
    assert ledger.entries == (entry(1), entry(2, measured_cost=3.0, measured_after=4.0))


positive = st.floats(1e-6, 1e6)
ledgers = st.lists(st.tuples(st.integers(0, 10**12), st.none() | st.floats(0.0, 1e4), st.none() | positive)).map(
    lambda rows: Ledger(tuple(entry(moved, measured_cost=cost, measured_after=after) for moved, cost, after in rows)))


@given(ledgers, st.floats(), st.floats(), st.floats(), st.integers(0, 10**6), st.integers(0, 10**12))
def test_yes_only_where_the_gain_is_larger_than_the_cost(ledger, before, model_before, model_after, steps, moved):
    decision = asked(ledger, seconds_before=before, model_before=model_before, model_after=model_after,
                    remaining_steps=steps, moved_bytes=moved)
    if decision.pays:
        gain = (before - before * (model_after / model_before)) * steps
        assert gain > ledger.expected_cost(moved) and gain > 0
    assert "\n" not in decision.text


@given(ledgers, positive, st.floats(0.01, 0.9), st.integers(0, 1000))
def test_yes_wherever_it_is(ledger, before, share, steps):
    decision = asked(ledger, seconds_before=before, model_before=1.0, model_after=share, remaining_steps=steps)
    assert decision.pays == ((before - before * share) * steps > ledger.expected_cost(0))


@given(ledgers, st.integers(0, 10**9), st.integers(0, 10**9))
def test_more_bytes_never_cost_less(ledger, first, second):
    assert ledger.expected_cost(min(first, second)) <= ledger.expected_cost(max(first, second))


@given(ledgers)
def test_it_survives_json(ledger):
    saved = json.dumps(ElasticState(ledger=ledger).document(), allow_nan=False)
    assert ElasticState.read(json.loads(saved)).ledger == ledger


def test_a_transition_that_nobody_judged_has_a_cost_and_no_prediction():
    unjudged = Entry(step=3, **MESHES, moved_bytes=0, remaining_steps=10)
    ledger = Ledger().with_entry(unjudged).with_measured(cost=6.0, after=0.5, moved_bytes=1_000_000_000)
    assert ledger.entries[0].moved_bytes == 1_000_000_000 and ledger.entries[0].expected_cost is None
    assert str(ledger.entries[0]) == "step 3: pipe 4 x data 1 -> pipe 2 x data 2: cost 6.0 s, 0.5 s after"
    assert ledger.expected_cost(0) == 2.0 and ledger.expected_cost(500_000_000) == 4.0
    saved = json.dumps(ElasticState(ledger=ledger).document(), allow_nan=False)
    assert ElasticState.read(json.loads(saved)).ledger == ledger


def test_ledgers_of_older_checkpoints_are_read():
    """In older checkpoints every entry was judged."""
    saved = {"step": 7, **MESHES, "moved_bytes": 5, "seconds_before": 2.0, "seconds_after": 1.5, "remaining_steps": 10,
             "expected_cost": 1.0, "measured_cost": 0.5, "measured_after": None}
    assert ElasticState.read({**ElasticState().document(), "ledger": {"entries": [saved]}}).ledger.entries == (
        entry(5, measured_cost=0.5),)
