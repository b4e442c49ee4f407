"""The flat buffer of gradients: when a chunk is complete, in which order chunks are averaged, what stays unchanged."""

from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.slow_links import Link, slowed
from ranvier.config.run import Pipeline
from ranvier.mesh import Mesh
from ranvier.optim.chunks import GradientSpec
from ranvier.optim.gradients import Gradients
from ranvier.testing.ranks import run_ranks
from tests.pipeline.parity import chain, chunks_of, on_mesh, points, share
from tests.pipeline.test_unusual_blocks import Plain


class FakeWork:
    def __init__(self):
        self.waited = False

    def done(self):
        return self.waited

    def wait(self):
        self.waited = True


class FakeGroup:
    """A group of two that records what is reduced, and detects later writes."""

    def __init__(self, size=2):
        self.ranks, self.index = tuple(range(size)), 0
        self.reduced: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []

    def all_reduce(self, tensor, op="sum"):
        self.reduced.append(tensor)
        self.kept.append(tensor.clone())
        return FakeWork()

    def buffer_bytes(self, operation, numel, dtype, device_type):
        return 0

    def nothing_was_written_since(self):
        return all(torch.equal(tensor, kept) for tensor, kept in zip(self.reduced, self.kept, strict=True))


def spec(name, block, size=4, **options):
    blocks = block if isinstance(block, tuple) else (block,)
    return GradientSpec(name=name, numel=size, parameter=nn.Parameter(torch.zeros(size)), blocks=frozenset(blocks),
                        **options)


def make(specs, chunk_size=4, size=2):
    sent, group = [], FakeGroup(size)
    gradients = Gradients(specs, group, chunk_size, lambda complete: sent.append(complete.name))
    gradients.begin()
    return gradients, group, sent


def squared_norm(gradients):
    return sum(float(gradients.squared_norm(chunk)) for chunk in gradients.reduced_chunks())


def chunks(gradients):
    return [[one.name for one in chunk.specs] for chunk in gradients.chunks]


def test_the_order_is_that_of_a_backward():
    """Last block first, and its parameters from the last to the first."""
    specs = [spec("a0", 0), spec("a1", 0), spec("b0", 1), spec("c0", 2), spec("c1", 2)]
    gradients, _, _ = make(specs)
    assert chunks(gradients) == [["c1"], ["c0"], ["b0"], ["a1"], ["a0"]]
    assert [one.name for one in gradients.owned_specs()] == ["a0", "a1", "b0", "c0", "c1"]
    assert gradients.chunks_of(one.parameter for one in specs) == [4, 3, 2, 1, 0]


@pytest.mark.parametrize(("chunk_size", "members", "expected"), [
    (1, 1, 20), (4, 1, 5), (5, 1, 4), (8, 1, 3), (1000, 1, 1), (1, 2, 10), (4, 3, 4), (7, 3, 3), (1000, 3, 1)])
