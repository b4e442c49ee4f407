"""A tiny GPT on generated texts, which tests of commands and launchers train."""

from __future__ import annotations

import random

SETTINGS = {"model.num-layers": 2, "model.hidden": 16, "model.heads": 2, "model.vocab": 260, "model.sequence": 16,
            "batch.global-size": 8, "batch.microbatch-size": 2, "train.warmup-steps": 0, "train.eval-sequences": 4,
            "train.sample-tokens": 0}
WORDS = ("the", "arrow", "flies", "over", "a", "green", "field", "and", "the", "archer", "waits", "for", "wind")


def flags(folder, **changed):
    """Flags of the run, with texts in `folder` that are created unless they exist. changed: settings, with __ for the
    dot and _ for the hyphen."""
    corpus = folder / "corpus"
    if not corpus.exists():
        corpus.mkdir()
        for number in range(20):
            (corpus / f"{number}.txt").write_text("".join(f"line {number * line} of a text\n" for line in range(40)))
    settings = {"data.corpus": corpus, "data.cache-dir": folder / "cache", **SETTINGS, **{
        name.replace("__", ".").replace("_", "-"): value for name, value in changed.items()}}
    return [str(word) for name, value in settings.items() for word in (f"--{name}", value)]


def random_texts(folder, files, *, lines=1, words=10):
    """A new folder of texts with `lines` lines of `words` words."""
    choose = random.Random(0)
    folder.mkdir()
    for number in range(files):
        (folder / f"{number}.txt").write_text("\n".join(" ".join(choose.choices(WORDS, k=words)) for _ in range(lines)))
