"""What cannot be imported or exported is refused in one line, and nothing is written outside OUT, or left in it."""

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

from ranvier.checkpoint import new_folder
from ranvier.checkpoint.files import retain
from ranvier.checkpoint.hf import gpt2 as hf_gpt2
from ranvier.checkpoint.hf import logits, pretrained
from ranvier.checkpoint.hf.export_model import newest_whole
from ranvier.checkpoint.manifest import encode, read_manifest
from ranvier.checkpoint.saved import checksum
from ranvier.cli.main import run_command
from ranvier.config.run import Transformer
from ranvier.data import tokenizer as tokenizers
from ranvier.errors import CheckpointError


@pytest.fixture(autouse=True)
def peerless(monkeypatch):
    """What is refused is refused before logits are compared, or by that: transformers need not be loaded."""
    monkeypatch.setattr(logits, "available_memory_bytes", lambda: 0)


def tree(folder):
    return {path: None if path.is_dir() or path.is_symlink() or not path.is_file() else path.read_bytes()
            for path in folder.rglob("*")}


def refused(capsys, tmp_path, args, text):
    """The command fails with one line that has `text`, and the disk is as it was."""
    before = tree(tmp_path)
    assert run_command([str(arg) for arg in args]) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(rf"ranvier: error: .*{text}.*\n", err), err
    assert tree(tmp_path) == before


# --- config.json -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "text"), [
    ({"model_type": "t5"}, r"model_type in config\.json: must be gpt2, .* \(got 't5'\)"),
    ({"model_type": ["gpt2"]}, r"model_type in config\.json: must be gpt2, "),
    ({"activation_function": "relu"}, r"activation_function in config\.json: must be gelu_new or gelu_pytorch_tanh"),
    ({"layer_norm_epsilon": 1e-6}, r"layer_norm_epsilon in config\.json: must be 1e-05 \(got 1e-06\)"),
    ({"layer_norm_epsilon": float("nan")}, r"layer_norm_epsilon in config\.json"),
    ({"tie_word_embeddings": "no"}, r"tie_word_embeddings in config\.json: must be True or False \(got 'no'\)"),
    ({"tie_word_embeddings": False}, r"has no tensor lm_head\.weight"),
    ({"scale_attn_weights": False}, r"scale_attn_weights in config\.json: must be True"),
    ({"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx in config\.json: must be False"),
    ({"add_cross_attention": True}, r"add_cross_attention in config\.json: must be False"),
    ({"n_inner": 95}, r"n_inner in config\.json: must be null or 4 n_embd = 96 \(got 95\)"),
    ({"n_embd": "24"}, r"n_embd in config\.json: is invalid: Input should be a valid integer \(got '24'\)"),
    ({"n_layer": 0}, r"n_layer in config\.json: is invalid: .*greater than or equal to 1 \(got 0\)"),
    ({"vocab_size": None}, r"vocab_size in config\.json: is invalid"),
    ({"resid_pdrop": 1.0}, r"resid_pdrop in config\.json: is invalid: .*less than 1"),
    ({"n_head": 5}, r"n_head in config\.json: does not divide n_embd 24 \(got 5\)"),
    ({"n_layer": 10**30}, r"model .*model: has too few tensors for n_layer 10+ \(got 28\)"),
    ({"n_layer": 3}, r"has too few tensors for n_layer 3 \(got 28\)"),
    ({"n_layer": 1}, r"has 12 tensors that GPT-2's language model does not have, transformer\.h\.1\.\S+ among them"),
    ({"n_embd": 10**25, "n_head": 1}, r"has a tensor transformer\.wte\.weight of another shape than config\.json's "
                                      r"\(300, 10+\) \(got \(300, 24\)\)"),
    ({"n_positions": 17}, r"transformer\.wpe\.weight of another shape than config\.json's \(17, 24\) \(got \(16, 24\)"),
])
def test_models_that_are_not_ours(tmp_path, capsys, settings, text):
    refused(capsys, tmp_path, ["import", write_model(tmp_path / "model", **settings), tmp_path / "out"], text)


