"""What a person sees: a live line on a terminal, about twenty plain lines elsewhere."""

from __future__ import annotations

import errno
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ranvier.train.events import EndEvent, Event, NoteEvent, StartEvent, StepEvent, Tracker, TransitionEvent
from ranvier.train.files import mesh_text

PLAIN_LINES = 20
"""Step lines of a whole run where there is no terminal; evaluations may add as many again."""
NOTES_OF_A_KIND = 3
"""Notes with the same name that are shown; events.jsonl has them all."""


def console(stream: TextIO) -> Tracker:
    """The live console on a terminal, the plain one for files and pipes."""
    return LiveConsole(stream) if stream.isatty() else PlainConsole(stream)


def duration(seconds: float) -> str:
    """12 s as 0:12, two hours as 2:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def step_text(event: StepEvent, unit: str = "tokens") -> str:
    """The numbers of one step, at fixed widths."""
    text = (f"loss {event.loss:7.4f}  {_rate(event.tokens_per_second):>9} {unit}/s"
            f"  utilisation {event.model_flops_utilisation:4.0%}  bubble {event.bubble_fraction:4.0%}"
            f"  waits {1e3 * event.wait_seconds:5.0f} ms")
    if event.eval_loss is not None:
        text += f"  eval {event.eval_loss:.4f}"
    if "eval_accuracy" in event.eval_scores:
        text += f"  accuracy {event.eval_scores['eval_accuracy']:.2%} of {event.eval_scores['eval_count']:,.0f}"
    return text


def _rate(per_second: float) -> str:
    return f"{per_second:,.1f}" if per_second < 100 else f"{per_second:,.0f}"


def start_text(event: StartEvent) -> str:
    settings = "\n".join(f"  {name:<14} {value}" for name, value in event.settings.items())
    return f"{event.recipe}: {event.steps} steps on mesh {mesh_text(event.mesh)}\n{settings}\n{event.stages}"


def end_text(event: EndEvent, unit: str = "tokens") -> str:
    summary = event.summary
    losses = f"loss {summary['final_loss']:.4f}" if summary.get("final_loss") is not None else "no loss"
    if summary.get("eval_loss") is not None:
        losses += f", held-out {summary['eval_loss']:.4f}"
    lines = [f"done in {duration(summary['seconds'])}: {losses}, {_rate(summary['tokens_per_second'])} {unit}/s,"
             f" bubble {summary['bubble_fraction']:.1%}"]
    if event.sample:
        lines += ["", event.sample, ""]
    if event.report:
        lines += [event.report, ""]
    return "\n".join(lines + [f"wrote {picture}" for picture in event.pictures])


class Remaining:
    """Estimates the time to the end from the steps' own durations, weighing recent ones more."""

    def __init__(self) -> None:
        self._seen, self._step_seconds = 0, 0.0

    def after(self, event: StepEvent, steps: int) -> str:
        self._seen += 1
        self._step_seconds += max(0.1, 1 / self._seen) * (event.step_seconds - self._step_seconds)
        return duration(max(0, steps - event.step) * self._step_seconds)


class Notes:
    """Lets a few notes of each name through, so that one that comes every step does not flood the screen."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def text(self, event: NoteEvent | TransitionEvent) -> str | None:
        if isinstance(event, TransitionEvent):
            return f"step {event.step}: {event}"
        kind = f"{event.event} {event.fields.get('setting', '')}"  # each setting that has changed is told
        self._seen[kind] += 1
        seen = self._seen[kind]
        if seen > NOTES_OF_A_KIND:
            return None
        more = " (more of these in events.jsonl)" if seen == NOTES_OF_A_KIND else ""
        return f"step {event.step}: {event.text}{more}"


@contextmanager
def _without_room() -> Iterator[None]:
    """A log whose disk is full loses lines, and does not end the run: what the run cannot do without says so itself."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise


class PlainConsole:
    """Lines of text without colours or cursor movements, flushed one by one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._remaining, self._notes = Remaining(), Notes()
        self._steps, self._every, self._last = 0, 1, 0
        self._unit = "tokens"

    def _print(self, text: str | None) -> None:
        if text is not None:
            with _without_room():
                print(text, file=self._stream, flush=True)

    def event(self, event: Event) -> None:
        match event:
            case StartEvent():
                self._steps, self._every = event.steps, -(-event.steps // PLAIN_LINES)
                self._unit = event.unit
                self._print(start_text(event))
            case StepEvent():
                self._step(event)
            case NoteEvent() | TransitionEvent():
                self._print(self._notes.text(event))
            case EndEvent():
                self._print(end_text(event, self._unit))

    def _step(self, event: StepEvent) -> None:
        left = self._remaining.after(event, self._steps)
        due = event.step in (1, self._steps) or event.step % self._every == 0
        evaluated = event.eval_loss is not None and 2 * (event.step - self._last) >= self._every
        if due or evaluated:
            self._last = event.step
            number = f"{event.step:{len(str(self._steps))}}/{self._steps}"
            self._print(f"step {number}  {step_text(event, self._unit)}  {left} left")

    def close(self) -> None:
        with _without_room():
            self._stream.flush()


class LiveConsole:
    """A bar, the current numbers and the course of the loss, redrawn in place; notes scroll by above."""

    def __init__(self, stream: TextIO) -> None:
        self._console = RichConsole(file=stream)
        self._remaining, self._notes = Remaining(), Notes()
        self._steps, self._unit = 0, "tokens"
        self._losses: list[float] = []
        # Drawn by events rather than by a thread of its own: a thread would compete with the rank's compute.
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._drawn = 0.0

    def event(self, event: Event) -> None:
        match event:
            case StartEvent():
                self._steps, self._unit = event.steps, event.unit
                self._console.print(start_text(event), highlight=False, markup=False)
                self._live.start()
            case StepEvent():
                self._losses.append(event.loss)
                left = self._remaining.after(event, self._steps)
                if event.step == self._steps or time.monotonic() - self._drawn > 0.1:
                    self._drawn = time.monotonic()
                    self._live.update(self._picture(event, left), refresh=True)
            case NoteEvent() | TransitionEvent():
                text = self._notes.text(event)
                if text is not None:
                    self._console.print(text, style="yellow", markup=False)
            case EndEvent():
                self._live.stop()
                self._console.print(end_text(event, self._unit), highlight=False, markup=False)

    def _picture(self, event: StepEvent, left: str) -> Group:
        bar = Table.grid(padding=(0, 2))
        bar.add_row(Text(f"step {event.step}/{self._steps}", style="bold"),
                    ProgressBar(total=self._steps, completed=event.step, width=30), Text(f"{left} left"),
                    Text(sparkline(self._losses, 16), style="cyan"))
        return Group(bar, Text(step_text(event, self._unit)))

    def close(self) -> None:
        self._live.stop()


def sparkline(values: list[float], width: int) -> str:
    """The course of `values` in `width` characters or fewer: means of equal parts, lowest to highest."""
    finite = [value for value in values if math.isfinite(value)]
    parts = min(width, len(finite))
    means = []
    for part in range(parts):
        piece = finite[part * len(finite) // parts:(part + 1) * len(finite) // parts]
        means.append(sum(piece) / len(piece))
    if not means:
        return ""
    low, high = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - low) / ((high - low) or 1))] for mean in means)
