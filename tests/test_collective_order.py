"""Every wait for a collective in the package: with all waits there is no race; without any one there is a race.

One rank runs the package's code with groups whose other members do not exist (`tests.ordered_collectives`).
"""

import ast
import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from ranvier.config.run import Guard, Lora, Memory, Optim, Transformer
from ranvier.errors import RanvierError
from ranvier.mesh import Mesh
from ranvier.models.llama import llama
from ranvier.models.lora import with_adapters
from ranvier.pipeline.connections import ColumnParts
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.pipeline.same_on_ranks import SameRates, SameTargets
from ranvier.pipeline.statistics import BatchStatistics
from ranvier.planner import measure
from ranvier.schedule.spans import Timeline
from ranvier.tensor import layers
from ranvier.tensor.layers import rotary
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.split.layers import split_layers
from ranvier.tensor.weight_gradients import WeightGradients, root_of
from ranvier.train.metrics import Meter, PeakRate
from ranvier.world import World
from tests.ordered_collectives import LoneBackend, LoneStore
from tests.sources import nodes
from tests.stream_order import DEVICE, ROOT, OrderedCuda
from tests.tensor import test_families_gradients as families
from tests.tensor.split_parity import SCHEMES, tiny_gpt

ROOMS = ("comm", "elastic", "inference", "optim", "pipeline", "planner", "tensor", "train")
EXCEPTIONS = {
    ("comm/collectives.py", "self._all_gather(here.new_empty(len(self.ranks)), here).wait()"):
        "a barrier orders ranks, and no memory",
    ("optim/gradients.py", "chunk.work.wait()"): "of a batch that no step has followed; its statistics have waited"}
"""Waits that order no accesses, with the reason."""
_TABLE = "lookup tables on CPUs; tests/pipeline/test_touched_rows.py compares the bits"
_CALL = "calls a wait that is in a scenario"
_TOOL = "a tool of tests, with waits of its own"
OTHER = {
    ("comm/collectives.py", "self.wait()"): "the work is done",
    ("comm/nccl_transport.py", "require_work(dist.isend(first, group_dst=destination, group=channel)).wait()"):
        "communicators are built before the first step",
    ("comm/nccl_transport.py", "require_work(dist.irecv(first, group_src=source, group=channel)).wait()"):
        "communicators are built before the first step",
    ("elastic/transition.py",
     "group.all_to_all(found, own, [sizes[before] if other == before else 0 for other in range(size)],"):
        "on CPUs only, where the caller waits",
    ("comm/inprocess.py", "self._exchange.condition.wait()"): _TOOL,
    ("inference/generate.py", "ranks.broadcast(part, root=root).wait()"):
        "the next token, in host memory: tests/inference/test_generate_command.py",
    ("train/evaluation.py", "ranks.broadcast(chosen, root=ranks.ranks.index(root)).wait()"):
        "the next token, in host memory",
    ("train/metrics.py", "ranks.all_reduce(total).wait()"): "a number in host memory, before the first step",
    ("inference/evaluation.py", "ranks.all_reduce(found).wait()"): "before the first step",
    ("train/saving.py", "written = self.checkpoints.wait()"): "no collective: the thread that writes checkpoints",
    ("optim/step.py", "self.gradients.wait()"): _CALL, ("pipeline/engine.py", "self._updater.wait()"): _CALL,
    ("pipeline/shared_values.py", "self._updater.wait()"): _CALL,
    ("pipeline/shared_values.py", "self.wait()"): _CALL, ("pipeline/engine.py", "self._values.wait()"): _CALL,
    ("optim/reduction.py", 'group.all_reduce(self._touched, "max").wait()'): _TABLE,
    ("optim/reduction.py", "gathering.work.wait()"): _TABLE,
    ("pipeline/statistics.py", "self.work.wait()"): "the weight of all batches has been waited for",
    ("pipeline/engine.py", "self._statistics.work.wait()"):
        "after a prediction, numbers in host memory: tests/pipeline/test_written_ties.py",
    ("tensor/split/linear.py", "one.wait()"): "saved in vain: nobody reads it",
    ("tensor/overlapped_transfers.py", "self._work.wait()"): "sums that travel together, on CPUs only",
    ("tensor/split/linear.py", "self._add_gradients(dw.wait())"): "on one row, where nothing travels",
    ("tensor/split/stationary.py", "arriving.wait()"): "of a row without tokens, which computes nothing",
    ("tensor/overlapped_transfers.py", "arriving.wait()"): "tests/tensor/test_overlapped_transfers.py counts it"}
