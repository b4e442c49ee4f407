"""Many random faults in real runs of a tiny GPT: does every run end or continue, on any mesh, with nothing lost?

    python -m benchmarks.faults.random_faults --faults 200 --seed 0 --out docs/faults-table.md

A run of 24 steps is started repeatedly with --resume auto, each time on a mesh of 2 to 4 ranks, until it is complete.
Something happens to nearly every start, and to its files before it. After each start: it has ended on its own, no
process is left, no undamaged checkpoint is gone, it resumed from the newest of them, and no temporary folder of an
earlier start is left. After each run: its losses are those of an undisturbed run, bit-identical if every start had the
same mesh. Anything else is an error, and the exit code is 1.

A share of the runs is elastic: layers freeze by hand after drawn steps, and other meshes are requested
(ranvier.train.resize) during the run; some faults are aimed at the transitions.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

import torch

from benchmarks.faults.attempt import Ended, Outside, attempt, ranks_of
from benchmarks.faults.disk import DAMAGE, leftovers, litter, lost, whole_steps
from ranvier.checkpoint.manifest import step_folder
from ranvier.launch.mpiexec import mpi_available
from ranvier.mesh import Mesh
from ranvier.testing.faults import Fault
from ranvier.train.logs import read_events, read_metrics
from ranvier.train.resize import ask

STEPS, EVERY, KEEP, KEEP_EVERY = 24, 2, 3, 6
MESHES = (Mesh(data=2), Mesh(pipe=2), Mesh(row=2), Mesh(col=2), Mesh(pipe=3), Mesh(data=2, pipe=2), Mesh(pipe=2, row=2),
          Mesh(row=2, col=2), Mesh(data=4), Mesh(data=2, col=2))
LARGEST_CALL, LONGEST_SECONDS = 400, 4.0
TOLERANCE = 1e-9
"""Relative tolerance of losses in fp64 on other meshes than the reference."""
INSIDE = {"a rank is killed": "kill", "a rank is stopped": "stop", "a message is late": "delay",
          "a message is lost": "drop", "an allocation fails": "allocation", "the disk is full": "disk"}
AIMED = {"a rank is killed in a transition": "kill", "a rank is stopped in a transition": "stop",
         "a rank is late in a transition": "delay", "state or an order is lost": "drop",
         "state or an order is changed": "corrupt", "an allocation fails in a transition": "allocation"}
"""Faults of elastic runs."""
_CACHED = {"elastic.cache": "true", "elastic.cache-from": 1, "elastic.cache-precision": "full",
           "elastic.frozen-dropout": "false"}
_PACKED = {"elastic.auto-pipe": "true", "elastic.auto-dp": "true"}
ALSO = ({}, _CACHED, _PACKED, _CACHED | _PACKED)
"""Additional settings of elastic runs, one of these each: read frozen layers' outputs, pack their pipeline."""
OUTSIDE = {"a rank is killed while a checkpoint is written": "save", "the supervisor is killed": "KILL",
           "the run is told to stop": "TERM"}
SAYS = {
    r"was killed by SIGKILL": "says who was killed",
    r"nothing was heard from|no heartbeat from": "says who is silent",
    r"a message did not come|a collective did not end|announcement did not come": "says who waits for whom",
    r"is lost: that of": "says what is lost",
    r"ran out of memory": "says where the memory went",
    r"cannot be written": "says what cannot be written",
    r"been changed on|corrupted in transit": "says what came changed",
    r"has not come from rank|not all ranks have come|not requested by all": "says who waits for whom",
    r"not all that this rank sends": "says who waits for whom",
    r"a collective failed|(has|is) gone|could not carry": "says that a peer is gone",
    r"stopped by SIG|save and stop": ""}
"""Pattern in the output of a run that ends early -> description; the first match counts."""


@dataclass
class Tally:
    """Events so far."""

    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    errors: list[str] = field(default_factory=list)
    starts: int = 0
    runs: int = 0
    same_mesh_runs: int = 0
    elastic_runs: int = 0
    transitions: int = 0
    longest_seconds: float = 0.0

    @property
    def faults(self) -> int:
        return sum(sum(counts.values()) for counts in self.outcomes.values())


