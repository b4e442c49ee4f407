"""What the benchmarks of elastic runs compute from their measurements: bounds, intervals, ratios, turns."""

import json
from dataclasses import replace
from fractions import Fraction
from math import inf, log
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.elastic import bound, compare, curves, intervals, outcome, pareto, program, typed
from benchmarks.elastic.article import EXPERIMENTS, article_cluster, predicted
from benchmarks.elastic.contender import ENDS, PEER, contenders, named
from benchmarks.elastic.kept import Kept
from benchmarks.elastic.program import _plain
from benchmarks.elastic.rounds import Stand, in_turn
from benchmarks.elastic.simulated import SHAPES, course, simulate_all, situation
from benchmarks.elastic.task import checked, task_run
from ranvier.mesh import Mesh
from ranvier.train.events import EvalEvent, StepEvent


def test_the_command_that_is_typed():
    words = typed.documented()
    assert words[:2] == ["train", "bert-sentiment"] and "--elastic.cache" in words and "--run-dir" not in words


def test_units_of_frozen_epochs():
    assert bound.depths(12, 1 / 3, 5) == [0, 4, 7, 9, 10]
    assert bound.depths(6, 0.6, 7, every=2) == [0, 0, 4, 4, 6, 6, 6]
    assert bound.units(12, [0, 4, 7], cache=False) == 36 + 12 + 16 + 12 + 10
    assert bound.units(12, [0, 4, 7], cache=True) == 36 + 12 + 16 + (12 - 4) + 10
    assert bound.speedup(12, 1 / 3, 1, cache=True) == 1.0
    assert bound.speedup(12, 1 / 3, 10, cache=False) < bound.speedup(12, 1 / 3, 10, cache=True)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (4, 2.776), (30, 2.042)])
def test_quantiles_of_t(freedom, quantile):
    assert intervals.t_quantile(freedom) == pytest.approx(quantile, abs=2e-3)


def test_intervals_of_accuracies():
    found = intervals.paired([0.80, 0.82, 0.81], [0.81, 0.81, 0.81])
    assert found.middle == pytest.approx(0.0) and found.half == pytest.approx(4.303 * 1.0 / 3 ** 0.5, rel=1e-3)
    assert intervals.paired([0.9], [0.8]).half == inf and str(intervals.paired([0.9], [0.8])) == "+10.00"
    assert intervals.binomial(0.8, 0.8, 1000).half == pytest.approx(196.0 * (2 * 0.16 / 1000) ** 0.5, rel=1e-3)


def _outcome(name, seed, seconds, accuracy, evaluated=1.0):
    return outcome.Outcome(name=name, seed=seed, samples=100, losses=(), step_seconds=(), transition_seconds=0.0,
                           eval_seconds=evaluated, wall_seconds=seconds + evaluated, counted_seconds=seconds - 0.5,
                           accuracy=accuracy, count=1000, course=({"step": 0, "frozen": 0, "data": 1, "pipe": 4,
                                                                   "cache": False},))


def test_ratios_are_formed_within_a_seed():
    outcomes = [_outcome("none", 0, 10.0, 0.8), _outcome("none", 1, 30.0, 0.9),
                _outcome("all", 1, 10.0, 0.9), _outcome("all", 0, 5.0, 0.79)]
    none, both = compare.lines(outcomes, "none", {"all": 3.0})
    assert (both.speedup.least, both.speedup.greatest) == (2.0, 3.0) and none.speedup.middle == 1.0
    assert both.with_eval.least == pytest.approx(11 / 6)
    assert both.by_seed.middle == pytest.approx(-0.5) and both.count == 2000 and both.bound == 3.0
    assert both.decided_seconds == pytest.approx(0.5)
    assert len(compare.row(both)) == len(compare.COLUMNS)


def _curve(name, seed, *points):
    return replace(_outcome(name, seed, 1.0, 0.0), curve=points)


REFERENCES = ("plain", "ddp", "none")


