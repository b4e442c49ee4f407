"""Images and their classes: CIFAR, folders of files, transforms, augmentation, and what is refused."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import sys
import tarfile
import threading
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from ranvier.config.run import Data, Run, Transformer
from ranvier.data import images as module
from ranvier.data.images import FlipCrop, pixels, resize_and_crop
from ranvier.data.prepare import prepare, problems
from tests.errors import check, raises

RANDOM = np.random.default_rng(0)


def run_of(tmp_path, train, size=8, seed=0, **data):
    return Run(model=Transformer(image_size=size, patch_size=4), seed=seed,
               data=Data(task="images", train=str(train), cache_dir=tmp_path / "cache", **data))


def noise(*shape):
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def folder_of(folder, counts=None, size=(20, 12), ending="png"):
    """Images whose first channel is their class, in one folder for each class."""
    for label, (name, count) in enumerate((counts or {"cat": 12, "dog": 11}).items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            data = noise(size[1], size[0], 3)
            data[..., 0] = 50 * label
            Image.fromarray(data).save(folder / name / f"{number}.{ending}")
    return folder


def refused(run, code, *facts):
    with raises(code, *facts):
        prepare(run)


def all_of(dataset, epoch=0):
    return dataset.inputs(np.arange(len(dataset)), np.full(len(dataset), epoch))


# ---------------------------------------------------------------------- CIFAR

def cifar_parts(classes, counts=(4, 4, 4, 4, 4, 6)):
    return [(noise(count, 32, 32, 3), [(3 * number + count) % classes for number in range(count)]) for count in counts]


def write_package(path, parts):
    content = {f"{name}.png": images for name, (images, _) in zip(
        [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"], parts, strict=True)}
    with tarfile.open(path, "w:gz") as archive:
        for name, images in content.items():
            file = io.BytesIO()
            Image.fromarray(images.reshape(len(images), 1024, 3)).save(file, "PNG")
            content[name] = file.getvalue()
        content["train_lables.json"] = json.dumps([label for _, labels in parts[:5] for label in labels]).encode()
        content["test_lables.json"] = json.dumps(parts[5][1]).encode()
        for name, data in content.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """CIFAR-10 with few images, in the form of its package."""
    parts, path = cifar_parts(10), tmp_path / "hand" / module.CIFAR10.filename
    path.parent.mkdir()
    digest = write_package(path, parts)
    monkeypatch.setattr(module, "CIFAR10", replace(module.CIFAR10, sha256=digest, command=(
        "cp", str(path), module.CIFAR10.filename)))
    return parts, path


def test_cifar10_comes_from_its_package_unchanged(tmp_path, package):
    parts, _ = package
    run = run_of(tmp_path, "cifar10", size=32)
    prepared = prepare(run)
    images = np.concatenate([images for images, _ in parts[:5]])
    assert torch.equal(all_of(prepared.train), pixels(images, 32))
    assert torch.equal(all_of(prepared.eval), pixels(parts[5][0], 32))
    assert prepared.train.targets(np.arange(4)).tolist() == parts[0][1]
    assert prepared.eval.targets(np.arange(6)).tolist() == parts[5][1]
    assert (prepared.num_classes, prepared.class_names[6], prepared.weight) == (10, "frog", 1.0)
    assert prepared.about == "cifar10: 20 images, 6 held out, 10 classes"
    assert prepare(run_of(tmp_path, "cifar10", size=16)).fingerprint != prepared.fingerprint
    refused(run_of(tmp_path, "cifar10", eval=str(tmp_path)), "eval-with-cifar", "data.eval", "cifar10")
    few = prepare(run_of(tmp_path, "cifar10", size=32, train_samples=5, eval_samples=2))
    assert torch.equal(all_of(few.train), pixels(images[few.train.chosen], 32)) and len(few.eval) == 2


class Rows(list):
    """Stands for a dataset of `datasets`: rows by number, columns by name."""

    def __init__(self, rows, label, names):
        super().__init__(rows)
        self.features = {label: types.SimpleNamespace(names=names)}

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


def test_cifar100_and_imagenet_are_asked_for_by_their_names(tmp_path, monkeypatch):
    asked, data = [], noise(6, 32, 32, 3)

    def load_dataset(name, configuration, split):
        asked.append((name, split))
        image, label = ("img", "fine_label") if "cifar" in name else ("image", "label")
        return Rows([{image: Image.fromarray(data[number]), label: number % 3} for number in range(6)], label,
                    ["a", "b", "c"])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    hundred = prepare(run_of(tmp_path, "cifar100", size=32))
    assert torch.equal(all_of(hundred.train), pixels(data, 32)) and hundred.class_names == ("a", "b", "c")
    imagenet = prepare(run_of(tmp_path, "imagenet", size=28, train_samples=4))
    assert asked == [("uoft-cs/cifar100", "train"), ("uoft-cs/cifar100", "test"),
                     ("ILSVRC/imagenet-1k", "train"), ("ILSVRC/imagenet-1k", "validation")]
    assert (len(imagenet.train), len(imagenet.eval)) == (4, 6)
    expected = np.stack([resize_and_crop(Image.fromarray(image), 28) for image in data])
    assert torch.equal(all_of(imagenet.eval), pixels(expected, 28))
    assert imagenet.eval.targets(np.arange(6)).tolist() == [0, 1, 2, 0, 1, 2]

    data = noise(6, 30, 32, 3)
    refused(run_of(tmp_path / "x", "cifar100"), "hub-rows", 30)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *a, split: [1]))
    refused(run_of(tmp_path / "x", "cifar100"), "hub-rows", "uoft-cs/cifar100")
    refused(run_of(tmp_path / "x", "imagenet"), "hub-rows", "ILSVRC/imagenet-1k")


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs the package datasets")
def test_real_rows_of_the_datasets_package(tmp_path, monkeypatch):
    import datasets

    data = noise(5, 32, 32, 3)
    features = datasets.Features({"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["a", "b"])})
    rows = datasets.Dataset.from_dict({"img": [Image.fromarray(image) for image in data],
                                       "fine_label": [0, 1, 0, 1, 1]}, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, split: rows)
    prepared = prepare(run_of(tmp_path, "cifar100", size=32))
    assert torch.equal(all_of(prepared.train), pixels(data, 32))
    assert prepared.train.targets(np.arange(5)).tolist() == [0, 1, 0, 1, 1]


# ---------------------------------------------------------------------- folders

def test_a_folder_for_each_class_with_every_tenth_held_out(tmp_path):
    folder = folder_of(tmp_path / "set", {"cat": 12, "dog": 11, ".hidden": 3})
    (folder / "cat" / "notes.txt").write_text("no image")
    (folder / "dog" / "gone.png").symlink_to("nothing")
    (folder / "dog" / "deep").mkdir()
    Image.fromarray(noise(9, 9, 3)).save(folder / "dog" / "deep" / "x.JPG")
    lines = []
    prepared = prepare(run_of(tmp_path, folder), lines.append)
    told = "24 images of 2 classes; left out 2 other files: cat/notes.txt, dog/gone.png"
    assert lines[0] == f"{folder}: {told}" and lines[1] == "decoding images: 0 of 2"
    assert (len(prepared.train), len(prepared.eval), prepared.class_names) == (22, 2, ("cat", "dog"))
    assert all_of(prepared.train).shape == (22, 3, 8, 8) and all_of(prepared.train).dtype == torch.float32
    red = all_of(prepared.train)[:, 0].mean((1, 2)) * 0.229 + 0.485
    labels = prepared.train.targets(np.arange(22))
    small = (red - labels * 50 / 255).abs() < 0.01
    assert small.sum() >= 21  # the image in dog/deep has other colours
    again = prepare(run_of(tmp_path, folder), lines.append)
    assert again.fingerprint == prepared.fingerprint and torch.equal(all_of(again.eval), all_of(prepared.eval))


def test_classes_have_the_numbers_of_the_models_labels(tmp_path):
    run = run_of(tmp_path, folder_of(tmp_path / "set"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({
        "architectures": ["ViTForImageClassification"], "id2label": {"0": "dog", "1": "cat"}}))
    own, theirs = prepare(run), prepare(replace(run, model=replace(run.model, pretrained=str(tmp_path / "model"))))
    assert own.class_names == ("cat", "dog") and theirs.class_names == ("dog", "cat")
    assert theirs.train.targets(np.arange(21)).equal(1 - own.train.targets(np.arange(21)))
    assert torch.equal(all_of(theirs.train), all_of(own.train)) and theirs.fingerprint != own.fingerprint


def test_folders_of_train_and_val_and_eval_of_ones_own(tmp_path):
    folder_of(tmp_path / "set" / "train")
    folder_of(tmp_path / "set" / "val", {"dog": 3})
    prepared = prepare(run_of(tmp_path, tmp_path / "set"))
    assert (len(prepared.train), len(prepared.eval)) == (23, 3)
    assert prepared.eval.targets(np.arange(3)).tolist() == [1, 1, 1]
    own = prepare(run_of(tmp_path, tmp_path / "set" / "train", eval=str(tmp_path / "set")))
    assert own.fingerprint == prepared.fingerprint
    vehicles = prepare(run_of(tmp_path, folder_of(tmp_path / "vehicles", {"car": 12, "test": 9, "train": 9})))
    assert (len(vehicles.train), len(vehicles.eval), vehicles.class_names) == (27, 3, ("car", "test", "train"))
    folder_of(tmp_path / "other", {"bird": 1, "cat": 1})
    refused(run_of(tmp_path, tmp_path / "set", eval=str(tmp_path / "other")), "unknown-image-classes", "bird")


def test_the_same_files_elsewhere_are_the_same_data(tmp_path):
    folder_of(tmp_path / "set")
    first = prepare(run_of(tmp_path, tmp_path / "set"))
    (tmp_path / "set").rename(tmp_path / "moved")
    assert prepare(run_of(tmp_path, tmp_path / "moved")).fingerprint == first.fingerprint
    Image.fromarray(noise(20, 12, 3)).save(tmp_path / "moved" / "cat" / "0.png")
    assert prepare(run_of(tmp_path, tmp_path / "moved")).fingerprint != first.fingerprint


def test_images_beyond_the_bound_are_decoded_each_time(tmp_path, monkeypatch):
    folder = folder_of(tmp_path / "set")
    stored = prepare(run_of(tmp_path, folder, train_samples=9))
    monkeypatch.setattr(module, "MOST_CACHED_BYTES", 100)
    lines = []
    read = prepare(run_of(tmp_path / "x", folder, train_samples=9), lines.append)
    assert lines[-1] == f"{folder} is too large to be kept decoded: images are decoded each time they are read"
    assert torch.equal(all_of(read.train), all_of(stored.train))
    assert read.train.targets(np.arange(9)).equal(stored.train.targets(np.arange(9)))
    assert not (tmp_path / "x" / "cache").exists()
    found = []
    threads = [threading.Thread(target=lambda: found.append(all_of(read.train))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(images, found[0]) for images in found) and len(found) == 4


def test_a_subset_is_chosen_before_anything_is_decoded(tmp_path):
    folder = folder_of(tmp_path / "set")
    few, more = (prepare(run_of(tmp_path, folder, train_samples=count, eval_samples=1)) for count in (4, 9))
    assert (len(few.train), len(few.eval)) == (4, 1)
    chosen = {image.numpy().tobytes() for image in all_of(few.train)}
    assert chosen < {image.numpy().tobytes() for image in all_of(more.train)}
    other = prepare(run_of(tmp_path, folder, seed=3, train_samples=4, eval_samples=1))
    assert {image.numpy().tobytes() for image in all_of(other.train)} != chosen
    refused(run_of(tmp_path, folder, train_samples=22), "more-samples-than-there-are", "data.train-samples", 21)


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", b"not an image", b"GIF89a" + b"\xff" * 40,
                                     "cut", "bits"])
def test_an_image_that_cannot_be_read_is_named(tmp_path, content):
    folder = folder_of(tmp_path / "set")
    if isinstance(content, str):
        data = (folder / "cat" / "3.png").read_bytes()
        content = data[:len(data) // 2] if content == "cut" else data[:60] + bytes(20) + data[80:]
    (folder / "cat" / "3.png").write_bytes(content)
    refused(run_of(tmp_path, folder), "image-unreadable", "cat/3.png")


def test_folders_that_are_no_data(tmp_path):
    with raises("image-folder-without-classes"):
        prepare(run_of(tmp_path, folder_of(tmp_path / "one", {"cat": 3})))
    folder_of(tmp_path / "empty", {"ant": 2, "bee": 0})
    refused(run_of(tmp_path, tmp_path / "empty"), "image-folder-empty", "bee")
    (tmp_path / "file").write_text("x")
    refused(run_of(tmp_path, tmp_path / "file"), "image-folder-unreadable", "data.train")
    folder_of(tmp_path / "two")
    (tmp_path / "none").mkdir()
    refused(run_of(tmp_path, tmp_path / "two", eval=str(tmp_path / "none")), "images-unreadable", "data.eval")
    folder_of(tmp_path / "few", {"a": 1, "b": 1})
    assert len(prepare(run_of(tmp_path, tmp_path / "few")).train) == 1
    (tmp_path / "few" / "b" / "0.png").rename(tmp_path / "few" / "b" / ".0.png")
    refused(run_of(tmp_path, tmp_path / "few"), "image-folder-empty", "b")


def test_settings_that_cannot_be(tmp_path):
    folder_of(tmp_path / "two")
    run = run_of(tmp_path, tmp_path / "two", augment="flip-crop", augment_repeats=True)
    assert problems(run) == []
    found, = problems(replace(run, data=replace(run.data, augment="none")))
    assert (found.code, found.where) == ("repeats-without-augmentation", "data.augment-repeats")
    for name in (None, "cifar-10", "/no/where"):
        found, = problems(replace(run, data=replace(run.data, train=name)))
        check(found, "unknown-data" if name else "train-data-missing", "cifar10", "imagenet", where="data.train")


# ---------------------------------------------------------------------- transforms

def test_the_short_side_is_resized_and_the_middle_taken():
    data = np.zeros((64, 128, 3), dtype=np.uint8)
    data[:, 32:96] = 200
    image = resize_and_crop(Image.fromarray(data),
                            28)  # 32 x 64, of which columns 18 to 45 are the middle: 16 to 47 are bright
    assert image.shape == (28, 28, 3) and (image == 200).all()
    assert resize_and_crop(Image.fromarray(data), 56)[:, 0].mean() == 200
    assert resize_and_crop(Image.fromarray(data.transpose(1, 0, 2).copy()), 28).mean() == 200
    exact = noise(32, 32, 3)
    assert np.array_equal(resize_and_crop(Image.fromarray(exact), 28), exact[2:30, 2:30])


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "CMYK", "LA", "I", "F"])
def test_all_kinds_of_images_become_three_colours(mode):
    image = Image.fromarray(noise(9, 7, 3))
    image = image.convert("L").convert(mode) if mode in ("LA", "I", "F") else image.convert(mode)
    assert resize_and_crop(image, 8).shape == (8, 8, 3)


@pytest.mark.parametrize("values", [np.array([[0, 60000]], np.uint16), np.array([[0, 60000]], np.int32),
                                    np.array([[0, 0.7]], np.float32)])
def test_more_than_eight_bits_are_refused(values):
    with pytest.raises(ValueError, match="8 bits"):
        resize_and_crop(Image.fromarray(values), 8)


def test_a_photograph_is_read_as_it_was_held(tmp_path):
    image, there = Image.fromarray(noise(12, 20, 3)), Image.Exif()
    there[0x0112] = 6
    image.save(tmp_path / "held.png", exif=there)
    assert np.array_equal(module._open_image(tmp_path / "held.png"), np.rot90(image, -1))


@pytest.mark.parametrize("shape", [(1, 1), (1, 5000), (5000, 1), (3, 2)])
def test_odd_shapes(shape):
    assert resize_and_crop(Image.fromarray(noise(*shape, 3)), 8).shape == (8, 8, 3)


def test_an_image_of_more_pixels_than_anybody_means_is_refused(tmp_path, monkeypatch):
    folder = folder_of(tmp_path / "set", size=(20, 10))
    monkeypatch.setattr(module, "_MOST_PIXELS", 199)
    refused(run_of(tmp_path, folder), "image-unreadable", 20, 10)
    with pytest.raises(ValueError, match="it has 20 x 10 pixels"):
        resize_and_crop(Image.fromarray(noise(10, 20, 3)), 8)


def test_pixels_are_normalised_and_alike_in_any_batch():
    data = noise(5, 32, 32, 3)
    plain = pixels(data, 32)
    assert torch.allclose(plain[1, 2, 3, 4], torch.tensor((data[1, 3, 4, 2] / 255 - 0.406) / 0.225).float())
    large = pixels(data, 98)
    assert large.shape == (5, 3, 98, 98) and large.is_contiguous()
    assert torch.equal(large[2:3], pixels(data[2:3], 98))
    flat = pixels(np.full((1, 32, 32, 3), 255, np.uint8), 98)
    assert torch.allclose(flat[0, 0], torch.tensor((1 - 0.485) / 0.229), atol=1e-6)
    edges = np.repeat(np.repeat(noise(1, 4, 4, 3) // 128 * 255, 8, 1), 8, 2)
    found = denormalised(pixels(edges, 98))
    assert found.min() >= -1e-6 and found.max() <= 1 + 1e-6


@pytest.mark.parametrize("size", [8, 98])
def test_resizing_is_as_pillow_does_it(size):
    image = noise(32, 32, 3) // 2 + 64  # Pillow clips to black and white between the two passes
    theirs = np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC))
    ours = (denormalised(pixels(image[None], size))[0].permute(1, 2, 0) * 255).numpy()
    assert np.abs(ours - theirs).max() < 1.5  # Pillow rounds twice


def denormalised(images):
    return images * torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1) + torch.tensor([0.485, 0.456, 0.406]).view(
        3, 1, 1)


def crops_of(image):
    """Bytes of all images that an augmentation may make of `image`."""
    pad = image.shape[0] // 8
    padded = np.pad(image, ((pad, pad), (pad, pad), (0, 0)))
    for turned in (padded, padded[:, ::-1]):
        for y in range(2 * pad + 1):
            for x in range(2 * pad + 1):
                yield turned[y:y + image.shape[0], x:x + image.shape[1]].tobytes()


def test_augmentation_mirrors_and_moves_by_the_key_alone():
    data, augment = noise(64, 16, 16, 3), FlipCrop(1, repeats=False)
    samples, epochs = np.arange(64) * 7, np.zeros(64, dtype=np.int64)
    first = augment(data, samples, epochs)
    places = [list(crops_of(image)).index(made.tobytes()) for image, made in zip(data, first, strict=True)]
    assert {place // 25 for place in places} == {0, 1} and len(set(places)) > 25
    assert len({place // 5 % 5 for place in places}) == len({place % 5 for place in places}) == 5
    assert np.array_equal(augment(data[5:9], samples[5:9], epochs[5:9]), first[5:9])
    assert (augment(data, samples, epochs + 1) != first).any((1, 2, 3)).mean() > 0.9
    assert (FlipCrop(2, repeats=False)(data, samples, epochs) != first).any((1, 2, 3)).mean() > 0.9
    again = FlipCrop(1, repeats=True)
    assert np.array_equal(again(data, samples, epochs + 3), first)


@pytest.mark.parametrize(("augment", "repeats"), [("none", False), ("flip-crop", False), ("flip-crop", True)])
def test_only_training_images_are_augmented(tmp_path, package, augment, repeats):
    run = run_of(tmp_path, "cifar10", size=32, augment=augment, augment_repeats=repeats)
    plain, prepared = prepare(run_of(tmp_path, "cifar10", size=32)), prepare(run)
    assert prepared.repeats == (augment == "none" or repeats)
    assert torch.equal(all_of(prepared.eval, 1), all_of(plain.eval))
    assert torch.equal(all_of(prepared.train, 0), all_of(prepared.train, 1)) == prepared.repeats
    assert torch.equal(all_of(prepared.train), all_of(plain.train)) == (augment == "none")
    assert (prepared.transform == plain.transform) == (augment == "none")
    assert (prepare(replace(run, seed=1)).transform == prepared.transform) == (augment == "none")
    few = prepare(replace(run, data=replace(run.data, train_samples=5)))
    assert torch.equal(all_of(few.train, 2), prepared.train.inputs(few.train.chosen, np.full(5, 2)))