def test_a_setting_that_is_missing(tmp_path, capsys):
    model = write_model(tmp_path / "model")
    document = json.loads((model / "config.json").read_text())
    del document["n_head"]
    (model / "config.json").write_text(json.dumps(document))
    refused(capsys, tmp_path, ["import", model, tmp_path / "out"], r"n_head in config\.json: is missing")


@pytest.mark.parametrize(("content", "text"), [
    (None, r"has no file config\.json"), (b"{", r"has a config\.json that cannot be read"),
    (b"[]", r"config\.json that is not a JSON object"), (b"[" * 100_000, r"config\.json that cannot be read"),
    (b'{"n_layer": ' + b"1" * 5000 + b"}", r"config\.json that cannot be read"),
    (b"\xff\xfe", r"config\.json that cannot be read"),
    (b" " * ((1 << 20) + 1), r"config\.json that cannot be read: has more than")])
def test_config_files_that_are_none(tmp_path, capsys, content, text):
    model = write_model(tmp_path / "model")
    (model / "config.json").unlink()
    if content is not None:
        (model / "config.json").write_bytes(content)
    refused(capsys, tmp_path, ["import", model, tmp_path / "out"], text)


# --- tensors ---------------------------------------------------------------------------------------------------------


def without(name):
    return {key: tensor for key, tensor in parameters().items() if key != name}


HEAD = "lm_head.weight"
NORM = "transformer.ln_f.weight"
WTE = "transformer.wte.weight"


@pytest.mark.parametrize(("tensors", "text"), [
    (lambda: without(NORM), rf"has no tensor {NORM}"),
    (lambda: parameters() | {"score.weight": torch.ones(2)}, r"has 1 tensors that .*, score\.weight among them"),
    (lambda: parameters() | {"wte.weight": torch.ones(2)}, r"wte\.weight among them"),
    (lambda: parameters() | {NORM: torch.ones(23)}, rf"{NORM} of another shape than .*\(24,\) \(got \(23,"),
    (lambda: parameters() | {NORM: torch.ones(24, dtype=torch.int8)}, rf"{NORM} in a number format .* \(got 'I8'\)"),
    (lambda: parameters() | {HEAD: parameters()[WTE] + 1}, r"not its token embedding .*: tie_word_embeddings is not"),
    (lambda: parameters() | {HEAD: torch.ones(300, 23)}, r"not its token embedding .*: tie_word_embeddings is not"),
    (lambda: parameters() | {NORM: torch.full((24,), float("nan"))},
     r"head\.norm\.weight in .*model: has a value that is NaN or infinite in float32"),
])
def test_tensors_that_do_not_fit(tmp_path, capsys, tensors, text):
    refused(capsys, tmp_path, ["import", write_model(tmp_path / "model", tensors()), tmp_path / "out"], text)


def test_a_head_that_differs_in_its_last_row_only(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pretrained, "_ROWS_BYTES", 7 * 8 * SMALL.hidden)
    head = parameters()[WTE].clone()
    head[-1, -1] += 1
    model = write_model(tmp_path / "model", parameters() | {HEAD: head})
    refused(capsys, tmp_path, ["import", model, tmp_path / "out"], "that is not its token embedding")


def test_a_precision_that_is_too_narrow(tmp_path, capsys):
    model = write_model(tmp_path / "model", parameters() | {NORM: torch.full((24,), 1e5)})
    refused(capsys, tmp_path, ["import", model, tmp_path / "out", "--precision", "fp16"],
            r"head\.norm\.weight in .*: has a value that is NaN or infinite in float16\. .* such as fp32")
    run = write_checkpoint(tmp_path / "run", parameters() | {NORM: torch.full((24,), 1e5)})
    refused(capsys, tmp_path, ["export", run, tmp_path / "out", "--dtype", "fp16"],
            r"head\.norm\.weight in .*: has a value that is NaN or infinite in float16")


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
def test_headers_that_lie(tmp_path, capsys, content):
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").write_bytes(content)
    refused(capsys, tmp_path, ["import", model, tmp_path / "out"], r"has a damaged file model\.safetensors")


