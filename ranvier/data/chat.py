"""The task chat: what the assistant says in a conversation, formatted with the tokenizer's own chat template.

    data set --rows--> messages --ChatTokenizer--> tokens, is_target --> TokenSamples or PackedSamples

The loss is computed on the tokens that the assistant wrote; the others are only context.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ranvier.config.run import Data, Run
from ranvier.config.task_form import SHIPPED
from ranvier.data import encoded_rows, quiz
from ranvier.data.arrays import Arrays
from ranvier.data.cache import Progress, cache_folder, fingerprint
from ranvier.data.chat_template import ChatTokenizer, Conversation, check_folder, check_packages
from ranvier.data.named_files import FILES, first_rows, open_source, readable_file, refusals, text_only
from ranvier.data.offline.pretrained_models import folder_of
from ranvier.data.padding import padding_text
from ranvier.data.row_forms import form_of_table
from ranvier.data.run_tokenizer import BUILT_IN, check_numbers, local_folder, numbers_in
from ranvier.data.subset import Source, join, shares, sources_of, spread, subset_settings, take_subsets
from ranvier.data.tables import Table
from ranvier.data.task import Dataset, Prepared, Task
from ranvier.data.token_samples import PackedSamples, TokenSamples, best_fit
from ranvier.errors import DataError, RanvierError

FORM = f"{FILES} with conversations, the name of a data set, or quiz"
"""Description of the accepted forms of data."""
_SILENT = "in which the assistant says nothing"


class Chat(Task):
    """The task `chat`: conversations, with the loss on the assistant's turns."""

    form = SHIPPED["chat"]

    def problems(self, run: Run, *, elsewhere: bool) -> list[RanvierError]:
        """Problems of the settings, the tokenizer's folder and the columns; one row of each file is read."""
        found: list[RanvierError] = [*text_only(run.data)]
        if run.data.mixture and run.data.eval is not None:
            found.append(DataError("is not used with `data.mixture`: a tenth of each part is held out",
                                   code="eval-with-mixture", where="data.eval", value=run.data.eval,
                                   remedy="Leave `--data.eval` out."))
        try:
            sources = sources_of(run.data, run.data.train or "")
        except DataError as problem:
            return [*found, problem]
        for source in sources:
            data = replace(run.data, train=source.name or None)
            found += first_rows(data, (quiz.NAME,), FORM, partial(conversations, data=run.data), elsewhere=elsewhere)
        return [*found, *tokenizer_problems(run, elsewhere=elsewhere)]

    def prepare(self, run: Run, progress: Progress) -> Prepared:
        """Tokenised conversations of this run (see ranvier.data.prepare), cut to the sequence. DataError when no text
        of the assistant is left."""
        tokenizer = open_tokenizer(run, progress)
        sources = sources_of(run.data, run.data.train or "")
        stored = [_load_source(run, source, tokenizer, progress) for source in sources]
        counts = [one for source, parts in zip(sources, stored, strict=True)
                  for one in encoded_rows.counts_of(parts, (source.name, run.data.eval))]
        words = encoded_rows.Words(samples="samples", silent=_SILENT, empty=_SILENT,
                                   too_long=f"whose answers lie beyond {run.model.sequence} tokens")
        train, held = ([_dataset(run, part) for part in parts] for parts in zip(*stored, strict=True))
        lengths = np.concatenate([samples.sample_lengths for samples, _ in train])
        used = [put([dataset for _, dataset in parts]) for put, parts in ((join, train), (spread, held))]
        if len(sources) == 1:
            used = take_subsets(run, used)
        targets = sum(samples.num_targets() for samples, _ in train)
        sizes = [sum(len(samples) for samples, _ in parts) for parts in (train, held)]
        forms = {form_of_table(open_conversations(source.name, "train"), run.data).words: None for source in sources}
        return Prepared(
            train=used[0], eval=used[1], tokenizer=tokenizer, shares=shares(sources, [len(one) for _, one in train]),
            weight=max(1.0, targets / sum(len(one) for _, one in train)), transform=tokenizer.fingerprint,
            padding=padding_text(lengths, run, can_pack=True),
            about=f"{', '.join(source.name for source in sources)}: {sizes[0]:,} conversations in "
                  f"{' and '.join(forms)}, {sizes[1]:,} held out, {targets:,} tokens of the assistant in "
                  f"{int(lengths.sum()):,}{encoded_rows.about_counts(counts, words, run.model.sequence)}",
            warnings=tuple(warning for setting, counts in counts for warning in encoded_rows.left_out_warning(
                "samples-left-out", counts, words, setting, run.model.sequence,
                "Leave conversations without answers out of the data set.")),
            fingerprint=fingerprint("chat", tokenizer.fingerprint, [part.digest for parts in stored for part in parts],
                                    run.data.packing, run.data.mixture, subset_settings(run)))


CHAT = Chat()
"""The task; it has no state."""


