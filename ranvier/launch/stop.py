"""Requests to stop a run: Slurm's preemption, kubectl, torchrun, Ctrl-C and our own supervisor all send a signal.

The signal handler only sets a flag. The training loop reduces the flags of all ranks with each step's metrics
(ranvier.train.metrics), so that all ranks stop after the same step, whichever of them received a signal; it then saves
a checkpoint and ends. A second Ctrl-C raises KeyboardInterrupt immediately.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a rank to stop. Nearly everything sends SIGTERM; Slurm can be told to send SIGUSR1 earlier, and a
terminal that closes sends SIGHUP."""


FINISHED_RUN = "ranvier/finished-run"
"""Store key that is set once the program's last run has done its last step: later requests to stop are too late."""


def signal_name(number: int) -> str:
    """A signal's name for the user: Ctrl-C for SIGINT."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class StopRequest(AbstractContextManager["StopRequest"]):
    """Whether this rank was asked to stop, by one of `signals` or by `request`. A context manager that calls `close`.

    Python handles signals on the main thread only; on another one (ranks that are threads) only `request` works. A
    signal that is ignored stays ignored.
    """

    def __init__(self, signals: Sequence[int] = STOP_SIGNALS) -> None:
        self.announces = False
        """Whether a signal is answered with a line immediately, since the step may take minutes; on a rank without a
        supervisor."""
        self.reason = ""
        """The first request, such as "SIGTERM"; "" if there was none."""
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self.install(signals)

    def install(self, signals: Sequence[int] = STOP_SIGNALS) -> None:
        """Let these signals request a stop. Does nothing on a thread other than the main one."""
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._on_signal)

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return bool(self.reason)

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C requested the stop."""
        return self.reason == signal.SIGINT.name

    def request(self, reason: str) -> None:
        """Ask this rank to stop. The reason of the first request is kept."""
        self.reason = self.reason or reason

    def close(self) -> None:
        """Restore the previous signal handlers. Idempotent; must run on the thread that made this object."""
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not installed from Python

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        self.request(signal.Signals(number).name)
        if self.announces:  # not through sys.stderr: the signal may have arrived during a write to it
            more = "; another Ctrl-C ends it at once" if number == signal.SIGINT else ""
            with suppress(OSError):  # it may be a pipe whose reader Ctrl-C has also ended
                os.write(2, f"ranvier: {signal_name(number)}: the run saves and stops after this step{more}\n".encode())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()
