"""What is fine-tuned: a shipped recipe on a part of its samples, or a tiny model on generated sentences.

What differs from the recipes is chosen so that an epoch has many updates and ten epochs last minutes on two cores:
batches of 16, 40 tokens a sentence (nine of ten have no more). Layers freeze once an epoch, so that a short epoch means
that the first layers hardly learn at all: with 768 sentences freezing costs three points of accuracy, with 1,600 about
one (docs/experiments.md). A sentence of 40 tokens takes 2.6 GFLOP forward and backward through MiniLM (3 x 6 x
(8 s h^2 + 4 s h f + 4 s^2 h)), an image of 17 tokens 2.2 GFLOP through the ViT; two cores reach about 100 GFLOP a
second in such runs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ranvier.config import read
from ranvier.config.resolve import resolve
from ranvier.config.run import Batch, Checkpoint, Data, Launch, Optim, Run, Train, Transformer
from ranvier.planner.problems import problems

RECIPES = {"sentiment": "bert-sentiment", "cifar10": "vit-cifar10"}
SAMPLES = {"sentiment": 1600, "cifar10": 960, "quick": 96}
"""Training samples of an epoch, by default."""
EVAL_SAMPLES = {"sentiment": 1000, "cifar10": 1000, "quick": 30}
_MODEL = {"sentiment": {"sequence": 40}, "cifar10": {"image_size": 56}}
_LEARNING_RATE = {"cifar10": 1e-4}
_BATCH = 16
_WARMUP_SHARE = 0.03
_WORDS = ["the", "a", "film", "story", "actor", "scene", "plot", "music", "is", "was", "very", "quite", "good", "bad"]


def task_run(task: str, folder: Path, *, seed: int = 0, epochs: int = 10, samples: int | None = None,
             eval_samples: int | None = None, eval_epochs: int = 0, dropout: float | None = None,
             transport: str = "auto") -> Run:
    """The run that all contenders change: sentiment, cifar10 or quick, on pipe 4.

    folder: for generated data. samples: of an epoch, cut to whole batches. eval_epochs: epochs between evaluations, 0
    for one at the end. dropout: None is the recipe's.
    """
    base = _quick(folder) if task == "quick" else _recipe(task)
    size = base.batch.global_size
    samples = max(size, (samples or SAMPLES[task]) // size * size)
    steps = samples // size * epochs
    return replace(
        base, seed=seed, run_dir=None, checkpoint=Checkpoint(every=0), launch=Launch(device="cpu"),
        comm=replace(base.comm, transport=transport),
        data=replace(base.data, train_samples=samples, eval_samples=eval_samples or EVAL_SAMPLES[task]),
        model=base.model if dropout is None else replace(base.model, dropout=dropout),
        train=replace(base.train, epochs=epochs, warmup_steps=round(_WARMUP_SHARE * steps), sample_tokens=0,
                      eval_every=eval_epochs * samples // size))


def _recipe(task: str) -> Run:
    run = read.merge([read.load(RECIPES[task])[1]]).run
    return replace(run, mesh=replace(Run().mesh, pipe=4), batch=Batch(global_size=_BATCH, microbatch_size=4),
                   model=replace(run.model, **_MODEL[task]),
                   train=replace(run.train, learning_rate=_LEARNING_RATE.get(task, run.train.learning_rate)))


def _quick(folder: Path) -> Run:
    """Six layers of 16 in fp64 on sentences whose label is whether "good" is among them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, start in (("train", 96, 0), ("eval", 30, 7)):
        lines = ["label\tsentence"]
        for number in range(start, start + count):
            words = [_WORDS[(number * step + step) % 12] for step in (1, 5, 7, 11)]
            lines.append(f"{number % 2}\t{' '.join([*words, _WORDS[13 - number % 2]])} {number}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return Run(batch=Batch(global_size=8, microbatch_size=2), precision="fp64",
               mesh=replace(Run().mesh, pipe=4), train=Train(learning_rate=3e-3, schedule="linear"),
               model=Transformer(num_layers=6, hidden=16, heads=2, vocab=120, sequence=12, dropout=0.1),
               optim=Optim(decay="matrices", clip_norm=1.0),
               data=Data(task="classification", train=str(folder / "train.tsv"), eval=str(folder / "eval.tsv"),
                         cache_dir=folder / "cache"))


def checked(run: Run) -> Run:
    """`run`, if it can be; raises its first problem."""
    for problem in problems(resolve(run)):
        raise problem
    return run
