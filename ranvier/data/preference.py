"""The tasks of pairs of answers to a prompt: preference, in which the chosen one becomes more likely than the rejected
one, and reward, in which a model's score of the chosen one becomes larger.

    data set --rows--> pairs of conversations --ChatTokenizer--> tokens, is_target --> PreferencePairs, ScoredPairs

The losses are `ranvier.tensor.split.preference_loss`. Where one compares with a reference, the run computes the
reference's log-probabilities before its first step (`ranvier.train.reference`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Literal

import numpy as np

from ranvier.config.named_object import is_object_name
from ranvier.config.run import Run
from ranvier.config.task_form import SHIPPED
from ranvier.data import quiz
from ranvier.data.arrays import Arrays
from ranvier.data.cache import Progress, cache_folder, fingerprint
from ranvier.data.chat import open_tokenizer, tokenizer_problems
from ranvier.data.chat_template import ChatTokenizer, Conversation, Sample
from ranvier.data.conversation_rows import MARGIN, OTHER_COLUMNS, PAIR_COLUMNS, Pair, pair_of
from ranvier.data.encoded_rows import about_counts, counts_in, encode_rows, stored_parts, write_runs
from ranvier.data.named_files import first_rows, readable_file, text_only, training_name
from ranvier.data.padding import padding_text
from ranvier.data.preference_pairs import PreferencePairs, PreferenceScoring, ScoredPairs, WithReference
from ranvier.data.row_forms import function_fingerprint, made_by_function
from ranvier.data.subset import chosen, taken
from ranvier.data.table_sources import FILES, open_source
from ranvier.data.tables import Row, Table
from ranvier.data.task import Prepared, Task
from ranvier.data.token_samples import TokenSamples
from ranvier.errors import DataError, RanvierError

FORM = f"{FILES} with the columns prompt, chosen and rejected, the name of a data set, or quiz"
"""Description of the accepted forms of data."""
_WARNED_SHARE = 0.01
"""A larger share of left-out pairs is warned of."""


class PreferenceTask(Task):
    """The task `preference` or `reward`: pairs of a chosen and a rejected answer."""

    def __init__(self, name: Literal["preference", "reward"]) -> None:
        self.form, self._scores = SHIPPED[name], name == "reward"

    def problems(self, run: Run, *, elsewhere: bool) -> list[RanvierError]:
        """Problems of the settings, the tokenizer's folder and the columns; one row of each file is read."""
        found: list[RanvierError] = [*text_only(run.data)]
        if run.data.form != "auto" and not is_object_name(run.data.form):
            found.append(DataError("is a format for conversations, not for pairs of answers", code="form-of-other-task",
                                   where="data.form", value=run.data.form,
                                   remedy="Set `--data.form auto`, or `--data.task chat`."))
            return found
        found += first_rows(run.data, (quiz.NAME,), FORM, partial(pairs, form=run.data.form))
        return [*found, *tokenizer_problems(run)]

    def prepare(self, run: Run, progress: Progress) -> Prepared:
        """Tokenised pairs of this run, of which none is cut: a pair whose answers are longer than the sequence is left
        out. DataError when nothing is left."""
        tokenizer = open_tokenizer(run, progress)
        parts = _stored(run, tokenizer, progress, scores=self._scores)
        counts = [_Counts(**counts_in(part)) for part in parts]
        whole = [_pairs_in(part, run.model.sequence, scores=self._scores) for part in parts]
        used = taken(run, whole)
        train, held = used if self._scores else map(WithReference, used)
        told = [(f"data.train {training_name(run.data)}", counts[0])]
        if run.data.eval is not None:
            told.append((f"data.eval {run.data.eval}", counts[1]))
        return Prepared(
            train=train, eval=held, tokenizer=tokenizer, weight=1.0, transform=tokenizer.fingerprint,
            padding=padding_text(whole[0].sample_lengths, run, can_pack=False),
            about=f"{training_name(run.data)}: {len(whole[0]):,} pairs of answers, {len(whole[1]):,} held out"
                  f"{about_counts(told, run.model.sequence)}",
            warnings=tuple(warning for setting, one in told for warning in (
                one.warning(setting, run.model.sequence), None if self._scores else one.unread(setting))
                if warning is not None),
            scoring=partial(PreferenceScoring, None if self._scores else run.preference),
            fingerprint=fingerprint("preference", tokenizer.fingerprint, [part.digest for part in parts], chosen(run)))


