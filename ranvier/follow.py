"""Run a command that ends when the process that started it does: `python follow.py PARENT SIGNAL COMMAND...`.

A supervisor that is killed outright can stop nobody, so on Linux the kernel is asked beforehand to send its children
SIGNAL. That request survives exec; making it here, in a fresh process, avoids running Python between fork and exec of
a process with threads. Imports nothing of Ranvier, so that it costs milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def follow(parent: int, number: int) -> None:
    """Have signal `number` sent to this process when its parent ends; exits at once when `parent` is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    follow(int(sys.argv[1]), int(sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])
