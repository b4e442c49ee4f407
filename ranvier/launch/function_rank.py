"""The program of `ranvier.run`: its process starts the ranks, and is each of them.

Its folder has the pickled job. Each rank leaves N.result or N.error there.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from ranvier.errors import LaunchError
from ranvier.launch.run_function import cloudpickle_module, rank_command
from ranvier.launch.start import start


def main(name: str) -> None:
    """Start the ranks; on a rank run the function. name: the folder."""
    folder = Path(name)
    where = "ranvier.run"
    try:
        settings, function, args = pickle.loads((folder / "job").read_bytes())
        world = start(**settings, rerun=rank_command(folder))
        where = f"rank {world.rank} of {world.size}"
        if world.rank:
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), sys.stdout.fileno())
        found = function(world, *args)
        try:
            result = cloudpickle_module().dumps(found)
        except Exception as error:  # whatever an object's own pickling raises
            raise LaunchError(f"returned a value that cannot be sent back: {type(error).__name__}: {error}",
                              code="result-not-picklable", where="ranvier.run", value=type(found).__name__,
                              remedy="Return numbers, tensors or texts.") from error
        temporary = folder / f"{world.rank}.unfinished"
        temporary.write_bytes(result)
        temporary.rename(folder / f"{world.rank}.result")
    except Exception as error:
        (folder / f"{os.getpid()}.error").write_text(f"{where}\n{type(error).__name__}: {error}")
        raise
