"""A training step on a device that does not exist: numbers, devices, device times, memory and host waits."""

import queue
from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.gpu.cases_correctness import furthest
from benchmarks.gpu.models import nccl
from benchmarks.gpu.programs import Program, losses, on_one_rank
from ranvier.comm import nccl_transport
from ranvier.comm.nccl_transport import NcclTransport
from ranvier.config.run import Optim
from ranvier.mesh import Mesh
from ranvier.optim.optimizer import resolve_offload
from ranvier.pipeline.device_timeline import DeviceTimeline, LookAhead
from ranvier.tensor import deferred_linear
from ranvier.tensor.deferred_linear import add_gradients
from ranvier.testing.ranks import run_ranks
from tests.fake_cuda import FakeCuda

SECOND = torch.device("cuda", 1)
"""Not the first device, so that a missing device argument is noticed."""
PROGRAMS = {
    "stream": Program(precision="bf16", optim={"offload": "stream", "clip_norm": 1.0}),
    "host": Program(precision="fp16", layers=1, optim={"offload": "host"}, dropout=0.1),
    "none": Program(layers=1, memory={"recompute": 1}, optim={"offload": "none"})}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_device_gives_the_cpus_numbers(name):
    expected = on_one_rank(PROGRAMS[name], torch.device("cpu"))
    with FakeCuda(devices=2) as cuda:
        found = on_one_rank(PROGRAMS[name], SECOND)
    assert found == expected
    assert not any(index == 0 for _, index in cuda.calls)


def test_products_are_added_to_wide_gradients_in_one_kernel():
    """dW of two microbatches in bf16 is added to an fp32 gradient without a product or addition in bf16."""
    layer, seen = nn.Linear(6, 5, bias=False, dtype=torch.bfloat16), []
    layer.weight.grad_dtype = torch.float32
    pairs = [(torch.randn(2, 4, 6).bfloat16(), torch.randn(2, 4, 5).bfloat16()) for _ in range(2)]
    expected = sum(dy.flatten(0, 1).t().mm(x.flatten(0, 1)).float() for x, dy in pairs)
    with FakeCuda(devices=2) as cuda:
        run = cuda.run
        cuda.run = lambda function, args, kwargs: (seen.append(str(function)), run(function, args, kwargs))[1]
        layer.to(SECOND)
        for x, dy in pairs:
            add_gradients(layer.weight, None, x.to(SECOND), dy.to(SECOND))
        found = layer.weight.grad.cpu()
    assert found.dtype is torch.float32 and torch.equal(found, expected)
    assert [name for name in seen if "mm" in name or "add" in name] == ["aten.mm.dtype", "aten.addmm.dtype_out"]


@pytest.mark.parametrize("options", [{"memory": {"recompute": 1}}, {"mesh": {"pipe": 2}}])
def test_logits_lie_in_rows_of_a_multiple_of_128(options, monkeypatch):
    """Losses and gradients are the same as without padding, whether autograd computes the gradient (of a tied weight)
    or the queue (of an untied weight)."""
    shapes, product = [], deferred_linear.padded_rows_product
    monkeypatch.setattr(deferred_linear, "padded_rows_product", lambda x, weight: (
        y := product(x, weight), shapes.append((tuple(y.shape), y.stride())))[0])
    program = asdict(Program(layers=1, vocab=131, precision="fp64", **options))
    size = 2 if "mesh" in options else 1
    expected = run_ranks(lambda world: losses(world, program), size)
    with FakeCuda(devices=2) as cuda:
        def train(world):
            world.device = SECOND
            with cuda.thread():
                return losses(world, program)
        for one, other in zip(run_ranks(train, size), expected, strict=True):
            assert furthest(one, other) < 1e-12
    assert shapes and all(shape[-1] == 131 and stride[-2:] == (256, 1) for shape, stride in shapes)


@pytest.mark.parametrize("options", [{"microbatches": 3}, {
    "microbatches": 1, "optim": {"update_in_backward": True}}], ids=str)
def test_stages_on_devices_give_the_cpus_numbers(options):
    """Two stages as threads that share the device: messages, ties and device times; in the backward the last stage
    waits for the weight of the batch, to which the first stage must have added its part."""
    program = Program(mesh={"pipe": 2}, layers=1, **options)
    expected = run_ranks(lambda world: losses(world, asdict(program)), 2)
    with FakeCuda(devices=2) as cuda:
        def train(world):
            world.device = SECOND
            with cuda.thread():
                return losses(world, asdict(program))
        assert run_ranks(train, 2, timeout_seconds=10.0) == expected
        assert cuda.calls["current_stream", 1] and not cuda.calls["current_stream", 0]