"""Calls that are named like a wait and are in no scenario."""


def world_of(cuda, size, rank=0):
    return World(backend=LoneBackend(cuda, size, rank), store=LoneStore(), launcher="test", device=DEVICE,
                 local_rank=rank, local_size=size)


# ---------------------------------------------------------------------- replicas

def squared(y, t):
    return ((y - t) ** 2).sum(), t.numel()


def replicas(*, dtype=torch.float32, train=Engine.train_batch, rank=0, model=lambda: nn.Sequential(
        nn.Linear(3, 2), nn.Linear(2, 2)), **options):
    """Two steps of two replicas. train: called with the engine and a batch."""
    optim = Optim(**{name: options.pop(name) for name in list(options) if name in Optim.__dataclass_fields__})

    def run(cuda):
        engine = Engine(model(), world_of(cuda, 2, rank), mesh=Mesh(data=2), loss=squared, dtype=dtype, optim=optim,
                        guard=Guard(bad_step="none"), **options)
        for _ in range(2):
            x, target = torch.ones(2, 3, device=DEVICE, dtype=dtype), torch.ones(2, 2, device=DEVICE)
            train(engine, [Microbatch(x, target, torch.arange(2))] * (1 if optim.update_in_backward else 2))
        engine.close()
    return run


def norms_by_layer(engine, batch):
    engine.watch_layers()
    engine.train_batch(batch)
    engine.layer_gradient_norms()


def in_two_batches(engine, batch):
    engine.forward_backward(batch)
    result = engine.forward_backward(batch)
    engine.step(result)
    assert result.weight > 0


def told(engine, batch):
    """The numbers of a step are reported a step later."""
    group = engine._connections.all
    Meter(Timeline(), group, torch.device("cpu")).step(1, engine.train_batch(batch), 0.1).event(
        1.0, PeakRate(1.0, None))


def asked_to_stop(engine, batch):
    meter = Meter(Timeline(), engine._connections.all, torch.device("cpu"))
    assert not meter.step(1, engine.train_batch(batch), 0.1).stop_requested


def asked_to_resize(engine, batch):
    meter = Meter(Timeline(), engine._connections.all, torch.device("cpu"))
    assert not meter.step(1, engine.train_batch(batch), 0.1).resize_requested


def compared(engine, batch):
    engine.train_batch(batch)
    engine.compare_replicas()


def with_whole_state(engine, batch):
    engine.train_batch(batch)
    engine.full_state_dict()


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.norm(x))


class FailsAtFirst(nn.Module):
    """A layer whose first backward fails while the gradient of the next layer is being summed."""

    def __init__(self):
        super().__init__()
        self.failed = False
        self.out = nn.Linear(3, 2)
        self.out.weight.register_hook(self.fail)

    def forward(self, x):
        return self.out(x)

    def fail(self, gradient):
        if not self.failed:
            self.failed = True
            raise ZeroDivisionError


def failed_batch(cuda):
    engine = Engine(nn.Sequential(FailsAtFirst(), nn.Linear(2, 2)), world_of(cuda, 2), mesh=Mesh(data=2), loss=squared,
                    optim=Optim(bucket_size=2, chunk_buckets=1))
    batch = [Microbatch(torch.ones(2, 3, device=DEVICE), torch.ones(2, 2, device=DEVICE), torch.arange(2))]
    with pytest.raises(ZeroDivisionError):
        engine.train_batch(batch)
    with pytest.raises(RanvierError):
        engine.train_batch(batch)
    engine.close()


MANY = {"bucket_size": 2, "chunk_buckets": 1, "model": lambda: nn.Sequential(nn.Linear(3, 9), nn.Linear(9, 2))}
"""More chunks than may be in progress at the same time."""


# ---------------------------------------------------------------------- rows and columns