def test_chunks_are_of_equal_size_and_cut_through_parameters(chunk_size, members, expected):
    """Five parameters of four elements; sizes are rounded up to multiples that all members can share."""
    gradients, _, _ = make([spec(str(number), number) for number in range(5)], chunk_size, members)
    sizes = [chunk.stop - chunk.start for chunk in gradients.chunks]
    assert len(sizes) == expected and len(set(sizes[:-1])) <= 1
    assert all(size % members == 0 for size in sizes)
    assert sum(sizes) == len(gradients.flat) == gradients.size == -(-20 // members) * members
    assert [chunk.share[1] - chunk.share[0] for chunk in gradients.chunks] == [size // members for size in sizes]


def test_a_parameter_in_two_chunks_holds_back_both():
    one, two = spec("a", 0, 6), spec("b", 1, 6)
    gradients, group, _ = make([one, two], 4)
    assert chunks(gradients) == [["b"], ["b", "a"], ["a"]] and gradients.chunks_of([one.parameter])[0] == 1
    gradients.note_deferred([two.parameter])
    gradients.all_passed()
    assert group.reduced == []
    gradients.note_added(gradients.chunks_of([two.parameter]))
    assert [len(tensor) for tensor in group.reduced] == [4, 4, 4]


def test_tied_parameters_have_chunks_of_their_own():
    gradients, _, _ = make([spec("a", 0), spec("t", 1, remote_ends=1), spec("b", 1), spec("s", 2, sent_to_owner=True),
                            spec("c", 2), spec("d", 3)], 1000)
    assert chunks(gradients) == [["d", "c"], ["s"], ["b"], ["t"], ["a"]]
    gradients, _, _ = make([spec("t", 1, remote_ends=1), spec("s", 2, sent_to_owner=True)], 2)
    assert chunks(gradients) == [["s"], ["t"], ["t"]], "gradients that are sent to an owner go in one message"


def test_gradients_with_a_group_of_their_own_come_last():
    """In as few chunks as groups and counts allow, of sizes that their groups can share."""
    row, col = FakeGroup(3), FakeGroup(5)
    specs = [one for block in range(3) for one in (
        spec(f"w{block}", block), spec(f"r{block}", block, 2, group=row), spec(f"c{block}", block, 1, group=col),
        spec(f"n{block}", block, 1, group=row, counts=False))]
    gradients, group, _ = make(specs, 1000)
    assert chunks(gradients) == [["w2", "w1", "w0"], ["r2", "r1", "r0"], ["n2", "n1", "n0"], ["c2", "c1", "c0"]]
    assert [(chunk.group, chunk.counts) for chunk in gradients.chunks] == [
        (group, True), (row, True), (row, False), (col, True)]
    gradients.all_passed()
    assert [[len(tensor) for tensor in one.reduced] for one in (group, row, col)] == [[12], [6, 3], [5]]
    gradients, _, _ = make(specs, 2)
    assert all((chunk.stop - chunk.start) % len(chunk.group.ranks) == 0 for chunk in gradients.chunks)
    assert gradients.owned_specs() == specs, "in model order"


def test_copies_that_do_not_count_have_chunks_of_their_own():
    gradients, _, _ = make([spec("a", 0), spec("b", 1), spec("c", 2, counts=False), spec("d", 3)], 1000)
    assert chunks(gradients) == [["d"], ["c"], ["b", "a"]]
    assert [chunk.counts for chunk in gradients.chunks] == [True, False, True]


def test_copies_that_do_not_count_share_the_memory_of_their_run():
    """Gradients that autograd made earlier stay; those of no single run come last, so that no run has a gap."""
    specs = [spec("a", 0, 3), spec("t", (0, 1), 5), spec("b", 0, 2, counts=False), spec("c", 1, 4),
             spec("d", 1, 2, group=FakeGroup())]
    done = []
    gradients = Gradients(specs, FakeGroup(1), 1, lambda complete: None, reuse=[range(1), range(1, 2)])
    gradients.on_complete = lambda chunk: done.append(gradients.flat_slice(chunk, chunk.start, chunk.stop).tolist())
    assert (gradients.size, gradients.length) == (16, 12), "the longer run, t, and the one with a group of its own"
    gradients.begin()
    gradients.block_passed(2)
    specs[3].parameter.grad += 3.0
    specs[0].parameter.grad, specs[2].parameter.grad = torch.ones(3), torch.full((2,), 2.0)
    gradients.block_passed(1)
    gradients.block_passed(0)
    assert done[:3] == [[3.0] * 4, [2.0] * 2, [1.0] * 3]


def test_gradients_are_views_of_the_buffer():
    specs = [spec("a", 0, 3), spec("b", 1, 2)]
    gradients, _, _ = make(specs, size=1)
    specs[0].parameter.grad += 1.0
    specs[1].parameter.grad += 2.0
    assert gradients.flat.tolist() == [2.0, 2.0, 1.0, 1.0, 1.0]
    gradients.scale(0.5)
    gradients.all_passed()
    assert specs[1].parameter.grad.tolist() == [1.0, 1.0] and squared_norm(gradients) == pytest.approx(2.75)
    specs[0].parameter.grad = None
    specs[1].parameter.grad = torch.ones(2)
    gradients.begin()
    specs[0].parameter.grad += 4.0
    specs[1].parameter.grad += 5.0
    assert gradients.flat.tolist() == [5.0, 5.0, 4.0, 4.0, 4.0]


def test_no_trainable_parameters():
    gradients, group, _ = make([])
    gradients.all_passed()
    gradients.wait()
    gradients.scale(2.0)
    assert gradients.complete and squared_norm(gradients) == 0.0 and group.reduced == []


def test_a_chunk_is_reduced_when_its_block_is_passed():
    gradients, group, _ = make([spec("a", 0), spec("b", 1)])
    assert group.reduced == []
    gradients.block_passed(1)
    assert len(group.reduced) == 1 and not gradients.complete
    gradients.block_passed(0)
    assert len(group.reduced) == 2 and gradients.complete
    gradients.all_passed()
    assert len(group.reduced) == 2
    gradients.wait()


def test_a_chunk_waits_for_all_blocks_that_use_it():
    gradients, group, _ = make([spec("a", (0, 2)), spec("b", 1)])
    assert chunks(gradients) == [["b"], ["a"]], "a, which block 0 uses too, comes last and holds back no other"
    gradients.block_passed(2)
    assert group.reduced == []
    gradients.block_passed(1)
    assert len(group.reduced) == 1
    gradients.block_passed(0)
    assert len(group.reduced) == 2


def test_a_chunk_waits_for_deferred_products():
    one, two = spec("a", 0), spec("b", 1)
    gradients, group, _ = make([one, two])
    gradients.note_deferred([two.parameter])
    gradients.note_deferred([two.parameter])
    gradients.block_passed(1)
    gradients.block_passed(0)
    gradients.note_added(gradients.chunks_of([two.parameter]))
    assert group.reduced == []
    gradients.note_added(gradients.chunks_of([two.parameter]))
    assert len(group.reduced) == 2


def test_a_chunk_waits_for_the_other_ends_of_a_tie():
    tied = spec("a", 0, remote_ends=2)
    gradients, group, _ = make([tied])
    gradients.all_passed()
    gradients.note_added(gradients.chunks_of([tied.parameter]))
    assert group.reduced == [] and not gradients.complete
    with pytest.raises(AssertionError, match="still incomplete"):
        gradients.wait()
    gradients.note_added(gradients.chunks_of([tied.parameter]))
    assert len(group.reduced) == 1
    gradients.begin()
    gradients.all_passed()
    assert len(group.reduced) == 1, "each batch waits again"


def test_a_batch_that_failed_leaves_nothing_under_way():
    gradients, group, _ = make([spec("a", 0), spec("b", 1)])
    gradients.block_passed(1)
    work = gradients.chunks[0].work
    assert len(group.reduced) == 1 and not work.waited
    gradients.begin()
    assert work.waited


def test_what_belongs_to_another_stage_is_sent_and_not_reduced():
    sent_away, own = spec("s", 1, sent_to_owner=True), spec("a", 0)
    gradients, group, sent = make([own, sent_away])
    sent_away.parameter.grad += 3.0
    gradients.all_passed()
    assert sent == ["s"] and len(group.reduced) == 1
    assert [one.name for one in gradients.owned_specs()] == ["a"] and squared_norm(gradients) == 0.0


def test_one_replica_reduces_nothing():
    gradients, group, _ = make([spec("a", 0)], size=1)
    gradients.all_passed()
    gradients.wait()
    assert group.reduced == []


def test_the_order_is_fixed_whatever_is_ready_first():
    """Replicas whose chunks are complete in different orders reduce in the same order."""
    orders = []
    for events in ([3, 2, 1, 0], [0, 1, 2, 3], [2, 0, 3, 1]):
        specs = [spec(str(number), number) for number in range(4)]
        gradients, group, _ = make(specs)
        for block in events:
            gradients.block_passed(block)
        orders.append([tensor.data_ptr() - gradients.flat.data_ptr() for tensor in group.reduced])
    assert orders[0] == orders[1] == orders[2] == [0, 16, 32, 48]


def test_adversarial_orders_on_real_groups():
    """Each replica completes its chunks in its own order; the sums are right and nothing waits forever."""
    def rank(world):
        group = world.backend.group("data", [[0, 1, 2]])
        specs = [spec(str(number), number) for number in range(6)]
        gradients = Gradients(specs, group, 4, lambda complete: None)
        for batch in range(3):
            gradients.begin()
            for one in specs:
                one.parameter.grad += 10.0 ** world.rank * (batch + 1)
            for number in range(6):
                gradients.block_passed((number * (1, 5, 5)[world.rank] + 2 * world.rank) % 6)
                gradients.progress()
            gradients.wait()
        return gradients.flat.clone()

    for flat in run_ranks(slowed(rank, Link(jitter_seconds=3e-3)), 3):
        assert (flat == 333.0).all()


# ---------------------------------------------------------------------- inside the engine

def watch(events):
    """Record when actions end and when chunks are reduced."""
    def prepare(engine):
        execute, reduce = engine._runner.execute, engine._connections.data.all_reduce

        def executing(action, *rest):
            facts = execute(action, *rest)
            events.append(str(action))
            return facts

        def reducing(tensor, op="sum"):
            events.append("reduce")
            return reduce(tensor, op)

        engine._runner.execute, engine._connections.data.all_reduce = executing, reducing
    return prepare


@pytest.mark.parametrize("defer_bytes", [0, 1 << 30])
@pytest.mark.parametrize("pipe", [1, 2])
def test_chunks_are_reduced_while_others_are_computed(pipe, defer_bytes):
    """The first reduction starts before the last backward has ended, or before the last deferred product has run."""
    found = {}

    def work(engine):
        events = found.setdefault(engine.world.rank, [])
        watch(events)(engine)
        engine.forward_backward(share(engine, points([[1, 1], [1, 1]])))

    on_mesh(partial(chain, *[Plain] * 6), Mesh(data=2, pipe=pipe), work, optim=chunks_of(20),
            pipeline=Pipeline(defer_bytes=defer_bytes))
    for events in found.values():
        last = max(place for place, event in enumerate(events) if event in ("B1", "W1"))
        assert events.index("reduce") < last, events
        assert events.count("reduce") == 6 // pipe, "a block has 20 parameters"


def test_nothing_is_written_after_it_was_reduced(monkeypatch):
    """Every chunk is unchanged from the start of its reduction to the end of the batch: checked on a group of one."""
    found = []

    def rank_work(engine):
        group = FakeGroup()
        for chunk in engine._updater.gradients.chunks:
            chunk.group = group
        engine.forward_backward(share(engine, points([[1, 2, 1]])))
        found.append(group)

    for policy, defer_bytes in [("message-driven", 1 << 30), ("message-driven", 300), ("1f1b", 0)]:
        on_mesh(partial(chain, *[Plain] * 5, tied=(("b0.linear.weight", "b3.linear.weight"),)), Mesh(), rank_work,
                optim=chunks_of(20), pipeline=Pipeline(policy=policy, defer_bytes=defer_bytes), nominal_weight=16.0)
    for group in found:
        assert len(group.reduced) == 5 and group.nothing_was_written_since()
