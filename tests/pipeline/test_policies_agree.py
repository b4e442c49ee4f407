"""Policies differ only in order and memory: gradients are bit-identical, and every limit is kept."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.slow_links import Link
from ranvier.comm.message import MessageKind
from ranvier.config.run import Pipeline
from ranvier.mesh import Mesh
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import microbatches
from ranvier.schedule.policies import MessageDriven
from ranvier.schedule.schedule import Action
from tests.covering import covering
from tests.errors import raises
from tests.pipeline.parity import assert_close, chain, chunks_of, frozen, gradients_on, points, share, small_gpt, tokens
from tests.pipeline.test_parity import Residual, of_blocks, residuals

HUGE = 1 << 40


def settings(pipe):
    """Every policy with every limit and budget."""
    yield from (Pipeline(policy="1f1b", in_flight=limit) for limit in (1, pipe, 3 * pipe))
    yield from (Pipeline(policy="message-driven", in_flight=limit, defer_bytes=room)
                for limit in (1, pipe, 3 * pipe) for room in (0, 3000, "auto", HUGE))
    yield Pipeline(policy="message-driven", in_flight=3 * pipe, deferred=(3,) * pipe, defer_last=2)


def tied_everywhere():
    """Four linear layers of which three share one weight: the second, the third and the last, which never defers."""
    def linear(bias):
        return nn.Linear(4, 4, bias=bias)

    return chain(Residual, partial(linear, True), partial(linear, False), Residual, partial(linear, False),
                 tied=(("b1.weight", "b2.weight", "b4.weight"),))


class Pair(nn.Module):
    """Two linear layers side by side: the gradient of each output is a part of a larger tensor."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return torch.tanh(torch.cat([self.left(x), self.right(x)], dim=-1))


@pytest.mark.parametrize(("make", "batches", "mesh", "boundaries", "options"), [
    pytest.param(small_gpt, tokens([[2] * 4], ignored=0.3), Mesh(pipe=2), None, {"optim": chunks_of(50)},
                 id="gpt 1x2"),
    pytest.param(tied_everywhere, points([[2] * 5]), Mesh(), None, {}, id="tied on one stage"),
    *(pytest.param(*values, id=id, marks=pytest.mark.slow) for id, *values in [
        ("gpt 2x2", small_gpt, tokens([[2] * 5, [1] * 3], ignored=0.3), Mesh(data=2, pipe=2), None,
         {"optim": chunks_of(50)}),
        ("gpt 1x3", small_gpt, tokens([[2] * 7]), Mesh(pipe=3), (2, 3), {}),
        ("gpt 1x1", small_gpt, tokens([[2] * 4]), Mesh(), None, {}),
        ("tied on two stages", tied_everywhere, points([[2] * 5]), Mesh(pipe=2), (2,), {}),
        ("tied on three stages", tied_everywhere, points([[2] * 5]), Mesh(pipe=3), (2, 3), {}),
        ("residuals 2x4", residuals, points([[1] * 9, [1] * 2]), Mesh(data=2, pipe=4), None, {})])])
def test_gradients_agree_to_the_bit(make, batches, mesh, boundaries, options):
    def gpipe(defer_bytes):
        return gradients_on(make, batches, mesh, pipeline=Pipeline(policy="gpipe", boundaries=boundaries,
                                                                   defer_bytes=defer_bytes), **options)

    # On one stage plain layers defer only if that is set, and then add in one product, not in two.
    set_or_not = {True: gpipe(HUGE), False: gpipe("auto")}
    for setting in settings(mesh.pipe):
        first = set_or_not[setting.defer_bytes not in ("auto", 0) or setting.deferred is not None]
        other = gradients_on(make, batches, mesh, pipeline=replace(setting, boundaries=boundaries), **options)
        assert set(other.gradients) == set(first.gradients)
        wrong = [name for name, gradient in first.gradients.items() if not torch.equal(gradient, other.gradients[name])]
        assert not wrong, f"{setting}: {wrong}"
        assert other.losses == first.losses