def split(make, row, col, scheme, *, optim=None, batch=None, train=Engine.train_batch, **options):
    """Two steps on a mesh with two microbatches each; in the second the order of the weights is known."""
    settings = replace(SCHEMES[scheme], keep_weights=options.pop("keep_weights", False))
    panel_bytes = options.pop("panel_bytes", 1 << 20)

    def run(cuda):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ranvier.tensor.mesh.PANEL_BYTES", dict.fromkeys(("cpu", "cuda"), panel_bytes))
            steps(cuda)

    def steps(cuda):
        mesh = Mesh(row=row, col=col)
        engine = Engine(make(), world_of(cuda, mesh.size), mesh=mesh, dtype=torch.float64, tensor=settings,
                        optim=Optim(**optim or {}), guard=Guard(bad_step="none"), **options)
        for _ in range(2):
            ids = torch.arange(16).view(2, 8) % 7
            given = [Microbatch(ids, ids, torch.arange(2))] * 2 if batch is None else batch(mesh)
            train(engine, [Microbatch(*(tree_map(lambda one: one.to(DEVICE), value) for value in (
                one.inputs, one.targets)), one.samples) for one in given])
        engine.close()
    return run


def begun(cuda):
    """The last column builds its engine, and values of other columns are sent to it."""
    engine = Engine(gpt(), world_of(cuda, 2, 1), mesh=Mesh(col=2), dtype=torch.float64, tensor=SCHEMES["megatron"])
    for parameter in engine.parameters():
        parameter.detach().clone()
    engine.close()


def of_family(kind, row, col, scheme):
    return split(lambda: families.make(kind), row, col, scheme, batch=lambda mesh: families.batches_of(kind, mesh)[0])


def evaluated(engine, batch):
    """First a loss, then the full outputs; then ranks agree on a value."""
    assert engine.evaluate(batch).weight
    engine.predict([Microbatch(one.inputs, samples=one.samples) for one in batch])
    engine.agree(True)


def gpt(**changed):
    return tiny_gpt(hidden=12, heads=4, vocab=9, **changed)


def family(**changed):
    model = llama(Transformer(family="llama", num_layers=1, hidden=12, heads=4, kv_heads=2, head_dim=4, intermediate=8,
                              vocab=9, sequence=8, **changed), dtype=torch.float64)
    return replace(model, tied=())


def adapted(method="lora", **changed):
    return with_adapters(family(**changed), Lora(rank=2, targets=("attention.*", "mlp.*"), method=method))


def seen_by_a_hook(engine, batch):
    """A hook on a weight sees its full gradient."""
    handles = [one.register_hook(lambda gradient: gradient.clone()) for one in engine.parameters()]
    engine.train_batch(batch)
    for handle in handles:
        handle.remove()


class Gated(nn.Module):
    """A block's own code on columns: a replicated score next to split activations."""

    def __init__(self):
        super().__init__()
        self.token = layers.Embedding(7, 12)
        self.score = layers.ClassifierHead(12, 1, token=None)
        self.into, self.back = layers.Linear(12, 12, stationary="output"), layers.Linear(12, 12, stationary="input")
        self.classes = layers.ClassifierHead(12, 7, token=None)

    def forward(self, ids):
        x = self.token(ids)
        score = torch.sigmoid(self.score(x))
        return self.classes(x * score + self.back(self.into(x) * torch.cat([score] * 12, -1)))


class LastToken(nn.Module):
    """Classes of the last token, which another column has."""

    def __init__(self):
        super().__init__()
        self.token, self.classes = layers.Embedding(7, 12), layers.ClassifierHead(12, 7, token=-1)

    def forward(self, ids):
        return self.classes(self.token(ids))


class Convolved(nn.Module):
    """A convolution over tokens that columns share."""

    def __init__(self):
        super().__init__()
        self.token, self.convolution = layers.Embedding(7, 12), layers.DepthwiseConv1d(12, 3, over="stream")
        self.classes = layers.ClassifierHead(12, 7, token=-1)

    def forward(self, ids):
        return self.classes(self.convolution(self.token(ids)))


def first_loss(y, t):
    return functional.cross_entropy(y, t[:, 0], reduction="sum"), len(t)


def token_loss(y, t):
    return functional.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum"), t.numel()


def deferred(cuda):
    """A product is deferred with the gathered gradient that it needs; the input needs no gradient."""
    backend = world_of(cuda, 2).backend
    mesh = TensorMesh(backend.group("row", [[0], [1]]), backend.group("col", [[0, 1]]), SCHEMES["stationary"])
    layer = split_layers(layers.Linear(12, 12, stationary="input").to(DEVICE), mesh, "layer")
    layer.weight_gradients = WeightGradients(lambda parameters: [0], lambda chunks: None)
    layer.may_wait = True
    y = layer(torch.ones(2, 4, 6, device=DEVICE))
    dy = torch.ones_like(y)
    layer.weight_gradients.backward_pass(0, [root_of(y)], [dy], True)
    layer.weight_gradients.run(0, 0)


