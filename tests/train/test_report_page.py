"""report.html: what it contains, when it is written, how it is served, and how a browser shows it."""

import itertools
import json
import math
import re
import shutil
import threading
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from ranvier.cli.main import run_command
from ranvier.cli.watch import server_of
from ranvier.config.run import Run, Train
from ranvier.cost.memory import RankMemory
from ranvier.errors import RanvierError
from ranvier.mesh import Mesh
from ranvier.pictures.report_page import MAX_POINTS, Mark, Page, StepTimeline, Table, changed_settings
from ranvier.schedule.spans import Span
from ranvier.testing.trackers import check_tracker, example_run, example_step
from ranvier.train.events import NoteEvent
from ranvier.train.history import History
from ranvier.train.report_page import NAME, SECONDS_BETWEEN, ReportPage, memory_rows
from tests.train.browser import Browser


def shown(path):
    text, = re.findall(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(text)


def page_of(folder, clock=lambda: 0.0):
    history = History()
    return history, ReportPage(Run(), "gpt", folder, history, {}, clock)


def test_the_tracker_conforms(tmp_path):
    check_tracker(lambda: page_of(tmp_path)[1], tmp_path)


def test_it_is_rewritten_now_and_then_with_curves_and_events(tmp_path):
    now = [0.0]
    history, page = page_of(tmp_path, lambda: now[0])
    for event in example_run(tmp_path)[:-1]:
        history.event(event)
        page.event(event)
    assert not (tmp_path / NAME).exists()
    history.unit = "pairs"
    now[0] = SECONDS_BETWEEN + 1
    for event in (NoteEvent(step=4, event="lost", text="rank 3 </script><b>"), example_step(5, loss=math.nan)):
        history.event(event)
        page.event(event)
    found = shown(tmp_path / NAME)
    assert found["live"] and found["curves"]["step"][-1] == 5 and found["curves"]["loss"][-1] is None
    assert found["unit"] == "pairs" and found["curves"]["pairs_per_second"][-1] == example_step(5).tokens_per_second
    assert found["marks"][-1] == {"step": 4, "kind": "lost", "text": "rank 3 </script><b>", "fault": True}
    before = (tmp_path / NAME).stat().st_mtime_ns
    page.event(example_step(6))
    assert (tmp_path / NAME).stat().st_mtime_ns == before


def test_what_happened_before_a_run_resumed_stays_on_its_page(tmp_path):
    history, page = page_of(tmp_path)
    history.past_events = [
        {"step": 0, "event": "start"}, {"step": 3, "event": "checkpoint", "text": "saved"},
        {"step": 4, "event": "eval", "loss": 1.0}, {"step": 5, "event": "lost", "text": "rank 1"},
        {"step": 0, "event": "start"}, {"step": 6, "event": "stopped", "text": "by a signal"},
        {"step": 0, "event": "start"}, {"step": 6, "event": "resume", "text": "from 6"}]
    for event in example_run(tmp_path)[:-1]:
        history.event(event)
        page.event(event)
    page.close()
    found = shown(tmp_path / NAME)
    marks = [(mark["step"], mark["kind"], mark["fault"]) for mark in found["marks"]]
    assert marks[:6] == [(3, "checkpoint", False), (5, "lost", True), (5, "interrupted", True), (6, "stopped", True),
                         (6, "resume", False), (6, "interrupted", True)]
    assert "error" in found["subtitle"] and not found["live"], "it has ended without finish()"


def test_long_curves_keep_their_rare_points():
    steps = 10 * MAX_POINTS
    curves = {"step": [float(step) for step in range(steps)], "loss": [1.0] * steps,
              "eval_loss": [2.0 if step == 12_345 else None for step in range(steps)],
              "bubble_fraction": [0.0 if step else None for step in range(steps)]}
    text = Page(title="x", subtitle="", curves=curves).html()
    found = json.loads(re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)[0])["curves"]
    assert len(found["step"]) <= MAX_POINTS + 2 and 2.0 in found["eval_loss"] and found["step"][-1] == steps - 1
    assert "bubble_fraction" not in found, "zeros alone are not a curve"


def test_settings_and_memory():
    asked = replace(Run(), train=Train(steps=7))
    origins = {"train.steps": "flag", "max_restarts": "recipe x", "seed": "default"}
    assert changed_settings(replace(asked, max_restarts=2, run_dir="x"), asked, origins) == [
        ("train.steps", "7", "100", "flag"), ("max-restarts", "2", "0", "auto")], "later changes are auto's"
    summary = {"peak_memory_bytes": [5, 9], "memory": [{"device": {"parameters": 3, "working": 2}, "host": {}},
                                                       {"device": {"parameters": 4, "working": 5}, "host": {}}]}
    rows = memory_rows([RankMemory(pipeline_rank=0, ranks=2, device={"parameters": 4, "activations": 6})], [11, 12],
                       summary, Mesh(data=2), on_cpu=True)
    assert [(row["category"], row["predicted"], row["measured"]) for row in rows] == [
        ("parameters", 4, 4), ("working", 6, 5), ("the whole process", 12, 9)]
    assert rows[0]["place"] == "stage 0, 2 ranks"


