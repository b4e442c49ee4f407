"""Which lines of a file run, for tests that every line of code for GPUs is executed on a CPU."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


class ExecutedLines:
    """Lines of these files that have run, on any thread, since `recording` was entered for the first time."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = {str(path.resolve()): path for path in files}
        self._ran: dict[str, set[int]] = {name: set() for name in self._files}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record within the block."""
        if sys.version_info < (3, 12):
            with self._tracing():
                yield
            return
        monitoring, tool = sys.monitoring, sys.monitoring.COVERAGE_ID

        def on_line(code: CodeType, line: int) -> object:
            if code.co_filename in self._ran:
                self._ran[code.co_filename].add(line)
            return monitoring.DISABLE

        monitoring.use_tool_id(tool, "executed lines")
        monitoring.register_callback(tool, monitoring.events.LINE, on_line)
        monitoring.set_events(tool, monitoring.events.LINE)
        monitoring.restart_events()
        try:
            yield
        finally:
            monitoring.set_events(tool, 0)
            monitoring.free_tool_id(tool)

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        """Record by trace functions, which are slower, before Python 3.12 has `sys.monitoring`."""
        def on_line(frame: FrameType, event: str, argument: object) -> Any:
            self._ran[frame.f_code.co_filename].add(frame.f_lineno)
            return on_line

        def on_call(frame: FrameType, event: str, argument: object) -> Any:
            return on_line(frame, event, argument) if frame.f_code.co_filename in self._ran else None

        before = sys.gettrace()
        threading.settrace(on_call)
        sys.settrace(on_call)
        try:
            yield
        finally:
            sys.settrace(before)
            threading.settrace(None)  # type: ignore[arg-type]  # this ends tracing

    def missed(self, path: Path, *, inside: Sequence[str] = ()) -> list[str]:
        """Lines of functions that have not run, as "number: text". inside: names of functions that count; () is all."""
        name = str(path.resolve())
        text = path.read_text().splitlines()
        missed = _lines_of_functions(compile(path.read_text(), name, "exec"), inside) - self._ran[name]
        return [f"{line}: {text[line - 1].strip()}" for line in sorted(missed)]


def _lines_of_functions(code: CodeType, inside: Sequence[str], within: bool = False) -> set[int]:
    """Lines of the functions below `code`, without other lines of modules and classes."""
    is_function = bool(code.co_flags & 0x2)  # CO_NEWLOCALS
    within = within or (is_function and (not inside or code.co_name in inside))
    found = {line for _, _, line in code.co_lines() if line and line != code.co_firstlineno} if within else set()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _lines_of_functions(constant, inside, within)
    return found
