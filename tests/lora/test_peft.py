"""Adapters against PEFT: logits, gradients and files, on one rank and on meshes, in fp64."""

from __future__ import annotations

import copy
import dataclasses
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from ranvier.block import Initial
from ranvier.checkpoint.hf import peft as hf_peft
from ranvier.checkpoint.hf.from_pretrained import load_pretrained, with_sizes
from ranvier.checkpoint.hf.peft import AdapterFolder, load_adapters, with_adapter_settings
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.config.run import Data, Lora, Run, TensorParallel, Transformer
from ranvier.errors import RanvierError
from ranvier.mesh import Mesh
from ranvier.models import families
from ranvier.models.lora import is_adapter
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.testing.ranks import run_ranks
from tests import hf_peers
from tests.errors import raises
from tests.models.test_llama import in_fp64

KINDS = {
    "GPT2LMHeadModel": dict(n_embd=24, n_layer=2, n_head=4, vocab_size=37, n_positions=12, resid_pdrop=0.0,
                            embd_pdrop=0.0, attn_pdrop=0.0),
    "LlamaForCausalLM": dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                             intermediate_size=40, vocab_size=37, max_position_embeddings=12),
    "BertForSequenceClassification": hf_peers.BERT | dict(num_attention_heads=4, hidden_dropout_prob=0.0,
                                                          attention_probs_dropout_prob=0.0)}
TARGETS = {"GPT2LMHeadModel": ["c_attn", "attn.c_proj", "mlp.c_fc"], "LlamaForCausalLM": ["q_proj", "v_proj", "o_proj",
                                                                                 "up_proj", "down_proj"],
           "BertForSequenceClassification": ["query", "value", "intermediate.dense"]}
OURS = {"GPT2LMHeadModel": {"attention.qkv", "attention.projection", "mlp.fc1"},
        "LlamaForCausalLM": {"attention.qkv.query", "attention.qkv.value", "attention.projection", "mlp.fc1.up",
                             "mlp.fc2"},
        "BertForSequenceClassification": {"attention.qkv.query", "attention.qkv.value", "mlp.fc1"}}


