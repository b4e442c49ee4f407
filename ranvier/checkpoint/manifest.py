"""The manifest of a checkpoint: manifest.json, read as untrusted input.

    step-120/
      manifest.json             tensors by kind, global name and shape; where their pieces are; numbers; the run
      part-00000.safetensors    pieces: boxes of tensors, one file for each writer

Tensors have a kind ("parameter", "master", "exp_avg", ...) and a parameter's global name. Nothing here depends on the
mesh that wrote it: a reader cuts the boxes that it needs out of the existing pieces. The manifest has checksums of the
files and of itself, since a changed digit in it would be another step or another tensor.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Lt
from pydantic import ConfigDict, FiniteFloat, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ranvier.config import read
from ranvier.errors import CheckpointError
from ranvier.layout import Box, box_size, index_of, intersection, whole_box
from ranvier.system.untrusted_file import read_bytes

MANIFEST = "manifest.json"
BEST = "best"
"""Name of the link to the best checkpoint, next to the checkpoints."""
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
              "uint8": 1, "bool": 1}
"""The number formats that a checkpoint may have, by torch's names."""
MOST_BYTES = 1 << 30
"""Ranvier writes no larger manifest."""
_PART = re.compile(r"part-\d{5}\.safetensors")
_STEP = re.compile(r"step-([0-9]{1,12})")
_MOST_DIMS = 32
"""Below torch's limit for copies."""
_MOST = 1 << 62
_MOST_LOOKS = 2_000_000
"""Most pairs of pieces that are compared; a manifest that needs more is malicious."""

Count = Annotated[int, Ge(0), Lt(_MOST)]
_config = ConfigDict(extra="forbid", strict=True)


@checked(frozen=True, config=_config)
class File:
    """One file of pieces, its size, and the CRC-32 of all its bytes."""

    name: str
    size_bytes: Count
    crc32: Count


@checked(frozen=True, config=_config)
class SavedTensor:
    """A full tensor: pieces are (index into the manifest's files, key in that file, box of the tensor)."""

    dtype: str
    shape: tuple[Count, ...]
    pieces: tuple[tuple[Count, str, tuple[tuple[Count, Count], ...]], ...]


@checked(frozen=True, config=_config)
class ScaleState:
    """The loss scale of fp16, as `ranvier.optim.loss_scale.LossScale` has it."""

    scale: Annotated[FiniteFloat, Gt(0)]
    window: Annotated[Count, Ge(1)]
    good_steps: Count
    skipped_steps: Count


@checked(frozen=True, kw_only=True, config=_config)
class OptimizerGroup:
    """Parameters that a user's optimizer updates with the same settings (`checkpoint/user_optimizer`)."""

    settings: dict[str, object]
    """Such as the learning rate."""
    numbers: tuple[str, ...]
    """States that are Python numbers and not tensors."""
    parameters: tuple[str, ...]


@checked(frozen=True, kw_only=True, config=_config)
class Manifest:
    """Everything in a checkpoint except the values of its tensors."""

    format: Literal[1] = 1
    step: Count
    """Steps taken."""
    optimizer: str | None = None
    """The class of a user's own optimizer, if rank 0 has one."""
    optimizer_groups: tuple[OptimizerGroup, ...] = ()
    """The groups of a user's own optimizer; left out of the file if there are none."""
    optimizer_steps: Count | None
    """Updates so far; None for a user's own optimizer, which has its own count."""
    missed_updates: dict[str, Count] = field(default_factory=dict)
    """Parameter -> updates that skipped it, because it was frozen or had no gradient; left out of the file if empty."""
    loss_scale: ScaleState | None
    last_norm: Annotated[FiniteFloat, Ge(0)] | None = None
    """The gradient norm of the last step, if the next step is clipped by it; left out of the file otherwise."""
    frozen: tuple[str, ...]
    """Parameters that were not being trained."""
    files: tuple[File, ...]
    tensors: dict[str, dict[str, SavedTensor]]
    """Kind -> global name -> tensor."""
    about: dict[str, object] = field(default_factory=dict)
    """Metadata of the run: its settings, its place in the data, versions. Plain JSON."""
    crc32: Count = 0
    """CRC-32 of manifest.json as `encode` writes it with 0 here; later changes of white space do not matter."""

    @property
    def frozen_layers(self) -> int:
        """Frozen layers of the run that wrote it: a model whose ties freezing has ended has more parameters. 0 if it
        has no valid number."""
        elastic = self.about.get("elastic")
        frozen = elastic.get("frozen") if isinstance(elastic, dict) else None
        return frozen if isinstance(frozen, int) and not isinstance(frozen, bool) and frozen > 0 else 0


