"""The GPU benchmarks without a GPU: the suite in its dry run, and every line of benchmarks/gpu on a fake device."""

import faulthandler
import inspect
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks.gpu import (
    case,
    cases_correctness,
    cases_kernels,
    cases_memory,
    cases_speed,
    device_events,
    layers,
    memory,
    programs,
    rows,
    suite,
)
from ranvier.tensor.float8 import runs_on_cpu
from ranvier.testing.ranks import RanksFailed
from tests.executed_lines import ExecutedLines
from tests.fake_cuda import FakeCuda

ROOT = Path(__file__).parents[2]
DRY = case.Options(dry_run=True)
MEASURED = {name: row for name, row in rows.ROWS.items() if row.command is None}
SHAPED = "mfu", "peer", "profile"
"""Cases whose first argument is a shape; a dry run has only one shape."""
DISTINCT = list({(row.case, row.arguments[1:] if row.case in SHAPED else row.arguments): name
                 for name, row in reversed(MEASURED.items()) if name not in ("parity-1", "parity-2")}.values())
"""Rows that differ in a dry run."""


def lines_of(path):
    return [json.loads(line) for line in (path / "results.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow if name in ("parity-all", "ranks-row-col") else ())
    for name in DISTINCT])
def test_a_dry_run_of_each_row_ends_well(name, tmp_path, monkeypatch):
    if name == "kill":  # its ranks are processes, which take seconds to start: in the slow test
        monkeypatch.setattr(cases_correctness, "seconds_after_kill", lambda program, device: 3.0)
    assert suite.run_row(name, DRY, tmp_path / "results.jsonl")
    assert all(line["row"] == name and line.get("ok", True) for line in lines_of(tmp_path))


def test_rows_are_known_and_fit_their_parts():
    assert all((row.command is None) == (row.case in rows.CASES) for row in rows.ROWS.values())
    assert {row.case for row in MEASURED.values()} == rows.CASES.keys()
    assert all((ROOT / path).exists() for path in rows._TESTS)
    for row in MEASURED.values():
        if row.case in SHAPED:
            assert row.arguments[0] in (cases_speed.LARGE_SHAPES if 4 in row.parts else cases_speed.SHAPES)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", [1, 2, 3])
def test_a_part_runs_dry(part, tmp_path):
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu.suite", "--dry-run", "--part", str(part), "--output",
                           str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=1180)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = {line["name"]: line["rc"] for line in lines_of(tmp_path) if line["kind"] == "status"}
    assert ended == {name: 0 for name, row in rows.ROWS.items() if part in row.parts}


@pytest.fixture
def own_rows(monkeypatch):
    """Rows of these commands, of Python code, by name."""
    def use(seconds=60.0, **code):
        found = {name: rows.Row(command=lambda options, folder, text=text: [sys.executable, "-c", text], parts=(1,),
                                seconds=seconds, expected=f"that of {name}") for name, text in code.items()}
        monkeypatch.setattr(suite, "ROWS", found)
    return use


def test_each_row_has_its_end_and_its_log(own_rows, tmp_path, capsys):
    own_rows(good="print('all well')", bad="print('a trace'); raise SystemExit(3)",
             killed="import os; os.kill(os.getpid(), 9)")
    assert suite.main(["--dry-run", "--output", str(tmp_path)]) == 1
    first, *ended = lines_of(tmp_path)
    assert first["kind"] == "circumstances" and first["commit"]
    assert [(line["name"], line["rc"]) for line in ended] == [("good", 0), ("bad", 3), ("killed", -9)]
    assert (tmp_path / "log.txt").read_text() == "=== good\nall well\n=== bad\na trace\n=== killed\n"
    shown = capsys.readouterr().out.splitlines()
    assert "a trace" in shown and [line.split()[0] for line in shown[-3:]] == ["killed:", "bad:", "good:"]
    assert "FAILED (3)" in shown[-2] and "that of good" in shown[-1]


