"""Images from folders, one for each class, or from the hub, and their crop to the size of the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from ranvier.data.fingerprint import fingerprint
from ranvier.data.publish import Progress
from ranvier.data.subset import held_out
from ranvier.data.tables import read_known
from ranvier.errors import DataError

ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Endings of files that are read as images."""
_HUB = "ILSVRC/imagenet-1k"
_MOST_PIXELS = 1 << 27
_LONGEST = 8
"""Of an image whose sides have a larger ratio only the middle is resized."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """Images of any size, by number.

    Attributes:
        classes: names by number.
        names: of the images.
        labels: [N] int64, numbers of classes.
        fingerprint: of names and sizes, wherever the files are.
        state: of names, sizes, times of change and the folder.
        load: reads the image of a number.
    """

    classes: tuple[str, ...]
    names: tuple[str, ...]
    labels: npt.NDArray[np.int64]
    fingerprint: str
    state: str
    load: Callable[[int], Image.Image]

    def some(self, chosen: npt.NDArray[np.int64] | None) -> Images:
        """Only the images with these numbers, renumbered; None for all."""
        if chosen is None:
            return self
        numbers = chosen.tolist()
        return replace(self, names=tuple(self.names[number] for number in numbers), labels=self.labels[chosen],
                       fingerprint=fingerprint(self.fingerprint, numbers), state=fingerprint(self.state, numbers),
                       load=lambda number: self.load(numbers[number]))

    def fitted(self, number: int, size: int) -> npt.NDArray[np.uint8]:
        """An image as [size, size, 3] uint8. DataError, with its name, if it cannot be read."""
        try:
            return fitted(self.load(number), size)
        except Exception as error:  # Pillow raises many kinds for damaged files
            raise DataError("is not an image that can be read", code="image-unreadable", where=self.names[number],
                            value=f"{type(error).__name__}: {error}",
                            remedy="Replace it, or remove it from its folder.") from error


def fitted(image: Image.Image, size: int) -> npt.NDArray[np.uint8]:
    """An image as [size, size, 3] uint8: the short side is resized to 256/224 of `size` (bicubic), then the centre is
    cropped, the usual evaluation on ImageNet. ValueError for an image of more than 2**27 pixels."""
    width, height = image.size
    if width * height > _MOST_PIXELS:
        raise ValueError(f"it has {width} x {height} pixels")
    image = image.convert("RGB")
    if max(width, height) > _LONGEST * min(width, height):
        image = _middle(image, min(width, _LONGEST * height), min(height, _LONGEST * width))
        width, height = image.size
    short = max(size, round(size * 256 / 224))
    new = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    return np.asarray(_middle(image.resize(new, Image.Resampling.BICUBIC), size, size))


def _middle(image: Image.Image, width: int, height: int) -> Image.Image:
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return image.crop((left, top, left + width, top + height))


def open_images(train: str, held: str | None, progress: Progress) -> tuple[Images, Images]:
    """(training, held out) of imagenet or of folders. DataError for folders without images, a single class, or a class
    that only the held-out part has.

    A folder with `train` is read with its `val`, `validation` or `test`; without one of those every tenth image is held
    out, by the hash of its name.
    """
    if train == "imagenet":
        parts = read_known(_HUB, ("train", "validation"), progress,
                           "a folder with one folder of images for each class", _hub)
        return (parts[0], parts[1] if held is None else _held(Path(held).expanduser(), parts[0], progress))
    path = Path(train).expanduser()
    own = None
    if _has_folders(path / "train"):
        own, path = _held_out_folder(path), path / "train"
    images = _folder(path, "train", progress)
    evaluated = own if held is None else Path(held).expanduser()
    if evaluated is not None:
        return images, _held(evaluated, images, progress)
    chosen = held_out(images.names)
    return images.some(np.flatnonzero(~chosen)), images.some(np.flatnonzero(chosen))


def _has_folders(path: Path) -> bool:
    """Whether this is a folder of classes, and not one of a class that is called train."""
    try:
        return any(entry.is_dir() for entry in os.scandir(path))
    except OSError:
        return False


def look_at_folders(path: Path, setting: str) -> None:
    """Check that a folder has folders of classes, without looking for images. DataError."""
    place = next((path / name for name in ("train", "val", "validation", "test") if _has_folders(path / name)), path)
    if path.is_dir() and not _has_folders(place):
        what = "has fewer than two folders, one for each class" if setting == "train" else "has no folders of images"
        raise DataError(what, code="images-unreadable", where=f"data.{setting} {path}",
                        remedy=f"Give a folder with one folder of images for each class ({', '.join(ENDINGS)}).")


def _held_out_folder(path: Path) -> Path | None:
    return next((path / name for name in ("val", "validation", "test") if _has_folders(path / name)), None)


def _held(path: Path, train: Images, progress: Progress) -> Images:
    """The held-out folder, with the numbers of classes of the training part."""
    path = _held_out_folder(path) or path
    held = _folder(path, "eval", progress, least=1)
    unknown = [name for name in held.classes if name not in train.classes]
    if unknown:
        raise DataError("has classes that are not in the training data", code="unknown-image-classes",
                        where=f"data.eval {path}", value=unknown[:20],
                        remedy="Give folders of the same names as in `--data.train`.")
    number = np.array([train.classes.index(name) for name in held.classes], dtype=np.int64)
    return replace(held, classes=train.classes, labels=number[held.labels])


def _folder(path: Path, setting: str, progress: Progress, least: int = 2) -> Images:
    """One folder of image files for each class, in alphabetical order."""
    where = f"data.{setting} {path}"
    remedy = f"Give a folder with one folder of images for each class ({', '.join(ENDINGS)})."
    try:
        classes = sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))
        found = [(file, label) for label, name in enumerate(classes) for file in sorted(_walk(path / name))]
        stats = [file.stat() for file, _ in found]
    except OSError as error:
        raise DataError("cannot be read", code="image-folder-unreadable", where=where, value=str(error),
                        remedy=remedy) from error
    names = tuple(file.relative_to(path).as_posix() for file, _ in found)
    labels = np.array([label for _, label in found], dtype=np.int64)
    empty = sorted(set(range(len(classes))) - set(labels.tolist()))
    if len(classes) < least:
        raise DataError("has fewer than two folders, one for each class" if least == 2 else "has no folders of images",
                        code="image-folder-without-classes", where=where, value=classes, remedy=remedy)
    if empty:
        raise DataError("has a folder without images", code="image-folder-empty", where=where, value=classes[empty[0]],
                        remedy=remedy)
    progress(f"{path}: {len(names):,} images of {len(classes)} classes")
    return Images(classes=tuple(classes), names=names, labels=labels,
                  fingerprint=fingerprint("images", names, [stat.st_size for stat in stats]),
                  state=fingerprint(str(path.resolve()), names, [(stat.st_size, stat.st_mtime_ns) for stat in stats]),
                  load=lambda number: _opened(path / names[number]))


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(root, name)
            if name.lower().endswith(ENDINGS) and not name.startswith(".") and path.is_file():
                yield path


def _opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        if image.width * image.height > _MOST_PIXELS:
            raise ValueError(f"it has {image.width} x {image.height} pixels")
        image.load()
        return image


def _hub(split: str, rows: Any) -> Images:
    labels = np.asarray(list(rows["label"]), dtype=np.int64)
    same = fingerprint("hub", _HUB, split, len(labels))
    names = tuple(f"{_HUB} {split} row {number}" for number in range(len(labels)))
    return Images(classes=tuple(rows.features["label"].names), names=names, labels=labels, fingerprint=same,
                  state=same, load=lambda number: rows[number]["image"])
