"""Transfers during computation: which weight is gathered ahead, and when sums are added."""

import threading
from functools import partial

import pytest
import torch

from ranvier.comm.collectives import ChainedWork
from ranvier.config.run import Memory, Pipeline
from ranvier.config.run import TensorParallel as Settings
from ranvier.errors import RanvierError
from ranvier.mesh import Mesh
from ranvier.pipeline import connections
from ranvier.tensor.layers import Linear
from ranvier.tensor.mesh import TensorMesh
from ranvier.tensor.overlapped_transfers import Arriving, GradientSums, WeightGathers
from ranvier.tensor.quantized_weight import BLOCK, QuantizedWeight
from ranvier.tensor.split.layers import split_layers
from ranvier.tensor.weight_gradients import WeightGradients
from ranvier.tensor.workspace import Workspace
from tests.covering import chosen, quick
from tests.tensor.split_parity import (
    assert_parity,
    gradients_on,
    on_mesh,
    on_tensor_mesh,
    share,
    tiny_gpt,
    token_batches,
)


class Events(list):
    """Layers and sums whose collectives record when they start and when they are waited for."""

    def layer(self, name):
        return Layer(name, self)

    def sum(self, name):
        return Arriving(torch.zeros(1), Awaited(f"wait {name}", self))


class Awaited:
    def __init__(self, name, events, finish=lambda: None):
        self._name, self._events, self._finish = name, events, finish

    def wait(self):
        self._events.append(self._name)
        self._finish()


class Layer:
    weight_shape, weights = torch.Size((2, 3)), (torch.zeros(2, 3),)

    @property
    def weight_dtype(self):
        return self.weights[0].dtype

    def __init__(self, name, events):
        self._name, self._events = name, events

    def start_gather(self, buffer, kept):
        self._events.append(f"start {self._name} in {'memory of its own' if kept else buffer}")
        return Arriving(torch.zeros(1), Awaited(f"wait {self._name}", self._events))


def run(gathers, uses, layers, events, kept=()):
    events.clear()
    with gathers.one_pass(uses):
        for layer in layers:
            arriving = gathers.take(layer, kept=layer in kept)
            events.append("compute")
            arriving.wait()
    return list(events)


def test_the_next_weight_starts_before_this_product():
    events, gathers, uses = Events(), WeightGathers(), []
    a, b, c = map(events.layer, "abc")
    first = run(gathers, uses, [a, b, c], events)
    assert first == ["start a in 1", "compute", "wait a", "start b in 0", "compute", "wait b",
                     "start c in 1", "compute", "wait c"]
    second = run(gathers, uses, [a, b, c], events)
    assert second == ["start a in 0", "start b in 1", "compute", "wait a", "start c in 0", "compute", "wait b",
                      "compute", "wait c"]
    kept = run(gathers, [], [a, b], events, kept=[b])
    assert kept == ["start a in 1", "compute", "wait a", "start b in memory of its own", "compute", "wait b"]


def together(events, limit):
    """`WeightGathers` of up to `limit` elements, with 6 for a layer; the weights of "a b" arrive in one collective."""
    def gather(layers, buffer):
        names = " ".join(layer._name for layer in layers)
        events.append(f"start {names} in {buffer}")
        bundle = Arriving(torch.zeros(1), Awaited(f"wait {names}", events))
        return [Arriving(torch.zeros(1), bundle) for _ in layers]

    return WeightGathers(limit, gather)


def test_weights_that_follow_each_other_are_gathered_together():
    events, uses = Events(), []
    gathers, layers = together(events, limit=13), [events.layer(name) for name in "abcde"]
    run(gathers, uses, layers, events)
    assert run(gathers, uses, layers, events) == [
        "start a b in 0", "start c d in 1", "compute", "wait a b", "compute", "start e in 0", "compute", "wait c d",
        "compute", "compute", "wait e"]
    run(gathers, uses, layers, events, kept=layers[1:2])
    assert [event for event in run(gathers, uses, layers, events, kept=layers[1:2]) if "start" in event] == [
        "start a in 0", "start b in memory of its own", "start c d in 0", "start e in 1"]
    layers[2].weights = (torch.zeros(2, 3, dtype=torch.float64),)
    run(gathers, uses, layers, events)
    assert [event for event in run(gathers, uses, layers, events) if "start" in event] == [
        "start a b in 1", "start c in 0", "start d e in 1"]


