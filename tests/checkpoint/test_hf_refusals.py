"""Models that cannot be imported or exported are refused in one line, and nothing is written outside OUT or left in
it."""

import io
import json
import os
import pickle
import re
import shutil
import struct
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from hf_folders import SMALL, edit_manifest, parameters, write_checkpoint, write_model
from safetensors.torch import load_file, save_file

from ranvier.checkpoint import files
from ranvier.checkpoint.files import retain
from ranvier.checkpoint.hf import gpt2 as hf_gpt2
from ranvier.checkpoint.hf import logits, pretrained
from ranvier.checkpoint.hf.export_model import newest_whole
from ranvier.checkpoint.manifest import checksum, encode, read_manifest
from ranvier.cli.main import command, run_command
from ranvier.config.run import Transformer
from ranvier.data import tokenizer as tokenizers
from tests.errors import raises


@pytest.fixture(autouse=True)
def peerless(monkeypatch):
    """Refusals come before logits are compared, or from that comparison: transformers need not be loaded."""
    monkeypatch.setattr(logits, "available_memory_bytes", lambda: 0)


def tree(folder):
    return {path: None if path.is_dir() or path.is_symlink() or not path.is_file() else path.read_bytes()
            for path in folder.rglob("*")}


def refused(tmp_path, args, code, *facts):
    """The command fails with one line that contains the `facts`, and the disk is unchanged."""
    before = tree(tmp_path)
    with raises(code, *facts) as caught:
        command.main([str(arg) for arg in args], standalone_mode=False)
    assert "\n" not in str(caught.value) and tree(tmp_path) == before


# --- config.json -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "error"), [
    ({"model_type": "t5"}, ("unknown-model-type", "gpt2", "t5")),
    ({"model_type": ["gpt2"]}, ("unknown-model-type", "gpt2")),
    ({"activation_function": "relu"}, ("config-json-value", "activation_function", "gelu_new", "gelu_pytorch_tanh")),
    ({"layer_norm_epsilon": 1e-6}, ("config-json-value", "layer_norm_epsilon", 1e-05, 1e-06)),
    ({"layer_norm_epsilon": float("nan")}, ("config-json-value", "layer_norm_epsilon")),
    ({"tie_word_embeddings": "no"}, ("config-json-value", "tie_word_embeddings", "no")),
    ({"tie_word_embeddings": False}, ("pretrained-tensor-missing", "lm_head.weight")),
    ({"scale_attn_weights": False}, ("config-json-value", "scale_attn_weights", True)),
    ({"scale_attn_by_inverse_layer_idx": True}, ("config-json-value", "scale_attn_by_inverse_layer_idx", False)),
    ({"is_causal": False}, ("config-json-value", "is_causal", True)),
    ({"add_cross_attention": True}, ("config-json-value", "add_cross_attention", False)),
    ({"n_inner": 95}, ("gpt2-inner-size", "n_inner", 96, 95)),
    ({"n_embd": "24"}, ("config-json-invalid", "n_embd", "'24'")),
    ({"n_layer": 0}, ("config-json-invalid", "n_layer", 0)),
    ({"vocab_size": None}, ("config-json-invalid", "vocab_size")),
    ({"resid_pdrop": 1.0}, ("config-json-invalid", "resid_pdrop", 1)),
    ({"n_head": 5}, ("config-json-heads", "n_embd", 24, 5)),
    ({"n_layer": 10**30}, ("pretrained-too-few-tensors", 10**30, 28)),
    ({"n_layer": 3}, ("pretrained-too-few-tensors", "n_layer", 3, 28)),
    ({"n_layer": 1}, ("pretrained-unknown-tensors", 12)),
    ({"n_embd": 10**25, "n_head": 1}, ("pretrained-tensor-shape", "transformer.wte.weight", (300, 10**25), (300, 24))),
    ({"n_positions": 17}, ("pretrained-tensor-shape", "transformer.wpe.weight", (17, 24), (16, 24))),
])
def test_models_that_are_not_ours(tmp_path, settings, error):
    refused(tmp_path, ["import", write_model(tmp_path / "model", **settings), tmp_path / "out"], *error)


