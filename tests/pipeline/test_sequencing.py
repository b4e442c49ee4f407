"""All ranks of a stage act in one order, whenever messages arrive: fake row and column collectives under delays.

Forwards, backwards and deferred products all have collectives along the row and along the column. Each carries its
purpose (a kind and a microbatch), so that ranks in different places detect it, and no rank waits forever.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.slow_links import Link, throttled
from ranvier.comm.board import Board
from ranvier.comm.protocol import Group
from ranvier.config.run import Pipeline
from ranvier.errors import MessageTimeout
from ranvier.layout import Split
from ranvier.mesh import Mesh
from ranvier.pipeline import connections
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.sequencer import Sequencer
from ranvier.schedule.schedule import Action
from ranvier.tensor.layers import local_map
from ranvier.testing.ranks import run_ranks
from ranvier.testing.reference import Reference
from tests.covering import chosen, examples
from tests.errors import raises
from tests.pipeline.parity import SEED, assert_close, chain, points, share

WIDTH = 4


class Disorder(AssertionError):
    """Ranks met in a collective for different purposes."""


def meet(groups: tuple[Group, ...], kind: int, number: int) -> None:
    """A blocking collective in each group, which checks whether all members are here for the same purpose."""
    for group in groups:
        lowest, highest = torch.tensor([kind, number]), torch.tensor([kind, number])
        group.all_reduce(lowest, "min").wait()
        group.all_reduce(highest, "max").wait()
        if not torch.equal(lowest, highest):
            raise Disorder(f"{lowest.tolist()} met {highest.tolist()}")


class _MeetInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, groups, sample):
        ctx.groups, ctx.sample = groups, sample
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        meet(ctx.groups, 2, ctx.sample)
        return gradient, None, None


class Copied(nn.Linear):
    """The same on every rank of a stage; rows have the same samples."""

    def splits(self, settings):
        return {"weight": Split(((), ()), summed=("row",)), "bias": Split(((),), summed=("row",))}

    def divisibility_constraints(self, mesh):
        return ()

    def split(self, mesh):
        return self


class Sharded(nn.Module):
    """Stands for a block on a tensor mesh. The first feature of its input is the sample's number."""

    def __init__(self, groups: tuple[Group, ...] = (), seconds: float = 0.0) -> None:
        super().__init__()
        self.linear = Copied(WIDTH, WIDTH)
        self._references, self._seconds = tuple(map(weakref.ref, groups)), seconds

    @property
    def _groups(self) -> tuple[Group, ...]:
        """Not an attribute: all blocks of a rank have the same groups, whose counts do not belong to a microbatch."""
        return tuple(group for reference in self._references if (group := reference()) is not None)

    def forward(self, x):
        sample = int(x[0, 0])
        meet(self._groups, 1, sample)
        time.sleep(self._seconds)
        y = torch.tanh(self.linear(x))
        y = local_map(_MeetInBackward.apply, y, self._groups, sample)
        return torch.cat([x[:, :1], y[:, 1:]], dim=1)


def numbered(counts):
    """Points whose first feature is the number of the microbatch's first sample."""
    batches = points(counts)
    for replica in batches:
        for one in replica:
            one.inputs[:, 0] = one.samples[0]
    return batches


@dataclass(frozen=True, kw_only=True)
class Adversary:
    """Random delays of every edge, every collective and every call of every rank."""

    seed: int = 0
    jitter_seconds: float = 2e-3
    rank_delay_seconds: float = 1e-3

    def slow(self, world):
        links = Link(jitter_seconds=self.jitter_seconds, seed=self.seed)
        return replace(world, backend=throttled(world.backend, links, rank_delay_seconds=self.rank_delay_seconds,
                                                seed=self.seed))


def run(mesh, batches, adversary, *, seconds=0.0, wait_seconds=60.0, **options):
    """Every rank's actions and gradients."""
    def rank(world):
        world = adversary.slow(world)
        groups = tuple(world.backend.group(axis, mesh.groups(axis)) for axis in ("row", "col"))
        engine = Engine(chain(*[lambda: Sharded(groups, seconds)] * 4), world, mesh=mesh, seed=SEED,
                        dtype=torch.float64, timeout_seconds=wait_seconds, **options)
        actions = []
        execute, weight = engine._runner.execute, engine._stages.first.weight

        def executing(action, *rest):
            actions.append((str(action), action.product, action.defer))
            return execute(action, *rest)

        def weighing(number, product):
            meet(groups, 3, 100 * number + product)
            weight(number, product)

        engine._runner.execute, engine._stages.first.weight = executing, weighing
        result = engine.forward_backward(share(engine, batches))
        engine.evaluate(share(engine, batches))
        gradients = {name: gradient.clone() for name, gradient in engine.gradients().items()}
        engine.close()
        return actions, gradients, result.loss

    return run_ranks(rank, mesh.size)


