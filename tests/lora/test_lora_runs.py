"""Runs with adapters: from a Hugging Face folder to a checkpoint, on another mesh, and exported again."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace

import pytest
import torch

from ranvier.checkpoint.hf.export_model import export, export_adapters
from ranvier.checkpoint.hf.from_pretrained import resolve_pretrained
from ranvier.checkpoint.hf.import_model import import_model
from ranvier.checkpoint.manifest import Saved, checkpoints
from ranvier.cli.check import check
from ranvier.cli.main import run_command
from ranvier.config import read
from ranvier.config.run import Batch, Checkpoint, Data, Elastic, Lora, Optim, Run, Train, Transformer
from ranvier.data.tokenizer import train as train_tokenizer
from ranvier.mesh import Mesh
from ranvier.models.lora import is_adapter
from ranvier.testing.ranks import run_ranks
from ranvier.train.loop import train
from tests.checkpoint.hf_folders import edit_manifest
from tests.errors import raises

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the brown bear "
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny random Llama as transformers saves it, with a tokenizer and a text file."""
    path = tmp_path_factory.mktemp("base")
    (path / "text.txt").write_text("\n".join(f"{number} {TEXT}" for number in range(120)))
    tokenizer = train_tokenizer([TEXT] * 5, 300)
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=tokenizer.vocab, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, max_position_embeddings=32, initializer_range=0.3)).double().save_pretrained(path)
    tokenizer.save(path / "tokenizer.json")
    return path


def run_of(base, folder, **changed):
    defaults = dict(
        mesh=Mesh(), batch=Batch(global_size=4, microbatch_size=2), precision="fp64", run_dir=folder,
        train=Train(steps=4, learning_rate=3e-2, eval_sequences=4, sample_tokens=0), checkpoint=Checkpoint(every=2),
        model=Transformer(pretrained=str(base), sequence=16), data=Data(corpus=str(base / "text.txt"),
                                                                      cache_dir=base / "cache"),
        lora=Lora(rank=2, alpha=8.0, targets=("q_proj", "o_proj", "down_proj", "up"), dropout=0.1, method="dora"))
    return resolve_pretrained(Run(**defaults | changed))


def trained(run):
    stream = io.StringIO()
    run_ranks(lambda world: train(run, "small", world, stream=stream), run.mesh.size, timeout_seconds=200)
    return stream.getvalue()


def adapters_of(folder):
    saved = Saved(checkpoints(folder / "checkpoint")[0])
    kinds = saved.manifest.tensors
    assert {name for kind in kinds if kind not in ("parameter", "random") for name in kinds[kind]} == {
        name for name in kinds["parameter"] if is_adapter(name)}  # only adapters have states
    return {name: saved.read("parameter", name) for name in kinds["parameter"] if is_adapter(name)}


