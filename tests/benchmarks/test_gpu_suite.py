"""The GPU benchmarks without a GPU: the suite in its dry run, and every line of benchmarks/gpu on a fake device."""

import inspect
import json
import subprocess
import sys
from contextlib import nullcontext
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity

from benchmarks.gpu import (
    case,
    cases_correctness,
    cases_kernels,
    cases_memory,
    cases_speed,
    layers,
    memory,
    programs,
    suite,
)
from ranvier.testing.ranks import RanksFailed
from tests.executed_lines import ExecutedLines
from tests.fake_cuda import FakeCuda

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", suite.CASES)
def test_a_dry_run_of_each_case_ends_well(name, monkeypatch):
    if name == "kill":  # its ranks are processes, which take seconds to start: below, and in the slow test
        monkeypatch.setattr(cases_correctness, "run_processes", lambda *args, **named: [None, None])
    row = suite.run_case(name, case.Options(dry_run=True))
    assert row["ok"], row
    assert json.loads(json.dumps(row))["case"] == name and row["says"]


def test_the_suite_prints_a_line_for_each_case_and_what_matters_last(capsys):
    assert suite.main(["--dry-run", "--only", "mfu", "pinned", "gpu-tests"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert [row["case"] for row in rows] == ["mfu", "pinned", "gpu-tests"] and all(row["ok"] for row in rows)
    assert [line.split()[0] for line in lines[-3:]] == ["pinned", "gpu-tests", "mfu"]


@pytest.mark.slow
def test_the_whole_suite_runs_dry():
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu.suite", "--dry-run"], cwd=ROOT, capture_output=True,
                          text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith('{"case"')]) == len(suite.CASES)


def test_a_case_that_fails_or_hangs_costs_only_itself(monkeypatch, capsys):
    def fail(options):
        raise RuntimeError("no such thing")

    cases = {"facts": suite.CASES["facts"], "mfu": suite.CASES["mfu"]}
    monkeypatch.setattr(suite, "CASES", {name: SimpleNamespace(**{**vars(one), "run": fail}) for name, one in
                                         cases.items()})
    assert suite.main(["--dry-run"]) == 1
    assert capsys.readouterr().out.count("no such thing") >= 2

    def expire(*args, **named):
        raise subprocess.TimeoutExpired("x", 1.0, stderr=b"stuck here")

    monkeypatch.setattr(suite.subprocess, "run", expire)
    row = suite._in_subprocess("mfu", case.Options(dry_run=True), 1.0)
    assert not row["ok"] and "had not ended after 1 s" in row["error"] and row["stderr"] == "stuck here"
    monkeypatch.setattr(suite.subprocess, "run", lambda *args, **named: SimpleNamespace(
        stdout='x\n{"case": "mfu", "ok": true}\n', stderr="", returncode=0))
    assert suite._in_subprocess("mfu", case.Options(), 1.0) == {"case": "mfu", "ok": True}
    monkeypatch.setattr(suite.subprocess, "run", lambda *args, **named: SimpleNamespace(
        stdout="", stderr="died", returncode=-9))
    assert "ended with -9" in suite._in_subprocess("mfu", case.Options(), 1.0)["error"]


def test_without_a_device_the_suite_says_so(capsys):
    assert suite.main([]) == 0
    assert "--dry-run runs the cases on the CPU" in capsys.readouterr().out


# ---------------------------------------------------------------------- on a fake device

TINY = ["--hidden", "128", "--vocab", "64", "--sequence", "16"]


class Backend:
    """In place of the process groups that a machine without NCCL cannot make."""

    def __init__(self, rank, size, store, device, seconds):
        self._inner = programs.InProcessWorld(1).backend(0)

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.fixture
def small(monkeypatch):
    """The cases with the shapes of a dry run, on a fake device."""
    for module, names in ((cases_speed, ("_1B", "_3B", "_7B")), (cases_memory, ("_350M",)),
                          (cases_correctness, ("SMALL",))):
        for name in names:
            monkeypatch.setattr(module, name, cases_speed.DRY if module is not cases_correctness
                                else cases_correctness.TINY)
    monkeypatch.setattr(case.Options, "sized", lambda self, on_device, dry: dry)
    arange = torch.arange  # of the products by which a peak is measured
    monkeypatch.setattr(torch, "arange", lambda *sizes, **options: arange(
        *(min(size, 64) if size == 8192 else size for size in sizes), **options))
    monkeypatch.setattr(memory, "TorchBackend", Backend)
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1 << 40)
    with FakeCuda(devices=1) as cuda:
        yield cuda


