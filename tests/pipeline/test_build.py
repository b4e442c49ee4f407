"""From a model to a rank's blocks: the table of stages, the same start on every mesh, and what an engine shows."""

from collections import UserDict
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from ranvier.block import Initial, Model, meta_device
from ranvier.config.run import Pipeline
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import microbatches
from ranvier.plan.cut import cut
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference
from tests.errors import raises
from tests.pipeline.parity import SEED, chain, frozen, on_mesh, points, share, small_gpt, squared


def test_the_table_of_stages():
    """Parameters that a stage holds twice count once; numbers have separators; cost is a share."""
    blocks = {"embedding": partial(nn.Linear, 11, 15), "layer0.attention": partial(nn.Linear, 5, 10),
              "layer0.mlp": lambda: nn.Sequential(nn.Linear(15, 11), nn.Linear(9, 4)), "tail": partial(nn.Linear, 4, 5),
              "more": partial(nn.Linear, 4, 5), "head": partial(nn.Linear, 3, 5)}
    tied = (("tail.weight", "more.weight"), ("tail.bias", "more.bias"))
    model = frozen(Model(blocks=blocks, loss=squared, tied=tied),
                   lambda name: name.startswith(("embedding", "layer0.attention", "layer0.mlp.0")))
    table, layout = cut(model, Mesh(pipe=3), boundaries=(2, 3), how="cost", sample=None, dtype=torch.float32,
                        device="cpu")
    rows = str(table).splitlines()
    assert rows[0] == "stage  blocks  parameters  trainable   cost  from .. to"
    assert [row.split()[:4] for row in rows[1:]] == [["0", "2", "240", "0"], ["1", "1", "216", "40"],
                                                     ["2", "3", "45", "45"]]
    assert [row.split()[5:] for row in rows[1:]] == [["embedding", "..", "layer0.attention"], ["layer0.mlp"],
                                                     ["tail", "..", "head"]]
    assert sum(row.cost for row in table.rows) == pytest.approx(1.0)
    assert layout.boundaries == table.boundaries == (2, 3)


def test_large_numbers_have_separators():
    model = chain(partial(nn.Linear, 1000, 1234), partial(nn.Linear, 2, 2))
    table, _ = cut(model, Mesh(pipe=2), boundaries=None, how="cost", sample=None, dtype=torch.float32, device="cpu")
    assert str(table).splitlines()[1] == "    0       1   1,235,234  100.0%  b0"


@pytest.mark.parametrize(("how", "expected"), [("cost", (3,)), ("uniform", (2,))])
def test_the_cut_follows_costs_or_numbers(how, expected):
    model = chain(*[partial(nn.Linear, 4, 4)] * 3, partial(nn.Linear, 4, 40))
    sample = torch.zeros(8, 4), torch.zeros(8, 40)
    table, _ = cut(model, Mesh(pipe=2), boundaries=None, how=how, sample=sample, dtype=torch.float32, device="cpu")
    assert table.boundaries == expected
    assert [cost.flops for cost in table.costs] == [2 * 8 * 16] * 3 + [2 * 8 * 160]


def test_a_sample_checks_the_chain():
    with raises("block-refuses-input", "b1", "b0"):
        on_mesh(lambda: chain(partial(nn.Linear, 4, 5), partial(nn.Linear, 4, 4)), Mesh(pipe=2), lambda engine: None,
                sample=points([[2]])[0][0])


def test_a_ready_made_model_is_not_moved_by_looking_at_it():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)

    def rank(world):
        return Engine([first, second], world, mesh=Mesh(), loss=squared, sample=points([[2]])[0][0],
                      dtype=torch.float64)._stages.blocks

    blocks, = run_ranks(rank, 1)
    assert blocks[0][2] is first and first.weight.dtype == torch.float64 and first.weight.device.type == "cpu"


# ---------------------------------------------------------------------- the start

