"""Policies that choose the next of the ready actions. Comparing policies compares only these few lines.

                 picks                                            4 microbatches, stage 0 of 2
    message-driven   what is due first of what is there, weight       F0 F1 B0 F2 W0 B1 ...
    1f1b             forwards up to the depth left, then in turn      F0 F1 B0 F2 B1 F3 B2 B3
    gpipe            all forwards, then all backwards                 F0 F1 F2 F3 B0 B1 B2 B3
"""

from __future__ import annotations

from dataclasses import dataclass

from ranvier.errors import ConfigError
from ranvier.schedule.schedule import Action, Policy, Ready, due, stored_in_even_flow


@dataclass(frozen=True)
class MessageDriven:
    """Run the arrived action that is due first, and store no more than an even flow does; weight gradients fill what
    would be waits. (AxoNN, Algorithm 2, with deferred weight gradients. In AxoNN a backward always runs before a
    forward: the microbatches then bunch together, and stages wait for each other.)

    If alternating, a stage that may store one more waits for a forward although a backward has arrived: 1F1B's order.
    """

    name: str = "message-driven"
    defers: bool = True

    def choose(self, ready: Ready) -> Action | None:
        """See `Policy`."""
        forward, backward = ready.forward, ready.backward
        if not ready.may_store:
            forward = None
        elif ready.alternating and ready.forwards_done < ready.num_microbatches:
            backward = None
        if forward is not None and backward is not None:
            return min(forward, backward, key=lambda each: due(
                each.kind, each.microbatch, stage=ready.stage, num_stages=ready.num_stages, in_flight=ready.in_flight))
        return forward or backward or ready.weight

    def in_flight(self, in_flight: int, num_microbatches: int) -> int:
        """See `Policy`."""
        return in_flight

    def stored(self, in_flight: int, stage: int, num_stages: int) -> int:
        """See `Policy`."""
        return stored_in_even_flow(stage=stage, num_stages=num_stages, in_flight=in_flight)


@dataclass(frozen=True)
class OneForwardOneBackward:
    """Stage i of p runs p - i forwards (fewer if the in-flight limit is lower), then one backward and one forward in
    turn, in that fixed order even if only the other one has arrived. (Narayanan et al., PipeDream-Flush.)"""

    name: str = "1f1b"
    defers: bool = False

    def choose(self, ready: Ready) -> Action | None:
        """See `Policy`."""
        stored = ready.forwards_done - ready.returns_done
        most = min(ready.num_stages - ready.stage, ready.in_flight)
        forward_due = stored < most and ready.forwards_done < ready.num_microbatches
        return ready.forward if forward_due else ready.backward

    def in_flight(self, in_flight: int, num_microbatches: int) -> int:
        """See `Policy`."""
        return in_flight

    def stored(self, in_flight: int, stage: int, num_stages: int) -> int:
        """See `Policy`."""
        return min(in_flight, num_stages - stage)


@dataclass(frozen=True)
class GPipe:
    """All forwards, then all backwards; every microbatch is in flight. (Huang et al., GPipe, in FIFO order.)"""

    name: str = "gpipe"
    defers: bool = False

    def choose(self, ready: Ready) -> Action | None:
        """See `Policy`."""
        return ready.forward if ready.forwards_done < ready.num_microbatches else ready.backward

    def in_flight(self, in_flight: int, num_microbatches: int) -> int:
        """See `Policy`."""
        return max(1, num_microbatches)

    def stored(self, in_flight: int, stage: int, num_stages: int) -> int:
        """See `Policy`."""
        return in_flight


POLICIES: tuple[Policy, ...] = (MessageDriven(), OneForwardOneBackward(), GPipe())


def policy_named(name: str | Policy) -> Policy:
    """Return the policy of that name; a `Policy` object is returned as it is."""
    if not isinstance(name, str):
        return name
    for policy in POLICIES:
        if policy.name == name:
            return policy
    raise ConfigError("is not a policy", code="unknown-policy", where="pipeline.policy", value=name,
                      remedy="Choose one of " + ", ".join(policy.name for policy in POLICIES) + ".")