@pytest.mark.parametrize("scheme", ["stationary", pytest.param("summa", marks=pytest.mark.slow)])
def test_half_precision_on_rows_and_columns(scheme):
    """A device multiplies half precision into fp32 sums; a CPU first widens the operands."""
    program, wide = Program(mesh={"row": 2, "col": 2}, layers=1, steps=1, microbatches=1, precision="bf16",
                            tensor={"scheme": scheme}), Counter()
    expected = run_ranks(lambda world: losses(world, asdict(program)), 4)
    with FakeCuda(devices=2) as cuda:
        run = cuda.run
        cuda.run = lambda function, args, kwargs: (wide.update([str(function)]), run(function, args, kwargs))[1]

        def train(world):
            world.device = SECOND
            with cuda.thread():
                return losses(world, asdict(program))
        for found in run_ranks(train, 4):
            assert furthest(found, expected[0]) < 2e-3
    assert wide["aten.mm.dtype_out"] or wide["aten.bmm.dtype_out"], [name for name in wide if "mm" in name]


@pytest.mark.parametrize("slot_bytes", [pytest.param(1 << 16, marks=pytest.mark.slow), 64])
def test_stages_whose_messages_travel_over_nccl(slot_bytes, monkeypatch):
    """`NcclTransport` itself, with a model of NCCL; messages larger than a slot travel in parts at first."""
    program = Program(mesh={"pipe": 2}, layers=1, microbatches=4, dropout=0.1)
    expected = run_ranks(lambda world: losses(world, asdict(program)), 2)
    devices, boxes = nccl.Devices(2), [queue.SimpleQueue() for _ in range(2)]
    monkeypatch.setattr(nccl_transport, "dist", devices)
    monkeypatch.setattr(nccl_transport, "_CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(nccl_transport, "_MIN_SLOT_BYTES", slot_bytes)
    transports = []

    def over_nccl(world):
        group = SimpleNamespace(rank=world.rank)
        transports.append(NcclTransport(nccl._Host(world.rank, boxes), SECOND, rising=group, falling=group))
        if slot_bytes < 1 << 16:
            connect = transports[-1].connect
            transports[-1].connect = lambda sources, destinations, capacity: connect(sources, destinations, slot_bytes)
        return transports[-1]

    with FakeCuda(devices=2) as cuda:
        def train(world):
            world.device = SECOND
            make = world.backend.transport
            world.backend.transport = lambda purpose, **more: (
                over_nccl(world) if purpose == "pipeline" else make(purpose, **more))
            with cuda.thread():
                return losses(world, asdict(program))
        assert run_ranks(train, 2) == expected
    assert len(transports) == 2 and all(one._payload_bytes_sent > 10_000 for one in transports)


def test_resident_states_are_updated_in_few_pieces(monkeypatch):
    """One call for each chunk and segment, however small the buckets; a device has the CPU's numbers."""
    from ranvier.optim.rules import AdamW

    calls, update = [], AdamW.update_unless
    monkeypatch.setattr(AdamW, "update_unless", lambda self, skip, parameters, *rest, **named: (
        calls.append(len(parameters)), update(self, skip, parameters, *rest, **named))[1])
    program = Program(layers=1, steps=1, optim={"offload": "none", "bucket_size": 500})
    expected = on_one_rank(program, torch.device("cpu"))
    on_cpu = calls[:]
    calls.clear()
    with FakeCuda(devices=2):
        found = on_one_rank(program, SECOND)
    assert found == expected and calls == on_cpu and max(calls) == 2000


@pytest.mark.parametrize(("kept", "offload"), [(0, "stream"), (1 << 28, "none")])
def test_what_the_allocator_keeps_of_tensors_that_are_gone_is_free(kept, offload):
    """So the states of an engine that follows a closed engine stay on the device."""
    with FakeCuda(devices=2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1 << 34))
        patch.setattr(torch.cuda, "memory_reserved", lambda device: kept)
        assert resolve_offload(Optim(), SimpleNamespace(size=1 << 20), SECOND)[1] == offload


