"""The task images: the class of an image. From files of any size to normalised pixels of the model's.

    inputs    [B, 3, H, W] float32, H = W = model.image_size, less ImageNet's mean and over its standard deviation
    targets   [B] int64, numbers of classes

CIFAR is kept as it is, 32 x 32, and resized as it is read; other images are decoded and resized once, into the cache,
or where that would take more than MOST_CACHED_BYTES each time they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ranvier import keyed_random
from ranvier.config.run import Run
from ranvier.config.task_form import SHIPPED
from ranvier.data.accuracy import Accuracy
from ranvier.data.arrays import Arrays, Form, made_once, write_arrays, write_in_pieces
from ranvier.data.cache_folder import cache_folder
from ranvier.data.cifar import Cifar, open_cifar
from ranvier.data.fingerprint import fingerprint
from ranvier.data.image_files import Images, look_at_folders, open_images
from ranvier.data.named_files import first_looks, name_problems, training_name
from ranvier.data.publish import Progress
from ranvier.data.subset import chosen, first_of_order, some
from ranvier.data.task import Dataset, Prepared, Task
from ranvier.errors import DataError, RanvierError

NAMES = ("cifar10", "cifar100", "imagenet")
"""Datasets that are known by name."""
FORM = "cifar10, cifar100, imagenet, or a folder with one folder of images for each class"
"""What may be given, in words."""
MOST_CACHED_BYTES = 16 << 30
"""Decoded images that are kept in the cache; larger datasets are decoded each time they are read."""
_PIECE = 64
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class FlipCrop:
    """Half of the images mirrored, and each moved by up to an eighth of its side in both directions, black coming in:
    by chance, keyed by (seed, epoch, sample). repeats: every epoch draws what the first does."""

    def __init__(self, seed: int, repeats: bool) -> None:
        self._key, self._repeats = keyed_random.key("flip-crop", seed), repeats

    def __call__(self, images: np.ndarray, samples: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """images: [b, h, w, 3] uint8, and so is the result."""
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
        """[b, 3, size, size] float32, augmented by the epoch of each sample where the run says so."""
        images = self._read(samples)
        if self._augment is not None:
            images = self._augment(images, samples, np.zeros_like(samples) if epochs is None else epochs)
        return pixels(images, self._size)

    def targets(self, samples: np.ndarray) -> Tensor:
        """[b] int64, the number of each image's class."""
        return torch.from_numpy(self._labels[samples].astype(np.int64))


def pixels(images: np.ndarray, size: int) -> Tensor:
    """[b, 3, size, size] float32, normalised, of images [b, h, w, 3] uint8; resized (bicubic, antialiased) if need
    be."""
    found = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).float().div_(255)
    if found.shape[-2:] != (size, size):
        found = functional.interpolate(found.contiguous(), (size, size), mode="bicubic", antialias=True).clamp_(0, 1)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (_MEAN, _STD))
    return found.sub_(mean).div_(std).contiguous()


class ImageClassification(Task):
    """The task `images`: labelled images."""

    form = SHIPPED["images"]

    def problems(self, run: Run, *, elsewhere: bool) -> list[RanvierError]:
        """What is wrong with the data settings, as far as it shows without reading an image."""
        found: list[RanvierError] = [*name_problems(run.data, NAMES, FORM),
                                     *first_looks(run.data, NAMES, look_at_folders)]
        if run.data.augment_repeats and run.data.augment == "none":
            found.append(DataError("has no effect without an augmentation", code="repeats-without-augmentation",
                                   where="data.augment-repeats", value=True,
                                   remedy="Leave it out, or set `--data.augment flip-crop`."))
        return found

    def prepare(self, run: Run, progress: Progress) -> Prepared:
        """Decoded images of this run (see ranvier.data.prepare); `train` is augmented where the run says so."""
        cifar = open_cifar(training_name(run.data), cache_folder(run), progress)
        train, held, classes, same = _cifar(run, cifar, progress) if cifar else _files(run, progress)
        augment, repeats = run.data.augment, run.data.augment == "none" or run.data.augment_repeats
        transform = fingerprint("pixels", run.model.image_size, "bicubic", _MEAN, _STD, augment,
                                None if augment == "none" else (run.seed, repeats))
        return Prepared(
            train=train, eval=held, weight=1.0, num_classes=len(classes), class_names=classes, scoring=Accuracy,
            transform=transform, repeats=repeats, fingerprint=fingerprint("images", same, transform, chosen(run)),
            about=f"{run.data.train}: {len(train):,} images, {len(held):,} held out, {len(classes)} classes")


