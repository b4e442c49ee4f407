"""BERT, ViT and DINOv2 in Hugging Face's format: what is read, notes and errors about the rest, and round trips."""

from __future__ import annotations

import json
import re
import tomllib
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hf_folders import edit_manifest
from PIL import Image
from safetensors.torch import load_file, save_file

from ranvier.checkpoint.hf import image_files, logits
from ranvier.checkpoint.hf.export_model import export
from ranvier.checkpoint.hf.import_model import import_model
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.checkpoint.manifest import Saved, step_folder
from ranvier.cli.main import run_command
from ranvier.data.images import pixels, resize_and_crop
from ranvier.inference.trained import open_trained
from tests.covering import first
from tests.errors import raises
from tests.hf_peers import BERT, DINOV2, VIT, peer, saved

SETTINGS = {"Bert": BERT, "ViT": VIT, "Dinov2": DINOV2}
KINDS = ["BertModel", "BertForSequenceClassification", "BertForQuestionAnswering", "BertForMaskedLM",
         "BertForTokenClassification", "ViTForImageClassification", "ViTModel", "Dinov2Model",
         "Dinov2ForImageClassification"]
POOLER, CLASSIFIER = [[f"head.{layer}.{kind}" for kind in ("weight", "bias")] for layer in ("pooler", "classifier")]


@pytest.fixture
def model_of(tmp_path):
    """Saves a small random model of transformers; returns it and its folder."""
    def save(kind, **settings):
        family = next(name for name in SETTINGS if kind.startswith(name))
        model = peer(kind, torch.float32, **SETTINGS[family] | settings)
        return model, saved(model, tmp_path / kind)

    return save


def edited(folder, **settings):
    """Change settings in config.json; None removes one."""
    document = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps({key: value for key, value in document.items()
                                                    if value is not None}))
    return folder


# --- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "head", "missing", "left_out"), [
    ("BertModel", "classes", CLASSIFIER, []), ("BertForSequenceClassification", "classes", [], []),
    ("BertForQuestionAnswering", "span", [], []),
    ("BertForMaskedLM", "classes", POOLER + CLASSIFIER, ["cls.predictions.bias"]),
    ("BertForTokenClassification", "classes", POOLER + CLASSIFIER, ["classifier.bias", "classifier.weight"]),
    ("BertForMultipleChoice", "classes", CLASSIFIER, ["classifier.bias", "classifier.weight"]),
    ("ViTForImageClassification", "classes", [], []), ("ViTModel", "classes", CLASSIFIER, []),
    ("Dinov2Model", "classes", CLASSIFIER, []),
    ("Dinov2ForImageClassification", "classes", CLASSIFIER, ["classifier.bias", "classifier.weight"])])
def test_what_a_folder_has_and_lacks(model_of, kind, head, missing, left_out):
    found = Pretrained(model_of(kind)[1])
    assert (found.head, list(found.missing)) == (head, missing)
    assert set(left_out) <= set(found.left_out) and bool(left_out) == bool(found.left_out)
    notes = " ".join(found.notes_on_tensors())
    assert all(name in notes for name in [*missing, *left_out])
    for ours, place in found.places.items():
        assert tuple(found.read(ours).shape) == place.shape, ours
    assert (found.config.num_classes == "auto") == ("head.classifier.weight" not in found.places)


def test_settings(model_of):
    config = Pretrained(model_of("BertForSequenceClassification", num_labels=5, layer_norm_eps=1e-7,
                                 hidden_dropout_prob=0.2)[1]).config
    assert (config.family, config.num_layers, config.hidden, config.heads, config.vocab, config.sequence) == (
        "bert", 2, 24, 3, 37, 12)
    assert (config.intermediate, config.norm_epsilon, config.num_classes, config.dropout) == (40, 1e-7, 5, 0.2)
    config = Pretrained(model_of("Dinov2Model")[1]).config
    assert (config.family, config.image_size, config.patch_size, config.intermediate, config.norm_epsilon) == (
        "vit", 12, 4, 48, 1e-6)


def test_notes_on_dropout(model_of):
    found = Pretrained(model_of("BertForSequenceClassification", classifier_dropout=0.3)[1])
    assert [note.split(" is left out")[0] for note in found.notes] == [
        "classifier_dropout 0.3", "attention_probs_dropout_prob 0.1"]