def test_a_setting_that_is_missing(tmp_path):
    model = write_model(tmp_path / "model")
    document = json.loads((model / "config.json").read_text())
    del document["n_head"]
    (model / "config.json").write_text(json.dumps(document))
    refused(tmp_path, ["import", model, tmp_path / "out"], "config-json-missing", "n_head")


@pytest.mark.parametrize(("content", "code"), [
    (None, "pretrained-file-missing"), (b"[]", "pretrained-config-not-object"),
    *((content, "pretrained-config-unreadable") for content in (
        b"{", b"[" * 100_000, b'{"n_layer": ' + b"1" * 5000 + b"}", b"\xff\xfe", b" " * ((1 << 20) + 1)))])
def test_config_files_that_are_none(tmp_path, content, code):
    model = write_model(tmp_path / "model")
    (model / "config.json").unlink()
    if content is not None:
        (model / "config.json").write_bytes(content)
    refused(tmp_path, ["import", model, tmp_path / "out"], code, "config.json")


# --- tensors ---------------------------------------------------------------------------------------------------------


def without(name):
    return {key: tensor for key, tensor in parameters().items() if key != name}


HEAD = "lm_head.weight"
NORM = "transformer.ln_f.weight"
WTE = "transformer.wte.weight"


@pytest.mark.parametrize(("tensors", "error"), [
    (lambda: without(NORM), ("pretrained-tensor-missing", NORM)),
    (lambda: parameters() | {"score.weight": torch.ones(2)}, ("pretrained-unknown-tensors", 1, "score.weight")),
    (lambda: parameters() | {"wte.weight": torch.ones(2)}, ("pretrained-unknown-tensors", 1, "wte.weight")),
    (lambda: parameters() | {NORM: torch.ones(23)}, ("pretrained-tensor-shape", NORM, (24,), (23,))),
    (lambda: parameters() | {NORM: torch.ones(24, dtype=torch.int8)}, ("pretrained-number-format", NORM, "I8")),
    (lambda: parameters() | {HEAD: parameters()[WTE] + 1}, ("pretrained-head-untied", HEAD, "tie_word_embeddings")),
    (lambda: parameters() | {HEAD: torch.ones(300, 23)}, ("pretrained-head-untied", HEAD, "tie_word_embeddings")),
    (lambda: parameters() | {NORM: torch.full((24,), float("nan"))},
     ("export-not-finite", "head.norm.weight", "float32")),
])
def test_tensors_that_do_not_fit(tmp_path, tensors, error):
    refused(tmp_path, ["import", write_model(tmp_path / "model", tensors()), tmp_path / "out"], *error)


def test_a_quantized_model_is_refused_as_such(tmp_path):
    model = write_model(tmp_path / "model", without(NORM), quantization_config={"quant_method": "gptq", "bits": 4})
    refused(tmp_path, ["import", model, tmp_path / "out"], "pretrained-tensor-missing", "is quantized (gptq)", NORM)


def test_weights_that_are_not_quantized_although_the_configuration_says_so(tmp_path, capsys):
    model = write_model(tmp_path / "model", parameters(), quantization_config={"quant_method": "gptq", "bits": 4})
    assert run_command(["import", str(model), str(tmp_path / "out")]) == 0
    assert "config.json has a quantization_config" in capsys.readouterr().out


def test_a_head_that_differs_in_its_last_row_only(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "_ROWS_BYTES", 7 * 8 * SMALL.hidden)
    head = parameters()[WTE].clone()
    head[-1, -1] += 1
    model = write_model(tmp_path / "model", parameters() | {HEAD: head})
    refused(tmp_path, ["import", model, tmp_path / "out"], "pretrained-head-untied")


