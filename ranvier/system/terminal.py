"""Tables and sentences that fit into lines, for terminals, files and pipes.

    COLUMNS is set      tables and sentences have at most that many characters in a line
    a terminal          its width is that of COLUMNS
    a file or a pipe    tables have at most 80 characters in a line; a sentence stays one line, for grep
"""

from __future__ import annotations

import io
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TextIO, cast

DEFAULT_WIDTH = 80
"""Characters in a line of files and pipes."""
_LEAST_WIDTH = 40
"""Narrower terminals break lines themselves."""
_TEXT_WIDTH = 16
"""A column of words is made narrower than its text, but not narrower than this, before columns move to a further
table."""
_GAP = 2


def print_stderr(text: str) -> None:
    """Print `text` to standard error with one write, so that lines of several processes do not mix. If it cannot be
    printed, nothing else changes: Ctrl-C also ends `| tee log`, and a terminal may be gone."""
    with suppress(OSError, ValueError):  # ValueError: it is closed
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def open_closed_streams() -> None:
    """Redirect standard input, output and error to /dev/null if the caller closed them (`>&-`): otherwise the next file
    that is opened would get the number of one, and what this process or a child prints."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


class _OutputFile(io.FileIO):
    """Output that is discarded when its pipe has no reader any more."""

    def write(self, data: Any, /) -> int:
        """Write as FileIO does, without BrokenPipeError."""
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """Have this process's standard output and error discard what is no longer read (`| head -1`), so that a command's
    actions and exit code do not depend on it."""
    if sys.stdout is sys.__stdout__:
        sys.stdout = _outliving(sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _outliving(sys.stderr)


def _outliving(stream: Any) -> Any:
    if not isinstance(stream, io.TextIOWrapper):  # it is closed
        return stream
    stream.flush()
    file = _OutputFile(stream.fileno(), "wb", closefd=False)
    is_unbuffered = isinstance(stream.buffer, io.RawIOBase)  # as of PYTHONUNBUFFERED
    return io.TextIOWrapper(cast(Any, file) if is_unbuffered else io.BufferedWriter(file),
                            encoding=stream.encoding, errors=stream.errors, line_buffering=stream.line_buffering,
                            write_through=stream.write_through)


def terminal_width() -> int:
    """Characters in a line: the value of COLUMNS, else the width of the terminal, else 80; never under 40."""
    return max(_LEAST_WIDTH, shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns)


def three_digits(number: float) -> str:
    """Format a number with at least three significant digits, so that no small number reads as zero: 12,345, 12.3,
    0.0461, 0."""
    return f"{number:,.{max(0, 2 - math.floor(math.log10(number)))}f}" if number > 0 else f"{number:,.0f}"


def memory_unit(most_bytes: int) -> tuple[str, int]:
    """Name and bytes of the unit for sizes of which `most_bytes` is the largest: GiB, or MiB below one GiB."""
    return ("GiB", 2**30) if most_bytes >= 2**30 else ("MiB", 2**20)


def memory_text(size_bytes: int) -> str:
    """A size with its unit: 12.3 GiB, 452 MiB."""
    name, unit = memory_unit(size_bytes)
    return f"{three_digits(size_bytes / unit)} {name}"


def wrap_text(text: str, width: int, indent: int | None = None) -> str:
    """Return `text` with lines that are longer than `width` broken between words. Words are never broken.

    indent: spaces before continuation lines; by default two more than before the first.
    """
    def broken(line: str) -> str:
        if len(line) <= width:
            return line
        spaces = len(line) - len(line.lstrip()) + 2 if indent is None else indent
        return textwrap.fill(line, width, subsequent_indent=" " * spaces, break_long_words=False,
                             break_on_hyphens=False)

    return "\n".join(broken(line) for line in text.split("\n"))


def wrap_lines(text: str, stream: TextIO, indent: int | None = None) -> str:
    """Wrap sentences for `stream` by `wrap_text` to the width of a terminal, or to COLUMNS; unchanged for files and
    pipes."""
    return wrap_text(text, terminal_width(), indent) if stream.isatty() or os.environ.get("COLUMNS") else text


def fields(parts: Sequence[str], width: int, indent: int = 2) -> str:
    """Join `parts` with two spaces, on as many lines as they need; all lines but the first are indented."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + _GAP + len(part) <= width:
            lines[-1] += " " * _GAP + part
        else:
            lines.append(" " * indent + part)
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table that never breaks or cuts off a number, whatever the width: columns of words get narrower first; then
    columns that do not fit move to a further table below, which repeats the first columns. A word is never broken, so a
    long path makes its line longer than the width.

    header, rows: the cells; a name may have several lines. words: numbers of the columns that hold words, not numbers.
    keys: number of first columns, which identify a row, and are never broken. styles: one for each row, in rich's
    notation, or none at all.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[int] = ()
    keys: int = 1
    styles: Sequence[str | None] = ()

    def __str__(self) -> str:
        """Its lines without colours, for `terminal_width`."""
        return self.text(terminal_width())

    def text(self, width: int) -> str:
        """Its lines, without colours."""
        return "\n".join(line for line, _ in self.lines(width))

    def lines(self, width: int) -> Iterator[tuple[str, str | None]]:
        """Each line with its style; an empty one between two tables."""
        for number, columns in enumerate(self._parts(width)):
            if number:
                yield "", None
            widths = self._widths(columns, width)
            heights = max(self.header[column].count("\n") for column in columns)
            header = ["\n" * (heights - self.header[column].count("\n")) + self.header[column] for column in columns]
            for line in self._row(columns, header, widths):
                yield line, "bold"
            for place, row in enumerate(self.rows):
                for line in self._row(columns, [row[column] for column in columns], widths):
                    yield line, self.styles[place] if self.styles else None

    def _row(self, columns: Sequence[int], cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
        """Yield the lines of one row."""
        broken = [[part for line in cell.split("\n") for part in textwrap.wrap(
            line, width, break_long_words=False, break_on_hyphens=False) or [""]]
            for cell, width in zip(cells, widths, strict=True)]
        for parts in zip_longest(*broken, fillvalue=""):
            placed = [part.ljust(width) if column in self.words else part.rjust(width)
                      for column, part, width in zip(columns, parts, widths, strict=True)]
            yield (" " * _GAP).join(placed).rstrip()

    def _parts(self, width: int) -> list[list[int]]:
        """The numbers of the columns of each table."""
        least = [min(self._natural(column), _TEXT_WIDTH) if self._may_narrow(column) else self._natural(column)
                 for column in range(len(self.header))]
        keys = list(range(self.keys))
        parts = [[*keys]]
        for column in range(self.keys, len(self.header)):
            taken = sum(least[each] + _GAP for each in parts[-1])
            if taken + least[column] > width and len(parts[-1]) > self.keys:
                parts.append([*keys])
            parts[-1].append(column)
        return parts

    def _widths(self, columns: Sequence[int], width: int) -> list[int]:
        """The width of each column: the widest columns of words get narrower until all fit."""
        widths = {column: self._natural(column) for column in columns}
        while sum(widths.values()) + _GAP * (len(columns) - 1) > width:
            narrower = [column for column in columns if self._may_narrow(column) and widths[column] > _TEXT_WIDTH]
            if not narrower:
                break
            widths[max(narrower, key=lambda column: widths[column])] -= 1
        return list(widths.values())

    def _may_narrow(self, column: int) -> bool:
        return column in self.words and column >= self.keys

    def _natural(self, column: int) -> int:
        return max(len(line) for cell in (self.header[column], *(row[column] for row in self.rows))
                   for line in cell.split("\n"))


class Screen:
    """Prints sentences and tables on a stream, fitted to its width; colours only on terminals, and respecting
    NO_COLOR."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._stream = stream
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)

    def print(self, what: str | TextTable = "", style: str | None = None) -> None:
        """Print a sentence, or lines of them, or a table. style: of a sentence, in rich's notation."""
        lines = what.lines(terminal_width()) if isinstance(what, TextTable) else [(wrap_lines(what, self._stream),
                                                                                   style)]
        for line, its_style in lines:
            self._console.print(line, style=its_style, soft_wrap=True)
