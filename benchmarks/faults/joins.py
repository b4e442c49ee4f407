"""Ranks join and are lost at random: does the run take each sample once, and reach the same end?

    python -m benchmarks.faults.joins --events 100 --outcomes joins.jsonl --out joins.md

Each case is a run of two or three replicas under plain python with `--launch.join-address`, `--launch.survive-losses`
and `--max-restarts`, and several events after random steps, drawn from the case's number:

    join        `ranvier join` starts one or two ranks
    dies        the same, and one of them is killed at a random moment while it joins: before the run calls it, while it
                connects, or when it is already a rank
    newcomer    a rank that has joined is killed
    original    a rank with which the run was started is killed, but not rank 0
    pair        two of these ranks are killed, the second one at a random moment up to half a second later
    first       rank 0 is killed: the run starts again from its last checkpoint on the ranks with which it was started

A run has two to four ranks; if an event finds no rank to kill, or no room, ranks join or are killed instead. Then the
run continues to its last step. It must end with exit code 0, with the metrics of each step once and in order, with the
losses of an undisturbed run on one rank (relative difference below 1e-9, fp64), and no process of the run or of a join
may be left 10 s later. It must have restarted exactly as often as rank 0 was killed. The outcome of a case is a line in
--outcomes; a case that is in the file is not run again.

The run's ranks are stopped while newcomers start, which takes longer than the entire run.
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

KINDS = {"join": 3.0, "dies": 2.0, "newcomer": 2.0, "original": 2.0, "pair": 1.0, "first": 0.5}
"""Kind of event -> its weight in the draw."""
STEPS = 800
EVENTS_PER_CASE = 10
_MOST_RANKS = 4
_TOLERANCE = 1e-9
_LIMIT_SECONDS = 10.0
_EVENT_SECONDS = 300.0
_TIMEOUT_SECONDS = 300.0
"""Time limit of messages and collectives: longer than the run's ranks are stopped while others wait for them."""


