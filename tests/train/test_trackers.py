"""Each output of the stream of events by itself: files, TensorBoard, console; and their errors when a disk is full."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import re
import stat
import time
from pathlib import Path

import pytest

from ranvier.config.run import Run
from ranvier.errors import RanvierError
from ranvier.testing.trackers import check_tracker, example_run, example_step
from ranvier.train.events import NoteEvent, StartEvent, Trackers
from ranvier.train.logs import EventsFile, LineFile, MetricsFile, write_json
from ranvier.train.report import History
from ranvier.train.trackers import (
    LiveConsole,
    PlainConsole,
    TensorBoard,
    console,
    duration,
    open_outputs,
    sparkline,
    step_parts,
    time_left,
)
from tests.errors import raises

full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def feed(tracker, events):
    for event in events:
        tracker.event(event)
    tracker.close()


def lines(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("kind", [MetricsFile, EventsFile, TensorBoard])
def test_files_conform(kind, tmp_path):
    check_tracker(lambda: kind(tmp_path), tmp_path)


@pytest.mark.parametrize("kind", [PlainConsole, LiveConsole])
def test_consoles_conform(kind, tmp_path):
    check_tracker(lambda: kind(io.StringIO()), tmp_path)


def test_history_conforms():
    check_tracker(History)


def test_metrics_has_one_complete_object_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1234.56789)
    feed(MetricsFile(tmp_path), example_run(tmp_path))
    steps = lines(tmp_path / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for field in ("loss", "tokens", "tokens_per_second", "step_seconds", "bubble_fraction", "grad_norm", "wait_seconds",
                  "learning_rate", "flops_per_second", "model_flops_utilisation"):
        assert all(field in step for step in steps), field
    assert steps[0]["loss"] == 7.9 and steps[0]["tokens"] == 4096 and steps[0]["tokens_per_second"] == 8192
    assert steps[1]["loss"] is None and steps[1]["tokens_per_second"] == 0, "a loss that is not a number is null"
    assert all(step["time"] == 1234.568 for step in steps)  # for comparison with a machine's own logs
    assert "eval_loss" not in steps[0] and steps[3]["eval_loss"] == 7.5 and steps[3]["eval_code_loss"] == 6.5


def test_events_each_have_step_and_event(tmp_path):
    feed(EventsFile(tmp_path), example_run(tmp_path))
    events = lines(tmp_path / "events.jsonl")
    assert [(event["step"], event["event"]) for event in events] == [
        (0, "start"), (2, "skipped"), (4, "eval"), (4, "eval"), (4, "end")]
    assert [event.get("name") for event in events[2:4]] == [None, "code"]
    assert events[0]["mesh"] == {"data": 2, "pipe": 2, "row": 1, "col": 1} and events[1]["tokens"] == 0


def test_a_line_is_in_the_file_at_once(tmp_path):
    metrics = MetricsFile(tmp_path)
    metrics.event(example_step(1))
    assert len(lines(tmp_path / "metrics.jsonl")) == 1
    metrics.close()


def test_a_loss_that_is_nan_is_no_line_of_tensorboards(tmp_path, caplog):
    with caplog.at_level("WARNING"):
        feed(TensorBoard(tmp_path), [example_step(1, loss=math.nan)])
    assert "NaN" not in caplog.text


def test_tensorboard_holds_the_curves(tmp_path):
    for _ in range(2):  # the second run replaces the curves of the first
        feed(TensorBoard(tmp_path), example_run(tmp_path))
    files = list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    assert len(files) == 1
    written = files[0].read_bytes()
    for tag in (b"train/loss", b"speed/tokens_per_second", b"eval/loss", b"eval/code/loss", b"notes/skipped",
                b"sample"):
        assert tag in written, tag


def step_lines(tmp_path, events, steps=1000, **settings):
    stream = io.StringIO()
    start = StartEvent(**{**example_run(tmp_path)[0].__dict__, "steps": steps})
    feed(PlainConsole(stream, **settings), [start, *events])
    text = stream.getvalue()
    assert "\x1b" not in text and "\r" not in text
    return [line for line in text.splitlines() if line.startswith("step")]


def test_plain_console_has_one_whole_line_every_few_steps(tmp_path):
    lines = step_lines(tmp_path, [example_step(step, num_ranks=4, memory_bytes=3 << 30) for step in range(1, 1001)],
                       every=50)
    assert len(lines) == 21 and lines[0].startswith("step    1/1000") and lines[-1].startswith("step 1000/1000")
    assert lines[1].endswith("7:55 left")
    for part in ("loss", "grad norm", "lr ", "8,192 tokens/s", "2,048/rank", "40% of matmul rate", "memory 3.00 GiB",
                 "bubble 10%"):
        assert part in lines[0], part
    assert "MFU 40%" in step_lines(tmp_path, [example_step(1, against_published_peak=True)])[0]


def test_the_last_line_says_that_its_speed_is_a_median(tmp_path):
    stream = io.StringIO()
    feed(PlainConsole(stream), example_run(tmp_path))
    last, = [line for line in stream.getvalue().splitlines() if line.startswith("done in")]
    assert re.search(r"; median step: [\d,.]+ tokens/s, bubble", last)


def test_the_heading_has_a_line_for_each_setting_in_a_file(tmp_path, monkeypatch):
    start = dataclasses.replace(example_run(tmp_path)[0], settings={"model": "a long model " * 9, "data": "tokens"})
    heights = []
    for width in (None, "40"):
        stream = io.StringIO()
        monkeypatch.delenv("COLUMNS", raising=False)
        if width is not None:
            monkeypatch.setenv("COLUMNS", width)
        feed(PlainConsole(stream), [start])
        heights.append(len(stream.getvalue().splitlines()))
    assert heights[0] == 3 < heights[1]


def test_plain_console_prints_slow_steps_and_evaluations_too(tmp_path):
    seconds = iter(range(0, 10_000, 12))
    lines = step_lines(tmp_path, [example_step(step) for step in range(1, 11)], every=1000, clock=lambda: next(seconds))
    assert [line.split("/")[0] for line in lines] == ["step    1", "step    4", "step    7", "step   10"]
    assert len(step_lines(tmp_path, [example_step(step, eval_loss=3.0) for step in (2, 3)], every=1000)) == 2


def test_what_experts_read_comes_with_verbose(tmp_path):
    start = StartEvent(**{**example_run(tmp_path)[0].__dict__, "stages": "the stages",
                          "settings": {"model": "a model", "pipeline": "limits of the schedule"}})
    note = NoteEvent(step=8, event="limits", text="chosen again", verbose=True)
    for verbose in (False, True):
        stream = io.StringIO()
        feed(PlainConsole(stream, verbose=verbose), [start, note])
        text = stream.getvalue()
        assert "a model" in text
        assert {part in text for part in ("the stages", "limits of the schedule", "chosen again")} == {verbose}


@pytest.mark.parametrize("kind", [PlainConsole, LiveConsole])
def test_repeated_notes_are_shown_a_few_times_and_then_once_a_minute(kind):
    """Notes of every step do not flood the screen, and a checkpoint that fails every ten minutes is always reported."""
    notes = [NoteEvent(step=step, event="skipped", text="no valid target") for step in range(1, 100)]
    for seconds, times in ((0, 3), (1, 3 + 1), (600, 99)):
        stream, ticks = io.StringIO(), itertools.count(step=seconds)
        feed(kind(stream, clock=lambda ticks=ticks: float(next(ticks))), notes)
        assert stream.getvalue().count("no valid target") == times
        assert ("59 before it are in events.jsonl" in " ".join(stream.getvalue().split())) is (seconds == 1)


def test_live_console_shows_progress_in_place(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    assert isinstance(console(io.StringIO(), Run()), PlainConsole) and isinstance(console(stream, Run()), LiveConsole)
    feed(console(stream, Run()), example_run(tmp_path))
    text = stream.getvalue()
    assert "step 4/4" in text and "0:00 left" in text and "8,192 tokens/s" in text and "once upon a [time]" in text
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    feed(console(stream := Terminal(), Run()), [
        *example_run(tmp_path)[:2], NoteEvent(step=1, event="cache", text="is on")])
    coloured = re.findall(r"\x1b\[33m(.*?)\x1b\[0m", stream.getvalue())
    assert coloured == ["step 1: is on"], "the colour of a note is not that of the line below it"


def test_durations_and_sparklines():
    assert [duration(value) for value in (0, 12.4, 61, 7322)] == ["0:00", "0:12", "1:01", "2:02:02"]
    assert sparkline([8, 4, 1], 16) == "█▄▁" and sparkline([], 4) == "" and sparkline([2.0, math.nan], 4) == "▁"
    assert len(sparkline(list(range(100)), 16)) == 16
    assert step_parts(example_step(1, loss=math.nan))[0] == "loss    nan"
    assert [time_left(value) for value in (59.6, 3599, 7322, 360_000)] == ["1:00", "59:59", "2h02", "100h00"]


@full_disk
@pytest.mark.parametrize("kind, name", [(MetricsFile, "metrics.jsonl"), (EventsFile, "events.jsonl")])
def test_a_full_disk_is_one_clear_error(kind, name, tmp_path):
    tracker = kind(tmp_path)
    os.dup2(os.open("/dev/full", os.O_WRONLY), tracker._file.fileno())
    with raises("log-not-writable", name) as caught:
        for event in example_run(tmp_path):
            tracker.event(event)
    assert "--run-dir" in caught.value.remedy
    tracker.close()


def test_a_full_disk_when_tensorboard_closes(tmp_path, monkeypatch):
    """Data that its library has buffered reaches the disk only when it closes."""
    tracker = TensorBoard(tmp_path)
    file = tracker._writer.file_writer.event_writer._ev_writer
    monkeypatch.setattr(file, "flush", tracker._guard(no_space))
    with raises("log-not-writable"):
        tracker.close()


def no_space(handle=None):
    raise OSError(28, "No space left on device")


def test_a_full_disk_while_writing_a_document(tmp_path, monkeypatch):
    """The previous document stays complete."""
    write_json(tmp_path / "summary.json", {"steps": 1})
    monkeypatch.setattr(os, "fsync", no_space)
    with raises("log-not-writable"):
        write_json(tmp_path / "summary.json", {"steps": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}


def test_documents_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_json(tmp_path / "summary.json", {"steps": 1})
        feed(MetricsFile(tmp_path), example_run(tmp_path))
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o640}


def test_a_log_is_never_written_into_the_file_that_was_there(tmp_path):
    """A run that has lost the folder and still has the log open writes into a file that is no longer in the folder."""
    former, now = MetricsFile(tmp_path), MetricsFile(tmp_path)
    feed(former, example_run(tmp_path))
    now.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    os.remove(tmp_path / "metrics.jsonl")
    os.mkfifo(tmp_path / "metrics.jsonl")
    feed(MetricsFile(tmp_path), example_run(tmp_path))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with raises("log-not-writable"):
        open_outputs(tmp_path / "file" / "run", History(), [], None)
    with raises("log-not-writable"):
        LineFile(tmp_path / "missing" / "metrics.jsonl")
    with raises("log-not-writable"):
        TensorBoard(tmp_path / "file")


def test_trackers_all_hear_and_all_close():
    heard = []

    class Listener:
        def __init__(self, name):
            self.name = name

        def event(self, event):
            heard.append((self.name, event.step))

        def close(self):
            heard.append((self.name, "closed"))
            if self.name == "a":
                raise OSError("a")

    both = Trackers([Listener("a"), Listener("b")])
    both.event(example_step(1))
    with pytest.warns(UserWarning, match="Listener has failed at the end of the run.*OSError: a"):
        both.close()
    assert heard == [("a", 1), ("b", 1), ("a", "closed"), ("b", "closed")]


def test_a_tracker_that_fails_is_told_once_and_ends_nothing():
    heard = []

    class Broken:
        def event(self, event):
            raise OSError(28, "No space left on device")

        def close(self):
            raise ValueError

    class Listener:
        def event(self, event):
            heard.append(event.step)

        def close(self):
            heard.append("closed")

    both = Trackers([Broken(), Listener()])
    with pytest.warns(UserWarning, match="Broken has failed at step 1; .*No space left on device") as told:
        both.event(example_step(1))
        both.event(example_step(2))
        both.close()
    assert len(told) == 1 and heard == [1, 2, "closed"]


@full_disk
def test_tensorboards_thread_outlives_a_full_disk(tmp_path):
    """Also when more events come than its queue can hold; the next event raises the error."""
    tracker = TensorBoard(tmp_path)
    writer = tracker._writer.file_writer.event_writer
    os.dup2(os.open("/dev/full", os.O_WRONLY), writer._ev_writer._py_recordio_writer._writer.fileno())
    tracker.event(example_step(1))
    writer._ev_writer.flush()
    with raises("log-not-writable"):
        for step in range(2, 40):
            tracker.event(example_step(step))
    assert writer._worker.is_alive()
    with pytest.raises(RanvierError), contextlib.suppress(OSError):
        tracker.close()