@pytest.mark.slow
def test_every_line_for_devices_runs_on_a_fake_one(small, monkeypatch, capsys, tmp_path):
    """All cases on a device, `memory` from its search to its table, and `layers` with its profile."""
    recorded = ExecutedLines([Path(module.__file__) for module in (
        case, cases_correctness, cases_kernels, cases_memory, cases_speed, layers, memory, programs)])
    options = case.Options()
    monkeypatch.setattr(cases_correctness, "run_processes", ranks_in_threads)
    monkeypatch.setattr(cases_correctness, "mpi_available", lambda: None)
    monkeypatch.setattr(memory, "parse", lambda arguments, parse=memory.parse: parse([
        *TINY, "--minutes", "5", "--start-layers", "1", "--only", "none", "stream-half-d3", "--output",
        str(tmp_path / "sizes.json")]))
    monkeypatch.setattr(memory.subprocess, "run", one_try_here(capsys))
    monkeypatch.setattr(cases_memory, "pinned_zeros", lambda size, dtype: torch.zeros(size, dtype=dtype))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    attention = torch.nn.attention
    monkeypatch.setattr(attention, "sdpa_kernel", wraps(attention.sdpa_kernel)(lambda backend: nullcontext()))
    for module in (cases_speed, cases_memory, layers):  # torch's profiler of devices needs a driver
        monkeypatch.setattr(module, "profile", partial(on_the_cpu, module.profile))
    with recorded.recording():
        for name in suite.CASES:
            row = suite.run_case(name, options)
            assert row["ok"] or (name == "lazy" and "EAGER free: HUNG" in row["error"]), row
        layers.main(["--layers", "1", "--hidden", "32", "--heads", "2", "--sequence", "8", "--microbatch", "1",
                     "--rounds", "1", "--steps", "1", "--profile", "--output", str(tmp_path / "layers.json")])
    source, first = inspect.getsourcelines(memory.try_fsdp)
    peer = range(first, first + len(source))  # torch's FSDP needs process groups of a real device
    missed = [(module, line) for module in (case, cases_memory, cases_speed, memory, layers)
              for line in recorded.missed(Path(module.__file__))
              if any(word in line.lower() for word in ("cuda", "device", "stream"))
              and not any(text in line for text in ON_THE_CPU)
              and not (module is memory and int(line.partition(":")[0]) in peer)]
    assert not missed, "\n".join(f"{module.__name__}:{line}" for module, line in missed)


ON_THE_CPU = ("dry_run", "nothing to measure", "if not torch.cuda.is_available()",
              'for name in ("none", "stream-half-d3"):', "sizes_that_fit.SETTINGS[name], options.device)")
"""Lines that run without a device only."""


def on_the_cpu(profile, *, activities, **named):
    return profile(activities=[one for one in activities if one is not ProfilerActivity.CUDA], **named)


def ranks_in_threads(target, size, transport, *, args, device, timeout_seconds, may_fail=()):
    if "kill" in target:
        return [None] * size
    if args[-1] == "free":
        raise RanksFailed("hung")
    return cases_correctness.run_ranks(lambda world: programs.losses(world, args[0]), size)


def one_try_here(capsys):
    """`memory --one-try` in this process, where three layers do not fit; any other program ends well."""
    def run(command, **named):
        if "--one-try" not in command:
            return SimpleNamespace(returncode=0, stdout="24 passed", stderr="")
        asked = command[command.index("--one-try") + 1:][:2]
        options = SimpleNamespace(hidden=128, vocab=64, sequence=16)
        capsys.readouterr()
        if int(asked[1]) >= 3:
            return SimpleNamespace(returncode=memory._DOES_NOT_FIT, stdout="", stderr="out of memory")
        code = memory.one_try(asked[0], int(asked[1]), options)
        return SimpleNamespace(returncode=code, stdout=capsys.readouterr().out, stderr="")
    return run