class Peer:
    """A transformers model with PEFT adapters, saved as a user would save it, and its outputs and gradients."""

    def __init__(self, kind, folder, *, dora):
        peft = pytest.importorskip("peft")
        model = hf_peers.peer(kind, **KINDS[kind])
        self.base, self.folder = hf_peers.saved(model, folder / "base"), folder / "adapters"
        task = "CAUSAL_LM" if kind.endswith("LM") or "LMHead" in kind else "SEQ_CLS"
        self.model = peft.get_peft_model(model, peft.LoraConfig(
            r=3, lora_alpha=5, target_modules=TARGETS[kind], use_dora=dora, task_type=task, lora_dropout=0.0,
            fan_in_fan_out=kind.startswith("GPT2")), autocast_adapter_dtype=False).eval()
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    change = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
                    parameter.copy_(parameter + change if "magnitude" in name else change)
        self.model.save_pretrained(self.folder)
        self.task, generator = task, torch.Generator().manual_seed(4)
        self.ids = torch.randint(0, 37, (4, 12), generator=generator)
        self.classes = torch.tensor([0, 1, 1, 0])
        self.logits = self.model(self.ids).logits
        targets = self.ids.roll(-1, 1) if task == "CAUSAL_LM" else self.classes
        torch.nn.functional.cross_entropy(self.logits.flatten(0, -2), targets.flatten()).backward()
        state = {name: parameter.grad for name, parameter in self.model.named_parameters()
                 if parameter.grad is not None}
        self.gradients = {name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector"): gradient
                          for name, gradient in state.items()}
        self.targets, self.logits = targets, self.logits.detach()

    def run(self):
        """The settings with which a run continues from the folders."""
        run = Run(model=Transformer(sequence=12, num_classes=2 if self.task == "SEQ_CLS" else "auto"),
                  lora=Lora(adapters=self.folder),
                  data=Data(task="lm" if self.task == "CAUSAL_LM" else "classification"))
        return with_adapter_settings(with_sizes(run, Pretrained(self.base)))

    def microbatches(self, mesh, at):
        inputs = self.ids if self.task == "CAUSAL_LM" else {
            "ids": self.ids, "mask": torch.ones_like(self.ids), "types": torch.zeros_like(self.ids)}
        count = mesh.data * mesh.row
        rows = slice(4 // count * (at.data * mesh.row + at.row), 4 // count * (at.data * mesh.row + at.row + 1))
        taken = {name: value[rows] for name, value in inputs.items()} if isinstance(inputs, dict) else inputs[rows]
        return [Microbatch(taken, self.targets[rows], torch.arange(4)[rows])]


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    found = {}

    def make(kind, dora):
        if (kind, dora) not in found:
            with in_fp64():
                found[kind, dora] = Peer(kind, tmp_path_factory.mktemp(kind), dora=dora)
        return found[kind, dora]

    return make


def on_mesh(peer, mesh, work, scheme="stationary"):
    run = peer.run()
    model = families.model_of(run, dtype=torch.float64)

    def rank(world):
        engine = Engine(model, world, mesh=mesh, tensor=TensorParallel(scheme=scheme), dtype=torch.float64)
        load_pretrained(engine, Pretrained(peer.base))
        load_adapters(engine, AdapterFolder(peer.folder), families.config_of(run), families.head_of(run))
        result = work(engine)
        engine.close()
        return result

    return run, run_ranks(rank, mesh.size, timeout_seconds=120.0)


@pytest.mark.parametrize(("kind", "dora", "mesh", "scheme"), [
    ("GPT2LMHeadModel", False, Mesh(), "stationary"),
    pytest.param("GPT2LMHeadModel", True, Mesh(row=2, col=2), "stationary", marks=pytest.mark.slow),
    ("LlamaForCausalLM", False, Mesh(data=2, pipe=2), "stationary"), ("LlamaForCausalLM", True, Mesh(), "stationary"),
    pytest.param("LlamaForCausalLM", True, Mesh(col=4), "megatron", marks=pytest.mark.slow),
    pytest.param("LlamaForCausalLM", False, Mesh(row=2, col=2), "summa", marks=pytest.mark.slow),
    ("BertForSequenceClassification", True, Mesh(col=2), "stationary"),
    pytest.param("BertForSequenceClassification", False, Mesh(pipe=2), "stationary", marks=pytest.mark.slow)])
def test_logits_and_gradients_are_pefts(peer, kind, dora, mesh, scheme):
    there = peer(kind, dora)

    def work(engine):
        loss = engine.forward_backward(there.microbatches(mesh, engine.coordinates)).loss
        return loss, {name: gradient.clone() for name, gradient in engine.gradients().items()}, engine.layout, \
            engine.coordinates, {name: build for name, build in engine.blocks.items()} if mesh.size == 1 else None

    run, ranks = on_mesh(there, mesh, work, scheme)
    places, others = AdapterFolder(there.folder).places(families.config_of(run), families.head_of(run))
    expected = {ours: module.from_peft(kind_of, there.gradients[name], kind.startswith("GPT2"))
                for ours, (module, kind_of, name) in places.items()}
    assert {ours.partition(".")[2].rpartition(".lora.")[0] for ours in expected} == OURS[kind]
    assert set(run.lora.targets) == OURS[kind] and run.lora.rank == 3 and run.lora.alpha == 5.0
    assert set(others) == ({"head.classifier.weight", "head.classifier.bias"} if there.task == "SEQ_CLS" else set())
    loss = float(torch.nn.functional.cross_entropy(there.logits.flatten(0, -2), there.targets.flatten()))
    seen = set()
    for found, gradients, layout, at, blocks in ranks:
        assert abs(found - loss) < 1e-10 * loss
        for name, gradient in gradients.items():
            if is_adapter(name):
                box = layout.box(layout[name], at.position)
                part = expected[name][tuple(slice(*edges) for edges in box)]
                assert (gradient - part).norm() < 1e-10 * expected[name].norm(), name
                seen.add(name)
        if blocks is not None and there.task == "CAUSAL_LM":
            with torch.no_grad():
                logits = hf_peers.forward({name: block.eval() for name, block in blocks.items()}, there.ids)
            assert (logits - there.logits).abs().max() < 1e-10
    assert seen == set(expected)


@pytest.mark.parametrize(("kind", "dora"), [("GPT2LMHeadModel", True), ("LlamaForCausalLM", False),
                                            ("BertForSequenceClassification", True)])
def test_merged_weights_and_written_files_are_pefts(peer, tmp_path, kind, dora):
    there, run = peer(kind, dora), peer(kind, dora).run()
    config, head, folder, base = families.config_of(run), families.head_of(run), AdapterFolder(
        there.folder), Pretrained(there.base)
    found, others = folder.places(config, head)

    def value(name):
        module, kind_of, file = found[name]
        tensor = module.from_peft(kind_of, folder.read(file), kind.startswith("GPT2"))
        return tensor if kind_of != "magnitude_change" else tensor - module.rows(base.read(module.weight)).norm(dim=1)

    adapters = hf_peft.Adapters(config=config, head=head, lora=run.lora, read=value, names=frozenset(
        module.target for module, _, _ in found.values()))
    merged = copy.deepcopy(there.model).merge_and_unload()
    expected = Pretrained(hf_peers.saved(merged, tmp_path / "merged"))

    def weight(name):
        return folder.read(others[name]) if name in others else base.read(name)

    for name in base.places:
        ours = adapters.merged(name, weight(name))
        assert (ours - expected.read(name)).norm() <= 1e-12 * ours.norm(), name
    (tmp_path / "again").mkdir()
    hf_peft.write(tmp_path / "again", adapters, weight, dtype=torch.float64, base="the base", trained=list(others))
    written, before = (load_file(path / hf_peft.TENSORS) for path in (tmp_path / "again", there.folder))
    assert written.keys() == before.keys()
    assert all((written[name] - tensor).norm() < 1e-12 * tensor.norm() for name, tensor in before.items())
    with in_fp64(), torch.no_grad():
        model = pytest.importorskip("peft").PeftModel.from_pretrained(
            hf_peers.peer(kind, **KINDS[kind]), tmp_path / "again", autocast_adapter_dtype=False).eval()
        assert (model(there.ids).logits - there.logits).abs().max() < 1e-10


def edited(peer, tmp_path, change):
    """A copy of the peer's adapters with changes to adapter_config.json (a dict) or to the tensors (a function)."""
    folder = tmp_path / "edited"
    folder.mkdir()
    document = json.loads((peer.folder / hf_peft.CONFIG).read_text())
    tensors = load_file(peer.folder / hf_peft.TENSORS)
    if callable(change):
        change(tensors)
    else:
        document |= change
    (folder / hf_peft.CONFIG).write_text(json.dumps(document))
    save_file(tensors, folder / hf_peft.TENSORS)
    return folder


def _first(tensors, kind):
    return next(name for name in tensors if kind in name)


@pytest.mark.parametrize(("change", "error"), [
    (dict(peft_type="LOHA"), ["adapter-setting-not-supported", "peft_type"]),
    (dict(bias="all"), ["adapter-setting-not-supported", "bias"]),
    (dict(rank_pattern={"x": 4}), ["adapter-setting-not-supported", "rank_pattern"]),
    (dict(r=0), ["adapter-rank"]), (dict(lora_alpha="x"), ["adapter-rank"]),
    (dict(lora_dropout=1.5), ["adapter-dropout"]),
    (dict(r=4), ["adapter-tensor-shape", (4, 24)]),
    (dict(use_dora=True), ["adapter-tensor-missing", "magnitude_change"]),
    (lambda tensors: tensors.pop(_first(tensors, "lora_B")), ["adapter-tensor-missing", "B"]),
    (lambda tensors: tensors.update(other=torch.zeros(2)), ["adapter-of-unknown-layer"]),
    (lambda tensors: tensors.update({"base_model.model.transformer.ln_f.weight": torch.zeros(24)}),
     ["adapter-of-unknown-layer", "ln_f"]),  # of a head only linear layers are trained
    (lambda tensors: tensors.clear(), ["folder-without-adapters"])])
def test_refused_folders(peer, tmp_path, change, error):
    there = peer("GPT2LMHeadModel", False)
    folder = edited(there, tmp_path, change)
    with raises(*error, folder):
        AdapterFolder(folder).places(Pretrained(there.base).config, "tokens")


def test_every_key_of_peft_is_read_neutral_or_refused(peer, tmp_path):
    """Each of PEFT's own fields has a value that is no field's default; there are also keys that PEFT does not have."""
    peft = pytest.importorskip("peft")
    there = peer("GPT2LMHeadModel", False)
    folder = edited(there, tmp_path, {})
    document = json.loads((folder / hf_peft.CONFIG).read_text())
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert fields == {*hf_peft.READ, *hf_peft.NEUTRAL}, "decide what a new field of PEFT changes"
    refused = set()
    for name in (*fields - set(hf_peft.READ), "not_of_peft"):
        (folder / hf_peft.CONFIG).write_text(json.dumps(document | {name: "another value"}))
        try:
            AdapterFolder(folder)
        except RanvierError as error:
            assert error.what == f"has {name} that is not supported" and error.value == "another value"
            refused.add(name)
    assert refused == {"not_of_peft", *(name for name, values in hf_peft.NEUTRAL.items() if values is not None)}
    (folder / hf_peft.CONFIG).write_text(json.dumps(document | {"not_of_peft": None, "init_lora_weights": "gaussian"}))
    AdapterFolder(folder)


@pytest.mark.parametrize("method", ["pissa", "pissa_niter_4", "olora"])
def test_adapters_of_changed_base_weights_are_refused(tmp_path, method):
    """PEFT changed the base weights when it created these adapters, so they are wrong for the model's own weights."""
    peft = pytest.importorskip("peft")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    changed = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=method))
    changed.save_pretrained(tmp_path)
    with pytest.raises(RanvierError) as refused:
        AdapterFolder(tmp_path)
    assert (refused.value.what, refused.value.value) == ("has init_lora_weights that is not supported", method)


