"""Renders chat templates in a separate process (`template_process`), with limits of time and size.

Each process has one such renderer, which starts with the first template and ends with its parent. After an exceeded
limit, a new one replaces it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ranvier.data import template_process
from ranvier.system import child
from ranvier.system.untrusted_file import parse_json

_WAIT_SECONDS = 300.0
"""Longest wait for an answer, including the start of the process. The kernel ends a template that computes too long
much earlier; this limit is for a process that is stopped."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A text, and the spans of characters that the template marks as the assistant's: (start, stop)."""

    text: str
    spans: Sequence[tuple[int, int]]


class TemplateError(Exception):
    """A template raises an error."""


class TemplateLimitError(Exception):
    """A template exceeds a limit."""


def render(*, messages: Sequence[Mapping[str, Any]], template: str, tools: Sequence[Any] | None = None,
           variables: Mapping[str, Any] | None = None, prompt: bool = False, marks: bool = False) -> Rendered:
    """Render messages as transformers does. prompt: with the beginning of an answer. marks: whether the template marks
    what the assistant writes. TemplateError or TemplateLimitError, with the reason."""
    request = {"messages": list(messages), "tools": tools, "template": template, "prompt": prompt, "marks": marks,
               "variables": variables or {}, "seconds": template_process.SECONDS}
    answer = _process(os.getpid()).ask(request)
    if "error" in answer:
        raise TemplateError(str(answer["error"]))
    return Rendered(text=str(answer["text"]), spans=[(int(start), int(stop)) for start, stop in answer["spans"]])


def start() -> None:
    """Start the process, so that it is ready when the first template is rendered."""
    _process(os.getpid()).start()


class _Process:
    """The process, restarted after an exceeded limit or its end. Threads take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._lock:
            self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._running is None or self._running.poll() is not None:
            # It ends when its standard input closes; a signal at the end of the thread that started it would be too
            # early.
            self._running = child.start(child.python(str(template_process.__file__)), input=subprocess.PIPE,
                                        output=subprocess.PIPE, errors=subprocess.DEVNULL, end_signal=None)
        return self._running

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request. TemplateLimitError if there is no answer, or if it names a limit."""
        with self._lock:
            process = self._start()
            try:
                answer = self._answer(process, request)
            except BaseException:  # its next answer would be the one to this request
                self._end()
                raise
            if "limit" in answer:
                self._end()
                raise TemplateLimitError(str(answer["limit"]))
            return answer

    def _answer(self, process: subprocess.Popen[bytes], request: Mapping[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None  # pipes
        deadline, content, answers = time.monotonic() + _WAIT_SECONDS, bytearray(), select.poll()
        answers.register(process.stdout, select.POLLIN)
        try:
            text = json.dumps(request, default=str)  # values that JSON does not have become text
            process.stdin.write(text.encode() + b"\n")
            process.stdin.flush()
            while not content.endswith(b"\n"):
                if not answers.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
                    raise TemplateLimitError(f"has given no answer for {_WAIT_SECONDS:.0f} s")
                if not (part := os.read(process.stdout.fileno(), 1 << 20)):
                    raise EOFError
                content += part
        except (EOFError, BrokenPipeError):
            raise TemplateLimitError(self._reason(process)) from None
        answer: Any = parse_json(bytes(content))
        return dict(answer)

    @staticmethod
    def _reason(process: subprocess.Popen[bytes]) -> str:
        """The reason why the process has ended."""
        code = process.wait()
        if code == -signal.SIGPROF:
            return f"takes more than {template_process.SECONDS:g} s of processor time"
        return f"ends the process that renders it (exit code {code})"

    def _end(self) -> None:
        process, self._running = self._running, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            process.communicate()


@lru_cache(maxsize=1)
def _process(pid: int) -> _Process:
    """The renderer of this process; after a fork the child has its own."""
    return _Process()
