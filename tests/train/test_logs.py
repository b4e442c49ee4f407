"""Damaged logs: undamaged lines are read, the others are reported and left out, and nothing else depends on them."""

import json
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ranvier.mesh import Mesh
from ranvier.train.history import History
from ranvier.train.logs import MOST_BYTES, read_events, read_metrics
from ranvier.train.report import summarise

STEPS = [{"step": step, "loss": None if step == 7 else 5.0 / step, "tokens": 128, "tokens_per_second": 1e3 + step,
          "step_seconds": 0.1, "bubble_fraction": 0.25, "model_flops_utilisation": 0.5, "frozen_layers": step // 5,
          "data": 2, "pipe": 1} | ({"eval_loss": 2.0, "eval_accuracy": 0.5} if step % 5 == 0 else {})
         for step in range(1, 21)]
EVENTS = [{"step": 0, "event": "start", "recipe": "gpt-tiny", "mesh": {"data": 2, "pipe": 1, "row": 1, "col": 1}},
          {"step": 4, "event": "checkpoint", "text": "saved über", "bytes": 3, "stall_seconds": 0.1},
          {"step": 9, "event": "transition", "text": "froze layer 0", "frozen_layers": 1,
           "mesh": {"data": 1, "pipe": 2, "row": 1, "col": 1}, "request_id": "0123456789abcdef"},
          {"step": 20, "event": "end", "final_loss": 0.25, "seconds": 3.0, "sample": None}]


def write(folder, name, lines):
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def summary_of(steps, events):
    """Summary of a run that resumes with these logs."""
    history = History()
    history.remember(steps, events)
    return summarise(recipe="gpt-tiny", mesh=Mesh(data=2), history=history, boundaries=(), launcher="local",
                     transport="torch", device=torch.device("cpu"), seconds=1.0,
                     ranks=[{"peak_memory_bytes": 1, "bytes_sent": 1, "bytes_received_by_axis": {},
                             "longest_gap_seconds": 0.0}])


def test_whole_logs_are_read_as_they_were_written(tmp_path):
    write(tmp_path, "metrics.jsonl", STEPS)
    write(tmp_path, "events.jsonl", EVENTS)
    assert read_metrics(tmp_path).lines == STEPS and read_metrics(tmp_path, 3).lines == STEPS[:3]
    assert read_events(tmp_path).lines == EVENTS
    assert read_metrics(tmp_path).text() is None and read_events(tmp_path / "nowhere").lines == []
    assert summary_of(STEPS, EVENTS)["final_loss"] == 0.25


