"""The task chat: what the assistant says in a conversation. Conversations through the tokenizer's own chat template.

    data set --rows--> messages --ChatTokenizer--> tokens, is_target --> TokenSamples or PackedSamples

The loss is that of the tokens that the assistant wrote; the others are read and not learnt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path

import numpy as np

from ranvier.config.run import Run
from ranvier.config.task_form import SHIPPED
from ranvier.data import quiz
from ranvier.data.arrays import Arrays, made_once, write_arrays
from ranvier.data.cache_folder import cache_folder
from ranvier.data.chat_template import ChatTokenizer, Message, look_at_folder
from ranvier.data.fingerprint import fingerprint
from ranvier.data.mixture import Source, join, shares, sources_of, spread
from ranvier.data.named_files import is_data_set, readable_file, table_name_problems, text_only
from ranvier.data.padding import padding_text
from ranvier.data.parallel import map_in_order
from ranvier.data.publish import Progress, advance, processes_of
from ranvier.data.run_tokenizer import BUILT_IN
from ranvier.data.subset import chosen, held_out, some
from ranvier.data.tables import JSON_LINES, PARQUET, Row, Table, is_saved, no_column, open_dataset, open_file
from ranvier.data.task import Dataset, Prepared, Task
from ranvier.data.token_samples import PackedSamples, TokenSamples, best_fit
from ranvier.errors import DataError, RanvierError

FORM = "a JSONL or Parquet file with a column of messages, the name of a data set, or quiz"
"""What may be given, in words."""
_SETTING = "data.messages-column"
_AT_ONCE = 200
"""Conversations that one process encodes at once."""


class Chat(Task):
    """The task `chat`: conversations, with the loss on the assistant's turns."""

    form = SHIPPED["chat"]

    def problems(self, run: Run, *, elsewhere: bool) -> list[RanvierError]:
        """What is wrong with the settings, the tokenizer's folder and the columns; one row of each file is read."""
        found: list[RanvierError] = [*text_only(run.data)]
        if run.data.mixture and run.data.eval is not None:
            found.append(DataError("is not used with data.mixture, of which each part holds out a tenth",
                                   where="data.eval", value=run.data.eval, remedy="Leave --data.eval out."))
        try:
            sources = sources_of(run.data, run.data.train or "")
        except DataError as problem:
            return [*found, problem]
        for source in sources:
            data = replace(run.data, train=source.name or None)
            names = table_name_problems(data, (quiz.NAME,), FORM)
            found += names
            for setting, name in (("train", data.train), ("eval", data.eval)):
                if name is not None and not names and not is_data_set(name):
                    try:
                        next(conversations(name, setting, run.data.messages_column), None)
                    except DataError as problem:
                        found.append(problem)
        try:
            folder = tokenizer_folder(run)
        except DataError as problem:
            return [*found, problem]
        problem_there = None if folder is None else look_at_folder(folder, run.data.chat_template)
        return [*found, *([problem_there] if problem_there else [])]

    def prepare(self, run: Run, progress: Progress) -> Prepared:
        """Tokenised conversations of this run (see ranvier.data.prepare), cut to the sequence. DataError when nothing
        of the assistant is left."""
        folder = tokenizer_folder(run, progress)
        assert folder is not None, "asked with a progress"
        tokenizer = ChatTokenizer(folder, run.data.chat_template)
        if tokenizer.vocab > run.model.vocab and run.model.pretrained is None:
            raise DataError(f"is smaller than the tokenizer's vocabulary of {tokenizer.vocab}", where="model.vocab",
                            value=run.model.vocab, remedy=f"Set --model.vocab {tokenizer.vocab} or more.")
        sources = sources_of(run.data, run.data.train or "")
        stored = [_stored(run, source, folder, tokenizer, progress) for source in sources]
        train, held = ([_dataset(run, part) for part in parts] for parts in zip(*stored, strict=True))
        lengths = np.concatenate([samples.sample_lengths for samples, _ in train])
        used = [put([dataset for _, dataset in parts]) for put, parts in ((join, train), (spread, held))]
        used = [some(part, count, run.seed, f"data.{name}-samples") if len(sources) == 1 else part for part, count, name
                in zip(used, (run.data.train_samples, run.data.eval_samples), ("train", "eval"), strict=True)]
        targets = sum(samples.num_targets() for samples, _ in train)
        counts = [sum(len(samples) for samples, _ in parts) for parts in (train, held)]
        return Prepared(
            train=used[0], eval=used[1], tokenizer=tokenizer, shares=shares(sources, [len(one) for _, one in train]),
            weight=max(1.0, targets / sum(len(one) for _, one in train)), transform=tokenizer.fingerprint,
            padding=padding_text(lengths, run, can_pack=True),
            about=f"{', '.join(source.name for source in sources)}: {counts[0]:,} conversations, {counts[1]:,} held "
                  f"out, {targets:,} tokens of the assistant in {int(lengths.sum()):,}",
            fingerprint=fingerprint("chat", tokenizer.fingerprint, [part.digest for parts in stored for part in parts],
                                    run.data.packing, run.data.mixture, chosen(run)))


