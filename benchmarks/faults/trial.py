"""One case of the soak: a start with a fault, the start after it, and the verdict.

    start, fault at a drawn step -> everything is gone within the limit, no process is left, nothing claims success
    start again, --resume auto   -> from the newest undamaged checkpoint to the end, with the losses of an undisturbed
                                    run and every step's metrics once

The faults themselves are in `benchmarks.faults.kinds`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import cached_property

from benchmarks.faults.disk import leftovers, lost
from benchmarks.faults.processes import Launcher, Start
from benchmarks.faults.training import KEEP, MESHES, STEPS, Training
from ranvier.mesh import Mesh

LATEST_STEP = 12
"""The last step after which a fault happens: the later steps are for a run that does not notice the fault."""
PACE_SECONDS = 0.12
_PROGRESS_SECONDS = 240.0
_RESUME_SECONDS = 240.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of fault under a launcher; `number` and `seed` draw the rest."""

    kind: str
    launcher: Launcher
    number: int
    seed: int

    @property
    def key(self) -> tuple[str, str, int, int]:
        return (self.kind, self.launcher, self.number, self.seed)

    @cached_property
    def draw(self) -> random.Random:
        return random.Random(f"{self.seed} {self.kind} {self.launcher} {self.number}")


@dataclass(kw_only=True)
class Outcome:
    """Outcome of a case. seconds: from the fault (or the time limit after it) until every process was gone; None if
    some had to be killed. resumed: whether the run reached its end correctly, by a new start if the fault ended the
    first. problems: descriptions of everything wrong; losses: the problems that are lost work."""

    kind: str
    launcher: str
    number: int
    seed: int
    what: str = ""
    seconds: float | None = None
    limit_seconds: float = 10.0
    resumed: bool = False
    left: list[int] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    codes: list[int | None] = field(default_factory=list)
    case_seconds: float = 0.0
    text: str = ""

    @property
    def ended(self) -> bool:
        return self.seconds is not None and self.seconds <= self.limit_seconds

    @property
    def good(self) -> bool:
        return self.ended and self.resumed and not (self.left or self.losses or self.problems)

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"good": self.good}