@pytest.mark.parametrize(("line", "problem"), [
    (b'{"step": 5, "lo', "column"), (b'{"step": 5, "loss": 1.0', "column"), (b"[1, 2]", "not an object"),
    (b'{"step": null, "loss": 1.0}', "a step"), (b'{"step": true, "loss": 1.0}', "a step"),
    (b'{"step": -5, "loss": 1.0}', "a step"), (b'{"step": 1e3, "loss": 1.0}', "a step"),
    (b'{"step": 99999999999999999999, "loss": 1.0}', "a step"), (b'{"loss": 1.0}', "a step"),
    (b'{"step": 5, "mess": 1.0}', "not a step"), (b'{"step": 5, "loss": {"a": [1]}}', "loss is not a number"),
    (b'{"step": 5, "loss": 1.0, "pipe": "2"}', "pipe is not a number"),
    (b'{"step": 5, "loss": true}', "loss is not a number"), (b'{"step": 5, "loss": NaN}', "not JSON compliant"),
    (b'{"step": 5, "loss": 1e999}', "not JSON compliant"),
    (b'{"step": 5, "loss": ' + b"9" * 400 + b"}", "loss is not a number"),
    (b'{"step": 5, "loss": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
    (b'{"step": 5, "loss": 1.0, "\xff\xfe": 1}', "can't decode"),
    (b'{"step": 5, "loss": 1.0, "\\ud800": 1}', "can't encode"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"step": 5, "loss": ' + b"[" * 300 + b"]" * 300 + b"}", "nested too deeply"),
    (b'{"step": 5, "x": "' + b"a" * (2 * MOST_BYTES) + b'"}', "longer than 1,048,576 bytes"),
    (b"\0" * 64, "")],
    ids=lambda value: value if isinstance(value, str) else value[:24].decode(errors="replace"))
def test_a_damaged_step_is_told_and_left_out(tmp_path, line, problem):
    write(tmp_path, "metrics.jsonl", STEPS[:4])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n" + json.dumps(STEPS[5]).encode() + b"\n")
    log = read_metrics(tmp_path)
    assert log.lines == [*STEPS[:4], STEPS[5]]
    assert "left out 1 damaged line of metrics.jsonl: line 5: " in log.text() and problem in log.text()
    assert len(log.text()) < 400


@pytest.mark.parametrize(("line", "problem"), [
    ({"step": 5}, "no event"), ({"step": 5, "event": None}, "no event"),
    ({"step": 5, "event": ["x"]}, "no event"),
    ({"step": 5, "event": "start", "mesh": None}, "no mesh"),
    ({"step": 5, "event": "start", "mesh": {"data": 2}}, "no mesh"),
    ({"step": 5, "event": "start", "mesh": {"data": "2", "pipe": 1}}, "no mesh"),
    ({"step": 5, "event": "start", "mesh": {"data": 0, "pipe": 1}}, "no mesh"),
    ({"step": 5, "event": "transition", "mesh": {"data": 2, "pipe": 1}, "frozen_layers": None}, "frozen layers"),
    ({"step": 5, "event": "transition", "mesh": {"data": 2, "pipe": 1}, "frozen_layers": {}}, "frozen layers")])
def test_a_damaged_event_is_told_and_left_out(tmp_path, line, problem):
    write(tmp_path, "events.jsonl", [*EVENTS, line])
    log = read_events(tmp_path)
    assert log.lines == EVENTS and problem in log.text()


@pytest.mark.parametrize("kind", ["FIFO", "folder", "endless"])
def test_what_is_no_file_is_not_read(tmp_path, kind):
    path = tmp_path / "events.jsonl"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    log = read_events(tmp_path)
    assert log.lines == [] and log.text()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_damage_costs_the_lines_that_it_meets(tmp_path, data):
    """Bytes are overwritten, removed or inserted at random places: undamaged lines stay, and a summary can be
    written."""
    for name, lines, read in (("metrics.jsonl", STEPS, read_metrics), ("events.jsonl", EVENTS, read_events)):
        write(tmp_path, name, lines)
        content = bytearray((tmp_path / name).read_bytes())
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(json.dumps(line)) + 1)
        hit = set()
        for place in sorted(data.draw(st.lists(st.integers(0, len(content) - 1), max_size=6)), reverse=True):
            new = data.draw(st.one_of(st.binary(max_size=3), st.sampled_from(
                [b"\n", b'"', b"null", b"[" * 300, b"{", b"\xed\xa0\x80", b"-", b"1e999", b"true"])))
            content[place:place + data.draw(st.integers(0, 2))] = new
            number = max(index for index, start in enumerate(starts[:-1]) if start <= place)
            hit |= {number, number + 1}  # the line end may be gone
        (tmp_path / name).write_bytes(content)
        log = read(tmp_path)
        kept = [line for index, line in enumerate(lines) if index not in hit]
        if name == "events.jsonl":
            assert all(line in log.lines for line in kept)
        else:  # a damaged line with the number of an undamaged one may replace it
            assert {line["step"] for line in kept} <= {line["step"] for line in log.lines}
        assert hit or not log.problems
    steps, events = read_metrics(tmp_path).lines, read_events(tmp_path).lines
    assert json.dumps(summary_of(steps, events))
