"""Ranks that are told to stop save and exit cleanly, in their own time, after the same step; if unable, as before."""

import ctypes
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ranvier.launch import supervision
from ranvier.launch.failures import flush_or_discard
from ranvier.launch.stop import FINISHED_RUN, STOP_SIGNALS, StopRequest
from ranvier.mesh import Mesh
from ranvier.schedule.spans import Timeline
from ranvier.testing.ranks import run_ranks
from ranvier.train.metrics import Meter, PeakRate
from tests.covering import first, quick
from tests.mpi import MPI

SCRIPT = str(Path(__file__).parent / "saving.py")
SLOW_MPI = pytest.param("mpi", marks=[*MPI.marks, pytest.mark.slow])
BOTH = pytest.mark.parametrize("transport", ["torch", MPI])
MOSTLY_TORCH = pytest.mark.parametrize("transport", ["torch", SLOW_MPI])
PASSED_ON = r"ranvier: {}: the ranks save and stop after this step; another signal ends them at once\n"


@pytest.fixture
def start():
    """Start a command; returns it and the pids of its two ranks in rank order, once they have announced themselves."""
    started = []

    def begin(how, transport):
        environ = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        process = subprocess.Popen([sys.executable, SCRIPT, how, transport], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True)
        started.append(process)
        lines = sorted(process.stdout.readline() for _ in range(2))
        pids = [int(re.fullmatch(rf"rank {rank} pid (\d+) local {transport} threads 1\n", line)[1])
                for rank, line in enumerate(lines)]
        return process, pids

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def end(process, pids):
    """Exit code, standard output, standard error; fails if a rank is left."""
    out, err = process.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a rank is left"
        time.sleep(0.02)
    return process.returncode, out, err


@pytest.mark.parametrize(("number", "transport"), first([(signal.SIGTERM, "torch")], [
    (signal.SIGTERM, "torch"), (signal.SIGUSR1, "torch"), (signal.SIGINT, "torch"), (signal.SIGHUP, "torch"),
    pytest.param(signal.SIGINT, "mpi", marks=SLOW_MPI.marks),
    pytest.param(signal.SIGTERM, "mpi", marks=SLOW_MPI.marks),
    pytest.param(signal.SIGUSR1, "mpi", marks=SLOW_MPI.marks)]))
def test_ranks_save_in_their_own_time_when_the_command_is_told_to_stop(start, number, transport):
    process, pids = start("save", transport)
    process.send_signal(number)
    code, out, err = end(process, pids)
    assert code == (130 if number == signal.SIGINT else 0)
    assert re.fullmatch(PASSED_ON.format("Ctrl-C" if number == signal.SIGINT else number.name), err)
    saved = re.findall(r"^rank (\d) saved after step (\d+) for (\w+)$", out, re.MULTILINE)
    assert sorted(rank for rank, _, _ in saved) == ["0", "1"]
    assert len({step for _, step, _ in saved}) == 1
    assert {reason for _, _, reason in saved} == {number.name}


@pytest.mark.slow
@BOTH
def test_one_rank_that_is_told_tells_the_others(start, transport):
    process, pids = start("save", transport)
    os.kill(pids[1], signal.SIGTERM)
    code, out, err = end(process, pids)
    assert (code, err) == (0, "")
    saved = dict(re.findall(r"^rank (\d saved after step \d+) for (.+)$", out, re.MULTILINE))
    assert sorted(saved.values()) == ["SIGTERM", "another rank"]
    assert len({who.split()[-1] for who in saved}) == 1, "all after the same step"


@pytest.mark.slow
@MOSTLY_TORCH
def test_a_second_signal_ends_the_ranks_at_once(start, transport):
    process, pids = start("deaf", transport)
    process.send_signal(signal.SIGTERM)
    assert re.fullmatch(PASSED_ON.format("SIGTERM"), process.stderr.readline())
    time.sleep(0.6)
    assert process.poll() is None, "there is no grace period that ends"
    process.send_signal(signal.SIGTERM)
    assert end(process, pids)[::2] == (143, "ranvier: stopped by SIGTERM\nThe newest checkpoint is step-1.\n")


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(("first", "name"), [(signal.SIGUSR1, "SIGUSR1"), (signal.SIGINT, "Ctrl-C")])
def test_interrupting_ranks_that_are_saving(start, transport, first, name):
    process, pids = start("deaf", transport)
    process.send_signal(first)
    assert re.fullmatch(PASSED_ON.format(name), process.stderr.readline())
    process.send_signal(signal.SIGINT)
    assert end(process, pids)[::2] == (130, "ranvier: interrupted\nThe newest checkpoint is step-1.\n")


@pytest.mark.slow
@MOSTLY_TORCH
@pytest.mark.parametrize(("number", "code", "text"), quick(1, [
    (signal.SIGTERM, 143, "stopped by SIGTERM"), (signal.SIGINT, 130, "interrupted")]))
def test_ranks_that_do_not_take_signals_yet_are_ended(start, transport, number, code, text):
    process, pids = start("early", transport)
    process.send_signal(number)
    found, _, err = end(process, pids)
    assert found == code
    assert err.splitlines()[-1] == f"ranvier: {text}"
    assert "BAD TERMINATION" not in err and "killed" not in err and "Traceback" not in err


@pytest.mark.slow
@BOTH
def test_a_rank_that_fails_while_it_saves(start, transport):
    process, pids = start("fail", transport)
    process.send_signal(signal.SIGTERM)
    code, out, err = end(process, pids)
    assert code == 1
    assert err.count("ValueError: the disk is full") == 1
    assert "saved" not in out


