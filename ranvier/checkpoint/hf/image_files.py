"""preprocessor_config.json, which defines how images become pixels: written for an image model, and compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ranvier.checkpoint.hf.pretrained import own_file, own_json
from ranvier.config.run import Run
from ranvier.data.cache import Progress
from ranvier.data.images import CIFAR, MEAN, STD, short_side
from ranvier.errors import CheckpointError

PREPROCESSOR = "preprocessor_config.json"
_MOST_BYTES = 1 << 20
_PIXELS = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "rescale_offset",
           "do_flip_channel_order", "do_grayscale")
"""Keys that change each pixel; the others resize and crop."""
_OF_SOME = ("rescale_offset", "do_flip_channel_order", "do_grayscale", "crop_pct", "do_pad")
"""Keys of some classes of processors, which change images where they are set."""


def processor(size: int, *, crops: bool = True) -> dict[str, object]:
    """The content of the file for the task `images`. crops: for images from files; CIFAR's are not cropped."""
    return {"image_processor_type": "BitImageProcessor", "do_convert_rgb": True, "do_resize": True,
            "size": {"shortest_edge": short_side(size)} if crops else {"height": size, "width": size}, "resample": 3,
            "do_center_crop": crops, "crop_size": {"height": size, "width": size}, "do_rescale": True,
            "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": list(MEAN), "image_std": list(STD)}


def import_processor(model: Path, folder: Path) -> None:
    """Copy the file of the folder `model`, if it has one, for an export of the imported model."""
    if (model / PREPROCESSOR).exists():
        shutil.copyfile(own_file(model, PREPROCESSOR), folder / PREPROCESSOR)


def export_processor(folder: Path, run: Run, step: int, places: list[Path]) -> None:
    """Write the file for a model of `run`. places: folders that may have the file of an import, which is valid until
    the model is trained."""
    own = next((place for place in places if (place / PREPROCESSOR).is_file()), None) if not step else None
    if own is not None:
        shutil.copyfile(own_file(own, PREPROCESSOR), folder / PREPROCESSOR)
        return
    document = processor(run.model.image_size, crops=run.data.train not in CIFAR)
    (folder / PREPROCESSOR).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _stored(folder: Path) -> dict[str, Any]:
    """The content of the file in a folder; empty if there is none. CheckpointError if it is damaged."""
    return own_json(folder, PREPROCESSOR, _MOST_BYTES) if (folder / PREPROCESSOR).exists() else {}


def _differences(folder: Path) -> dict[str, object]:
    """The keys in which the file of a folder differs from `processor` of its size; empty if there is none. Without
    image_mean or image_std, transformers uses those of the class, which are seldom ImageNet's."""
    stored = _stored(folder)
    if stored:
        stored = dict.fromkeys(("image_mean", "image_std"), "of its class") | stored
    sizes = [stored.get(key) for key in ("crop_size", "size")]
    size = next((size["height"] for size in sizes if isinstance(size, dict) and isinstance(size.get("height"), int)),
                224)
    found = [{key: stored[key] for key, value in processor(size, crops=crops).items()
              if key in stored and key != "image_processor_type" and stored[key] != value} for crops in (True, False)]
    return min(found, key=len) | {key: stored[key] for key in _OF_SOME if stored.get(key)}


def notes_on_images(folder: Path) -> list[str]:
    """A note for the user if images become other pixels here than in the file of a folder."""
    found = _differences(folder)
    listed = ", ".join(f"{key} {json.dumps(value)}" for key, value in found.items())
    return [f"{folder / PREPROCESSOR} has {listed}: here images are resized (bicubic), cropped and normalised as for "
            "ImageNet; training adapts the model to that"] if found else []


def check_pixels(folder: Path, tell: Progress) -> None:
    """CheckpointError if a model that is not trained further would see other pixels than in its training; `tell` gets a
    note if images are resized or cropped differently."""
    for key, value in _differences(folder).items():
        if key in _PIXELS:
            raise CheckpointError(f"has another {key}: images are normalised differently here, so scores would be "
                                  "wrong", code="image-processor-differs", where=str(folder / PREPROCESSOR),
                                  value=value,
                                  remedy="Train the model first (`ranvier train --model.pretrained`), which adapts it, "
                                         "or evaluate it with transformers.")
    for note in notes_on_images(folder):
        tell(note)
    stored = _stored(folder)
    if stored and not stored.get("do_center_crop"):
        tell(f"{folder / PREPROCESSOR} does not crop images; Ranvier crops those of a folder (and not those "
             "of CIFAR)")
