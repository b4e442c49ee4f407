"""The run that the soak starts repeatedly: its command, its folder, and the contents of its files.

A tiny GPT in fp64 on two ranks: a start takes as long as the import of torch, and a step 20 ms.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.faults.disk import whole_steps
from benchmarks.faults.filesystem import unmount
from benchmarks.faults.processes import Launcher, Start
from ranvier.mesh import Mesh

STEPS, EVERY, KEEP = 40, 2, 3
RANKS = 2
MESHES = (Mesh(pipe=2), Mesh(data=2), Mesh(col=2))
_WORDS = ("to", "be", "or", "not", "that", "is", "the")
_START_SECONDS = 240.0
_TIMEOUT_SECONDS = 60.0
"""Time limit of messages and collectives, longer than any limit of a case: a run that ends in time has not waited for
it."""


class Training:
    """The one run of a work folder. `forget` removes it; `checkpoints` may be on another disk than its folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run_dir = root / "run"
        self.checkpoints = self.run_dir / "checkpoint"
        self._references: dict[tuple[Mesh, str], list[float]] = {}
        root.mkdir(parents=True, exist_ok=True)
        corpus = root / "corpus.txt"
        if not corpus.exists():
            draw = random.Random(0)
            corpus.write_text("\n".join(" ".join(draw.choice(_WORDS) for _ in range(40)) for _ in range(100)))

    def forget(self) -> None:
        """Remove all remains of the run."""
        for path in (self.run_dir, self.root / "elsewhere"):
            unmount(path)
            shutil.rmtree(path, ignore_errors=True)
        self.checkpoints = self.run_dir / "checkpoint"

    def keep_checkpoints_elsewhere(self, folder: Path | None = None) -> None:
        """Until `forget`, checkpoints are not in the run's folder."""
        self.checkpoints = folder or self.root / "elsewhere"

    def args(self, mesh: Mesh, transport: str, timeout_seconds: float) -> list[str]:
        settings = {
            "model.num-layers": 1, "model.hidden": 16, "model.heads": 2, "model.vocab": 300, "model.sequence": 16,
            "batch.global-size": 4, "batch.microbatch-size": 2, "train.steps": STEPS, "train.warmup-steps": 0,
            "train.eval-sequences": 1, "train.sample-tokens": 0, "train.eval-every": 0, "precision": "fp64",
            "mesh.data": mesh.data, "mesh.pipe": mesh.pipe, "mesh.row": mesh.row, "mesh.col": mesh.col,
            "checkpoint.every": EVERY, "checkpoint.keep": KEEP, "checkpoint.dir": self.checkpoints,
            "comm.timeout-seconds": timeout_seconds, "comm.transport": transport, "launch.device": "cpu",
            "data.corpus": self.root / "corpus.txt", "data.cache-dir": self.root / "cache", "resume": "auto",
            "run-dir": self.run_dir}
        return ["train", "gpt-tiny", *(str(word) for name, value in settings.items() for word in (f"--{name}", value))]

    def start(self, launcher: Launcher, mesh: Mesh, transport: str, name: str, faults: Sequence[str] = (),
              timeout_seconds: float = _TIMEOUT_SECONDS) -> Start:
        """Start the command under `launcher`. faults: as ranvier.testing.faults reads them."""
        args = self.args(mesh, transport, timeout_seconds)
        program = ["-m", "ranvier", *args] if not faults else [
            "-m", "ranvier.cli.faults", *(word for fault in faults for word in ("--fault", fault)), "--", *args]
        return Start(launcher, RANKS, program, self.root / f"{name}.log")

    # ------------------------------------------------------------------ what its files say

    def lines(self, name: str) -> list[dict]:
        """The objects in a file of lines, read without trusting it."""
        found = []
        with suppress(OSError):
            for line in (self.run_dir / name).read_text(errors="replace").splitlines():
                with suppress(ValueError, RecursionError):
                    value = json.loads(line)
                    if isinstance(value, dict):
                        found.append(value)
        return found

    def steps_done(self) -> int:
        """Lines in metrics.jsonl. Cheap."""
        try:
            return (self.run_dir / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def seconds_since_last_write(self) -> float:
        """Seconds since a file in the run's folder was written: metrics, events, final results; infinite if there is no
        file."""
        age = float("inf")
        with suppress(OSError):
            for path in self.run_dir.iterdir():
                with suppress(OSError):
                    age = min(age, time.time() - path.lstat().st_mtime)
        return age

    def whole_steps(self) -> set[int]:
        """Steps of the undamaged checkpoints."""
        return whole_steps(self.checkpoints)

    def is_complete(self) -> bool:
        return (self.run_dir / "summary.json").is_file() and STEPS in self.whole_steps()

    def resumed_from(self) -> int:
        """The step from which the last start resumed, according to its events; 0 for a start from nothing."""
        folders = [line["folder"] for line in self.lines("events.jsonl")
                   if line.get("event") == "resume" and isinstance(line.get("folder"), str)]
        step = Path(folders[-1]).name.removeprefix("step-") if folders else ""
        return int(step) if step.isdigit() else 0

    # ------------------------------------------------------------------ what its losses should be

    def reference(self, mesh: Mesh, transport: str) -> list[float]:
        """The losses of an undisturbed run, which is done once and kept in the work folder. Removes a run that is in
        the folder."""
        if (mesh, transport) not in self._references:
            kept = self.root / f"losses-{transport}-{mesh.data}-{mesh.pipe}-{mesh.row}-{mesh.col}.json"
            if not kept.exists():
                start = self.start("mpiexec" if transport == "mpi" else "python", mesh, transport, "reference")
                gone = start.wait_gone(_START_SECONDS)
                start.kill_all()
                losses = [line.get("loss") for line in self.lines("metrics.jsonl")]
                if gone is None or start.code != 0 or len(losses) != STEPS:
                    raise RuntimeError(f"an undisturbed run ended with {start.code}:\n{start.text[-3000:]}")
                kept.write_text(json.dumps(losses))
            self._references[mesh, transport] = json.loads(kept.read_text())
        return self._references[mesh, transport]
