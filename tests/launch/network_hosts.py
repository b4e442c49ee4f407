"""Several hosts on one machine: network namespaces joined by a wire, each with its own host name and /etc/hosts.

Needs root, iproute2 and unshare of util-linux; tests are skipped elsewhere. Everything stays within the namespaces:
addresses, names, and the wire.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

ADDRESSES = "10.77.0.1", "10.77.0.2"
NAMES = "first-machine", "second-machine"
_TIMEOUT_SECONDS = 30


def ip(*args, check=True):
    return subprocess.run(["ip", *map(str, args)], capture_output=True, text=True, check=check,
                          timeout=_TIMEOUT_SECONDS)


class Hosts:
    """Two network namespaces with the addresses `ADDRESSES`. Host files of named hosts are in `folder`."""

    def __init__(self, folder):
        self.folder = folder
        self.namespaces = [f"ranvier-{os.getpid()}-{index}" for index in range(2)]
        self.wires = [f"rv{os.getpid()}n{index}"[:15] for index in range(2)]

    def connect(self):
        for namespace in self.namespaces:
            ip("netns", "add", namespace)
        ip("link", "add", self.wires[0], "netns", self.namespaces[0], "type", "veth", "peer", "name", self.wires[1],
           "netns", self.namespaces[1])
        for namespace, wire, address in zip(self.namespaces, self.wires, ADDRESSES, strict=True):
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", wire)
            for device in (wire, "lo"):
                ip("-n", namespace, "link", "set", device, "up")

    def run(self, index, known=None):
        """The start of a command line that runs a command on a host.

        known: name -> address, the entries of this host's /etc/hosts; its own name is then that of `NAMES`. None: the
        name and the file of this machine.
        """
        inside = ["ip", "netns", "exec", self.namespaces[index]]
        if known is None:
            return inside
        path = self.folder / f"{NAMES[index]}.hosts"
        path.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in known.items()))
        script = f'hostname {NAMES[index]} && mount --bind {shlex.quote(str(path))} /etc/hosts && exec "$@"'
        return [*inside, "unshare", "--uts", "--mount", "sh", "-c", script, "sh"]

    def cut_off(self, index):
        ip("-n", self.namespaces[index], "link", "set", self.wires[index], "down")

    def connect_again(self, index):
        ip("-n", self.namespaces[index], "link", "set", self.wires[index], "up")

    def kill(self, index):
        """Kill every process on a host, as when its power fails."""
        for pid in ip("netns", "pids", self.namespaces[index], check=False).stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def remove(self):
        for index, namespace in enumerate(self.namespaces):
            self.kill(index)
            ip("netns", "del", namespace, check=False)


def connected(folder):
    """Two hosts, removed when the generator is closed; skips the test if they cannot be created."""
    missing = [program for program in ("ip", "unshare", "mount", "hostname") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} missing (iproute2, util-linux)")
    hosts = Hosts(folder)
    try:
        hosts.connect()
    except (OSError, subprocess.SubprocessError) as error:
        hosts.remove()
        pytest.skip(f"may not make network namespaces: {error}")
    try:
        yield hosts
    finally:
        hosts.remove()


class Agent:
    """torchrun with `args` on one of the hosts; `run` is the start of its command line."""

    def __init__(self, run, output, *args, **variables):
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO", "PYTEST"))}
        self.path = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [*run, sys.executable, "-m", "torch.distributed.run", *map(str, args)],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env=environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | variables)

    @property
    def text(self):
        return self.path.read_text(errors="replace")

    def end(self):
        """torchrun ends its ranks on SIGTERM."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(40)
            self.process.kill()
            self.process.wait()


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
