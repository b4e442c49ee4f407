"""Few reductions are in flight, however late a peer is: memory is as predicted, there is one order, the sums are right,
and no rank waits forever."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ranvier.comm.meta import MetaGroup
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import Batch, Optim, Transformer
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.optim.chunks import Chunk
from ranvier.optim.gradients import Gradients
from ranvier.optim.optimizer import FlatOptimizer
from ranvier.optim.reduction import MAX_COLLECTIVES, Reductions
from ranvier.pipeline.engine import Engine
from ranvier.planner.count import laid_out
from ranvier.testing.memory import MemoryTracker
from ranvier.testing.ranks import run_processes, run_ranks
from tests.covering import chosen, examples
from tests.mpi import MPI
from tests.optim.test_gradients import spec

HERE = "tests.optim.test_reductions_in_flight"
MODEL = Transformer(num_layers=2, hidden=32, heads=2, vocab=512, sequence=8)


def tokens(world, count):
    generator = torch.Generator().manual_seed(world.rank)
    drawn = [torch.randint(MODEL.vocab, (1, MODEL.sequence + 1), generator=generator) for _ in range(count)]
    return [(each[:, :-1], each[:, 1:]) for each in drawn]


@pytest.fixture
def trackers(monkeypatch):
    """Thread -> tracker of the memory that reductions and gathers of parameters take."""
    found = {}

    def counting(method):
        def call(self, chunk, *tables):
            tracker = found.get(threading.get_ident())
            if tracker is None:
                return method(self, chunk, *tables)
            with tracker.category("reduction"):
                method(self, chunk, *tables)
            tracker.most = max(tracker.most, tracker.live.get(("device", "reduction"), 0))
        return call

    monkeypatch.setattr(Reductions, "widened_bytes", lambda self, scatter: 0)  # workspace while a sum is waited for
    monkeypatch.setattr(Reductions, "start", counting(Reductions.start))
    monkeypatch.setattr(FlatOptimizer, "_gather", counting(FlatOptimizer._gather))
    return found


@pytest.mark.parametrize(("precision", "options", "shard", "data", "bucket_size"), chosen([
    ("bf16", {}, False, 1, 1000), ("bf16", {"reduce_dtype": "fp32"}, True, 2, 10_000),
    ("bf16", {"accumulate": "half", "reduce_dtype": "fp32"}, False, 3, 1000)],
    [("bf16", {}), ("bf16", {"accumulate": "half"}), ("bf16", {"reduce_dtype": "fp32"}),
     ("bf16", {"accumulate": "half", "reduce_dtype": "fp32"}), ("fp32", {})],
    [False, True, True], [(1, 1000), (2, 1000), (2, 10_000), (3, 1000)]))
def test_memory_is_what_is_predicted(trackers, precision, options, shard, data, bucket_size):
    """With a peer that starts when all others have computed all their gradients: chunks of 4 and 40 kB and more."""
    if shard and data == 1:
        pytest.skip("there is nobody to share with")
    optim = Optim(bucket_size=bucket_size, chunk_buckets=2, shard=shard, offload="none", **options)
    run = ResolvedRun(mesh=Mesh(data=data), model=MODEL, precision=precision, optim=optim,
              batch=Batch(global_size=2 * data, microbatch_size=1))
    predicted = laid_out(run)[1][0].device
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    started = threading.Barrier(data)

    def rank(world):
        engine = Engine(gpt(MODEL, dtype=dtype), world, mesh=run.mesh, optim=optim, dtype=dtype)
        engine.train_batch(tokens(world, 2))
        engine.named_parameters()
        lasting = engine.memory()["device"]["reduction"]
        tracker = trackers[threading.get_ident()] = MemoryTracker()
        tracker.most = 0
        tracker.tag(engine.tensors()["device"]["reduction"], "reduction")
        started.wait()
        if world.rank == data - 1:
            time.sleep(0.3)
        with tracker:
            engine.train_batch(tokens(world, 2))
        engine.close()
        return lasting, tracker.most

    found = run_ranks(rank, data)
    assert max(most for _, most in found) == predicted["reduction"] + predicted["arriving"]
    for lasting, most in found:
        assert lasting == predicted["reduction"]
        assert most <= predicted["reduction"] + predicted["arriving"]
    assert data > 1 or predicted["reduction"] + predicted["arriving"] == 0


def summed(world, *, accumulate, travel, scatter, in_flight, delays, sizes, chunk=4, calls=None):
    """Check the sums of three batches. Each rank completes its chunks, of `chunk` elements for each member, in its own
    order."""
    group = world.backend.group("data", [list(range(world.size))])
    if calls is not None:
        for name in ("all_reduce", "reduce_scatter", "all_gather"):
            setattr(group, name, noted(name, getattr(group, name), calls[world.rank]))
    specs = [spec(str(number), number, size) for number, size in enumerate(sizes)]
    gradients = Gradients(specs, group, chunk * world.size, lambda complete: None, dtype=accumulate,
                          reduce_dtype=travel, in_flight=in_flight)
    for batch in range(3):
        gradients.begin(scatter=scatter)
        for one in specs:
            one.parameter.grad += (world.rank + 1) * (batch + 1)
        for number in range(len(specs)):
            time.sleep(delays[(world.rank + number + batch) % len(delays)])
            gradients.block_passed((number * (1, 5, 7)[world.rank % 3] + world.rank) % len(specs))
            gradients.progress()
        gradients.all_passed()
        gradients.wait()
    expected = torch.zeros(gradients.size)  # zero where chunks are padded
    for start, stop in gradients.places.values():
        expected[start:stop] = 3.0 * sum(range(1, world.size + 1))
    for one in gradients.chunks:
        start, stop = gradients.share_of(one)
        assert torch.equal(gradients.flat_slice(one, start, stop).float(), expected[start:stop])
    return True


def noted(name, call, calls):
    def collective(*args):
        calls.append((name, args[0].numel()))
        return call(*args)
    return collective


@examples(12)
@given(accumulate=st.sampled_from([torch.float32, torch.bfloat16]),
       travel=st.sampled_from([torch.float32, torch.bfloat16]), scatter=st.booleans(),
       in_flight=st.integers(2, 5), data=st.integers(2, 4),
       delays=st.lists(st.sampled_from([0.0, 0.0, 0.002]), min_size=1, max_size=5),
       sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_one_order_whoever_is_late(accumulate, travel, scatter, in_flight, data, delays, sizes):
    calls = [[] for _ in range(data)]
    run_ranks(lambda world: summed(world, accumulate=accumulate, travel=travel, scatter=scatter, in_flight=in_flight,
                                   delays=delays, sizes=sizes, calls=calls), data)
    assert all(one == calls[0] for one in calls), "replicas make the same calls in the same order"


def test_others_go_on_while_one_is_late():
    """Reductions overlap: the maximum number is started while a peer has started none."""
    late, begun = threading.Event(), [0, 0]

    def rank(world):
        group = world.backend.group("data", [[0, 1]])
        started = group.reduce_scatter

        def counting(*args):
            begun[world.rank] += 1
            if begun[world.rank] == MAX_COLLECTIVES and world.rank == 0:
                late.set()
            return started(*args)

        group.reduce_scatter = counting
        specs = [spec(str(number), number) for number in range(MAX_COLLECTIVES + 3)]
        gradients = Gradients(specs, group, 4, lambda complete: None)
        gradients.begin(scatter=True)
        if world.rank == 1:
            assert late.wait(30.0) and begun == [MAX_COLLECTIVES, 0]
        gradients.all_passed()
        gradients.wait()
        return begun[world.rank]

    assert run_ranks(rank, 2) == [MAX_COLLECTIVES + 3] * 2


def on_processes(world):
    for accumulate, travel, scatter in ((torch.float32, torch.bfloat16, False), (torch.bfloat16, torch.bfloat16, True),
                                        (torch.float32, torch.float32, True)):
        summed(world, accumulate=accumulate, travel=travel, scatter=scatter, in_flight=2,
               delays=[0.0, 0.02 * world.rank], sizes=[3, 40, 7, 20_000, 5, 1, 30_000], chunk=2000)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["torch", MPI])
def test_real_processes(transport):
    assert run_processes(f"{HERE}:on_processes", 3, transport) == [True] * 3


def test_the_memory_of_chunks_that_are_alike_is_counted_once(monkeypatch):
    """A rank of a large model has tens of thousands of chunks, of a few sizes."""
    of_chunk, group = SimpleNamespace(sent_to_owner=False, group=None), MetaGroup("data", 2)
    chunks = [Chunk(start=start, stop=start + size, specs=[of_chunk], share=(start, start + size // 2), group=group,
                    counts=True) for start, size in [*((8 * number, 8) for number in range(100)), (800, 4)]]
    counted, needs = [], Reductions._workspace_bytes
    monkeypatch.setattr(Reductions, "_workspace_bytes", lambda self, chunk,
                        scatter: counted.append(chunk.stop - chunk.start) or
                        needs(self, chunk, scatter))
    reductions = Reductions(chunks, dtype=torch.float32, reduce_dtype=torch.bfloat16, device=torch.device("cpu"),
                            in_flight=3)
    stays, passing = reductions.bytes(scatter=True)
    assert stays == 3 * sum(needs(reductions, chunks[0], True).values()) and passing == 0
    assert set(counted) == {8, 4} and len(counted) <= 4
