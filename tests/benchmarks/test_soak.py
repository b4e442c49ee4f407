"""The soak: two faults, and every kind under every launcher, in the slow tests; and tests that it detects problems."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.faults import kinds, soak
from benchmarks.faults.filesystem import SmallDisk, can_mount
from benchmarks.faults.processes import Start
from benchmarks.faults.training import STEPS, Training
from benchmarks.faults.trial import Case, Outcome, Trial
from tests.mpi import MPI

ROOT = Path(__file__).parent.parent.parent
LOSSES = [1.0 / step for step in range(1, STEPS + 1)]


def run(*args, timeout):
    done = subprocess.run([sys.executable, "-m", "benchmarks.faults.soak", *map(str, args)], cwd=ROOT, timeout=timeout,
                          capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr[-5000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_faults_and_none_again(tmp_path):
    """Limits are wide: the test looks for lost steps and leftovers, on machines that may be busy."""
    args = ("--kinds", "killed-launcher,damaged-logs", "--launchers", "python", "--cases", 1, "--limit-seconds", 60,
            "--outcomes", tmp_path / "outcomes.jsonl")
    code, text = run(*args, timeout=580)
    assert code == 0, text
    assert "2 of 2 faults, seed 0: 0 went wrong." in text
    began = time.monotonic()
    code, again = run(*args, timeout=60)
    assert code == 0 and "2 of 2 faults, seed 0: 0 went wrong." in again
    assert time.monotonic() - began < 60 and len((tmp_path / "outcomes.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("launcher", ["python", "torchrun", pytest.param("mpiexec", marks=MPI.marks)])
def test_every_kind_under_every_launcher(tmp_path, launcher, seed):
    code, text = run("--cases", 1, "--launchers", launcher, "--seed", seed, "--outcomes", tmp_path / "outcomes.jsonl",
                     timeout=1780)
    assert code == 0, text


# ---------------------------------------------------------------------- processes

_TREE = """
import os, subprocess, sys, time
os.environ["RANVIER_LOCAL_RANK"] = "0"
rank = [sys.executable, "-c", "import subprocess, time; subprocess.Popen(['sleep', '60'], start_new_session=True); "
        "time.sleep(60)"]
