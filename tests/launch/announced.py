"""Real commands whose ranks announce themselves, for tests that kill or stop them."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from ranvier.system.processes import Process

LIMIT_SECONDS = 10
"""No rank outlives its run by more than this."""

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


class Ranks:
    """A started command, and the processes that its two ranks have announced."""

    def __init__(self, *command, output, environ=None):
        self.output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen([*map(str, command)], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                            env=os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"} | (environ or {}),
                                            start_new_session=True)
        self.ranks = []

    @property
    def text(self):
        return self.output.read_text(errors="replace")

    def wait_for_ranks(self, count=2):
        deadline = time.monotonic() + 120
        while len(pids := re.findall(r"^rank (\d) pid (\d+)", self.text, re.MULTILINE)) < count:
            assert time.monotonic() < deadline and self.process.poll() is None, self.text
            time.sleep(0.05)
        found = [Process.find(int(pid)) for _, pid in sorted(pids)]
        self.ranks = [rank for rank in found if rank is not None]

    def wait_for_text(self, text):
        deadline = time.monotonic() + 120
        while text not in self.text:
            assert time.monotonic() < deadline and self.process.poll() is None, self.text
            time.sleep(0.05)

    def assert_ranks_end(self):
        deadline = time.monotonic() + LIMIT_SECONDS
        while left := [rank for rank in self.ranks if rank.is_running]:
            assert time.monotonic() < deadline, f"still there: {left}\n{self.text}"
            time.sleep(0.05)

    def end(self):
        self.process.kill()
        for rank in self.ranks:
            if rank.is_running:
                os.kill(rank.pid, signal.SIGKILL)
        self.process.wait()


def torchrun(*command):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, *command]