@pytest.mark.parametrize("limit", [0, 13, 100])
@pytest.mark.parametrize("other", ["acb", "ab", "ba", "bbb", "abca", ""])
def test_a_pass_that_departs_from_the_last_one(other, limit):
    """Each gather starts before its weight is used; an unused gather is waited for before its memory is reused."""
    events, uses = Events(), []
    gathers, layers = together(events, limit), {name: events.layer(name) for name in "abc"}
    run(gathers, uses, layers.values(), events)
    run(gathers, uses, [layers[name] for name in other], events)
    assert [event for event in events if event == "compute"] == ["compute"] * len(other)
    in_flight = {}
    for event in events:
        if event.startswith("start"):
            names, _, buffer = event.removeprefix("start ").partition(" in ")
            assert buffer not in in_flight.values()
            in_flight[names] = buffer
        elif event.startswith("wait"):
            del in_flight[event.removeprefix("wait ")]
    assert not in_flight
    expected = other or "abc"  # a pass without layers leaves the order unchanged
    assert [use.layer for use in uses] == [layers[name] for name in expected]


def test_a_failed_pass_leaves_nothing():
    events, gathers, uses = Events(), WeightGathers(), []
    a, b = map(events.layer, "ab")
    run(gathers, uses, [a, b], events)
    with pytest.raises(ZeroDivisionError), gathers.one_pass(uses):
        gathers.take(a)
        _ = 1 / 0
    assert [event[:7] for event in run(gathers, uses, [a, b], events)[:3]] == ["start a", "start b", "compute"]


def test_sums_are_added_before_their_memory_is_used_again():
    events, sums = Events(), GradientSums(None, Workspace())
    for name in "abc":
        events.append(f"buffer {sums.next_buffer()}")
        sums.add(events.sum(name), lambda _, name=name: events.append(f"add {name}"))
        sums.call_after(lambda name=name: events.append(f"passed {name}"))
    assert events == ["buffer 1", "buffer 0", "wait a", "add a", "buffer 1"]  # "passed a" comes with the next sum
    sums.finish()
    assert events[5:] == ["passed a", "wait b", "add b", "passed b", "wait c", "add c", "passed c"]
    sums.call_after(lambda: events.append("at once"))
    assert events[-1] == "at once"
    sums.add(events.sum("d"), lambda _: events.append("add d"))
    sums.clear()
    sums.finish()
    assert events[-1] == "at once"


def test_small_sums_travel_together():
    """In the order of their products; a sum that does not fit starts the previous ones, a wait starts all so far."""
    def work(mesh):
        rows, shapes = mesh.num_rows, [(2, 3), (4,), (5, 2), (3, 4), (7,)]
        sent, scatter, space = [], mesh.over_rows.reduce_scatter, Workspace()
        mesh.over_rows.reduce_scatter = lambda out, tensor, buffer: (sent.append(out.numel())
                                                                     or scatter(out, tensor, buffer))
        sums, added = GradientSums(mesh.over_rows, space, 20), []

        def product(number, dtype=torch.float64):
            partial, total = sums.buffers(shapes[number], torch.empty(0, dtype=dtype))
            partial.copy_(torch.arange(partial.numel()).view(partial.shape) + 100 * number + 1000 * mesh.row)
            sums.add(sums.start(partial, total), lambda found: added.append((number, found.clone())))

        for number in (0, 1, 2, 3):  # 20 elements fit; 12 are more than half of that, and travel immediately
            product(number)
        assert sent == [12]
        product(4)  # does not fit with the first three
        product(1)
        assert sent == [12, 20] and not added
        product(0, torch.float32)  # in another number format, and in the memory of the first sums
        assert sent == [12, 20, 11] and [number for number, _ in added] == [0, 1, 2]
        sums.finish()
        sums.buffers(shapes[0], torch.empty(0, dtype=torch.float32))  # for partial sums that are added up on their row
        product(4)
        sums.finish()
        assert sent == [12, 20, 11, 6, 7]
        for number, found in added:
            size = found.numel()
            expected = sum(torch.arange(rows * size).view(rows, size)[mesh.row] + 100 * number + 1000 * row
                           for row in range(rows))
            assert torch.equal(found.flatten().double(), expected.double())
        assert [number for number, _ in added] == [0, 1, 2, 3, 4, 1, 0, 4]

    on_tensor_mesh(2, 1, Settings(), work)


