"""The task classification: the class of a sentence, or of a pair. Texts as token numbers with [CLS] and [SEP].

    inputs    {"ids": [B, L], "mask": [B, L], "types": [B, L]} int64; mask is 1 where there is a token, types are 1 in
              the second text, its [SEP] included
    targets   [B] int64, numbers of classes

A decoder (the family llama) has its own special tokens, and classifies a text at its last token:

    inputs    ids [B, L] int64
    targets   {"last": [B], "class": [B]} int64: the position of that token, the number of the class
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ranvier.config.run import Run
from ranvier.config.task_form import SHIPPED
from ranvier.data import run_tokenizer as tokenizers
from ranvier.data.arrays import Arrays, made_once, write_arrays
from ranvier.data.cache import Progress, cache_folder, fingerprint
from ranvier.data.class_numbers import Accuracy, with_labels_of_model
from ranvier.data.named_files import first_looks, table_name_problems, text_only, training_name
from ranvier.data.padding import padding_of
from ranvier.data.run_tokenizer import run_tokenizer, sentence_tokenizer
from ranvier.data.sentences import FORM, NAMES, Columns, Sentence, Sentences, look_at_header, open_part, read_sentences
from ranvier.data.subset import subset_settings, take_subsets
from ranvier.data.task import Prepared, Targets, Task
from ranvier.data.token_samples import EncoderTexts
from ranvier.data.tokenizer import Tokenizer
from ranvier.data.wordpiece import WordPiece
from ranvier.errors import DataError, RanvierError

SHORTEST_SEQUENCE = 3
"""[CLS], a token, [SEP]."""


class Labelled(EncoderTexts):
    """Texts with labels [N]."""

    def __init__(self, arrays: Arrays) -> None:
        super().__init__(arrays)
        self._labels = arrays.arrays["labels"]

    def targets(self, samples: np.ndarray, length: int | None = None) -> Targets:
        """length: has no effect, since a text has one target."""
        return torch.from_numpy(self._labels[samples].astype(np.int64))


class LabelledAtEnd(Labelled):
    """Texts with labels for a decoder."""

    def inputs(self, samples: np.ndarray, epochs: np.ndarray | None = None, length: int | None = None) -> Tensor:
        """length: as of `EncoderTexts`. No token attends to the padding after it."""
        return torch.from_numpy(self._ids[samples, :length].astype(np.int64))

    def targets(self, samples: np.ndarray, length: int | None = None) -> dict[str, Tensor]:
        """length: has no effect."""
        return {"last": torch.from_numpy(self.sample_lengths[samples] - 1),
                "class": torch.from_numpy(self._labels[samples].astype(np.int64))}


class Classification(Task):
    """The task `classification`: labelled sentences."""

    form = SHIPPED["classification"]

    def problems(self, run: Run, *, elsewhere: bool) -> list[RanvierError]:
        """Problems of the data settings that can be found by reading no more than a header."""
        found: list[RanvierError] = [
            *table_name_problems(run.data, NAMES, FORM, elsewhere=elsewhere),
            *first_looks(run.data, NAMES,
                         partial(look_at_header, columns=Columns.from_settings(run.data))), *text_only(run.data),
            *(tokenizers.text_tokenizer_problems if _is_decoder(run) else tokenizers.problems)(run)]
        if run.model.sequence < SHORTEST_SEQUENCE + 2 * (run.data.pair_column is not None):
            found.append(DataError(
                "is too short for a token between the special ones", code="sequence-too-short-for-class",
                where="model.sequence", value=run.model.sequence,
                remedy=f"Set `--model.sequence {SHORTEST_SEQUENCE}` or more."))
        return found

    def prepare(self, run: Run, progress: Progress) -> Prepared:
        """Tokenised sentences of this run (see ranvier.data.prepare). Sentences longer than the sequence are cut."""
        cache, data = cache_folder(run), run.data
        columns = Columns.from_settings(data)
        train = open_part(training_name(data), "train", cache, progress, columns)
        held = None if data.eval is None else open_part(data.eval, "eval", cache, progress, columns)
        source = fingerprint(train.fingerprint, held and held.fingerprint)
        is_decoder = _is_decoder(run)
        tokenizer = (sentence_tokenizer if is_decoder else run_tokenizer)(
            run, lambda: (text for sentence in read_sentences(train, held).train
                          for text in (sentence.text, sentence.pair)
                          if text is not None), source, progress)
        folder = cache / "classification" / fingerprint(
            source, tokenizer.fingerprint, tokenizer.pad, run.model.sequence, tokenizer.cuts_beginnings, "longer")

        def make() -> None:
            progress(f"tokenising {data.train}")
            _write(folder, read_sentences(train, held), tokenizer, run.model.sequence, progress)

        arrays = made_once(folder, make, progress)
        kind = LabelledAtEnd if is_decoder else Labelled
        used = take_subsets(run, list(map(kind, arrays)))
        classes = tuple(arrays[0].names("classes"))
        about = f"{data.train}: {len(used[0]):,} sentences, {len(used[1]):,} held out, {len(classes)} classes"
        found = Prepared(
            train=used[0], eval=used[1], tokenizer=tokenizer, weight=1.0, num_classes=len(classes), class_names=classes,
            scoring=Accuracy, about=about, padding=padding_of(used[0], run),
            transform=fingerprint(tokenizer.fingerprint, run.model.sequence),
            fingerprint=fingerprint("classification", tokenizer.fingerprint, [part.digest for part in arrays],
                                    subset_settings(run)))
        return with_labels_of_model(found, run, progress)


def _is_decoder(run: Run) -> bool:
    return run.model.family == "llama"


CLASSIFICATION = Classification()
"""The task; it has no state."""


def _write(folder: Path, sentences: Sentences, tokenizer: WordPiece | Tokenizer, sequence: int, progress: Progress
           ) -> None:
    number = {name: place for place, name in enumerate(sentences.classes)}
    for name, part in (("eval", sentences.eval), ("train", sentences.train)):
        arrays, cut = encode_sentences(part, tokenizer, sequence)
        if cut:
            progress(f"cut {cut:,} of {len(part):,} sentences ({name}) to {sequence} tokens")
        labels = np.array([number[sentence.label] for sentence in part], dtype=np.int32)
        write_arrays(folder / name, {**arrays, "labels": labels}, {"classes": list(sentences.classes)})


def encode_sentences(part: Sequence[Sentence], tokenizer: WordPiece | Tokenizer, sequence: int
                     ) -> tuple[dict[str, np.ndarray], int]:
    """ids [N, S] filled up with padding, lengths [N], firsts [N], and how many samples were cut. A padding token at the
    end of a text is left out: transformers takes the scores of the token before it. DataError for a text without
    tokens."""
    dtype = np.uint16 if tokenizer.vocab <= 1 << 16 else np.uint32
    ids = np.full((len(part), sequence), tokenizer.pad or 0, dtype=dtype)
    lengths, firsts = np.empty(len(part), dtype=np.int32), np.empty(len(part), dtype=np.int32)
    samples = tokenizer.encode_samples([(sentence.text, sentence.pair) for sentence in part], sequence)
    for row, sample in enumerate(samples):
        if not sample.ids:
            raise DataError("has no token of the tokenizer", code="sentence-without-tokens", where=part[row].place,
                            value=part[row].text[:80], remedy="Leave such rows out.")
        length = len(sample.ids)
        while sample.ids[length - 1] == tokenizer.pad and length > 1:
            length -= 1
        ids[row, :length], lengths[row] = sample.ids[:length], length
        firsts[row] = sequence if sample.second_from is None else sample.second_from
    return {"ids": ids, "lengths": lengths, "firsts": firsts}, sum(sample.is_cut for sample in samples)