def check(mesh, adversary, counts=None, **options):
    batches = numbered(counts or [[2, 1, 2, 2, 1]] * mesh.data)
    reference = Reference(chain(*[Sharded] * 4), seed=SEED, dtype=torch.float64)
    loss = reference.forward_backward([one for replica in batches for one in replica])
    found = run(mesh, batches, adversary, check_order=True, **options)
    merged = {}
    for rank in range(mesh.size):
        actions, gradients, said = found[rank]
        leader = mesh.stage_ranks(rank)[0]
        assert actions == found[leader][0], f"rank {rank} acted in another order than its leader {leader}"
        assert all(torch.equal(gradient, found[leader][1][name]) for name, gradient in gradients.items())
        assert said == pytest.approx(loss, rel=1e-12)
        merged |= gradients
    assert_close(merged, reference.gradients())
    return [actions for actions, _, _ in found]


@pytest.mark.parametrize(("mesh", "policy"), chosen([
    (Mesh(pipe=2, col=2), "1f1b"), (Mesh(pipe=3, row=2), "gpipe")], [
    Mesh(pipe=2, row=2, col=2), Mesh(pipe=2, col=2), Mesh(pipe=3, row=2), Mesh(row=2, col=2),
    Mesh(data=2, pipe=2, col=2), Mesh(data=2, pipe=3, row=2)], ["message-driven", "1f1b", "gpipe"]), ids=str)
def test_one_order_on_every_rank_of_a_stage(mesh, policy):
    check(mesh, Adversary(seed=mesh.size), pipeline=Pipeline(policy=policy, in_flight=2 * mesh.pipe))


def test_deferred_products_and_uneven_replicas():
    """The leader orders W actions too; replicas run independently."""
    orders = check(Mesh(data=2, pipe=2, col=2), Adversary(seed=5), [[2] * 6, [1]],
                   pipeline=Pipeline(defer_bytes=1 << 20, in_flight=4))
    assert any(name.startswith("W") for name, _, _ in orders[0])


@pytest.mark.slow
@settings(examples(16), suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([(2, 2), (1, 2), (2, 1)]), st.integers(1, 3), st.integers(1, 2),
       st.sampled_from(["message-driven", "1f1b", "gpipe"]), st.integers(0, 1 << 20),
       st.sampled_from([0, 600, "auto", 1 << 30]), st.integers(1, 7))
def test_any_mesh_any_delays(tensor, pipe, data, policy, seed, defer_bytes, in_flight):
    mesh = Mesh(data=data, pipe=pipe, row=tensor[0], col=tensor[1])
    check(mesh, Adversary(seed=seed, jitter_seconds=5e-3), pipeline=Pipeline(policy=policy, defer_bytes=defer_bytes,
                                                                             in_flight=in_flight))


# ---------------------------------------------------------------------- the tests above can fail

class EachForItself(Sequencer):
    """Without a leader: every rank decides by its own arrivals."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.leads = True

    def announce(self, call, action) -> None:
        self._check(action)


class SecondColumnIsLate(Adversary):
    """Returns to the ranks of column 1 are slow, so that they see fewer messages than column 0."""

    def slow(self, world):
        late = Link(latency_seconds=0.05)
        return replace(world, backend=throttled(
            world.backend, lambda source, destination: late if source == 3 and destination == 1 else Link()))


def test_without_a_leader_the_order_check_finds_ranks_that_differ(monkeypatch):
    monkeypatch.setattr(connections, "Sequencer", EachForItself)
    with raises("stage-order-differs"):
        run(Mesh(pipe=2, col=2), numbered([[1] * 6]), SecondColumnIsLate(), seconds=4e-3,
            pipeline=Pipeline(in_flight=6), check_order=True)


def test_without_a_leader_collectives_mix(monkeypatch):
    """After some tries: which message arrives first varies by chance."""
    monkeypatch.setattr(connections, "Sequencer", EachForItself)

    def mixes():
        try:
            run(Mesh(pipe=2, col=2), numbered([[1] * 6]), SecondColumnIsLate(), seconds=4e-3,
                pipeline=Pipeline(in_flight=6))
        except Disorder:
            return True
        return False

    assert any(mixes() for _ in range(20))


def test_with_a_leader_the_same_delays_do_no_harm():
    run(Mesh(pipe=2, col=2), numbered([[1] * 6]), SecondColumnIsLate(), seconds=4e-3, pipeline=Pipeline(in_flight=6),
        check_order=True)


def test_a_leader_that_says_nothing(monkeypatch):
    """Its peers report which rank they wait for."""
    monkeypatch.setattr(Sequencer, "announce", lambda self, call, action: None)
    with pytest.raises(MessageTimeout) as caught:
        run(Mesh(col=2), numbered([[1]]), Adversary(), wait_seconds=0.3)
    assert "col 1 waits" in str(caught.value) and "for the next action from col 0, which is" in str(caught.value)


def test_a_lost_announcement_is_noticed_before_anything_is_done_in_another_order():
    """The peer would run the next action during the leader's current one, and collectives could match by chance."""
    done = []

    def run(world):
        sequencer = Sequencer(Mesh(row=2), world.rank, world.backend, Board(world.store, world.rank, Mesh(row=2)), 5.0,
                              False)
        if sequencer.leads:
            send = sequencer._transport.send
            for number in range(3):
                sequencer._transport.send = send if number != 1 else lambda destination, message: None
                sequencer.announce(0, Action("F", number))
            world.store.get("noticed")
            return
        done.append(sequencer.next(0))
        with raises("announcement-lost", 0, 2, 3):
            sequencer.next(0)
        world.store.set("noticed", "yes")

    run_ranks(run, 2)
    assert done == [Action("F", 0)]
