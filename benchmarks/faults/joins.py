"""Ranks join and are lost at random: does the run take each sample once, and come to the same end?

    python -m benchmarks.faults.joins --events 100 --outcomes joins.jsonl --out joins.md

Each case is a run of one or two ranks under plain python with `--launch.join-address` and `--max-restarts`, and four
events after random steps, drawn from the case's number:

    join        `ranvier join` starts one to three ranks
    dies        the same, and one of them is killed at a random moment while it joins: before the run calls it, while it
                connects, or when it is a rank already
    newcomer    a rank that has joined is killed
    original    a rank with which the run was started is killed

Then the run goes on to its last step. It must end with exit code 0, with the metrics of each step once and in order,
with the losses of an undisturbed run on one rank (relative difference below 1e-9, fp64), and no process of it or of a
join may be left 10 s later. The outcome of a case is a line in --outcomes; a case that is there is not run again.

The run's ranks are stopped while newcomers start, which takes longer than the whole run.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.faults.processes import Start
from benchmarks.faults.training import Training
from ranvier.mesh import Mesh

KINDS = ("join", "dies", "newcomer", "original")
STEPS = 200
EVENTS_PER_CASE = 4
_TOLERANCE = 1e-9
_LIMIT_SECONDS = 10.0
_EVENT_SECONDS = 300.0
_TIMEOUT_SECONDS = 300.0
"""Of messages and collectives: longer than the run's ranks are stopped, while others of them wait."""


