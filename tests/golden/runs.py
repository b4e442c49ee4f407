"""The golden runs: short training runs whose numbers must not change.

Each run is `ranvier train` with flags. Some are started as users start them, with one process per rank. The others use
ranks that are threads of the test's process, which saves the start of several interpreters.

A run computes with one thread per rank and reads its text and tokenizers from `data/`, so that its numbers depend on
the code, on torch's CPU kernels, and on nothing else.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from ranvier.config import read
from ranvier.mesh import STANDARD_AXES, Axis, Mesh
from ranvier.testing.ranks import run_ranks
from ranvier.train.loop import train
from tests.processes import python_path

HERE = Path(__file__).parent
NUMBERS = ("loss", "grad_norm", "eval_loss")
"""Numbers of a step in metrics.jsonl that a golden record keeps, if the step has them."""

Step = dict[str, int | str]
"""One step of a record: its number under "step", and each of NUMBERS as `float.hex` writes it."""

_EVERY = {
    "launch.threads": 1, "launch.device": "cpu", "comm.transport": "torch", "data.cache-dir": "cache",
    "train.warmup-steps": 2, "train.sample-tokens": 0, "train.eval-sequences": 8, "checkpoint.every": 0,
    "batch.global-size": 8, "batch.microbatch-size": 2, "model.num-layers": 2, "model.hidden": 16, "model.heads": 2,
    "mesh.data": 1, "mesh.pipe": 1}

GPT: Mapping[str, object] = {
    **_EVERY, "data.corpus": "data/text.txt", "data.tokenizer": "data/bytes.json", "model.vocab": 260,
    "model.sequence": 16, "train.steps": 6, "train.eval-every": 3}

# The cut and the cache are set by hand: by default they follow from measured times.
BERT: Mapping[str, object] = {
    **_EVERY, "data.task": "classification", "data.train": "data/train.tsv", "data.eval": "data/eval.tsv",
    "data.tokenizer": "data/wordpiece.json", "data.padding": "maximum", "model.vocab": 120, "model.sequence": 12,
    "model.num-layers": 4, "train.steps": 12, "train.eval-every": 6, "train.learning-rate": 5e-3,
    "elastic.freeze": "manual", "elastic.manual": "3:2,9:3", "elastic.auto-pipe": True, "elastic.auto-dp": True,
    "elastic.cut": "reference", "elastic.cache": True, "elastic.cache-from": 1, "elastic.cache-precision": "full",
    "mesh.pipe": 2}


@dataclass(frozen=True, kw_only=True)
class GoldenRun:
    """A run of `ranvier train gpt-tiny` with `flags`. as_threads: its ranks are threads of this process. tolerance:
    relative difference that is allowed on a machine whose kernels may round differently."""

    name: str
    flags: Mapping[str, object] = field(default_factory=dict)
    as_threads: bool = False
    tolerance: float = 1e-5

    def start(self, folder: Path, axes: Sequence[Axis] = STANDARD_AXES) -> list[Step]:
        """Train in `folder` (see `prepare`); the run's own folder there has its name. Returns its steps. axes: axes of
        the mesh; ranks that are processes have the standard ones."""
        if self.as_threads:
            train_as_threads(self.name, self.flags, folder, ranks=ranks_of(self.flags), axes=axes)
        else:
            train_by_command("gpt-tiny", {**self.flags, "run-dir": self.name}, folder)
        return read_steps(folder / self.name)


_HALF: Mapping[str, object] = {**GPT, "precision": "bf16", "optim.clip-norm": 1.0, "mesh.pipe": 2}

ONE_RANK = GoldenRun(name="one-rank", flags={**GPT, "checkpoint.every": 3})
ELASTIC_BERT = GoldenRun(name="elastic-bert", flags=BERT, as_threads=True)

RUNS = (
    ONE_RANK,
    GoldenRun(name="data-2", flags={**GPT, "mesh.data": 2}, as_threads=True),
    GoldenRun(name="data-2-pipe-2", flags={**GPT, "mesh.data": 2, "mesh.pipe": 2}),
    GoldenRun(name="row-2-col-2", flags={**GPT, "mesh.row": 2, "mesh.col": 2}, as_threads=True),
    GoldenRun(name="summa", flags={**GPT, "mesh.row": 2, "mesh.col": 2, "tensor.scheme": "summa"}, as_threads=True),
    GoldenRun(name="megatron", flags={**GPT, "mesh.col": 2, "tensor.scheme": "megatron"}, as_threads=True),
    GoldenRun(name="bf16-stream", flags={**_HALF, "optim.offload": "stream"}, as_threads=True, tolerance=1e-2),
    GoldenRun(name="bf16-host", flags={**_HALF, "optim.offload": "host"}, as_threads=True, tolerance=1e-2),
    ELASTIC_BERT,
)


def prepare(folder: Path) -> None:
    """Copy the data that runs in `folder` read. Paths in their settings are relative to it."""
    shutil.copytree(HERE / "data", folder / "data")


def as_words(flags: Mapping[str, object]) -> list[str]:
    """Flags as the command line takes them."""
    return [word for name, value in flags.items()
            for word in (f"--{name}", str(value).lower() if isinstance(value, bool) else str(value))]


def train_by_command(recipe: str, flags: Mapping[str, object], folder: Path) -> str:
    """`ranvier train` in `folder`, without pictures; returns what it printed. Raises AssertionError with the output if
    it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COVERAGE"))}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": python_path(HERE.parents[1])}
    done = subprocess.run([sys.executable, "-m", "tests.without_pictures", "train", recipe, *as_words(flags)],
                          cwd=folder, env=environment, text=True, timeout=240, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def ranks_of(flags: Mapping[str, Any]) -> int:
    """The ranks of a run with these flags."""
    return prod(flags.get(f"mesh.{axis}", 1) for axis in ("data", "pipe", "row", "col"))


@contextlib.contextmanager
def one_thread(folder: Path) -> Iterator[None]:
    """Inside, the current directory is `folder`, and a rank computes with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with contextlib.chdir(folder):
            yield
    finally:
        torch.set_num_threads(threads)


def train_as_threads(name: str, flags: Mapping[str, object], folder: Path, *, ranks: int, recipe: str = "gpt-tiny",
                     axes: Sequence[Axis] = STANDARD_AXES) -> None:
    """Train in `folder` as `ranvier train` does, on ranks that are threads."""
    given = {flag.replace("-", "_"): text for flag, text in zip(flags, as_words(flags)[1::2], strict=True)}
    with one_thread(folder):
        flags_of = read.Layer(origin="flag", values={**given, "run_dir": name}, is_text=True)
        resolved = read.merge([read.load(recipe)[1], flags_of])
        assert not resolved.problems, resolved.problems
        mesh = resolved.run.mesh
        assert isinstance(mesh, Mesh)
        run = replace(resolved.run, mesh=Mesh(axes=axes, tile=mesh.tile, **mesh))
        run_ranks(lambda world: train(run, name, world, stream=io.StringIO()), ranks, timeout_seconds=120)


def read_steps(run_folder: Path, *, after: int = 0) -> list[Step]:
    """The steps after step `after` of the run in `run_folder`, from its metrics.jsonl."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [{"step": line["step"], **{name: float(line[name]).hex() for name in NUMBERS if name in line}}
            for line in lines if line["step"] > after]


def select(names: Sequence[str]) -> tuple[GoldenRun, ...]:
    """The golden runs with these names; all golden runs if no name is given."""
    return tuple(run for run in RUNS if not names or run.name in names)