def test_a_folder_that_is_not_there_is_told(tmp_path, capsys, monkeypatch):
    """The server waits for a run that is about to start, and for a mistyped name, which looks the same."""
    monkeypatch.setattr("ranvier.cli.watch.ThreadingHTTPServer.serve_forever", lambda server: None)
    for name, is_told in (("gone", True), (".", False)):
        assert run_command(["watch", str(tmp_path / name)]) == 0
        said = capsys.readouterr()
        assert (f"no folder {tmp_path / name}" in said.err) == is_told and "http://127.0.0.1:" in said.out


def test_a_run_is_served_on_this_machine_alone(tmp_path):
    with server_of(tmp_path) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host, port = server.server_address[:2]
        with pytest.raises(RanvierError):
            server_of(tmp_path, port)

        def ask(path="/", **headers):
            return urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}{path}", headers=headers))

        with ask() as answer:
            assert b'http-equiv="refresh"' in answer.read(), "a run that has just been started has no page yet"
        (tmp_path / NAME).write_text("the page")
        with ask() as answer:
            assert answer.read() == b"the page" and answer.headers["ETag"] and host == "127.0.0.1"
        for request in (lambda: ask("/run.toml"), lambda: ask(Host="elsewhere.example")):
            with pytest.raises(urllib.error.HTTPError):
                request()
        server.shutdown()