@pytest.mark.parametrize("mesh", [Mesh(pipe=8), Mesh(data=2, pipe=3), Mesh(data=3)], ids=str)
@pytest.mark.parametrize("make", [small_gpt, lambda: chain(*[partial(nn.Linear, 4, 4)] * 8)], ids=["gpt", "linears"])
def test_every_mesh_starts_from_the_same_weights(make, mesh):
    reference = Reference(make(), seed=SEED, dtype=torch.float64)
    found = on_mesh(make, mesh, lambda engine: {name: parameter.detach().clone() for name, parameter in
                                                engine.named_parameters().items()})
    for parameters in found:
        assert all(torch.equal(value, reference.parameters[name]) for name, value in parameters.items())
    assert {name for parameters in found for name in parameters} == set(reference.parameters)


def test_other_seeds_and_constants():
    model = Model(blocks={"a": partial(nn.Linear, 50, 40)}, loss=squared, initial=lambda name: Initial(
        "normal" if name.endswith("weight") else "constant", 0.5 if name.endswith("weight") else 7.0))

    def rank(world):
        return [Engine(model, world, mesh=Mesh(), seed=seed).named_parameters() for seed in (1, 1, 2)]

    (one, same, other), = run_ranks(rank, 1)
    assert torch.equal(one["a.weight"], same["a.weight"]) and not torch.equal(one["a.weight"], other["a.weight"])
    assert one["a.weight"].detach().std() == pytest.approx(0.5, rel=0.05) and (one["a.bias"] == 7.0).all()


class Odd(nn.Module):
    """A weight that is not contiguous, and buffers of several dtypes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4).t())
        self.register_buffer("shift", torch.randn(6))
        self.register_buffer("mask", torch.rand(6) < 0.5)
        self.register_buffer("count", torch.randint(0, 100, ()))

    def forward(self, x):
        return (x @ self.weight + self.shift) * self.mask


def test_replicas_start_alike_where_nobody_seeds():
    """They get replica 0's values, buffers included."""
    models = [[Odd(), nn.Linear(6, 4)] for _ in range(4)]
    kept = {name: tensor.clone() for name, tensor in models[0][0].state_dict().items()}

    def rank(world):
        engine = Engine(models[world.rank], world, mesh=Mesh(data=2, pipe=2), loss=squared,
                        pipeline=Pipeline(boundaries=(1,)))
        return {name: tensor.clone() for name, tensor in engine._stages.blocks[0][2].state_dict().items()}

    found = run_ranks(rank, 4)
    for stage in (0, 1):
        assert all(torch.equal(value, found[2 + stage][name]) for name, value in found[stage].items())
    assert all(torch.equal(value, found[2][name]) for name, value in kept.items())


# ---------------------------------------------------------------------- what an engine shows

def test_what_each_rank_holds_and_needs():
    mesh = Mesh(data=2, pipe=3)
    found = on_mesh(lambda: chain(*[partial(nn.Linear, 4, 4)] * 6), mesh, lambda engine: (
        engine.is_first_stage, engine.is_last_stage, engine.boundaries, list(engine.named_parameters()),
        len(engine.parameters())))
    assert [one[:2] for one in found] == [(True, False), (False, False), (False, True)] * 2
    assert {one[2] for one in found} == {(2, 4)} and {one[4] for one in found} == {4}
    assert sorted(found[1][3]) == ["b2.bias", "b2.weight", "b3.bias", "b3.weight"]


def test_counters_and_the_timeline():
    def work(engine):
        for _ in range(2):
            engine.forward_backward(share(engine, points([[2, 2], [2]])))
        spans = engine.timeline.take()
        return engine.counters(), [(span.category, span.label, span.step) for span in spans if span.category != "wait"]

    counters, spans = zip(*on_mesh(lambda: chain(*[partial(nn.Linear, 4, 4)] * 4), Mesh(data=2, pipe=2), work,
                                   pipeline=Pipeline(policy="gpipe")), strict=True)
    assert all(one["bytes_sent"] > 0 and one["longest_gap_seconds"] >= 0.0 for one in counters)
    # two batches of two microbatches [2, 4] in fp64; two chunks' worth of 40 parameters
    assert [one["bytes_received_by_axis"] for one in counters[:2]] == [{"pipe": 2 * 2 * 64, "data": 2 * 40 * 8}] * 2
    step = [("forward", "F0"), ("forward", "F1"), ("backward", "B0"), ("backward", "B1"), ("reduce", "average"),
            ("optimizer", "norm")]
    assert spans[0] == [(category, label, number) for number in (1, 2) for category, label in step]


