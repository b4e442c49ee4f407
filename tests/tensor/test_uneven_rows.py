"""Rows with different numbers of tokens, or with none, are exact: no collective depends on the number."""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from ranvier.block import Model
from ranvier.comm import inprocess
from ranvier.comm.board import Board
from ranvier.config.run import Memory, Optim, Pipeline, TensorParallel, Transformer
from ranvier.errors import MessageTimeout, ModelError, RanvierError
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.pipeline import connections
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor import layers
from ranvier.testing import check_split
from ranvier.testing.ranks import run_processes
from ranvier.testing.reference import Reference
from ranvier.testing.split import MESHES
from ranvier.world import World
from tests.covering import chosen
from tests.errors import raises
from tests.mpi import NEEDS_MPI
from tests.tensor.split_parity import SCHEMES, SEED, assert_close, gradients_on, on_mesh, share, weights_of

HIDDEN, LENGTH = 12, 6
ODD, EVEN = torch.tensor([1, 3, 5, 7, 9, 11]), torch.tensor([2, 4, 5, 8, 10, 12])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = layers.Embedding(20, HIDDEN)

    def forward(self, ids):
        return {"x": self.token(ids), "ids": ids}


class Experts(nn.Module):
    """Each token goes to one of two experts by its ID; skips: an expert without tokens is not called."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.skips = skips
        self.norm = layers.RMSNorm(HIDDEN)
        self.into = nn.ModuleList(layers.Linear(HIDDEN, 24, stationary="output") for _ in range(2))
        self.out = nn.ModuleList(layers.Linear(24, HIDDEN, stationary="input") for _ in range(2))

    def forward(self, state):
        tokens, expert = state["x"].flatten(0, 1), state["ids"].flatten() % 2
        y = torch.zeros_like(tokens)
        for number in range(2):
            mine = (expert == number).nonzero().squeeze(1)
            if self.skips and not len(mine):
                continue
            inner = functional.silu(self.into[number](self.norm(tokens[mine])))
            y = y.index_add(0, mine, self.out[number](inner))
        return {"x": state["x"] + y.unflatten(0, (-1, LENGTH)), "ids": state["ids"]}


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classes = layers.ClassifierHead(HIDDEN, 3)

    def forward(self, state):
        return self.classes(state["x"])


def class_loss(scores, targets):
    return functional.cross_entropy(scores, targets, reduction="sum"), len(targets)


@pytest.mark.parametrize("ids", [
    pytest.param(torch.stack([ODD, EVEN, EVEN, EVEN + 2]), id="different numbers"),
    pytest.param(torch.stack([EVEN, ODD + 1, ODD, ODD]), id="experts that one row does not need"),
    pytest.param(torch.stack([ODD, EVEN, EVEN + 1]), id="more samples in one row"),
    pytest.param(ODD[None], id="a row without samples")])
@pytest.mark.parametrize(("meshes", "count"), [
    ([(2, 2)], 2), pytest.param(MESHES, 9, marks=pytest.mark.slow)], ids=["2 x 2", "all"])
def test_routed_tokens(ids, meshes, count):
    """A row without tokens for an expert once paired one weight's collectives with another's."""
    outcomes = check_split([Words(), Experts(), Classes()], (ids, ids[:, 0] % 3), loss=class_loss,
                           schemes=["stationary", "summa", "megatron"], meshes=meshes)
    assert [one.status for one in outcomes] == ["agrees"] * count


@pytest.mark.parametrize(("meshes", "agree"), [
    ([(2, 2)], 3), pytest.param([(2, 1), (2, 2), (2, 3)], 8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [pytest.param(3, marks=pytest.mark.slow), 1])
def test_rows_share_a_microbatch_unevenly(count, meshes, agree):
    """Embeddings, attention, norms, dropout and the split loss; with a single sample, one of 2 rows has none."""
    config = Transformer(num_layers=1, hidden=36, heads=6, vocab=31, sequence=6, dropout=0.1)
    ids = torch.randint(0, 31, (count, 7), generator=torch.Generator().manual_seed(0))
    outcomes = check_split(gpt(config), (ids[:, :-1], ids[:, 1:]), meshes=meshes)
    assert [one.status for one in outcomes] == ["agrees"] * agree


def routed(skips: bool = False) -> Model:
    generator = torch.Generator().manual_seed(1)
    blocks = {"words": Words(), "first": Experts(skips), "second": Experts(skips), "classes": Classes()}
    for block in blocks.values():
        block.double()
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return Model(blocks={name: (lambda block=block: block) for name, block in blocks.items()}, loss=class_loss)


BATCHES = [[Microbatch(ids, ids[:, 0] % 3, torch.arange(2) + 10 * number) for number, ids in enumerate(
    (torch.stack([ODD, EVEN]), torch.stack([EVEN, EVEN + 2]), torch.stack([EVEN - 1, EVEN + 1])))]]


@pytest.mark.parametrize(("keep", "checkpoint", "defer_bytes", "pipe"), chosen(
    [(True, "none", 1 << 40, 2)], [False, True], ["none", 1], [(0, 1), (1 << 40, 1), (1 << 40, 2)]))
def test_in_the_engine(keep, checkpoint, defer_bytes, pipe):
    """With recomputation, kept weights and deferred weight gradients, all rows run the same number of collectives."""
    outcome = gradients_on(routed, BATCHES, Mesh(pipe=pipe, row=2, col=2), settings=TensorParallel(keep_weights=keep),
                           memory=Memory(recompute=checkpoint), pipeline=Pipeline(defer_bytes=defer_bytes))
    reference = Reference(copy.deepcopy(routed()), seed=SEED, dtype=torch.float64)
    reference.forward_backward(BATCHES[0])
    assert_close(outcome.gradients, reference.gradients())


@pytest.mark.parametrize("defer_bytes", [0, 1 << 40])
def test_kept_weights_that_the_last_microbatch_does_not_use(defer_bytes):
    """The gradients of earlier microbatches are still summed over rows."""
    even, mixed = torch.arange(2, 14, 2), torch.tensor([3, 4, 6, 8, 9, 12])
    batches = [[Microbatch(ids, ids[:, 0] % 3, torch.arange(2) + 10 * number) for number, ids in enumerate(
        (torch.stack([mixed, mixed + 1]), torch.stack([mixed, mixed + 2]), torch.stack([even, even])))]]

    outcome = gradients_on(partial(routed, skips=True), batches, Mesh(row=2, col=2),
                           settings=TensorParallel(keep_weights=True), pipeline=Pipeline(defer_bytes=defer_bytes))
    reference = Reference(routed(skips=True), seed=SEED, dtype=torch.float64)
    reference.forward_backward(batches[0])
    assert_close(outcome.gradients, reference.gradients())


def test_a_batch_that_failed_lets_go_of_kept_weights():
    """The engine also refuses to continue."""
    def work(engine):
        *others, last = share(engine, BATCHES)
        clear, kept = engine._stages.clear, []

        def clearing():
            kept.extend(engine._stages.gathered_weights())
            clear()

        engine._stages.clear = clearing
        with pytest.raises(IndexError):
            engine.forward_backward([*others, replace(last, targets=last.targets + 99)])
        assert kept and not engine._stages.gathered_weights() and not engine._stages.first._graphs
        with pytest.raises(RanvierError) as caught:
            engine.forward_backward([*others, last])
        assert caught.value.where == "Engine.forward_backward" and "IndexError" in caught.value.what

    on_mesh(routed, Mesh(row=2, col=2), work, settings=TensorParallel(keep_weights=True))


def test_a_layer_that_one_row_leaves_out_is_named():
    ids = torch.stack([ODD, EVEN - 1, EVEN * 0 + 4, EVEN * 0 + 2])
    with raises("split-refused", "1.norm") as caught:
        check_split([Words(), Experts(skips=True), Classes()], (ids, ids[:, 0] % 3), loss=class_loss, meshes=[(2, 2)],
                    schemes=["stationary"])
    assert "the end of block 1" in str(caught.value) and "x[:0]" in str(caught.value)


def test_the_engine_names_it_too():
    def make():
        model = routed()
        model.blocks["first"]().skips = True
        return model

    with raises("layer-called-on-some"):
        on_mesh(make, Mesh(row=2), lambda engine: engine.forward_backward(share(engine, BATCHES)), check_order=True)


class OneExpert(Experts):
    """A row calls one expert, chosen by its first token; the collectives of different experts pair without an error."""

    def forward(self, state):
        tokens, number = state["x"].flatten(0, 1), int(state["ids"].flatten()[0]) % 2
        y = self.out[number](functional.silu(self.into[number](self.norm(tokens))))
        return {"x": state["x"] + y.unflatten(0, (-1, LENGTH)), "ids": state["ids"]}


def one_expert() -> Model:
    blocks = {"words": Words(), "first": OneExpert(), "classes": Classes()}
    return Model(blocks={name: (lambda block=block: block.double()) for name, block in blocks.items()}, loss=class_loss)


def refused(batches, mesh: Mesh, make=one_expert, **options) -> list[Exception]:
    """The error that every rank raises instead of updating."""
    def work(engine):
        before = weights_of(engine)
        with pytest.raises(Exception) as caught:
            engine.train_batch(share(engine, batches))
        assert all(torch.equal(value, engine.blocks[name.partition(".")[0]].get_parameter(name.partition(".")[2]))
                   for name, value in before.items())
        engine.abandon()
        return caught.value

    return on_mesh(make, mesh, work, **{"optim": Optim()} | options)


FIRST_DIFFERS = [[Microbatch(torch.stack([ODD, EVEN]), torch.tensor([0, 1]), torch.arange(2))]]
ORDER_DIFFERS = [[*FIRST_DIFFERS[0], Microbatch(torch.stack([EVEN, ODD]), torch.tensor([2, 1]), torch.arange(2) + 10)]]


@pytest.mark.parametrize(("mesh", "scheme", "options"), [
    (Mesh(row=2, col=2), "summa", {}), (Mesh(row=3), "stationary", {}),
    (Mesh(row=2), "stationary", {"optim": Optim(update_in_backward=True)}),
    (Mesh(row=2, col=2), "stationary", {"pipeline": Pipeline(defer_bytes=1 << 40)}),
    (Mesh(row=2), "stationary", {"memory": Memory(recompute=1)}),
    (Mesh(row=2), "stationary", {"settings": TensorParallel(keep_weights=True)})])
def test_layers_that_rows_call_in_different_number_are_named_before_the_update(mesh, scheme, options):
    """The fault that this notices: weights and gradients of different experts were combined, and nothing failed."""
    batches = FIRST_DIFFERS
    if mesh.row == 3:
        batches = [[Microbatch(torch.stack([ODD, EVEN, EVEN + 2]), torch.tensor([0, 1, 2]), torch.arange(3))]]
    for error in refused(batches, mesh, scheme=scheme, **options):
        assert isinstance(error, ModelError)
        assert error.where.startswith("block first.into.")
        assert min(error.value.values()) == 0 < max(error.value.values())
        assert set(error.value) == set(range(mesh.row))


def test_layers_that_rows_call_in_another_order_are_found():
    for error in refused(ORDER_DIFFERS, Mesh(row=2)):
        assert isinstance(error, ModelError)
        assert "order" in error.what


def test_an_evaluation_finds_them_too():
    def work(engine):
        with pytest.raises(ModelError) as caught:
            engine.evaluate(share(engine, FIRST_DIFFERS))
        engine.abandon()
        return caught.value.where

    assert all(where.startswith("block first.into.") for where in on_mesh(one_expert, Mesh(row=2), work))


def test_the_report_of_a_collective_that_does_not_end_has_the_layer_and_pass_of_each_row(monkeypatch):
    """Row 1 hangs before its product, and row 0 waits for it until the time limit."""
    ended = threading.Event()

    class Hangs(OneExpert):
        def forward(self, state):
            if int(state["ids"].flatten()[0]) % 2 == 0:
                self.norm(state["x"])
                ended.wait(30)
            return super().forward(state)

    def wait(work):
        deadline = time.monotonic() + 0.3
        while not work.done():
            if time.monotonic() > deadline:
                raise MessageTimeout("a collective did not end", where="group 'row'", value="0.3 s", remedy="See.")
            time.sleep(0.01)

    def work(engine):
        monkeypatch.setattr(inprocess._Collective, "wait", wait)
        try:
            engine.forward_backward(share(engine, FIRST_DIFFERS))
        except MessageTimeout as error:
            return str(error)
        finally:
            ended.set()
            engine.abandon()

    def hangs() -> Model:
        return replace(one_expert(), blocks={**one_expert().blocks, "first": lambda: Hangs().double()})

    monkeypatch.setattr(connections, "Board", partial(Board, interval_seconds=0.05))
    text = on_mesh(hangs, Mesh(row=2), work)[0]
    assert "row 0 (rank 0): forward 0 (block first.into.1, forward)" in text
    assert "row 1 (rank 1): forward 0 (block first.norm, forward)" in text


def errors(world: World, scheme: str) -> list[float]:
    """Errors of all gradients on 2 x 1 processes, the second of which has no token for one expert."""
    from ranvier.pipeline.engine import Engine

    engine = Engine(routed(), world, mesh=Mesh(row=2), seed=SEED, dtype=torch.float64, tensor=SCHEMES[scheme])
    engine.forward_backward(share(engine, BATCHES))
    reference = Reference(copy.deepcopy(routed()), seed=SEED, dtype=torch.float64)
    reference.forward_backward(BATCHES[0])
    found = []
    for name, gradient in engine.gradients().items():
        box = engine.layout.box(engine.layout[name], engine.coordinates.position)
        expected = reference.gradients()[name][tuple(slice(*edges) for edges in box)]
        found.append(float((gradient - expected).norm() / (1 + expected.norm())))
    engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "scheme"), [
    ("torch", "stationary"), pytest.param("mpi", "summa", marks=[pytest.mark.mpi, NEEDS_MPI])])
def test_over_processes(transport, scheme):
    for found in run_processes("tests.tensor.test_uneven_rows:errors", 2, transport, args=[scheme]):
        assert max(found) < 1e-12
