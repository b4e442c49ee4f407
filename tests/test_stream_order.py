"""Every wait for a CUDA device in the package: with all waits there is no race; without any one there is a race.

A scenario runs the package's code on a fake device that tracks which operations are ordered (`tests.stream_order`).
"""

import ast
import threading
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu.models import nccl
from benchmarks.gpu.programs import Program, batches, engine_of, world_of_one
from ranvier.checkpoint.files import host_copies
from ranvier.comm import nccl_transport
from ranvier.comm.message import Message, MessageKind, encode_head
from ranvier.comm.mpi_backend import MPIGroup
from ranvier.comm.mpi_transport import MPITransport
from ranvier.comm.nccl_transport import NcclTransport
from ranvier.config.run import Optim
from ranvier.data import loader
from ranvier.data.sampler import Sampler
from ranvier.mesh import Mesh
from ranvier.optim import placement
from ranvier.optim.buckets import Segment, StateOwner, StatePlaces, buckets_of, split_by_share
from ranvier.optim.rules import rules_of
from ranvier.pipeline.device_timeline import DeviceTimeline, LookAhead
from ranvier.planner import measure, microbenchmarks
from ranvier.system.pinned_memory import HostCopy
from ranvier.train import metrics
from tests.stream_order import DEVICE, ROOT, OrderedCuda, ordered_transport

WAITS = ("wait_stream", "wait_event", "synchronize", "record_stream", "query", "is_completed")
EXCEPTIONS = {
    ("comm/nccl_transport.py", "torch.cuda.synchronize(self._device)"):
        "connect returns when its communicators are built; no memory depends on it",
    ("comm/torch_backend.py", "torch.cuda.current_stream(self._device).synchronize()"):
        "a communicator is built before the first step; no memory depends on it",
    ("elastic/cache.py", "torch.cuda.current_stream(self._device).synchronize()"):
        "the seconds of a computation end with it; the copy that follows waits anyway",
    ("train/attention_kernel.py", "torch.cuda.synchronize(device)"):
        "the seconds of a kernel begin and end with it, before the first step",
}
"""Waits that order no accesses, and why they are there."""
OTHER = {
    ("optim/optimizer.py", "self.placement.synchronize()"), ("optim/placement.py", "self._streamed.synchronize()"),
    ("optim/placement.py", "self.synchronize()"),
    ("comm/torch_group.py", "return self._work.is_completed()"),
    ("comm/nccl_transport.py", "return all(work.is_completed() for work in works)")}
"""Calls that are named like a wait: calls of a wait that is in a scenario, a poll that every transport's tests share,
and a poll after which nothing runs."""


# ---------------------------------------------------------------------- scenarios

def updates(offload, dtype, in_flight, gradient_dtype=torch.float32):
    """Steps of the optimizer over flat buffers, without other waits around them; the host then reads the states."""
    def run(cuda):
        size, chunks = 150, list(buckets_of([(0, 70), (70, 150)], 32))
        weights = torch.ones(size, dtype=dtype, device=DEVICE)
        gradients = torch.zeros(size, dtype=gradient_dtype, device=DEVICE)
        buckets, rules = [bucket for chunk in chunks for bucket in chunk], rules_of(Optim())
        owners = [StateOwner(0, size, dict.fromkeys(rules.elementwise.states))]
        places = StatePlaces(buckets, owners)
        made = (rules, weights, lambda bucket: gradients[bucket.start:bucket.stop], buckets, places)
        on_device, on_host = split_by_share(buckets, 0.5)

        def hybrid():
            return placement.Hybrid(*made[:3], on_device=on_device, on_host=on_host, in_flight=in_flight,
                                    places=lambda buckets: StatePlaces(buckets, owners))

        held = {"none": lambda: placement.Resident(*made), "hybrid": hybrid,
                "stream": lambda: placement.Streamed(*made, in_flight),
                "host": lambda: placement.OnHost(*made, in_flight, gradient_dtype=gradients.dtype)}[offload]()
        if offload == "hybrid":  # its states have their own places
            placed = {bucket.number: bucket for bucket in (*on_device, *on_host)}
            chunks = [[placed[bucket.number] for bucket in chunk] for chunk in chunks]
            buckets = [placed[bucket.number] for bucket in buckets]
        for step in range(5):
            gradients.fill_(float(step))
            if step >= 3:
                chunks, buckets = [chunk[::-1] for chunk in chunks[::-1]], buckets[::-1]
            if step in (2, 3):  # as if a program had written parameters before the step
                weights[:50].fill_(float(step))
                held.take_parameters(0, size)
            held.prefetch(buckets)
            if step == 1:  # a skipped step: its buckets were copied in for nothing
                continue
            update = placement.Update(step=step + 1, learning_rate=0.01, factor=0.5,
                                      segments=[Segment(0, 50, 1.0, 0.1), Segment(60, size, 0.5, 0.0)])
            for chunk in chunks:
                for _ in held.update(chunk, update):
                    pass
            if step == 0:
                held.synchronize()
                for _, states in held.homes():
                    for state in states.values():
                        state.tolist()
                        state.mul_(1.0)  # as loading a checkpoint writes them
    return run