def test_a_row_that_hangs_costs_its_limit_and_leaves_no_process(own_rows, tmp_path):
    """The row gets a signal to end, so that it ends its own processes; processes that ignore the signal are killed."""
    own_rows(0.4, hangs="import subprocess, sys, time; started = subprocess.Popen([sys.executable, '-c', 'import time; "
                        "time.sleep(100)']); print(started.pid, flush=True); time.sleep(100)", next="print(1)")
    assert suite.main(["--dry-run", "--output", str(tmp_path)]) == 1
    assert [line["rc"] for line in lines_of(tmp_path)[1:]] == [124, 0]
    child = Path(f"/proc/{(tmp_path / 'log.txt').read_text().split()[2]}/stat")
    deadline = time.monotonic() + 5
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_a_row_that_no_signal_ends_does_not_stop_the_others(monkeypatch):
    """A process inside a driver that hangs ends after its call, if ever."""
    asked = []

    def wait(timeout):
        asked.append(timeout)
        raise subprocess.TimeoutExpired("a row", timeout)

    stuck = SimpleNamespace(pid=0, wait=wait, send_signal=asked.append)
    monkeypatch.setattr(suite.subprocess, "Popen", lambda *args, **named: stuck)
    monkeypatch.setattr(suite.os, "killpg", lambda group, number: asked.append(number))
    assert suite.run_process(["a row"], 1.0, None, {}) == 124
    assert asked == [1.0, signal.SIGINT, suite._GRACE_SECONDS, signal.SIGKILL, suite._GRACE_SECONDS]
    assert suite.PART_SECONDS + 2 * suite._GRACE_SECONDS < 570


def test_a_row_whose_limit_is_over_shows_where_it_was(tmp_path, monkeypatch, capfd):
    def hanging(options):
        yield {"found": 1}
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(100)

    monkeypatch.setitem(suite.CASES, "facts", hanging)
    try:
        with pytest.raises(KeyboardInterrupt):
            suite.main(["--dry-run", "--one", "facts", "--output", str(tmp_path)])
    finally:
        faulthandler.unregister(signal.SIGINT)
    assert "in hanging" in capfd.readouterr().err
    assert [line["found"] for line in lines_of(tmp_path)] == [1]


def test_a_part_begins_no_row_for_which_no_time_is_left(own_rows, tmp_path):
    own_rows(one="print(1)", two="print(2)")
    made = suite.Suite(options=DRY, output=tmp_path, limit_seconds=1.0)
    found = made.run(["one", "two"])
    assert [line["rc"] for line in found[1:]] == [77, 77] and found == lines_of(tmp_path)
    assert sum("no time was left" in line for line in suite.summary(found)) == 2


def test_what_a_row_has_found_before_it_fails_is_kept(tmp_path, monkeypatch):
    def half(options, *arguments):
        yield {"found": 1}
        raise RuntimeError("no such thing")

    def wrong(options, *arguments):
        yield {"found": 2, "ok": False}
        yield {"found": 3}

    for name, run in (("facts", half), ("pinned", wrong)):
        monkeypatch.setitem(suite.CASES, name, run)
        assert suite.main(["--dry-run", "--one", name, "--output", str(tmp_path)]) == 1
    found = lines_of(tmp_path)
    assert [line.get("found") for line in found] == [1, None, 2, 3]
    assert found[1]["kind"] == "facts" and "no such thing" in found[1]["error"] and "half" in "".join(found[1]["trace"])