CHAT = Chat()
"""The task; it has no state."""


def tokenizer_folder(run: Run, progress: Progress | None = None) -> Path | None:
    """The folder of the run's chat tokenizer: data.tokenizer, or that of the pretrained model. None where it would have
    to be fetched, and there is no `progress`. DataError where the run names none."""
    if run.data.tokenizer not in BUILT_IN:
        path = Path(run.data.tokenizer).expanduser()
        return path.parent if path.is_file() else path
    if run.model.pretrained is not None:
        from ranvier.data.offline.pretrained_models import folder_of

        path = Path(run.model.pretrained).expanduser()
        return path if progress is None and path.is_dir() else (
            None if progress is None else folder_of(run.model.pretrained, cache_folder(run), progress))
    raise DataError("has no chat template", where="data.tokenizer", value=run.data.tokenizer,
                    remedy="Name the folder of a chat model's tokenizer.")


# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """messages: at least one. place: in the data set, for errors."""

    messages: Sequence[Message]
    place: str


def open_conversations(name: str, setting: str) -> Table:
    """The table of this name: the shipped one, a file, a saved data set, or one of the hub, which is streamed.
    setting: train or eval."""
    if name == quiz.NAME:
        return quiz.open_quiz()
    path = Path(name).expanduser()
    split = "train" if setting == "train" else "validation"
    if is_data_set(name) or is_saved(path):
        return open_dataset(name, split, f"data.{setting}", FORM)
    if path.suffix.lower() not in (*JSON_LINES, *PARQUET):
        raise DataError("is not a table of conversations", where=f"data.{setting}", value=name, remedy=f"Give {FORM}.")
    with readable_file(path, setting, FORM):
        return open_file(path, name)


def conversations(name: str, setting: str, column: str | None) -> Iterator[Conversation]:
    """The conversations of a data set. DataError, with the place, for a row that is none."""
    table = open_conversations(name, setting)
    messages = table.column(column, ("messages", "conversation", "conversations"), _SETTING)
    with readable_file(Path(name).expanduser(), setting, FORM):
        for row in table.rows([messages]):
            yield Conversation(messages=_messages(row, messages), place=row.place)


def _messages(row: Row, column: str) -> list[Message]:
    if column not in row.values:
        raise no_column(row.place, column, row.values, _SETTING)
    value = row.values[column]
    remedy = 'Give a list of messages, for example [{"role": "user", "content": "..."}, ...].'
    if not isinstance(value, list) or not value:
        raise DataError("is no conversation", where=row.place, value=repr(value)[:80], remedy=remedy)
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError("has a message without `role` and `content`", where=row.place, value=repr(message)[:80],
                            remedy=remedy)
    return [{key: part for key, part in message.items() if part is not None} for message in value]


# --- tokens ----------------------------------------------------------------------------------------------------------


def _dataset(run: Run, part: Arrays) -> tuple[TokenSamples, Dataset]:
    """Samples, and the dataset that a run reads of them."""
    offsets = np.asarray(part.arrays["offsets"], dtype=np.int64)
    samples = TokenSamples(part.arrays["tokens"], offsets[:-1], offsets[1:], run.model.sequence,
                           part.arrays["is_target"])
    if not run.data.packing:
        return samples, samples
    return samples, PackedSamples(samples, best_fit(samples.sample_lengths, run.model.sequence))


