"""The tasks with pairs of answers to a prompt: preference, which makes the chosen answer more likely than the rejected
one, and reward, which makes a model's score of the chosen answer larger.

    data set --rows--> pairs of conversations --ChatTokenizer--> tokens, is_target --> PreferencePairs, ScoredPairs

The losses are `ranvier.tensor.split.preference_loss`. If a loss compares with a reference, the run computes the
reference's log-probabilities before its first step (`ranvier.train.reference_log_probs`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ranvier.block import State
from ranvier.config.named_object import is_object_name
from ranvier.config.run import Preference, Run
from ranvier.config.task_form import SHIPPED
from ranvier.data import encoded_rows, quiz
from ranvier.data.arrays import Arrays
from ranvier.data.cache import Progress, cache_folder, fingerprint
from ranvier.data.chat import open_tokenizer, tokenizer_problems
from ranvier.data.chat_template import ChatTokenizer, Conversation, Sample
from ranvier.data.conversation_rows import MARGIN, OTHER_COLUMNS, PAIR_COLUMNS, Pair, pair_of
from ranvier.data.named_files import FILES, first_rows, open_source, readable_file, text_only, training_name
from ranvier.data.padding import padding_text
from ranvier.data.row_forms import function_fingerprint, made_by_function
from ranvier.data.subset import Subset, subset_settings, take_subsets
from ranvier.data.tables import Row, Table
from ranvier.data.task import Dataset, Prepared, Targets, Task
from ranvier.data.token_samples import PackedSamples, TokenSamples
from ranvier.errors import DataError, RanvierError
from ranvier.tensor.split.loss import token_losses
from ranvier.tensor.split.preference_loss import answer_sums, checked_targets, last_scores, rewards

FORM = f"{FILES} with the columns prompt, chosen and rejected, the name of a data set, or quiz"
"""Description of the accepted forms of data."""


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
        found += first_rows(run.data, (quiz.NAME,), FORM, partial(pairs, form=run.data.form), elsewhere=elsewhere)
        return [*found, *tokenizer_problems(run, elsewhere=elsewhere)]

    def prepare(self, run: Run, progress: Progress) -> Prepared:
        """Tokenised pairs of this run. No pair is cut: a pair whose answers are longer than the sequence is left out.
        DataError when no pair is left."""
        tokenizer = open_tokenizer(run, progress)
        parts = _load_pairs(run, tokenizer, progress, scores=self._scores)
        whole = [_pairs_in(part, run.model.sequence, scores=self._scores) for part in parts]
        used = take_subsets(run, whole)
        train, held = used if self._scores else map(WithReference, used)
        counts = encoded_rows.counts_of(parts, (training_name(run.data), run.data.eval))
        words = encoded_rows.Words(samples="pairs", silent="with an empty answer", empty="whose answers are the same",
                                   too_long=f"whose answers have more than {run.model.sequence} tokens together")
        warnings = [warning for setting, counts in counts for warning in encoded_rows.left_out_warning(
            "pairs-left-out", counts, words, setting, run.model.sequence,
            "Leave pairs without a difference out of the data set.")]
        if not self._scores:
            warnings += [DataError("has margins, which only the task reward reads", code="margin-without-effect",
                                   where=setting, value=counts.margins,
                                   remedy="Leave the column out, or set `--data.task reward`.")
                         for setting, counts in counts if counts.margins]
        return Prepared(
            train=train, eval=held, tokenizer=tokenizer, weight=1.0, transform=tokenizer.fingerprint,
            padding=padding_text(whole[0].sample_lengths, run, can_pack=False),
            about=f"{training_name(run.data)}: {len(whole[0]):,} pairs of answers, {len(whole[1]):,} held out"
                  f"{encoded_rows.about_counts(counts, words, run.model.sequence)}",
            warnings=tuple(warnings),
            scoring=partial(PreferenceScoring, None if self._scores else run.preference),
            fingerprint=fingerprint("preference", tokenizer.fingerprint, [part.digest for part in parts],
                                    subset_settings(run)))


PREFERENCE, REWARD = PreferenceTask("preference"), PreferenceTask("reward")
"""The tasks; they have no state."""


def open_pairs(name: str, setting: str, form: str) -> Table:
    """The table of this name: the shipped quiz, or a table that `open_source` opens. setting: train or eval. form:
    data.form. DataError if it lacks a column that the form, unless it is a function, needs."""
    found = quiz.open_quiz_pairs() if name == quiz.NAME else open_source(name, setting, FORM)
    for column in PAIR_COLUMNS[1:]:
        if column not in found.columns and not is_object_name(form):
            raise DataError(f"has no column `{column}`", code="column-missing", where=name,
                            value=", ".join(sorted(found.columns)), remedy=f"Give {FORM}.")
    return found


def pairs(name: str, setting: str, form: str) -> Iterator[Pair | None]:
    """The pairs of a data set; None for a pair whose answers are the same. DataError, with the place, for a row without
    a pair, and if only some pairs of the set have a margin."""
    table = open_pairs(name, setting, form)
    wanted = [column for column in (*PAIR_COLUMNS, MARGIN, *OTHER_COLUMNS) if column in table.columns]
    first: Pair | None = None
    with readable_file(Path(os.path.expanduser(name)), setting, FORM):
        for row in table.rows(table.columns if is_object_name(form) else wanted):
            pair = pair_of(row) if form == "auto" else _parse_pair(form, row)
            first = first or pair
            if pair is not None and first is not None and (pair.margin is None) != (first.margin is None):
                raise DataError("has a margin, and earlier pairs have none" if first.margin is None else
                                "has no margin, and earlier pairs have one", code="margin-of-some-pairs",
                                where=row.place, value=pair.margin,
                                remedy="Give all pairs of a data set a margin, which may be 0, or none of them.")
            yield pair


def _parse_pair(form: str, row: Row) -> Pair | None:
    made = made_by_function(form, row)
    if made is not None and not isinstance(made, dict):
        raise DataError(f"returns a {type(made).__name__} for a row", code="form-function-result", where="data.form",
                        value=form, remedy="Return a dict with prompt, chosen and rejected, or None.")
    return None if made is None else pair_of(replace(row, values=made))


# --- tokens ----------------------------------------------------------------------------------------------------------


def _pairs_in(part: Arrays, sequence: int, *, scores: bool) -> PreferencePairs:
    offsets = np.asarray(part.arrays["offsets"], dtype=np.int64)
    stops = offsets[1:] + scores  # a position for the last token, too, which has no target
    answers = TokenSamples(part.arrays["tokens"], offsets[:-1], stops, sequence, part.arrays["is_target"])
    return ScoredPairs(answers, part.arrays.get("margins")) if scores else PreferencePairs(answers)


def _load_pairs(run: Run, tokenizer: ChatTokenizer, progress: Progress, *, scores: bool) -> tuple[Arrays, Arrays]:
    """Training and held-out pairs, from the cache. scores: whether the last token of an answer has a position."""
    name, held, sequence, form = training_name(run.data), run.data.eval, run.model.sequence, run.data.form
    tables = [open_pairs(each, setting, form).fingerprint
              for setting, each in (("train", name), ("eval", held)) if each is not None]
    place = cache_folder(run) / "preference" / fingerprint(
        tables, tokenizer.content, sequence, function_fingerprint(form) if is_object_name(form) else form, scores,
        "marks of each template")

    def nothing(counts: encoded_rows.Counts, where: str) -> DataError:
        within = f"within `model.sequence {sequence}`" if counts.too_long else "that differ"
        return DataError(f"has no pair of answers {within}", code="no-pairs", where=where, value=counts.rows,
                         remedy=f"Give shorter pairs, or set `--model.sequence {counts.longest}` if the model has "
                         "that many positions." if counts.too_long else "Give pairs whose answers differ.")

    return encoded_rows.stored_samples(place, name, held, partial(pairs, form=form),
                                       partial(_encode_pair, tokenizer, sequence, scores), nothing, "pairs",
                                       tokenizer.vocab, progress)


def _encode_pair(tokenizer: ChatTokenizer, sequence: int, scores: bool, pair: Pair) -> list[encoded_rows.Encoded]:
    """The sample of a pair. Its key is its prompt, so that all pairs of a prompt stay together."""
    prompt = [turn for turn, _ in takewhile(lambda turns: turns[0] == turns[1],
                                            zip(pair.chosen.messages, pair.rejected.messages, strict=False))]
    key = json.dumps([prompt, pair.chosen.tools], sort_keys=True, default=str)
    answers = _answer(tokenizer, pair.chosen, scores), _answer(tokenizer, pair.rejected, scores)
    length = sum(len(ids) - (not scores) for ids, _ in answers)
    use: encoded_rows.Use = "too_long" if length > sequence else "whole"
    if not all(is_target[1:].any() for _, is_target in answers):
        use = "silent"
    return [encoded_rows.Encoded(runs=answers, key=key, length=length, margin=pair.margin, use=use)]


def _answer(tokenizer: ChatTokenizer, conversation: Conversation, scores: bool) -> Sample:
    """The tokens of an answer. scores: without padding tokens at its end: as in transformers, the score is that of the
    last token before them."""
    samples = tokenizer.encode(conversation)
    if len(samples) != 1:
        raise DataError("has an answer of several turns, which the chat template writes differently once others follow",
                        code="answer-of-several-turns", where=conversation.place, value=len(samples),
                        remedy="Give answers of one turn, or a `--data.chat-template` that always writes a turn "
                               "the same way.")
    ids, is_target = samples[0]
    stop = len(ids)
    while scores and ids[stop - 1] == tokenizer.padding and stop > 1:
        stop -= 1
    return ids[:stop], is_target[:stop]


# --- samples, and how a model is judged by them ----------------------------------------------------------------------

# A sample is a pair: one sequence with the prompt and the chosen answer, then the prompt and the rejected answer. They
# are packed as in `ranvier.data.token_samples.PackedSamples`: attention stays within each, and positions restart.


class PreferencePairs:
    """Pairs of answers. answers: pair i has 2 i, the chosen one, and 2 i + 1, at most `answers.longest` positions
    together.

    inputs: {"ids", "segments"}, [b, length] int64 each. targets: {"tokens": [b, length], "rejected_from": [b]} int64.
    """

    def __init__(self, answers: TokenSamples) -> None:
        self._packed = PackedSamples(answers, np.arange(len(answers)) // 2)
        self._chosen_lengths = answers.sample_lengths[0::2]
        self.sample_lengths = self._chosen_lengths + answers.sample_lengths[1::2]
        assert not len(answers) % 2 and (not len(answers) or self.sample_lengths.max() <= answers.longest)

    def __len__(self) -> int:
        return len(self._packed)

    def inputs(self, samples: np.ndarray, epochs: np.ndarray, length: int | None = None) -> State:
        """length: number of positions, at least those of both answers; None is the maximum."""
        found = self._packed.inputs(samples)
        return {name: tensor[:, :length] for name, tensor in found.items()}

    def targets(self, samples: np.ndarray, length: int | None = None) -> Targets:
        """length: as in `inputs`."""
        return {"tokens": self._packed.targets(samples)[:, :length],
                "rejected_from": torch.from_numpy(self._chosen_lengths[samples])}


class ScoredPairs(PreferencePairs):
    """Pairs whose answers have a position for each token, including the last one, whose score is the answer's reward.

    margins: [len(self)], of each pair, or None. targets: those of `RewardLoss`.
    """

    def __init__(self, answers: TokenSamples, margins: np.ndarray | None = None) -> None:
        super().__init__(answers)
        self._margins = margins

    def targets(self, samples: np.ndarray, length: int | None = None) -> Targets:
        """length: has no effect."""
        ends = np.stack([self._chosen_lengths[samples], self.sample_lengths[samples]], 1)
        found = {"last": torch.from_numpy(ends - 1)}
        return found if self._margins is None else found | {"margin": torch.from_numpy(self._margins[samples])}


class WithReference(Subset):
    """Pairs with log p of both answers under a reference, once the run has computed them.

    targets: those of `pairs`, and afterwards also {"reference": [b, 2] float64}: chosen, rejected.
    """

    def __init__(self, pairs: Dataset) -> None:
        super().__init__(pairs, np.arange(len(pairs)))
        self.reference: np.ndarray | None = None
        """[len(self), 2] float64; set once, before the first step."""

    def targets(self, samples: np.ndarray, length: int | None = None) -> Targets:
        """length: as in `PreferencePairs.inputs`."""
        found = super().targets(samples, length)
        assert isinstance(found, dict)
        return found if self.reference is None else found | {"reference": torch.from_numpy(self.reference[samples])}


@torch.no_grad()
def answer_log_p(logits_BSV: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """[B, 2]: log p of the chosen and of the rejected answer."""
    return answer_sums(-token_losses(logits_BSV, targets["tokens"]), targets["rejected_from"])


class PreferenceScoring:
    """The share of pairs whose chosen answer has the larger reward, and the mean margin between both rewards. Sums
    stay on the device until `part`. settings: of the loss; None for a reward model's scores."""

    def __init__(self, settings: Preference | None) -> None:
        self._settings = settings
        self._sums: list[Tensor] = []

    def add(self, output: State, targets: dict[str, Tensor], samples: Tensor) -> None:
        """output: logits [b, S, V], or scores [b, S, 1]; targets: those of `PreferenceLoss`, or of `RewardLoss`."""
        assert isinstance(output, Tensor)  # of a decoder
        if self._settings is None:
            rewards_B2, counted_B = last_scores(output, targets)
        else:
            found = checked_targets(targets, self._settings)
            rewards_B2, counted_B = rewards(answer_log_p(output, found), found, self._settings)
        margin_B = (rewards_B2[:, 0] - rewards_B2[:, 1]).double().where(counted_B, 0)
        self._sums.append(torch.stack([(margin_B > 0).sum().double(), margin_B.sum(), counted_B.sum().double()]))

    def part(self) -> list[float]:
        """Of this rank's pairs: the number whose chosen answer has the larger reward, the sum of margins, and the
        number of all."""
        found: list[float] = torch.stack(self._sums).sum(0).tolist() if self._sums else [0.0, 0.0, 0.0]
        return found

    def total(self, parts: Sequence[list[float]]) -> dict[str, float]:
        """"eval_accuracy" and "eval_reward_margin" over all ranks' pairs (NaN without any), and "eval_count"."""
        right, margin, count = (sum(part[place] for part in parts) for place in range(3))
        return {"eval_accuracy": right / count if count else math.nan,
                "eval_reward_margin": margin / count if count else math.nan, "eval_count": count}