def test_old_names_of_bert(model_of):
    """The first files have no prefix, other names of norms, and the numbers of positions."""
    _, folder = model_of("BertModel")
    tensors = load_file(folder / "model.safetensors")
    expected = {ours: Pretrained(folder).read(ours) for ours in Pretrained(folder).places}
    old = {f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"):
           tensor for name, tensor in tensors.items()}
    old |= {"bert.embeddings.position_ids": torch.arange(12)[None], "cls.seq_relationship.weight": torch.ones(2, 24)}
    save_file(old, folder / "model.safetensors")
    found = Pretrained(folder)
    assert found.left_out == ("cls.seq_relationship.weight",)
    assert all(torch.equal(found.read(ours), tensor) for ours, tensor in expected.items())


@pytest.mark.parametrize(("kind", "settings", "error"), [
    ("BertModel", {"hidden_act": "relu"}, ("config-json-value",)),
    ("BertModel", {"position_embedding_type": "relative_key"}, ("config-json-value",)),
    ("BertModel", {"type_vocab_size": 3}, ("config-json-value", 2, 3)),
    ("BertModel", {"is_decoder": True}, ("config-json-value",)),
    ("BertModel", {"num_attention_heads": 5}, ("config-json-heads", 24)),
    ("BertModel", {"intermediate_size": None}, ("config-json-missing",)),
    ("BertModel", {"layer_norm_eps": 0}, ("config-json-invalid",)),
    ("BertModel", {"hidden_dropout_prob": 1.0}, ("config-json-invalid",)),
    ("BertModel", {"num_hidden_layers": 10**30}, ("pretrained-too-few-tensors",)),
    ("BertModel", {"num_hidden_layers": 1}, ("pretrained-unknown-tensors", 16)),
    ("BertModel", {"vocab_size": 38}, ("pretrained-tensor-shape", 38, 24)),
    ("BertForSequenceClassification", {"id2label": {"0": "a", "1": "b", "2": "c"}},
     ("pretrained-tensor-shape", 3, 24, 2)),
    ("ViTModel", {"qkv_bias": False}, ("config-json-value",)),
    ("ViTModel", {"num_channels": 1}, ("config-json-value", 3)),
    ("ViTModel", {"image_size": 13}, ("vit-image-size", 4, 13)),
    ("ViTModel", {"patch_size": [4, 4]}, ("config-json-invalid",)),
    ("ViTModel", {"image_size": 16}, ("pretrained-tensor-shape", 1, 17, 24)),
    ("Dinov2Model", {"use_swiglu_ffn": True}, ("config-json-value",)),
    ("Dinov2Model", {"mlp_ratio": "4"}, ("vit-mlp-ratio", 4)),
    ("Dinov2Model", {"mlp_ratio": 3}, ("pretrained-tensor-shape", 72, 24)),
    ("Dinov2Model", {"image_size": 15}, ("vit-image-size", 4)),
])
def test_models_that_are_not_ours(model_of, kind, settings, error):
    folder = edited(model_of(kind)[1], **settings)
    with raises(*error):
        Pretrained(folder)


@pytest.mark.parametrize(("kind", "gone"), [
    ("BertForSequenceClassification", "classifier.bias"), ("BertForQuestionAnswering", "qa_outputs.weight"),
    ("BertModel", "embeddings.LayerNorm.weight"), ("ViTModel", "embeddings.cls_token"), ("ViTModel", "layernorm.bias"),
    ("Dinov2Model", "encoder.layer.1.layer_scale2.lambda1")])
def test_a_part_that_is_missing(model_of, kind, gone):
    """A head with missing tensors is an error, and is not initialised from the seed."""
    _, folder = model_of(kind)
    tensors = load_file(folder / "model.safetensors")
    del tensors[gone]
    save_file(tensors, folder / "model.safetensors")
    with raises("pretrained-tensor-missing", gone):
        Pretrained(folder)


