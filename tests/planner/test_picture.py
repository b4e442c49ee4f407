"""The picture of a simulation shows the simulated step, and all schedules within the same memory."""

from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Launch, Pipeline, Transformer
from ranvier.cost.cluster_files import load_cluster
from ranvier.mesh import Mesh
from ranvier.planner import picture
from ranvier.planner.picture import bubble, draw_actions, draw_bubbles, draw_simulation, mean_stage
from ranvier.planner.plan import simulation
from ranvier.schedule.policies import POLICIES
from ranvier.schedule.simulator import StageTimes

RUN = ResolvedRun(model=Transformer(num_layers=8, hidden=64, heads=2, vocab=300, sequence=64), mesh=Mesh(pipe=4),
                  batch=Batch(global_size=16, microbatch_size=2), launch=Launch(device="cpu"))
POLICY = {policy.name: policy for policy in POLICIES}


def test_the_message_driven_schedule_is_drawn_as_no_slower_than_others_in_their_memory():
    """At every depth, at every in-flight limit of at least the number of stages, and with varying times."""
    stage = StageTimes(forward=1.0, backward=1.1, weight=0.9)
    axes = Figure().subplots(1, 3)
    draw_bubbles(axes, stage, 4, 8, hop=0.1)
    for place, panel in enumerate(axes):
        drawn = {line.get_label().partition(",")[0]: dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
                 for line in panel.lines}
        assert set(drawn) == set(POLICY)
        for at, ours in drawn["message-driven"].items():
            if place != 1 or at >= 4:  # with fewer in flight than stages it is not 1F1B
                assert ours <= drawn["1f1b"][at] + 0.3, (place, at)
    depths = dict(zip(axes[0].lines[0].get_xdata(), axes[0].lines[0].get_ydata(), strict=True))
    assert depths[4] == pytest.approx(100 * bubble(stage, 4, 8, POLICY[axes[0].lines[0].get_label().partition(",")[0]],
                                                   hop=0.1))


def test_the_picture_has_the_actions_of_the_simulation():
    found = simulation(RUN, replace(load_cluster("laptop"), nodes=4))
    axes = Figure().subplots()
    draw_actions(axes, found.step.shown)
    drawn = sum(len(bars.get_paths()) for bars in axes.collections)
    assert drawn == sum(len(actions) for actions in found.step.shown.actions)
    assert axes.get_xlim()[1] == pytest.approx(found.step.seconds)


@pytest.mark.slow
def test_a_picture_of_many_stages_says_how_many_there_are_and_fits(tmp_path, monkeypatch):
    """No text is cut off at an edge, and the legend covers no curve; curves have the run's number of microbatches."""
    figures, drawn = [], []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure))
    monkeypatch.setattr(picture, "draw_bubbles", lambda axes, stage, pipe, count, hop: (
        drawn.append(count), draw_bubbles(axes, stage, 2, 2, hop)))
    run = replace(RUN, mesh=Mesh(pipe=26), model=replace(RUN.model, num_layers=26))
    draw_simulation(simulation(run, replace(load_cluster("laptop"), nodes=26)), tmp_path / "x")
    figure, drawn_count = figures[0], drawn[0]
    assert drawn_count == run.num_microbatches
    figure.canvas.draw()
    top, *below = figure.axes
    assert len(top.get_yticks()) == 24 and "24 of 26 stages" in top.get_xlabel()
    names = [text.get_window_extent() for text in below[-1].get_legend().get_texts()]
    texts = [text.get_window_extent() for axes in figure.axes for text in (
        axes.xaxis.label, axes.yaxis.label, axes._left_title) if text.get_text()]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width for box in (*texts, *names))
    assert not any(name.overlaps(box) for name in names for box in (*texts, *(axes.bbox for axes in figure.axes)))


def test_of_equal_stages_the_picture_and_a_simulation_have_about_the_same_bubbles():
    """For runs in 1F1B's memory whose stages differ little; the picture ignores the memory of weights."""
    cluster, bubbles = replace(load_cluster("laptop"), nodes=4, devices_per_node=1), {}
    for policy in ("message-driven", "1f1b"):
        run = replace(RUN, pipeline=Pipeline(policy=policy, memory=1.0),
                      model=replace(RUN.model, num_layers=32, vocab=16))
        found = simulation(run, cluster)
        stage = mean_stage([StageTimes(forward=row.forward_seconds, backward=row.backward_seconds,
                                       weight=row.weight_seconds) for row in found.cost.stages])
        hop = found.cost.edge_seconds + cluster.between.latency_seconds
        bubbles[policy] = found.step.bubble_fraction, bubble(stage, 4, run.num_microbatches, POLICY[policy], hop=hop)
        assert bubbles[policy][0] == pytest.approx(bubbles[policy][1], abs=0.06)
    assert all(ours <= theirs for ours, theirs in zip(*bubbles.values(), strict=True))
