"""A checkpoint that lies on disk: whether it is whole, and any box of any of its tensors. No process group, no GPU."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ranvier.checkpoint.manifest import BEST, MANIFEST, SavedTensor, checkpoints, damaged, read_manifest
from ranvier.config import read
from ranvier.errors import CheckpointError
from ranvier.layout import Box, box_size, index_of, intersection, whole

_READ_BYTES = 1 << 22


class Saved:
    """The checkpoint in `folder`, its manifest read and checked. CheckpointError when that is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, read_manifest(folder)
        self._open: dict[int, Any] = {}

    def damage(self, files: Iterable[int] | None = None) -> Iterator[CheckpointError]:
        """Errors for damage to these files (all by default), by their sizes and checksums. Reads all of them."""
        for number in range(len(self.manifest.files)) if files is None else files:
            file = self.manifest.files[number]
            path = self.folder / file.name
            try:
                if path.is_symlink() or not path.is_file():
                    yield damaged("checkpoint-file-missing", self.folder, f"{file.name} is missing")
                elif path.stat().st_size != file.size_bytes:
                    yield damaged("checkpoint-file-cut-off", self.folder,
                                  f"{file.name} should have {file.size_bytes} bytes", path.stat().st_size)
                elif checksum(path) != file.crc32:
                    yield damaged("checkpoint-file-changed", self.folder,
                                  f"{file.name} has been changed: its checksum is not the manifest's")
            except OSError as error:
                yield damaged("checkpoint-file-unreadable", self.folder,
                              f"{file.name} cannot be read: {error.strerror or error}")

    def tensor(self, kind: str, name: str) -> SavedTensor:
        """The manifest's entry for a tensor. CheckpointError when it has none."""
        try:
            return self.manifest.tensors[kind][name]
        except KeyError:
            raise CheckpointError(f"has no {kind} of {name}", code="checkpoint-without-state",
                                  where=f"checkpoint {self.folder}",
                                  remedy="Resume with the model and the optimizer that it was written with.") from None

    def read(self, kind: str, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor (all of it by default), on the CPU, in the saved number format."""
        saved = self.tensor(kind, name)
        box = whole(saved.shape) if box is None else box
        for file, key, piece, _ in self._within(kind, name, box):
            self._stored(file, key, piece)  # a size that no file has is an error, not an allocation
        result = torch.empty([stop - start for start, stop in box], dtype=getattr(torch, saved.dtype))
        self.read_into(kind, name, box, result)
        return result

    def read_into(self, kind: str, name: str, box: Box, target: Tensor) -> None:
        """Copy a box of a tensor to `target`, of the box's shape; its number format and device may be others."""
        saved = self.tensor(kind, name)
        for file, key, piece, common in self._within(kind, name, box):
            target[index_of(common, box)].copy_(self._cut(saved, file, key, piece, common))

    def _within(self, kind: str, name: str, box: Box) -> Iterator[tuple[int, str, Box, Box]]:
        """File, key and box of the pieces that have a part of `box`, and that part."""
        saved = self.tensor(kind, name)
        if len(box) != len(saved.shape) or any(stop > size for (_, stop), size in zip(box, saved.shape, strict=True)):
            raise damaged("saved-shape-too-small", self.folder,
                          f"{kind} of {name} has the shape {saved.shape}, and {box} of it is wanted")
        for file, key, piece in saved.pieces:
            common = intersection(piece, box)
            if common is not None:
                yield file, key, piece, common

    def _cut(self, saved: SavedTensor, file: int, key: str, piece: Box, common: Box) -> Tensor:
        """The part `common` of a piece."""
        name = self.manifest.files[file].name
        stored, view = self._stored(file, key, piece)
        with self._readable(name):
            part = box_size(common) < box_size(piece)
            found: Tensor = view[index_of(common, piece)] if part else stored.get_tensor(key)
        if found.dtype is not getattr(torch, saved.dtype):
            raise damaged("saved-number-format", self.folder,
                          f"{key} in {name} has another number format than {MANIFEST} says",
                          str(found.dtype).removeprefix("torch."))
        return found

    def _stored(self, file: int, key: str, piece: Box) -> tuple[Any, Any]:
        """An open file, and what it has under `key`, which is of the piece's shape."""
        name = self.manifest.files[file].name
        with self._readable(name):
            if file not in self._open:
                if (self.folder / name).is_symlink() or not (self.folder / name).is_file():
                    raise damaged("checkpoint-file-missing", self.folder, f"{name} is missing")
                self._open[file] = safe_open(str(self.folder / name), framework="pt")
            view = self._open[file].get_slice(key)
            shape = tuple(view.get_shape())
        if shape != tuple(stop - start for start, stop in piece):
            raise damaged("saved-shape", self.folder, f"{key} in {name} has another shape than {MANIFEST} says",
                          list(shape))
        return self._open[file], view

    @contextmanager
    def _readable(self, name: str) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError) as error:
            raise damaged("checkpoint-file-unreadable", self.folder,
                          f"{name} cannot be read: {str(error).partition(chr(10))[0]}") from error

    def close(self) -> None:
        """Let go of the files."""
        self._open.clear()


def checksum(path: Path) -> int:
    """The CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            value = zlib.crc32(block, value)
    return value


def find(path: Path) -> list[Path]:
    """The checkpoints that `path` stands for, newest first: one itself, a folder of them, or a run's folder, whose
    run.toml may name their folder elsewhere; with /best behind one of these folders, the best one."""
    if path.name == BEST:
        for link in (path, *(folder / BEST for folder in _folders(path.parent))):
            if link.is_symlink():
                return [link.resolve()]
    with suppress(OSError):
        if (path / MANIFEST).exists():
            return [path]
    return next(filter(None, map(checkpoints, (path, *_folders(path)))), [])


def run_folders(path: Path, checkpoint: Path) -> list[Path]:
    """Folders that may hold the files of the run that wrote `checkpoint`, which was found at `path`."""
    folder, above = checkpoint.parent.resolve(), checkpoint.parent.parent
    return [path, *([path.parent] if path.name == BEST else []),
            *([above] if folder in (one.resolve() for one in _folders(above)) else [])]


def _folders(run: Path) -> list[Path]:
    """Folders in which a run may have its checkpoints. A relative `checkpoint.dir` belongs to the directory where the
    run was started: a relative `run_dir` tells which that was, otherwise it is taken for this process's."""
    own = read.own_settings(run)
    named, given = own.get("checkpoint.dir"), own.get("run_dir")
    if not isinstance(named, str):
        return [run / "checkpoint"]
    start, steps = Path(), Path(given).parts if isinstance(given, str) else ()
    if steps and run.absolute().parts[-len(steps):] == steps:
        start = run.absolute().parents[len(steps) - 1]
    return [start / named, run / "checkpoint"]