def test_gradients_agree_to_the_bit_whatever_arrives_when():
    batches = tokens([[1] * 6, [1] * 4])
    found = [gradients_on(small_gpt, batches, Mesh(data=2, pipe=3), pipeline=Pipeline(in_flight=5),
                          throttle=Link(jitter_seconds=3e-3, seed=seed)).gradients for seed in range(3)]
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])


# ---------------------------------------------------------------------- memory

class Watch:
    """What a stage keeps, checked after each of its actions."""

    def __init__(self, engine: Engine) -> None:
        self.stored = self.queued_bytes = self.largest = 0
        self.messages: list[MessageKind] = []
        self._stage, self._weights = engine._stages.first, engine._stages.first._weights
        self._wrap(self._stage, "forward", lambda outcome: outcome.deferrable_bytes)
        self._wrap(self._stage, "backward", lambda outcome: 0)
        self._wrap(self._stage, "weight", lambda outcome: 0)
        send = engine._connections.transport.send

        def sending(destination, message):
            self.messages.append(message.kind)
            send(destination, message)

        engine._connections.transport.send = sending

    def _wrap(self, owner, name, largest):
        inner = getattr(owner, name)

        def wrapped(*args, **options):
            outcome = inner(*args, **options)
            self.largest = max(self.largest, largest(outcome))
            self.stored = max(self.stored, len(self._stage._graphs))
            alive = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                     for product in self._weights._waiting.values() for one in product for tensor in one.tensors}
            self.queued_bytes = max(self.queued_bytes, sum(alive.values()))
            return outcome

        setattr(owner, name, wrapped)


def watched(make, batches, mesh, **options) -> list[Watch]:
    return gradients_on(make, batches, mesh, also=Watch, **options).others


@pytest.mark.parametrize(("in_flight", "policy"), covering([1, 2, 5, 9], ["message-driven", "1f1b"]))
def test_stored_graphs_never_exceed_the_limit(policy, in_flight):
    watches = watched(residuals, points([[1] * 12]), Mesh(pipe=4),
                      pipeline=Pipeline(policy=policy, in_flight=in_flight))
    most = [watch.stored for watch in watches]
    assert max(most) <= in_flight and most[0] == min(in_flight, 4 if policy == "1f1b" else 12)


def cut_from_one_tensor():
    """Microbatches that are views of one tensor: keeping a part of it alive would keep all of it."""
    return [microbatches(torch.ones(24, 4, dtype=torch.float64), torch.ones(24, 4, dtype=torch.float64), 2)]


@pytest.mark.parametrize(("defer_bytes", "make"), covering([0, 800, 2000, 1, HUGE, 5000], [
    residuals, partial(chain, nn.Sequential, *[partial(nn.Linear, 4, 4)] * 7), partial(chain, *[Pair] * 8)]))
def test_queued_bytes_never_exceed_the_budget(make, defer_bytes):
    watches = watched(make, cut_from_one_tensor(), Mesh(pipe=2),
                      pipeline=Pipeline(in_flight=4, defer_bytes=defer_bytes))
    most = [watch.queued_bytes for watch in watches]
    assert max(most) <= defer_bytes
    if defer_bytes >= 800:
        assert min(most) > 0, "nothing was deferred, so nothing was tested"


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pipe=3)], ids=str)
def test_auto_defers_one_microbatch_where_a_stage_before_waits(mesh):
    first, *later = watched(residuals, cut_from_one_tensor(), mesh, pipeline=Pipeline(in_flight=4))
    assert first.queued_bytes == 0
    for watch in later:
        assert 0 < watch.queued_bytes <= 3 * watch.largest


def test_the_heads_product_may_wait():
    """It is the largest product of a model, and fills the wait for the last microbatches."""
    watch, = watched(partial(chain, partial(nn.Linear, 4, 4)), cut_from_one_tensor(), Mesh(),
                     pipeline=Pipeline(defer_bytes=HUGE))
    assert watch.queued_bytes > 0


