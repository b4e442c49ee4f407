"""A manifest is not trusted: entries that are duplicate, impossible or changed are refused."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ranvier.checkpoint.checkpoints import Checkpoints
from ranvier.checkpoint.files import publish
from ranvier.checkpoint.manifest import MANIFEST, Saved, find, read_manifest, run_folders
from ranvier.mesh import Mesh
from tests.checkpoint.anywhere import on, train, write_manifest
from tests.errors import raises


@pytest.fixture(scope="module")
def one_checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")

    def save(engine):
        train(engine, 1)
        checkpoints = Checkpoints(engine, folder)
        checkpoints.save()
        checkpoints.wait()

    on(Mesh(), save)
    return folder / "step-1"


def a_piece_twice(document):
    tensors = document["tensors"]["parameter"]
    tensors["layer1.mlp.fc1.bias"]["pieces"][0][1] = tensors["layer0.mlp.fc1.bias"]["pieces"][0][1]
    return "of layer1.mlp.fc1.bias has a piece that is listed twice: piece-"


def many_dims(document):
    document["tensors"]["parameter"]["layer0.mlp.fc1.bias"]["shape"] = [32, *[1] * 40]
    return "has the impossible shape (32, 1, 1"


def strides_behind_a_zero(document):
    document["tensors"]["parameter"]["none"] = {"dtype": "float32", "shape": [0, 1 << 40, 1 << 40], "pieces": []}
    return "has the impossible shape (0, "


def a_scale_of_nothing(document):
    document["loss_scale"] = {"scale": 0.0, "window": 1, "good_steps": 0, "skipped_steps": 0}
    return "loss_scale.scale: Input should be greater than 0"


@pytest.mark.parametrize(("change", "code"), [
    (a_piece_twice, "manifest-contradicts-itself"), (many_dims, "manifest-contradicts-itself"),
    (strides_behind_a_zero, "manifest-contradicts-itself"), (a_scale_of_nothing, "manifest-malformed")])
def test_a_manifest_that_hides_something(tmp_path, one_checkpoint, change, code):
    folder = shutil.copytree(one_checkpoint, tmp_path / "step-1")
    document = json.loads((folder / MANIFEST).read_text())
    message = change(document)
    write_manifest(folder, document)
    with raises(code) as caught:
        read_manifest(folder)
    assert message in caught.value.what


def test_a_manifest_whose_digits_have_changed(tmp_path, one_checkpoint):
    """White space may change, so that a manifest can be reformatted in an editor."""
    folder = shutil.copytree(one_checkpoint, tmp_path / "step-1")
    document = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(document, indent=2))
    assert read_manifest(folder) == read_manifest(one_checkpoint)
    (folder / MANIFEST).write_text(json.dumps(document | {"optimizer_steps": 3}))
    with raises("manifest-changed", "manifest.json"):
        read_manifest(folder)


def test_what_is_no_manifest_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / MANIFEST)
    with raises("manifest-unreadable", "manifest.json"):
        read_manifest(tmp_path)


def test_a_box_beyond_the_tensor(one_checkpoint):
    for box in (((0, 33),), ((0, 1), (0, 1))):
        with raises("saved-shape-too-small", "layer0.mlp.fc1.bias", 32):
            Saved(one_checkpoint).read("parameter", "layer0.mlp.fc1.bias", box)


def test_a_part_that_is_a_pipe_is_not_opened(tmp_path, one_checkpoint):
    folder = shutil.copytree(one_checkpoint, tmp_path / "step-1")
    (folder / "part-00000.safetensors").unlink()
    os.mkfifo(folder / "part-00000.safetensors")
    assert [error.what for error in Saved(folder).damage()] == ["part-00000.safetensors is missing"]
    with raises("checkpoint-file-missing", "part-00000.safetensors"):
        Saved(folder).read("parameter", "layer0.mlp.fc1.bias")


def test_a_size_that_no_file_has_is_not_allocated(tmp_path, one_checkpoint):
    folder = shutil.copytree(one_checkpoint, tmp_path / "step-1")
    document = json.loads((folder / MANIFEST).read_text())
    document["files"][0]["size_bytes"] = 1 << 61
    tensor = document["tensors"]["parameter"]["layer0.mlp.fc1.bias"]
    tensor |= {"shape": [1 << 50], "pieces": [[0, tensor["pieces"][0][1], [[0, 1 << 50]]]]}
    write_manifest(folder, document)
    with raises("saved-shape", "part-00000.safetensors", "manifest.json"):
        Saved(folder).read("parameter", "layer0.mlp.fc1.bias")


@pytest.mark.parametrize("path", ["a\0b", "x" * 300])
def test_names_that_no_checkpoint_can_have(path):
    assert find(Path(path)) == []


def test_settings_and_tokenizer_are_looked_for_in_the_checkpoints_own_run(tmp_path):
    """That run is the folder above, also if the checkpoint itself is named; a copy elsewhere has no run above it."""
    run, copy = tmp_path / "run", tmp_path / "copies" / "one" / "step-1"
    assert run in run_folders(run / "checkpoint" / "step-1", run / "checkpoint" / "step-1")
    assert run_folders(copy, copy) == [copy]


def test_what_is_not_published(tmp_path, one_checkpoint):
    folder = shutil.copytree(one_checkpoint, tmp_path / "unfinished")
    manifest = read_manifest(one_checkpoint)
    with raises("checkpoint-would-be-damaged", where=str(tmp_path / "step-1")):
        publish(folder, tmp_path / "step-1", replace(manifest, files=()))
    (folder / manifest.files[0].name).write_bytes(b"short")
    problem = next(Saved(folder).damage())
    assert (problem.code, problem.value) == ("checkpoint-file-cut-off", 5)
    with raises("file-not-seen", where=str(folder / manifest.files[0].name)):
        publish(folder, tmp_path / "step-1", manifest)
    assert not (tmp_path / "step-1").exists()
