"""Meter, timelines on one clock, Chrome trace, pictures and summary, from spans made by hand."""

import json
import os
import re
import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from ranvier.mesh import Mesh
from ranvier.pictures import timelines
from ranvier.pictures.report_page import step_timeline
from ranvier.pictures.timeline_picture import _bar_text, timeline_picture
from ranvier.pictures.timelines import RankTimeline, gather_timelines, join_spans, representative_step, shares, within
from ranvier.schedule import spans
from ranvier.schedule.spans import Span, StepWindow, Timeline, covering
from ranvier.system.memory_tracker import peak_memory_bytes
from ranvier.testing.ranks import run_ranks
from ranvier.testing.trackers import example_run, example_step
from ranvier.train import metrics
from ranvier.train.events import StartEvent
from ranvier.train.history import History
from ranvier.train.metrics import TIMELINE_STEPS, Meter, PeakRate, matrix_product_rate
from ranvier.train.report import (
    draw_elastic_run,
    draw_loss,
    median_after_warm_up,
    smoothed,
    summarise,
    write_report,
    write_trace,
)
from tests.errors import raises

pytestmark = pytest.mark.pictures
PNG = b"\x89PNG"
MS = 1_000_000


def step_of(number, milliseconds, *spans, start=0):
    """A step from (category, label, start ms, stop ms)."""
    return StepWindow(step=number, start_ns=start, stop_ns=start + milliseconds * MS, spans=[
        Span(category, label, number, start + begin * MS, start + end * MS) for category, label, begin, end in spans])


def two_by_two():
    mesh, lines = Mesh(data=2, pipe=2), []
    for rank in range(4):
        steps = [step_of(number, 100 + number, ("forward", "F0", 0, 20), ("wait", "backward 0", 20, 40 + 10 * rank),
                         ("backward", "B0", 70, 80), ("weight", "W0", 80, 85), ("reduce", "average", 85, 90),
                         ("optimizer", "update", 90, 95), start=number * 1000 * MS) for number in (1, 7, 8, 9)]
        lines.append(RankTimeline(rank=rank, steps=steps))
    return mesh, lines


CPU = torch.device("cpu")


class FixedResult:
    loss, weight, grad_norm, stepped = 2.0, 1000.0, 0.5, True


class OwnClock(threading.local):
    """A clock for each rank, which the test advances."""

    now = 0

    def monotonic_ns(self):
        return self.now


def test_the_meter_averages_over_ranks_and_clocks_every_moment_once(monkeypatch):
    clock = OwnClock()
    for module in (metrics, spans):
        monkeypatch.setattr(module, "time", clock)

    def rank(world):
        timeline, group = Timeline(), world.backend.group("train", [range(2)])
        meter, pending = Meter(timeline, group, CPU), []
        for number in (1, 2, 3):
            started = clock.now
            clock.now += 20 * number * MS
            if world.rank == 0:
                timeline.add("wait", "forward 0", number, started)
            pending.append(meter.step(number, FixedResult(), 1e-3))
        return [step.event(10.0, PeakRate(1e6 / 2, None)) for step in pending]

    events, others = run_ranks(rank, 2)
    assert events == others, "all ranks have the same numbers"
    assert [event.step_seconds for event in events] == pytest.approx([0.02, 0.04, 0.06])
    for event in events:
        assert event.bubble_fraction == pytest.approx(0.5), "one rank of two waits all the time"
        assert event.wait_seconds == pytest.approx(event.step_seconds / 2)
        assert event.tokens_per_second == pytest.approx(1000 / event.step_seconds)
        assert event.flops_per_second == pytest.approx(10 * event.tokens_per_second)
        assert event.model_flops_utilisation == pytest.approx(event.flops_per_second / 1e6)
        assert not event.against_published_peak and event.num_ranks == 2 and event.memory_bytes > 10e6