def test_a_frozen_prefix_keeps_no_graph_and_gets_no_gradients():
    """Stages 0 and 1 of 4 and a part of stage 2 are frozen."""
    def make():
        return frozen(residuals(), of_blocks(0, 1, 2, 3, 4))

    watches = watched(make, points([[1] * 5]), Mesh(pipe=4), pipeline=Pipeline(boundaries=(2, 4, 6)))
    assert [watch.stored for watch in watches[:2]] == [0, 0]
    assert [watch.messages.count(MessageKind.FORWARD) for watch in watches] == [5, 5, 5, 0]
    assert [watch.messages.count(MessageKind.CREDIT) for watch in watches] == [0, 5, 5, 0]
    assert [watch.messages.count(MessageKind.BACKWARD) for watch in watches] == [0, 0, 0, 5]
    assert watches[2].queued_bytes == 0, "no stage waits for the gradient of stage 2's input"
    assert watched(make, points([[1] * 5]), Mesh(pipe=4), pipeline=Pipeline(boundaries=(2, 4, 6),
                                                                            defer_bytes=HUGE))[2].queued_bytes > 0


def test_evaluation_keeps_nothing():
    def work(engine):
        watch = Watch(engine)
        engine.evaluate(share(engine, points([[1] * 9])))
        return watch

    watches = gradients_on(residuals, points([[1]]), Mesh(pipe=3), also=work).others
    # gradients_on runs one training microbatch afterwards
    assert all(watch.stored <= 1 for watch in watches)
    assert [watch.messages.count(MessageKind.CREDIT) for watch in watches] == [0, 9, 9]


def test_with_a_frozen_stage_in_the_middle_gradients_pass():
    watches = watched(lambda: frozen(residuals(), of_blocks(2, 3, 4, 5)), points([[1] * 3]), Mesh(pipe=4),
                      pipeline=Pipeline(boundaries=(2, 4, 6)))
    assert [watch.messages.count(MessageKind.BACKWARD) for watch in watches] == [0, 3, 3, 3]
    assert watches[1].queued_bytes == watches[2].queued_bytes == 0


def test_all_gradients_close_to_each_other_where_budgets_change_with_the_shapes():
    """Changing lengths make the automatic budget grow during the batch."""
    batches = tokens([[1, 2, 3, 4, 5]], lengths=(1, 2, 3, 4, 5, 6))
    first, second = (gradients_on(small_gpt, batches, Mesh(pipe=2), pipeline=Pipeline(policy=policy)).gradients
                     for policy in ("message-driven", "gpipe"))
    assert_close(first, second)
    assert all(torch.equal(first[name], second[name]) for name in first)


class Own(MessageDriven):
    """A user's policy, which chooses by class attributes."""

    def choose(self, ready):
        return self.of(ready)


@pytest.mark.parametrize(("choose", "code"), [
    (lambda ready: Action("F", 0) if ready.forwards_done == 1 else ready.forward or ready.backward,
     "policy-chooses-other-action"),
    (lambda ready: ready.forward if ready.forwards_done < 1 else None, "policy-waits-for-nothing")])
def test_policies_that_do_not_keep_to_what_is_ready_are_refused(choose, code):
    """A forward that runs twice would only change the result."""
    with raises(code, where="Engine(policy=...)"):
        gradients_on(residuals, points([[2] * 3]), Mesh(), policy=type("Once", (Own,), {"of": staticmethod(choose)})())


def test_a_policy_may_leave_products_to_the_end():
    policy = type("Late", (Own,), {"of": staticmethod(lambda ready: ready.forward or ready.backward)})()
    options = {"pipeline": Pipeline(defer_bytes=HUGE)}
    late, usual = (gradients_on(residuals, points([[2] * 3]), Mesh(pipe=2), **more, **options)
                   for more in ({"policy": policy}, {}))
    assert late.gradients.keys() == usual.gradients.keys()
    assert all(torch.equal(late.gradients[name], one) for name, one in usual.gradients.items())
