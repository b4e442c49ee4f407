"""Trackers that every run has in addition to its files: the console (lines, and on a terminal a live line below them)
and TensorBoard.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from tensorboardX import SummaryWriter

from ranvier.config.run import Run
from ranvier.mesh import REQUIRED_AXES, mesh_text
from ranvier.system.terminal import fields, memory_text, wrap_lines, wrap_text
from ranvier.train.events import EndEvent, EvalEvent, Event, NoteEvent, StartEvent, StepEvent, Tracker, TransitionEvent
from ranvier.train.history import History
from ranvier.train.logs import EventsFile, Log, MetricsFile, read_events, read_metrics, step_fields, writing

MAX_SECONDS_BETWEEN_LINES = 30.0
_VERBOSE_SETTINGS = frozenset({"pipeline", "attention"})
"""Lines of the heading that only --verbose prints, as it does the table of stages."""
NOTES_OF_A_KIND = 3
"""Number of first notes of the same name that are all shown; events.jsonl has every note."""
SECONDS_BETWEEN_NOTES = 60.0
"""Seconds between shown notes of the same name, after the first ones: a recurring fault, such as a checkpoint that
cannot be written, must stay visible."""


def open_outputs(run_dir: Path, history: History, trackers: Sequence[Tracker], after: int | None
                 ) -> tuple[list[Tracker], list[NoteEvent]]:
    """All trackers of the run, and notes about damaged lines of its logs. after: the step after which a run that began
    in this folder resumes; None for a new run."""
    with writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    steps, events = Log(name="metrics.jsonl"), Log(name="events.jsonl")
    if after is not None:
        steps, events = read_metrics(run_dir, after), read_events(run_dir)
        with writing(run_dir / "summary.json"), suppress(FileNotFoundError):
            (run_dir / "summary.json").unlink()  # the run had ended, and is resumed now
        history.remember(steps.lines, [line for line in events.lines if line["step"] <= after])
        history.past_events = events.lines
    outputs: list[Tracker] = [history, MetricsFile(run_dir, steps.lines), EventsFile(run_dir, events.lines),
                              TensorBoard(run_dir, after or 0), *trackers]
    return outputs, [NoteEvent(step=after or 0, event="log-damaged", text=text) for log in (steps, events)
                     if (text := log.text()) is not None]


def console(stream: TextIO, run: Run) -> Tracker:
    """The live console on a terminal, the plain one for files, pipes and terminals that cannot move the cursor."""
    kind = LiveConsole if stream.isatty() and os.environ.get("TERM") != "dumb" else PlainConsole
    return kind(stream, every=run.log.every, verbose=run.verbose)


def duration(seconds: float) -> str:
    """12 s as 0:12, two hours as 2:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def time_left(seconds: float) -> str:
    """`duration` up to an hour; above, hours and minutes."""
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}h{minutes:02}" if seconds >= 3600 else duration(seconds)


def step_parts(event: StepEvent, unit: str = "tokens") -> list[str]:
    """The numbers of one step, at fixed widths."""
    per_device = [f"{_rate(event.tokens_per_second / event.num_ranks):>7}/rank"] if event.num_ranks > 1 else []
    share = f"{event.model_flops_utilisation:3.0%}"
    return [f"loss {event.loss:6.4f}", f"grad norm {event.grad_norm:5.3g}", f"lr {event.learning_rate:8.2e}",
            f"{_rate(event.tokens_per_second):>7} {unit}/s", *per_device,
            f"MFU {share}" if event.against_published_peak else f"{share} of matmul rate",
            f"memory {memory_text(event.memory_bytes):>8}", f"bubble {event.bubble_fraction:3.0%}"]


def eval_parts(event: StepEvent) -> list[str]:
    """The numbers of an evaluation after the step: loss, accuracy, the losses of named sets."""
    found = [] if event.eval_loss is None else [f"eval {event.eval_loss:.4f}"]
    if "eval_accuracy" in event.eval_scores:
        found.append(f"accuracy {event.eval_scores['eval_accuracy']:.2%} of {event.eval_scores['eval_count']:,.0f}")
    return found + [f"{name.removeprefix('eval_').removesuffix('_loss')} {loss:.4f}"
                    for name, loss in event.eval_scores.items() if name.startswith("eval_") and name.endswith("_loss")]


def _rate(per_second: float) -> str:
    return f"{per_second:,.1f}" if per_second < 100 else f"{per_second:,.0f}"


def start_text(event: StartEvent, stream: TextIO, verbose: bool = False) -> str:
    """The run's heading: mesh and settings, one line each, fitted to `stream` by `wrap_lines`. verbose: all settings,
    and the table of stages."""
    lines = [f"{event.recipe}: {event.steps} steps on mesh {mesh_text(event.mesh)}"]
    lines += [wrap_lines(f"  {name:<14} {value}", stream, indent=17)
              for name, value in event.settings.items() if verbose or name not in _VERBOSE_SETTINGS]
    return "\n".join([*lines, event.stages] if verbose else lines)