# --- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_import_is_compared_with_transformers(model_of, tmp_path, capsys, kind):
    _, folder = model_of(kind)
    assert run_command(["import", str(folder), str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    what = "2 texts" if kind.startswith("Bert") else "2 images"
    difference, scale = map(float, re.search(
        rf"logits of {what} against transformers \S+: largest difference (\S+), their scale being (\S+)", out).groups())
    assert difference < 1e-5 * scale
    found = Pretrained(folder)
    assert all(note in out for note in [*found.notes, *found.notes_on_tensors()])
    recipe = tomllib.loads((tmp_path / "run/run.toml").read_text())
    task = "images" if not kind.startswith("Bert") else "qa" if "Question" in kind else "classification"
    tokenizer = {} if task == "images" else {"tokenizer": str(tmp_path / "run/tokenizer.json")}  # refused: it has none
    assert recipe["data"] == {"task": task, **tokenizer} and recipe["model"]["family"] == found.config.family
    step = Saved(step_folder(tmp_path / "run/checkpoint", 0))
    assert all(torch.equal(step.read("parameter", ours), found.read(ours)) for ours in found.places)
    again = {ours: step.read("parameter", ours) for ours in found.missing}
    assert all((tensor == 0).all() if ours.endswith("bias") else 0.005 < tensor.std() < 0.05
               for ours, tensor in again.items())


@pytest.mark.parametrize("kind", first(["BertForQuestionAnswering", "ViTForImageClassification", "Dinov2Model"], KINDS))
def test_export_loads_as_transformers_has_it(model_of, tmp_path, capsys, kind):
    transformers = pytest.importorskip("transformers")
    model, folder = model_of(kind)
    import_model(folder, tmp_path / "run", tell=lambda line: None)
    assert run_command(["export", str(tmp_path / "run"), str(tmp_path / "there")]) == 0
    assert re.search(r"against transformers \S+: largest difference", capsys.readouterr().out)
    found = Pretrained(tmp_path / "there")
    assert (found.missing, found.left_out) == ((), ())
    auto = {"vit": transformers.AutoModelForImageClassification}.get(
        found.config.family, transformers.AutoModelForQuestionAnswering if found.head == "span"
        else transformers.AutoModelForSequenceClassification)
    theirs = auto.from_pretrained(tmp_path / "there").eval()
    inputs = logits.inputs_of(found.config)
    step = Saved(step_folder(tmp_path / "run/checkpoint", 0))
    ours = logits.logits(found.config, lambda name: step.read("parameter", name), inputs, found.head)
    expected = logits._forward(theirs, inputs, found.head).detach()
    is_token = inputs["mask"].bool() if found.head == "span" else slice(None)
    assert (ours - expected)[is_token].abs().max() < 1e-5 * expected.abs().max()
    if kind == type(theirs).__name__:  # nothing was missing, so it is the same model
        assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_labels_are_written(model_of, tmp_path):
    transformers = pytest.importorskip("transformers")
    import_model(model_of("BertForSequenceClassification")[1], tmp_path / "run", tell=lambda line: None)
    step = step_folder(tmp_path / "run/checkpoint", 0)
    export(tmp_path / "run", tmp_path / "unnamed", tell=lambda line: None)
    edit_manifest(step, lambda document: document["about"].update(labels=["bad", "good"]))
    export(tmp_path / "run", tmp_path / "named", tell=lambda line: None)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "unnamed").id2label == {0: "LABEL_0", 1: "LABEL_1"}
    named = transformers.AutoConfig.from_pretrained(tmp_path / "named")
    assert (named.id2label, named.label2id) == ({0: "bad", 1: "good"}, {"bad": 0, "good": 1})


def test_the_number_of_classes_is_the_classifiers(model_of, tmp_path):
    """A run's settings may leave the number to the data."""
    import_model(model_of("ViTForImageClassification", num_labels=7)[1], tmp_path / "run", tell=lambda line: None)
    edit_manifest(step_folder(tmp_path / "run/checkpoint", 0),
                  lambda document: document["about"]["run"]["model"].update(num_classes="auto"))
    export(tmp_path / "run", tmp_path / "there", tell=lambda line: None)
    assert len(json.loads((tmp_path / "there/config.json").read_text())["id2label"]) == 7


def test_a_word_piece_tokenizer_goes_along(model_of, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "##ly"]
    inner = tokenizers.Tokenizer(tokenizers.models.WordPiece({word: place for place, word in enumerate(words)},
                                                             unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    _, folder = model_of("BertForSequenceClassification")
    inner.save(str(folder / "tokenizer.json"))
    import_model(folder, tmp_path / "run")
    assert "and its tokenizer" in capsys.readouterr().out
    export(tmp_path / "run", tmp_path / "there", tell=lambda line: None)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "there")
    assert theirs("good badly").input_ids == [5, 6, 7] and theirs.pad_token_id == 0
    (tmp_path / "run/tokenizer.json").write_text("{}")
    assert run_command(["export", str(tmp_path / "run"), str(tmp_path / "not")]) == 2
    assert "tokenizer.json: is not a tokenizer" in capsys.readouterr().err


def test_an_exported_model_has_its_processor_of_images(model_of, tmp_path):
    """transformers makes the same pixels of an image with it."""
    transformers = pytest.importorskip("transformers")
    import_model(model_of("ViTForImageClassification")[1], tmp_path / "run", tell=lambda line: None)
    export(tmp_path / "run", tmp_path / "there", tell=lambda line: None)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "there")
    for shape in ((20, 20, 3), (17, 31, 3), (70, 100, 3), (14, 13, 3),
                  (9, 200, 3), (171, 2, 3)):  # the fourth is cropped by an odd number
        image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        expected = pixels(resize_and_crop(Image.fromarray(image), 12)[None], 12)
        assert torch.equal(processor(Image.fromarray(image), return_tensors="pt")["pixel_values"], expected)


@pytest.mark.parametrize(("changed", "note", "is_refused"), [
    ({}, None, False), ({"size": {"shortest_edge": 20}}, 'size {"shortest_edge": 20}', False),
    ({"size": {"height": 12, "width": 12}, "do_center_crop": False}, None, False),
    ({"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}, "image_std [0.5, 0.5, 0.5]", True),
    ({"do_rescale": False}, "do_rescale false", True), ({"crop_pct": 0.9}, "crop_pct 0.9", False),
    ({"rescale_offset": True}, "rescale_offset true", True), ({"image_mean": None}, 'image_mean "of its class"', True)])
def test_other_pixels_than_those_of_its_training(model_of, tmp_path, capsys, changed, note, is_refused):
    _, folder = model_of("ViTForImageClassification")
    settings = image_files.processor(12) | changed
    document = json.dumps({key: value for key, value in settings.items() if value is not None})
    (folder / "preprocessor_config.json").write_text(document)
    assert run_command(["import", str(folder), str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert note in out if note else "preprocessor_config" not in out
    for place in (folder, tmp_path / "run"):
        with raises("image-processor-differs") if is_refused else nullcontext():
            open_trained(place, print)
            told = capsys.readouterr().out
            assert (note is None or note in told) and ("does not crop images" in told) == ("do_center_crop" in changed)
    assert run_command(["export", str(tmp_path / "run"), str(tmp_path / "there")]) == 0
    assert (tmp_path / "there/preprocessor_config.json").read_text() == document


def test_a_damaged_processor_of_images_is_refused(model_of, tmp_path, capsys):
    _, folder = model_of("ViTForImageClassification")
    (folder / "preprocessor_config.json").write_text('{"size": ')
    assert run_command(["import", str(folder), str(tmp_path / "run")]) == 2
    assert "has a preprocessor_config.json that cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "name"), [
    ("BertForSequenceClassification", "query.weight"), ("BertForQuestionAnswering", "qa_outputs.weight"),
    ("ViTForImageClassification", "position_embeddings"), ("Dinov2Model", "layer_scale1.lambda1")])
def test_a_wrong_layout_is_noticed(model_of, tmp_path, monkeypatch, kind, name):
    from ranvier.checkpoint.hf import form as hf

    pytest.importorskip("transformers")
    _, folder = model_of(kind)
    right = hf.tensor_here

    def wrong(place, tensors):
        return right(place, [tensor.flip(-1) if one.endswith(name) else tensor
                             for one, tensor in zip(place.names, tensors, strict=True)])

    monkeypatch.setattr(hf, "tensor_here", wrong)
    with raises("export-computes-otherwise", 2):
        import_model(folder, tmp_path / "run", tell=lambda line: None)
    assert not (tmp_path / "run").exists()


def test_without_transformers_our_own_reading_is_the_peer(model_of, tmp_path, capsys, monkeypatch):
    _, folder = model_of("Dinov2Model")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    import_model(folder, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "there")
    assert capsys.readouterr().out.count("largest difference 0, ") == 2