def training(cuda):
    """An engine whose times are read a step later; once it is closed, the memory of its states may be used."""
    program = Program(layers=1, hidden=16, vocab=16, sequence=8, microbatches=1, precision="bf16",
                      optim={"offload": "stream", "clip_norm": 0.1})
    with engine_of(program, world_of_one(DEVICE)) as engine:
        for batch in batches(program, engine.mesh, 0):
            engine.train_batch(batch)
        homes = engine.flat_optimizer.placement.homes()
    for _, states in homes:
        for state in states.values():
            state.tolist()


def checkpoint(cuda):
    """The thread that writes the file reads copies in pinned memory; the next copies use the same memory."""
    tensors, room = [torch.ones(5, device=DEVICE), torch.ones(3, dtype=torch.int64)], []
    for _ in range(2):
        for copy in host_copies(tensors, room):
            copy.numpy()


def numbers(cuda):
    """The host reads a result of the device."""
    source = torch.ones(2, device=DEVICE)
    copy = HostCopy(source)
    source.add_(1.0)
    assert copy.read().tolist() == [1.0, 1.0]


def samples(cuda):
    """Batches are copied ahead of the step that reads them; a batch that is not used is dropped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "padded_inputs", lambda data, samples, *rest: torch.from_numpy(samples.copy()))
        made = loader.Loader(None, Sampler(8, 0), global_size=4, microbatch_size=2, needs_targets=False, device=DEVICE)
        for step, asked in ((0, 0), (1, 1), (2, 3)):
            made.prefetch(step)
            batch = made.microbatches(asked)
            for microbatch in batch:
                microbatch.inputs.add_(1)
            del batch, microbatch


def device_times(cuda):
    timeline = DeviceTimeline(DEVICE, Mesh(), "1f1b")
    for step in range(3):
        started = timeline.mark()
        torch.ones(3, device=DEVICE)
        timeline.add("forward", "F0", step, started)
        timeline.end_step(step)


def look_ahead(cuda):
    ahead = LookAhead(0, device=DEVICE, num_stages=2)
    torch.ones(3, device=DEVICE)
    ahead.after_launch()
    cuda.require_idle("an action is chosen")


def collectives(aware):
    """MPI reads and writes device memory, or pinned memory, as the host does."""
    def run(cuda):
        def broadcast(out, root):
            cuda.read_by_host(out if aware else torch.from_numpy(out), writes=True)

        request = SimpleNamespace(Testall=lambda requests: True)
        module = SimpleNamespace(SUM=0, MAX=1, MIN=2, IN_PLACE=None, Request=request, Exception=RuntimeError)
        group = MPIGroup(module, SimpleNamespace(Ibcast=broadcast), "test", [0, 1], 0, aware, 1.0, False)
        tensor = torch.ones(4, device=DEVICE)
        group.broadcast(tensor, 0).wait()
        tensor.add_(1)
    return run


def device_messages(cuda):
    """MPI reads and writes device memory as the host does; messages arrive in memory that was used before."""
    posted = []

    def isend(buffer, destination):
        cuda.read_by_host(buffer if isinstance(buffer, torch.Tensor) else torch.from_numpy(buffer))

    def irecv(buffer, source):
        posted.append(buffer)
        if isinstance(buffer, torch.Tensor):
            cuda.read_by_host(buffer, writes=True)

    comm = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 2, Irecv=irecv, Isend=isend, Iprobe=lambda: None)
    module = SimpleNamespace(Request=SimpleNamespace(Testsome=lambda requests: None), Exception=RuntimeError,
                             REQUEST_NULL=None)
    transport = MPITransport(module, comm, "pipeline", DEVICE, aware=True)
    transport.connect([1], [1], 1 << 12)
    message = Message(MessageKind.FORWARD, 1, 0, {"": torch.ones(100, device=DEVICE)})
    transport.send(1, message)
    head = encode_head(message).numpy()
    posted[0][:len(head)] = head
    transport._finish([0])
    transport._finish([0])
    transport.poll()[0].tensors[""].add_(1)


def staged(cuda):
    """A device's message is sent over MPI once it is in pinned memory; a later credit stays after it."""
    sent = []

    def isend(buffer, destination):
        cuda.read_by_host(torch.from_numpy(buffer))
        sent.append(len(buffer))

    comm = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 2, Irecv=lambda buffer, source: None, Isend=isend,
                           Iprobe=lambda: None)
    module = SimpleNamespace(Request=SimpleNamespace(Testsome=lambda requests: None), Exception=RuntimeError)
    transport = MPITransport(module, comm, "pipeline", DEVICE)
    transport.connect([], [1], 1 << 12)
    transport.send(1, Message(MessageKind.FORWARD, 1, 0, {"": torch.ones(100, device=DEVICE)}))
    transport.send(1, Message(MessageKind.CREDIT, 1, 0))
    transport.progress()
    assert sent[0] > 400 > sent[1]