_adapter = TypeAdapter(Manifest)


def encode(manifest: Manifest) -> bytes:
    """manifest.json, with its checksum."""
    return _json(replace(manifest, crc32=_own_checksum(manifest)))


def _own_checksum(manifest: Manifest) -> int:
    return zlib.crc32(_json(replace(manifest, crc32=0)))


def _json(manifest: Manifest) -> bytes:
    """The manifest as JSON, without fields that are empty, as in files from before those fields existed."""
    absent = {name for name in ("last_norm", "missed_updates", "optimizer_groups")
              if getattr(manifest, name) in (None, {}, ())}
    return _adapter.dump_json(manifest, exclude=absent)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`. CheckpointError when it is missing, malformed or contradictory."""
    path = folder / MANIFEST
    try:
        manifest = _adapter.validate_json(read_bytes(path, MOST_BYTES))
    except OSError as error:
        raise CheckpointError(f"cannot be read: {MANIFEST}: {error.strerror or error}", code="manifest-unreadable",
                              where=f"checkpoint {folder}",
                              remedy="Name the folder of a complete checkpoint, such as "
                                     "checkpoint/step-100.") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the text"
        raise damaged_error("manifest-malformed", folder,
                            f"{MANIFEST} is not a manifest: {place}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise damaged_error("not-a-manifest", folder, f"{MANIFEST} is not a manifest: {error}") from error
    for problem in contradictions(manifest):
        raise damaged_error("manifest-contradicts-itself", folder, f"{MANIFEST} contradicts itself: {problem}")
    if manifest.crc32 != _own_checksum(manifest):
        raise damaged_error("manifest-changed", folder, f"{MANIFEST} has been changed: its own checksum is another")
    if step_of(folder) not in (None, manifest.step):
        raise damaged_error("checkpoint-renamed", folder, f"is of step {manifest.step}, a copy under another name",
                            folder.name)
    return manifest


def damaged_error(code: str, folder: Path | str, what: str, value: object = None) -> CheckpointError:
    """The error for a checkpoint that differs from what was written."""
    return CheckpointError(what, code=code, where=f"checkpoint {folder}", value=value,
                           remedy="Resume from another one: `--resume auto` takes the newest complete one.")


def contradictions(manifest: Manifest) -> Iterator[str]:
    """Contradictions within a manifest. Files are checked elsewhere."""
    names = [file.name for file in manifest.files]
    for name in names:
        if not _PART.fullmatch(name):
            yield f"{name!r} is not a name of a file of pieces"
    if len(set(names)) < len(names):
        yield "a file is listed twice"
    places: set[tuple[int, str]] = set()
    room = sum(file.size_bytes for file in manifest.files)
    for kind, tensors in manifest.tensors.items():
        for name, tensor in tensors.items():
            where = f"{kind} of {name}"
            if tensor.dtype not in ITEM_BYTES:
                yield f"{where} has the unknown number format {tensor.dtype!r}"
                return
            # A size of 0 must not hide other impossible sizes, from which strides are computed.
            if len(tensor.shape) > _MOST_DIMS or prod(size or 1 for size in tensor.shape) >= _MOST:
                yield f"{where} has the impossible shape {tensor.shape}"
                return
            room -= prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
            if room < 0:
                yield f"the files are too small for {where}, of shape {tensor.shape}"
                return
            yield from _wrong_pieces(where, tensor, len(names))
            for file, key, _ in tensor.pieces:
                if (file, key) in places:
                    yield f"{where} has a piece that is listed twice: {key} in file {file}"
                places.add((file, key))


def _wrong_pieces(where: str, tensor: SavedTensor, num_files: int) -> Iterator[str]:
    """Errors for pieces that are not inside their tensor, or do not cover each element exactly once."""
    boxes: list[Box] = []
    for file, _, box in tensor.pieces:
        if file >= num_files:
            yield f"{where} has a piece in file {file} of {num_files}"
        if len(box) != len(tensor.shape) or any(start > stop or stop > size
                                                for (start, stop), size in zip(box, tensor.shape, strict=False)):
            yield f"{where}, of shape {tensor.shape}, has a piece {box}"
            return
        boxes.append(box)
    if sum(map(box_size, boxes)) != prod(tensor.shape) or _overlap([box for box in boxes if box_size(box)]):
        yield f"the pieces of {where} do not make up its shape {tensor.shape}"


def _overlap(boxes: list[Box]) -> bool:
    """Whether two of these boxes have an element in common: a sweep along the dim that tells most of them apart."""
    if boxes and not boxes[0]:
        return len(boxes) > 1
    dims = range(len(boxes[0])) if boxes else ()
    dim = max(dims, key=lambda dim: len({box[dim] for box in boxes}), default=0)
    open_boxes: list[Box] = []
    looks = 0
    for box in sorted(boxes, key=lambda box: box[dim]):
        open_boxes = [other for other in open_boxes if other[dim][1] > box[dim][0]]
        looks += len(open_boxes)
        if looks > _MOST_LOOKS or any(intersection(box, other) for other in open_boxes):
            return True
        open_boxes.append(box)
    return False


# --- folders ---------------------------------------------------------------------------------------------------------


def step_folder(folder: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` steps."""
    return folder / f"step-{step}"


def step_of(path: Path) -> int | None:
    """The step in a folder's name; None for other names."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, newest first; whether they are complete is not checked."""
    try:
        found = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    except (OSError, ValueError):
        return []
    return [path for _, path in sorted(found, key=lambda entry: entry[0], reverse=True)]


