"""The task classification: the class of a sentence, or of a pair. Texts as numbers of tokens with [CLS] and [SEP].

    inputs    {"ids": [B, L], "mask": [B, L], "types": [B, L]} int64; mask is 1 where there is a token, types are 1 in
              the second text, its [SEP] included
    targets   [B] int64, numbers of classes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ranvier.config.run import Run
from ranvier.config.task_form import SHIPPED
from ranvier.data import run_tokenizer as tokenizers
from ranvier.data.accuracy import Accuracy
from ranvier.data.arrays import Arrays, made_once, write_arrays
from ranvier.data.cache_folder import cache_folder
from ranvier.data.fingerprint import fingerprint
from ranvier.data.named_files import first_looks, table_name_problems, text_only, training_name
from ranvier.data.padding import padding_of
from ranvier.data.publish import Progress
from ranvier.data.run_tokenizer import run_tokenizer
from ranvier.data.sentences import NAMES, Columns, Sentence, Sentences, look_at_header, open_part, read_sentences
from ranvier.data.subset import chosen, some
from ranvier.data.task import Prepared, Task
from ranvier.data.wordpiece import WordPiece
from ranvier.errors import DataError, RanvierError

SHORTEST_SEQUENCE = 3
"""[CLS], a token, [SEP]."""
FORM = "sst2, sentiment, or a TSV file with the columns label and sentence"
"""What may be given, in words."""


class Labelled:
    """Arrays of texts as samples of different lengths: ids [N, S], lengths [N], firsts [N] (place of the second text's
    first token), labels [N]."""

    def __init__(self, arrays: Arrays) -> None:
        self._ids, self._firsts, self._labels = (arrays.arrays[name] for name in ("ids", "firsts", "labels"))
        self.sample_lengths = np.asarray(arrays.arrays["lengths"], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def inputs(self, samples: np.ndarray, epochs: np.ndarray | None = None, length: int | None = None
               ) -> dict[str, Tensor]:
        """length: tokens to which samples are padded, at least as many as each has; None is the sequence."""
        ids = self._ids[samples, :length].astype(np.int64)
        place = np.arange(ids.shape[1])
        mask = place < self.sample_lengths[samples, None]
        types = mask & (place >= self._firsts[samples, None])
        return {"ids": torch.from_numpy(ids), "mask": torch.from_numpy(mask).long(),
                "types": torch.from_numpy(types).long()}

    def targets(self, samples: np.ndarray, length: int | None = None) -> Tensor:
        """length: has no effect, since a text has one target."""
        return torch.from_numpy(self._labels[samples].astype(np.int64))


class Classification(Task):
    """The task `classification`: labelled sentences."""

    form = SHIPPED["classification"]

    def problems(self, run: Run, *, elsewhere: bool) -> list[RanvierError]:
        """What is wrong with the data settings, as far as it shows without reading more than a header."""
        found: list[RanvierError] = [
            *table_name_problems(run.data, NAMES, FORM),
            *first_looks(run.data, NAMES, partial(look_at_header, columns=Columns.of(run.data))), *text_only(run.data),
            *tokenizers.problems(run)]
        if run.model.sequence < SHORTEST_SEQUENCE + 2 * (run.data.pair_column is not None):
            found.append(DataError(
                "is too short for [CLS], a token and [SEP]", code="sequence-too-short-for-class",
                where="model.sequence", value=run.model.sequence,
                remedy=f"Set `--model.sequence {SHORTEST_SEQUENCE}` or more."))
        return found

    def prepare(self, run: Run, progress: Progress) -> Prepared:
        """Tokenised sentences of this run (see ranvier.data.prepare). Sentences longer than the sequence are cut."""
        cache, data = cache_folder(run), run.data
        columns = Columns.of(data)
        train = open_part(training_name(data), "train", cache, progress, columns)
        held = None if data.eval is None else open_part(data.eval, "eval", cache, progress, columns)
        source = fingerprint(train.fingerprint, held and held.fingerprint)
        tokenizer = run_tokenizer(run, lambda: _texts(read_sentences(train, held).train),
                                  source, progress)
        folder = cache / "classification" / fingerprint(
            source, tokenizer.fingerprint, run.model.sequence, "pairs")

        def make() -> None:
            progress(f"tokenising {data.train}")
            _write(folder, read_sentences(train, held), tokenizer, run.model.sequence, progress)

        arrays = made_once(folder, make, progress)
        used = [some(Labelled(part), count, run.seed, f"data.{name}-samples") for part, count, name in zip(
            arrays, (data.train_samples, data.eval_samples), ("train", "eval"), strict=True)]
        classes = tuple(arrays[0].names("classes"))
        about = f"{data.train}: {len(used[0]):,} sentences, {len(used[1]):,} held out, {len(classes)} classes"
        return Prepared(
            train=used[0], eval=used[1], tokenizer=tokenizer, weight=1.0, num_classes=len(classes), class_names=classes,
            scoring=Accuracy, about=about, padding=padding_of(used[0], run),
            transform=fingerprint(tokenizer.fingerprint, run.model.sequence),
            fingerprint=fingerprint("classification", tokenizer.fingerprint, [part.digest for part in arrays],
                                    chosen(run)))


CLASSIFICATION = Classification()
"""The task; it has no state."""


def _write(folder: Path, sentences: Sentences, tokenizer: WordPiece, sequence: int, progress: Progress) -> None:
    number = {name: place for place, name in enumerate(sentences.classes)}
    for name, part in (("eval", sentences.eval), ("train", sentences.train)):
        arrays, cut = encoded(part, tokenizer, sequence)
        if cut:
            progress(f"cut {cut:,} of {len(part):,} sentences ({name}) to {sequence} tokens")
        labels = np.array([number[sentence.label] for sentence in part], dtype=np.int32)
        write_arrays(folder / name, {**arrays, "labels": labels}, {"classes": list(sentences.classes)})


def encoded(part: Sequence[Sentence], tokenizer: WordPiece, sequence: int) -> tuple[dict[str, np.ndarray], int]:
    """ids [N, S] filled up with [PAD], lengths [N], firsts [N], and how many samples were cut. Of a pair the longer
    text is cut."""
    dtype = np.uint16 if tokenizer.vocab <= 1 << 16 else np.uint32
    ids = np.full((len(part), sequence), tokenizer.pad, dtype=dtype)
    lengths, firsts = np.empty(len(part), dtype=np.int32), np.empty(len(part), dtype=np.int32)
    cut = 0
    seconds = tokenizer.encode([sentence.pair or "" for sentence in part])
    for row, (first, second) in enumerate(zip(tokenizer.encode([one.text for one in part]), seconds, strict=True)):
        is_pair = part[row].pair is not None
        room = sequence - 2 - is_pair
        kept = (min(len(first), max(room - len(second), -(-room // 2))), len(second))
        kept = (kept[0], min(len(second), room - kept[0]))
        cut += kept != (len(first), len(second))
        tokens = [tokenizer.cls, *first[:kept[0]], tokenizer.sep]
        firsts[row] = len(tokens) if is_pair else sequence
        tokens += [*second[:kept[1]], tokenizer.sep] if is_pair else []
        lengths[row] = len(tokens)
        ids[row, :len(tokens)] = tokens
    return {"ids": ids, "lengths": lengths, "firsts": firsts}, cut


def _texts(sentences: Sequence[Sentence]) -> Iterator[str]:
    for sentence in sentences:
        yield sentence.text
        if sentence.pair is not None:
            yield sentence.pair