PREFERENCE, REWARD = PreferenceTask("preference"), PreferenceTask("reward")
"""The tasks; they have no state."""


def open_pairs(name: str, setting: str, form: str) -> Table:
    """The table of this name: the shipped one, or what `open_source` opens. setting: train or eval. form: data.form.
    DataError where it lacks a column, which with a function as the form it need not have."""
    found = quiz.open_quiz_pairs() if name == quiz.NAME else open_source(name, setting, FORM)
    for column in PAIR_COLUMNS[1:]:
        if column not in found.columns and not is_object_name(form):
            raise DataError(f"has no column `{column}`", code="column-missing", where=name,
                            value=", ".join(sorted(found.columns)), remedy=f"Give {FORM}.")
    return found


def pairs(name: str, setting: str, form: str) -> Iterator[Pair | None]:
    """The pairs of a data set; None for one whose answers are the same. DataError, with the place, for a row that has
    none, and where pairs with a margin and without one are in one set."""
    table = open_pairs(name, setting, form)
    wanted = [column for column in (*PAIR_COLUMNS, MARGIN, *OTHER_COLUMNS) if column in table.columns]
    first: Pair | None = None
    with readable_file(Path(name).expanduser(), setting, FORM):
        for row in table.rows(table.columns if is_object_name(form) else wanted):
            pair = pair_of(row) if form == "auto" else _made(form, row)
            first = first or pair
            if pair is not None and first is not None and (pair.margin is None) != (first.margin is None):
                raise DataError("has a margin, and pairs before have none" if first.margin is None else
                                "has no margin, and pairs before have one", code="margin-of-some-pairs",
                                where=row.place, value=pair.margin,
                                remedy="Give all pairs of a data set a margin, which may be 0, or none of them.")
            yield pair


def _made(form: str, row: Row) -> Pair | None:
    made = made_by_function(form, row)
    if made is not None and not isinstance(made, dict):
        raise DataError(f"returns a {type(made).__name__} for a row", code="form-function-result", where="data.form",
                        value=form, remedy="Return a dict with prompt, chosen and rejected, or None.")
    return None if made is None else pair_of(replace(row, values=made))