class Trial:
    """A case in progress; kinds of faults change `allowance` and `missing`, and add problems."""

    def __init__(self, case: Case, training: Training, limit_seconds: float, timeout_seconds: float) -> None:
        self.case, self.draw, self.training, self.timeout_seconds = case, case.draw, training, timeout_seconds
        self.mesh: Mesh = self.draw.choice(MESHES)
        self.transport = self.draw.choice(("mpi", "torch")) if case.launcher == "mpiexec" else "torch"
        self.step = self.draw.randrange(LATEST_STEP + 1)
        self.outcome = Outcome(kind=case.kind, launcher=case.launcher, number=case.number, seed=case.seed,
                               limit_seconds=limit_seconds)
        self.allowance = 0.0
        """Seconds after the fault that do not count: a time limit."""
        self.missing: set[int] = set()
        """Steps whose metrics the fault itself has destroyed."""
        self.starts: list[Start] = []

    # ------------------------------------------------------------------ what kinds of faults use

    def say(self, what: str) -> None:
        """Describe the fault, for the outcome."""
        self.outcome.what = f"{self.outcome.what}; {what}" if self.outcome.what else what

    def problem(self, what: str) -> None:
        self.outcome.problems.append(what)

    def start(self, *, faults: tuple[str, ...] = (), paced: bool = False, **more: float) -> Start:
        """Start the run. paced: slowly, so that it would continue for longer than the limit after any fault. more: as
        in `Training.start`."""
        if paced:
            faults = (*faults, f"slow:rank=0,call={4 * self.step + 1},for={PACE_SECONDS}")
        start = self.training.start(self.case.launcher, self.mesh, self.transport, f"start-{len(self.starts)}", faults,
                                    **more)
        self.starts.append(start)
        return start

    def forget(self) -> None:
        """Begin again, with an empty folder."""
        for start in self.starts:
            start.kill_all()
        self.training.forget()
        self.starts.clear()

    def wait_for_step(self, start: Start) -> None:
        """Wait until the drawn step is over (0: until all ranks have been started), and then a drawn time."""
        if self.step == 0:
            start.wait_until(lambda: len(start.ranks()) == self.mesh.size, _PROGRESS_SECONDS)
            time.sleep(self.draw.uniform(0.0, 2.0))
        else:
            start.wait_until(lambda: self.training.steps_done() >= self.step, _PROGRESS_SECONDS)
            time.sleep(self.draw.uniform(0.0, 0.1))
        if start.code is not None:
            self.problem(f"the run ended with {start.code} before anything happened to it")

    def wait_gone(self, start: Start, *, since: float | None = None, may_go_on: bool = False) -> None:
        """Wait until every process of `start` is gone, and judge: `since` (now) is the moment of the fault.
        may_go_on: the run may take further steps, and then that moment is when it last wrote into its folder."""
        since = time.monotonic() if since is None else since
        most = self.allowance + 2.5 * self.outcome.limit_seconds + _RESUME_SECONDS * may_go_on
        gone = start.wait_gone(most - (time.monotonic() - since))
        if may_go_on:
            since = max(since, time.monotonic() - self.training.seconds_since_last_write())
        self.outcome.left += start.kill_all()
        self.outcome.codes.append(start.code)
        if gone is None:
            self.problem("had not ended by itself")
            self.outcome.seconds = None
        else:
            self.outcome.seconds = round(max(0.0, gone - since - self.allowance), 2)
        self.judge_end(start)

    def wait_gone_unharmed(self, start: Start) -> None:
        """Wait for the end of an undisturbed start; the time that it takes does not count."""
        seconds = self.outcome.seconds
        if start.wait_gone(_RESUME_SECONDS) is None:
            self.problem("a start that nothing had happened to had not ended by itself")
        self.outcome.left += start.kill_all()
        self.outcome.codes.append(start.code)
        self.outcome.seconds = seconds
        self.judge_end(start)

    # ------------------------------------------------------------------ the case

    def run(self, kind: Kind) -> Outcome:
        """Run the case: inside `kind(self)` the fault has happened, and the affected run has ended; then the run is
        resumed."""
        began = time.monotonic()
        self.training.forget()
        reference = self.training.reference(self.mesh, self.transport)
        self.training.forget()
        try:
            with kind(self):
                if not self.training.is_complete():
                    self.resume()
                self.compare(reference)
                self.outcome.resumed = self.training.is_complete() and not self.outcome.losses
        except Exception as error:  # one case that cannot be carried out does not end a soak of an hour
            self.problem(f"the case could not be carried out: {type(error).__name__}: {error}")
        finally:
            if not self.outcome.good:
                self.outcome.text = "\n".join(f"--- start {number}\n{start.text[-2500:]}"
                                              for number, start in enumerate(self.starts))
            self.forget()
        self.outcome.case_seconds = round(time.monotonic() - began, 1)
        return self.outcome

    def judge_end(self, start: Start) -> None:
        """Check that a start that ended has printed true statements, and no traceback."""
        if start.code == 0 and not self.training.is_complete():
            self.problem("ended with exit code 0, although the run is not complete with its last checkpoint")
        if "Traceback" in start.text and self.case.launcher != "torchrun":  # the agent prints its own traceback
            self.problem("printed a traceback")

    def resume(self) -> None:
        """Start the run again after the fault."""
        before, stale = self.training.whole_steps(), leftovers(self.training.checkpoints)
        start = self.start()
        gone = start.wait_gone(_RESUME_SECONDS)
        self.outcome.left += start.kill_all()
        self.outcome.codes.append(start.code)
        if gone is None:
            self.problem("the start after the fault had not ended by itself")
        elif start.code != 0:
            self.problem(f"the start after the fault ended with {start.code}")
        self.judge_end(start)
        if (step := self.training.resumed_from()) != max(before, default=0):
            self.problem(f"resumed from step {step}, not {max(before, default=0)}")
        if gone_steps := lost(before, self.training.whole_steps(), keep=KEEP, keep_every=STEPS):
            self.outcome.losses.append(f"the whole checkpoints of steps {sorted(gone_steps)} are gone")
        if stale := stale & leftovers(self.training.checkpoints):
            self.problem(f"temporary folders were left: {sorted(stale)}")

    def compare(self, reference: list[float]) -> None:
        """Check that every step's metrics occur once, with losses bit-identical to those of an undisturbed run."""
        found: dict[int, list[object]] = {}
        for line in self.training.lines("metrics.jsonl"):
            if isinstance(line.get("step"), int):
                found.setdefault(line["step"], []).append(line.get("loss"))
        for step, loss in enumerate(reference, 1):
            losses = found.pop(step, [])
            if step in self.missing and len(losses) <= 1:
                continue
            if len(losses) != 1:
                self.outcome.losses.append(f"step {step} is {len(losses)} times in metrics.jsonl")
            elif losses[0] != loss:
                self.outcome.losses.append(f"step {step} has the loss {losses[0]!r}, not {loss!r}")
        if others := sorted(found.keys() - self.missing):
            self.outcome.losses.append(f"metrics.jsonl has the steps {others}")
        if not self.training.is_complete():
            self.outcome.losses.append("the run did not reach its end")


Kind = Callable[[Trial], AbstractContextManager[None]]