@dataclass(kw_only=True)
class Outcome:
    """Outcome of a case. problems: empty if nothing went wrong."""

    number: int
    seed: int
    events: list[str] = field(default_factory=list)
    joined: int = 0
    refused: int = 0
    lost: int = 0
    """Lost ranks without which the run has continued."""
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
        self._firsts = 0

    def run(self, expected: Sequence[float]) -> Outcome:
        """Run the case. expected: the losses of an undisturbed run."""
        began, outcome = time.monotonic(), self._outcome
        self._training.forget()
        self._run = start(self._training, Mesh(data=self._draw.randint(2, 3)), "joins")
        try:
            for _ in range(self._events):
                self._step(self._draw.randint(1, max(1, STEPS // self._events // 4)))
                self._event(self._draw.choices([*KINDS], [*KINDS.values()])[0])
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
        outcome.joined, outcome.refused = self._count("joined"), self._refused()
        outcome.restarts = self._restarts()
        outcome.lost = self._lost()
        if outcome.restarts != self._firsts:
            outcome.problems.append(f"{outcome.restarts} restarts, and rank 0 was killed {self._firsts} times:\n"
                                    f"{self._run.text[-3000:]}")
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
        newcomers = [(join, pid) for join in self._joins if join.code is None for pid in join.ranks().values()]
        originals = [(self._run, pid) for rank, pid in self._run.ranks().items() if rank]
        among = {"newcomer": newcomers, "original": originals, "pair": newcomers + originals}.get(kind)
        if among is not None and len(among) < (2 if kind == "pair" else 1):
            kind = "original" if originals else "newcomer" if newcomers else "join"
            among = originals or newcomers or None
        if among is not None and len(newcomers + originals) <= (2 if kind == "pair" else 1):
            kind, among = "join", None  # a single rank would reach the last step before newcomers come
        if kind in ("join", "dies") and len(newcomers + originals) + 1 >= _MOST_RANKS:
            kind, among = ("original", originals) if originals else ("newcomer", newcomers)
        self._outcome.events.append(kind)
        if among is not None:
            self._lose(self._draw.sample(sorted(among, key=lambda one: one[1]), 2 if kind == "pair" else 1))
        elif kind == "first":
            self._lose_first()
        else:
            self._join(dies=kind == "dies", room=_MOST_RANKS - len(newcomers + originals) - 1)

    def _join(self, *, dies: bool, room: int) -> None:
        before, refused = self._answers(), self._refused()
        with self._stopped():
            join = Start("python", 1, ["-m", "ranvier", "join", str(self._training.run_dir), "--ranks",
                                       str(self._draw.randint(1, min(room, 2)))],
                         self._training.root / f"join-{len(self._joins)}.log")
            self._joins.append(join)
            if not join.wait_until(lambda: any(self._training.run_dir.glob("resize-*.json")), _EVENT_SECONDS):
                self._outcome.problems.append(f"newcomers have not asked:\n{join.text[-1000:]}")
                return
            if dies and self._draw.random() < 0.3:
                self._kill_one(join)
        if dies:
            time.sleep(self._draw.uniform(0.0, 0.6))
            self._kill_one(join)
        if not self._run.wait_until(lambda: self._answers() > before, _EVENT_SECONDS) and self._run.code != 0:
            self._outcome.problems.append("newcomers have no answer")
        if self._refused() > refused:
            join.wait_gone(_LIMIT_SECONDS)

    def _kill_one(self, join: Start) -> None:
        ranks = sorted(join.ranks().values())
        if ranks:
            join.signal(self._draw.choice(ranks), signal.SIGKILL)

    def _lose(self, ranks: Sequence[tuple[Start, int]]) -> None:
        """Kill these ranks; returns once the run has continued without them."""
        before, restarts = self._lost(), self._restarts()
        for number, (start_of, pid) in enumerate(ranks):
            if number:
                time.sleep(self._draw.uniform(0.0, 0.5))
            start_of.signal(pid, signal.SIGKILL)
        if not self._run.wait_until(lambda: self._lost() >= before + len(ranks) or self._restarts() > restarts,
                                    _EVENT_SECONDS) and self._run.code != 0:
            self._outcome.problems.append(f"the run has not gone on without {len(ranks)} ranks")

    def _lose_first(self) -> None:
        restarts = self._restarts()
        self._firsts += 1
        self._run.signal(self._run.ranks().get(0, -1), signal.SIGKILL)
        if not self._run.wait_until(lambda: self._restarts() > restarts, _EVENT_SECONDS) and self._run.code != 0:
            self._outcome.problems.append("the run has not started again")
        for join in self._joins:
            join.wait_gone(_LIMIT_SECONDS)

    def _restarts(self) -> int:
        return self._run.text.count("ranvier: restart ")

    def _lost(self) -> int:
        """Ranks that the run has reported as lost; of ranks that were lost together, some may be reported later."""
        return sum(len(line.get("ranks", ())) for line in self._training.lines("events.jsonl")
                   if line.get("event") == "lost")

    # ------------------------------------------------------------------ the run

    def _step(self, count: int) -> None:
        """Let the run take `count` more steps, and be ready for newcomers."""
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
        return self._count("joined") + self._refused()

    def _refused(self) -> int:
        return self._count("join-refused") + self._count("resize-refused")

    def _count(self, event: str) -> int:
        return sum(line.get("event") == event for line in self._training.lines("events.jsonl"))


def start(training: Training, mesh: Mesh, name: str) -> Start:
    """Start the run that ranks may join."""
    return Start("python", mesh.size, [
        "-m", "ranvier", *training.args(mesh, "torch", _TIMEOUT_SECONDS), "--train.steps", str(STEPS),
        "--checkpoint.every", "10", "--batch.global-size", "8", "--launch.join-address", "127.0.0.1",
        "--launch.stopped-seconds", "0", "--launch.survive-losses", "true", "--launch.threads", "1",
        "--max-restarts", "100"],
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
    """Outcomes of all cases, in Markdown."""
    kinds = Counter(kind for outcome in outcomes for kind in outcome.events)
    bad = [outcome for outcome in outcomes if outcome.problems]
    return "\n".join([
        f"{sum(kinds.values())} events in {len(outcomes)} runs, seed {seed}: {len(bad)} runs went wrong.", "",
        "| joins | newcomers killed while joining | newcomers killed | original ranks killed | two killed | rank 0 "
        "killed | taken in | refused | lost without a restart | restarts | largest difference of a loss |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        "| " + " | ".join(map(str, (
            *(kinds[kind] for kind in KINDS), sum(one.joined for one in outcomes),
            sum(one.refused for one in outcomes), sum(one.lost for one in outcomes),
            sum(one.restarts for one in outcomes),
            f"{max((one.difference for one in outcomes), default=0.0):.1e}"))) + " |", "",
        *(f"- case {one.number} ({', '.join(one.events)}): {'; '.join(one.problems)}" for one in bad)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases, as described above; returns 0 if nothing went wrong."""
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
        left = [case for case in cases if case not in done]
        expected = undisturbed(training) if left else []
        for number, seed in left:
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
