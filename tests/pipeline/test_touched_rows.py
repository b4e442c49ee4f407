"""Lookup tables: gradients are bit-identical to autograd's, and only touched rows are summed over replicas."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ranvier.config.run import Optim, Transformer
from ranvier.mesh import Mesh
from ranvier.models.gpt import gpt
from ranvier.models.llama import llama
from ranvier.optim.reduction import PackedChunk, TouchedRows
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.tensor import deferred_linear
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference
from tests.covering import covering, quick
from tests.pipeline.parity import assert_parity, chain, chunks_of, merge, on_mesh, share, tokens

VOCAB = 600


@pytest.fixture(autouse=True)
def small_tables(monkeypatch):
    monkeypatch.setattr(deferred_linear, "LEAST_ROWS", 128)



class Table(nn.Embedding):
    """ids to vectors; nn.Embedding's own forward."""

    def __init__(self, padding=None):
        super().__init__(VOCAB, 3, padding_idx=padding, dtype=torch.float64)


class Weighed(nn.Module):
    """A table whose weights the block also uses directly, on all or some batches."""

    def __init__(self, always):
        super().__init__()
        self.table, self.always = nn.Embedding(VOCAB, 3, dtype=torch.float64), always

    def forward(self, ids):
        found = self.table(ids)
        return found + 0.1 * self.table.weight.sum(0) if self.always or 5 in ids else found


class Head(nn.Linear):
    def __init__(self):
        super().__init__(3, 4, dtype=torch.float64)


def sentences(lengths=((5, 3), (4, 6)), largest=VOCAB):
    """[replica][microbatch]: sentences of these lengths, with repeated words."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for replica, counts in enumerate(lengths):
        ids = [torch.randint(0, largest, (2, count), generator=generator) for count in counts]
        for each in ids:
            each[:, -1] = each[:, 0]
        found.append([Microbatch(each, torch.randn(2, each.shape[1], 4, generator=generator, dtype=torch.float64),
                                 torch.arange(2) + 10 * replica + 100 * number) for number, each in enumerate(ids)])
    return found


def lookup_model(first=Table):
    return lambda: chain(first, Head)


@pytest.fixture
def packed(monkeypatch):
    """The sizes of the packed chunks that are summed."""
    found, take = [], PackedChunk.take

    def noted(self):
        found.append(self.size)
        return take(self)

    monkeypatch.setattr(PackedChunk, "take", noted)
    return found


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize(("mesh", "options"), [
    (Mesh(data=2), {}), (Mesh(data=2, pipe=2), {}), (Mesh(data=2), {"optim": chunks_of(100)}),
    (Mesh(data=2), {"optim": Optim(bucket_size=64, chunk_buckets=4)})])
def test_raw_gradients_are_those_of_plain_pytorch(mesh, options, padding, packed):
    batches = sentences()
    if padding is not None:
        for replica in batches:
            for one in replica:
                one.inputs[:, 1] = padding
    assert_parity(lookup_model(lambda: Table(padding)), batches, mesh, **options)
    assert packed and sum(packed) <= 2 * 3 * 40 + 100, "few rows are sent"


class Transposed(Table):
    """Its gradient is transposed in memory, as its weight is: not row by row."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, VOCAB, dtype=torch.float64).t())


def test_a_table_that_lies_transposed():
    assert_parity(lookup_model(Transposed), sentences(), Mesh(data=2))


def test_one_rank_has_autograds_bits(monkeypatch):
    """Sums are in the order of autograd's kernel, however often a word occurs, and with several microbatches."""
    batches, make = sentences(((9, 7, 8),), largest=11), lookup_model()

    def work(engine):
        engine.forward_backward(share(engine, batches))
        return {name: gradient.clone() for name, gradient in engine.gradients().items()}

    found, = on_mesh(make, Mesh(), work)
    monkeypatch.setattr(deferred_linear, "LEAST_ROWS", 1 << 20)
    autograd, = on_mesh(make, Mesh(), work)
    assert all(torch.equal(found[name], autograd[name]) for name in autograd)
    assert int(found["b0.weight"].any(1).sum()) <= 11


@pytest.mark.parametrize(("optim", "precision"), quick(3, covering([
    Optim(clip_norm=1.0, bucket_size=1024), Optim(shard=True, bucket_size=1024), Optim(shard=True, bucket_size=250),
    Optim(accumulate="half", reduce_dtype="fp32", bucket_size=512), Optim(offload="stream", bucket_size=512)],
    [torch.float32, torch.bfloat16])))