def test_curves_are_compared_with_the_best_of_the_peers_and_of_early_stopping(tmp_path):
    """`plain` is the best reference early, `none` later; `fast` is above both early, and its best score is kept; `late`
    has no point at first."""
    outcomes = []
    for seed in range(4):
        shift = 0.001 * seed
        outcomes += [_curve("plain", seed, (1.0, 0.70 + shift), (3.0, 0.75)),
                     _curve("ddp", seed, (2.0, 0.6), (4.0, 0.7)),
                     _curve("none", seed, (2.0, 0.65), (4.0, 0.85 + shift)),
                     _curve("fast", seed, (1.0, 0.80 + 2 * shift), (2.0, 0.79)),
                     _curve("late", seed, (1.5 + seed, 0.5))]
    assert [curves.best_at(outcomes[3].curve, at) for at in (0.9, 1.0, 5.0)] == [None, 0.8, 0.8]
    assert curves.budgets_of(outcomes, REFERENCES, count=3) == [2.0, 3.25, 4.5]
    found = curves.cells(outcomes, [2.0, 4.0], REFERENCES)
    by = {(cell.name, cell.seconds): cell for cell in found}
    assert by["fast", 2.0].reference == "plain" and by["fast", 4.0].reference == "none"
    assert by["fast", 2.0].difference.middle == pytest.approx(10.15) and by["fast", 2.0].is_above
    assert by["fast", 4.0].difference.middle == pytest.approx(-4.85) and not by["fast", 4.0].is_above
    assert by["late", 2.0].score is None and not by["late", 2.0].is_above
    # several comparisons: the interval is wider than that of one
    one = curves.corrected([0.8, 0.82, 0.81], [0.81, 0.81, 0.81], 1)
    assert one == intervals.paired([0.8, 0.82, 0.81], [0.81, 0.81, 0.81])
    assert curves.corrected([0.8, 0.82, 0.81], [0.81, 0.81, 0.81], 2).half > one.half
    text = curves.claim(found, REFERENCES, 4)
    assert text.startswith("At 2 s, fast reaches 80.3 %, +10.15 +- ") and "1 of 4 comparisons" in text
    assert text.endswith("Seeds: 4, of at least 10 that a claim needs.")
    below = [cell for cell in found if cell.seconds == 4.0]
    assert curves.claim(below, REFERENCES, 10) == (
        "At no budget of seconds is a curve of Ranvier's above the best of the peers and of early stopping without "
        f"freezing by more than the interval: at most {by['fast', 4.0].difference} points (fast, 4 s).")
    table = curves.table(found, "head")
    assert "70.2 (reference)" in table and "80.3 (+10.15 +- " in table and table.count("above") == 1
    curves.draw(outcomes, {"peers": ["plain", "none"], "ours": ["fast"]}, REFERENCES, "title", tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5_000


def test_perplexities_are_compared_by_their_logarithms(tmp_path):
    """Lower is better: scores are minus losses."""
    assert outcome.curve_of([{"seconds": 5.0, "eval_seconds": 2.0, "eval_loss": 1.5}]) == ((3.0, -1.5),)
    outcomes = [_curve(name, seed, (1.0, -log(perplexity)))
                for name, perplexity in (("plain", 20.0), ("fast", 19.0)) for seed in (0, 1)]
    found = curves.cells(outcomes, [1.0], ("plain",))
    text = curves.claim(found, ("plain",), 10, curves.PERPLEXITY)
    assert text.startswith("At 1 s, fast reaches perplexity 19.00, +5.13 +- 0.00 hundredths of a nat (about percent of "
                           "the perplexity) better than plain, ")
    assert "19.00 (+5.13 +- 0.00) above" in curves.table(found, "head", curves.PERPLEXITY)


def test_cases_that_would_not_end_in_time_are_not_started(tmp_path, monkeypatch, capsys):
    """Of a seed's 19 cases, two windows do five and four; kept cases are not repeated; only complete seeds count."""
    now, ran = [0.0], []

    def run_one(contender, base, stand):
        now[0] += 60.0
        ran.append(contender.name)
        return replace(_curve(contender.name, base.seed, (1.0, 0.5)), process_seconds=60.0)

    monkeypatch.setattr(program, "run_one", run_one)
    monkeypatch.setattr(program, "time", SimpleNamespace(monotonic=lambda: now[0]))
    arguments = ["--quick", "--seeds", "0", "1", "--keep", str(tmp_path / "runs"), "--outcomes",
                 str(tmp_path / "kept.jsonl"), "--budget-minutes"]
    assert pareto.measure(pareto.parse([*arguments, "5.2"])) is None and len(ran) == 5
    assert "5 of 38 cases are done, the others take about 33 minutes" in capsys.readouterr().out
    assert pareto.measure(pareto.parse([*arguments, "4.2"])) is None and len(ran) == 9
    found = pareto.measure(pareto.parse([*arguments, "13"]))
    assert len(ran) == 21 and len(set(ran[:19])) == 19 and ran[19] == ran[18], "seed by seed, in alternating order"
    assert len(found["outcomes"]) == 19 and {one["seed"] for one in found["outcomes"]} == {0}
    assert "not written, since seeds are missing" in capsys.readouterr().out
    assert len(pareto.measure(pareto.parse([*arguments, "0"]))["outcomes"]) == 19 and len(ran) == 21
    with pytest.raises(SystemExit):
        pareto.parse(["--budget-minutes", "3"])


def test_an_outcome_is_of_the_files_that_were_there(tmp_path):
    base, stand = task_run("quick", tmp_path, epochs=1), Stand(folder=tmp_path)
    (none,) = named(contenders(base), ["none"])
    kept = Kept(tmp_path / "kept.jsonl")
    kept.add(none, base, stand, _curve("none", 0, (1.0, 0.5)))
    assert Kept(tmp_path / "kept.jsonl").get(none, base, stand).curve == ((1.0, 0.5),)
    (tmp_path / "train.tsv").write_text("label\tsentence\n1\tanother\n")
    assert Kept(tmp_path / "kept.jsonl").get(none, base, stand) is None


def test_short_contenders_have_a_schedule_of_their_own(tmp_path):
    text, labelled = (task_run(task, tmp_path, epochs=4, eval_epochs=1) for task in ("quick-decoder", "quick"))
    assert text.train.epochs is None and text.train.steps == 4 * text.train.eval_every > 20
    for base in (text, labelled):
        found = {one.name: checked(one.applied(base)) for one in pareto.pareto_contenders(base)}
        short, whole = found["none-short"].train, found["none"].train
        assert whole == base.train and found["plain-short"].train == short
        assert (short.steps, whole.steps) == (2 * base.train.eval_every, 4 * base.train.eval_every) or (
            short.epochs, whole.epochs) == (2, 4)
        assert short.warmup_steps == round(0.5 * whole.warmup_steps) and short.eval_every == whole.eval_every


def test_data_of_ones_own(tmp_path):
    """With fewer samples than by default, all are used, in full batches."""
    lines = [f"{number % 2}\tsentence {number} is {'good' if number % 2 else 'bad'}" for number in range(60)]
    (tmp_path / "own.tsv").write_text("\n".join(["label\tsentence", *lines]) + "\n")
    base = task_run("quick", tmp_path, data=str(tmp_path / "own.tsv"), eval_epochs=1)
    assert (base.data.train_samples, base.data.eval_samples, base.data.eval) == (48, 6, None)
    assert base.train.eval_every == 6
    (tmp_path / "own.txt").write_text("".join(f"sentence {number} of a text\n" for number in range(400)))
    base = task_run("quick-decoder", tmp_path, data=str(tmp_path / "own.txt"), epochs=2, eval_epochs=1)
    assert base.data.corpus == str(tmp_path / "own.txt") and base.train.steps == 2 * base.train.eval_every


def test_a_curve_leaves_evaluations_out(tmp_path):
    assert outcome.curve_of([{"seconds": 5.0, "eval_seconds": 2.0, "eval_accuracy": 0.5},
                             {"seconds": 10.0, "eval_seconds": 3.0, "eval_accuracy": 0.6}]) == ((3.0, 0.5), (5.0, 0.6))


def test_turns_go_seed_by_seed_and_turn_round():
    base = task_run_of()
    found = named(contenders(base), ["none", "freeze", "all"])
    assert [(seed, one.name) for seed, one in in_turn([0, 1, 2], found, [0, 1], ENDS)] == [
        (0, "none"), (0, "freeze"), (0, "all"), (1, "all"), (1, "freeze"), (1, "none"), (2, "none"), (2, "all")]
    with pytest.raises(ValueError, match="no contender is called nobody"):
        named(contenders(base), ["nobody"])


def task_run_of(task="sentiment", **options):
    return task_run(task, folder=None, **options)


@pytest.mark.parametrize("task", ["sentiment", "cifar10"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_contender_can_be(task, ranks):
    base = task_run_of(task, samples=100, eval_epochs=2)
    assert base.data.train_samples == 96 and base.train.eval_every == 12 and base.train.epochs == 10
    for one in contenders(base, ranks=ranks):
        run = checked(one.applied(base))
        assert run.mesh.size == ranks and run.train == base.train and run.optim == base.optim and run.data == base.data
        assert run.elastic.freeze == ("none" if one.name in ("none", "gpipe-dp", PEER) else "cap")
        assert run.elastic.cache == (one.name in ("pipe-cache", "all", "ddp-cache"))
        assert run.elastic.auto_dp == (one.name in ("pipe-dp", "all"))


@pytest.mark.slow
def test_eight_devices_simulated():
    shape = replace(SHAPES[0], batch=64)
    found = simulate_all(shape)
    assert found["none"]["speedup"] == 1.0 and found["none"]["course"] == [(0, 1, 8)] * 10
    assert found["pipe-dp, exact"]["speedup"] >= found["pipe-dp, reference"]["speedup"] > 1.5
    assert found["all, exact"]["speedup"] >= found["all, reference"]["speedup"] > found["pipe-dp, reference"]["speedup"]
    assert all(data * pipe == 8 for one in found.values() for _, data, pipe in one["course"])
    start = situation(shape, 8, 1e12, inf)
    (first,) = course(start, [0], cache=True, cut="exact")
    ideal = 3 * 12 * shape.layer_flops * shape.batch / 8 / 1e12
    assert ideal < first.seconds < 1.3 * ideal and (first.data, first.pipe) == (1, 8)


def test_the_clock_begins_with_the_first_step(tmp_path, monkeypatch):
    times = iter([100.0, 103.0, 105.0, 110.0])
    monkeypatch.setattr(outcome.time, "monotonic", lambda: next(times))
    clock = outcome.Clock(tmp_path)
    for step, seconds in ((1, 2.0), (2, 3.0), (3, 4.0)):
        clock.event(StepEvent(step=step, loss=1.0, tokens=8, step_seconds=seconds, wait_seconds=0.0,
                              bubble_fraction=0.0, grad_norm=1.0, learning_rate=1.0, flops_per_second=1.0,
                              model_flops_utilisation=1.0))
        if step == 2:
            clock.event(EvalEvent(step=2, loss=0.5, tokens=8, seconds=1.5, scores={"eval_accuracy": 0.75}))
    clock.close()
    assert json.loads((tmp_path / outcome.CLOCK).read_text()) == {"seconds": 15.0, "evaluations": [
        {"seconds": 10.0, "eval_seconds": 1.5, "eval_loss": 0.5, "eval_accuracy": 0.75}]}


def test_what_json_lacks():
    assert _plain({"a": inf, "b": [Fraction(1, 3)], "c": Path("x"), "d": 1.5}) == {
        "a": None, "b": ["1/3"], "c": "x", "d": 1.5}


@pytest.mark.slow
def test_the_articles_runs_are_predicted_as_plans_are():
    """The planner predicts every course, which begins on the article's mesh; later periods have no fewer frozen
    layers."""
    small = replace(EXPERIMENTS[1], batch=32, samples=3200, model=replace(EXPERIMENTS[1].model, hidden=192, heads=3))
    rows = {(part, batch): (found, speed) for part, batch, found, speed, reason in predicted(small, article_cluster())}
    assert all(found is not None for found, _ in list(rows.values())[3:]) and len(rows) == 3 + 6
    for (part, batch), (found, speed) in list(rows.items())[3:]:
        meshes = [period.mesh for period in found.periods]
        assert meshes[0] == Mesh(pipe=8, data=2) and speed > 0
        assert [period.frozen for period in found.periods] == sorted(period.frozen for period in found.periods)
        assert found.periods[-1].frozen == 12
        assert part != "freezing alone" or set(meshes) == {Mesh(pipe=8, data=2)}
        assert batch != "grow" or found.periods[-1].global_size == 64 * meshes[-1].data // 2