def _stored(run: Run, source: Source, folder: Path, tokenizer: ChatTokenizer, progress: Progress
            ) -> tuple[Arrays, Arrays]:
    """Training and held-out conversations of one source, from the cache."""
    sequence, column = run.model.sequence, run.data.messages_column
    tables = [open_conversations(name, setting).fingerprint
              for setting, name in (("train", source.name), ("eval", run.data.eval)) if name is not None]
    place = cache_folder(run) / "chat" / fingerprint(tables, column, tokenizer.fingerprint, sequence)

    def make() -> None:
        progress(f"tokenising {source.name}")
        encode = partial(_encoded, str(folder), None if run.data.chat_template is None else str(run.data.chat_template),
                         sequence)
        train = _all(source.name, "train", column, encode, progress)
        if run.data.eval is not None:
            held = _all(run.data.eval, "eval", column, encode, progress)
        else:
            out = held_out([one.key for one in train])
            held = [one for one, here in zip(train, out, strict=True) if here]
            train = [one for one, here in zip(train, out, strict=True) if not here]
        for name, part in (("eval", held), ("train", train)):
            if not part:
                raise DataError("has too few conversations to train on some and hold out others",
                                where=f"data.train {source.name}", value=len(train) + len(held),
                                remedy="Give at least two, or more in --data.eval.")
            _write(place / name, part, tokenizer.vocab)

    return made_once(place, make, progress)


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    """A conversation as tokens. key: by which it is held out. is_cut: whether it was longer than the sequence."""

    tokens: np.ndarray
    is_target: np.ndarray
    key: str
    is_cut: bool


@lru_cache(maxsize=1)
def _tokenizer(folder: str, template: str | None) -> ChatTokenizer:
    """Of a process that encodes piece after piece."""
    return ChatTokenizer(Path(folder), None if template is None else Path(template))


def _encoded(folder: str, template: str | None, sequence: int, piece: Sequence[Conversation]) -> list[_Encoded]:
    tokenizer, found = _tokenizer(folder, template), []
    for one in piece:
        try:
            ids, is_target = tokenizer.encode(one.messages)
        except DataError as error:
            raise DataError(error.what, where=one.place, value=error.value, remedy=error.remedy or "") from error
        found.append(_Encoded(tokens=np.array(ids[:sequence + 1], dtype=np.uint32), is_target=is_target[:sequence + 1],
                              key=json.dumps(list(one.messages), sort_keys=True, default=str),
                              is_cut=len(ids) > sequence + 1))
    return found


def _all(name: str, setting: str, column: str | None, encode: Callable[[list[Conversation]], list[_Encoded]],
         progress: Progress) -> list[_Encoded]:
    """The conversations of a data set in which the assistant says something. DataError if there is none."""
    rows = conversations(name, setting, column)
    pieces = iter(lambda: list(islice(rows, _AT_ONCE)), [])
    found: list[_Encoded] = []
    for piece in map_in_order(encode, pieces, processes_of(progress)):
        found += piece
        advance(progress, f"conversations of {name}", len(found))
    kept = [one for one in found if one.is_target[1:].any()]
    cut = sum(one.is_cut for one in kept)
    if cut:
        progress(f"cut {cut:,} of {len(found):,} conversations of {name} to the sequence")
    if len(kept) < len(found):
        progress(f"left out {len(found) - len(kept):,} of {len(found):,} conversations of {name}, in which the "
                 "assistant says nothing")
    if not kept:
        raise DataError("has no conversation in which the assistant says something", where=f"data.{setting} {name}",
                        value=len(found), remedy="Give more conversations, or a longer --model.sequence.")
    return kept


def _write(folder: Path, part: Sequence[_Encoded], vocab: int) -> None:
    lengths = np.array([len(one.tokens) for one in part], dtype=np.int64)
    write_arrays(folder, {
        "tokens": np.concatenate([one.tokens for one in part]).astype(np.uint16 if vocab <= 1 << 16 else np.uint32),
        "is_target": np.concatenate([one.is_target for one in part]).astype(np.uint8),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)}, {})