# ---------------------------------------------------------------------- device times

class Clock:
    """A device whose events are reached when a test decides. Times are in milliseconds."""

    def __init__(self):
        self.now = 0.0
        self.waited = []

    def event(self, enable_timing=False, blocking=False):
        clock = self

        class Event:
            at = None

            def record(self, stream):
                self.at = clock.now

            def synchronize(self):
                clock.waited.append(self.at)

            def elapsed_time(self, other):
                return other.at - self.at
        return Event()


@pytest.fixture
def clock(monkeypatch):
    with FakeCuda():
        clock = Clock()
        monkeypatch.setattr(torch.cuda, "Event", clock.event)
        yield clock


def span(timeline, category, label, before, during, clock):
    """The device is idle for `before` and works for `during`; the host takes no time."""
    clock.now += before
    started = timeline.mark()
    clock.now += during
    timeline.add(category, label, 1, started)


def test_spans_have_the_devices_times_one_step_later(clock):
    timeline = DeviceTimeline(torch.device("cuda", 0), Mesh(), "1f1b")
    assert timeline.begin_step() == []
    span(timeline, "forward", "F0", 0.0, 10.0, clock)
    waited = timeline.mark()
    timeline.add("wait", "forward 1", 1, waited)
    span(timeline, "forward", "F1", 5.0, 20.0, clock)
    assert timeline.end_step(1) == [] and clock.waited == []
    span(timeline, "backward", "B0", 0.0, 30.0, clock)
    (window,) = timeline.end_step(2)
    assert clock.waited == [35.0]
    lengths = {one.label: round(one.seconds * 1e3, 3) for one in window.spans}
    assert lengths == {"F0": 10.0, "forward 1": 5.0, "F1": 20.0}
    assert window.step == 1 and round((window.stop_ns - window.start_ns) * 1e-6, 3) == 35.0
    (window,) = timeline.begin_step()
    assert [one.label for one in window.spans] == ["B0"] and window.step == 2


def test_a_wait_that_the_device_has_work_for_is_none(clock):
    """The host waited but the device did not: it was busy with F0 until it got F1."""
    timeline = DeviceTimeline(torch.device("cuda", 0), Mesh(), "1f1b")
    timeline.begin_step()
    span(timeline, "forward", "F0", 0.0, 10.0, clock)
    timeline.add("wait", "forward 1", 1, timeline.mark())
    span(timeline, "forward", "F1", 0.0, 10.0, clock)
    waits = [one for one in timeline.take() if one.category == "wait"]
    assert [one.seconds for one in waits] == [0.0]


@pytest.mark.parametrize(("limit", "stages", "waited"), [
    ("auto", 4, [0.0, 1.0]), ("auto", 1, []), (2, 1, [0.0]), (0, 4, [0.0, 1.0, 2.0])])
def test_the_host_waits_for_all_but_the_last_actions(limit, stages, waited, clock):
    ahead = LookAhead(limit, device=torch.device("cuda", 0), num_stages=stages)
    for number in range(3):
        clock.now = float(number)
        ahead.after_launch()
    assert clock.waited == waited
    LookAhead(0, device=torch.device("cpu"), num_stages=4).after_launch()


def test_the_meter_reads_the_device_a_step_later(clock):
    """Waits and busy seconds are the device's; the last step is read when the run pauses."""
    from ranvier.comm.inprocess import InProcessWorld
    from ranvier.train.metrics import Meter

    timeline = DeviceTimeline(torch.device("cuda", 0), Mesh(), "1f1b")
    meter = Meter(timeline, InProcessWorld(1).backend(0).group("all", [[0]]), torch.device("cpu"))
    waits = []
    for number in range(1, 4):
        span(timeline, "forward", "F0", 0.0, 10.0, clock)
        timeline.add("wait", "backward 0", number, timeline.mark())
        span(timeline, "backward", "B0", 2.0, 20.0, clock)
        waits.append(round(float(meter.step(number, None, 1e-3).sums[1]), 6))
    assert waits == [0.0, 0.002, 0.002]
    assert meter.busy_steps == 1 and meter.busy["backward"] == pytest.approx(0.02)
    meter.resume()
    assert [step.step for step in meter.kept_steps] == [1, 2, 3] and meter.busy["backward"] == pytest.approx(0.04)