@pytest.mark.parametrize(("name", "content", "code"), [
    (hf_peft.CONFIG, "{", "adapter-file-unreadable"),
    (hf_peft.CONFIG, "[]", "adapter-config-not-object"), (hf_peft.CONFIG, " " * (1 << 21), "adapter-file-unreadable"),
    (hf_peft.TENSORS, "x", "adapter-file-unreadable")])
def test_damaged_folders(peer, tmp_path, name, content, code):
    folder = edited(peer("GPT2LMHeadModel", False), tmp_path, {})
    (folder / name).write_text(content)
    with raises(code):
        AdapterFolder(folder)


def test_rslora_is_a_scale(peer, tmp_path):
    folder = edited(peer("GPT2LMHeadModel", False), tmp_path, dict(use_rslora=True))
    assert AdapterFolder(folder).alpha / 3 == pytest.approx(5 / 3 ** 0.5)


def test_layers_that_only_some_have_are_named(peer, tmp_path):
    def only_the_second(tensors):
        for name in [name for name in tensors if ".h.0." in name]:
            del tensors[name]

    there = peer("GPT2LMHeadModel", False)
    folder = AdapterFolder(edited(there, tmp_path, only_the_second))
    assert set(folder.targets(Pretrained(there.base).config, "tokens")) == {
        f"layer1.{name}" for name in OURS["GPT2LMHeadModel"]}


def test_a_model_of_ones_own_has_no_names_there(peer):
    with raises("family-without-adapters"):
        with_adapter_settings(Run(model=Transformer(family="a:b"), lora=Lora(adapters=peer(
            "GPT2LMHeadModel", False).folder)))


def test_a_head_of_other_classes_is_refused(peer):
    there = peer("BertForSequenceClassification", False)
    run = there.run()
    model = families.model_of(replace(run, model=replace(run.model, num_classes=5)), dtype=torch.float64)
    model = replace(model, initial=lambda name: Initial("constant", 0.0))

    def rank(world):
        engine = Engine(model, world, mesh=Mesh(), dtype=torch.float64)
        with raises("adapter-shape", "head.classifier"):
            load_adapters(engine, AdapterFolder(there.folder), families.config_of(run), "classes")
        engine.close()

    run_ranks(rank, 1)
