"""The rank processes of one contender, which stay alive and take turns with those of others.

    python -m benchmarks.rank_team ADDRESS      a rank that mpiexec has started, which connects to the driver there
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from ranvier.launch import launchers
from ranvier.launch.mpiexec import mpiexec_command

ROOT = Path(__file__).parents[1]
_KEY = "BENCHMARK_RANK_KEY"


class RankTeam:
    """Runs `serve` in one process for each rank; it answers each number of steps that it receives, and 0 ends it."""

    def __init__(self, context, name: str, ranks: int, serve: Callable[..., None], arguments: Callable[[int], tuple],
                 *, mpi: bool = False) -> None:
        """context: of `multiprocessing`. arguments: from a rank to the arguments of `serve` after its end of the pipe.
        mpi: the ranks are those of one mpiexec."""
        self._name, self._pipes, self._processes = name, [], []
        if mpi:
            self._mpiexec, self._pipes = _under_mpiexec(name, ranks, serve, arguments)
            return
        self._mpiexec = None
        for rank in range(ranks):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, *arguments(rank)), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def ask(self, steps: int) -> list:
        """Have all ranks run this many steps; returns the answer of each."""
        for pipe in self._pipes:
            pipe.send(steps)
        return self.answers()

    def answers(self) -> list:
        """The next answer of each rank. RuntimeError if a rank has ended."""
        try:
            return [pipe.recv() for pipe in self._pipes]
        except EOFError as error:
            raise RuntimeError(f"a rank of {self._name} has ended; its output is above") from error

    def end(self) -> None:
        """End all ranks."""
        for pipe in self._pipes:
            pipe.send(0)
        for process in self._processes:
            process.join(30)
            process.kill()
        if self._mpiexec is not None:
            try:
                self._mpiexec.wait(30)
            except subprocess.TimeoutExpired:
                self._mpiexec.terminate()


def _under_mpiexec(name: str, ranks: int, serve: Callable[..., None], arguments: Callable[[int], tuple]
                   ) -> tuple[subprocess.Popen, list[Connection]]:
    """mpiexec, and the connection to each of its ranks."""
    key = os.urandom(16)
    with Listener(("127.0.0.1", 0), authkey=key) as listener:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        host, port = listener.address
        process = subprocess.Popen(
            mpiexec_command(ranks, [sys.executable, "-m", "benchmarks.rank_team", f"{host}:{port}"]),
            env={**os.environ, _KEY: key.hex(), "PYTHONPATH": path}, stdin=subprocess.DEVNULL)
        listener._listener._socket.settimeout(120)  # type: ignore[attr-defined]  # no public name
        found: dict[int, Connection] = {}
        while len(found) < ranks:
            try:
                connection = listener.accept()
            except TimeoutError as error:
                process.terminate()
                raise RuntimeError(f"the ranks of {name} have not started; their output is above") from error
            found[connection.recv()] = connection
    for rank, connection in found.items():
        connection.send((serve, arguments(rank)))
    return process, [found[rank] for rank in range(ranks)]


def main(address: str) -> None:
    host, port = address.split(":")
    connection = Client((host, int(port)), authkey=bytes.fromhex(os.environ.pop(_KEY)))
    connection.send(launchers.detect(os.environ, "mpiexec").rank)
    serve, arguments = connection.recv()
    serve(connection, *arguments)


if __name__ == "__main__":
    main(sys.argv[1])