def test_training_is_bit_identical_on_two_replicas(optim, precision, monkeypatch, packed):
    """Parameters after some steps, with and without packed sums; one of the steps reaches fewer rows."""
    config = Transformer(num_layers=1, hidden=8, heads=2, vocab=VOCAB, sequence=6, untied=True)
    steps = [tokens(((1, 2), (2, 1)), vocab=vocab, seed=number) for number, vocab in enumerate((VOCAB, 40, VOCAB))]

    def trained():
        def rank(world):
            engine = Engine(gpt(config, dtype=precision), world, mesh=Mesh(data=2), dtype=precision, optim=optim,
                            learning_rate=1e-2)
            for batches in steps:
                engine.train_batch(share(engine, batches))
            found = {name: parameter.detach().clone() for name, parameter in engine.named_parameters().items()}
            engine.close()
            return found
        return merge(run_ranks(rank, 2), Mesh(data=2))

    few = trained()
    assert packed
    monkeypatch.setattr(deferred_linear, "LEAST_ROWS", 1 << 20)
    count = len(packed)
    dense = trained()
    assert len(packed) == count
    assert few.keys() == dense.keys() and all(torch.equal(few[name], dense[name]) for name in few)


@pytest.mark.parametrize("always", [True, False])
def test_a_table_that_is_used_otherwise_is_summed_as_a_whole(always, packed):
    """Even if only one replica uses it so: the other is informed."""
    batches = sentences()
    for replica in batches:
        for one in replica:
            one.inputs[one.inputs == 5] = 6
    batches[1][0].inputs[0, 0] = 5
    assert_parity(lookup_model(lambda: Weighed(always)), batches, Mesh(data=2))
    assert packed == []


def test_a_replica_that_reaches_no_row(packed):
    """The sign of its zeros shows this: everything is summed, and rows that the other replica reached are updated."""
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.rest = Table(), nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, ids):
            return self.table(ids) if 7 in ids else self.rest.expand(*ids.shape, 3)

    batches = sentences()
    for replica, word in zip(batches, (7, 8), strict=True):
        for one in replica:
            one.inputs[one.inputs == 7] = 9
            one.inputs[0, 0] = word
    assert_parity(lookup_model(Block), batches, Mesh(data=2))
    assert packed == []


def test_many_rows_are_summed_as_a_whole(packed):
    assert_parity(lookup_model(), sentences(((100, 90), (80, 90))), Mesh(data=2))
    assert packed == []


def test_bytes_between_replicas_follow_the_rows():
    """The table is nearly the entire model, and there are two short sentences."""
    def work(engine):
        data = engine._connections.data
        before = data.bytes_received
        engine.forward_backward(share(engine, sentences(((2,), (2,)))))
        return data.bytes_received - before

    for received in on_mesh(lookup_model(), Mesh(data=2), work):
        assert received < 0.1 * VOCAB * 3 * 8 + VOCAB


def test_frozen_tables_and_other_models(packed):
    """A tied table is summed in full; Llama's own table is not tied."""
    config = Transformer(family="llama", num_layers=2, hidden=8, heads=2, kv_heads=2, intermediate=16, vocab=VOCAB,
                         sequence=6, untied=True)
    batches = tokens(((1, 2), (2, 1)), vocab=VOCAB)
    assert_parity(lambda: gpt(replace(config, family="gpt", untied=False), dtype=torch.float64), batches, Mesh(data=2))
    assert packed == []
    assert_parity(lambda: llama(config, dtype=torch.float64), batches, Mesh(data=2, pipe=2))
    assert packed


def test_blocks_are_plain_modules_between_batches():
    def work(engine):
        engine.forward_backward(share(engine, sentences()))
        table = engine.blocks["b0"]
        assert "forward" not in table.__dict__
        return True

    assert on_mesh(lookup_model(), Mesh(data=2), work) == [True, True]
    model = lookup_model()()
    Reference(model, seed=0, dtype=torch.float64).forward_backward(sentences()[0])


def test_whole_rows_of_a_cut_chunk_are_packed():
    """A chunk that begins and ends within rows: the partial rows are always sent."""
    table = TouchedRows(4, 100, 3)
    table.found, table.decided = torch.tensor([0, 3, 50, 98, 99]), True
    flat = torch.arange(310.0)
    chunk = PackedChunk(flat[8:306], 8, [table])  # from within row 1 to two elements after the last row
    assert chunk.take().tolist() == [8, 9, *range(304, 306), *(4 + 3 * row + i for row in (3, 50, 98, 99)
                                                              for i in range(3))]
    assert chunk.size == 16 and chunk.pays
    chunk.put(-chunk.take())
    assert [index for index, value in enumerate(flat.tolist()) if value < 0] == sorted(
        [8, 9, 304, 305, *(4 + 3 * row + i for row in (3, 50, 98, 99) for i in range(3))])