def test_rows_start_as_a_run_starts_its_ranks(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    made = suite.Suite(options=case.Options(), output=tmp_path, limit_seconds=1.0)
    lazy, eager = (made._environment(rows.Row(case="facts", seconds=1.0, eager=eager)) for eager in (False, True))
    assert lazy["PYTORCH_CUDA_ALLOC_CONF"] == eager["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert eager["CUDA_MODULE_LOADING"] == "EAGER" and "CUDA_MODULE_LOADING" not in lazy
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    assert made._environment(rows.Row(case="facts", seconds=1.0, eager=True))["CUDA_MODULE_LOADING"] == "LAZY"


def test_parity_goes_on_after_a_variant_that_differs_or_fails(monkeypatch):
    def on_one_rank(program, device):
        if program.dropout:
            raise RuntimeError("no such thing")
        return [[1.0, 1.0], [2.0 if program.microbatches == 1 and device is not DRY.device else 1.0, 1.0]]

    devices = iter([torch.device("cpu"), DRY.device] * 3)
    monkeypatch.setattr(cases_correctness, "on_one_rank", lambda program, device: on_one_rank(program, next(devices)))
    found = list(cases_correctness.parity(DRY, "one microbatch", "dropout", "plain"))
    assert [line["variant"] for line in found] == ["one microbatch", "dropout", "plain"]
    assert "no such thing" in found[1]["error"] and not found[1]["ok"]


@pytest.mark.parametrize(("case", "fails"), [("predict", "none"), ("placements", "stream")])
def test_a_case_goes_on_after_a_setting_that_fails(case, fails, monkeypatch):
    def refusing(call):
        def run(program, *place):
            if program.optim.get("offload") == fails:
                raise RuntimeError("no such thing")
            return call(program, *place)
        return run

    monkeypatch.setattr(cases_memory, "engine_of", refusing(cases_memory.engine_of))
    monkeypatch.setattr(cases_correctness, "on_one_rank", refusing(cases_correctness.on_one_rank))
    first, second = rows.CASES[case](DRY)
    assert not first["ok"] and "no such thing" in first["error"] and "error" not in second


@pytest.mark.parametrize(("hung", "ended"), [(True, "hung"), (False, "crashed")])
def test_a_start_that_crashes_is_not_one_that_hangs(hung, ended, monkeypatch):
    def fail(program, stress, options):
        raise RanksFailed("rank 0 of 2 failed", hung=hung)

    monkeypatch.setattr(cases_correctness, "_stressed_ranks", fail)
    assert {line["ended"] for line in cases_correctness.lazy(DRY)} == {ended}


def test_waits_for_events_and_devices_are_counted():
    with FakeCuda(devices=1):
        with cases_correctness.host_waits() as waits:
            torch.cuda.Event().synchronize()
            torch.cuda.synchronize(0)
            torch.cuda.Stream(torch.device("cuda", 0)).synchronize()
            assert not waits.operations and torch.zeros(1, device="cuda:0").item() == 0.0
            warnings.warn("nothing that waits", stacklevel=1)
        torch.cuda.synchronize(0)
    assert waits.events.total() == 3 and waits.operations.total() == 1
    assert {place.partition(":")[0] for place in waits.events} == {Path(__file__).name}


def test_a_profile_counts_what_the_device_does_once(monkeypatch):
    """Host entries repeat the time of their kernels; idle time is the time that no kernel covers."""
    def event(name, start, end, kind=DeviceType.CUDA, **more):
        return SimpleNamespace(name=name, device_type=kind, time_range=SimpleNamespace(start=start, end=end), **more)

    events = [event("aten::mm", 0, 90, DeviceType.CPU), event("nvjet_tst_128x256", 10, 40),
              event("Memcpy HtoD (Pinned -> Device)", 30, 50), event("step", 0, 99, is_user_annotation=True),
              event("flash_fwd_kernel", 60, 80)]
    monkeypatch.setattr(device_events, "profile", lambda activities: nullcontext(
        SimpleNamespace(events=lambda: events)))
    monkeypatch.setattr(device_events, "synchronize", lambda device: None)
    found = device_events.device_events(lambda: None, torch.device("cuda", 0))
    assert [(device_events.kernel_class(name), stop - start) for name, start, stop in found] == [
        ("product", 30), ("memory", 20), ("attention", 20)]
    assert device_events.covered_length([(start, stop) for _, start, stop in found]) == 60


def test_without_a_device_the_suite_says_so(capsys, tmp_path):
    assert suite.main(["--output", str(tmp_path)]) == 0
    assert "--dry-run runs the rows on the CPU" in capsys.readouterr().out
    assert suite.main(["--list"]) == 0 and "fits-stream-40" in capsys.readouterr().out


# ---------------------------------------------------------------------- on a fake device

TINY = ["--hidden", "128", "--vocab", "64", "--sequence", "16"]


class Backend:
    """Replaces the process groups that a machine without NCCL cannot make."""

    def __init__(self, rank, size, store, device, seconds):
        self._inner = programs.InProcessWorld(1).backend(0)

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.fixture
def small(monkeypatch):
    """The cases with the shapes of a dry run, on a fake device."""
    for module, names in ((cases_memory, ("_350M",)), (cases_correctness, ("SMALL",))):
        for name in names:
            monkeypatch.setattr(module, name, cases_speed.DRY if module is not cases_correctness
                                else cases_correctness.TINY)
    monkeypatch.setattr(case.Options, "sized", lambda self, on_device, dry: dry)
    arange = torch.arange  # used by the products that measure the peak
    monkeypatch.setattr(torch, "arange", lambda *sizes, **options: arange(
        *(min(size, 64) if size == 8192 else size for size in sizes), **options))
    monkeypatch.setattr(memory, "TorchBackend", Backend)
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1 << 40)
    with FakeCuda(devices=1) as cuda:
        yield cuda


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_line_for_devices_runs_on_a_fake_one(small, monkeypatch, capsys, tmp_path):
    """Each case on a device, `memory` from its search to its table, and `layers` with its profile."""
    modules = (case, cases_correctness, cases_kernels, cases_memory, cases_speed, device_events, layers, memory,
               programs)
    recorded = ExecutedLines([Path(module.__file__) for module in modules])
    options = case.Options()
    monkeypatch.setattr(cases_correctness, "run_processes", ranks_in_threads)
    monkeypatch.setattr(programs, "run_processes", ranks_in_threads)
    monkeypatch.setattr(cases_correctness, "seconds_after_kill", lambda program, device: 3.0)
    monkeypatch.setattr(cases_correctness, "mpi_available", lambda: None)
    monkeypatch.setattr(memory.subprocess, "run", one_try_here(capsys))
    monkeypatch.setattr(cases_memory, "pinned_zeros", lambda size, dtype: torch.zeros(size, dtype=dtype))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    attention = torch.nn.attention
    monkeypatch.setattr(attention, "sdpa_kernel", wraps(attention.sdpa_kernel)(lambda backend: nullcontext()))
    # torch's profiler of devices needs a driver
    monkeypatch.setattr(device_events, "profile", partial(on_the_cpu, device_events.profile))
    monkeypatch.setattr(device_events, "DeviceType", SimpleNamespace(CUDA=DeviceType.CPU, CPU=DeviceType.CPU))
    with recorded.recording():
        for name in {row.case: name for name, row in MEASURED.items()}.values():
            with monkeypatch.context() as patch:
                if name == "float8":  # torch's compiler would trace the fake device
                    patch.setattr(torch, "compile", lambda function: function)
                well = suite.run_row(name, options, tmp_path / "results.jsonl")
            assert well or name == "lazy" or (name == "float8" and not runs_on_cpu()), lines_of(tmp_path)[-1]
        memory.measure(memory.parse([*TINY, "--minutes", "5", "--start-layers", "1", "--only", "none",
                                     "stream-half-d3", "--output", str(tmp_path / "sizes.json")]))
        layers.main(["--layers", "1", "--hidden", "32", "--heads", "2", "--sequence", "8", "--microbatch", "1",
                     "--rounds", "1", "--steps", "1", "--profile", "--output", str(tmp_path / "layers.json")])
    assert {line["ended"] for line in lines_of(tmp_path) if line.get("stress") == "free"} == {"hung"}
    source, first = inspect.getsourcelines(memory.try_fsdp)
    peer = range(first, first + len(source))  # torch's FSDP needs process groups on a real device
    missed = [(module, line) for module in (case, cases_memory, cases_speed, device_events, memory, layers)
              for line in recorded.missed(Path(module.__file__))
              if any(word in line.lower() for word in ("cuda", "device", "stream"))
              and not any(text in line for text in ON_THE_CPU)
              and not (module is memory and int(line.partition(":")[0]) in peer)]
    assert not missed, "\n".join(f"{module.__name__}:{line}" for module, line in missed)


ON_THE_CPU = ("dry_run", "nothing to measure", "if not torch.cuda.is_available()", "failure(error)")
"""Lines that run only without a device or after an error."""


def on_the_cpu(profile, *, activities, **named):
    return profile(activities=[one for one in activities if one is not ProfilerActivity.CUDA], **named)


def ranks_in_threads(target, size, transport, *, args, device, timeout_seconds, may_fail=()):
    if args[-1] == "free":
        raise RanksFailed("had not ended", hung=True)
    return cases_correctness.run_ranks(lambda world: programs.losses(world, args[0]), size)


def one_try_here(capsys):
    """Runs `memory --one-try` in this process, where three layers do not fit; any other program ends normally."""
    def run(command, **named):
        if "--one-try" not in command:
            return SimpleNamespace(returncode=0, stdout="Clocks", stderr="")
        asked = command[command.index("--one-try") + 1:][:2]
        options = SimpleNamespace(hidden=128, vocab=64, sequence=16)
        capsys.readouterr()
        if int(asked[1]) >= 3:
            return SimpleNamespace(returncode=memory._DOES_NOT_FIT, stdout="", stderr="out of memory")
        code = memory.one_try(asked[0], int(asked[1]), options)
        return SimpleNamespace(returncode=code, stdout=capsys.readouterr().out, stderr="")
    return run