@pytest.fixture(scope="module")
def first(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    text = trained(run_of(base, folder))
    # two layers with four targets each: rank 2 x (in + out), and out for the magnitude
    assert f"dora of rank 2, alpha 8: {2 * (2 * (32 + 32 + 40 + 40) + 16 + 16 + 24 + 16)} parameters train" in text
    return folder


def last_eval_loss(run_dir):
    return json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["eval_loss"]


def test_resuming_on_another_mesh_trains_the_same_adapters(base, first, tmp_path):
    half = run_of(base, tmp_path / "half", mesh=Mesh(col=2))
    trained(replace(half, train=replace(half.train, steps=2)))
    trained(run_of(base, tmp_path / "half", mesh=Mesh(data=2), resume="auto", optim=Optim(shard=True)))
    expected, found = adapters_of(first), adapters_of(tmp_path / "half")
    assert expected.keys() == found.keys() and len(expected) == 2 * 4 * 3
    assert all(float(value.norm()) > 0 for value in expected.values())
    assert all((found[name] - value).norm() < 1e-9 * value.norm() for name, value in expected.items())


def test_merged_weights_and_adapters_are_exported(base, first, tmp_path, capsys):
    peft = pytest.importorskip("peft")
    told = []
    export(first, tmp_path / "merged", tell=told.append)
    assert "with 8 adapters merged" in told[0]
    assert run_command(["export", str(first), str(tmp_path / "adapters"), "--adapters"]) == 0
    document = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert document["target_modules"] == ["q_proj", "o_proj", "up_proj", "down_proj"] and document["use_dora"]
    model = transformers.LlamaForCausalLM.from_pretrained(base).double()
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged").double()
    ids = torch.randint(0, 280, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(ids).logits
        adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapters", autocast_adapter_dtype=False)(ids).logits
        assert (adapted - merged(ids).logits).abs().max() < 1e-6 < (adapted - plain).abs().max()

    again = run_of(base, tmp_path / "again", lora=Lora(adapters=tmp_path / "adapters"), mesh=Mesh(pipe=2),
                   train=Train(steps=1, learning_rate=1e-30, eval_sequences=4, sample_tokens=0))
    assert (again.lora.rank, again.lora.alpha, again.lora.method) == (2, 8.0, "dora")
    trained(again)
    assert last_eval_loss(tmp_path / "again") == pytest.approx(last_eval_loss(first), rel=1e-9)
    expected, found = adapters_of(first), adapters_of(tmp_path / "again")
    assert expected.keys() == found.keys()
    assert all((found[name] - value).norm() < 1e-9 * value.norm() for name, value in expected.items())

    capsys.readouterr()
    texts = []
    for folder in (first, tmp_path / "merged"):
        assert run_command(["generate", str(folder), "--prompt", "the quick", "--temperature", "0", "--max-tokens", "8",
                            "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["answer"])
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_adapters_of_an_imported_model(base, first, tmp_path):
    import_model(base, tmp_path / "start", precision="fp64", tell=lambda line: None)
    found = read.merge([read.load(str(tmp_path / "start/run.toml"))[1]]).run
    usual = run_of(base, tmp_path / "tuned")
    run = replace(found, **{name: getattr(usual, name) for name in ("batch", "train", "checkpoint", "lora", "run_dir")},
                  mesh=Mesh(), data=replace(found.data, corpus=usual.data.corpus, cache_dir=usual.data.cache_dir),
                  model=replace(found.model, sequence=16), resume=str(tmp_path / "start"))
    trained(run)
    expected, tuned = adapters_of(first), adapters_of(tmp_path / "tuned")
    assert all((tuned[name] - value).norm() < 1e-9 * value.norm() for name, value in expected.items())


def test_what_cannot_be_resumed_or_exported(base, first, tmp_path):
    with raises("checkpoint-of-other-setting", "lora.alpha"):
        trained(run_of(base, first, resume="auto", lora=replace(run_of(base, first).lora, alpha=3.0)))
    trained(run_of(base, tmp_path / "plain", lora=Lora(), train=Train(steps=1, eval_sequences=4, sample_tokens=0)))
    with raises("tied-parameter-not-in-checkpoint"):
        trained(run_of(base, tmp_path / "more", resume=str(tmp_path / "plain")))
    with raises("checkpoint-without-adapters"):
        export_adapters(tmp_path / "plain", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with raises("differs-from-adapters", "lora.rank"):
        export_adapters(first, tmp_path / "adapters", tell=lambda line: None)
        run_of(base, tmp_path / "other", lora=Lora(adapters=tmp_path / "adapters", rank=5))


def test_adapters_on_a_base_with_other_names_are_not_exported(first, tmp_path):
    """Phi-3 has its projections in one tensor."""
    phi, run = tmp_path / "phi", tmp_path / "run"
    phi.mkdir()
    (phi / "config.json").write_text(json.dumps(dict(
        model_type="phi3", vocab_size=280, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=6, max_position_embeddings=32)))
    shutil.copytree(first, run)
    edit_manifest(max((run / "checkpoint").glob("step-*")),
                  lambda document: document["about"]["run"]["model"].update(pretrained=str(phi)))
    with raises("adapters-of-import-only-base", "Phi-3", str(phi)):
        export_adapters(run, tmp_path / "adapters")
    assert not (tmp_path / "adapters").exists()
    shutil.rmtree(phi)
    export_adapters(run, tmp_path / "adapters", tell=(lines := []).append)
    assert lines[0].startswith(str(phi)) and "not checked" in lines[0]


@pytest.mark.parametrize(("lora", "code"), [
    ({"method": "lora"}, "export-adapters-undescribed"), ({"rank": 3}, "export-adapter-rank")])
def test_adapters_that_the_settings_of_the_run_do_not_describe(first, lora, code, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(first, run)
    edit_manifest(max((run / "checkpoint").glob("step-*")),
                  lambda document: document["about"]["run"]["lora"].update(lora))
    with raises(code):
        export(run, tmp_path / "merged")


@pytest.mark.slow
def test_freezing_and_resharding(base, tmp_path):
    """When the first layer freezes after step 2, its adapters stay, and the run continues on fewer stages."""
    elastic = Elastic(freeze="manual", manual=("2:1",), auto_pipe=True, auto_dp=True)
    run = run_of(base, tmp_path / "elastic", mesh=Mesh(pipe=2), elastic=elastic)
    trained(replace(run, checkpoint=Checkpoint(every=2, keep=3)))
    before, after = ({name: saved.read("parameter", name) for name in saved.manifest.tensors["parameter"]}
                     for saved in (Saved(folder) for folder in sorted(checkpoints(tmp_path / "elastic/checkpoint"))))
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed and all(is_adapter(name) and name.startswith("layer1.") for name in changed)


def test_a_cache_refuses_dropout_of_adapters(base, tmp_path):
    run = run_of(base, tmp_path, elastic=Elastic(freeze="manual", manual=("2:1",), cache=True))
    assert any("lora.dropout is 0.1" in problem.what for problem in check(run).problems)
