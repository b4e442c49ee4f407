"""The disk of a run between two starts: which checkpoints are undamaged, and damage to some of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from ranvier.checkpoint.manifest import MANIFEST, Saved
from ranvier.errors import CheckpointError


def whole_steps(folder: Path) -> set[int]:
    """Steps of the undamaged checkpoints, including those that were about to be replaced: the next start restores
    them."""
    found = set()
    for path in folder.glob("*step-*"):
        name = path.name.removeprefix(".").removesuffix(".replaced").removeprefix("step-")
        if name.isdigit() and is_whole(path):
            found.add(int(name))
    return found


def is_whole(path: Path) -> bool:
    try:
        return next(Saved(path).damage(), None) is None
    except CheckpointError:
        return False


def leftovers(folder: Path) -> set[str]:
    """Names of incomplete files and folders that runs have left when they died."""
    return {path.name for path in folder.glob(".*") if not path.name.startswith(".owner.")}


def lost(before: set[int], after: set[int], *, keep: int, keep_every: int) -> set[int]:
    """Steps of checkpoints that are gone or damaged, although retention should have kept them."""
    return {step for step in before - after
            if step % keep_every == 0 or len([other for other in after if other > step]) < keep}


# ---------------------------------------------------------------------- damage


def _a_part(folder: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(folder.glob("part-*")))


def truncate(folder: Path, draw: random.Random) -> None:
    """Truncate a file."""
    path = draw.choice([_a_part(folder, draw), folder / MANIFEST])
    content = path.read_bytes()
    path.write_bytes(content[:draw.randrange(len(content))])


def flip(folder: Path, draw: random.Random) -> None:
    """Flip one bit of a file."""
    path = draw.choice([_a_part(folder, draw), folder / MANIFEST])
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def delete(folder: Path, draw: random.Random) -> None:
    """Delete a file."""
    draw.choice([_a_part(folder, draw), folder / MANIFEST]).unlink()


def litter(folder: Path, draw: random.Random) -> None:
    """Leave temporary folders next to the checkpoint, like a run that died."""
    for name in (f".step-{draw.randrange(100)}.tmp", f".step-{draw.randrange(100)}.removed"):
        path = folder.parent / name
        path.mkdir(exist_ok=True)
        (path / "part-00000.safetensors").write_bytes(draw.randbytes(draw.randrange(2000)))


DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {
    "a truncated file": truncate, "a flipped bit in a file": flip, "a deleted file": delete,
    "temporary folders left behind": litter}
