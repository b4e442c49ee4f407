"""Small runs and a small program whose folders are kept as test data: how they were trained, and how they resume.

Ranks are threads of this process, with one thread of computation each. All paths in settings are relative to the folder
in which a run trains; `data/` there is that of the golden runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

import ranvier
from ranvier.mesh import Mesh
from ranvier.testing.ranks import run_ranks
from ranvier.world import World
from tests.golden.runs import BERT, GPT, Step, one_thread, ranks_of, read_steps, train_as_threads

HERE = Path(__file__).parent
SAVED = 3
"""The step of each checkpoint; one more step is recorded."""

_SMALL: Mapping[str, object] = {
    "model.num-layers": 1, "model.hidden": 8, "batch.global-size": 4, "train.steps": SAVED + 1, "train.eval-every": 0,
    "checkpoint.every": SAVED}

RUNS: Mapping[str, Mapping[str, object]] = {
    "plain": {**GPT, **_SMALL},
    "tensor": {**GPT, **_SMALL, "mesh.row": 2, "mesh.col": 2},
    "host": {**GPT, **_SMALL, "mesh.data": 2, "precision": "bf16", "optim.offload": "host", "optim.shard": True,
             "optim.clip-norm": 1.0},
    "elastic": {**BERT, **_SMALL, "model.num-layers": 2, "elastic.manual": "2:1"},
}
"""Flags of `ranvier train gpt-tiny`."""

PROGRAM = "program"
"""A program with its own loop, a torch optimizer and a learning rate schedule, on two stages."""

_LOG = ("metrics.jsonl", "events.jsonl")
_KEPT = ("run.toml", "tokenizer.json", *_LOG)


def _train(recipe: str, name: str, flags: Mapping[str, object], ranks: int, folder: Path) -> list[Step]:
    """Train in `folder`, as the command does; the run's steps after the checkpoint."""
    train_as_threads(name, flags, folder, ranks=ranks, recipe=recipe)
    return read_steps(folder / name, after=SAVED)


def first(name: str, folder: Path) -> list[Step]:
    """Train the run `name` from its beginning in `folder`."""
    return _train("gpt-tiny", name, RUNS[name], ranks_of(RUNS[name]), folder)


def resumed(name: str, folder: Path, **flags: object) -> list[Step]:
    """Resume the run whose folder is `folder`/`name`."""
    mesh = ranks_of({**RUNS[name], **flags})
    return _train(f"{name}/run.toml", name, {"resume": "auto", **flags}, mesh, folder)


def program(folder: Path, *, load: bool, pipe: int = 2) -> float:
    """Run a program that trains in `folder`; returns the loss of the step after the checkpoint."""

    def work(world: World) -> float:
        generator = torch.Generator().manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2))
        for parameter in model.parameters():
            with torch.no_grad():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
        engine = ranvier.Engine(model, world, mesh=Mesh(pipe=pipe), loss=_squares,
                                optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, betas=(0.8, 0.9)))
        schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, 0.5)
        checkpoints = ranvier.Checkpoints(engine, folder / PROGRAM, background=False, objects={"schedule": schedule})
        if load:
            loaded = checkpoints.load()
            assert loaded is not None and loaded.step == SAVED
        while engine.steps <= SAVED:
            inputs = torch.rand(8, 3, generator=torch.Generator().manual_seed(engine.steps))
            result = engine.train_batch(ranvier.microbatches(inputs, inputs[:, :2] * inputs[:, 1:], 2))
            schedule.step()
            if engine.steps == SAVED:
                checkpoints.save()
        loss = float(result.loss)
        checkpoints.close()
        engine.close()
        return loss

    with one_thread(folder):
        found: list[float] = run_ranks(work, pipe)
    return found[0]


def _squares(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return ((outputs - targets) ** 2).sum(), targets.numel()


def trim(run_folder: Path, is_of: Callable[[str], bool]) -> None:
    """Keep only what the run had written at its checkpoint: settings, tokenizer, lines of logs for which `is_of` holds.
    Paths in them become relative."""
    absolute = f"{run_folder.parent.resolve()}/"
    for path in sorted(run_folder.rglob("*"), reverse=True):
        place = path.relative_to(run_folder)
        is_saved = place.parts[:2] in (("checkpoint",), ("checkpoint", f"step-{SAVED}"))
        if place.name not in _KEPT and not is_saved:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        elif place.name in _LOG:
            path.write_text("".join(line.replace(absolute, "") for line in path.read_text().splitlines(keepends=True)
                                    if is_of(line)))
