"""Code that only runs on CUDA devices runs here on a fake device: a full run, the cache of frozen layers, measurements.

The last test looks for branches for devices that no scenario here or in `test_stream_order` executes.
"""

import ast
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

import ranvier
from benchmarks.gpu.programs import Program, on_one_rank, world_of_one
from ranvier.cli import doctor_report
from ranvier.comm.mpi_backend import _cuda_aware
from ranvier.config.run import Batch, Checkpoint, Data, Launch, Optim, Run, Train, Transformer
from ranvier.elastic.cache import _equal
from ranvier.launch import rank_processes, start
from ranvier.launch.launchers import Started
from ranvier.pipeline.replica_randomness import ReplicaRandomness
from ranvier.planner import auto, measure, microbenchmarks
from ranvier.planner.microbenchmarks import Sizes
from ranvier.tensor.float8 import float8_layers, runs_on_cpu
from ranvier.train import joining
from ranvier.train.loop import train
from ranvier.train.memory import device_bytes
from tests.elastic.cached import HIT, Cached, Prefix
from tests.errors import raises
from tests.executed_lines import ExecutedLines
from tests.fake_cuda import FakeCuda
from tests.test_stream_order import SCENARIOS
from tests.test_stream_order import run as run_in_order

ROOT = Path(ranvier.__file__).parent
ELSEWHERE = {
    "launch/devices.py": "tests/launch/test_devices.py", "launch/start.py": "tests/launch/test_choices.py",
    "system/pinned_memory.py": "tests/train/test_device_figures.py", "comm/torch_group.py": "tests/comm/test_torch.py",
    "planner/count.py": "tests/elastic/test_memory_budget.py",
    "comm/torch_backend.py": "tests/train/test_device_figures.py",
    "comm/mpi_backend.py": "tests/comm/test_mpi_devices.py", "config/rules.py": "tests/config/test_resolve.py",
    "cli/options.py": "tests/cli/test_first_guesses.py", "tensor/layers/norms.py": "tests/test_fake_cuda.py",
    "tensor/deferred_linear.py": "tests/test_fake_cuda.py",
    "tensor/keyed_dropout.py": "tests/tensor/test_dropout_kernel.py"}
"""Files whose branches for devices run in their own tests."""
DEVICE = torch.device("cuda", 1)
SMALL_SIZES = Sizes(products=((64, 32, 32), (32, 64, 32)), attention=(2, 4, 128, 32), elements=1 << 10, seconds=0.0)


@pytest.fixture
def small_peak(monkeypatch):
    """Use small products to measure a device's peak."""
    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda *sizes, **options: arange(
        *(min(size, 64) if size == 8192 else size for size in sizes), **options))


def small_run(folder, **options):
    folder.mkdir(exist_ok=True)
    text = folder / "text.txt"
    text.write_text("A device is a place where numbers are. " * 40)
    return Run(run_dir=folder / "run", precision="bf16", memory_report=True, data=Data(corpus=str(text)),
               model=Transformer(num_layers=1, hidden=16, heads=2, vocab=300, sequence=16),
               batch=Batch(global_size=4, microbatch_size=2), checkpoint=Checkpoint(every=2),
               train=Train(steps=3, sample_tokens=0), optim=Optim(offload="stream", clip_norm=1.0), **options)


def whole_run(folder, device):
    """Run with a checkpoint at the end; returns its summary."""
    run = small_run(folder, launch=Launch(device=device.type))
    return train(run, "small", world_of_one(device), stream=io.StringIO())


def one_more_step(folder):
    """Resume the run in `folder` on a device."""
    run = small_run(folder, launch=Launch(device="cuda"))
    run = replace(run, resume="auto", train=replace(run.train, steps=4))
    return train(run, "small", world_of_one(DEVICE), stream=io.StringIO())


def cached_states(folder):
    """Write states of frozen blocks from a device, and read them back to it."""
    prefix = Prefix(depth=2)
    prefix.x = prefix.x.to(DEVICE)
    for _, _, module in prefix.blocks:
        module.to(DEVICE)
    with Cached(folder, prefix, device=DEVICE) as cached:
        computed, _ = cached(0, 1)
        state, calls = cached(1, 0)
    assert calls == HIT and state.is_cuda and torch.equal(state.flip(0).cpu(), computed.cpu())
    assert _equal(state, 1.0001 * state, exactly=False) and not _equal(state, 1.1 * state, exactly=False)


def measured(monkeypatch):
    """A cluster file of a machine with two devices, measured with small and few products. The fake device has float8
    products if the CPU has them."""
    if not runs_on_cpu():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(measure, "GPU", SMALL_SIZES)
    monkeypatch.setattr(microbenchmarks, "_LAUNCHES", 2)
    zeros, seconds = torch.zeros, measure.time_call
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: zeros(*(min(one, 4096) for one in size), **options))
    monkeypatch.setattr(measure, "time_call", lambda call: seconds(call, 0.0))
    links = {"messages": {str(size): 1e-5 + size / 1e9 for size in measure._MESSAGES}, "collective": 1e-4}
    asked = []
    monkeypatch.setattr(measure, "run_processes", lambda *args, **named: (asked.append(named["device"]), [links])[1])
    cluster = measure.measure()
    assert asked == ["cuda"] and cluster.devices_per_node == 2 and cluster.device.cores is None
    return cluster


