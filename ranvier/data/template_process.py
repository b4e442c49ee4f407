"""The process in which chat templates are rendered: they are untrusted code, in a language with loops.

Requests come on standard input and answers go to standard output, each a line of JSON. A request may take its
`seconds` of processor time, after which the kernel ends this process; the process may use MEMORY_BYTES in addition to
the packages, if the system has such a limit (Linux); a text may have MOST_CHARACTERS. A template cannot sleep or block,
so its processor time is all the time that it takes.

This file is run as a program by its path, so that it imports nothing of Ranvier.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

SECONDS = 10.0
MEMORY_BYTES = 1 << 29
MOST_CHARACTERS = 1 << 24


def _limit_memory() -> None:
    """Limit this process to MEMORY_BYTES more than it has now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))
    except (OSError, ValueError):  # not Linux, or a lower limit of the user's
        return


def _render(request: dict[str, Any]) -> dict[str, Any]:
    """`text` and `spans` of a request; or `limit` or `error`, in words."""
    try:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            conversations=[request["messages"]], tools=request["tools"], chat_template=request["template"],
            add_generation_prompt=request["prompt"], return_assistant_tokens_mask=request["marks"],
            **request["variables"])
        (text, *_), spans = rendered
    except MemoryError:
        return {"limit": f"needs more than {MEMORY_BYTES >> 20} MiB"}
    except Exception as error:  # jinja2's errors, and any error that the template raises
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    if len(text) > MOST_CHARACTERS:
        return {"limit": f"writes more than {MOST_CHARACTERS:,} characters"}
    return {"text": text, "spans": spans[0] if spans else []}


def main() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that packages print must not mix with answers
    from transformers.utils import chat_template_utils  # noqa: F401  # before memory is limited

    _limit_memory()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        try:
            answer = _render(request)
        except MemoryError:
            answer = {"limit": f"needs more than {MEMORY_BYTES >> 20} MiB"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
