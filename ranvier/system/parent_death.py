"""Run a command that ends when the process that started it does: `python parent_death.py PARENT SIGNAL COMMAND...`.

A supervisor that is killed outright cannot stop its children, so on Linux the kernel is asked beforehand to send them
SIGNAL. That request survives exec. Making it here, in a fresh process, avoids running Python between fork and exec of a
process with threads. Imports nothing of Ranvier, so that it costs milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def signal_on_parent_death(parent: int, number: int) -> None:
    """Ask the kernel to send this process signal `number` when its parent ends; a no-op on systems other than Linux.

    parent: the expected parent's process id. If that has already ended, this process is killed immediately.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    # The parent may have ended before prctl, and then the kernel would never send the signal.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    signal_on_parent_death(int(sys.argv[1]), int(sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])