def test_the_meter_never_waits_for_the_step_it_clocks():
    class Unread(FixedResult):
        @property
        def loss(self):
            pytest.fail("read too early")

    first_is_done = threading.Event()

    def rank(world):
        meter = Meter(Timeline(), world.backend.group("train", [range(2)]), CPU)
        if world.rank == 1:
            assert first_is_done.wait(20), "rank 0 waits for a step that this rank has not reached"
        meter.step(1, Unread(), 1e-3)
        if world.rank == 0:
            first_is_done.set()

    run_ranks(rank, 2)


def test_the_meter_keeps_the_first_step_and_the_latest():
    def rank(world):
        meter = Meter(Timeline(), world.backend.group("train", [range(1)]), CPU)
        for number in range(1, 11):
            meter.step(number, FixedResult(), 1e-3)
            kept = [step.step for step in meter.kept_steps]
            assert kept == sorted({1, *range(max(1, number - TIMELINE_STEPS + 1), number + 1)})
        meter.resume()
        assert meter.step(11, FixedResult(), 1e-3).event(1.0, PeakRate(1.0, None)).step_seconds < 0.5
        return kept

    assert run_ranks(rank, 1) == [[1, 6, 7, 8, 9, 10]]


def test_ranks_of_one_machine_share_a_clock_and_others_are_shifted(monkeypatch):
    def rank(world):
        group = world.backend.group("train", [range(2)])
        return gather_timelines(group, [step_of(1, 10, ("forward", "F0", 0, 5), start=world.rank * MS)])

    lines = run_ranks(rank, 2)[0]
    assert [line.steps[0].start_ns for line in lines] == [0, MS] and lines[1].clock_error_ns == 0
    assert lines[0].steps[0].spans == [Span("forward", "F0", 1, 0, 5 * MS)]
    here = {"machine": "a", "left_ns": [100, 200, 300]}
    there = {"machine": "b", "left_ns": [1100, 1210, 1290]}
    assert timelines._offset(here, there) == (-1000, 10)


def test_the_trace_has_a_process_per_replica_and_a_thread_per_rank(tmp_path):
    mesh, lines = two_by_two()
    write_trace(tmp_path / "timeline.json", lines, mesh)
    trace = json.loads((tmp_path / "timeline.json").read_text())
    names = {(event["name"], event["pid"], event["tid"]): event["args"].get("name") for event in trace["traceEvents"]
             if event["ph"] == "M"}
    assert names["process_name", 1, 0] == "replica 1 (data 1)"
    assert names["thread_name", 1, 2] == "rank 2 (data 1, pipe 0, row 0, col 0)"
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {(bar["pid"], bar["tid"]) for bar in bars} == {(0, 0), (0, 1), (1, 2), (1, 3)}
    assert {bar["cat"] for bar in bars} == {"forward", "wait", "backward", "weight", "reduce", "optimizer"}
    assert len({bar["cname"] for bar in bars}) == 6, "each category has its colour"
    first = bars[0]
    assert (first["name"], first["ts"], first["dur"], first["args"]["step"]) == ("F0", 0.0, 20_000.0, 1)
    assert trace["otherData"]["steps"] == [1, 7, 8, 9] and len(trace["otherData"]["clock_error_microseconds"]) == 4


def test_the_picture_shows_a_step_of_median_length():
    mesh, lines = two_by_two()
    assert representative_step(lines) == 8
    assert representative_step([RankTimeline(rank=0, steps=[step_of(1, 5)])]) == 1 and representative_step([]) is None
    pictures = timeline_picture(lines, mesh, "message-driven"), timeline_picture(lines[:1], Mesh(), "gpipe")
    assert [picture[:4] for picture in pictures] == [PNG, PNG]


def test_the_picture_of_many_ranks_stays_of_bounded_size(monkeypatch):
    monkeypatch.setattr("ranvier.pictures.timelines.MAX_RANKS", 8)  # a picture of 64 takes seconds
    mesh = Mesh(data=40, pipe=2)
    lines = [RankTimeline(rank=rank, steps=[step_of(2, 10, ("forward", "F0", 0, 5))]) for rank in range(mesh.size)]
    height = int.from_bytes(timeline_picture(lines, mesh, "message-driven")[20:24], "big")
    assert height < 2000
    page = step_timeline(lines, mesh)
    assert len(page.rows) == 8 and "first 8 of 80 ranks" in page.title