@dataclass(frozen=True, kw_only=True)
class Soak:
    """The settings of a soak. root: folder of all its files."""

    root: Path
    faults: int
    seed: int
    timeout_seconds: float
    deadline_seconds: float
    by_command: float
    minutes: float
    elastic: float = 0.4

    def args(self, run_dir: Path, mesh: Mesh, transport: str = "torch", resume: str = "auto",
             manual: str = "", also: Mapping[str, object] = MappingProxyType({})) -> list[str]:
        settings = {
            "model.num-layers": 2, "model.hidden": 32, "model.heads": 2, "model.vocab": 300, "model.sequence": 16,
            "batch.global-size": 8, "batch.microbatch-size": 2, "train.steps": STEPS, "train.warmup-steps": 0,
            "train.eval-sequences": 4, "train.sample-tokens": 0, "train.eval-every": 0, "precision": "fp64",
            "mesh.data": mesh.data, "mesh.pipe": mesh.pipe, "mesh.row": mesh.row, "mesh.col": mesh.col,
            "checkpoint.every": EVERY, "checkpoint.keep": KEEP, "checkpoint.keep-every": KEEP_EVERY,
            "comm.timeout-seconds": self.timeout_seconds, "comm.transport": transport, "launch.device": "cpu",
            "data.corpus": self.root / "corpus", "data.cache-dir": self.root / "cache", "resume": resume,
            "run-dir": run_dir}
        if manual:  # a tiny BERT, whose embedding may freeze because it is not tied
            settings |= {"elastic.freeze": "manual", "elastic.manual": manual, "model.vocab": 120,
                         "data.task": "classification", "data.train": self.root / "train.tsv",
                         "data.eval": self.root / "eval.tsv"} | also
        return ["train", "gpt-tiny", *(str(word) for name, value in settings.items() for word in (f"--{name}", value))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the table goes, in Markdown")
    parser.add_argument("--timeout", type=float, default=10.0, help="--comm.timeout-seconds of the runs")
    parser.add_argument("--deadline", type=float, default=150.0, help="seconds after which a start counts as hung")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further run after so long")
    parser.add_argument("--by-command", type=float, default=0.05, help="share of starts by command rather than by fork")
    parser.add_argument("--elastic", type=float, default=0.4, help="share of runs that change their mesh as they go")
    given = parser.parse_args(argv)
    for name in ("ranvier.train.loop", "ranvier.launch.supervision", "matplotlib.pyplot", "ranvier.train.report",
                 "ranvier.pictures.timeline_picture", "rich.console", "tensorboardX", "tokenizers"):
        import_module(name)  # once here, rather than in every fork
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ranvier-soak-") as root:
        tally = run(Soak(root=Path(root), faults=given.faults, seed=given.seed, timeout_seconds=given.timeout,
                         deadline_seconds=given.deadline, by_command=given.by_command,
                         minutes=given.minutes, elastic=given.elastic))
    text = table(tally, given.seed)
    print(text)
    if given.out:
        given.out.write_text(text)
    return 1 if tally.errors else 0


def run(soak: Soak) -> Tally:
    """Start runs until there were as many faults as `soak` asks for."""
    write_corpus(soak.root / "corpus")
    references: dict[tuple[Mesh, str], list[float]] = {}
    tally, began = Tally(), time.monotonic()
    while tally.faults < soak.faults and time.monotonic() - began < 60 * soak.minutes:
        draw = random.Random(f"{soak.seed} {tally.runs}")
        mesh = draw.choice(MESHES) if draw.random() < 0.5 else None
        manual = f"{draw.randint(1, 9)}:1,{draw.randint(10, STEPS - 2)}:2" if draw.random() < soak.elastic else ""
        also = random.Random(f"{soak.seed} {tally.runs} also").choice(ALSO) if manual else {}
        Training(soak, draw, tally, references, mesh, manual, also).complete()
        tally.runs += 1
        tally.elastic_runs += bool(manual)
        tally.same_mesh_runs += mesh is not None
    return tally


def write_corpus(folder: Path) -> None:
    folder.mkdir()
    draw = random.Random(0)
    for number in range(20):
        (folder / f"{number}.txt").write_text(" ".join(draw.choice(_WORDS) for _ in range(400)))
    for name, count in (("train", 96), ("eval", 16)):
        lines = [f"{number % 2}\t{' '.join(draw.choice(_WORDS) for _ in range(6))} {number}" for number in range(count)]
        (folder.parent / f"{name}.tsv").write_text("\n".join(["label\tsentence", *lines]) + "\n")


_WORDS = ("to", "be", "or", "not", "that", "is", "the")


class Training:
    """One run from its first start until it is complete. mesh: mesh of all starts; None for a different one each time.
    manual: frozen layers of an elastic run by step."""

    def __init__(self, soak: Soak, draw: random.Random, tally: Tally, references: dict[tuple[Mesh, str], list[float]],
                 mesh: Mesh | None, manual: str = "", also: Mapping[str, object] = MappingProxyType({})) -> None:
        self.manual, self.also = manual, also
        self.soak, self.draw, self.tally, self.references, self.mesh = soak, draw, tally, references, mesh
        self.name = f"run {tally.runs}" + ("" if mesh is None else " (one mesh)") + (
            f" (elastic{', caches' if _CACHED.keys() <= also.keys() else ''}"
            f"{', packs' if _PACKED.keys() <= also.keys() else ''})" if manual else "")
        self.folder = soak.root / f"run-{tally.runs}"
        self.checkpoints = self.folder / "checkpoint"
        self.moved = False
        self.told = 0
        """Starts that reached the first step."""

    def complete(self) -> None:
        while not (self.folder / "summary.json").exists():
            self.damage()
            if not self.start():
                break
        else:
            self.compare()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------------------------ before a start

    def damage(self) -> None:
        """Sometimes, damage the newest checkpoint; at least one undamaged checkpoint stays."""
        whole = sorted(whole_steps(self.checkpoints))
        named = [step for step in whole if step_folder(self.checkpoints, step).exists()]
        if not named or self.draw.random() < 0.4:
            return
        kind = self.draw.choice(sorted(DAMAGE)) if len(whole) > 1 else "temporary folders left behind"
        DAMAGE[kind](step_folder(self.checkpoints, named[-1]), self.draw)
        harmless = DAMAGE[kind] is litter or named[-1] in whole_steps(self.checkpoints)
        self.tally.outcomes[kind]["cleared away by the next start" if DAMAGE[kind] is litter else
                                  "no harm: whole all the same" if harmless else "the one before is taken"] += 1

    # ------------------------------------------------------------------ a start

    def start(self) -> bool:
        """One start with its fault; returns False if it makes no sense to continue this run."""
        mesh = self.mesh or self.draw.choice(MESHES)
        as_command = self.draw.random() < self.soak.by_command
        transport = "mpi" if as_command and self.draw.random() < 0.5 and mpi_available() is None else "torch"
        self.moved |= transport == "mpi" or bool(self.manual)
        what = self.draw.choice([*INSIDE, *OUTSIDE] if not self.manual else [*INSIDE, *OUTSIDE, *AIMED, *AIMED])
        faults, outside = self.fault(what, mesh)
        outside = [*([] if outside is None else [outside]), *(self.wishes(mesh) if self.manual else [])]
        before, left_before = whole_steps(self.checkpoints), leftovers(self.checkpoints)
        ended = attempt(self.soak.args(self.folder, mesh, transport, manual=self.manual,
                                          also=self.also), faults,
                        self.soak.root / "log.txt", deadline_seconds=self.soak.deadline_seconds, as_command=as_command,
                        outside=outside)
        self.tally.starts += 1
        self.tally.longest_seconds = max(self.tally.longest_seconds, ended.seconds)
        complete = (self.folder / "summary.json").exists()
        outcome = describe(ended, complete)
        self.tally.outcomes[what][outcome] += 1
        how = f"{', '.join(map(str, faults)) or what} on {mesh} over {transport}{' by command' if as_command else ''}"
        print(f"{self.tally.faults:4} {self.name}: {how}: {outcome} ({ended.seconds:.1f} s)", file=sys.stderr,
              flush=True)
        problems = [*self.problems(ended, outcome, before), *self.start_problems(before, left_before)]
        for problem in problems:
            self.tally.errors.append(f"{self.name}, {how}: {problem}\n{ended.text[-3000:]}")
            print(f"ERROR {self.tally.errors[-1]}", file=sys.stderr, flush=True)
        return not problems

    def fault(self, what: str, mesh: Mesh) -> tuple[list[Fault], Outside | None]:
        """`what`, at a random moment."""
        draw = self.draw
        if what in AIMED:
            return [self.aimed(AIMED[what], mesh)], None
        if what in INSIDE:
            moment = draw.choice(({"call": draw.randint(1, LARGEST_CALL)},
                                  {"seconds": round(draw.uniform(0, LONGEST_SECONDS), 3)}))
            fault = dict(kind=INSIDE[what], rank=draw.randrange(mesh.size), **moment)
            if what == "a message is late":
                fault |= {"for_seconds": round(draw.uniform(0.1, 2.0), 2)}
            if what == "the disk is full":
                fault |= {"limit_bytes": draw.choice((2000, 1 << 16)),
                          "for_seconds": draw.choice((None, round(draw.uniform(0.1, 1.0), 2)))}
            return [Fault(**fault)], None
        if what == "a rank is killed while a checkpoint is written":
            steps = draw.randrange(0, STEPS)
            return [], Outside(when=lambda seconds: self.is_writing(steps), act=self.kill_a_rank)
        number = getattr(signal, f"SIG{OUTSIDE[what]}")
        moment = draw.uniform(0, 2 * LONGEST_SECONDS)
        return [], Outside(when=lambda seconds: seconds >= moment, act=lambda pid: os.kill(pid, number))

    def aimed(self, kind: str, mesh: Mesh) -> Fault:
        """A fault of `kind` somewhere in a transition."""
        draw = self.draw
        of = draw.choice(("state", "command") if kind in ("drop", "corrupt") else ("state", "command", "transition"))
        moment = {"message": draw.randint(1, 12 if of == "state" else 2)} if of != "transition" else draw.choice((
            {"call": draw.randint(1, 40)}, {"seconds": round(draw.uniform(0, 0.5), 3)}))
        more = {"delay": {"for_seconds": round(draw.uniform(0.1, 2.0), 2)}, "corrupt": {"bit": draw.randrange(1 << 20)}}
        return Fault(kind=kind, rank=0 if of == "command" else draw.randrange(mesh.size), of=of, **moment,
                     **more.get(kind, {}))

    def wishes(self, mesh: Mesh) -> list[Outside]:
        """Resize requests during the run: other meshes, some of which it refuses, after drawn steps."""
        sizes = [(data, pipe) for data in (1, 2, 4) for pipe in (1, 2, 3, 4)
                 if data * pipe <= mesh.data * mesh.pipe]

        def wish(step: int) -> Outside:
            data, pipe = self.draw.choice(sizes)
            return Outside(when=lambda seconds: self.steps_told() >= step,
                           act=lambda pid: ask(self.folder, data=data, pipe=pipe))

        return [wish(self.steps_told() + self.draw.randint(1, STEPS)) for _ in range(self.draw.randint(0, 3))]

    def steps_told(self) -> int:
        """Steps whose numbers are in the folder."""
        try:
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def is_writing(self, step: int) -> bool:
        """Whether a checkpoint of a step after `step` has begun to be written."""
        found = (re.fullmatch(r"\.step-(\d+)\..+\.tmp", path.name) for path in self.checkpoints.glob(".step-*"))
        return any(match and int(match[1]) > step for match in found)

    def kill_a_rank(self, parent: int) -> None:
        ranks = ranks_of(parent)
        if ranks:
            time.sleep(self.draw.uniform(0.0, 0.02))
            os.kill(self.draw.choice(ranks), signal.SIGKILL)

    # ------------------------------------------------------------------ after a start

    def problems(self, ended: Ended, outcome: str, before: set[int]) -> list[str]:
        found = []
        if ended.code is None:
            found.append("had not ended by its deadline")
        elif ended.left:
            found.append(f"left processes {ended.left}")
        if outcome.startswith("?"):
            found.append("ended in a way that is not foreseen")
        if "Traceback" in ended.text:
            found.append("printed a traceback")
        gone = lost(before, whole_steps(self.checkpoints), keep=KEEP, keep_every=KEEP_EVERY)
        return [*found, *([f"lost the whole checkpoints of steps {sorted(gone)}"] if gone else [])]

    def start_problems(self, before: set[int], left_before: set[str]) -> list[str]:
        """Problems of the step from which the start resumed, if it got so far."""
        resumed = [line for line in read_events(self.folder).lines if line["event"] == "resume"]
        starts = [line for line in read_events(self.folder).lines if line["event"] == "start"]
        if len(starts) <= self.told:
            return []
        self.told, found = len(starts), []
        step = int(Path(resumed[-1]["folder"]).name.removeprefix("step-")) if resumed and "folder" in resumed[-1] else 0
        if step != max(before, default=0):
            found.append(f"went on from step {step}, not {max(before, default=0)}")
        if stale := left_before & leftovers(self.checkpoints):
            found.append(f"left temporary folders {stale}")
        return found

    # ------------------------------------------------------------------ at its end

    def compare(self) -> None:
        """Check that the losses are those of an undisturbed run."""
        lines = read_metrics(self.folder).lines
        steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
        self.tally.transitions += len([line for line in read_events(self.folder).lines
                                       if line["event"] == "transition"])
        expected = self.reference(self.mesh or MESHES[0], self.manual)
        exact = self.mesh is not None and not self.moved
        if steps != list(range(1, STEPS + 1)):
            self.tally.errors.append(f"{self.name}: metrics.jsonl has steps {steps}")
        elif (losses != expected) if exact else any(
                abs(one - other) > TOLERANCE * abs(other) for one, other in zip(losses, expected, strict=True)):
            self.tally.errors.append(f"{self.name}: losses {losses} are not {expected}")
        if leftovers(self.checkpoints):
            self.tally.errors.append(f"{self.name}: temporary folders are left: {leftovers(self.checkpoints)}")

    def reference(self, mesh: Mesh, manual: str = "") -> list[float]:
        if (mesh, manual) not in self.references:
            folder = self.soak.root / "reference"
            ended = attempt(self.soak.args(folder, mesh, resume="none", manual=manual), [], self.soak.root / "log.txt",
                            deadline_seconds=self.soak.deadline_seconds, as_command=False)
            assert ended.code == 0, ended.text
            self.references[mesh, manual] = [line["loss"] for line in read_metrics(folder).lines]
            shutil.rmtree(folder)
        return self.references[mesh, manual]


def describe(ended: Ended, complete: bool) -> str:
    """How a start ended, in a few words; with a question mark if that is unexpected."""
    if ended.code is None:
        return "? hangs"
    if ended.code == 0:
        return "goes on to its end" if complete else "saves, stops, exit 0"
    if ended.code == -signal.SIGKILL:
        return "all ranks end with it"
    if ended.code == -signal.SIGTERM and "stage" not in ended.text:  # the interpreter was still starting
        return "ends before it has begun"
    says = next((text for pattern, text in SAYS.items() if re.search(pattern, ended.text)), None)
    if says is None or ended.code not in (1, 2, 143):
        return f"? exit {ended.code}"
    return f"{says or 'stops before it can save'}, exit {ended.code}"


def table(tally: Tally, seed: int) -> str:
    """Table of the events, in Markdown."""
    rows = []
    for what in [*INSIDE, *AIMED, *OUTSIDE, *DAMAGE]:
        counts = tally.outcomes.get(what, Counter())
        outcomes = "; ".join(f"{text}: {count}" for text, count in counts.most_common())
        rows.append(f"| {what} | {sum(counts.values())} | {outcomes} |")
    return "\n".join([
        f"{tally.faults} faults in {tally.starts} starts of {tally.runs} runs ({tally.same_mesh_runs} of them on one "
        f"mesh throughout, {tally.elastic_runs} elastic with {tally.transitions} transitions), seed {seed}: "
        f"{len(tally.errors)} errors. The longest start took {tally.longest_seconds:.0f} s.",
        "", "| fault | times | how the run ended |", "|---|---|---|", *rows, "",
        *(f"- {error.splitlines()[0]}" for error in tally.errors)])


if __name__ == "__main__":
    sys.exit(main())