@pytest.mark.parametrize("stationary", ["output", "input"])
def test_weights_are_sent_from_where_they_are(stationary):
    """A gather copies no weight of a layer, except this rank's part of a weight that travels transposed, which is in
    the workspace."""
    def work(mesh):
        layer = split_layers(Linear(12, 24, stationary=stationary), mesh, "layer")
        sent = []
        gather = mesh.over_rows.all_gather
        mesh.over_rows.all_gather = lambda output, tensor: sent.append(tensor) or gather(output, tensor)
        layer(torch.randn(2, 4, 6, requires_grad=True)).sum().backward()
        transposed = [buffer for (name, _), buffer in mesh.workspace._buffers.items() if name.startswith("own weight")]
        places = {"output": [one.data_ptr() for one in transposed], "input": [layer.weight.data_ptr()]}[stationary]
        assert len(sent) == 2 and all(one.data_ptr() in places and one.numel() == layer.weight.numel() for one in sent)

    on_tensor_mesh(2, 2, Settings(), work)


@pytest.mark.parametrize("weight_format", [None, "int8"])
def test_a_second_pass_gathers_weights_together(weight_format):
    """Weights in 8 bits are gathered in the number format of the values."""
    features, dtype = 6 * BLOCK, torch.bfloat16 if weight_format is None else torch.float32

    def work(mesh):
        into, back = (split_layers(layer.to(dtype), mesh, "layer") for layer in (
            Linear(features, 24, stationary="output"), Linear(24, features, stationary="input")))
        if weight_format is not None:
            into.weight = torch.nn.Parameter(QuantizedWeight.from_values(into.weight, weight_format),
                                             requires_grad=False)
        x, uses, sizes, found = torch.randn(2, 4, features // mesh.num_cols, dtype=dtype), [], [], []
        gather = mesh.over_rows.all_gather
        mesh.over_rows.all_gather = lambda output, tensor: sizes.append(output.numel()) or gather(output, tensor)
        for _ in range(3):
            with mesh.one_pass(uses), torch.no_grad():
                found.append(back(into(x)))
        one = features * 24 // mesh.num_cols
        assert sizes == [one, one, 2 * one, 2 * one] and all(torch.equal(found[0], y) for y in found[1:])
        expected = {(f"{name} {buffer}", dtype): 2 * one * dtype.itemsize // parts for buffer in (0, 1)
                    for name, parts in (("weight", 1), ("own weights", mesh.num_rows))}
        assert mesh.bundle_sizes(uses) == expected and expected.items() <= mesh.workspace.sizes().items()

    for rows, cols in ((2, 1), (3, 1), (2, 2)):
        on_tensor_mesh(rows, cols, Settings(), work)


@pytest.mark.parametrize("stationary", ["output", "input"])
def test_a_gather_may_end_while_it_is_saved(stationary):
    """Collectives between threads write at any time; autograd allows no write while a hook packs a saved tensor."""
    def work(mesh):
        layer, pending = split_layers(Linear(12, 24, stationary=stationary), mesh, "layer"), []
        layer.recomputed = True
        for group in (mesh.over_rows, mesh.over_cols):
            group.all_gather = partial(late_gather, group.all_gather, pending)

        def pack(tensor):
            while pending:
                pending.pop()()
            return tensor

        x = torch.randn(2, 4, 6, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(x).sum().backward()
        assert not pending and x.grad.isfinite().all()

    def late_gather(gather, pending, output, tensor, dim=0, buffer=None):
        whole = torch.empty_like(output)
        gather(whole, tensor, dim).wait()
        pending.append(lambda: output.copy_(whole))
        return Awaited("", Events(), finish=lambda: [write() for write in pending] and pending.clear())

    on_tensor_mesh(2, 2, Settings(), work)


# ---------------------------------------------------------------------- on a mesh where nothing arrives on its own

class Late:
    """A group whose collectives write their results, and read their operands, when they are waited for; until then the
    results are NaN. Only for `fp64` activations and weights; counts and texts use the group's collectives directly.
    """

    def __init__(self, group):
        self._group = group

    def __getattr__(self, name):
        return getattr(self._group, name)

    def all_gather(self, output, tensor, dim=0, buffer=None):
        return self._late(output, lambda into: self._group.all_gather(into, tensor, dim), torch.empty_like)

    def reduce_scatter(self, output, tensor, buffer=None, dim=0):
        return self._late(output, lambda into: self._group.reduce_scatter(into, tensor, dim=dim), torch.empty_like)

    def all_reduce(self, tensor, op="sum"):
        return self._late(tensor, lambda into: self._group.all_reduce(into, op), torch.clone)

    def _late(self, output, start, memory):
        if not output.is_floating_point():
            return start(output)
        into = memory(output)
        work = start(into)
        output.fill_(torch.nan)
        return ChainedWork(work, lambda: output.copy_(into))


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(connections, "TensorMesh", lambda over_rows, over_cols, *args, **options: TensorMesh(
        Late(over_rows), Late(over_cols), *args, **options))


@pytest.mark.parametrize(("mesh", "scheme", "options", "tied"), chosen([
    (Mesh(col=2), "sequence", {}, True),
    (Mesh(pipe=2, row=2), "stationary", {"pipeline": Pipeline(defer_bytes=1 << 40)}, True)], [
    (mesh, scheme, options)
    for mesh, scheme in [(Mesh(row=2, col=2), "stationary"), (Mesh(col=2), "sequence"),
                         (Mesh(pipe=2, row=2), "stationary")]
    for options in [{}, {"memory": Memory(recompute=1)}, {"pipeline": Pipeline(defer_bytes=1 << 40)}]],
    [False, True]), ids=str)
def test_nothing_is_used_before_it_has_arrived(late, monkeypatch, mesh, scheme, options, tied):
    """Also in the second batch, in which weights are gathered ahead, and in panels of a few tokens."""
    monkeypatch.setattr("ranvier.tensor.mesh.PANEL_BYTES", {"cpu": 600})
    make, batches = partial(tiny_gpt, num_layers=2, tied=tied, dropout=0.0), token_batches(mesh, count=3)

    def before(engine):
        engine.forward_backward(share(engine, token_batches(mesh, count=3, seed=1)))
        engine.zero_grad()

    assert_parity(make, batches, mesh, scheme=scheme, also=before, **options)


@pytest.mark.parametrize("mesh", quick(1, [Mesh(row=2), Mesh(row=2, col=2)]), ids=str)
def test_tied_gradients_have_one_order_of_additions(mesh):
    """Whether or not other products are deferred: sums for weights that two modules share are not added late."""
    batches = token_batches(mesh, count=3)
    make = partial(tiny_gpt, num_layers=2, tied=True)
    now, later = (gradients_on(make, batches, mesh, pipeline=Pipeline(defer_bytes=size)).gradients
                  for size in (0, 1 << 40))
    assert all(torch.equal(now[name], later[name]) for name in now)


def test_sums_of_a_failed_batch_are_forgotten(late, monkeypatch):
    """A sum that is pending when a deferred product fails is added to no gradient; the engine refuses to continue."""
    run, begun = WeightGradients.run, threading.local()

    def fails(gradients, microbatch, product):
        begun.products = getattr(begun, "products", 0) + 1
        if begun.products == 2:
            begun.under_way = len(begun.sums._line)
            raise ZeroDivisionError
        run(gradients, microbatch, product)

    def work(engine):
        begun.sums = engine._connections.tensor_mesh.sums
        with pytest.raises(ZeroDivisionError):
            engine.forward_backward(share(engine, token_batches(mesh, count=3)))
        assert begun.under_way > 0
        assert len(begun.sums._line) == 0
        with pytest.raises(RanvierError) as caught:
            engine.forward_backward(share(engine, token_batches(mesh, count=3)))
        assert caught.value.where == "Engine.forward_backward" and "ZeroDivisionError" in caught.value.what

    mesh = Mesh(row=2)
    monkeypatch.setattr(WeightGradients, "run", fails)
    on_mesh(partial(tiny_gpt, num_layers=2, dropout=0.0), mesh, work, pipeline=Pipeline(defer_bytes=1 << 40))
