"""Every error a user can cause or meet, each saying what, where, the value, and what to do next.

One line of text, in the words of the configuration, is the whole message: the command prints it without a
traceback and exits with 2.
"""

from __future__ import annotations

from collections.abc import Callable


class RanvierError(Exception):
    """A fault with a culprit and a remedy.

    Args:
        what: the fault, as a clause ("is not divisible by the microbatch size").
        where: the setting, file, block, rank or edge that it concerns.
        value: what was found there; left out of the text when None.
        remedy: the next thing to do.
    """

    def __init__(self, what: str, *, where: str, value: object = None, remedy: str) -> None:
        self.what, self.where, self.value, self.remedy = what, where, value, remedy
        super().__init__(self._text())

    def _text(self) -> str:
        shown = "" if self.value is None else f" (got {self.value!r})"
        return f"{self.where}: {self.what}{shown}. {self.remedy}"

    def reword(self, words: Callable[[str], str]) -> None:
        """Say the same in other words, which `words` makes of each text."""
        self.what, self.where, self.remedy = words(self.what), words(self.where), words(self.remedy)
        self.args = (self._text(),)

    def __reduce__(self):
        return _rebuild, (type(self), self.what, self.where, self.value, self.remedy)


def _rebuild(kind, what, where, value, remedy):
    return kind(what, where=where, value=value, remedy=remedy)


class ConfigError(RanvierError, ValueError):
    """A setting that cannot work, alone or together with another."""


class ModelError(RanvierError):
    """A list of blocks, a loss, or a tie that does not fit the model contract."""


class DivisibilityError(ModelError):
    """A size that rows or columns cannot share."""


class DataError(RanvierError):
    """A corpus, tokenizer or token file that is missing, damaged or too small."""


class CheckpointError(RanvierError):
    """A checkpoint that cannot be written, is damaged or hostile, or does not fit the model."""


class OwnershipError(RanvierError):
    """A folder that belongs to another run that is under way, or that another run has taken over."""


class UnsavedError(CheckpointError):
    """A run that came to its end without its last checkpoint on the disk: exit code 1, not 2, since no setting is at
    fault."""


class LaunchError(RanvierError):
    """Ranks that could not be started, or a launcher whose variables contradict each other."""


class TransportError(RanvierError):
    """A message or collective that could not be carried: a lost peer, a wrong shape, a closed edge."""


class OutOfMemory(RanvierError):
    """An allocator that gave up; the text has the predicted table and what needs less memory."""


class MessageTimeout(TransportError):
    """A message that did not come in time; the text names who waits for what from whom."""


class Hang(TransportError):
    """An action of a rank that takes so much longer than any before that it will not end; others wait for it."""