subprocess.Popen(rank, start_new_session=True)
time.sleep(60)
"""


@pytest.fixture
def tree(tmp_path):
    """A launcher with a rank in its own session, which has a child in another session."""
    start = Start("python", 1, ["-c", _TREE], tmp_path / "log.txt")
    assert start.wait_until(lambda: len(start.processes()) == 3, 30)
    yield start
    start.kill_all()


def test_all_processes_of_a_start_are_found(tree):
    (rank,) = tree.ranks().values()
    processes = {process.pid: process.parent for process in tree.processes()}
    assert processes[rank] == tree.pid and rank in processes.values()


def test_what_has_lost_its_parent_is_found_and_ended(tree):
    tree.signal(tree.pid, signal.SIGKILL)
    assert tree.wait_gone(0.3) is None
    left = tree.kill_all()
    assert len(left) == 2 and tree.code == -signal.SIGKILL and tree.processes() == []


def test_processes_of_others_are_not_signalled(tree, tmp_path):
    other = Start("python", 1, ["-c", "import time; time.sleep(60)"], tmp_path / "other.txt")
    tree.signal(other.pid, signal.SIGKILL)
    assert tree.kill_all() and other.code is None and [process.pid for process in other.processes()] == [other.pid]
    assert other.kill_all() == [other.pid]


def test_a_start_that_ends_is_gone(tmp_path):
    start = Start("python", 1, ["-c", "print('words'); raise SystemExit(3)"], tmp_path / "log.txt")
    assert start.wait_gone(30) is not None
    assert (start.code, start.text, start.kill_all()) == (3, "words\n", [])
    assert not start.wait_until(lambda: False, 30)


# ---------------------------------------------------------------------- results


@pytest.fixture
def trial(tmp_path):
    trial = Trial(Case(kind="killed-rank", launcher="python", number=0, seed=0), Training(tmp_path), 10.0, 5.0)
    trial.training.run_dir.mkdir()
    return trial


def write_metrics(trial, lines):
    (trial.training.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def metrics():
    return [{"step": step, "loss": loss} for step, loss in enumerate(LOSSES, 1)]


@pytest.mark.parametrize(("change", "found"), [
    (lambda lines: lines, []),
    (lambda lines: lines[:6] + lines[7:], ["step 7 is 0 times in metrics.jsonl"]),
    (lambda lines: [*lines[:7], *lines[6:]], ["step 7 is 2 times in metrics.jsonl"]),
    (lambda lines: [*lines[:6], {"step": 7, "loss": LOSSES[6] + 1e-16}, *lines[7:]], ["step 7 has the loss "]),
    (lambda lines: [*lines, {"step": STEPS + 1, "loss": 1.0}], [f"metrics.jsonl has the steps [{STEPS + 1}]"]),
    (lambda lines: [*lines, {"step": None}, {"loss": 1.0}], [])])
def test_metrics_that_are_not_as_they_should_be(trial, monkeypatch, change, found):
    monkeypatch.setattr(Training, "is_complete", lambda training: True)
    write_metrics(trial, change(metrics()))
    trial.compare(LOSSES)
    assert len(trial.outcome.losses) == len(found)
    assert all(text.startswith(start) for text, start in zip(trial.outcome.losses, found, strict=True))


def test_what_the_fault_has_destroyed_is_not_lost_but_may_not_be_there_twice(trial, monkeypatch):
    monkeypatch.setattr(Training, "is_complete", lambda training: True)
    trial.missing = {2, 3}
    write_metrics(trial, [line for line in metrics() if line["step"] != 3])
    trial.compare(LOSSES)
    assert trial.outcome.losses == []
    write_metrics(trial, [*metrics(), {"step": 2, "loss": 0.0}])
    trial.compare(LOSSES)
    assert trial.outcome.losses == ["step 2 is 2 times in metrics.jsonl"]


def test_a_run_that_is_not_complete(trial):
    write_metrics(trial, metrics())
    trial.compare(LOSSES)
    assert trial.outcome.losses == ["the run did not reach its end"]


def test_success_that_is_none_and_a_traceback(trial, tmp_path):
    start = Start("python", 1, ["-c", "print('Traceback (most recent call last)')"], tmp_path / "log.txt")
    trial.wait_gone(start)
    assert trial.outcome.ended and trial.outcome.codes == [0] and trial.outcome.left == []
    assert trial.outcome.problems == [
        "ended with exit code 0, although the run is not complete with its last checkpoint", "printed a traceback"]
    assert not trial.outcome.good


def test_a_run_that_does_not_end(trial, tmp_path):
    trial.outcome.limit_seconds = 0.2
    start = Start("python", 1, ["-c", "import time; time.sleep(60)"], tmp_path / "log.txt")
    trial.wait_gone(start)
    assert trial.outcome.problems[0] == "had not ended by itself" and trial.outcome.left == [start.pid]
    assert not trial.outcome.ended and trial.outcome.seconds is None


def test_a_run_that_may_go_on_is_judged_by_its_last_step(trial, tmp_path):
    program = f"import time; time.sleep(4); open({str(tmp_path / 'run' / 'metrics.jsonl')!r}, 'w').write('x')"
    trial.wait_gone(Start("python", 1, ["-c", program], tmp_path / "log.txt"), may_go_on=True)
    assert trial.outcome.seconds < 4  # counted from the last write, 4 s after the fault


def test_a_second_start_that_trained_while_the_first_waited_for_it(trial, tmp_path, monkeypatch):
    """That is not a problem, but it shows nothing either."""
    wait = "while not path.exists(): time.sleep(0.02)\n"
    programs = [
        f"import pathlib, socket, time\npath = pathlib.Path({str(tmp_path / 'owner')!r})\n{wait}"
        "print('belongs to process', path.read_text(), 'on', socket.gethostname(), flush=True)\n"
        "path.with_name('named').touch()\ntime.sleep(60)",
        f"import os, pathlib, time\npath = pathlib.Path({str(tmp_path / 'new')!r})\n"
        f"path.write_text(str(os.getpid()))\npath = path.rename(path.with_name('owner')).with_name('named')\n{wait}"
        "time.sleep(0.5)"]
    first, second = (Start("python", 1, ["-c", program], tmp_path / f"{len(program)}.txt") for program in programs)
    coming = iter((first, second))
    monkeypatch.setattr(trial, "start", lambda **_: next(coming))
    assert not kinds._started_twice(trial, 0.0, 0.0) and trial.outcome.problems == []
    first.kill_all()


# ---------------------------------------------------------------------- cases and outcomes


def test_cases_are_drawn_again():
    def draws(number, seed):
        return [Case(kind="killed-rank", launcher="python", number=number, seed=seed).draw.random() for _ in range(2)]

    assert draws(0, 0) == draws(0, 0) != draws(1, 0) != draws(0, 1)


def outcome(**fields):
    return Outcome(**{"kind": "full-disk", "launcher": "torchrun", "number": 0, "seed": 0, "seconds": 1.0,
                      "resumed": True, **fields})


def test_outcomes_there_and_back(tmp_path):
    path = tmp_path / "outcomes.jsonl"
    assert soak.read_outcomes(path) == {}
    first, second = outcome(), outcome(number=1, seconds=None, problems=["x"])
    path.write_text("".join(json.dumps(one.to_json()) + "\n" for one in (first, second)) + '{"kind": "full-')
    assert list(soak.read_outcomes(path).values()) == [first, second]


def test_the_table():
    text = soak.table([outcome(), outcome(number=1, seconds=None, left=[7, 8], resumed=False, losses=["a step"]),
                       outcome(launcher="python", seconds=12.0)], 3, 4)
    assert "3 of 4 faults, seed 3: 2 went wrong." in text
    assert "| full disk | python | 1 | 0 | 1 | 0 | 0 | 12.0 |" in text
    assert "| full disk | torchrun | 2 | 1 | 1 | 1 | 2 | never |" in text
    assert "| all | all | 3 | 1 | 2 | 1 | 2 | never |" in text


@pytest.mark.parametrize("args", [("--kinds", "fire"), ("--launchers", "srun")])
def test_what_is_no_kind_or_launcher(args, capsys):
    with pytest.raises(SystemExit):
        soak.main(args)
    assert f"'{args[1]}' is none of" in capsys.readouterr().err


@pytest.mark.skipif(not can_mount(), reason="takes a right to mount")
def test_a_small_disk(tmp_path):
    with SmallDisk(tmp_path / "disk") as disk:
        disk.fill(leave_bytes=0)
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "disk" / "file").write_bytes(bytes(100_000))
        disk.free()
        (tmp_path / "disk" / "file").write_bytes(bytes(100_000))
        disk.read_only(True)
        with pytest.raises(OSError, match="Read-only"):
            (tmp_path / "disk" / "other").touch()
        disk.read_only(False)
        (tmp_path / "disk" / "other").touch()
    assert list((tmp_path / "disk").iterdir()) == []
