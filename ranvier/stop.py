"""A run that is told to stop: Slurm's preemption, kubectl, torchrun and our own supervisor all send a signal.

The signal only leaves a note. The loop passes the note on with each step's numbers (ranvier.train.metrics), so that
all ranks stop after the same step, whichever of them were told; then it saves a checkpoint and ends with exit code 0.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What asks a rank to stop: the first is what everything sends; the second what Slurm is told to send in good time."""


class StopRequest:
    """Whether this rank was asked to stop, from `STOP_SIGNALS` or by `request`; until it is closed.

    Signals are taken on the main thread of a process only; elsewhere (ranks that are threads) and with no signals there
    is `request` alone. A signal that is ignored stays ignored.
    """

    def __init__(self, signals: Sequence[int] = STOP_SIGNALS) -> None:
        self.reason = ""
        """What asked first, such as SIGTERM; empty where nothing has."""
        self._before: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)

    @property
    def requested(self) -> bool:
        return bool(self.reason)

    def request(self, reason: str) -> None:
        """Ask this rank to stop; the first reason stays."""
        self.reason = self.reason or reason

    def close(self) -> None:
        """Signals do what they did before. Idempotent; on the thread that made it."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()
