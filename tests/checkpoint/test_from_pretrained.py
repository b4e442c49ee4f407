"""An engine that starts from a folder: every rank has its box of every parameter, on any mesh and in any format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from ranvier.checkpoint.hf import from_pretrained
from ranvier.checkpoint.hf.from_pretrained import load_pretrained, resized, resolve_pretrained, with_model, with_sizes
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.config import presets
from ranvier.config.run import Data, Optim, Run, TensorParallel, Transformer
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.testing.ranks import run_ranks
from ranvier.train import setup
from tests.covering import covering, quick
from tests.errors import raises
from tests.hf_peers import BERT, DINOV2, VIT, peer, saved

SETTINGS = {"Bert": BERT, "ViT": VIT, "Dinov2": DINOV2,
            "GPT2": dict(vocab_size=37, n_embd=24, n_layer=2, n_head=4, n_positions=12)}
KINDS = {"BertForSequenceClassification": "classification", "BertForQuestionAnswering": "qa", "BertModel": "qa",
         "ViTForImageClassification": "images", "Dinov2Model": "images", "GPT2LMHeadModel": "lm"}
MESHES = [(Mesh(), "stationary"), (Mesh(pipe=2, row=2, col=2), "stationary"), (Mesh(data=2, row=2, col=2), "summa"),
          (Mesh(pipe=3, col=2), "megatron")]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    found = {}

    def folder(kind):
        if kind not in found:
            family = next(name for name in SETTINGS if kind.startswith(name))
            settings = SETTINGS[family] | ({} if family == "GPT2" else {"num_attention_heads": 4})
            found[kind] = saved(peer(kind, torch.float32, **settings), tmp_path_factory.mktemp(kind))
        return found[kind]

    return folder


def run_of(kind, **model):
    sizes = {"sequence": 12, "image_size": 12, "num_classes": 2} | model
    return Run(model=Transformer(**sizes), data=Data(task=KINDS[kind]))


def started(run, folder, mesh=None, *, scheme="stationary", dtype=torch.float32, steps=0, optim=None):
    """For each rank: its parameters before and after `load_pretrained` (and steps), its boxes, the notes, the master
    copies."""
    def on_rank(world):
        model = families.model_of(run, dtype=dtype)
        engine = Engine(model, world, mesh=mesh or Mesh(), seed=3, dtype=dtype, learning_rate=1e-30,
                        tensor=TensorParallel(scheme=scheme), optim=optim or Optim(bucket_size=500, weight_decay=0.0))
        before = {name: parameter.detach().clone() for name, parameter in engine.named_parameters().items()}
        notes = load_pretrained(engine, Pretrained(folder))
        for _ in range(steps):
            inputs, targets = families.sample_of(run, 4)
            engine.train_batch([Microbatch(inputs, targets, torch.arange(4))])
        after = {name: parameter.detach().clone() for name, parameter in engine.named_parameters().items()}
        masters = {}
        for part in engine.flat_optimizer.slices():
            if "master" in part.states:
                masters.setdefault(part.parameter, []).append(part.states["master"].clone())
        layout, at = engine.layout, engine.coordinates
        boxes = {layout.key(end): layout.box(end, at.position) for end in layout.parameters
                 if end.block in layout.blocks(at.pipe)}  # a tied head is not sharded like the embedding
        engine.close()
        return before, after, boxes, notes, {name: torch.cat(parts) for name, parts in masters.items()}

    return run_ranks(on_rank, (mesh or Mesh()).size, timeout_seconds=120.0)


@pytest.mark.parametrize(("kind", "mesh", "scheme"), quick(4, covering(list(KINDS), MESHES)))
def test_every_rank_has_its_boxes(folder_of, kind, mesh, scheme):
    found = Pretrained(folder_of(kind))
    run = with_sizes(run_of(kind), found)
    seen = set()
    for before, after, boxes, _, _ in started(run, folder_of(kind), mesh, scheme=scheme):
        for name, parameter in after.items():
            expected = before[name]
            if name in found.places:
                expected = found.read(name)[tuple(slice(*edges) for edges in boxes[name])]
            assert torch.equal(parameter, expected), name
            seen.add(name)
    assert seen >= set(found.places) - {"head.pooler.weight", "head.pooler.bias"}


@pytest.mark.parametrize("offload", ["none", "stream", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_master_copies_are_the_folders_to_the_bit(folder_of, offload, dtype):
    """A step that changes nothing leaves the parameters as they are: no older copy is written back."""
    kind = "BertForSequenceClassification"
    found, run = Pretrained(folder_of(kind)), with_sizes(run_of(kind), Pretrained(folder_of(kind)))
    (_, after, _, _, masters), = started(run, folder_of(kind), dtype=dtype, steps=1,
                                         optim=Optim(bucket_size=500, weight_decay=0.0, offload=offload))
    for name, parameter in after.items():
        assert torch.equal(parameter, found.read(name).to(dtype)), name
    assert set(masters) == set(after) or dtype is torch.float32
    for name, master in masters.items():
        assert torch.equal(master, found.read(name).flatten()), name


def test_notes_are_the_same_on_every_rank(folder_of):
    kind = "BertForSequenceClassification"
    run = with_sizes(run_of(kind, num_classes=5, sequence=8), Pretrained(folder_of(kind)))
    ranks = started(run, folder_of(kind), Mesh(pipe=2))
    assert ranks[0][3] == ranks[1][3]
    positions = Pretrained(folder_of(kind)).read("embedding.position.weight")
    assert torch.equal(ranks[0][1]["embedding.position.weight"], positions[:8])
    said = [note.replace(str(folder_of(kind)), "FOLDER") for note in ranks[0][3]]
    assert said == [
        "the first 8 of 12 positions are taken",
        "head.classifier.weight has the shape (2, 24) in FOLDER and (5, 24) here: it is initialised from the seed",
        "head.classifier.bias has the shape (2,) in FOLDER and (5,) here: it is initialised from the seed"]


@pytest.mark.parametrize("ours", [0.0, 0.1, 0.2])
def test_another_dropout_than_the_folders_is_said(folder_of, monkeypatch, ours):
    """GPT-2's dropout is 0.1 in transformers."""
    monkeypatch.setattr(setup, "load_pretrained", lambda engine, pretrained: [])
    notes = setup.initial_weights(None, run_of("GPT2LMHeadModel", dropout=ours), Pretrained(
        folder_of("GPT2LMHeadModel")), from_step=None)
    assert ["0.1" in note and f"{ours:g}" in note for note in notes] == ([] if ours == 0.1 else [True])