def end_text(event: EndEvent, stream: TextIO, unit: str = "tokens") -> str:
    """The run's result, sample text, memory report and pictures, as several lines for `stream`. unit: of the targets,
    in the plural."""
    summary = event.summary
    losses = f"loss {summary['final_loss']:.4f}" if summary.get("final_loss") is not None else "no loss"
    if summary.get("eval_loss") is not None:
        losses += f", held-out {summary['eval_loss']:.4f}"
    lines = [f"done in {duration(summary['seconds'])}: {losses}; median step: "
             f"{_rate(summary['tokens_per_second'])} {unit}/s, bubble {summary['bubble_fraction']:.1%}"]
    if event.sample:
        note = [wrap_lines(event.sample_note, stream, indent=2)] if event.sample_note else []
        lines += ["", *note, event.sample, ""]
    if event.report:
        lines += [event.report, ""]
    return "\n".join(lines + [f"wrote {picture}" for picture in event.pictures])


@contextmanager
def _ignoring_full_disk() -> Iterator[None]:
    """Ignore a full disk: the console's output loses lines, but does not end the run. Essential files raise errors."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise


class PlainConsole:
    """Lines of text without colours or cursor movements, flushed one by one. Each step is one line, so that grep finds
    all of it.

    every: steps from one line to the next. verbose: also print notes for experts. clock: seconds.
    """

    def __init__(self, stream: TextIO, *, every: int = 10, verbose: bool = False,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._every, self._verbose, self._clock = stream, every, verbose, clock
        self._steps, self._unit, self._last_line = 0, "tokens", clock()
        self._num_seen, self._step_seconds = 0, 0.0
        self._notes: dict[str, tuple[int, int, float]] = {}  # by kind: shown, left out since, time last shown

    def event(self, event: Event) -> None:
        """Print a heading, a step, a note, a transition or the end; other events are in the run's files."""
        match event:
            case StartEvent():
                self._steps, self._unit = event.steps, event.unit
                self._print(start_text(event, self._stream, self._verbose))
            case StepEvent():
                # the remaining time, by a mean of step durations in which recent steps weigh more
                self._num_seen += 1
                self._step_seconds += max(0.1, 1 / self._num_seen) * (event.step_seconds - self._step_seconds)
                left = f"{time_left(max(0, self._steps - event.step) * self._step_seconds)} left"
                now = self._clock()
                if (event.step in (1, self._steps) or event.step % self._every == 0 or event.eval_loss is not None
                        or now - self._last_line >= MAX_SECONDS_BETWEEN_LINES):
                    self._last_line = now
                    number = f"{event.step:{len(str(self._steps))}}/{self._steps}"
                    self._print_step([f"step {number}", *step_parts(event, self._unit), left, *eval_parts(event)])
                self._show_step(event, left)
            case TransitionEvent():
                self._print(f"step {event.step}: {event}", style="yellow")
            case NoteEvent() if self._verbose or not event.verbose:
                self._note(event)
            case EndEvent():
                self._print(end_text(event, self._stream, self._unit))

    def _note(self, event: NoteEvent) -> None:
        """Print the first notes of each name, and later ones occasionally, so that a note at every step does not flood
        the screen."""
        kind = f"{event.event} {event.fields.get('setting', '')}"  # each setting that has changed is printed
        now = self._clock()
        shown, left_out, when = self._notes.get(kind, (0, 0, now))
        if shown >= NOTES_OF_A_KIND and now - when < SECONDS_BETWEEN_NOTES:
            self._notes[kind] = shown, left_out + 1, when
            return
        self._notes[kind] = shown + 1, 0, now
        more = f" ({left_out:,} before it are in events.jsonl)" if left_out else ""
        self._print(f"step {event.step}: {event.text}{more}", style="yellow")

    def _print(self, text: str, style: str | None = None) -> None:
        """Print lines of text. style: a style of rich, used if there are colours."""
        with _ignoring_full_disk():
            print(wrap_lines(text, self._stream), file=self._stream, flush=True)

    def _print_step(self, parts: Sequence[str]) -> None:
        """Print the numbers of a step."""
        self._print("  ".join(parts))

    def _show_step(self, event: StepEvent, left: str) -> None:
        """Show the numbers of the finished step, and the time left, if there is a live line."""

    def close(self) -> None:
        """Flush what has been printed, unless the disk is full."""
        with _ignoring_full_disk():
            self._stream.flush()


