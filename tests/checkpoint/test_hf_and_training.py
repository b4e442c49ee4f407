"""From a run to Hugging Face's format, and from there into another run: nothing changes on the way."""

import io
import json
import random
import tomllib
from dataclasses import replace

import pytest
import tomli_w

from ranvier.checkpoint.hf.export_model import export
from ranvier.checkpoint.hf.import_model import import_model
from ranvier.cli.check import check
from ranvier.config import read
from ranvier.config.effects import warnings
from ranvier.config.resolve import resolve
from ranvier.config.run import Batch, Data, Run, Train, Transformer
from ranvier.data.tokenizer import load
from ranvier.mesh import Mesh
from ranvier.testing.ranks import run_ranks
from ranvier.train.loop import train
from tests.errors import raises


def trained(run):
    """The summary of a run on in-process ranks, and what it printed."""
    stream = io.StringIO()
    summaries = run_ranks(lambda world: train(run, "small", world, stream=stream), run.mesh.size, timeout_seconds=120)
    return summaries[0], stream.getvalue()


def last_eval_loss(run_dir):
    return json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["eval_loss"]


@pytest.fixture
def run(tmp_path):
    choose, words = random.Random(0), ("the", "arrow", "flies", "over", "a", "green", "field")
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / f"texts/{number}.txt").write_text("\n".join(
            " ".join(choose.choices(words, k=10)) for _ in range(20)))
    return Run(mesh=Mesh(data=1, pipe=2, col=2), batch=Batch(global_size=8, microbatch_size=2),
               train=Train(steps=5, learning_rate=1e-2, eval_sequences=8, sample_tokens=0),
               model=Transformer(family="gpt", num_layers=2, hidden=16, heads=2, vocab=280, sequence=16, dropout=0.1),
               data=Data(corpus=str(tmp_path / "texts"), cache_dir=tmp_path / "cache"), run_dir=tmp_path / "first")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_a_run_goes_on_from_the_export_of_another(tmp_path, run, precision):
    transformers = pytest.importorskip("transformers")
    run = replace(run, precision=precision)
    trained(run)
    told = []
    export(tmp_path / "first", tmp_path / "there", tell=told.append)
    assert "step-5, step 5: " in told[0] and "in fp32" in told[0]
    tokenizer = load(tmp_path / "first/tokenizer.json")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "there")("the arrow").input_ids == tokenizer.encode(
        "the arrow")

    import_model(tmp_path / "there", tmp_path / "start", precision=precision, tell=told.append)
    recipe = tomllib.loads((tmp_path / "start/run.toml").read_text())
    expected = tomllib.loads(tomli_w.dumps({"model": read.document(run)["model"]}))
    assert recipe["model"].items() <= expected["model"].items()
    found = read.merge([read.from_dict(recipe, "run.toml")])
    assert found.problems == () and read.document(found.run)["model"] == read.document(run)["model"]
    assert list(warnings(resolve(found.run), [f"model.{name}" for name in recipe["model"]])) == []
    again = replace(found.run, mesh=Mesh(data=1, pipe=1), data=run.data, batch=run.batch,
                    resume=str(tmp_path / "start"), run_dir=tmp_path / "second",
                    train=replace(run.train, steps=1, learning_rate=1e-30))
    _, text = trained(again)
    assert "resumes from" in text and "the text has changed" not in text
    close = {"fp32": 1e-5, "bf16": 1e-2}[precision]
    assert last_eval_loss(tmp_path / "second") == pytest.approx(last_eval_loss(tmp_path / "first"), rel=close)
    export(tmp_path / "second", tmp_path / "back", tell=told.append)
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "there/model.safetensors").read_bytes()


def test_an_imported_model_is_trained_with_its_own_tokenizer_and_no_other(tmp_path, run):
    run = replace(run, mesh=Mesh(), train=replace(run.train, steps=1))
    trained(run)
    told = []
    export(tmp_path / "first", tmp_path / "there", tell=told.append)
    import_model(tmp_path / "there", tmp_path / "start", tell=told.append)
    assert told[-2] == "run.toml trains on python-stdlib: name other text with --data.corpus"
    own = load(tmp_path / "first/tokenizer.json")
    (tmp_path / "other").mkdir()
    for number in range(30):
        (tmp_path / f"other/{number}.txt").write_text(f"{number} entirely different words are written here " * 20)
    found = read.merge([read.load(str(tmp_path / "start/run.toml"))[1]])
    assert found.problems == () and found.run.data.tokenizer == str(tmp_path / "start/tokenizer.json")
    again = replace(found.run, batch=run.batch, train=run.train,
                    data=replace(found.run.data, corpus=str(tmp_path / "other"), cache_dir=tmp_path / "cache"),
                    resume=str(tmp_path / "start"), run_dir=tmp_path / "second")
    trained(again)
    assert load(tmp_path / "second/tokenizer.json").fingerprint == own.fingerprint
    with raises("checkpoint-of-other-tokenizer", "step-0", "bpe", f"{tmp_path}/start"):
        trained(replace(again, data=replace(again.data, tokenizer="bpe"), run_dir=tmp_path / "third"))

    model = json.loads((tmp_path / "there/tokenizer.json").read_text())["model"]
    (tmp_path / "there/tokenizer.json").unlink()
    import_model(tmp_path / "there", tmp_path / "without", tell=told.append)
    assert any(f"put its tokenizer.json at {tmp_path}/without/tokenizer.json before training" in line for line in told)
    refused, = check(read.merge([read.load(str(tmp_path / "without/run.toml"))[1]]).run).problems
    assert str(refused).startswith("data.tokenizer: is neither bpe, gpt2 nor the path of a tokenizer.json that exists")
    (tmp_path / "there/vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "there/merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    import_model(tmp_path / "there", tmp_path / "older", tell=told.append)
    assert load(tmp_path / "older/tokenizer.json").fingerprint == own.fingerprint
