"""What --data.train and --data.eval name, where it is a file of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ranvier.errors import DataError
from ranvier.run import Data

MOST_BYTES = 4 << 30


def name_problems(data: Data, names: Sequence[str], form: str) -> list[DataError]:
    """What is wrong with the names: none is given, or one is neither known nor that of something that exists.

    form: what may be given, in words.
    """
    if not data.train:
        return [DataError(f"is missing: the task {data.task} has no data without it", where="data.train",
                          remedy=f"Give {form}.")]
    return [DataError("is neither a known name nor a path that exists", where=f"data.{setting}", value=name,
                      remedy=f"Give {form}.")
            for setting, name in (("train", data.train), ("eval", data.eval))
            if name is not None and name not in names and not _exists(name)]


def text_only(data: Data) -> list[DataError]:
    """Settings of images, where the task has none."""
    if data.augment == "none" and not data.augment_repeats:
        return []
    return [DataError(f"has no effect with the task {data.task}", where="data.augment", value=data.augment,
                      remedy="Leave --data.augment and --data.augment-repeats out; only images have it.")]


def own_files(data: Data, names: Sequence[str]) -> list[tuple[str, Path]]:
    """(setting, path) of what --data.train and --data.eval name that is a file or folder which exists here."""
    given = [(setting, name) for setting, name in (("train", data.train), ("eval", data.eval)) if name is not None]
    return [(setting, Path(name).expanduser()) for setting, name in given if name not in names and _exists(name)]


def first_looks(data: Data, names: Sequence[str], look: Callable[[Path, str], None]) -> list[DataError]:
    """What `look` raises of each of `own_files`: what shows without reading all of it."""
    found = []
    for setting, path in own_files(data, names):
        try:
            look(path, setting)
        except DataError as problem:
            found.append(problem)
    return found


def read_bytes(path: Path, setting: str, form: str) -> bytes:
    """All of a file of text. DataError when it is none, cannot be read, or is larger than 4 GiB."""
    try:
        if not path.is_file():
            raise DataError("is no file", where=f"data.{setting}", value=str(path), remedy=f"Give {form}.")
        if path.stat().st_size > MOST_BYTES:
            raise DataError("is larger than 4 GiB, which is too much for one file of text", where=f"data.{setting}",
                            value=str(path), remedy="Give a part of it.")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise DataError("cannot be read", where=f"data.{setting}", value=f"{path}: {error}",
                        remedy=f"Give {form}.") from error


def _exists(name: str) -> bool:
    try:
        return bool(name) and Path(name).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, "~name" of nobody
        return False
