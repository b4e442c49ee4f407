"""The animated picture of docs/concepts/schedule.md: three policies on the simulator's clock.

    python -m website.schedule_picture docs/images/schedule.svg

Each row is a stage, each box an action: F3 is the forward of microbatch 3. The finished picture is shown first.
Then a cover of the page's colour moves to the right and uncovers what has run so far. Readers who prefer less motion,
and prints, have the finished picture.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from ranvier.pictures.figures import COLOURS, FAINT, INK
from ranvier.schedule.computed_limits import StageLoad, computed_limits
from ranvier.schedule.limits import Limits
from ranvier.schedule.policies import POLICIES
from ranvier.schedule.schedule import Policy
from ranvier.schedule.simulator import Simulated, StageTimes, simulate

STAGES, MICROBATCHES = 4, 8
FORWARD, BACKWARD, WEIGHT, MESSAGE = 1.0, 1.0, 1.0, 0.1
"""Times of the picture: a backward is half gradients of inputs and half gradients of weights."""
UNIT, ROW, TOP, LEFT, WIDTH = 22.0, 24, 34, 64, 860
SECONDS = 14
"""For one pass of the animation."""
_KINDS = {"F": "forward", "B": "backward", "W": "weight"}
TITLES = {"gpipe": "GPipe", "1f1b": "1F1B", "message-driven": "message-driven"}


def limits_of(policy: Policy) -> Limits:
    """What `auto` takes with `pipeline.memory` 1.1, for stages whose parameters need nine times a microbatch."""
    load = StageLoad(forward=FORWARD, backward=BACKWARD, weight=WEIGHT, trains=True, fixed=9.0, graph=1.0, operands=0.5)
    return computed_limits([load] * STAGES, policy, memory=1.1)


def simulated(policy: Policy) -> Simulated:
    """One step with this policy."""
    limits = limits_of(policy)
    stage = StageTimes(forward=FORWARD, backward=BACKWARD, weight=WEIGHT)
    return simulate([stage] * STAGES, MICROBATCHES, policy, policy.in_flight(limits.in_flight, MICROBATCHES),
                    hop=MESSAGE, defer_bytes=list(limits.deferred) if policy.defers else 0,
                    alternating=limits.alternating)


def results() -> dict[str, Simulated]:
    """The step of each policy, the slowest first."""
    by_name = {policy.name: simulated(policy) for policy in POLICIES}
    return {name: by_name[name] for name in TITLES}


def _boxes(name: str, made: Simulated, top: float) -> Iterator[str]:
    yield (f'<text class="title" x="{LEFT}" y="{top - 9:g}">{TITLES[name]}: {made.seconds:.1f} units, bubble '
           f'{made.bubble_fraction:.0%}, microbatches stored by stage {", ".join(map(str, made.most_stored))}</text>')
    for stage, actions in enumerate(made.actions):
        y = top + stage * ROW
        yield f'<text class="stage" x="{LEFT - 8}" y="{y + 15:g}">stage {stage}</text>'
        yield f'<rect class="wait" x="{LEFT}" y="{y:g}" width="{made.seconds * UNIT:.1f}" height="{ROW - 4}"/>'
        for action, start, stop in actions:
            if action.kind in _KINDS:
                x, width = LEFT + start * UNIT, (stop - start) * UNIT
                yield (f'<rect class="{action.kind}" x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{ROW - 4}"/>'
                       f'<text class="{action.kind}" x="{x + width / 2:.1f}" y="{y + 14:g}">{action.microbatch}</text>')


def picture() -> str:
    """The picture as SVG."""
    made = results()
    block = STAGES * ROW + TOP
    height = len(made) * block + 30
    longest = max(each.seconds for each in made.values()) * UNIT
    legend = [("F", "forward"), ("B", "backward"), ("W", "weight gradients, deferred"), ("wait", "waiting")]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="Three schedules of {STAGES} stages and {MICROBATCHES} microbatches">',
        "<style>",
        "text{font:11px sans-serif;text-anchor:middle}",
        f".title{{text-anchor:start;font-size:13px;font-weight:600;fill:{INK}}}",
        f".stage{{text-anchor:end;fill:{FAINT}}}.legend{{text-anchor:start;fill:{INK}}}",
        *(f"rect.{kind}{{fill:{COLOURS[name]};stroke:#fff;stroke-width:1}}"  # type: ignore[index]
          for kind, name in _KINDS.items()),
        f"text.F,text.B{{fill:#fff}}text.W{{fill:{INK}}}rect.wait{{fill:{COLOURS['wait']}}}",
        f".cover{{fill:#fff;animation:run {SECONDS}s linear infinite}}",
        f"@keyframes run{{0%,15%,90%,to{{transform:translateX({longest:.0f}px)}}15.01%{{transform:translateX(0)}}}}",
        "@media (prefers-reduced-motion:reduce){.cover{display:none}}",
        "</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    tops = [TOP + number * block for number in range(len(made))]
    for top, (name, each) in zip(tops, made.items(), strict=True):
        parts += _boxes(name, each, top)
    for top in tops:
        parts.append(f'<rect class="cover" x="{LEFT}" y="{top - 1:g}" width="{WIDTH - LEFT}" '
                     f'height="{STAGES * ROW}"/>')
    for number, (kind, text) in enumerate(legend):
        x, y = LEFT + number * 110 + (90 if number == 3 else 0), height - 18
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="14" height="12"/>'
                     f'<text class="legend" x="{x + 20}" y="{y + 10}">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture())