# --- reading ----------------------------------------------------------------------------------------------------------

# A checkpoint on disk: checks for damage, and reads of any box of any of its tensors. No process group, no GPU.


_READ_BYTES = 1 << 22


class Saved:
    """The checkpoint in `folder`, with its manifest read and checked. CheckpointError when the manifest is damaged."""

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
                    yield damaged_error("checkpoint-file-missing", self.folder, f"{file.name} is missing")
                elif path.stat().st_size != file.size_bytes:
                    yield damaged_error("checkpoint-file-cut-off", self.folder,
                                        f"{file.name} should have {file.size_bytes} bytes", path.stat().st_size)
                elif checksum(path) != file.crc32:
                    yield damaged_error("checkpoint-file-changed", self.folder,
                                        f"{file.name} has been changed: its checksum is not the manifest's")
            except OSError as error:
                yield damaged_error("checkpoint-file-unreadable", self.folder,
                                    f"{file.name} cannot be read: {error.strerror or error}")

    def tensor(self, kind: str, name: str) -> SavedTensor:
        """The manifest's entry for a tensor. CheckpointError when there is none."""
        try:
            return self.manifest.tensors[kind][name]
        except KeyError:
            raise CheckpointError(f"has no {kind} of {name}", code="checkpoint-without-state",
                                  where=f"checkpoint {self.folder}",
                                  remedy="Resume with the model and the optimizer that it was written with.") from None

    def read(self, kind: str, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor (all of it by default), on the CPU, in the saved number format."""
        saved = self.tensor(kind, name)
        box = whole_box(saved.shape) if box is None else box
        for file, key, piece, _ in self._within(kind, name, box):
            self._open_piece(file, key, piece)  # a size that no file has is an error, not an allocation
        result = torch.empty([stop - start for start, stop in box], dtype=getattr(torch, saved.dtype))
        self.read_into(kind, name, box, result)
        return result

    def read_into(self, kind: str, name: str, box: Box, target: Tensor) -> None:
        """Copy a box of a tensor to `target`, which has the box's shape and may have another number format and
        device."""
        saved = self.tensor(kind, name)
        for file, key, piece, common in self._within(kind, name, box):
            target[index_of(common, box)].copy_(self._cut(saved, file, key, piece, common))

    def _within(self, kind: str, name: str, box: Box) -> Iterator[tuple[int, str, Box, Box]]:
        """File, key and box of each piece that overlaps `box`, and the overlap."""
        saved = self.tensor(kind, name)
        if len(box) != len(saved.shape) or any(stop > size for (_, stop), size in zip(box, saved.shape, strict=True)):
            raise damaged_error("saved-shape-too-small", self.folder,
                                f"{kind} of {name} has the shape {saved.shape}, and {box} of it is wanted")
        for file, key, piece in saved.pieces:
            common = intersection(piece, box)
            if common is not None:
                yield file, key, piece, common

    def _cut(self, saved: SavedTensor, file: int, key: str, piece: Box, common: Box) -> Tensor:
        """The part `common` of a piece."""
        name = self.manifest.files[file].name
        stored, view = self._open_piece(file, key, piece)
        with self._readable(name):
            part = box_size(common) < box_size(piece)
            found: Tensor = view[index_of(common, piece)] if part else stored.get_tensor(key)
        if found.dtype is not getattr(torch, saved.dtype):
            raise damaged_error("saved-number-format", self.folder,
                                f"{key} in {name} does not have the number format in {MANIFEST}",
                                str(found.dtype).removeprefix("torch."))
        return found

    def _open_piece(self, file: int, key: str, piece: Box) -> tuple[Any, Any]:
        """An open file, and its tensor under `key`, whose shape must be the piece's."""
        name = self.manifest.files[file].name
        with self._readable(name):
            if file not in self._open:
                if (self.folder / name).is_symlink() or not (self.folder / name).is_file():
                    raise damaged_error("checkpoint-file-missing", self.folder, f"{name} is missing")
                self._open[file] = safe_open(str(self.folder / name), framework="pt")
            view = self._open[file].get_slice(key)
            shape = tuple(view.get_shape())
        if shape != tuple(stop - start for start, stop in piece):
            raise damaged_error("saved-shape", self.folder, f"{key} in {name} does not have the shape in {MANIFEST}",
                                list(shape))
        return self._open[file], view

    @contextmanager
    def _readable(self, name: str) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError) as error:
            raise damaged_error("checkpoint-file-unreadable", self.folder,
                                f"{name} cannot be read: {str(error).partition(chr(10))[0]}") from error

    def close(self) -> None:
        """Close the files."""
        self._open.clear()


def checksum(path: Path) -> int:
    """The CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            value = zlib.crc32(block, value)
    return value


def find(path: Path) -> list[Path]:
    """The checkpoints that `path` stands for, newest first: a checkpoint, a folder of checkpoints, or a run's folder,
    whose run.toml may name another folder for them; with /best appended to a folder, the best one."""
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
            *([above] if folder in (other.resolve() for other in _folders(above)) else [])]


def _folders(run: Path) -> list[Path]:
    """Folders in which a run may have its checkpoints. A relative `checkpoint.dir` belongs to the directory where the
    run was started: a relative `run_dir` shows which one that was; otherwise this process's directory is assumed."""
    own = read.own_settings(run)
    named, given = own.get("checkpoint.dir"), own.get("run_dir")
    if not isinstance(named, str):
        return [run / "checkpoint"]
    start, steps = Path(), Path(given).parts if isinstance(given, str) else ()
    if steps and run.absolute().parts[-len(steps):] == steps:
        start = run.absolute().parents[len(steps) - 1]
    return [start / named, run / "checkpoint"]
