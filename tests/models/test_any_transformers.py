"""The family `transformers`: a folder of another architecture trains, exports and generates as transformers' model."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ranvier.checkpoint.hf.export_model import export, export_adapters
from ranvier.checkpoint.hf.forms import form_of
from ranvier.checkpoint.hf.from_pretrained import resolve_pretrained
from ranvier.checkpoint.hf.pretrained import Pretrained
from ranvier.cli.main import run_command
from ranvier.config.run import Batch, Checkpoint, Data, Lora, Run, Train, Transformer
from ranvier.mesh import Mesh
from ranvier.models import any_transformers, families
from ranvier.models.any_transformers import TRANSFORMERS, cut_model, release, sizes_of
from ranvier.pipeline.engine import Engine
from ranvier.pipeline.microbatch import Microbatch
from ranvier.plan.block_costs import block_costs
from ranvier.testing.ranks import run_ranks
from tests.checkpoint.test_hf_and_training import trained
from tests.checkpoint.test_hf_llama import TEXT, published_tokenizer
from tests.covering import first
from tests.errors import raises

transformers = pytest.importorskip("transformers")
SIZES = dict(vocab_size=290, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=32)
KINDS = {
    "Cohere": dict(pad_token_id=0, bos_token_id=280, eos_token_id=281),
    "Mixtral": dict(num_local_experts=4),
    "Mamba": dict(state_size=4),
    "GPTNeoX": {},
}
CLOSE = {"GPTNeoX": 1e-10, "Cohere": 1e-6, "Mixtral": 1e-5, "Mamba": 1e-5}
"""Tolerances of gradients: transformers computes some norms and states in fp32 whatever the model's format."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Architecture -> the folder of a tiny random model, with a tokenizer, built once."""
    found = {}

    def folder(kind):
        if kind not in found:
            torch.manual_seed(0)
            model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(
                **SIZES, **KINDS[kind]))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            found[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(found[kind])
            published_tokenizer().save(str(found[kind] / "tokenizer.json"))
        return found[kind]

    return folder


def settings(folder):
    return Transformer(family="transformers", pretrained=str(folder), **sizes_of(str(folder)) | dict(sequence=12))


@pytest.mark.parametrize("kind", first(["Mixtral"], KINDS))
def test_gradients_on_replicas_and_stages(folder_of, kind):
    dtype = torch.float32 if kind == "Mixtral" else torch.float64  # torch has no products of experts in wider formats
    folder = folder_of(kind)
    ids = torch.randint(2, 290, (4, 2, 13), generator=torch.Generator().manual_seed(1))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()
    logits = theirs(ids.flatten(0, 1)[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, :, 1:].flatten())
    loss.backward()
    expected, scale = dict(theirs.named_parameters()), max(one.grad.norm() for one in theirs.parameters())
    names = cut_model(str(folder), dtype).names
    assert set(names.values()) == set(expected)

    def rank(world):
        engine = Engine(TRANSFORMERS.model(settings(folder), "tokens", dtype=dtype), world, mesh=Mesh(data=2, pipe=2),
                        dtype=dtype)
        own = ids[engine.coordinates.data * 2:][:2]
        result = engine.forward_backward([
            Microbatch(one[:, :-1] if engine.is_first_stage else None, one[:, 1:] if engine.is_last_stage else None,
                       torch.arange(2) + 2 * place) for place, one in enumerate(own)])
        found = {name: gradient.clone() for name, gradient in engine.gradients().items()}
        engine.close()
        return found, result.loss

    seen, close = set(), CLOSE[kind]
    for found, ours in run_ranks(rank, 4):
        assert ours is None or ours == pytest.approx(float(loss.detach()), rel=close)
        for name in names.keys() & found.keys():
            wanted = expected[names[name]].grad
            assert (found[name] - wanted).norm() < close * max(wanted.norm(), 1e-3 * scale), name
            seen.add(name)
    assert seen == set(names)


@pytest.mark.parametrize("kind", ["Cohere", "Mixtral"])
def test_costs_are_counted_without_data(folder_of, kind):
    model = cut_model(str(folder_of(kind)), torch.float32).blocks
    ids = torch.zeros(2, 12, dtype=torch.int64)
    costs = block_costs(model, ids, ids)
    assert [cost.name for cost in costs] == ["embedding", "layer0", "layer1", "layer2", "head"]
    assert costs[1].flops == costs[2].flops > 0


def test_blocks_hold_nothing_of_the_whole_model(folder_of):
    cut = cut_model(str(folder_of("Cohere")), torch.float32)
    model, whole = cut.blocks, [weakref.ref(parameter) for module in cut.modules.values()
                                for parameter in module.parameters()]
    blocks = [build() for build in model.blocks.values()]
    del cut
    release()
    gc.collect()
    assert not any(one() is not None for one in whole)
    assert blocks[-1].training and all(not one.is_meta for block in blocks for one in block.parameters())


# ---------------------------------------------------------------------- runs


@pytest.fixture
def run(folder_of, tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / f"texts/{number}.txt").write_text(TEXT * 2)
    return Run(mesh=Mesh(pipe=2), batch=Batch(global_size=4, microbatch_size=2), checkpoint=Checkpoint(keep=1),
               train=Train(steps=1, learning_rate=1e-30, eval_sequences=4, sample_tokens=0),
               model=Transformer(family="transformers", pretrained=str(folder_of("Cohere")), sequence=16),
               data=Data(corpus=str(tmp_path / "texts"), cache_dir=tmp_path / "cache"), run_dir=tmp_path / "run")


def test_out_again_to_the_bit_and_texts_as_transformers(folder_of, run, tmp_path, capsys):
    trained(run)
    export(run.run_dir, tmp_path / "out", tell=lambda line: None)
    before, after = (load_file(folder / "model.safetensors") for folder in (folder_of("Cohere"), tmp_path / "out"))
    assert before.keys() == after.keys() and all(torch.equal(after[name], one) for name, one in before.items())
    assert run_command(["generate", str(run.run_dir), "--prompt", "The arrow", "--max-tokens", "5", "--temperature",
                        "0", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)["answer"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == "CohereForCausalLM" and model.config.eos_token_id == 281
    inner = published_tokenizer()
    ids = torch.tensor([inner.encode("The arrow").ids])  # its tokenizer begins each text with a token
    found = model.generate(ids, max_new_tokens=5, do_sample=False, suppress_tokens=list(range(282, 290)))
    assert inner.decode(found[0, ids.shape[1]:].tolist()) == answer


@pytest.mark.slow
def test_adapters(folder_of, run, tmp_path):
    """Adapters are exported under transformers' names, and merged."""
    peft = pytest.importorskip("peft")
    trained(replace(run, lora=Lora(rank=2, alpha=4, targets=("layer.self_attn.q_proj", "layer.mlp.down_proj")),
                    train=replace(run.train, learning_rate=0.1)))
    assert run_command(["evaluate", str(run.run_dir), "--json"]) == 0
    export_adapters(run.run_dir, tmp_path / "adapters", tell=lambda line: None)
    export(run.run_dir, tmp_path / "merged", tell=lambda line: None)
    base, merged = (transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
                    for folder in (folder_of("Cohere"), tmp_path / "merged"))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        plain, wanted = base(ids).logits, merged(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")(ids).logits
    assert (adapted - wanted).abs().max() < 1e-5 < (adapted - plain).abs().max()


# ---------------------------------------------------------------------- what is refused


def changed(folder, tmp_path, *, without=(), more=(), **keys):
    """A copy of the folder with other tensors and other keys of config.json."""
    shutil.copytree(folder, tmp_path / "changed")
    document = json.loads((folder / "config.json").read_text())
    (tmp_path / "changed/config.json").write_text(json.dumps(document | keys))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if name not in without}
              | {name: torch.ones(2) for name in more}, tmp_path / "changed/model.safetensors", {"format": "pt"})
    return str(tmp_path / "changed")


@pytest.mark.parametrize("kind", ["Cohere", "GPTNeoX"])  # with a tied head, and with a head of its own
def test_flops_are_those_counted(folder_of, kind):
    config = settings(folder_of(kind))
    with torch.device("meta"):
        inputs, targets = TRANSFORMERS.sample(config, "tokens", 1)
    costs = block_costs(TRANSFORMERS.model(config, "tokens"), inputs, targets)
    assert TRANSFORMERS.flops_per_sample(config) == pytest.approx(3 * sum(cost.flops for cost in costs), rel=0.05)


@pytest.mark.parametrize(("change", "error"), [
    (dict(without=["model.norm.weight"]), ("transformers-tensors-differ", "model.norm.weight")),
    (dict(more=["model.extra"]), ("transformers-tensors-differ", "model.extra")),
    (dict(vocab_size=300), ("transformers-tensors-differ", "mismatched")),
    (dict(model_type="no-such-type"), ("transformers-model-not-built", "no-such-type")),
    (dict(quantization_config={"quant_method": "fp8"}), ("transformers-model-quantized",)),
    (dict(attn_implementation="someone/kernels"), ("transformers-kernels", "someone/kernels")),
    (dict(text_config={"_attn_implementation": {"": "someone/kernels"}}), ("transformers-kernels", "someone/kernels")),
    pytest.param(dict(model_type="t5"), ("transformers-model-not-built", "t5"), marks=pytest.mark.slow),
])
def test_folders_that_are_not_taken(folder_of, tmp_path, change, error):
    folder = changed(folder_of("Cohere"), tmp_path, **change)
    with raises(*error):
        cut_model(folder, torch.float32)
        sizes_of(folder)


@pytest.mark.parametrize("joined", [False, True])
def test_the_flag_that_names_a_folder(folder_of, joined, capsys):
    folder = str(folder_of("Cohere"))
    flags = [f"--model.from-transformers={folder}"] if joined else ["--model.from-transformers", folder]
    run_command(["check", *flags, "--json"])
    found = {one["name"]: one["value"] for one in json.loads(capsys.readouterr().out)["values"]}
    assert (found["model.family"], found["model.pretrained"]) == ("transformers", folder)


def test_links_out_of_a_folder_are_not_followed(folder_of, tmp_path):
    folder = Path(changed(folder_of("Cohere"), tmp_path))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder_of("Cohere") / "model.safetensors")
    with raises("transformers-folder-unreadable", "leads out of its folder"):
        cut_model(str(folder), torch.float32)


def test_settings_of_the_folder(folder_of, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with raises("transformers-size-missing", "vocab"):
        sizes_of(str(tmp_path))
    config = settings(changed(folder_of("Cohere"), tmp_path))
    assert form_of(config).write(config, "tokens")["model_type"] == "cohere"
    ended = replace(config, untied=True)  # as after one end has frozen
    name, = form_of(ended).places(ended, "tokens").keys() - form_of(config).places(config, "tokens").keys()
    assert form_of(config).tied(config) == {name: "embedding.model.model.embed_tokens.weight"}
    assert form_of(ended).places(ended, "tokens")[name].names == ("lm_head.weight",)
    assert not form_of(ended).write(ended, "tokens")["tie_word_embeddings"] and not form_of(ended).tied(ended)
    assert TRANSFORMERS.model(config, "tokens").tied and not TRANSFORMERS.model(ended, "tokens").tied
    (tmp_path / "changed/config.json").unlink()
    with raises("config-json-unreadable", str(tmp_path / "changed")):
        form_of(config).write(config, "tokens")


def test_settings_that_it_cannot_have(folder_of, run, tmp_path):
    with raises("unknown-model-type", "cohere", "--model.family transformers"):
        Pretrained(folder_of("Cohere"))
    (tmp_path / "bare").mkdir()
    shutil.copy(Path(run.model.pretrained) / "config.json", tmp_path / "bare")
    for model, error in ((dict(pretrained=None), ["transformers-needs-folder"]),
                         (dict(pretrained=str(tmp_path / "bare")), ["transformers-needs-folder", "hf download"]),
                         (dict(pretrained="CohereLabs/command"), ["transformers-needs-folder", "hf download"])):
        found = families.problems(replace(run, model=replace(run.model, **model)))
        assert [one.code for one in found] == error[:1]
    for own in (dict(dropout=0.5), dict(intermediate=7), dict(norm_epsilon=0.5)):
        found, = families.problems(replace(run, model=replace(run.model, **own)))
        assert found.code == "setting-of-transformers-folder" and own[found.where.removeprefix("model.").replace(
            "-", "_")] == found.value
    for data, code in ((dict(packing=True), "packing-without-segments"),
                       (dict(task="preference"), "family-without-task")):
        found = families.problems(replace(run, data=replace(run.data, **data)))
        assert [one.code for one in found] == [code]
    with raises("sequence-beyond-pretrained", 33, 32):
        resolve_pretrained(replace(run, model=replace(run.model, sequence=33)))
    with raises("differs-from-pretrained", "model.vocab", 999):
        resolve_pretrained(replace(run, model=replace(run.model, vocab=999)))
    assert resolve_pretrained(run).model.num_layers == 3


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with raises("transformers-not-installed", where="model.family", value="transformers"):
        any_transformers._transformers()
