"""At each entrance the logits of a folder are compared with those of transformers and PEFT, once per content."""

from __future__ import annotations

import ast
import builtins
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ranvier
from ranvier.checkpoint.hf import import_model as hf_import
from ranvier.checkpoint.hf import llama, peft
from ranvier.checkpoint.hf.import_model import import_model
from ranvier.checkpoint.hf.logits import Comparison
from ranvier.checkpoint.hf.peft import AdapterFolder
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.config.resolve import resolve
from ranvier.config.run import Data, Lora, Run, Transformer
from ranvier.data.tokenizer import train as train_tokenizer
from ranvier.errors import CheckpointError
from ranvier.inference.trained import open_model, open_trained
from ranvier.models import families
from ranvier.testing.ranks import run_ranks
from ranvier.train.setup import prepare_run
from tests import hf_peers
from tests.errors import raises
from tests.lora.test_peft import KINDS, TARGETS
from tests.models.test_llama import SIZES

pytest.importorskip("transformers")
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "attention_factor": 1.4}
TEXT = "The arrow flies over 12 green fields. " * 200


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The user's cache."""
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
    """A Llama whose rotary embeddings are scaled, with a tokenizer."""
    sizes = SIZES | dict(vocab_size=300, max_position_embeddings=64, rope_parameters={**YARN, "rope_theta": 1e4})
    found = hf_peers.saved(hf_peers.peer("LlamaForCausalLM", torch.float32, **sizes), tmp_path / "model")
    train_tokenizer([TEXT], 300).save(found / "tokenizer.json")
    (tmp_path / "text.txt").write_text(TEXT)
    return found


def run_on(folder, tmp_path, **settings):
    return resolve(Run(model=Transformer(pretrained=str(folder), sequence=16), data=Data(
        corpus=str(tmp_path / "text.txt"), cache_dir=tmp_path / "cache"), **settings))


def prepared(run):
    import io

    run_ranks(lambda world: prepare_run(run, world, said := io.StringIO()) and said.getvalue(), 1)


ENTRANCES = {
    "import": lambda folder, tmp_path: import_model(folder, tmp_path / "out", tell=lambda line: None),
    "train": lambda folder, tmp_path: prepared(run_on(folder, tmp_path)),
    "generate": lambda folder, tmp_path: open_model(folder, lambda line: None),
    "evaluate": lambda folder, tmp_path: open_trained(folder, lambda line: None),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_setting_that_is_left_out_is_found_at_every_way_in(folder, tmp_path, monkeypatch, entrance):
    known = llama._rope
    monkeypatch.setattr(llama, "_rope", lambda document: {
        name: value for name, value in known(document).items() if name != "rope_magnitude"})
    with pytest.raises(CheckpointError) as found:
        ENTRANCES[entrance](folder, tmp_path)
    assert found.value.code == f"{'export' if entrance == 'import' else 'source'}-computes-otherwise"
    assert found.value.where == str(tmp_path / "out" if entrance == "import" else folder)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(llama, "_rope", known)
    ENTRANCES[entrance](folder, tmp_path)


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_adapters_beside_the_weights_are_refused_at_every_way_in(folder, tmp_path, entrance):
    """transformers loads adapters with the model. A run that names them uses them."""
    (folder / "adapter_config.json").write_text("{}")
    with raises("pretrained-with-adapters", where=f"model {folder}"):
        ENTRANCES[entrance](folder, tmp_path)
    hf_import.check_source(Pretrained(folder), tmp_path / "cache", print, adapters=folder)


def test_a_key_that_is_not_known_here_reaches_transformers(folder, monkeypatch):
    """As a key of a later version would, which Ranvier does not know today."""
    import transformers

    known, seen = transformers.LlamaConfig, []

    class Later(known):
        def __init__(self, **settings):
            seen.append(settings.pop("arrow_scale", None))
            super().__init__(**settings)

    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "arrow_scale": 3, "quantization_config": {"a": 1},
                                                    "attn_implementation": "nobody/kernels", "pad_token_id": 9999}))
    monkeypatch.setattr(transformers.LlamaForCausalLM, "config_class", Later)
    assert isinstance(hf_import.compare_source(Pretrained(folder)), Comparison) and seen == [3]