def choices():
    """Choices that depend on a machine's devices before ranks exist."""
    assert auto._devices(Run(), 8) == 2 and start.local_devices("auto") == 2 and start.local_devices("cpu") >= 1
    assert auto.cluster_for(Run(), 2, 2).device.memory_bytes == 1 << 34
    assert device_bytes(DEVICE) == 1 << 34 and device_bytes(torch.device("cpu")) is None
    assert [one.value for one in doctor_report._machine() if one.name == "CUDA device 1"] == ["NVIDIA H200, 16.0 GiB"]
    with torch.device("cpu"):
        assert rank_processes._device("cuda", 3) == DEVICE
    info = SimpleNamespace(Get=lambda name: "system,mpi,cuda:device")
    assert _cuda_aware(SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_info=lambda: info)))
    outside = torch.cuda.default_generators[1].initial_seed()
    with ReplicaRandomness(1, 0, DEVICE).batch():
        assert torch.cuda.default_generators[1].initial_seed() != outside
    assert torch.cuda.default_generators[1].initial_seed() == outside
    store, joins = HashStore(), Started(launcher="local", rank=0, size=1, local_rank=0, local_size=1)
    assert [joining._device("cuda", joins, store).index for _ in range(2)] == [0, 1]
    with raises("join-needs-device"):
        joining._device("cuda", joins, store)


# ---------------------------------------------------------------------- tests

def test_a_run_on_a_device_has_the_cpus_losses(tmp_path, small_peak):
    """Its memory report also has what the device holds besides tensors, and its summary the device's published peak."""
    expected = whole_run(tmp_path / "cpu", torch.device("cpu"))
    with FakeCuda(devices=2) as cuda:
        found = whole_run(tmp_path / "cuda", DEVICE)
        one_more_step(tmp_path / "cuda")
    assert found["final_loss"] == expected["final_loss"] and found["eval_loss"] == expected["eval_loss"]
    assert found["device"] == cuda.name and found["published_peak_flops"] == 989.4e12
    assert "context and libraries" in found["memory"][0]["device"] and found["peak_memory_bytes"][0] > 0
    assert cuda.calls["get_rng_state", 1] and cuda.calls["set_rng_state", 1]
    assert not [name for name, index in cuda.calls if index == 0]


def test_frozen_states_of_a_device_are_cached(tmp_path):
    with FakeCuda(devices=2) as cuda:
        cached_states(tmp_path)
    assert cuda.calls["current_stream", 1]


def test_a_machine_with_devices_is_measured(monkeypatch):
    with FakeCuda(devices=2):
        assert measured(monkeypatch).device.name == "NVIDIA H200"


def test_devices_decide_what_ranks_use():
    with FakeCuda(devices=2):
        choices()


def branches_for_devices(path):
    """Lines of a file that exist for CUDA: those that call it, and branches that only run on a device."""
    source = path.read_text()
    lines = {number for number, line in enumerate(source.splitlines(), 1) if "torch.cuda." in line or "is_cuda" in line}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If) and "cuda" in (test := ast.unparse(node.test)):
            on_cpu = test.startswith("not ") or "!= 'cuda'" in test
            for part in node.orelse if on_cpu else node.body:
                lines |= set(range(part.lineno, part.end_lineno + 1))
    return lines


@pytest.mark.slow
def test_every_branch_for_devices_is_executed(tmp_path, small_peak, monkeypatch):
    files = [path for path in sorted(ROOT.rglob("*.py")) if "cuda" in path.read_text()]
    recorded = ExecutedLines(files)
    with recorded.recording():
        with FakeCuda(devices=2):
            whole_run(tmp_path / "cuda", DEVICE)
            one_more_step(tmp_path / "cuda")
            cached_states(tmp_path / "cache")
            choices()
            if runs_on_cpu():  # the fake device has the CPU's products
                on_one_rank(Program(layers=1, steps=1, float8=True), DEVICE)
            on_one_rank(Program(layers=1, steps=1), DEVICE)  # an engine without the command's `auto`
            with monkeypatch.context() as patch:
                measured(patch)
            with monkeypatch.context() as patch, raises("float8-needs-gpu"):
                patch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
                float8_layers([], 3, DEVICE)
        for name in SCENARIOS:
            run_in_order(name)
    missed = {}
    for path in files:
        lines, name = branches_for_devices(path), str(path.relative_to(ROOT))
        found = [line for line in recorded.missed(path) if int(line.partition(":")[0]) in lines]
        if name not in ELSEWHERE and found:
            missed[name] = found
    assert not missed