def test_a_head_of_another_task_is_left_out(folder_of):
    kind = "BertForSequenceClassification"
    run = replace(run_of(kind), data=Data(task="qa"))
    (_, after, _, notes, _), = started(with_sizes(run, Pretrained(folder_of(kind))), folder_of(kind))
    assert "head.span.weight" in after
    assert "from the seed: head.span.weight, head.span.bias" in notes[0]
    assert "head.pooler.weight, head.pooler.bias, head.classifier.weight, head.classifier.bias" in notes[1]


def test_sizes_are_the_folders(folder_of):
    run = run_of("Dinov2Model", image_size=20, dropout=0.2, num_classes=7)
    model = with_sizes(run, Pretrained(folder_of("Dinov2Model"))).model
    assert (model.family, model.num_layers, model.hidden, model.heads, model.intermediate, model.patch_size) == (
        "vit", 2, 24, 4, 48, 4)
    assert (model.image_size, model.dropout, model.num_classes, model.norm_epsilon) == (20, 0.2, 7, 1e-6)
    kind = "BertForSequenceClassification"
    model = with_sizes(run_of(kind, sequence=8), Pretrained(folder_of(kind))).model
    assert (model.family, model.vocab, model.sequence, model.intermediate) == ("bert", 37, 8, 40)
    with raises("sequence-beyond-pretrained", 12, 13):
        with_sizes(run_of(kind, sequence=13), Pretrained(folder_of(kind)))