IMAGES = ImageClassification()
"""The task; it has no state."""


def _augment(run: Run) -> FlipCrop | None:
    return None if run.data.augment == "none" else FlipCrop(run.seed, run.data.augment_repeats)


Parts = tuple[Dataset, Dataset, tuple[str, ...], object]
"""Training part, held-out part, names of classes, fingerprint."""


def _cifar(run: Run, cifar: Cifar, progress: Progress) -> Parts:
    if run.data.eval is not None:
        raise DataError(f"is not used: {cifar.name} has a held-out part of its own", code="eval-with-cifar",
                        where="data.eval", value=run.data.eval, remedy="Leave `--data.eval` out.")

    def make() -> None:
        progress(f"reading {cifar.name}")
        train, held, classes = cifar.read()
        for name, (images, labels) in (("eval", held), ("train", train)):
            write_arrays(folder / name, {"images": images, "labels": labels}, {"classes": list(classes)})

    folder = cache_folder(run) / "images" / cifar.fingerprint
    train, held = made_once(folder, make, progress)
    used = [some(_stored(part, run, augment), count, run.seed, f"data.{name}-samples") for name, part, count, augment
            in (("train", train, run.data.train_samples, _augment(run)), ("eval", held, run.data.eval_samples, None))]
    return used[0], used[1], tuple(train.names("classes")), (train.digest, held.digest)


def _stored(part: Arrays, run: Run, augment: FlipCrop | None) -> Pictures:
    images = part.arrays["images"]
    return Pictures(lambda samples: images[samples], part.arrays["labels"], run.model.image_size, augment)


def _files(run: Run, progress: Progress) -> Parts:
    """The same of images of any size: fewer samples are chosen before any is decoded."""
    size, data, name = run.model.image_size, run.data, training_name(run.data)
    train, held = (part.some(first_of_order(len(part.labels), count, run.seed, f"data.{setting}-samples"))
                   for setting, part, count in zip(("train", "eval"), open_images(name, data.eval, progress),
                                                (data.train_samples, data.eval_samples), strict=True))
    if (len(train.labels) + len(held.labels)) * size * size * 3 > MOST_CACHED_BYTES:
        progress(f"{data.train} is too large to be kept decoded: images are decoded each time they are read")
        return (Pictures(_reader(train, size), train.labels, size, _augment(run)),
                Pictures(_reader(held, size), held.labels, size, None), train.classes,
                (train.fingerprint, held.fingerprint))

    def make() -> None:
        for name, part in (("eval", held), ("train", train)):
            count = len(part.labels)
            forms = {"images": Form(dtype="uint8", shape=(count, size, size, 3)),
                     "labels": Form(dtype="int64", shape=(count,))}
            write_in_pieces(folder / name, forms, _pieces(part, size, progress), {"classes": list(part.classes)})

    folder = cache_folder(run) / "images" / fingerprint(train.state, held.state, size)
    stored = made_once(folder, make, progress)
    return (_stored(stored[0], run, _augment(run)), _stored(stored[1], run, None), train.classes,
            [part.digest for part in stored])


def _reader(images: Images, size: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda samples: np.stack([images.fitted(number, size) for number in samples.tolist()])


def _pieces(images: Images, size: int, progress: Progress) -> Iterator[dict[str, np.ndarray]]:
    read, count = _reader(images, size), len(images.labels)
    for start in range(0, count, _PIECE):
        if start % (100 * _PIECE) == 0:
            progress(f"decoding images: {start:,} of {count:,}")
        numbers = np.arange(start, min(start + _PIECE, count))
        yield {"images": read(numbers), "labels": images.labels[numbers]}
