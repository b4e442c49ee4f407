"""The set `quiz` of the tasks chat and preference: short questions with computed answers, for fine-tuning without
access to a hub.

    sums and differences below 100; the larger of two numbers; numbers in words; words in alphabetical order; the next
    and the last day and month

The questions with the smallest hashes of each kind are taken, so the set is the same everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from itertools import combinations

from ranvier.data.cache import fingerprint
from ranvier.data.tables import Row, Table

NAME = "quiz"
_EACH = 400
"""Questions of a kind, at most."""
_MOST = 100
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
           "December")
_SMALL = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
          "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_NOUNS = ("apple", "arrow", "bird", "boat", "candle", "cloud", "dog", "door", "fig", "forest", "garden", "hill",
          "horse", "island", "lamp", "leaf", "moon", "ocean", "paper", "pear", "river", "stone", "table", "wind")
_Pair = tuple[str, str]


def open_quiz() -> Table:
    """The set as a table with the column `messages`: 2,038 conversations of one question and its answer."""
    pairs = sorted((pair for kind in _kinds() for pair in kind), key=_hash)  # which mixes the kinds
    talks = [[{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
             for question, answer in pairs]
    return _table(("messages",), [(talk,) for talk in talks], fingerprint(NAME, pairs))


def open_quiz_pairs() -> Table:
    """The set as a table with the columns `prompt`, `chosen` and `rejected`; the rejected answer is that of another
    question of the same kind."""
    triples = sorted(((question, right, kind[(place + 1) % len(kind)][1]) for kind in _kinds()
                      for place, (question, right) in enumerate(kind)), key=lambda triple: _hash(triple[:2]))
    return _table(("prompt", "chosen", "rejected"), triples, fingerprint(NAME, triples))


def _table(columns: tuple[str, ...], found: Sequence[tuple[object, ...]], same: str) -> Table:
    rows = [Row(f"{NAME} row {number}", dict(zip(columns, one, strict=True))) for number, one in enumerate(found)]
    return Table(name=NAME, columns=columns, fingerprint=same, rows=lambda wanted: iter(rows))


def _kinds() -> list[list[_Pair]]:
    """The questions of each kind with their answers."""
    numbers = [(first, second) for first in range(2, _MOST) for second in range(2, _MOST)]
    kinds: list[list[_Pair]] = [
        [(f"What is {first} + {second}?", f"{first} + {second} = {first + second}.") for first, second in numbers],
        [(f"What is {first} - {second}?", f"{first} - {second} = {first - second}.")
         for first, second in numbers if first > second],
        [(f"Which number is larger, {first} or {second}?", f"{max(first, second)} is larger.")
         for first, second in numbers if first != second],
        [(f"Write {number} in words.", f"{_words(number).capitalize()}.") for number in range(1000)],
        [(f"Put these words in alphabetical order: {', '.join(sorted(words, key=partial(_place, words)))}.",
          f"{', '.join(sorted(words))}.") for words in combinations(_NOUNS, 3)],
        [(f"Which {kind} comes {word} {name}?", f"{other} comes {word} {name}.")
         for kind, names in (("day", _DAYS), ("month", _MONTHS)) for place, name in enumerate(names)
         for word, other in (("after", names[(place + 1) % len(names)]), ("before", names[place - 1]))]]
    return [sorted(kind, key=_hash)[:_EACH] for kind in kinds]


def _place(words: Sequence[str], word: str) -> bytes:
    """The sort key that shuffles words."""
    return _hash((word, "".join(words)))


def _hash(pair: _Pair) -> bytes:
    return hashlib.blake2b(repr(pair).encode(), digest_size=8).digest()


def _words(number: int) -> str:
    """A number below 1,000 in English words."""
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_SMALL[ones]}" if ones else "")
    hundreds, rest = divmod(number, 100)
    return f"{_SMALL[hundreds]} hundred" + (f" and {_words(rest)}" if rest else "")
