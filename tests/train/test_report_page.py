"""report.html: what it holds, when it is written, how it is served, and what a browser makes of it."""

import json
import math
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from ranvier.cli.main import run_command
from ranvier.cli.watch import server_of
from ranvier.config.run import Run, Train
from ranvier.cost.memory import PROCESS_BYTES, RankMemory
from ranvier.errors import RanvierError
from ranvier.mesh import Mesh
from ranvier.pictures.report_page import MAX_POINTS, Mark, Page, StepTimeline
from ranvier.schedule.spans import Span
from ranvier.testing.trackers import check_tracker, example_run, example_step
from ranvier.train.events import NoteEvent
from ranvier.train.history import History
from ranvier.train.report_page import NAME, SECONDS_BETWEEN, ReportPage, changed_settings, memory_rows


def shown(path):
    text, = re.findall(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(text)


def page_of(folder, clock=lambda: 0.0):
    history = History()
    return history, ReportPage(Run(), "gpt", folder, history, clock)


def test_the_tracker_conforms(tmp_path):
    check_tracker(lambda: page_of(tmp_path)[1], tmp_path)


def test_it_is_rewritten_now_and_then_with_curves_and_events(tmp_path):
    now = [0.0]
    history, page = page_of(tmp_path, lambda: now[0])
    for event in example_run(tmp_path)[:-1]:
        history.event(event)
        page.event(event)
    assert not (tmp_path / NAME).exists()
    now[0] = SECONDS_BETWEEN + 1
    for event in (NoteEvent(step=4, event="lost", text="rank 3 </script><b>"), example_step(5, loss=math.nan)):
        history.event(event)
        page.event(event)
    found = shown(tmp_path / NAME)
    assert found["live"] and found["curves"]["step"][-1] == 5 and found["curves"]["loss"][-1] is None
    assert found["marks"][-1] == {"step": 4, "kind": "lost", "text": "rank 3 </script><b>", "fault": True}
    before = (tmp_path / NAME).stat().st_mtime_ns
    page.event(example_step(6))
    assert (tmp_path / NAME).stat().st_mtime_ns == before


def test_long_curves_keep_their_rare_points():
    steps = 10 * MAX_POINTS
    curves = {"step": [float(step) for step in range(steps)], "loss": [1.0] * steps,
              "eval_loss": [2.0 if step == 12_345 else None for step in range(steps)],
              "bubble_fraction": [0.0 if step else None for step in range(steps)]}
    text = Page(title="x", subtitle="", curves=curves).html()
    found = json.loads(re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)[0])["curves"]
    assert len(found["step"]) <= MAX_POINTS + 2 and 2.0 in found["eval_loss"] and found["step"][-1] == steps - 1
    assert "bubble_fraction" not in found, "zeros alone are no curve"


def test_settings_and_memory():
    asked = replace(Run(), train=Train(steps=7))
    assert changed_settings(replace(asked, max_restarts=2), asked) == [
        ("train.steps", "7", "100", "recipe or flag"), ("max-restarts", "2", "0", "auto")]
    summary = {"peak_memory_bytes": [5, 9], "memory": [{"device": {"parameters": 3, "working": 2}, "host": {}},
                                                       {"device": {"parameters": 4, "working": 5}, "host": {}}]}
    rows = memory_rows([RankMemory(pipeline_rank=0, ranks=2, device={"parameters": 4, "activations": 6})], summary,
                       Mesh(data=2), on_cpu=True)
    assert [(row["category"], row["predicted"], row["measured"]) for row in rows] == [
        ("parameters", 4, 4), ("working", 6, 5), ("the whole process", 10 + PROCESS_BYTES, 9)]
    assert rows[0]["place"] == "stage 0, 2 ranks"


def test_a_run_is_served_on_this_machine_alone(tmp_path):
    with pytest.raises(RanvierError) as caught:
        server_of(tmp_path)
    assert caught.value.value == str(tmp_path)
    (tmp_path / NAME).write_text("the page")
    with server_of(tmp_path) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host, port = server.server_address[:2]
        with pytest.raises(RanvierError):
            server_of(tmp_path, port)

        def ask(path="/", **headers):
            return urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}{path}", headers=headers))

        with ask() as answer:
            assert answer.read() == b"the page" and answer.headers["ETag"] and host == "127.0.0.1"
        for request in (lambda: ask("/run.toml"), lambda: ask(Host="elsewhere.example")):
            with pytest.raises(urllib.error.HTTPError):
                request()
        server.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="chromium is not installed: nobody looks at report.html")
def test_a_browser_draws_a_run(tmp_path):
    """No error on the page's console, a canvas for each curve and for the timeline, on a desktop and on a phone."""
    assert run_command(["train", "gpt-tiny", "--train.steps", "3", "--mesh.data", "1", "--mesh.pipe", "2", "--quiet",
                        "--model.num-layers", "2", "--model.hidden", "32", "--run-dir", str(tmp_path / "run")]) == 0
    spans = [Span("forward", "F0", 1, 0, 10**6), Span("wait", "backward 0", 1, 10**6, 2 * 10**6)]
    example = Page(title="an example", subtitle="", marks=[Mark(step=1, kind="lost", text="x", fault=True)],
                   timeline=StepTimeline(title="a step", rows=[("rank 0", spans)], start_ns=0, stop_ns=2 * 10**6))
    (tmp_path / "example.html").write_text(example.html())
    for page, curves in ((tmp_path / "run" / NAME, 6), (tmp_path / "example.html", 0)):
        for size in ("1200,1600", "390,800"):
            done = subprocess.run(
                ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0",
                 f"--window-size={size}", "--virtual-time-budget=2000", "--dump-dom", page.as_uri()],
                capture_output=True, text=True, timeout=120, check=True)
            assert "CONSOLE" not in done.stderr
            assert done.stdout.count("<canvas") == curves + 1 and 'id="timeline-section" hidden' not in done.stdout


def test_a_plan_says_why_candidates_lost(tmp_path, capsys):
    path = tmp_path / "plan.html"
    assert run_command(["plan", "gpt-tiny", "--cluster", "laptop", "--ranks", "4", "--search", "mesh", "--out-html",
                        str(path)]) == 0
    candidates = shown(path)["candidates"]["rows"]
    assert candidates[0][-1] == "the fastest" and len(candidates) > 2
    assert all(row[-1].startswith("+") or not row[0] for row in candidates[1:])
    assert run_command(["plan", "gpt-tiny", "--cluster", "laptop", "--ranks", "1", "--search", "mesh", "--out-html",
                        str(tmp_path)]) == 2
    assert "--out-html" in capsys.readouterr().err
