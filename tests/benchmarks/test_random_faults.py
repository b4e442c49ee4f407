"""Random faults inside ranks, a few and many, in the slow tests; and tests that the program detects what it looks
for."""

import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults import random_faults
from benchmarks.faults.attempt import Ended
from benchmarks.faults.disk import DAMAGE, leftovers, lost, whole_steps
from ranvier.mesh import Mesh
from tests.checkpoint.test_writing import save_steps

ROOT = Path(__file__).parent.parent.parent


def run(*args, timeout):
    return subprocess.run([sys.executable, "-m", "benchmarks.faults.random_faults", *map(str, args)], cwd=ROOT,
                          timeout=timeout, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_few_random_faults(tmp_path):
    """With this seed the first run is elastic."""
    done = run("--faults", 2, "--minutes", 0.2, "--seed", 21, "--by-command", 0, "--timeout", 6, "--out",
               tmp_path / "table.md", timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    text = (tmp_path / "table.md").read_text()
    assert ": 0 errors." in text
    elastic, transitions = map(int, re.search(r"(\d+) elastic with (\d+) transitions", text).groups())
    assert elastic > 0 and transitions > 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_random_faults(seed):
    done = run("--faults", 20, "--seed", seed, timeout=1780)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]


# ---------------------------------------------------------------------- what it looks for


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    save_steps(folder, 3, Mesh(data=2), keep=3)
    return folder


def copy(folder, to):
    subprocess.run(["cp", "-r", str(folder), str(to)], check=True)
    return to


@pytest.mark.parametrize("kind", [kind for kind in DAMAGE if kind != "temporary folders left behind"])
def test_damage_is_seen(checkpoints, tmp_path, kind):
    for seed in range(6):
        folder = copy(checkpoints, tmp_path / str(seed))
        assert whole_steps(folder) == {1, 2, 3} and leftovers(folder) == set()
        DAMAGE[kind](folder / "step-3", random.Random(seed))
        assert whole_steps(folder) == {1, 2}


def test_what_is_about_to_be_replaced_is_not_lost_and_litter_is_seen(checkpoints, tmp_path):
    folder = copy(checkpoints, tmp_path / "copy")
    (folder / "step-2").rename(folder / ".step-2.replaced")
    DAMAGE["temporary folders left behind"](folder / "step-3", random.Random(0))
    assert whole_steps(folder) == {1, 2, 3} and len(leftovers(folder)) == 3


@pytest.mark.parametrize(("before", "after", "gone"), [
    ({2, 4, 6}, {2, 4, 6, 8}, set()), ({2, 4, 6}, {4, 6, 8}, set()), ({2, 4, 6}, {6, 8, 10}, set()),
    ({2, 4, 6}, {4, 6}, {2}), ({2, 4, 6}, {2, 4}, {6}), ({10, 12, 14, 16}, {12, 14, 16, 18, 20}, {10}),
    (set(), {2}, set())])
def test_what_retention_explains_is_not_lost(before, after, gone):
    assert lost(before, after, keep=3, keep_every=10) == gone


@pytest.mark.parametrize(("code", "complete", "text", "outcome"), [
    (None, False, "", "? hangs"), (0, True, "", "goes on to its end"), (0, False, "", "saves, stops, exit 0"),
    (-signal.SIGKILL, False, "", "all ranks end with it"), (1, False, "nothing", "? exit 1"),
    (-signal.SIGSEGV, False, "x was killed by SIGKILL", "? exit -11"),
    (1, False, "rank 1 was killed by SIGKILL", "says who was killed, exit 1"),
    (2, False, "a message did not come\nranvier: nothing was heard from rank 1", "says who is silent, exit 2"),
    (2, False, "a collective did not end", "says who waits for whom, exit 2"),
    (143, False, "ranvier: stopped by SIGTERM", "stops before it can save, exit 143")])
def test_how_a_start_ended(code, complete, text, outcome):
    assert random_faults.describe(Ended(code=code, seconds=1.0, text=text, left=()), complete) == outcome


@pytest.mark.parametrize(("ended", "outcome", "after", "found"), [
    (dict(code=0, left=()), "goes on to its end", {2, 4}, []),
    (dict(code=None, left=(1,)), "? hangs", {2, 4}, ["had not ended by its deadline", "ended in a way that is not"]),
    (dict(code=1, left=(7,)), "says who was killed, exit 1", {2, 4}, ["left processes (7,)"]),
    (dict(code=1, left=(), text="Traceback (most"), "says who was killed, exit 1", {2, 4}, ["printed a traceback"]),
    (dict(code=0, left=()), "goes on to its end", {2}, ["lost the whole checkpoints of steps [4]"])])
def test_problems_of_a_start(monkeypatch, tmp_path, ended, outcome, after, found):
    training = object.__new__(random_faults.Training)
    training.checkpoints = tmp_path
    monkeypatch.setattr(random_faults, "whole_steps", lambda folder: after)
    problems = training.problems(Ended(**{"seconds": 1.0, "text": "", **ended}), outcome, {2, 4})
    assert len(problems) == len(found)
    assert all(text.startswith(start) for text, start in zip(problems, found, strict=True))


@pytest.mark.parametrize(("losses", "mesh", "wrong"), [
    ([1.0, 0.5], Mesh(data=2), False), ([1.0, 0.5 + 1e-15], Mesh(data=2), True), ([1.0, 0.5 + 1e-12], None, False),
    ([1.0, 0.5 + 1e-8], None, True), ([1.0], None, True)])
def test_losses_of_a_complete_run(monkeypatch, tmp_path, losses, mesh, wrong):
    monkeypatch.setattr(random_faults, "STEPS", 2)
    training = object.__new__(random_faults.Training)
    training.name, training.folder, training.checkpoints = "run", tmp_path, tmp_path / "checkpoint"
    training.mesh, training.moved, training.tally = mesh, False, random_faults.Tally()
    training.manual = ""
    training.references = {(mesh or random_faults.MESHES[0], ""): [1.0, 0.5]}
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": {loss!r}}}\n'
                                                    for step, loss in enumerate(losses, 1)))
    training.compare()
    assert bool(training.tally.errors) == wrong


@pytest.mark.parametrize(("told", "problem"), [
    (None, None), ('"folder": "x/step-4"', None), ('"folder": "x/step-2"', "went on from step 2, not 4"),
    ('"text": "from the start"', "went on from step 0, not 4")])
def test_where_a_start_went_on(tmp_path, told, problem):
    events = f'{{"step": 0, "event": "start"}}\n{{"step": 0, "event": "resume", {told}}}\n' if told else ""
    training = object.__new__(random_faults.Training)
    training.folder, training.checkpoints, training.told = tmp_path, tmp_path / "checkpoint", 0
    (tmp_path / "events.jsonl").write_text(events)
    assert training.start_problems({2, 4}, set()) == ([problem] if problem else [])


def test_temporary_folders_that_stay(tmp_path):
    training = object.__new__(random_faults.Training)
    training.folder, training.checkpoints, training.told = tmp_path, tmp_path / "checkpoint", 0
    (tmp_path / "checkpoint" / ".step-90.tmp").mkdir(parents=True)
    (tmp_path / "events.jsonl").write_text('{"step": 0, "event": "start"}\n')
    assert training.start_problems(set(), {".step-90.tmp"}) == ["left temporary folders {'.step-90.tmp'}"]