def in_parts(cuda):
    """A tensor whose parts were sent by columns is gathered."""
    world = world_of(cuda, 2)
    mesh = TensorMesh(world.backend.group("row", [[0], [1]]), world.backend.group("col", [[0, 1]]), SCHEMES["megatron"])
    parts = ColumnParts(mesh, Mesh(pipe=2, col=2), world)
    for whole in parts.gather({"x|part of 4 3": torch.ones(6, device=DEVICE)}).values():
        whole.add_(1)


# ---------------------------------------------------------------------- groups alone

def host_group(cuda):
    """Numbers, texts and large half-precision sums in host memory."""
    group = world_of(cuda, 2).backend.group("test", [[0, 1]])
    assert group.gather_objects("text") == ["text"] * 2 and group.gather_number(3) == [3, 3]
    group.barrier()
    for size in (8, 1 << 19):
        tensor = torch.ones(size, dtype=torch.bfloat16)
        work = group.all_reduce(tensor)
        work.done()
        work.wait()
        tensor.add_(1)


def between_two(cuda):
    """The seconds of an all-reduce between two ranks, measured in fewer rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "range", lambda count: range(min(count, 2)), raising=False)
        measure._collective(world_of(cuda, 2))


SCENARIOS = {
    "fp32": replicas(), "bf16": replicas(dtype=torch.bfloat16),
    "many chunks": replicas(dtype=torch.bfloat16, **MANY),
    "fp32 sums of bf16": replicas(dtype=torch.bfloat16, reduce_dtype="fp32", clip_norm=0.1, **MANY),
    "fp16": replicas(dtype=torch.float16),
    "sharded": replicas(shard=True, **MANY), "sharded muon": replicas(shard=True, algorithm="muon"),
    "sharded bf16": replicas(shard=True, dtype=torch.bfloat16, clip_norm=0.1, **MANY),
    "in the backward": replicas(update_in_backward=True),
    "in the backward, bf16": replicas(update_in_backward=True, dtype=torch.bfloat16),
    "in the backward, sharded": replicas(update_in_backward=True, dtype=torch.bfloat16, shard=True),
    "buffers": replicas(model=lambda: [WithBuffers()]),
    "averaged buffers": replicas(model=lambda: [WithBuffers()], buffers="average"),
    "norms by layer": replicas(train=norms_by_layer), "two batches": replicas(train=in_two_batches),
    "numbers of a step": replicas(train=told), "stop": replicas(train=asked_to_stop),
    "resize": replicas(train=asked_to_resize), "compared": replicas(train=compared),
    "failed batch": failed_batch,
    "whole state": replicas(train=with_whole_state, model=lambda: [WithBuffers()]),
    "whole state 2 x 2": split(gpt, 2, 2, "stationary", train=with_whole_state),
    **{f"gpt {row} x {col} {scheme}": split(gpt, row, col, scheme) for row, col, scheme in (
        (2, 1, "stationary"), (1, 2, "stationary"), (2, 2, "stationary"), (1, 2, "megatron"), (2, 2, "summa"),
        (1, 2, "sequence"), (2, 2, "stationary-sequence"))},
    "recomputed": split(gpt, 2, 2, "stationary", memory=Memory(recompute=1)),
    "llama 2 x 2": split(family, 2, 2, "stationary"), "llama sequence": split(family, 1, 2, "sequence"),
    "lora": split(adapted, 2, 2, "stationary"), "dora": split(lambda: adapted("dora"), 2, 2, "stationary"),
    "lora sequence": split(adapted, 1, 2, "sequence"),
    "lora megatron": split(adapted, 1, 2, "megatron"),
    "muon": split(gpt, 2, 2, "stationary", optim={"algorithm": "muon"}),
    "adafactor": split(gpt, 2, 2, "stationary", optim={"algorithm": "adafactor"}),
    "begun": begun, "keeps weights": split(gpt, 2, 2, "stationary", keep_weights=True),
    "deferred": deferred,
    "small panels": split(gpt, 2, 2, "stationary", panel_bytes=200),
    "small panels, sequence": split(gpt, 1, 2, "sequence", panel_bytes=200),
    "recomputed, sequence": split(gpt, 1, 2, "sequence", panel_bytes=200, memory=Memory(recompute=1)),
    "hooked": split(gpt, 2, 2, "stationary", train=seen_by_a_hook),
    "evaluated": split(gpt, 1, 2, "stationary", train=evaluated),
    "classes": of_family("classes", 1, 2, "stationary"), "classes, sequence": of_family("classes", 1, 2, "sequence"),
    "span": of_family("span", 1, 2, "sequence"),
    "gated": split(lambda: [Gated()], 1, 2, "stationary", loss=token_loss),
    "last token": split(lambda: [LastToken()], 1, 2, "sequence", loss=first_loss),
    "convolved": split(lambda: [Convolved()], 1, 2, "sequence", loss=first_loss),
    "in parts": in_parts, "host": host_group, "between two": between_two,
}


def run(name, left_out=None):
    """The waits for collectives that a scenario makes, and the first race or None."""
    rotary._tables.cache_clear()  # devices of another run do not exist in this one
    with OrderedCuda(devices=2, left_out=left_out) as cuda, pytest.MonkeyPatch.context() as patch:
        # the sum over all ranks is this rank's own number, while the check's factors should cancel out
        patch.setattr(SameTargets, "check", lambda self, sums: None)
        patch.setattr(SameRates, "check", lambda self, total, ranks: None)
        patch.setattr(BatchStatistics, "num_updates", property(lambda self: 0, lambda self, value: None), raising=False)
        SCENARIOS[name](cuda)
    return {site for site in cuda.sites if site[2] == 0}, cuda.races[0] if cuda.races else None


FEW = ("numbers of a step", "llama 2 x 2", "convolved", "host", "in the backward, bf16", "compared", "fp16",
       "averaged buffers", "in parts", "deferred", "evaluated", "gated", "in the backward, sharded", "between two",
       "gpt 2 x 2 summa", "lora sequence", "norms by layer", "whole state", "many chunks",
       "gpt 2 x 2 stationary-sequence", "sharded bf16", "dora", "recomputed, sequence", "hooked", "span", "muon",
       "whole state 2 x 2", "adafactor")
"""Scenarios that together reach every wait."""


def waits_in(names):
    """The waits of these scenarios; checks that none of them has a race."""
    found, seconds = {}, {}
    for name in names:
        began = time.perf_counter()
        found[name] = run(name)
        seconds[name] = time.perf_counter() - began
    assert not {name: race for name, (_, race) in found.items() if race}
    return {name: found[name][0] for name in sorted(found, key=seconds.__getitem__)}  # the fastest first


def waits_of(inside):
    """The lines of a file with a wait that has no time limit."""
    return {node.lineno for node in inside if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute) and node.func.attr == "wait" and not node.args}


def text_of(file, line):
    return (ROOT / file).read_text().splitlines()[line - 1].split("#")[0].strip()


def all_waits():
    return {(str(path.relative_to(ROOT)), line) for path, inside in nodes().items()
            if path.relative_to(ROOT).parts[0] in ROOMS for line in waits_of(inside)}


QUICK = ("convolved", "host", "in the backward, bf16", "compared", "fp16", "averaged buffers", "in parts", "deferred",
         "gated", "in the backward, sharded", "between two", "norms by layer", "whole state", "sharded bf16",
         "gpt 2 x 2 summa")


def test_waits_of_quick_scenarios_are_enough():
    """None of them has a race, and all exceptions are in the source."""
    reached = {(file, text_of(file, line)) for sites in waits_in(QUICK).values() for file, line, _ in sites}
    there = {(file, text_of(file, line)) for file, line in all_waits()}
    assert OTHER.keys() <= there and len(reached & there) > 20


@pytest.mark.slow
@pytest.mark.parametrize("names", [FEW, SCENARIOS], ids=["few", "all"])
def test_every_wait_for_a_collective_is_in_a_scenario(names):
    reached = {site[:2] for site in set().union(*waits_in(names).values())}
    missed = {(file, text_of(file, line)) for file, line in all_waits() - reached}
    assert missed == OTHER.keys()  # a wait that is reached must not be an exception


@pytest.mark.slow
def test_without_any_one_wait_for_a_collective_there_is_a_race():
    made, unnoticed = waits_in(SCENARIOS), {}
    for file, line in sorted(all_waits()):
        names = [name for name, sites in made.items() if (file, line, 0) in sites]
        if names and not any(run(name, left_out=(file, line, 0))[1] for name in names):
            unnoticed[file, line] = text_of(file, line)
    assert {(file, text) for (file, _), text in unnoticed.items()} == EXCEPTIONS.keys()