def tokenizer_folder(run: Run, progress: Progress | None = None) -> Path | None:
    """The folder of the run's chat tokenizer: data.tokenizer, or that of the pretrained model. None if it would have to
    be fetched and `progress` is None. DataError if the run names no such tokenizer."""
    if run.data.tokenizer not in BUILT_IN:
        path = Path(os.path.expanduser(run.data.tokenizer))
        return path.parent if path.is_file() else path
    if run.model.pretrained is not None:
        path = Path(os.path.expanduser(run.model.pretrained))
        return path if progress is None and path.is_dir() else (
            None if progress is None else folder_of(run.model.pretrained, cache_folder(run), progress))
    raise DataError("has no chat template", code="tokenizer-without-chat-template", where="data.tokenizer",
                    value=run.data.tokenizer, remedy="Name the folder of a chat model's tokenizer.")


def tokenizer_problems(run: Run, *, elsewhere: bool) -> list[RanvierError]:
    """Problems of the run's chat tokenizer, as far as it and the model are on this machine. elsewhere: for another
    machine, whose packages are unknown."""
    def look() -> None:
        folder, model = tokenizer_folder(run), local_folder(run)
        if folder is None and not elsewhere:
            check_packages()
        if folder is None:
            return
        check_folder(folder, run.data.chat_template)
        if model is not None or run.model.pretrained is None:
            numbers = numbers_in(folder)
            assert numbers is not None  # the folder has been checked
            check_numbers(numbers, run, model, None if model is None else numbers_in(model))

    return [*refusals(look)]


def open_tokenizer(run: Run, progress: Progress) -> ChatTokenizer:
    """The run's chat tokenizer, fetched if necessary. DataError if its tokens are not the model's."""
    folder = tokenizer_folder(run, progress)
    assert folder is not None, "asked with a progress"
    tokenizer = ChatTokenizer(folder, run.data.chat_template)
    model = None if run.model.pretrained is None else folder_of(run.model.pretrained, cache_folder(run), progress)
    check_numbers(tokenizer.numbers(), run, model, None if model is None else numbers_in(model))
    return tokenizer


# --- rows ------------------------------------------------------------------------------------------------------------


def open_conversations(name: str, setting: str) -> Table:
    """The table of this name: the shipped quiz, or a table that `open_source` opens. setting: train or eval."""
    return quiz.open_quiz() if name == quiz.NAME else open_source(name, setting, FORM)


def conversations(name: str, setting: str, data: Data) -> Iterator[Conversation | None]:
    """The conversations of a data set; None for a row without an answer. DataError, with the place, for a row that is
    not a conversation, and for a table in no known form of conversations."""
    table = open_conversations(name, setting)
    form = form_of_table(table, data)
    wanted = [*form.columns, *(other for other in form.more if other in table.columns)]
    with readable_file(Path(os.path.expanduser(name)), setting, FORM):
        for row in table.rows(wanted):
            yield form.read(row)


# --- tokens ----------------------------------------------------------------------------------------------------------


def _dataset(run: Run, part: Arrays) -> tuple[TokenSamples, Dataset]:
    """Return the samples, and the dataset of them that a run reads."""
    offsets = np.asarray(part.arrays["offsets"], dtype=np.int64)
    samples = TokenSamples(part.arrays["tokens"], offsets[:-1], offsets[1:], run.model.sequence,
                           part.arrays["is_target"])
    if not run.data.packing:
        return samples, samples
    return samples, PackedSamples(samples, best_fit(samples.sample_lengths, run.model.sequence))


def _load_source(run: Run, source: Source, tokenizer: ChatTokenizer, progress: Progress) -> tuple[Arrays, Arrays]:
    """Training and held-out conversations of one source, from the cache."""
    sequence, held = run.model.sequence, run.data.eval
    tables = [open_conversations(name, setting)
              for setting, name in (("train", source.name), ("eval", held)) if name is not None]
    forms = [(table.fingerprint, form_of_table(table, run.data).fingerprint) for table in tables]
    place = cache_folder(run) / "chat" / fingerprint(forms, tokenizer.content, sequence, "marks of each template")

    def nothing(counts: encoded_rows.Counts, where: str) -> DataError:
        within = f" within `model.sequence` {sequence}" if counts.too_long else ""
        return DataError(f"has no conversation in which the assistant says something{within}", code="nothing-said",
                         where=where, value=counts.samples - counts.empty,
                         remedy="Give more conversations, or a longer `--model.sequence`.")

    return encoded_rows.stored_samples(place, source.name, held, partial(conversations, data=run.data),
                                       partial(_encode, tokenizer, sequence), nothing, "conversations",
                                       tokenizer.vocab, progress)


def _encode(tokenizer: ChatTokenizer, sequence: int, conversation: Conversation) -> list[encoded_rows.Encoded]:
    """The samples of a conversation, all with the same key."""
    key = json.dumps([list(conversation.messages), conversation.tools, dict(conversation.variables)], sort_keys=True,
                     default=str)
    found = []
    for ids, is_target in tokenizer.encode(conversation):
        within = is_target[:sequence + 1]
        use: encoded_rows.Use = "cut" if len(ids) > sequence + 1 else "whole"
        if not within[1:].any():
            use = "too_long" if is_target[1:].any() else "silent"
        found.append(encoded_rows.Encoded(runs=((np.array(ids[:sequence + 1], dtype=np.uint32), within),), key=key,
                                          length=len(ids) - 1, use=use))
    return found