def clocks(module, call):
    """`call` with clocks that must not be read while the device works."""
    def run(cuda):
        reads, arange = [], torch.arange

        def perf_counter():
            if call is rates or reads:  # the other calls first time a warmup
                cuda.require_idle("a clock is read")
            reads.append(len(reads))
            return float(len(reads))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "time", SimpleNamespace(perf_counter=perf_counter, monotonic=lambda: 0.0))
            patch.setattr(torch, "arange", lambda size, **options: arange(min(size, 8), **options))
            call()
    return run


def rates():
    metrics.matrix_product_rate(DEVICE, torch.float32, seconds=-1.0)


def timed():
    microbenchmarks.time_call(lambda: torch.ones(3, device=torch.device("cuda", 0)), seconds=0.0)


def pairs():
    world = world_of_one(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_BETWEEN", (2, 2))
        patch.setattr(measure, "range", lambda count: range(min(count, 2)), raising=False)  # not a hundred times
        measure._collective(world)
    world.backend.close()


def messages(cuda):
    """Two ranks, as threads, send each other messages over NCCL, some of which are larger than a slot."""
    with ordered_transport(cuda, nccl_transport, 2) as boxes:
        def rank(number):
            with cuda.thread():
                exchange(number, boxes)
        threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(2)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nccl_transport, "_MIN_SLOT_BYTES", 64)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30.0)


def exchange(number, boxes):
    group = SimpleNamespace(rank=number)
    host = nccl._Host(number, boxes)
    transport = NcclTransport(host, DEVICE, rising=group, falling=group)
    transport.connect([1 - number], [1 - number], 64)
    for microbatch, size in enumerate((10, 100, 10, 7, 30, 5)):
        tensor = torch.full((size,), 1.0 + microbatch, device=DEVICE)
        transport.send(1 - number, Message(MessageKind.FORWARD, 1, microbatch, {"": tensor}))
        del tensor
        message = transport.wait(20.0)
        assert message.tensors[""].tolist() == [1.0 + microbatch] * size
    assert transport.flush(20.0)
    transport.close()
    for thread in transport._threads:  # their messages are freed here, where they are known to have been sent
        thread.join(20.0)


