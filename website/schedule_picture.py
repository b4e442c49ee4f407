"""The animated picture of README and docs/concepts/schedule.md: three policies on the simulator's clock.

    python -m website.schedule_picture docs/images

Each row is a stage, each box an action: F3 is the forward of microbatch 3. The finished picture is shown first.
Then a cover of the page's colour moves to the right and uncovers what has run so far. Readers who prefer less motion,
and prints, have the finished picture. There is a wide and a narrow form, for phones; both have dark colours where the
reader's system has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ranvier.pictures.figures import COLOURS, INK
from ranvier.schedule.computed_limits import StageLoad, computed_limits
from ranvier.schedule.limits import Limits
from ranvier.schedule.policies import POLICIES
from ranvier.schedule.schedule import Policy
from ranvier.schedule.simulator import Simulated, StageTimes, simulate

STAGES, MICROBATCHES = 4, 8
FORWARD, BACKWARD, WEIGHT, MESSAGE = 1.0, 1.0, 1.0, 0.1
"""Times of the picture: a backward is half gradients of inputs and half gradients of weights."""
SECONDS = 14
"""For one pass of the animation."""
_KINDS = {"F": "forward", "B": "backward", "W": "weight"}
TITLES = {"gpipe": "GPipe", "1f1b": "1F1B", "message-driven": "message-driven"}


@dataclass(frozen=True, kw_only=True)
class Form:
    """Sizes in pixels: of the picture, of a unit of time, of a row, of the margins and of the letters in boxes.

    name: of its file. stored: whether titles have the number of microbatches that each stage stores.
    """

    name: str
    width: int
    unit: float
    row: int
    top: int
    left: int
    letters: float
    stored: bool


FORMS = (Form(name="schedule.svg", width=860, unit=22.0, row=24, top=34, left=64, letters=11, stored=True),
         Form(name="schedule-narrow.svg", width=400, unit=9.9, row=24, top=34, left=26, letters=8, stored=False))
DARK = {"page": "#0d1117", "ink": "#e6edf3", "faint": "#8b949e", "wait": "#2d333b", "F": "#3777bd", "B": "#e8912d",
        "W": "#1f4e79", "on-F": "#fff", "on-B": INK, "on-W": "#e6edf3"}
LIGHT = {"page": "#fff", "ink": INK, "faint": "#6b6b6b", "wait": COLOURS["wait"],
         "on-F": "#fff", "on-B": INK, "on-W": INK, **{kind: COLOURS[name] for kind, name in _KINDS.items()}}  # type: ignore[index]


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


def _boxes(form: Form, name: str, made: Simulated, top: float) -> Iterator[str]:
    stored = f", microbatches stored by stage {', '.join(map(str, made.most_stored))}" if form.stored else ""
    yield (f'<text class="title" x="{form.left}" y="{top - 9:g}">{TITLES[name]}: {made.seconds:.1f} units, bubble '
           f'{made.bubble_fraction:.0%}{stored}</text>')
    for stage, actions in enumerate(made.actions):
        y = top + stage * form.row
        label = f"stage {stage}" if form.stored else f"{stage}"
        yield f'<text class="stage" x="{form.left - 8}" y="{y + 15:g}">{label}</text>'
        yield (f'<rect class="wait" x="{form.left}" y="{y:g}" width="{made.seconds * form.unit:.1f}" '
               f'height="{form.row - 4}"/>')
        for action, start, stop in actions:
            if action.kind in _KINDS:
                x, width = form.left + start * form.unit, (stop - start) * form.unit
                yield (f'<rect class="{action.kind}" x="{x:.1f}" y="{y:g}" width="{width:.1f}" '
                       f'height="{form.row - 4}"/>'
                       f'<text class="on {action.kind}" x="{x + width / 2:.1f}" y="{y + 14:g}">{action.microbatch}'
                       '</text>')


def _colours(colours: dict[str, str]) -> str:
    return ":root{" + ";".join(f"--{name}:{colour}" for name, colour in colours.items()) + "}"


def picture(form: Form) -> str:
    """The picture as SVG."""
    made = results()
    block = STAGES * form.row + form.top
    legend = [("F", "forward", 82), ("B", "backward", 92), ("W", "weight gradients", 0 if not form.stored else 132),
              ("wait", "waiting", 0)]
    height = len(made) * block + (30 if form.stored else 54)
    longest = max(each.seconds for each in made.values()) * form.unit
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {form.width} {height}" role="img" '
        f'aria-label="Three schedules of {STAGES} stages and {MICROBATCHES} microbatches">',
        "<style>",
        _colours(LIGHT),
        f"@media (prefers-color-scheme:dark){{{_colours(DARK)}}}",
        f"text{{font:11px sans-serif;text-anchor:middle}}.on{{font-size:{form.letters:g}px}}",
        ".title{text-anchor:start;font-size:13px;font-weight:600;fill:var(--ink)}",
        ".stage{text-anchor:end;fill:var(--faint)}.legend{text-anchor:start;fill:var(--ink)}",
        ".page,.cover{fill:var(--page)}",
        *(f"rect.{kind}{{fill:var(--{kind});stroke:var(--page);stroke-width:1}}" for kind in _KINDS),
        "rect.wait{fill:var(--wait)}" + "".join(f".on.{kind}{{fill:var(--on-{kind})}}" for kind in _KINDS),
        f".cover{{animation:run {SECONDS}s linear infinite}}",
        f"@keyframes run{{0%,15%,90%,to{{transform:translateX({longest:.0f}px)}}15.01%{{transform:translateX(0)}}}}",
        "@media (prefers-reduced-motion:reduce){.cover{display:none}}",
        "</style>",
        f'<rect class="page" width="{form.width}" height="{height}"/>',
    ]
    tops = [form.top + number * block for number in range(len(made))]
    for top, (name, each) in zip(tops, made.items(), strict=True):
        parts += _boxes(form, name, each, top)
    for top in tops:
        parts.append(f'<rect class="cover" x="{form.left}" y="{top - 1:g}" width="{form.width - form.left}" '
                     f'height="{STAGES * form.row}"/>')
    x, y = form.left, len(made) * block + 12
    for kind, text, step in legend:
        parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="14" height="12"/>'
                     f'<text class="legend" x="{x + 20}" y="{y + 10}">{text}</text>')
        x, y = (x + step, y) if step else (form.left, y + 22)
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    for form in FORMS:
        Path(sys.argv[1], form.name).write_text(picture(form))