def test_a_file_that_is_cut_short(tmp_path, capsys):
    model = write_model(tmp_path / "model")
    os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 1)
    refused(capsys, tmp_path, ["import", model, tmp_path / "out"], r"has a damaged file model\.safetensors")


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
def test_indices_that_name_other_places(tmp_path, capsys, sharded, file):
    save_file({NORM: torch.ones(24)}, tmp_path / "x.safetensors")
    refused(capsys, tmp_path, ["import", sharded({NORM: file}), tmp_path / "out"],
            r"index\.json that names something else than a file beside it \(got ")


@pytest.mark.parametrize(("changes", "document", "text"), [
    ({}, {"weight_map": 3}, "without a weight_map of file names"), ({}, {}, "without a weight_map of file names"),
    ({}, {"weight_map": {NORM: 3}}, "without a weight_map of file names"),
    ({}, [], "that is not a JSON object"),
    ({NORM: "2.safetensors"}, None, r"has no file 2\.safetensors"),
    ({"more": "0.safetensors"}, None, r"index\.json that is wrong about more"),
    ({WTE: "0.safetensors", "transformer.wpe.weight": "0.safetensors"}, None, r"that is wrong about transformer\.w"),
    ({}, {"weight_map": {}}, "has too few tensors for n_layer 2")])
def test_indices_that_are_wrong(tmp_path, capsys, sharded, changes, document, text):
    refused(capsys, tmp_path, ["import", sharded(changes, document), tmp_path / "out"], text)


# --- places ----------------------------------------------------------------------------------------------------------


def test_folders_without_a_model(tmp_path, capsys):
    refused(capsys, tmp_path, ["import", tmp_path / "gone", tmp_path / "out"], r"gone: has no file config\.json")
    (tmp_path / "file").write_text("")
    refused(capsys, tmp_path, ["import", tmp_path / "file", tmp_path / "out"], r"file: has no file config\.json")
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    refused(capsys, tmp_path, ["import", model, tmp_path / "out"],
            r"has neither model\.safetensors, model\.safetensors\.index\.json nor pytorch_model\.bin")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_links_that_lead_elsewhere(tmp_path, capsys, name):
    model = write_model(tmp_path / "model")
    shutil.move(model / name, tmp_path / name)
    for target in (f"../{name}", tmp_path / name, "/dev/zero", name):
        (model / name).symlink_to(target)
        refused(capsys, tmp_path, ["import", model, tmp_path / "out"],
                rf"has a file {name} that cannot be read: is a (link that leads out of its folder|loop of links)")
        (model / name).unlink()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_is_no_plain_file(tmp_path, capsys, name):
    model = write_model(tmp_path / "model")
    (model / name).unlink()
    (model / name).mkdir()
    refused(capsys, tmp_path, ["import", model, tmp_path / "out"], rf"has a file {name} that cannot be read: is not")
    (model / name).rmdir()
    os.mkfifo(model / name)
    refused(capsys, tmp_path, ["import", model, tmp_path / "out"], rf"has a file {name} that cannot be read: is not")


# --- pytorch_model.bin -----------------------------------------------------------------------------------------------


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("hostile",)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(("content", "text"), [
    (lambda: {"x": Hostile()}, "not a plain dict of tensors: "),
    (lambda: [torch.ones(3)], "not a plain dict of tensors"),
    (lambda: {3: torch.ones(3)}, "not a plain dict of tensors"),
    (lambda: {"x": "y"}, "not a plain dict of tensors"),
    (lambda: {"x": torch.ones(3).to_sparse()}, "not a plain dict of tensors"),
    (lambda: parameters() | {WTE: torch.ones(1, 1).expand(300, 24)}, "claims more numbers than it has"),
    (lambda: {**parameters(), NORM: torch.ones(24, dtype=torch.int32)}, r"in a number format .* 'torch\.int32'"),
    (lambda: without(NORM), rf"has no tensor {NORM}")])