SCENARIOS = {
    **{f"{offload} {str(dtype)[6:]}, {in_flight} in flight": updates(offload, dtype, in_flight, *more)
       for offload, dtype, in_flight, *more in (
           ("none", torch.bfloat16, 1), ("stream", torch.bfloat16, 3), ("stream", torch.float32, 1),
           ("hybrid", torch.bfloat16, 2), ("host", torch.bfloat16, 2), ("host", torch.float32, 1),
           ("host", torch.float16, 3, torch.float16))},
    "training": training, "checkpoint": checkpoint, "device times": device_times, "numbers": numbers,
    "samples": samples, "look-ahead": look_ahead, "device collectives": collectives(True),
    "staged collectives": collectives(False), "device messages": device_messages,
    "staged messages": staged, "peak": clocks(metrics, rates), "timed": clocks(microbenchmarks, timed),
    "pairs": clocks(measure, pairs), "messages": messages}


def run(name, left_out=None):
    """The waits that a scenario makes, and the first race or None."""
    with OrderedCuda(devices=2, left_out=left_out) as cuda:
        SCENARIOS[name](cuda)
    return cuda.sites, cuda.races[0] if cuda.races else None


@pytest.fixture(scope="module")
def made():
    """The waits of each scenario; checks that none of them has a race."""
    found = {name: run(name) for name in SCENARIOS}
    assert not {name: race for name, (_, race) in found.items() if race}
    return {name: sites for name, (sites, _) in found.items()}


def text_of(site):
    """The source line of the wait."""
    return (ROOT / site[0]).read_text().splitlines()[site[1] - 1].split("#")[0].strip()


@pytest.mark.parametrize("is_optimizers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_without_any_one_wait_there_is_a_race(made, is_optimizers):
    unnoticed = {}
    for site in sorted(set().union(*made.values())):
        if (site[0], text_of(site)) in EXCEPTIONS or (site[0] == "optim/placement.py") is not is_optimizers:
            continue
        if not any(run(name, left_out=site)[1] for name, sites in made.items() if site in sites):
            unnoticed[site] = text_of(site)
    assert not unnoticed


def test_every_wait_of_the_package_is_in_a_scenario(made):
    """Or it is among the exceptions, all of which are in the source."""
    lines = {(site[0], site[1]) for site in set().union(*made.values())}
    missed, excepted = [], set()
    for path in sorted(ROOT.rglob("*.py")):
        source = path.read_text()
        if "torch.cuda" not in source and "is_completed" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if not (isinstance(node, ast.Attribute) and node.attr in WAITS):
                continue
            line = (str(path.relative_to(ROOT)), node.lineno)
            key = (line[0], text_of(line))
            if key in EXCEPTIONS:
                excepted.add(key)
            elif line not in lines and key not in OTHER:
                missed.append(f"{line[0]}:{line[1]}: {key[1]}")
    assert not missed and excepted == set(EXCEPTIONS)


def test_a_race_is_noticed_in_whichever_order_it_runs():
    """Two streams write the same memory: without a wait between them there is a race; likewise for freed memory."""
    for wait in (True, False):
        with OrderedCuda() as cuda:
            side, tensor = torch.cuda.Stream(DEVICE), torch.zeros(4, device=DEVICE)
            if wait:
                side.wait_stream(torch.cuda.current_stream(DEVICE))
            with torch.cuda.stream(side):
                tensor.add_(1.0)
        assert bool(cuda.races) is not wait


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_that_another_stream_still_uses_may_not_be_freed(recorded):
    with OrderedCuda() as cuda:
        side, tensor = torch.cuda.Stream(DEVICE), torch.zeros(4, device=DEVICE)
        side.wait_stream(torch.cuda.current_stream(DEVICE))
        with torch.cuda.stream(side):
            tensor.add_(1.0)
        if recorded:
            tensor.record_stream(side)
        del tensor
    assert bool(cuda.races) is not recorded
