"""Errors for users: each states what is wrong, where, the value found, and what to do next.

The message is one line of text in the terms of the configuration. The command prints it without a traceback and exits
with 2.
"""

from __future__ import annotations

from collections.abc import Callable


class RanvierError(Exception):
    """An error with a location and a remedy.

    Args:
        what: the problem, as a clause with `where` as its subject ("is not divisible by the microbatch size").
        where: the setting, file, block, rank or edge concerned.
        value: what was found there; None leaves it out of the message.
        remedy: what to do next, as a sentence.
    """

    def __init__(self, what: str, *, where: str, value: object = None, remedy: str) -> None:
        self.what, self.where, self.value, self.remedy = what, where, value, remedy
        super().__init__(self._text())

    def _text(self) -> str:
        shown = "" if self.value is None else f" (got {self.value!r})"
        return f"{self.where}: {self.what}{shown}. {self.remedy}"

    def reword(self, words: Callable[[str], str]) -> None:
        """Replace each part of the message by `words` of it, for callers that use other terms."""
        self.what, self.where, self.remedy = words(self.what), words(self.where), words(self.remedy)
        self.args = (self._text(),)

    def extend(self, text: str) -> None:
        """Add `text` to what is wrong, such as a report of what other ranks do."""
        self.what += text
        self.args = (self._text(),)

    def __reduce__(self) -> tuple[Callable[..., RanvierError], tuple[object, ...]]:
        # Exception's own pickles positional arguments only, and these are keywords.
        return _rebuild, (type(self), self.what, self.where, self.value, self.remedy)


def _rebuild(kind: type[RanvierError], what: str, where: str, value: object, remedy: str) -> RanvierError:
    return kind(what, where=where, value=value, remedy=remedy)


class ConfigError(RanvierError, ValueError):
    """A setting that cannot work, alone or together with another."""


class ModelError(RanvierError):
    """A list of blocks, a loss or a tie that violates the contract of models (ranvier.block)."""


class DivisibilityError(ModelError):
    """A size of the model that the rows or columns of the mesh do not divide."""


class DataError(RanvierError):
    """Training data, a tokenizer or a token file that is missing, damaged or too small."""


class CheckpointError(RanvierError):
    """A checkpoint that cannot be written, is damaged or malicious, or does not fit the model."""


class OwnershipError(RanvierError):
    """A folder that another running process owns, or has taken over."""


class UnsavedError(CheckpointError):
    """A run that ended without its last checkpoint on disk. Exit code 1, not 2, since no setting is wrong."""


class LaunchError(RanvierError):
    """Ranks that could not be started, or contradictory environment variables of launchers."""


class TransportError(RanvierError):
    """A message or collective that failed: a lost peer, a wrong shape, a closed edge."""


class OutOfMemory(RanvierError):
    """A failed allocation; the message contains the predicted memory and what reduces it."""


class MessageTimeout(TransportError):
    """A message or collective over its time limit; the message names which rank waits for what from which."""


class Hang(TransportError):
    """An action of a rank that runs so much longer than earlier ones that it is assumed never to end."""