@dataclass(kw_only=True)
class Outcome:
    """What came of a case. problems: empty where nothing went wrong."""

    number: int
    seed: int
    events: list[str] = field(default_factory=list)
    joined: int = 0
    refused: int = 0
    restarts: int = 0
    difference: float = 0.0
    """The largest relative difference of a loss."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class JoinTrial:
    """One case in the work folder of `training`."""

    def __init__(self, number: int, seed: int, training: Training, events: int = EVENTS_PER_CASE) -> None:
        self._draw, self._training, self._events = random.Random(f"{seed} {number}"), training, events
        self._outcome = Outcome(number=number, seed=seed)
        self._joins: list[Start] = []

    def run(self, expected: Sequence[float]) -> Outcome:
        """expected: the losses of an undisturbed run."""
        began, outcome = time.monotonic(), self._outcome
        self._training.forget()
        self._run = start(self._training, Mesh(data=self._draw.randint(1, 2)), "joins")
        try:
            for number in range(self._events):
                self._step(self._draw.randint(1, STEPS // self._events // 2))
                self._event(KINDS[0] if number == 0 else self._draw.choice(KINDS))
            if self._run.wait_gone(_EVENT_SECONDS) is None:
                outcome.problems.append("the run did not end")
            deadline = time.monotonic() + _LIMIT_SECONDS
            for join in self._joins:
                if join.wait_gone(max(0.0, deadline - time.monotonic())) is None:
                    outcome.problems.append(f"a join has not ended:\n{join.text[-1000:]}")
        finally:
            for each in (self._run, *self._joins):
                each.kill_all()
        self._judge(expected)
        outcome.seconds = time.monotonic() - began
        return outcome

    def _judge(self, expected: Sequence[float]) -> None:
        outcome, lines = self._outcome, self._training.lines("metrics.jsonl")
        outcome.joined, outcome.refused = (self._count(name) for name in ("joined", "join-refused"))
        outcome.restarts = self._run.text.count("ranvier: restart ")
        if self._run.code != 0:
            outcome.problems.append(f"exit code {self._run.code}:\n{self._run.text[-3000:]}")
        if [line.get("step") for line in lines] != list(range(1, STEPS + 1)):
            outcome.problems.append(f"metrics of {len(lines)} steps, not of each once")
            return
        outcome.difference = max(abs(line["loss"] / loss - 1) for line, loss in zip(lines, expected, strict=True))
        if outcome.difference > _TOLERANCE:
            outcome.problems.append(f"losses differ by {outcome.difference:.1e}")

    # ------------------------------------------------------------------ events

    def _event(self, kind: str) -> None:
        living = [join for join in self._joins if join.code is None and join.ranks()]
        if kind == "newcomer" and not living:
            kind = "join"
        self._outcome.events.append(kind)
        match kind:
            case "join" | "dies":
                self._join(dies=kind == "dies")
            case "newcomer":
                self._kill(self._draw.choice(living))
            case "original":
                self._kill(self._run)

    def _join(self, *, dies: bool) -> None:
        before, restarts = self._answers(), self._run.text.count("ranvier: restart ")
        with self._stopped():
            join = Start("python", 1, ["-m", "ranvier", "join", str(self._training.run_dir), "--ranks",
                                       str(self._draw.randint(1, 3))],
                         self._training.root / f"join-{len(self._joins)}.log")
            self._joins.append(join)
            if not join.wait_until(lambda: any(self._training.run_dir.glob("resize-*.json")), _EVENT_SECONDS):
                self._outcome.problems.append(f"newcomers have not asked:\n{join.text[-1000:]}")
                return
            if dies and self._draw.random() < 0.3:
                self._kill_one(join)
        if dies:
            time.sleep(self._draw.uniform(0.0, 0.3))
            self._kill_one(join)
        if not self._run.wait_until(lambda: self._answers() > before or self._run.text.count(
                "ranvier: restart ") > restarts, _EVENT_SECONDS) and self._run.code != 0:
            self._outcome.problems.append("newcomers have no answer")

    def _kill(self, of: Start) -> None:
        restarts = self._run.text.count("ranvier: restart ")
        if self._kill_one(of) and not self._run.wait_until(
                lambda: self._run.text.count("ranvier: restart ") > restarts, _EVENT_SECONDS) and self._run.code != 0:
            self._outcome.problems.append("the run has not started again")

    def _kill_one(self, of: Start) -> bool:
        ranks = sorted(of.ranks().values())
        if ranks:
            of.signal(self._draw.choice(ranks), signal.SIGKILL)
        return bool(ranks)

    # ------------------------------------------------------------------ the run

    def _step(self, count: int) -> None:
        """Let the run take so many steps more, and be ready for newcomers."""
        at = self._training.steps_done()
        if not self._run.wait_until(lambda: self._training.steps_done() >= at + count
                                    and (self._training.run_dir / "join.json").exists(), _EVENT_SECONDS) \
                and self._run.code != 0:
            self._outcome.problems.append(f"no step after step {at}")

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        ranks = self._run.ranks().values()
        for pid in ranks:
            self._run.signal(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in ranks:
                self._run.signal(pid, signal.SIGCONT)

    def _answers(self) -> int:
        return self._count("joined") + self._count("join-refused")

    def _count(self, event: str) -> int:
        return sum(line.get("event") == event for line in self._training.lines("events.jsonl"))


def start(training: Training, mesh: Mesh, name: str) -> Start:
    """Start the run that ranks may join."""
    return Start("python", mesh.size, [
        "-m", "ranvier", *training.args(mesh, "torch", _TIMEOUT_SECONDS), "--train.steps", str(STEPS),
        "--checkpoint.every", "10", "--batch.global-size", "8", "--launch.join-address", "127.0.0.1",
        "--launch.stopped-seconds", "0", "--launch.threads", "1", "--max-restarts", "100"],
        training.root / f"{name}.log")


def undisturbed(training: Training) -> list[float]:
    """The losses of the run on one rank."""
    training.forget()
    alone = start(training, Mesh(), "undisturbed")
    gone = alone.wait_gone(_EVENT_SECONDS)
    alone.kill_all()
    losses = [line["loss"] for line in training.lines("metrics.jsonl")]
    if gone is None or alone.code != 0 or len(losses) != STEPS:
        raise RuntimeError(f"an undisturbed run ended with {alone.code}:\n{alone.text[-3000:]}")
    return losses


def table(outcomes: Sequence[Outcome], seed: int) -> str:
    """What came of all cases, in Markdown."""
    kinds = Counter(kind for outcome in outcomes for kind in outcome.events)
    bad = [outcome for outcome in outcomes if outcome.problems]
    return "\n".join([
        f"{sum(kinds.values())} events in {len(outcomes)} runs, seed {seed}: {len(bad)} runs went wrong.", "",
        "| joins | newcomers killed while joining | newcomers killed | original ranks killed | taken in | refused | "
        "restarts | largest difference of a loss |", "|---|---|---|---|---|---|---|---|",
        "| " + " | ".join(map(str, (
            *(kinds[kind] for kind in KINDS), sum(one.joined for one in outcomes),
            sum(one.refused for one in outcomes), sum(one.restarts for one in outcomes),
            f"{max((one.difference for one in outcomes), default=0.0):.1e}"))) + " |", "",
        *(f"- case {one.number} ({', '.join(one.events)}): {'; '.join(one.problems)}" for one in bad)])


def main(argv: Sequence[str] | None = None) -> int:
    """See above; 0 where nothing went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=100, help=f"in all, {EVENTS_PER_CASE} in each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--outcomes", type=Path, default=Path("joins-outcomes.jsonl"))
    parser.add_argument("--out", type=Path, help="where the table goes as well, in Markdown")
    parser.add_argument("--folder", type=Path, help="where runs are; a temporary folder unless given")
    given = parser.parse_args(argv)
    done = {}
    for text in given.outcomes.read_text(encoding="utf-8").splitlines() if given.outcomes.exists() else ():
        outcome = Outcome(**json.loads(text))
        done[outcome.number, outcome.seed] = outcome
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nothing is left behind
    cases = [(number, given.seed) for number in range(-(-given.events // EVENTS_PER_CASE))]
    with tempfile.TemporaryDirectory(prefix="ranvier-joins-") if given.folder is None else nullcontext(
            given.folder) as folder:
        training = Training(Path(folder).resolve())
        expected = undisturbed(training)
        for number, seed in cases:
            if (number, seed) in done:
                continue
            done[number, seed] = outcome = JoinTrial(number, seed, training).run(expected)
            with given.outcomes.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
            print(f"{number + 1}/{len(cases)} {', '.join(outcome.events)}: {outcome.seconds:.0f} s"
                  + "".join(f"\n     ERROR {text}" for text in outcome.problems), file=sys.stderr, flush=True)
    outcomes = [done[case] for case in cases]
    text = table(outcomes, given.seed)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")
    return 1 if any(outcome.problems for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