def test_pickles_of_strangers(tmp_path, capsys, monkeypatch, content, text, legacy):
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    torch.save(content(), model / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    if text.startswith("claims"):
        tensors = content()
        torch.save({name: torch.ones(1).expand(tensor.shape) for name, tensor in tensors.items()},
                   model / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    refused(capsys, tmp_path, ["import", model, tmp_path / "out"], text)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"PK\3\4" + b"\0" * 100, pickle.dumps(Hostile()),
                                     pickle.dumps({"x": 3})], ids=range(5))
def test_files_that_are_no_pickles_of_torch(tmp_path, capsys, monkeypatch, content):
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    (model / "pytorch_model.bin").write_bytes(content)
    refused(capsys, tmp_path, ["import", model, tmp_path / "out"], "not a plain dict of tensors")


def test_a_torch_file_whose_zip_is_cut_short(tmp_path, capsys):
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    file = io.BytesIO()
    torch.save(parameters(), file)
    (model / "pytorch_model.bin").write_bytes(file.getvalue()[:-100])
    refused(capsys, tmp_path, ["import", model, tmp_path / "out"], "not a plain dict of tensors")


# --- OUT -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["import", "export"])
def test_out_must_be_free(tmp_path, capsys, monkeypatch, way):
    source = write_model(tmp_path / "model") if way == "import" else write_checkpoint(tmp_path / "run")
    full, file, link, nowhere = (tmp_path / name for name in ("full", "file", "link", "nowhere"))
    (full / "more").mkdir(parents=True)
    file.write_text("")
    (tmp_path / "empty").mkdir()
    link.symlink_to(tmp_path / "empty")
    nowhere.symlink_to(tmp_path / "gone")
    for out in (full, file, link, nowhere, source, full / ".."):
        refused(capsys, tmp_path, [way, source, out], "is there already, and is not an empty folder")
    refused(capsys, tmp_path, [way, source, file / "out"], r"out: cannot be")
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(new_folder.shutil, "disk_usage", lambda path: usage(1000))
    refused(capsys, tmp_path, [way, source, tmp_path / "out"], r"out: would have [\d,]+ bytes, and the disk has 1,000")
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
    code = run_command([way, str(source), str(tmp_path / "out")])
    assert code == (2 if isinstance(error, OSError) else 130)
    if code == 2:
        assert "out: cannot be written: No space left on device" in capsys.readouterr().err
    assert tree(tmp_path) == before


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_runs_without_a_checkpoint(tmp_path, capsys):
    refused(capsys, tmp_path, ["export", tmp_path / "gone", tmp_path / "out"], "gone: has no checkpoint")
    (tmp_path / "run/checkpoint").mkdir(parents=True)
    refused(capsys, tmp_path, ["export", tmp_path / "run", tmp_path / "out"], "run: has no checkpoint")