def test_a_folder_is_compared_once_for_its_content(folder, tmp_path, cache, monkeypatch):
    told, calls, compare = [], [], hf_import.compare_source
    monkeypatch.setattr(hf_import, "compare_source", lambda source: calls.append(1) or compare(source))
    open_model(folder, told.append)
    assert calls == [1] and told[-1].startswith("logits of 32 tokens against transformers ")
    (folder / "config.json").touch()
    open_trained(folder, told.append)
    prepared(run_on(folder, tmp_path))
    assert calls == [1] and len(told) == 1
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "anything": 1}))
    open_model(folder, told.append)
    assert calls == [1, 1]
    for path in (cache / "compared").iterdir():
        path.chmod(0o666)
    open_model(folder, told.append)
    assert calls == [1, 1, 1], "a file that other users can write is not trusted"


@pytest.mark.parametrize(("kind", "more"), [
    ("LlamaForCausalLM", SIZES | dict(num_hidden_layers=3)),
    ("LlamaForCausalLM", SIZES | dict(num_hidden_layers=3, tie_word_embeddings=True)),
    ("GPT2LMHeadModel", KINDS["GPT2LMHeadModel"] | dict(n_layer=3)),
    ("BertForSequenceClassification", hf_peers.BERT), ("ViTForImageClassification", hf_peers.VIT),
    ("Dinov2Model", hf_peers.DINOV2)])
def test_of_a_large_model_the_first_layers_and_tokens_are_compared(tmp_path, monkeypatch, kind, more):
    folder = hf_peers.saved(hf_peers.peer(kind, torch.float32, **more), tmp_path / "model")
    source = Pretrained(folder)
    monkeypatch.setattr(hf_import, "FEW_TOKENS", 20)
    part = source.part(source.config.num_layers - 1, min(20, source.config.vocab))
    monkeypatch.setattr(hf_import.logits, "_SPARE_BYTES", 0)
    needed = hf_import.logits.needed_bytes(place.shape for place in part.places.values())
    monkeypatch.setattr(hf_import, "MOST_BYTES", needed)
    found = hf_import._part(source)
    assert found.config.num_layers == source.config.num_layers - 1 and found.places.keys() < source.places.keys()
    comparison = hf_import.compare_source(source)
    assert isinstance(comparison, Comparison), comparison
    assert comparison.is_equal and comparison.scale > 0
    monkeypatch.setattr(hf_import, "MOST_BYTES", 100)
    assert "GiB of memory" in hf_import.compare_source(source)


def test_a_folder_with_nan_is_left_to_the_error_that_names_the_parameter(folder, monkeypatch):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    assert "NaN" in hf_import.compare_source(Pretrained(folder))


def test_without_transformers_or_a_cache_a_line_says_so(folder, tmp_path, monkeypatch, cache):
    told, known = [], builtins.__import__

    def without(name, *args, **more):
        if name == "transformers":
            raise ImportError(name="transformers")
        return known(name, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without)
        open_model(folder, told.append)
    assert told == [f"{folder}: not compared with transformers: transformers is not installed"]
    cache.rename(tmp_path / "aside")
    cache.write_text("no folder")
    open_model(folder, told.append)
    assert len(told) == 2 and told[1].startswith("logits of 32 tokens")


@pytest.fixture(params=["LlamaForCausalLM", "LlamaForSequenceClassification", "GPT2LMHeadModel",
                        "BertForSequenceClassification"])