class LiveConsole(PlainConsole):
    """The same lines, fitted to the terminal; below them a bar, the current numbers and a sparkline of the loss are
    redrawn in place."""

    def __init__(self, stream: TextIO, *, every: int = 10, verbose: bool = False,
                 clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream, every=every, verbose=verbose, clock=clock)
        self._console, self._losses, self._drawn = RichConsole(file=stream), list[float](), 0.0
        # Drawn by events rather than by its own thread, which would compete with the rank's compute.
        self._live = Live(console=self._console, auto_refresh=False, transient=False)

    def event(self, event: Event) -> None:
        """Print an event; the live line is there from the heading to the end."""
        if isinstance(event, EndEvent):
            self._live.stop()
        super().event(event)
        if isinstance(event, StartEvent):
            self._live.start()

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(Text(wrap_text(text, self._console.width), style=style or ""), soft_wrap=True)

    def _print_step(self, parts: Sequence[str]) -> None:
        self._print(fields(parts, self._console.width))

    def _show_step(self, event: StepEvent, left: str) -> None:
        self._losses.append(event.loss)
        if event.step != self._steps and self._clock() - self._drawn <= 0.1:  # at most ten times a second
            return
        self._drawn = self._clock()
        bar = Table.grid(padding=(0, 2))
        bar.add_row(Text(f"step {event.step}/{self._steps}", style="bold"),
                    ProgressBar(total=self._steps, completed=event.step, width=30), Text(left),
                    Text(sparkline(self._losses, 16), style="cyan"))
        numbers = [*step_parts(event, self._unit), f"waits {1e3 * event.wait_seconds:.0f} ms", *eval_parts(event)]
        self._live.update(Group(bar, Text(fields(numbers, self._console.width, indent=0))), refresh=True)

    def close(self) -> None:
        """Leave the last state of the live line on the screen."""
        self._live.stop()


def sparkline(values: list[float], width: int) -> str:
    """`values` drawn in `width` characters or fewer: means of equal parts, scaled from the lowest to the highest."""
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


def scalars(event: StepEvent | EvalEvent | TransitionEvent) -> dict[str, float]:
    """The numbers of an event by the names of their curves: train/, speed/, eval/ (eval/NAME/ for a named set),
    mesh/."""
    match event:
        case EvalEvent():
            place = f"eval/{event.name}/" if event.name else "eval/"
            return {place + name.removeprefix("eval_"): score
                    for name, score in {"loss": event.loss, **event.scores}.items()}
        case TransitionEvent():
            return {"mesh/transition_seconds": event.seconds, "mesh/transition_bytes": event.bytes_moved}
    fields: dict[str, Any] = step_fields(event)
    groups = {"train": ("loss", "grad_norm", "learning_rate", "loss_scale", "skipped_steps", "frozen_layers"),
              "speed": ("tokens_per_second", "step_seconds", "bubble_fraction", "wait_seconds", "flops_per_second",
                        "model_flops_utilisation", "memory_bytes", "slowest_replica", "slowest_replica_ratio"),
              "mesh": REQUIRED_AXES}
    return {f"{group}/{name}": fields[name] for group, names in groups.items() for name in names if name in fields}


class TensorBoard:
    """Scalars under train/, speed/ and eval/; the sample and the notes as text. RanvierError if it cannot write.

    after: the step after which a run with curves in this folder resumes; 0 for a new run.
    """

    def __init__(self, run_dir: Path, after: int = 0) -> None:
        self._folder = run_dir / "tensorboard"
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            if not after:
                for stale in self._folder.glob("events.out.tfevents.*"):  # another run's curve would overlay this run's
                    stale.unlink()
            self._writer = SummaryWriter(str(self._folder), purge_step=after + 1 if after else None)
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)  # no warning about NaN: the run reports it
        self._error: OSError | None = None
        # the writer's thread would end at the first error, and its queue would block once it is full
        file = self._writer.file_writer.event_writer._ev_writer
        file.write_event, file.flush = self._guard(file.write_event), self._guard(file.flush)

    def _guard(self, write: Callable[..., Any]) -> Callable[..., None]:
        """`write` until its first error, which the next event raises. Nothing is written after an incomplete record,
        since no reader gets past it."""
        def guarded(*args: object) -> None:
            if self._error is None:
                try:
                    write(*args)
                except OSError as error:
                    self._error = error
        return guarded

    def event(self, event: Event) -> None:
        """Write a step, evaluation, transition, note or sample. RanvierError if an earlier one could not be written."""
        with writing(self._folder):
            if self._error is not None:
                raise self._error
            match event:
                case StepEvent() | EvalEvent() | TransitionEvent():
                    for name, value in scalars(event).items():
                        self._writer.add_scalar(name, value, event.step)
                    if isinstance(event, TransitionEvent):
                        self._writer.add_text("notes/transition", str(event), event.step)
                case NoteEvent():
                    self._writer.add_text(f"notes/{event.event}", event.text, event.step)
                case EndEvent() if event.sample:
                    self._writer.add_text("sample", event.sample, event.step)

    def close(self) -> None:
        """Flush and close the event file. RanvierError if it cannot be written."""
        with writing(self._folder):
            self._writer.close()
            if self._error is not None:
                raise self._error
