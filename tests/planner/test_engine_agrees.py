"""The simulator agrees with the engine: with the engine's own times of actions and messages, it has the same order of
actions on every stage, and the same time of a step."""

import time

import pytest
import torch
from torch import nn

from benchmarks import slow_links
from benchmarks.slow_links import Link
from ranvier.config.run import Pipeline
from ranvier.mesh import Mesh
from ranvier.schedule.policies import POLICIES, policy_named
from ranvier.schedule.simulator import StageTimes, simulate
from tests.pipeline.parity import chain, on_mesh, points, share

FORWARD, BACKWARD = (0.020, 0.034, 0.014), (0.030, 0.046, 0.022)
LATENCY = {(0, 1): 0.011, (1, 0): 0.017, (1, 2): 0.005, (2, 1): 0.008}
"""Seconds of each stage's actions, and of messages, which vary; no two sums are close, so that the order of actions is
never a tie."""


class Slept(torch.autograd.Function):
    """The identity, with given seconds for its forward and its backward."""

    @staticmethod
    def forward(ctx, x, forward_seconds, backward_seconds):
        time.sleep(forward_seconds)
        ctx.seconds = backward_seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None, None


class Sleeper(nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.linear, self.stage = nn.Linear(4, 4, dtype=torch.float64), stage

    def forward(self, x):
        return self.linear(Slept.apply(x, FORWARD[self.stage], BACKWARD[self.stage]))


def model():
    return chain(*(lambda stage=stage: Sleeper(stage) for stage in range(3)))


def one_step(engine):
    """Spans of the second step, and the labels in their order."""
    batches = points([[1] * 8])
    for _ in range(2):
        engine.timeline.take()
        engine.forward_backward(share(engine, batches))
    return [(span.label, span.start_ns, span.stop_ns) for span in engine.timeline.take()
            if span.category in ("forward", "backward", "weight")]


@pytest.fixture
def delays(monkeypatch):
    """(source, destination) -> seconds of each message, in the order of sending."""
    found, arrival = {}, slow_links._LinkClock.arrival

    def recorded(lane, sent_ns, num_bytes, *hops):
        arrives = arrival(lane, sent_ns, num_bytes, *hops)
        if not hops:  # otherwise it is a collective
            found.setdefault((lane.link.seed // 10, lane.link.seed % 10), []).append((arrives - sent_ns) * 1e-9)
        return arrives

    monkeypatch.setattr(slow_links._LinkClock, "arrival", recorded)
    return found


def link(source, destination):
    """Its seed identifies the link."""
    latency = LATENCY.get((source, destination), 0.0)
    return Link(latency_seconds=latency, jitter_seconds=latency / 2, seed=10 * source + destination)


@pytest.mark.slow  # real times: on a loaded machine the order of two actions may differ
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("in_flight, defer_bytes", [("auto", 0), (5, 0), ("auto", "auto")])
def test_the_same_order_and_the_same_time(policy, in_flight, defer_bytes, delays):
    """The machine may run other programs, so one of three attempts is enough."""
    for attempt in range(3):
        try:
            return agree(policy, in_flight, defer_bytes, delays)
        except AssertionError:
            if attempt == 2:
                raise


def agree(policy, in_flight, defer_bytes, delays):
    delays.clear()
    limit = 3 if in_flight == "auto" else in_flight
    found = on_mesh(model, Mesh(pipe=3), one_step, throttle=link,
                    pipeline=Pipeline(policy=policy.name, in_flight=in_flight, boundaries=(1, 2),
                                      defer_bytes=defer_bytes))
    recorded = [{label: (stop - start) * 1e-9 for label, start, stop in stage} for stage in found]
    deferred = any(label.startswith("W") for stage in recorded for label in stage)
    assert deferred == (policy.defers and defer_bytes == "auto")
    assert {edge: len(each) for edge, each in delays.items()} == dict.fromkeys(LATENCY, 16)
    second = {edge: iter(each[8:]) for edge, each in delays.items()}
    stages = [StageTimes(forward=1.0, backward=1.0, weight=weight) for weight in (0.0, *[float(deferred)] * 2)]
    simulated = simulate(stages, 8, policy_named(policy), limit, hop=lambda *edge: next(second[edge]),
                         jitter=lambda stage, action: recorded[stage][str(action)], defer_bytes=defer_bytes)
    for stage, actions in enumerate(simulated.actions):
        assert [str(action) for action, _, _ in actions] == [label for label, _, _ in found[stage]]
    took = max(stop for stage in found for _, _, stop in stage) - min(start for stage in found for _, start, _ in stage)
    assert simulated.seconds == pytest.approx(took * 1e-9, rel=0.05)
