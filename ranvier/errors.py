"""Errors for users: each states what is wrong, where, the value found, and what to do next, and has a code.

A text names a setting between backticks, as the command accepts it. So the setting remains data: what to change is in
`RanvierError.settings`, and each audience reads its own names.

    raise ConfigError("cannot clip by the norm of all gradients", code="clip-in-backward",
                      where="optim.update-in-backward", value=True,
                      remedy="Set `--optim.clip-norm 0`, or leave `--optim.update-in-backward` out.")

    settings            {"optim.clip-norm": 0, "optim.update-in-backward": ...}
    the command         Set --optim.clip-norm 0, or leave --optim.update-in-backward out.
    Python's callers    Set Optim(clip_norm=0), or leave Optim(update_in_backward=...) out.

The message is one line of text. The command prints it without a traceback and exits with 2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NamedSetting:
    """A setting that a text names.

    name: with hyphens, "optim.clip-norm". text: its value as a flag accepts it; empty if the text has none. is_flag:
    whether it is to be set or left out, and not only mentioned.
    """

    name: str
    text: str = ""
    is_flag: bool = False

    def __str__(self) -> str:
        return f"{'--' if self.is_flag else ''}{self.name}{' ' if self.text else ''}{self.text}"

    @property
    def value(self) -> object:
        """The value to set; `...` if any other value is valid, and for a placeholder such as PATH."""
        if not self.text or self.text.isupper():
            return ...
        try:
            return json.loads(self.text)
        except ValueError:
            return self.text


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 rank", "2,000 ranks", "8 microbatches"."""
    plural = "es" if noun.endswith(("batch", "sh", "ss", "x")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


Names = Callable[[Sequence[str | NamedSetting]], str]
"""Makes the text for one audience from plain text and settings."""


def command_names(parts: Sequence[str | NamedSetting]) -> str:
    """The text for users of the command: settings as flags."""
    return "".join(map(str, parts))


def parse(text: str) -> list[str | NamedSetting]:
    """The plain text and the settings of `text`, in order. Backticks around anything else are plain text."""
    parts: list[str | NamedSetting] = []
    while True:
        plain, _, rest = text.partition("`")
        marked, end, after = rest.partition("`")
        if not end:
            return [*parts, text]
        name, _, value = marked.partition(" ")
        is_flag, bare = name.startswith("--"), name.removeprefix("--")
        if bare.replace("-", "").replace(".", "").isalnum() and (is_flag or "." in bare):
            parts += [plain, NamedSetting(name=bare, text=value, is_flag=is_flag)]
            text = after
        else:
            parts.append(f"{plain}`")
            text = rest


class RanvierError(Exception):
    """An error with a code, a location and a remedy.

    Args:
        what: the problem, as a clause with `where` as its subject ("is not divisible by the microbatch size").
        where: the setting, file, block, rank or edge concerned.
        value: what was found there; None leaves it out of the message.
        remedy: what to do next, as a sentence, with settings between backticks.
        code: name of this kind of error for programs, a few words with hyphens; None for the class's code.
    """

    code = "error"
    names: Names = staticmethod(command_names)
    """Formats the names of settings in the message."""

    def __init__(self, what: str, *, where: str, value: object = None, remedy: str, code: str | None = None) -> None:
        super().__init__(what)
        self._what, self._where, self.value, self._remedy = what, where, value, remedy
        self.code = self.code if code is None else code

    @property
    def what(self) -> str:
        """Description of the fault."""
        return self.names(parse(self._what))

    @property
    def where(self) -> str:
        """The setting, file, block, rank or edge concerned."""
        return self.names([NamedSetting(name=self._where)])

    @property
    def remedy(self) -> str:
        """Advice on what to do next."""
        return self.names(parse(self._remedy))

    @property
    def settings(self) -> dict[str, object]:
        """The settings that the remedy names, each with the value to set, or `...` for any value other than the present
        one."""
        return {part.name: part.value for part in parse(self._remedy) if isinstance(part, NamedSetting)}

    @property
    def texts(self) -> dict[str, str]:
        """The arguments of the error except its value, as texts from which another rank can recreate it."""
        return {"what": self._what, "where": self._where, "remedy": self._remedy, "code": self.code}

    def __str__(self) -> str:
        shown = "" if self.value is None else f" (got {self.value!r})"
        return f"{self.where}: {self.what}{shown}. {self.remedy}"

    def extend(self, text: str) -> None:
        """Append `text` to `what`, such as a report of what other ranks do."""
        self._what += text

    def __reduce__(self) -> tuple[Callable[..., RanvierError], tuple[object, ...]]:
        # Exception's __reduce__ pickles only positional arguments, and these are keywords.
        return _rebuild, (type(self), self._what, self._where, self.value, self._remedy, self.code, self.names)


def _rebuild(kind: type[RanvierError], what: str, where: str, value: object, remedy: str, code: str, names: Names
             ) -> RanvierError:
    error = kind(what, where=where, value=value, remedy=remedy, code=code)
    error.names = names
    return error


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