def test_close_twice():
    def work(engine):
        engine.close()
        return True

    assert on_mesh(lambda: chain(*[partial(nn.Linear, 4, 4)] * 2), Mesh(pipe=2), work) == [True, True]


# ---------------------------------------------------------------------- microbatches

def test_microbatches_cut_along_the_batch():
    inputs = {"x": torch.arange(10).view(5, 2), "more": [torch.arange(5), "kept"]}
    parts = microbatches(inputs, torch.arange(5), 2, torch.arange(5) + 10)
    assert [len(part.targets) for part in parts] == [2, 2, 1]
    assert torch.equal(parts[2].inputs["x"], torch.tensor([[8, 9]])) and parts[1].inputs["more"][1] == "kept"
    assert parts[1].samples.tolist() == [12, 13]
    assert microbatches(torch.zeros(0, 2), torch.zeros(0), 3) == []
    other, = microbatches(UserDict(x=torch.ones(2)), torch.zeros(2), 2)  # as tokenizers of transformers return
    constants = {"x": torch.ones(4), "size": (2, 2, 2, 2), "layers": [1, 2], "mode": "a"}
    for one in microbatches(constants, torch.ones(4), 2):
        assert {**one.inputs, "x": None} == {**constants, "x": None} and len(one.inputs["x"]) == 2
    assert type(other.inputs) is dict and torch.equal(other.inputs["x"], torch.ones(2))


@pytest.mark.parametrize(("arguments", "error"), [
    ((torch.zeros(4), torch.zeros(5), 2), ("batch-not-in-dim-0", 4, 5)),
    ((torch.zeros(4), torch.zeros(()), 2), ("batch-not-in-dim-0",)),
    ((torch.zeros(4), {"label": numpy.zeros(4)}, 2), ("batch-of-arrays", "ndarray")),
    (([[0.0], [1.0]], [[1], [2]], 2), ("batch-of-arrays", "list")),
    ((torch.zeros(4), [1, 0, 1, 0], 2), ("batch-of-arrays", "list")),
    (({"x": torch.zeros(4), "lengths": [3, 1, 2, 2]}, torch.zeros(4), 2), ("batch-of-arrays", "list")),
    ((torch.zeros(4), UserDict(y=torch.zeros(4)), 2), ("batch-of-arrays", "UserDict")),
    ((torch.zeros(4), {"y": SimpleNamespace(labels=torch.zeros(4))}, 2), ("batch-of-arrays", "SimpleNamespace")),
    ((torch.zeros(4), torch.zeros(4), 0), ("microbatch-size", 0)),
    ((torch.zeros(4), torch.zeros(4), 2.5), ("microbatch-size", 2.5)),
    ((torch.zeros(4), torch.zeros(4), torch.ones(2)), ("microbatch-size",)),
    ((torch.zeros(4), torch.zeros(4), 2, torch.zeros(3)), ("batch-not-in-dim-0",)),
])
def test_what_cannot_be_cut(arguments, error):
    with raises(*error):
        microbatches(*arguments)


def test_blocks_without_storage_get_no_initial_values_and_others_do():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.linear = nn.Embedding(3, 4), nn.Linear(4, 4)
            self.start = torch.empty(5, device="cpu").normal_()
            nn.init.trunc_normal_(self.linear.weight)
            nn.init.zeros_(self.linear.bias)

    torch.manual_seed(0)
    expected, before = torch.empty(5).normal_(), torch.manual_seed(0).get_state()
    with meta_device():
        torch.nn.Embedding(3, 4)
        assert torch.equal(torch.get_rng_state(), before)
        block = Own()
    assert {name: (parameter.device.type, parameter.shape) for name, parameter in block.named_parameters()} == {
        "table.weight": ("meta", (3, 4)), "linear.weight": ("meta", (4, 4)), "linear.bias": ("meta", (4,))}
    assert all(parameter.requires_grad for parameter in block.parameters())
    assert torch.equal(block.start, expected)