def test_a_run_of_other_sizes_is_refused(folder_of):
    kind = "ViTForImageClassification"
    run = replace(run_of(kind), model=replace(with_sizes(run_of(kind), Pretrained(folder_of(kind))).model,
                                              intermediate=41))
    with raises("pretrained-shape", "layer0.mlp.fc1.weight", 40, 24):
        started(run, folder_of(kind))


def test_numbers_that_are_none(folder_of, tmp_path):
    kind = "ViTForImageClassification"
    tensors = load_file(folder_of(kind) / "model.safetensors")
    tensors["vit.layernorm.bias"][3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder_of(kind) / "config.json").read_bytes())
    with raises("export-not-finite", "head.norm.bias"):
        started(with_sizes(run_of(kind), Pretrained(tmp_path)), tmp_path)


# --- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 20, 36])
@pytest.mark.parametrize("kind", ["ViTModel", "Dinov2Model"])
def test_images_of_another_size_compute_what_transformers_computes(tmp_path, kind, size):
    """Features with interpolated positions, against transformers' own interpolation."""
    family = "ViT" if kind == "ViTModel" else "Dinov2"
    model = peer(kind, torch.float32, **SETTINGS[family])
    found = Pretrained(saved(model, tmp_path))
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    options = {"interpolate_pos_encoding": True} if family == "ViT" else {}
    expected = model(images, **options).last_hidden_state
    config = replace(found.config, image_size=size)
    state = images
    for name, build in families.family_named("vit").model(config, "classes", dtype=torch.float32).blocks.items():
        block = build().eval()
        block = block.norm if name == "head" else block
        with torch.no_grad():
            for inner, parameter in block.named_parameters():
                ours = f"head.norm.{inner}" if name == "head" else f"{name}.{inner}"
                parameter.copy_(resized(found.read(ours), ours, tuple(parameter.shape), "vit"))
            state = block(state)
    assert (state - expected).abs().max() < 1e-4 * expected.abs().max()


def test_an_engine_takes_resized_positions(folder_of):
    kind = "Dinov2Model"
    found = Pretrained(folder_of(kind))
    run = with_sizes(run_of(kind, image_size=20), found)
    (_, after, _, notes, _), = started(run, folder_of(kind))
    assert notes[0] == "positions of 3 x 3 patches are resized to 5 x 5"
    name = "embedding.position.weight"
    assert torch.equal(after[name], resized(found.read(name), name, (26, 24), "vit"))
    assert torch.equal(after[name][0], found.read(name)[0])


def test_settings_that_are_not_the_folders_are_refused(folder_of):
    folder = folder_of("BertModel")
    there = Pretrained(folder).config
    with raises("differs-from-pretrained", "model.hidden", there.hidden):
        with_model(run_of("BertModel", hidden=there.hidden + 8), Pretrained(folder))
    same = run_of("BertModel", hidden=there.hidden, pretrained=str(folder))
    assert with_model(same, Pretrained(folder)).model.num_layers == there.num_layers
    assert resolve_pretrained(same).model.num_layers == there.num_layers
    with raises("differs-from-pretrained", "model.num-layers", 6, 5):
        resolve_pretrained(run_of("BertModel", num_layers=5, pretrained="minilm"))
    with raises("unknown-pretrained-model"):
        resolve_pretrained(run_of("BertModel", pretrained="a-folder-elsewhere"))


def test_what_weights_decide_is_what_overrules_a_recipe():
    for family in ("gpt", "llama", "bert", "vit"):
        decided = set(from_pretrained._sizes(Transformer(family=family))) - {"family"}
        assert decided <= set(presets.OF_WEIGHTS)
