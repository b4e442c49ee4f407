"""The rank processes of one contender, which stay and take turns with those of others."""

from __future__ import annotations

from collections.abc import Callable


class RankTeam:
    """Runs `serve` in one process for each rank; it answers each number of steps that it is sent, and 0 ends it."""

    def __init__(self, context, name: str, ranks: int, serve: Callable[..., None], arguments: Callable[[int], tuple]
                 ) -> None:
        """context: of `multiprocessing`. arguments: from a rank to what `serve` takes after its end of the pipe."""
        self._name, self._pipes, self._processes = name, [], []
        for rank in range(ranks):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, *arguments(rank)), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def ask(self, steps: int) -> list:
        """Have all ranks run so many steps; what each answers."""
        for pipe in self._pipes:
            pipe.send(steps)
        return self.answers()

    def answers(self) -> list:
        """The next answer of each rank. RuntimeError where one has ended."""
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
