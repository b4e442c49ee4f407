"""The task qa: the span of a text that answers a question. Questions and windows of their texts as samples.

    inputs    {"ids": [B, L], "mask": [B, L], "types": [B, L]} int64; types are 1 in the context, its [SEP] included
    targets   {"start": [B], "end": [B]} int64, places of the answer's first and last token; 0 where it is elsewhere
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ranvier.config.run import Run
from ranvier.config.task_form import SHIPPED
from ranvier.data import run_tokenizer as tokenizers
from ranvier.data.answers import Answers
from ranvier.data.arrays import Arrays, made_once, write_arrays
from ranvier.data.cache_folder import cache_folder
from ranvier.data.fingerprint import fingerprint
from ranvier.data.named_files import first_looks, name_problems, text_only, training_name
from ranvier.data.padding import padding_of
from ranvier.data.publish import Progress
from ranvier.data.run_tokenizer import run_tokenizer
from ranvier.data.squad import NAMES, Question, look_at_small, open_part, read_questions
from ranvier.data.subset import chosen, first_of_order
from ranvier.data.task import Prepared, Task
from ranvier.data.windows import step_of, windows
from ranvier.data.wordpiece import WordPiece
from ranvier.errors import DataError, RanvierError

FORM = "squad or a JSON file in SQuAD 1.1's form"
"""What may be given, in words."""
SHORTEST_SEQUENCE = 5
"""[CLS], a question, [SEP], a token of the context, [SEP]."""


class Windows:
    """Windows as samples of different lengths. chosen: numbers of those that are used; None is all."""

    def __init__(self, arrays: Arrays, chosen: np.ndarray | None = None) -> None:
        columns = dict(arrays.arrays)
        self._ids, self._places = columns["ids"], columns.get("places")
        self._chosen = np.arange(len(self._ids)) if chosen is None else chosen
        self.lengths, self.firsts, self._starts, self._ends, self.questions = (
            columns[name][self._chosen] for name in ("lengths", "firsts", "starts", "ends", "questions"))

        self.sample_lengths = np.asarray(self.lengths, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._chosen)

    def inputs(self, samples: np.ndarray, epochs: np.ndarray | None = None, length: int | None = None
               ) -> dict[str, Tensor]:
        """length: tokens to which windows are padded, at least as many as each has; None is the sequence."""
        ids = torch.from_numpy(self._ids[self._chosen[samples], :length].astype(np.int64))
        place = np.arange(ids.shape[1])
        mask = place < self.lengths[samples, None]
        types = mask & (place >= self.firsts[samples, None])
        return {"ids": ids, "mask": torch.from_numpy(mask).long(), "types": torch.from_numpy(types).long()}

    def targets(self, samples: np.ndarray, length: int | None = None) -> dict[str, Tensor]:
        """length: has no effect, since an answer has a first and a last token."""
        return {"start": torch.from_numpy(self._starts[samples].astype(np.int64)),
                "end": torch.from_numpy(self._ends[samples].astype(np.int64))}

    def characters(self, window: int, first: int, last: int) -> tuple[int, int]:
        """Where the text of these tokens is in the context; of held-out windows."""
        assert self._places is not None, "training windows have no places of tokens"
        places = self._places[self._chosen[window]]
        return int(places[first, 0]), int(places[last, 1])


class QuestionAnswering(Task):
    """The task `qa`: questions with windows of their texts."""

    form = SHIPPED["qa"]

    def problems(self, run: Run, *, elsewhere: bool) -> list[RanvierError]:
        """What is wrong with the data settings, as far as it shows without reading a large file."""
        found: list[RanvierError] = [
            *name_problems(run.data, NAMES, FORM), *first_looks(run.data, NAMES, look_at_small), *text_only(run.data),
            *tokenizers.problems(run)]
        if run.model.sequence < SHORTEST_SEQUENCE:
            found.append(DataError(
                "is too short for a question and a token of its context", code="sequence-too-short-for-question",
                where="model.sequence", value=run.model.sequence,
                remedy=f"Set `--model.sequence {SHORTEST_SEQUENCE}` or more, better 384."))
        return found

    def prepare(self, run: Run, progress: Progress) -> Prepared:
        """Tokenised windows of this run (see ranvier.data.prepare). train_samples and eval_samples count questions."""
        cache, data, sequence = cache_folder(run), run.data, run.model.sequence
        train = open_part(training_name(data), "train", progress)
        held = None if data.eval is None else open_part(data.eval, "eval", progress)
        source = fingerprint(train.fingerprint, held and held.fingerprint)
        tokenizer = run_tokenizer(run, lambda: _texts(read_questions(train, held)[0]), source, progress)
        folder = cache / "qa" / fingerprint(source, tokenizer.fingerprint, sequence, step_of(sequence))

        def make() -> None:
            progress(f"tokenising {data.train}")
            _write(folder, *read_questions(train, held), tokenizer, sequence)

        arrays = made_once(folder, make, progress)
        used = [_some(part, count, run.seed, f"data.{name}-samples") for part, count, name in zip(
            arrays, (data.train_samples, data.eval_samples), ("train", "eval"), strict=True)]
        numbers = [len(np.unique(part.questions)) for part in used]
        return Prepared(
            train=used[0], eval=used[1], tokenizer=tokenizer, weight=1.0, padding=padding_of(used[0], run),
            scoring=_scoring(used[1], arrays[1]),
            transform=fingerprint(tokenizer.fingerprint, sequence, step_of(sequence)),
            fingerprint=fingerprint("qa", tokenizer.fingerprint, [part.digest for part in arrays], chosen(run)),
            about=f"{data.train}: {numbers[0]:,} questions in {len(used[0]):,} windows, "
                  f"{numbers[1]:,} in {len(used[1]):,} held out")


QA = QuestionAnswering()
"""The task; it has no state."""


def _texts(questions: list[Question]) -> list[str]:
    return [*dict.fromkeys(question.context for question in questions), *(question.text for question in questions)]


def _some(arrays: Arrays, count: int | None, seed: int, setting: str) -> Windows:
    questions = arrays.arrays["questions"]
    numbers = first_of_order(int(questions[-1]) + 1, count, seed, setting)
    return Windows(arrays, None if numbers is None else np.flatnonzero(np.isin(questions, numbers)))


def _scoring(held: Windows, arrays: Arrays) -> Callable[[], Answers]:
    contexts, questions = arrays.names("contexts"), cast("list[dict[str, Any]]", arrays.facts["questions"])

    def text(window: int, first: int, last: int) -> tuple[int, str]:
        question = int(held.questions[window])
        start, stop = held.characters(window, first, last)
        return question, contexts[questions[question]["context"]][start:stop]

    return partial(Answers, held.firsts, held.lengths, text, [question["answers"] for question in questions])


def _write(folder: Path, train: list[Question], held: list[Question], tokenizer: WordPiece, sequence: int) -> None:
    """Texts and right answers are kept of held-out questions only: nobody else asks for them."""
    contexts = {text: number for number, text in enumerate(dict.fromkeys(question.context for question in held))}
    write_arrays(folder / "eval", windows(held, tokenizer, sequence, with_places=True), {
        "contexts": list(contexts), "questions": [
            {"context": contexts[question.context], "answers": [text for text, _ in question.answers]}
            for question in held]})
    write_arrays(folder / "train", windows(train, tokenizer, sequence, with_places=False), {})
