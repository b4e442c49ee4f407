"""Fine-tuning tasks: a shipped recipe on a part of its samples, a small decoder, or a tiny model on generated text.

Differences from the recipes are chosen so that an epoch has many updates and ten epochs take minutes on two cores:
batches of 16, 40 tokens a sentence (nine of ten have no more). Layers freeze once an epoch, so with short epochs the
first layers hardly learn at all: with 768 sentences freezing costs three points of accuracy, with 1,600 about one
(docs/experiments.md). A sentence of 40 tokens takes 2.6 GFLOP forward and backward through MiniLM (3 x 6 x (8 s h^2 + 4
s h f + 4 s^2 h)), an image of 17 tokens 2.2 GFLOP through the ViT; two cores reach about 100 GFLOP a second in such
runs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.elastic.decoder import BYTES_PER_TOKEN, decoder_run
from ranvier.config import read
from ranvier.config.resolve import resolve
from ranvier.config.run import Batch, Checkpoint, Data, Launch, Optim, Run, Train, Transformer
from ranvier.data.prepare import prepare
from ranvier.mesh import Mesh
from ranvier.planner.problems import problems

RECIPES = {"sentiment": "bert-sentiment", "cifar10": "vit-cifar10"}
SAMPLES = {"sentiment": 1600, "cifar10": 960, "decoder": 800, "quick": 96, "quick-decoder": 96}
"""Training samples of an epoch, by default; for a decoder, the approximate number of sequences."""
EVAL_SAMPLES = {"sentiment": 1000, "cifar10": 1000, "decoder": 256, "quick": 30, "quick-decoder": 16}
_MODEL = {"sentiment": {"sequence": 40}, "cifar10": {"image_size": 56}}
_LEARNING_RATE = {"cifar10": 1e-4}
_BATCH = 16
_WARMUP_SHARE = 0.03
_WORDS = ["the", "a", "film", "story", "actor", "scene", "plot", "music", "is", "was", "very", "quite", "good", "bad"]


def task_run(task: str, folder: Path, *, seed: int = 0, epochs: int = 10, samples: int | None = None,
             eval_samples: int | None = None, eval_epochs: int = 0, dropout: float | None = None,
             transport: str = "auto", data: str | None = None, eval_data: str | None = None) -> Run:
    """The run that all contenders change: sentiment, cifar10, decoder, quick or quick-decoder, on pipe 4.

    folder: for generated data. samples: of an epoch, rounded down to full batches. eval_epochs: epochs between
    evaluations, 0 for one at the end. dropout: None is the recipe's. data, eval_data: replace the recipe's; without
    eval_data a part is held out. If there are fewer samples than by default, all are used.
    """
    base = _base(task, folder)
    if data is not None:
        base = replace(base, data=replace(base.data, train_samples=None, eval_samples=None, eval=eval_data, **{
            "corpus" if base.data.task == "lm" else "train": data}))
    base = replace(base, seed=seed, run_dir=None, checkpoint=Checkpoint(every=0), launch=Launch(device="cpu"),
                   comm=replace(base.comm, transport=transport),
                   model=base.model if dropout is None else replace(base.model, dropout=dropout))
    base = _limited(base, samples or SAMPLES[task], eval_samples or EVAL_SAMPLES[task], is_own=data is not None)
    is_text = base.data.task == "lm"
    there = prepare(base).epoch_samples if is_text else base.data.train_samples
    per_epoch = max(1, there // base.batch.global_size)
    length = {"epochs": None, "steps": per_epoch * epochs} if is_text else {"epochs": epochs}
    return replace(base, train=replace(base.train, **length, warmup_steps=round(_WARMUP_SHARE * per_epoch * epochs),
                                       sample_tokens=0, eval_every=eval_epochs * per_epoch))


def _limited(run: Run, samples: int, held_out: int, *, is_own: bool) -> Run:
    """The run with at most these numbers of samples; for text, with about these numbers of sequences."""
    if run.data.task == "lm":
        limit = round(samples * run.model.sequence * BYTES_PER_TOKEN)
        return replace(run, data=replace(run.data, max_bytes=limit), train=replace(run.train, eval_sequences=held_out))
    if is_own:
        there = prepare(run)
        samples, held_out = min(samples, len(there.train)), min(held_out, len(there.eval))
    size = run.batch.global_size
    return replace(run, data=replace(run.data, train_samples=max(size, samples // size * size), eval_samples=held_out))


def _base(task: str, folder: Path) -> Run:
    match task:
        case "quick":
            return _quick(folder)
        case "quick-decoder":
            return _quick_decoder(folder)
        case "decoder":
            return decoder_run()
    return _recipe(task)


def _recipe(task: str) -> Run:
    run = read.merge([read.load(RECIPES[task])[1]]).run
    return replace(run, mesh=Mesh(pipe=4), batch=Batch(global_size=_BATCH, microbatch_size=4),
                   model=replace(run.model, **_MODEL[task]),
                   train=replace(run.train, learning_rate=_LEARNING_RATE.get(task, run.train.learning_rate)))


def _quick(folder: Path) -> Run:
    """Six layers of 16 in fp64 on sentences whose label is whether they contain "good"."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, start in (("train", 96, 0), ("eval", 30, 7)):
        lines = ["label\tsentence"]
        for number in range(start, start + count):
            words = [_WORDS[(number * step + step) % 12] for step in (1, 5, 7, 11)]
            lines.append(f"{number % 2}\t{' '.join([*words, _WORDS[13 - number % 2]])} {number}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return Run(batch=Batch(global_size=8, microbatch_size=2), precision="fp64",
               mesh=Mesh(pipe=4), train=Train(learning_rate=3e-3, schedule="linear"),
               model=Transformer(num_layers=6, hidden=16, heads=2, vocab=120, sequence=12, dropout=0.1),
               optim=Optim(decay="matrices", clip_norm=1.0),
               data=Data(task="classification", train=str(folder / "train.tsv"), eval=str(folder / "eval.tsv"),
                         cache_dir=folder / "cache"))


def _quick_decoder(folder: Path) -> Run:
    """A Llama of six layers of 16 in fp64 with random weights, on generated text."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, start in (("train", 900, 0), ("eval", 120, 5000)):
        words = [_WORDS[(number * number + number // 3) % len(_WORDS)] for number in range(start, start + count)]
        (folder / f"{name}.txt").write_text("\n".join(" ".join(words[at:at + 6]) for at in range(0, count, 6)))
    return Run(batch=Batch(global_size=8, microbatch_size=2), precision="fp64", mesh=Mesh(pipe=4),
               train=Train(learning_rate=3e-3, schedule="linear"),
               model=Transformer(family="llama", num_layers=6, hidden=16, heads=2, kv_heads=1, intermediate=24,
                                 vocab=300, sequence=12, tied=True),
               optim=Optim(decay="matrices", clip_norm=1.0),
               data=Data(task="lm", corpus=str(folder / "train.txt"), eval=str(folder / "eval.txt"),
                         cache_dir=folder / "cache"))


def checked(run: Run) -> Run:
    """`run`, if it is valid; otherwise raises its first problem."""
    for problem in problems(resolve(run)):
        raise problem
    return run
