"""From a run to Hugging Face's form, and from there into another run: nothing changes on the way."""

import io
import json
import random
import tomllib
from dataclasses import replace

import pytest

from ranvier import resolve
from ranvier.checkpoint.hf_export import export
from ranvier.checkpoint.hf_import import import_model
from ranvier.data.tokenizer import load
from ranvier.mesh import Mesh
from ranvier.run import Batch, Data, Run, Train, Transformer
from ranvier.testing.ranks import run_ranks
from ranvier.train.loop import train


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
    assert recipe["model"] == resolve.document(run)["model"]
    found = resolve.resolve([resolve.from_dict(recipe, "run.toml")])
    assert found.problems == ()
    again = replace(found.run, mesh=Mesh(data=1, pipe=1), data=run.data, batch=run.batch,
                    resume=str(tmp_path / "start"), run_dir=tmp_path / "second",
                    train=replace(run.train, steps=1, learning_rate=1e-30))
    _, text = trained(again)
    assert "goes on from" in text and "another one than before" not in text
    close = {"fp32": 1e-5, "bf16": 1e-2}[precision]
    assert last_eval_loss(tmp_path / "second") == pytest.approx(last_eval_loss(tmp_path / "first"), rel=close)
    export(tmp_path / "second", tmp_path / "back", tell=told.append)
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "there/model.safetensors").read_bytes()