# --- tokens ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    """A pair. key: by which it is held out: its prompt, so that all pairs of a prompt lie together. length: positions
    of both answers together."""

    answers: tuple[Sample, Sample]
    key: str
    length: int
    margin: float | None

    @property
    def is_silent(self) -> bool:
        """Whether an answer has no token that is learnt."""
        return not all(is_target[1:].any() for _, is_target in self.answers)


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """Counts of a data set's pairs: all, and those that are left out since their answers are the same, since nothing is
    learnt in one, and since they are too long. longest: positions of the longest. margins: pairs with one."""

    pairs: int
    same: int
    silent: int
    too_long: int
    longest: int
    margins: int

    def text(self, sequence: int) -> str:
        """The counts in words; empty if no pair is left out."""
        return "; ".join(f"{count:,} of {self.pairs:,} left out, {what}" for count, what in (
            (self.too_long, f"whose answers have more than {sequence} tokens together"),
            (self.silent, "with an empty answer"), (self.same, "whose answers are the same")) if count)

    def unread(self, setting: str) -> DataError | None:
        """A warning if pairs have a margin and the task reads none."""
        return DataError("has margins, which the task reward alone reads", code="margin-without-effect", where=setting,
                         value=self.margins, remedy="Leave the column out, or set `--data.task reward`."
                         ) if self.margins else None

    def warning(self, setting: str, sequence: int) -> DataError | None:
        """A warning if more than 1 % of the pairs are left out."""
        left_out = self.too_long + self.silent + self.same
        if left_out <= _WARNED_SHARE * self.pairs:
            return None
        return DataError(f"leaves out {left_out / self.pairs:.1%} of its pairs: {self.text(sequence)}",
                         code="pairs-left-out", where=setting, value=left_out,
                         remedy=f"Set a longer `--model.sequence`: all of it fits into {self.longest}." if self.too_long
                         else "Leave pairs without a difference out of the data set.")


def _pairs_in(part: Arrays, sequence: int, *, scores: bool) -> PreferencePairs:
    offsets = np.asarray(part.arrays["offsets"], dtype=np.int64)
    stops = offsets[1:] + scores  # a position for the last token, too, which has no next one
    answers = TokenSamples(part.arrays["tokens"], offsets[:-1], stops, sequence, part.arrays["is_target"])
    return ScoredPairs(answers, part.arrays.get("margins")) if scores else PreferencePairs(answers)


def _stored(run: Run, tokenizer: ChatTokenizer, progress: Progress, *, scores: bool) -> tuple[Arrays, Arrays]:
    """Training and held-out pairs, from the cache. scores: whether the last token of an answer has a position."""
    name, held, sequence, form = training_name(run.data), run.data.eval, run.model.sequence, run.data.form
    tables = [open_pairs(each, setting, form).fingerprint
              for setting, each in (("train", name), ("eval", held)) if each is not None]
    place = cache_folder(run) / "preference" / fingerprint(
        tables, tokenizer.content, sequence, function_fingerprint(form) if is_object_name(form) else form, scores,
        "no added keys")

    def read(each: str, setting: str) -> tuple[list[_Encoded], _Counts]:
        return _all(each, setting, form, partial(_encoded, tokenizer, scores), sequence, progress)

    def write(folder: Path, part: list[_Encoded], counts: _Counts) -> None:
        margins = {} if part[0].margin is None else {
            "margins": np.array([one.margin for one in part], dtype=np.float64)}
        write_runs(folder, [answer for one in part for answer in one.answers], tokenizer.vocab, counts, margins)

    return stored_parts(place, name, held, read, write, "pairs", progress)


def _all(name: str, setting: str, form: str, encode: Callable[[Pair], _Encoded], sequence: int, progress: Progress
         ) -> tuple[list[_Encoded], _Counts]:
    """The pairs of a data set that are learnt from, and what was left out. DataError if there is none."""
    rows = encode_rows(pairs(name, setting, form), encode, f"pairs of {name}", progress)
    found = [one for one in rows if one is not None]
    spoken = [one for one in found if not one.is_silent]
    kept = [one for one in spoken if one.length <= sequence]
    counts = _Counts(pairs=len(rows), same=len(rows) - len(found), silent=len(found) - len(spoken),
                     too_long=len(spoken) - len(kept), longest=max((one.length for one in spoken), default=0),
                     margins=sum(one.margin is not None for one in kept))
    if not kept:
        within = f"within `model.sequence {sequence}`" if counts.too_long else "that differ"
        raise DataError(f"has no pair of answers {within}", code="no-pairs",
                        where=f"data.{setting} {name}", value=len(rows),
                        remedy=f"Give shorter pairs, or set `--model.sequence {counts.longest}` if the model has as "
                        "many positions." if counts.too_long else "Give pairs whose answers differ.")
    return kept, counts


def _encoded(tokenizer: ChatTokenizer, scores: bool, pair: Pair) -> _Encoded:
    prompt = [one for one, _ in takewhile(lambda turns: turns[0] == turns[1],
                                          zip(pair.chosen.messages, pair.rejected.messages, strict=False))]
    key = json.dumps([prompt, pair.chosen.tools], sort_keys=True, default=str)
    answers = _answer(tokenizer, pair.chosen, scores), _answer(tokenizer, pair.rejected, scores)
    return _Encoded(answers=answers, key=key, margin=pair.margin,
                    length=sum(len(ids) - (not scores) for ids, _ in answers))


def _answer(tokenizer: ChatTokenizer, conversation: Conversation, scores: bool) -> Sample:
    """scores: without tokens for padding at its end: as in transformers, the score is that of the token before."""
    samples = tokenizer.encode(conversation)
    if len(samples) != 1:
        raise DataError("has an answer of several turns, which the chat template writes otherwise once others follow",
                        code="answer-of-several-turns", where=conversation.place, value=len(samples),
                        remedy="Give answers of one turn, or a `--data.chat-template` that writes each turn alike.")
    ids, is_target = samples[0]
    stop = len(ids)
    while scores and ids[stop - 1] == tokenizer.padding and stop > 1:
        stop -= 1
    return ids[:stop], is_target[:stop]