@pytest.mark.slow
@BOTH
def test_a_rank_that_is_killed_ends_those_that_would_save(start, transport):
    process, pids = start("deaf", transport)
    os.kill(pids[1], signal.SIGKILL)
    code, _, err = end(process, pids)
    assert code == 1
    assert "ranvier: rank 1 (data 0, pipe 1, row 0, col 0) was killed by SIGKILL" in err


class FixedResult:
    loss, weight, grad_norm, stepped = 2.0, 1000.0, 0.5, True


def test_all_ranks_know_with_a_steps_numbers_that_one_was_told():
    def rank(world):
        stop = StopRequest(signals=())
        meter, known = Meter(Timeline(), world.backend.group("train", [range(3)]), torch.device("cpu"), stop), []
        for step in (1, 2, 3):
            if (world.rank, step) in ((2, 2), (0, 3)):
                stop.request("the test")
            pending = meter.step(step, FixedResult(), 1e-3)
            known.append(pending.stop_requested)
            assert pending.event(1.0, PeakRate(1.0, None)).wait_seconds == 0.0
            assert pending.stop_requested == known[-1], "reading it twice changes nothing"
        return known

    assert run_ranks(rank, 3) == [[False, True, True]] * 3


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_leaves_a_note_until_the_request_is_closed(number):
    calls = []
    before = signal.signal(number, lambda *_: calls.append("ours"))
    try:
        stop = StopRequest()
        assert (stop.requested, stop.reason) == (False, "")
        os.kill(os.getpid(), number)
        stop.request("a later one")
        assert (stop.requested, stop.reason) == (True, number.name)
        assert calls == []
        stop.close()
        stop.close()
        os.kill(os.getpid(), number)
        assert calls == ["ours"]
    finally:
        signal.signal(number, before)


def test_a_second_ctrl_c_interrupts_and_the_first_says_so(capfd):
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.interrupted and capfd.readouterr().err == "", "the supervisor reports it"
    with StopRequest() as stop:
        stop.announces = True
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.interrupted and capfd.readouterr().err.startswith("ranvier: Ctrl-C: the run saves and stops")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ranks_are_told_to_stop_where_standard_error_is_lost(monkeypatch):
    """Ctrl-C reaches the `tee` of `2>&1 | tee log`, too."""
    reader, writer = os.pipe()
    os.close(reader)
    write = os.write
    with io.TextIOWrapper(os.fdopen(writer, "wb"), line_buffering=True) as lost, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", lost)
        patch.setattr(os, "write", lambda number, data: write(writer if number == 2 else number, data))
        with pytest.raises(BrokenPipeError):
            os.write(2, b"lost")
        assert supervision._forward_stop(SimpleNamespace(started=[]), [signal.SIGINT]) == signal.SIGINT
        assert supervision._report_stop(signal.SIGINT, lambda: "The newest checkpoint is step-1.") == 130
        with StopRequest() as stop:
            stop.announces = True
            signal.raise_signal(signal.SIGINT)
            assert stop.interrupted
        with pytest.raises(BrokenPipeError):
            lost.flush()
        flush_or_discard()
        lost.flush()  # as Python does at exit, where an error would change the exit code


@pytest.fixture
def supervised(monkeypatch):
    """The outcome of a single rank that runs `command` and is told by `number`; None: after it has failed."""
    def run(command, number, finished=False):
        start = supervision._start

        def start_and_tell(*args):
            if finished:
                args[-1].store.set(FINISHED_RUN, "")
            if number is not None:
                signal.raise_signal(number)
            return start(*args)

        def stop(children, number, received, stop=supervision._stop):
            received.append(signal.SIGINT)
            stop(children, number, received)

        monkeypatch.setattr(supervision, "_start", start_and_tell)
        monkeypatch.setattr(supervision, "_send", lambda number, children: True)  # the rank is not killed by it
        if number is None:
            monkeypatch.setattr(supervision, "_stop", stop)
        return supervision.supervise(Mesh(), "torch", "", ["sh", "-c", command], {}, saves_on_stop=True)

    yield run
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(supervision._PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, None])
def test_a_rank_that_fails_once_the_run_is_told_to_stop_is_not_started_again(supervised, number):
    outcome = supervised("exit 3", number)
    assert (outcome.code, outcome.retryable) == (1, False)


@pytest.mark.parametrize(("finished", "code"), [(False, 130), (True, 0)])
def test_ctrl_c_after_the_last_step_is_no_interruption(supervised, capfd, finished, code):
    assert supervised("exit 0", signal.SIGINT, finished).code == code
    assert re.fullmatch(PASSED_ON.format("Ctrl-C"), capfd.readouterr().err)


def test_signals_that_are_ignored_stay_ignored():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) == stop._on_signal
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_terminal_that_closes_sends_sighup_twice():
    with supervision._signals(STOP_SIGNALS) as received:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
    assert received == [signal.SIGHUP, signal.SIGTERM, signal.SIGTERM]


@pytest.mark.parametrize("where", ["another thread", "no signals"])
def test_a_request_without_signals(where):
    before, made = [signal.getsignal(number) for number in STOP_SIGNALS], []
    thread = threading.Thread(target=lambda: made.append(StopRequest()))
    thread.start()
    thread.join()
    stop = made[0] if where == "another thread" else StopRequest(signals=())
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert not stop.requested
    stop.request("by hand")
    stop.close()
    assert stop.reason == "by hand"