CONTRASTS = """[
  ...["--ground", "--panel"].flatMap(ground => ["--ink", "--faint", "--bad"].map(ink => [css(ground), css(ink)])),
  ...Object.entries(timeline.categories).filter(([category]) => !["wait", "overhead"].includes(category)).map(
    ([category, [, colour]]) => [colour, timeline.dark.includes(category) ? "#ffffff" : "#111111"])].map(colours => {
  const [one, other] = colours.map(colour => {
    const light = colour.match(/[0-9a-f]{2}/gi).map(part => parseInt(part, 16) / 255).map(
      part => part <= 0.04 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.05 + 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2];
  });
  return Math.max(one, other) / Math.min(one, other);
})"""
"""Contrasts of texts with their backgrounds, as WCAG defines contrast."""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="chromium is not installed: nobody looks at report.html")
def test_a_browser_draws_runs_and_plans(tmp_path):
    """On a desktop and on a phone, light and dark: no error, nothing wider than the screen, readable texts, a canvas
    for each curve and for the timeline. The timeline zooms, and says what is under the pointer. A page that is served
    reloads itself when it is rewritten."""
    assert run_command(["train", "gpt-tiny", "--train.steps", "3", "--mesh.data", "1", "--mesh.pipe", "1", "--quiet",
                        "--model.num-layers", "2", "--model.hidden", "32", "--run-dir", str(tmp_path / "run")]) == 0
    spans = [Span("forward", "F0", 1, 0, 10**6), Span("wait", "backward 0", 1, 10**6, 2 * 10**6)]
    long = "a configuration with a long name " * 4
    categories = ("moments", "host copies", "the whole device")
    example = Page(title="an example " * 9, subtitle=f"{tmp_path}/" * 5, text=[long], unit="pairs",
                   curves={"step": [1, 2], "pairs_per_second": [1e15, 2.1e15], "loss": [1, 2], "memory_gib": [1, 2]},
                   settings=[(long, "1", "2", "flag")],
                   marks=[Mark(step=3, kind=kind, text=long, fault=kind == "lost") for kind in (
                       "lost", "transition", "checkpoint", "limits")],
                   memory=[{"place": "stage 0", "category": name, "predicted": 3 << 30, "measured": 1 << 20,
                            "whole": name == categories[-1]} for name in categories],
                   candidates=Table(header=["", "configuration", *"abcdef", "why"],
                                    rows=[["1", long, *"123456", long]]),
                   timeline=StepTimeline(title="a step", rows=[("data 0   pipe 0", spans)], start_ns=0,
                                         stop_ns=2 * 10**6))
    (tmp_path / "example.html").write_text(example.html())
    with Browser(tmp_path / "profile") as browser:
        for page, curves in ((tmp_path / "run" / NAME, 5), (tmp_path / "example.html", 3)):
            for width, is_dark in itertools.product((1200, 390), (False, True)):
                browser.open(page.as_uri(), width=width, is_phone=width < 600, is_dark=is_dark)
                assert not browser.errors()
                assert browser.value("document.documentElement.scrollWidth") <= width
                assert browser.value("document.querySelectorAll('canvas').length") == curves + 1
                assert browser.value("at('timeline').clientHeight") > 40
                assert browser.value("getComputedStyle(document.body).backgroundColor") == (
                    "rgb(20, 24, 31)" if is_dark else "rgb(255, 255, 255)")
                assert min(browser.value(CONTRASTS)) > 4.4
                assert browser.value("plots.every(([plot, holder]) => plot.width === holder.clientWidth)")
        browser.open(page.as_uri(), width=1200, is_dark=True, is_printed=True)
        assert browser.value("css('--ink')") == "#1d2430", "dark on paper"
        titles = browser.value("[...document.querySelectorAll('#curves h3')].map(title => title.textContent)")
        assert titles == ["loss, nats per pair", "pairs per second", "largest memory of a rank, GiB"]
        assert browser.value("[0.000234567, 1.05e15, 12345.6].map(short)") == ["2.346e-4", "1.05e15", "12,350"]
        assert browser.value("[ticks(0, 315.5, 7.5), ticks(0.26, 1.1, 5)].map(found => found.map(short))") == [
            ["0", "50", "100", "150", "200", "250", "300"], ["0.4", "0.6", "0.8", "1"]]
        assert browser.value("""(() => {
          const texts = [], write = CanvasRenderingContext2D.prototype.fillText;
          CanvasRenderingContext2D.prototype.fillText = function (text, ...at) { texts.push(text); };
          moveTo(1.234, 0.001);
          CanvasRenderingContext2D.prototype.fillText = write;
          moveTo(0, 2);
          return texts.filter(text => text.endsWith(" ms"));
        })()""")[1:4] == ["1.2341 ms", "1.2342 ms", "1.2343 ms"], "each with the digits in which it differs"
        assert browser.value("at('curves').style.width = '200px', plots[0][0].root.clientWidth") == 200, "as on paper"
        assert browser.value("document.querySelectorAll('#lanes i').length") == 4
        browser.value("at('timeline').scrollIntoView()")
        left, top = browser.value("(box => [gutter() + box.x, box.y])(at('timeline').getBoundingClientRect())")
        browser.move_pointer(left + 20, top + 15)
        assert browser.value("at('tip').textContent") == "data 0   pipe 0: forward F0, 1 ms from 0.00 ms on"
        browser.move_pointer(left + 20, top + 15, wheel=-400)
        browser.value("new Promise(done => setTimeout(done, 50))")
        length = browser.value("view[1] - view[0]")
        assert 0.5 < length < 1.5
        assert browser.value("at('nearer').click(), view[1] - view[0]") == pytest.approx(length / 2)
        assert browser.value("at('all').click(), view[1] - view[0]") == 2
        (tmp_path / NAME).write_text(Page(title="before", subtitle="", live=True).html())
        with server_of(tmp_path) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            browser.open(f"http://127.0.0.1:{server.server_address[1]}/", width=800)
            browser.value("new Promise(asked => setTimeout(asked, 3500))")
            (tmp_path / NAME).write_text(Page(title="after", subtitle="", live=True).html())
            browser.forget()
            browser.await_load()
            assert browser.value("document.title") == "after"
            server.shutdown()


def test_a_plans_page_has_what_explain_prints(tmp_path, capsys):
    path = tmp_path / "plan.html"
    assert run_command(["plan", "gpt-tiny", "--cluster", "laptop", "--ranks", "4", "--search", "microbatch",
                        "--mesh.data", "1", "--mesh.pipe", "4", "--explain", "--out-html", str(path)]) == 0
    printed, found = capsys.readouterr().out, shown(path)
    assert found["fixed"].lstrip().startswith("pipeline.memory") and found["fixed"] in printed
    assert all(line in printed for line in found["text"])


def test_a_plan_says_why_candidates_lost(tmp_path, capsys):
    path = tmp_path / "plan.html"
    assert run_command(["plan", "gpt-tiny", "--cluster", "laptop", "--ranks", "4", "--search", "mesh", "--out-html",
                        str(path)]) == 0
    found = shown(path)
    candidates = found["candidates"]["rows"]
    assert candidates[0][-1] == "the fastest" and len(candidates) > 2
    assert all(row[-1].startswith("+") or not row[0] for row in candidates[1:])
    assert found["timeline"]["rows"][0]["spans"][0][:3] == ["forward", "F0", 0], "a step of the best plan"
    assert ["train.steps", "400", "100", "recipe gpt-tiny"] in found["settings"]
    assert all(row["place"] for row in found["memory"])
    assert run_command(["plan", "gpt-tiny", "--cluster", "laptop", "--ranks", "1", "--search", "mesh", "--out-html",
                        str(tmp_path)]) == 2
    assert "--out-html" in capsys.readouterr().err
