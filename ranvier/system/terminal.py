"""What fits into a line: tables and sentences for terminals, files and pipes.

    COLUMNS is set      tables and sentences have at most that many characters in a line
    a terminal          its width is that of COLUMNS
    a file or a pipe    tables have at most 80 characters in a line; a sentence stays one line, for grep
"""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table

DEFAULT_WIDTH = 80
"""Characters in a line of files and pipes."""
_LEAST_WIDTH = 40
"""Narrower terminals break lines themselves."""
_TEXT_WIDTH = 16
"""A column of words is made narrower than its words need, but not than this, before columns move below."""
_GAP = 2


def terminal_width() -> int:
    """Characters in a line: those that COLUMNS says, else those of the terminal, else 80; never under 40."""
    return max(_LEAST_WIDTH, shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns)


def fitted(text: str, width: int, indent: int | None = None) -> str:
    """`text` with its lines broken between words where they are longer than `width`. Words are never broken.

    indent: spaces before the rest of a line; by default two more than before its beginning.
    """
    def broken(line: str) -> str:
        if len(line) <= width:
            return line
        spaces = len(line) - len(line.lstrip()) + 2 if indent is None else indent
        return textwrap.fill(line, width, subsequent_indent=" " * spaces, break_long_words=False,
                             break_on_hyphens=False)

    return "\n".join(broken(line) for line in text.split("\n"))


def prose(text: str, stream: TextIO) -> str:
    """Sentences for `stream`: fitted to a terminal, or to COLUMNS; unchanged for files and pipes."""
    return fitted(text, terminal_width()) if stream.isatty() or os.environ.get("COLUMNS") else text


def fields(parts: Sequence[str], width: int, indent: int = 2) -> str:
    """`parts` with two spaces between them, on as many lines as they need; the second and further are indented."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + _GAP + len(part) <= width:
            lines[-1] += " " * _GAP + part
        else:
            lines.append(" " * indent + part)
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table of which no number is broken or cut off, whatever the width: columns of words get narrower first; then
    columns that do not fit move to a further table below, beside the first ones again.

    header, rows: the cells; a name may have several lines. words: numbers of the columns that hold words, not numbers.
    keys: first columns, which say what a row is about, and are never broken. styles: one for each row, as rich has
    them, or none at all.
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
        """Its lines of at most `width` characters, without colours and trailing spaces."""
        from rich.console import Console

        console = Console(width=width, color_system=None, highlight=False, markup=False, emoji=False)
        with console.capture() as captured:
            console.print(self)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | str]:
        """The tables one below the other."""
        for number, columns in enumerate(self._parts(options.max_width)):
            if number:
                yield ""
            yield self._table(columns)

    def _table(self, columns: Sequence[int]) -> Table:
        from rich.table import Table
        from rich.text import Text

        made = Table(box=None, header_style="bold", padding=(0, _GAP, 0, 0), pad_edge=False)
        for column in columns:
            is_words = column in self.words
            made.add_column(Text(self.header[column]), justify="left" if is_words else "right",
                            no_wrap=not is_words or column < self.keys, overflow="fold")
        for place, row in enumerate(self.rows):
            made.add_row(*(Text(row[column]) for column in columns), style=self.styles[place] if self.styles else None)
        return made

    def _parts(self, width: int) -> list[list[int]]:
        """The numbers of the columns of each table."""
        least = [self._least_width(column) for column in range(len(self.header))]
        keys = list(range(self.keys))
        parts, taken = [[*keys]], sum(least[:self.keys]) + _GAP * self.keys
        used = taken
        for column in range(self.keys, len(self.header)):
            if used + least[column] > width and len(parts[-1]) > self.keys:
                parts.append([*keys])
                used = taken
            parts[-1].append(column)
            used += least[column] + _GAP
        return parts

    def _least_width(self, column: int) -> int:
        widest = max(len(line) for cell in (self.header[column], *(row[column] for row in self.rows))
                     for line in cell.split("\n"))
        return min(widest, _TEXT_WIDTH) if column in self.words and column >= self.keys else widest


class Screen:
    """Prints sentences and tables on a stream as they fit there; colours on terminals only, and obeying NO_COLOR."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._stream = stream
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False, width=terminal_width())

    def print(self, what: str | TextTable = "", style: str | None = None) -> None:
        """Print a sentence, or lines of them, or a table. style: as rich has it."""
        if isinstance(what, str):
            self._console.print(prose(what, self._stream), style=style, soft_wrap=True)
        elif self._console.is_terminal:
            self._console.print(what)
        else:  # without the spaces that fill a line
            self._console.print(str(what), soft_wrap=True)