def test_a_precision_that_is_too_narrow(tmp_path):
    model = write_model(tmp_path / "model", parameters() | {NORM: torch.full((24,), 1e5)})
    refused(tmp_path, ["import", model, tmp_path / "out", "--precision", "fp16"],
            "export-not-finite", "head.norm.weight", "float16", "fp32")
    run = write_checkpoint(tmp_path / "run", parameters() | {NORM: torch.full((24,), 1e5)})
    refused(tmp_path, ["export", run, tmp_path / "out", "--dtype", "fp16"],
            "export-not-finite", "head.norm.weight", "float16")


def lying(header, size=64):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * size


@pytest.mark.parametrize("content", [
    b"", b"\0" * 7, struct.pack("<Q", 1 << 62), struct.pack("<Q", 100) + b"{", lying(b"[" * 1000), lying({"a": 1}),
    lying({"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 64]}}),
    lying({"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 1 << 40]}}),
    lying({"a": {"dtype": "F32", "shape": [8], "data_offsets": [32, 64]}}),
    lying({name: {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]} for name in "ab"}),
], ids=range(10))
def test_headers_that_lie(tmp_path, content):
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").write_bytes(content)
    refused(tmp_path, ["import", model, tmp_path / "out"], "pretrained-file-damaged", "model.safetensors")


def test_a_file_that_is_cut_short(tmp_path):
    model = write_model(tmp_path / "model")
    os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 1)
    refused(tmp_path, ["import", model, tmp_path / "out"], "pretrained-file-damaged", "model.safetensors")


# --- shards ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path):
    """A model in two shards, and a function that writes its index."""
    model = write_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    placed = {name: f"{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in ("0.safetensors", "1.safetensors"):
        save_file({name: tensor for name, tensor in tensors.items() if placed[name] == file}, model / file)

    def index(changes=(), document=None):
        (model / "model.safetensors.index.json").write_text(json.dumps(
            {"weight_map": {**placed, **dict(changes)}} if document is None else document))
        return model

    return index


def test_shards_that_are_right(tmp_path, sharded):
    assert run_command(["import", str(sharded()), str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("file", ["../../x", "../x.safetensors", "/etc/passwd", "..", "", ".", "a/b.safetensors",
                                  "\0.safetensors", "x.safetensors\n", ".safetensors", "pytorch_model.bin"])
def test_indices_that_name_other_places(tmp_path, sharded, file):
    save_file({NORM: torch.ones(24)}, tmp_path / "x.safetensors")
    refused(tmp_path, ["import", sharded({NORM: file}), tmp_path / "out"],
            "pretrained-index-names-other-files")


@pytest.mark.parametrize(("changes", "document", "error"), [
    ({}, {"weight_map": 3}, ["pretrained-index-without-map"]), ({}, {}, ["pretrained-index-without-map"]),
    ({}, {"weight_map": {NORM: 3}}, ["pretrained-index-without-map"]), ({}, [], ["pretrained-config-not-object"]),
    ({NORM: "2.safetensors"}, None, ["pretrained-file-missing", "2.safetensors"]),
    ({"more": "0.safetensors"}, None, ["pretrained-index-wrong", "more"]),
    ({WTE: "0.safetensors", "transformer.wpe.weight": "0.safetensors"}, None, ["pretrained-index-wrong"]),
    ({}, {"weight_map": {}}, ["pretrained-too-few-tensors", "n_layer", 2])])
def test_indices_that_are_wrong(tmp_path, sharded, changes, document, error):
    refused(tmp_path, ["import", sharded(changes, document), tmp_path / "out"], *error)


# --- places ----------------------------------------------------------------------------------------------------------


def test_folders_without_a_model(tmp_path):
    refused(tmp_path, ["import", tmp_path / "gone", tmp_path / "out"], "pretrained-file-missing", "gone", "config.json")
    (tmp_path / "file").write_text("")
    refused(tmp_path, ["import", tmp_path / "file", tmp_path / "out"], "pretrained-file-missing", "config.json")
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    refused(tmp_path, ["import", model, tmp_path / "out"], "pretrained-without-weights")
    for name, told in (("model.fp16.safetensors", "Rename"), ("pytorch_model.bin.index.json", "save_pretrained"),
                       ("model.gguf", "itself")):  # each takes precedence over the ones above
        (model / name).write_text("")
        refused(tmp_path, ["import", model, tmp_path / "out"], "pretrained-without-weights", name, told)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_links_that_lead_elsewhere(tmp_path, name):
    model = write_model(tmp_path / "model")
    shutil.move(model / name, tmp_path / name)
    for target in (f"../{name}", tmp_path / name, "/dev/zero", name):
        (model / name).symlink_to(target)
        refused(tmp_path, ["import", model, tmp_path / "out"], "pretrained-file-unreadable", name)
        (model / name).unlink()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_is_no_plain_file(tmp_path, name):
    model = write_model(tmp_path / "model")
    (model / name).unlink()
    (model / name).mkdir()
    refused(tmp_path, ["import", model, tmp_path / "out"], "pretrained-file-unreadable", name)
    (model / name).rmdir()
    os.mkfifo(model / name)
    refused(tmp_path, ["import", model, tmp_path / "out"], "pretrained-file-unreadable", name)


# --- pytorch_model.bin -----------------------------------------------------------------------------------------------


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("hostile",)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(("content", "error"), [
    (lambda: {"x": Hostile()}, ["pickle-unreadable"]), (lambda: [torch.ones(3)], ["pickle-not-tensors"]),
    (lambda: {3: torch.ones(3)}, ["pickle-not-tensors"]), (lambda: {"x": "y"}, ["pickle-not-tensors"]),
    (lambda: {"x": torch.ones(3).to_sparse()}, ["pickle-not-tensors"]),
    (lambda: parameters() | {WTE: torch.ones(1, 1).expand(300, 24)}, ["pickle-claims-more"]),
    (lambda: {**parameters(), NORM: torch.ones(24, dtype=torch.int32)}, ["pretrained-number-format", "torch.int32"]),
    (lambda: without(NORM), ["pretrained-tensor-missing", NORM])])
def test_pickles_of_strangers(tmp_path, monkeypatch, content, error, legacy):
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    torch.save(content(), model / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    if error == ["pickle-claims-more"]:
        tensors = content()
        torch.save({name: torch.ones(1).expand(tensor.shape) for name, tensor in tensors.items()},
                   model / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    refused(tmp_path, ["import", model, tmp_path / "out"], *error)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"PK\3\4" + b"\0" * 100, pickle.dumps(Hostile()),
                                     pickle.dumps({"x": 3})], ids=range(5))
def test_files_that_are_no_pickles_of_torch(tmp_path, monkeypatch, content):
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    (model / "pytorch_model.bin").write_bytes(content)
    refused(tmp_path, ["import", model, tmp_path / "out"], "pickle-unreadable")


def test_a_torch_file_whose_zip_is_cut_short(tmp_path):
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    file = io.BytesIO()
    torch.save(parameters(), file)
    (model / "pytorch_model.bin").write_bytes(file.getvalue()[:-100])
    refused(tmp_path, ["import", model, tmp_path / "out"], "pickle-unreadable")


# --- OUT -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["import", "export"])
def test_out_must_be_free(tmp_path, monkeypatch, way):
    source = write_model(tmp_path / "model") if way == "import" else write_checkpoint(tmp_path / "run")
    full, file, link, nowhere = (tmp_path / name for name in ("full", "file", "link", "nowhere"))
    (full / "more").mkdir(parents=True)
    file.write_text("")
    (tmp_path / "empty").mkdir()
    link.symlink_to(tmp_path / "empty")
    nowhere.symlink_to(tmp_path / "gone")
    for out in (full, file, link, nowhere, source, full / ".."):
        refused(tmp_path, [way, source, out], "output-exists")
    refused(tmp_path, [way, source, file / "out"], "output-not-writable")
    refused(tmp_path, [way, tmp_path / "gone", "/proc/out"], "output-not-writable")  # before anything is read
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage(1000))
    refused(tmp_path, [way, source, tmp_path / "out"], "disk-too-small", "1,000")
    monkeypatch.undo()
    monkeypatch.setattr(logits, "available_memory_bytes", lambda: 0)
    assert run_command([way, str(source), str(tmp_path / "empty")]) == 0
    assert run_command([way, str(source), str(tmp_path / "new/folders/out")]) == 0


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "Ctrl-C"])
@pytest.mark.parametrize("way", ["import", "export"])
def test_what_was_begun_goes_away(tmp_path, capsys, monkeypatch, way, error):
    source = write_model(tmp_path / "model") if way == "import" else write_checkpoint(tmp_path / "run")
    before = tree(tmp_path)

    def fails(*args, **options):
        raise error

    monkeypatch.setattr(logits, "compare", fails)
    args = [way, source, tmp_path / "out"]
    if isinstance(error, OSError):
        refused(tmp_path, args, "output-not-writable", "No space left on device")
    else:
        assert run_command([str(arg) for arg in args]) == 130
    assert tree(tmp_path) == before


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_runs_without_a_checkpoint(tmp_path):
    refused(tmp_path, ["export", tmp_path / "gone", tmp_path / "out"], "folder-without-checkpoint", "gone")
    (tmp_path / "run/checkpoint").mkdir(parents=True)
    refused(tmp_path, ["export", tmp_path / "run", tmp_path / "out"], "folder-without-checkpoint", "run")


def test_the_newest_whole_checkpoint(tmp_path, capsys):
    run = write_checkpoint(tmp_path / "run")
    old, new = run / "checkpoint/step-0", run / "checkpoint/step-7"
    shutil.copytree(old, new)
    refused(tmp_path, ["export", new, tmp_path / "out"], "checkpoint-renamed", 0)
    (new / "manifest.json").write_bytes(encode(replace(read_manifest(old), step=7)))
    part = bytearray((new / "part-00000.safetensors").read_bytes())
    part[-5] ^= 1
    (new / "part-00000.safetensors").write_bytes(part)
    refused(tmp_path, ["export", new, tmp_path / "out"], "checkpoint-file-changed", "part-00000.safetensors")
    assert run_command(["export", str(run), str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"left out: checkpoint .*step-7: part-00000\.safetensors has been changed", out)
    assert re.search(r"step-0, step 0: ", out)
    (old / "manifest.json").write_text("{")
    refused(tmp_path, ["export", run, tmp_path / "out2"], "checkpoint-file-changed", "part-00000.safetensors")


@pytest.mark.parametrize(("edit", "error"), [
    (lambda d: d["about"].pop("run"), ["export-model-unknown", "about.run.model"]),
    (lambda d: d["about"].update(run=3), ["export-model-unknown"]),
    (lambda d: d["about"]["run"].pop("model"), ["export-model-unknown"]),
    (lambda d: d["about"]["run"]["model"].update(hidden="24"), ["export-model-unknown", "about.run.model.hidden"]),
    (lambda d: d["about"]["run"]["model"].update(more=1), ["export-model-unknown", "about.run.model.more"]),
    (lambda d: d["about"]["run"]["model"].update(heads=5), ["export-model-impossible", "model.heads"]),
    (lambda d: d["about"]["run"]["model"].update(num_layers=10**12), ["export-too-few-parameters", 10**12, 28]),
    (lambda d: d["about"]["run"]["model"].update(num_layers=1), ["export-parameters-differ", "layer1"]),
    (lambda d: d["about"]["run"]["model"].update(hidden=48), ["export-parameter-shape", (300, 48), (300, 24)]),
    (lambda d: d["about"]["run"]["model"].update(hidden=3 * 10**18), ["export-parameter-shape", (300, 24)]),
    (lambda d: d["tensors"]["parameter"].pop("head.norm.bias"), ["export-parameters-differ", "head.norm.bias"]),
])
def test_checkpoints_of_other_models(tmp_path, edit, error):
    run = write_checkpoint(tmp_path / "run")
    edit_manifest(run / "checkpoint/step-0", edit)
    refused(tmp_path, ["export", run, tmp_path / "out"], *error)


def test_checkpoints_with_whole_numbers(tmp_path):
    run = write_checkpoint(tmp_path / "run")
    step = run / "checkpoint/step-0"
    tensors = load_file(step / "part-00000.safetensors")
    save_file({**tensors, "parameter/head.norm.bias": torch.ones(24, dtype=torch.int32)},
              step / "part-00000.safetensors")

    def edit(document):
        document["tensors"]["parameter"]["head.norm.bias"]["dtype"] = "int32"
        document["files"][0] |= {"crc32": checksum(step / "part-00000.safetensors"),
                                 "size_bytes": (step / "part-00000.safetensors").stat().st_size}

    edit_manifest(step, edit)
    refused(tmp_path, ["export", run, tmp_path / "out"], "export-number-format", "head.norm.bias", "int32")


def test_tokenizers_that_do_not_fit(tmp_path, capsys):
    config = Transformer(num_layers=1, hidden=8, heads=1, vocab=270, sequence=4)
    run = write_checkpoint(tmp_path / "run", parameters(config), config)
    tokenizers.train(["some text to learn from, and some more text"] * 5, 280).save(run / "tokenizer.json")
    refused(tmp_path, ["export", run, tmp_path / "out"], "tokenizer-above-model", 270, 280)
    model = tmp_path / "run-model"
    shutil.copy(run / "tokenizer.json", model)
    assert run_command(["import", str(model), str(tmp_path / "one")]) == 0
    assert "left out" in capsys.readouterr().out and not (tmp_path / "one/tokenizer.json").exists()
    for place in (run, model):
        (place / "tokenizer.json").write_text("{}")
    refused(tmp_path, ["export", run, tmp_path / "out"], "not-byte-level-bpe", "run/tokenizer.json")
    assert run_command(["import", str(model), str(tmp_path / "two")]) == 0
    assert re.search(r"left out: .*tokenizer\.json is not a byte-level BPE", capsys.readouterr().out)
    refused(tmp_path, ["export", run, tmp_path / "out", "--tokenizer", tmp_path / "gone.json"], "not-byte-level-bpe")


def test_shapes_are_those_of_the_model():
    from ranvier.models.gpt import gpt

    blocks = {name: build() for name, build in gpt(SMALL).blocks.items()}
    found = {f"{block}.{name}": tuple(parameter.shape) for block, module in blocks.items()
             for name, parameter in module.named_parameters()}
    shapes = {name: place.shape for name, place in hf_gpt2.places(SMALL).items()}
    assert shapes | {"head.projection.weight": shapes["embedding.token.weight"]} == found


def test_a_copy_under_another_step_counts_for_nothing(tmp_path):
    run = write_checkpoint(tmp_path / "run")
    folder, manifest = run / "checkpoint", read_manifest(run / "checkpoint/step-0")
    for step in (1, 2, 3):
        shutil.copytree(folder / "step-0", folder / f"step-{step}")
        (folder / f"step-{step}/manifest.json").write_bytes(encode(replace(manifest, step=step)))
    shutil.copytree(folder / "step-1", folder / "step-9999")
    shutil.rmtree(folder / "step-2")
    shutil.copytree(folder / "step-1", folder / "step-2")
    with raises("checkpoint-renamed", where=f"checkpoint {folder / 'step-9999'}", value="step-9999"):
        read_manifest(folder / "step-9999")
    told = []
    assert newest_whole(run, told.append).folder == folder / "step-3" and "step-9999" in told[0]
    retain(folder, 3, keep=2, keep_every=0)
    assert {path.name for path in folder.glob("step-*")} == {"step-1", "step-2", "step-3", "step-9999"}
    retain(folder, 3, keep=1, keep_every=0)
    assert {path.name for path in folder.glob("step-*")} == {"step-3", "step-9999"}