def adapters(request, tmp_path):
    """A base model, and adapters of PEFT on it whose layers have their own scales."""
    there = pytest.importorskip("peft")
    kind = request.param
    like = kind.replace("LlamaForSequenceClassification", "LlamaForCausalLM")
    base = hf_peers.peer(kind, torch.float32, **KINDS[like])
    hf_peers.saved(base, tmp_path / "base")
    model = there.get_peft_model(base, there.LoraConfig(
        r=3, lora_alpha=5, target_modules=TARGETS[like], use_dora=kind.startswith("Llama"), use_rslora=True,
        alpha_pattern={TARGETS[like][0]: 40}, fan_in_fan_out=kind.startswith("GPT2"),
        task_type="SEQ_CLS" if kind.endswith("Classification") else "CAUSAL_LM"))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_pretrained(tmp_path / "adapters")
    return Pretrained(tmp_path / "base"), tmp_path / "adapters"


def without_key(folder, key):
    document = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**document, key: {}}))


def checked(base, folder, cache, tell=lambda line: None):
    config = replace(base.config, num_classes=2) if base.config.family == "bert" else base.config
    hf_import.check_adapters(base, AdapterFolder(folder), config, base.head, cache, tell)


def test_a_key_of_adapters_that_is_left_out_is_found(adapters, cache, monkeypatch):
    base, folder = adapters
    with raises("adapter-setting-not-supported", "alpha_pattern"):
        AdapterFolder(folder)
    monkeypatch.setattr(peft, "NEUTRAL", {**peft.NEUTRAL, "alpha_pattern": None})
    with pytest.raises(CheckpointError) as found:
        checked(base, folder, cache)
    assert found.value.where == str(folder) and found.value.value > 1e-2
    without_key(folder, "alpha_pattern")
    told, state = [], torch.get_rng_state()
    checked(base, folder, cache, told.append)
    assert torch.equal(torch.get_rng_state(), state), "a run draws the same numbers with and without the comparison"
    checked(base, folder, cache, told.append)
    assert len(told) == 1 and "against peft" in told[0]


def test_adapters_of_a_run_are_compared_on_its_base_model(adapters, folder, tmp_path, monkeypatch):
    base, there = adapters
    if base.config.family != "llama" or base.head != "tokens":
        pytest.skip("one kind is enough")
    without_key(there, "alpha_pattern")
    seen = []
    monkeypatch.setattr("ranvier.train.setup.check_adapters", lambda *args: seen.append(args))
    train_tokenizer([TEXT], 257).save(tmp_path / "base/tokenizer.json")
    run = run_on(tmp_path / "base", tmp_path)
    run = replace(run, lora=Lora(adapters=there), model=replace(run.model, sequence=12))
    with pytest.raises(ranvier.RanvierError):
        prepared(run)  # the model's vocabulary is smaller than that of the tokenizer, which is read next
    (source, read, config, head, *_), = seen
    assert (source.folder, read.folder, config.hidden, head) == (base.folder, there, 24, "tokens")
    told = []
    hf_import.check_adapters(None, AdapterFolder(there), families.config_of(run), "tokens", tmp_path, told.append)
    assert told == [f"adapters {there}: not compared with PEFT, since model.pretrained names no base model"]


OPENED_WITHOUT = {"checkpoint/hf/from_pretrained.py": "for its sizes alone",
                  "checkpoint/hf/logits.py": "reads again what has been written"}


def test_no_other_way_in():
    """Every file that opens a folder of tensors compares it."""
    root = Path(ranvier.__file__).parent
    opens, compares = set(), set()
    for path in root.rglob("*.py"):
        if "Pretrained" not in (text := path.read_text()):
            continue
        called = {node.func.id for node in ast.walk(ast.parse(text))
                  if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        name = str(path.relative_to(root))
        opens |= {name} if "Pretrained" in called else set()
        compares |= {name} if called & {"check_source", "compare_source"} else set()
    assert opens - compares == set(OPENED_WITHOUT)
