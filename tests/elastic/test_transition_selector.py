"""Which mesh is selected, what is reported of the others, that they are compared again, and what it has cost."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ranvier.config.resolve import ResolvedRun, resolve
from ranvier.config.run import Batch, Elastic, Train
from ranvier.data.prepare import prepare
from ranvier.elastic import controller
from ranvier.elastic.freezing import FrozenLayers
from ranvier.elastic.inputs import BlockFacts, ElasticRules, PresentMesh
from ranvier.elastic.ledger import Entry, Ledger
from ranvier.elastic.mesh_candidates import MeshCandidate, select
from ranvier.elastic.state import ElasticState
from ranvier.mesh import Mesh
from ranvier.train.elasticity import Elasticity
from ranvier.train.progress import Progress
from tests.elastic.runs import BY_HAND, IN_TWO, Wishes, always, lines, run_all, tiny, transitions

BLOCKS = 8
NOTHING = (0,) * BLOCKS
FACTS = BlockFacts(forward_seconds=(1.0,) * BLOCKS, backward_seconds=(2.0,) * BLOCKS, update_seconds=(0.0,) * BLOCKS,
                   output_bytes=NOTHING, num_parameters=NOTHING, parameter_bytes=NOTHING, state_bytes=NOTHING,
                   cores=None, bandwidth=1e9, latency_seconds=0.0, seconds=1.0)
FULL = "memory of the device is too small"


def candidate(data, pipe, seconds, **changed):
    return replace(MeshCandidate(mesh=Mesh(data=data, pipe=pipe), boundaries=tuple(range(1, pipe)), samples=32,
                                 seconds=seconds, fits=seconds is not None, reason="no cut fits"), **changed)


class Case:
    """Selections on four stages with two frozen layers. A transition costs a second, and a step takes a second."""

    def __init__(self, **elastic):
        self.told = []
        names = [f"layer{number}" for number in range(BLOCKS)]
        run = ResolvedRun(mesh=Mesh(pipe=4), batch=Batch(global_size=32, microbatch_size=4), elastic=Elastic(**elastic))
        self.present = PresentMesh(mesh=run.mesh, boundaries=(2, 4, 6), frozen=2, cached_blocks=0, global_size=32,
                                   layers=tuple((name,) for name in names), block_names=tuple(names))
        self.rules, self.refused = ElasticRules(run), frozenset()

    def select(self, found, *, depth=2, steps=100, full=()):
        """full: (data, pipe) of meshes that do not fit on the device."""
        state, chosen, notes = select(
            self.rules, ElasticState(refused=self.refused, recent=(1.0,)), self.present, found, FACTS, depth=depth,
            step=7, remaining_steps=steps,
            problem_of=lambda there: FULL if (there.mesh.data, there.mesh.pipe) in full else None)
        self.refused = state.refused
        self.told += [(note.event, note.text) for note in notes]
        return chosen, next(iter(state.ledger.entries), None)


HERE, FAST, FASTER = candidate(1, 4, 1.0), candidate(2, 2, 0.9), candidate(4, 1, 0.8)


def test_what_does_not_pay_is_told_once_and_taken_once_it_does():
    case = Case()
    assert case.select([FAST, HERE], depth=3, steps=5) == (HERE, None)  # a gain of 0.5 s is less than the cost of 1 s
    assert [event for event, _ in case.told] == ["judged"] and case.refused == {(2, 2, 3)}
    case.present = replace(case.present, frozen=3)
    assert case.select([FAST, HERE], depth=3, steps=5) == (None, None) and len(case.told) == 1
    taken, entry = case.select([FAST, HERE], depth=3, steps=50)
    assert taken == FAST and entry.new == "data 2 x pipe 2" and entry.seconds_after == pytest.approx(0.9)
    assert len(case.told) == 2 and "would gain 5.0 s over 50 steps" in case.told[1][1]
    assert not case.refused


def test_what_does_not_fit_is_told_once_and_taken_once_it_does():
    case = Case()
    assert case.select([FASTER, FAST, HERE], depth=3, full={(4, 1)})[0] == FAST
    assert case.told[0] == ("dropped", "data 4 x pipe 1 with 3 frozen layers: memory of the device is too small")
    assert case.refused == {(4, 1, 3)}
    case.present = replace(case.present, frozen=3)
    case.told.clear()
    assert case.select([FASTER, HERE], depth=3, full={(4, 1)}) == (None, None) and not case.told
    assert case.select([FASTER, HERE], depth=3)[0] == FASTER and [event for event, _ in case.told] == ["judged"]


def test_a_mesh_without_a_cut_that_fits_is_told_of_wherever_it_stands():
    case, none = Case(), candidate(4, 1, None, too_large=True)
    assert case.select([HERE, none], depth=3) == (HERE, None)
    assert case.told == [("dropped", "data 4 x pipe 1 with 3 frozen layers: no cut fits")]
    assert case.select([HERE, none], depth=3) == (HERE, None) and len(case.told) == 1
    assert case.refused == {(4, 1, 3)}
    assert case.select([HERE, candidate(4, 1, None)], depth=4) == (HERE, None) and len(case.told) == 1


def test_a_slower_mesh_is_neither_judged_nor_looked_at_again():
    case = Case()
    assert case.select([HERE, FAST], depth=3) == (HERE, None) and not case.told and not case.refused


def test_the_present_cut_stays_where_a_better_one_does_not_fit():
    case = Case()
    assert case.select([HERE, candidate(2, 2, 1.1)], depth=3, full={(1, 4)}) == (None, None)
    assert [event for event, _ in case.told] == ["dropped"] and not case.refused
    same = replace(HERE, boundaries=(2, 4, 6))
    assert case.select([same], depth=3, full={(1, 4)}) == (same, None)


def test_only_the_last_depths_refusals_are_kept():
    case = Case()
    case.select([FAST, HERE], depth=3, steps=1)
    case.select([FASTER, HERE], depth=4, steps=1)
    assert case.refused == {(4, 1, 4)}


def test_the_articles_rule_weighs_no_costs_but_must_fit():
    case, rule = Case(cut="reference"), candidate(2, 2, None, fits=True)
    assert case.select([rule], depth=3, steps=0) == (rule, None) and not case.told
    assert case.select([rule], depth=3, full={(2, 2)}) == (None, None) and case.told[0][0] == "dropped"


# ---------------------------------------------------------------------- complete runs

def test_a_mesh_is_taken_at_a_later_evaluation_at_which_it_pays(sentences, tmp_path, monkeypatch):
    always(monkeypatch)
    forced, found, asked, among = Ledger.decide, controller.mesh_candidates, [], []

    def candidates(*args, **options):
        among.append(options["among"])
        return found(*args, **options)

    def pays(ledger, *, step, **facts):
        asked.append(step)
        return replace(forced(ledger, step=step, **facts), pays=step >= 12)

    monkeypatch.setattr(controller, "mesh_candidates", candidates)
    monkeypatch.setattr(Ledger, "decide", pays)
    run = tiny(sentences, tmp_path / "run", mesh=Mesh(pipe=2), batch=IN_TWO, train=Train(steps=14), elastic=Elastic(
        freeze="cap", alpha=0.9, every=4, auto_pipe=True, auto_dp=True))
    results, _ = run_all(run)
    assert among == [None, {(2, 1)}, {(2, 1)}]
    assert asked == [4, 8, 12] and results[0]["steps"] == 14
    assert [(line["step"], line["mesh"]["data"], line["frozen_layers"]) for line in transitions(run)] == [
        (4, 1, 6), (12, 2, 6)]
    judged = [line["pays"] for line in lines(run, "events.jsonl") if line["event"] == "judged"]
    assert judged == [False, True]
    assert [entry["expected_cost"] is None for entry in results[0]["ledger"]] == [True, False]


def test_what_was_refused_goes_along_until_the_user_chooses(sentences, tmp_path):
    run = resolve(tiny(sentences, tmp_path / "run", elastic=BY_HAND))
    elastic, progress = Elasticity(run, prepare(run), tell=print), Progress.begin(run)
    elastic.state = replace(elastic.state, refused=frozenset({(2, 2, 3), (4, 1, 3)}))
    saved = elastic.document(run, FrozenLayers(3), progress)
    assert ElasticState.read(saved).refused == elastic.state.refused
    assert not ElasticState.read({name: value for name, value in saved.items() if name != "refused"}).refused
    elastic.caching = SimpleNamespace(enter=lambda now, reads: False)
    for request_id, kept in ((None, 2), ("1", 0)):
        change = SimpleNamespace(request_id=request_id, schedule=None)
        elastic.enter(SimpleNamespace(run=run), saved, change, Mesh(pipe=2), 10, 0.5, 3, progress)
        assert len(elastic.state.refused) == kept


@pytest.mark.slow
@pytest.mark.parametrize(("elastic", "wishes", "steps"), [
    (replace(BY_HAND, auto_pipe=False, auto_dp=False), {}, [5, 14]),
    (replace(BY_HAND, cut="reference"), {}, [5, 14]),
    (Elastic(), {2: dict(data=2, pipe=2), 6: dict(data=1, pipe=1), 10: dict(data=1, pipe=4)}, None),
], ids=["freezing alone", "the article's rule", "by hand"])
def test_every_transition_is_in_the_ledger(sentences, tmp_path, elastic, wishes, steps):
    run = tiny(sentences, tmp_path / "run", elastic=elastic, train=Train(steps=18), batch=IN_TWO)
    results, _ = run_all(run, trackers=[Wishes(run, wishes)])
    told, ledger = transitions(run), results[0]["ledger"]
    assert len(ledger) == len(told) == (len(steps) if steps else 3)
    assert [entry["step"] for entry in ledger] == [line["step"] for line in told] == (steps or [
        line["step"] for line in told])
    for entry, line in zip(ledger, told, strict=True):
        assert (entry["moved_bytes"], entry["measured_cost"]) == (line["bytes_moved"], pytest.approx(line["seconds"]))
        assert entry["expected_cost"] is entry["seconds_after"] is None
        assert entry["seconds_before"] > 0 and entry["measured_after"] > 0
        assert entry["new"] == f"data {line['mesh']['data']} x pipe {line['mesh']['pipe']}"
    assert ledger[0]["old"] == "data 1 x pipe 4"
    learnt = Ledger(tuple(Entry(**entry) for entry in ledger))
    assert learnt.expected_cost(0) != Ledger().expected_cost(0)


def test_what_is_to_move_is_known_beforehand(sentences, tmp_path, monkeypatch):
    always(monkeypatch)
    forced, expected = Ledger.decide, []

    def pays(ledger, **facts):
        expected.append(facts["moved_bytes"])
        return forced(ledger, **facts | {"moved_bytes": 1})  # replaced by what is measured

    monkeypatch.setattr(Ledger, "decide", pays)
    run = tiny(sentences, tmp_path / "run", elastic=replace(BY_HAND, manual=("5:2",)), train=Train(steps=7),
               batch=IN_TWO)
    results, _ = run_all(run)
    moved = [line["bytes_moved"] for line in transitions(run)]
    assert expected == pytest.approx(moved, rel=0.05) and results[0]["ledger"][0]["moved_bytes"] == moved[0]