def test_the_newest_whole_checkpoint(tmp_path, capsys):
    run = write_checkpoint(tmp_path / "run")
    old, new = run / "checkpoint/step-0", run / "checkpoint/step-7"
    shutil.copytree(old, new)
    refused(capsys, tmp_path, ["export", new, tmp_path / "out"], r"is of step 0, a copy under another name")
    (new / "manifest.json").write_bytes(encode(replace(read_manifest(old), step=7)))
    part = bytearray((new / "part-00000.safetensors").read_bytes())
    part[-5] ^= 1
    (new / "part-00000.safetensors").write_bytes(part)
    refused(capsys, tmp_path, ["export", new, tmp_path / "out"], r"part-00000\.safetensors has been changed")
    assert run_command(["export", str(run), str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"left out: checkpoint .*step-7: part-00000\.safetensors has been changed", out)
    assert re.search(r"step-0, step 0: ", out)
    (old / "manifest.json").write_text("{")
    refused(capsys, tmp_path, ["export", run, tmp_path / "out2"], r"part-00000\.safetensors has been changed")



@pytest.mark.parametrize(("edit", "text"), [
    (lambda d: d["about"].pop("run"), "does not say which model it is of: about.run.model"),
    (lambda d: d["about"].update(run=3), "does not say which model it is of"),
    (lambda d: d["about"]["run"].pop("model"), "does not say which model it is of"),
    (lambda d: d["about"]["run"]["model"].update(hidden="24"), r"about\.run\.model\.hidden: Input should be"),
    (lambda d: d["about"]["run"]["model"].update(more=1), r"about\.run\.model\.more: Unexpected"),
    (lambda d: d["about"]["run"]["model"].update(heads=5), r"is of no possible model: model\.heads does not divide"),
    (lambda d: d["about"]["run"]["model"].update(num_layers=10**12), r"has too few parameters for 10+ layers \(got 28"),
    (lambda d: d["about"]["run"]["model"].update(num_layers=1), r"has a parameter layer1\."),
    (lambda d: d["about"]["run"]["model"].update(hidden=48), r"of another shape than \(300, 48\) \(got \(300, 24\)\)"),
    (lambda d: d["about"]["run"]["model"].update(hidden=3 * 10**18), r"of another shape than"),
    (lambda d: d["tensors"]["parameter"].pop("head.norm.bias"), r"lacks the parameter head\.norm\.bias"),
])
def test_checkpoints_of_other_models(tmp_path, capsys, edit, text):
    run = write_checkpoint(tmp_path / "run")
    edit_manifest(run / "checkpoint/step-0", edit)
    refused(capsys, tmp_path, ["export", run, tmp_path / "out"], text)


def test_checkpoints_with_whole_numbers(tmp_path, capsys):
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
    refused(capsys, tmp_path, ["export", run, tmp_path / "out"], r"has a parameter head\.norm\.bias in int32")


def test_tokenizers_that_do_not_fit(tmp_path, capsys):
    config = Transformer(num_layers=1, hidden=8, heads=1, vocab=270, sequence=4)
    run = write_checkpoint(tmp_path / "run", parameters(config), config)
    tokenizers.train(["some text to learn from, and some more text"] * 5, 280).save(run / "tokenizer.json")
    refused(capsys, tmp_path, ["export", run, tmp_path / "out"],
            r"run/tokenizer\.json: has more tokens than the model, whose vocabulary is 270 \(got 280\)")
    model = tmp_path / "run-model"
    shutil.copy(run / "tokenizer.json", model)
    assert run_command(["import", str(model), str(tmp_path / "one")]) == 0
    assert "left out" in capsys.readouterr().out and not (tmp_path / "one/tokenizer.json").exists()
    for place in (run, model):
        (place / "tokenizer.json").write_text("{}")
    refused(capsys, tmp_path, ["export", run, tmp_path / "out"], r"run/tokenizer\.json: is not a byte-level BPE")
    assert run_command(["import", str(model), str(tmp_path / "two")]) == 0
    assert re.search(r"left out: .*tokenizer\.json is not a byte-level BPE", capsys.readouterr().out)
    refused(capsys, tmp_path, ["export", run, tmp_path / "out", "--tokenizer", tmp_path / "gone.json"], r"gone\.json")


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
    with pytest.raises(CheckpointError) as raised:
        read_manifest(folder / "step-9999")
    assert raised.value.where == f"checkpoint {folder / 'step-9999'}" and raised.value.value == "step-9999"
    told = []
    assert newest_whole(run, told.append).folder == folder / "step-3" and "step-9999" in told[0]
    retain(folder, 3, keep=2, keep_every=0)
    assert {path.name for path in folder.glob("step-*")} == {"step-1", "step-2", "step-3", "step-9999"}
    retain(folder, 3, keep=1, keep_every=0)
    assert {path.name for path in folder.glob("step-*")} == {"step-3", "step-9999"}