@pytest.mark.parametrize("count", [1, *(pytest.param(count, marks=pytest.mark.slow) for count in (10, 200))])
def test_loss_pictures(count, tmp_path):
    losses = {step: 8 / step for step in range(1, count + 1)} | {count: float("nan")}
    draw_loss(tmp_path / "loss.png", losses, {count: 3.0}, "gpt-tiny")
    assert (tmp_path / "loss.png").read_bytes()[:4] == PNG


def test_steps_are_whole_numbers(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    for count in (1, 2, 20):
        draw_loss(tmp_path / "loss.png", dict.fromkeys(range(1, count + 1), 3.0), {}, "gpt-tiny")
        ticks = figures[-1].axes[0].get_xticks()
        assert len(ticks) >= min(count, 4) and all(tick == int(tick) for tick in ticks)
    history = history_of(tmp_path)
    history.frozen, history.meshes = {0: 0}, {0: (2, 2), 3: (2, 1)}
    draw_elastic_run(tmp_path / "course.png", history, "gpt-tiny")
    for axes in figures[-1].axes[:2]:
        assert all(tick == int(tick) for tick in axes.get_yticks()), "layers and ranks are whole numbers"


def test_a_title_of_any_name_is_whole(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    title = "a-recipe-of-$1_$-and-a-long-name-" * 3 + " on mesh data 16 x pipe 8 x row 2 x col 4"
    draw_loss(tmp_path / "loss.png", {1: 2.0}, {}, title)
    draw_elastic_run(tmp_path / "course.png", history_of(tmp_path), title)
    for figure in figures:
        figure.canvas.draw()
        drawn = figure.axes[0]._left_title.get_window_extent()
        assert drawn.x1 <= figure.bbox.width and drawn.y1 <= figure.bbox.height


def test_smoothing_is_centred():
    assert smoothed([1.0, 2.0, 3.0, 4.0, 5.0], 3) == [1.5, 2.0, 3.0, 4.0, 4.5]


def test_steady_is_the_median_after_the_first_two():
    assert median_after_warm_up([1.0, 1.0, 10.0, 12.0, 14.0]) == 12.0 and median_after_warm_up([1.0, 3.0]) == 2.0


def history_of(run_dir):
    history = History()
    for event in example_run(run_dir, steps=5):
        history.event(event)
    return history


RANK = {"peak_memory_bytes": 5, "bytes_sent": 7, "bytes_received_by_axis": {"data": 3, "pipe": 4},
        "longest_gap_seconds": 0.1}


def test_the_summary_and_its_files(tmp_path):
    mesh, lines = two_by_two()
    history = history_of(tmp_path)
    summary = summarise(recipe="gpt-tiny", mesh=mesh, history=history, ranks=[RANK] * 4, boundaries=(5,),
                        launcher="mpiexec", transport="mpi", device=torch.device("cpu"), seconds=12.0)
    pictures = write_report(tmp_path, summary, history, lines, mesh, "message-driven")
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["final_loss"] == 7.5 and written["eval_loss"] == 7.5 and written["steps"] == 5
    assert written["tokens_per_second"] == 8192 and written["mesh"] == {"data": 2, "pipe": 2, "row": 1, "col": 1}
    assert written["peak_memory_bytes"] == [5] * 4 and written["bytes_sent"] == [7] * 4
    assert written["bytes_received_by_axis"] == {"data": 12, "pipe": 16, "row": 0, "col": 0}
    assert torch.__version__.startswith(written["versions"]["torch"]) and written["transport"] == "mpi"
    assert written["commit"] is None or re.fullmatch(r"[0-9a-f]{40}\+?", written["commit"])
    assert [picture.name for picture in pictures] == ["timeline.png", "loss.png"]
    assert all(picture.read_bytes()[:4] == PNG for picture in pictures) and (tmp_path / "timeline.json").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_at_the_end_is_one_clear_error(tmp_path):
    mesh, lines = two_by_two()
    (tmp_path / "timeline.png").mkdir()
    os.symlink("/dev/full", tmp_path / "loss.png")
    for name, write in (("timeline.png", lambda path: write_report(path.parent, {}, History(), lines, mesh, "gpipe")),
                        ("loss.png", lambda path: draw_loss(path, {1: 2.0}, {}, "gpt-tiny"))):
        with raises("log-not-writable", name):
            write(tmp_path / name)


def test_peaks_are_plausible():
    assert matrix_product_rate(torch.device("cpu"), torch.float32, seconds=0.01) > 1e8
    assert 10e6 < peak_memory_bytes(torch.device("cpu")) < 1e12
    assert example_step(1).tokens_per_second == 8192


def test_the_products_of_one_weight_gradient_are_one_bar():
    step = step_of(1, 100, ("weight", "W0", 0, 1), ("weight", "W0", 1, 2), ("weight", "W1", 2, 3), ("wait", "B1", 3, 4),
                   ("weight", "W1", 4, 5), ("weight", "W1", 15, 16))
    bars = [(span.label, span.start_ns // MS, span.stop_ns // MS) for span in join_spans(step.spans, gap_ns=MS)]
    assert bars == [("W0", 0, 2), ("W1", 2, 3), ("B1", 3, 4), ("W1", 4, 5), ("W1", 15, 16)]


def whole_spans(spans):
    return [(span.category, span.label, span.start_ns, span.stop_ns) for span in spans]


def test_of_nested_spans_the_inner_one_counts_and_gaps_are_overhead():
    spans = [Span("wait", "early", 1, 0, 10), Span("forward", "F0", 1, 12, 20), Span("optimizer", "u0", 1, 22, 25),
             Span("reduce", "r", 1, 25, 27), Span("backward", "B0", 1, 20, 30), Span("report", "late", 1, 40, 60)]
    assert whole_spans(covering(spans, 1, 5, 50)) == [
        ("wait", "early", 5, 10), ("overhead", "between actions", 10, 12), ("forward", "F0", 12, 20),
        ("backward", "B0", 20, 22), ("optimizer", "u0", 22, 25), ("reduce", "r", 25, 27), ("backward", "B0", 27, 30),
        ("overhead", "between actions", 30, 40), ("report", "late", 40, 50)]
    assert whole_spans(covering([], 1, 5, 7)) == [("overhead", "between actions", 5, 7)]


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), max_size=12))
def test_spans_cover_a_step_whatever_is_recorded(places):
    """Spans are nested as a program nests them, and a span is recorded when it ends."""
    spans = [Span("forward", f"F{number}", 1, min(place), max(place)) for number, place in
             enumerate(sorted(places, key=lambda place: (max(place), -min(place))))]
    found = covering(spans, 1, 20, 80)
    assert [found[0].start_ns, found[-1].stop_ns] == [20, 80]
    assert all(one.stop_ns == two.start_ns and one.start_ns < one.stop_ns for one, two in pairwise(found))


def test_what_the_meter_keeps_covers_its_steps():
    def rank(world):
        timeline = Timeline()
        meter = Meter(timeline, world.backend.group("train", [range(1)]), CPU)
        for number in (1, 2, 3):
            timeline.add("forward", "F0", number, time.monotonic_ns())
            meter.step(number, FixedResult(), 1e-3)
        return meter.kept_steps

    for step in run_ranks(rank, 1)[0]:
        assert sum(span.stop_ns - span.start_ns for span in step.spans) == step.stop_ns - step.start_ns


def test_the_legend_adds_up_to_a_hundred_per_cent():
    """A rank that ends the step before the others is already in the next step, or in time that was not kept."""
    lines = []
    for rank in range(3):
        steps = [step_of(number, 300, *[("forward", f"F{part}", 7 * part, 7 * part + 5 + rank) for part in range(30)],
                         start=(300 * number + 40 * rank) * MS) for number in (1, 2, 3)]
        lines.append(RankTimeline(rank=rank, steps=[replace(step, spans=covering(
            step.spans, step.step, step.start_ns, step.stop_ns)) for step in steps]))
    windows = [within(line, 600 * MS, 980 * MS) for line in lines]
    assert all(sum(span.stop_ns - span.start_ns for span in row) == 380 * MS for row in windows)
    assert [span.label for span in windows[0]].count("F0") == 2 and sum(shares(windows).values()) == 100
    assert shares([[Span(category, "", 1, 0, 1) for category in ("forward", "wait", "reduce")]]) == {
        "forward": 34, "wait": 33, "reduce": 33}


def test_what_a_rank_is_busy_with_is_no_waiting_for_the_gradients_norm():
    """Busy time from the second step on has updates, not the wait for the gradient norm."""
    def rank(world):
        timeline = Timeline()
        meter = Meter(timeline, world.backend.group("train", [range(1)]), CPU)
        for number in (1, 2, 3):
            now = time.monotonic_ns()
            timeline.add("optimizer", "norm", number, now - 10**12)
            timeline.add("optimizer", "update", number, now - 10**11)
            meter.step(number, FixedResult(), 1e-3)
        return meter.busy_steps, meter.busy

    steps, busy = run_ranks(rank, 1)[0]
    assert steps == 2 and busy.keys() == {"optimizer"} and 200 <= busy["optimizer"] < 300


@pytest.mark.parametrize(("category", "label", "text"), [
    ("forward", "F3", "3"), ("weight", "W12", "12"), ("backward", "B3.1", "3\u2032"),
    ("backward", "B0.2", "0\u2032\u2032"), ("wait", "the forward of microbatch 3", ""), ("optimizer", "update", "")])
def test_bars_show_the_microbatch_and_the_turn(category, label, text):
    assert _bar_text(Span(category, label, 1, 0, 1)) == text


def test_a_run_that_resumes_unchanged_leaves_no_mark_on_its_course():
    """Its frozen layers are those of the last transition, however long before the resumed step that was."""
    mesh = {"mesh": {"data": 1, "pipe": 2, "row": 1, "col": 1}}
    history = History()
    history.remember([], [{"step": 0, "event": "start", **mesh},
                          {"step": 20, "event": "transition", "frozen_layers": 1, **mesh},
                          {"step": 30, "event": "checkpoint"}, {"step": 0, "event": "start", **mesh}])
    assert history.frozen == {0: 0, 20: 1} and history.meshes == {0: (2, 1), 20: (2, 1)}


def test_the_bubble_is_that_of_the_last_mesh(tmp_path):
    """A run resumes on another mesh, and then once more on that mesh; speeds are those of all steps."""
    def step(number, bubble):
        return {"step": number, "loss": 1.0, "bubble_fraction": bubble, "step_seconds": 1.0}

    def start(pipe):
        return {"step": 0, "event": "start", "mesh": {"data": 1, "pipe": pipe, "row": 1, "col": 1}}

    def resumed(before, steps):
        history = History()
        history.remember(steps, before)
        history.event(next(event for event in example_run(tmp_path, steps=1) if isinstance(event, StartEvent)))
        for number in range(len(steps) + 1, len(steps) + 6):
            history.event(replace(example_step(number), bubble_fraction=0.1))
        return history

    wide = [step(number, 0.5) for number in range(1, 10)]
    first = resumed([start(4), {"step": 9, "event": "checkpoint"}], wide)
    assert list(first.meshes) == [0, 9] and first.on_this_mesh("bubble_fraction") == [0.1] * 5
    again = resumed([start(4), {"step": 9, "event": "checkpoint"}, start(2) | {"mesh": {"data": 2, "pipe": 2}}],
                    [*wide, step(10, 0.2)])
    assert again.on_this_mesh("bubble_fraction") == [0.2, *[0.1] * 5] and len(again.values("bubble_fraction")) == 15
    summary = summarise(recipe="gpt-tiny", mesh=Mesh(), history=first, ranks=[RANK], boundaries=(), launcher="local",
                        transport="torch", device=torch.device("cpu"), seconds=1.0)
    assert summary["bubble_fraction"] == 0.1 and summary["steps"] == 14
    nothing_since = History()
    nothing_since.remember(wide, [start(4), {"step": 9, "event": "transition", "mesh": {"data": 4, "pipe": 1}}])
    assert nothing_since.on_this_mesh("bubble_fraction") == [0.5] * 9
