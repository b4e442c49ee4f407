"""The task classification: the class of a sentence. Labelled sentences as numbers of tokens with [CLS] and [SEP].

    inputs    {"ids": [B, S], "mask": [B, S], "types": [B, S]} int64; mask is 1 where there is a token, types are 0
    targets   [B] int64, numbers of classes
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ranvier.data import run_tokenizer as tokenizers
from ranvier.data.accuracy import Accuracy
from ranvier.data.arrays import Arrays, made_once, write_arrays
from ranvier.data.corpus import fingerprint
from ranvier.data.named_files import first_looks, name_problems, text_only
from ranvier.data.prepare import cache_folder
from ranvier.data.publish import Progress
from ranvier.data.run_tokenizer import run_tokenizer
from ranvier.data.sentences import NAMES, Sentence, Sentences, look_at_header, open_part, read_sentences
from ranvier.data.subset import chosen, some
from ranvier.data.task import Prepared
from ranvier.data.wordpiece import WordPiece
from ranvier.errors import DataError, RanvierError
from ranvier.run import Run

SHORTEST_SEQUENCE = 3
"""[CLS], a token, [SEP]."""
FORM = "sst2, sentiment, or a TSV file with the columns label and sentence"


class Labelled:
    """Arrays of sentences as samples: ids [N, S], lengths [N], labels [N]."""

    def __init__(self, arrays: Arrays) -> None:
        self._ids, self._lengths, self._labels = (arrays.arrays[name] for name in ("ids", "lengths", "labels"))

    def __len__(self) -> int:
        return len(self._labels)

    def inputs(self, samples: np.ndarray, epochs: np.ndarray | None = None) -> dict[str, Tensor]:
        ids = torch.from_numpy(self._ids[samples].astype(np.int64))
        lengths = torch.from_numpy(self._lengths[samples].astype(np.int64))
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        return {"ids": ids, "mask": mask, "types": torch.zeros_like(ids)}

    def targets(self, samples: np.ndarray) -> Tensor:
        return torch.from_numpy(self._labels[samples].astype(np.int64))


def problems(run: Run) -> list[RanvierError]:
    """What is wrong with the data settings, as far as it shows without reading more than a header."""
    found = [*name_problems(run.data, NAMES, FORM), *first_looks(run.data, NAMES, look_at_header), *text_only(run.data),
             *tokenizers.problems(run)]
    if run.model.sequence < SHORTEST_SEQUENCE:
        found.append(DataError("is too short for [CLS], a token and [SEP]", where="model.sequence",
                               value=run.model.sequence, remedy=f"Set --model.sequence {SHORTEST_SEQUENCE} or more."))
    return found


def prepare(run: Run, progress: Progress = lambda line: None) -> Prepared:
    """Tokenised sentences of this run (see ranvier.data.prepare). Sentences longer than the sequence are cut."""
    cache, data = cache_folder(run), run.data
    train = open_part(data.train, "train", cache, progress)
    held = None if data.eval is None else open_part(data.eval, "eval", cache, progress)
    source = fingerprint(train.fingerprint, held and held.fingerprint)
    tokenizer = run_tokenizer(run, lambda: (sentence.text for sentence in read_sentences(train, held).train), source,
                              progress)
    folder = cache / "classification" / fingerprint(source, tokenizer.fingerprint, run.model.sequence)

    def make() -> None:
        progress(f"tokenising {data.train}")
        _write(folder, read_sentences(train, held), tokenizer, run.model.sequence, progress)

    arrays = made_once(folder, make, progress)
    used = [some(Labelled(part), count, run.seed, f"data.{name}-samples") for part, count, name in zip(
        arrays, (data.train_samples, data.eval_samples), ("train", "eval"), strict=True)]
    classes = tuple(arrays[0].facts["classes"])
    about = f"{data.train}: {len(used[0]):,} sentences, {len(used[1]):,} held out, {len(classes)} classes"
    return Prepared(
        train=used[0], eval=used[1], tokenizer=tokenizer, weight=1.0, num_classes=len(classes), class_names=classes,
        scoring=Accuracy, about=about, transform=fingerprint(tokenizer.fingerprint, run.model.sequence),
        fingerprint=fingerprint("classification", tokenizer.fingerprint, [part.digest for part in arrays],
                                chosen(run)))


def _write(folder: Path, sentences: Sentences, tokenizer: WordPiece, sequence: int, progress: Progress) -> None:
    number = {name: place for place, name in enumerate(sentences.classes)}
    for name, part in (("eval", sentences.eval), ("train", sentences.train)):
        ids, lengths, cut = encoded(part, tokenizer, sequence)
        if cut:
            progress(f"cut {cut:,} of {len(part):,} sentences ({name}) to {sequence} tokens")
        labels = np.array([number[sentence.label] for sentence in part], dtype=np.int32)
        write_arrays(folder / name, {"ids": ids, "lengths": lengths, "labels": labels},
                     {"classes": list(sentences.classes)})


def encoded(part: Sequence[Sentence], tokenizer: WordPiece, sequence: int) -> tuple[np.ndarray, np.ndarray, int]:
    """ids [N, S] filled up with [PAD], lengths [N], and how many sentences were cut."""
    dtype = np.uint16 if tokenizer.vocab <= 1 << 16 else np.uint32
    ids = np.full((len(part), sequence), tokenizer.pad, dtype=dtype)
    lengths = np.empty(len(part), dtype=np.int32)
    cut = 0
    for row, tokens in enumerate(tokenizer.encode([sentence.text for sentence in part])):
        cut += len(tokens) > sequence - 2
        tokens = [tokenizer.cls, *tokens[:sequence - 2], tokenizer.sep]
        ids[row, :len(tokens)] = tokens
        lengths[row] = len(tokens)
    return ids, lengths, cut
