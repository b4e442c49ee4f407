"""A rank that fails ends the others, even if its last messages cannot be written."""

import errno
import io
import os
import sys
import threading
from types import SimpleNamespace

import pytest

from ranvier.config.run import Run
from ranvier.errors import RanvierError
from ranvier.launch import failures as failure


class Full(io.StringIO):
    """A log on a full disk."""

    def flush(self):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_the_others_are_ended_although_the_log_cannot_be_written(monkeypatch):
    ended = []
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(sys, "stderr", Full())
    monkeypatch.setattr(os, "_exit", lambda code: ended.append(("exit", code)))
    backend = SimpleNamespace(name="torch", abort=lambda code: ended.append(("abort", code)))
    failure.abort_all_ranks(SimpleNamespace(backend=backend, launcher="local"), 2)
    assert ended == [("abort", 2), ("exit", 2)]


@pytest.mark.parametrize(("number", "raised"), [(errno.ENOSPC, False), (errno.EFBIG, False), (errno.EDQUOT, False),
                                                (errno.EIO, True), (errno.EPIPE, True)])
def test_a_console_whose_disk_is_full_does_not_end_the_run(number, raised):
    from ranvier.train.events import NoteEvent
    from ranvier.train.trackers import console

    class Fails(io.StringIO):
        def flush(self):
            raise OSError(number, os.strerror(number))

    tracker = console(Fails(), Run())
    for use in (lambda: tracker.event(NoteEvent(step=1, event="word", text="so")), tracker.close):
        if raised:
            with pytest.raises(OSError, match=os.strerror(number)):
                use()
        else:
            use()


def test_a_thread_that_a_full_disk_ends_says_so():
    """A library's thread that writes a log can only raise; another error is left as it is."""
    full = failure.as_user_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), threading.Thread(name="events"))
    assert isinstance(full, RanvierError) and full.code == "disk-failed"
    assert str(full) == ("a file of events: cannot be written: No space left on device. Free space on that disk, or "
                         "choose another folder with --run-dir.")
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    assert failure.as_user_error(refused, None) is refused
