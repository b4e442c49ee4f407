"""Preference tuning from pairs to a model: the reference is computed once, by the model with which the run begins."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ranvier.checkpoint.hf.from_pretrained import resolve_pretrained
from ranvier.checkpoint.manifest import Saved, checkpoints
from ranvier.cli.main import run_command
from ranvier.config.run import Batch, Checkpoint, Data, Lora, Preference, Run, Train, Transformer
from ranvier.errors import CheckpointError, ConfigError, DataError
from ranvier.mesh import Mesh
from ranvier.testing.ranks import run_ranks
from ranvier.train.loop import train
from ranvier.train.reference_log_probs import _read_by_first
from tests.data.test_chat import tokenizer_in
from tests.data.test_preference import rows_of, written

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("preference")
    tokenizer_in(path / "tokenizer")
    written(path / "pairs.jsonl", rows_of(40))
    return path


def run_of(folder, run_dir, **changed):
    return Run(**{
        "batch": Batch(global_size=8, microbatch_size=2), "precision": "fp64", "run_dir": run_dir,
        "train": Train(steps=4, learning_rate=3e-3, sample_tokens=0), "checkpoint": Checkpoint(every=2),
        "model": Transformer(num_layers=2, hidden=16, heads=2, vocab=300, sequence=96),
        "data": Data(task="preference", train=str(folder / "pairs.jsonl"), tokenizer=str(folder / "tokenizer"),
                     cache_dir=folder / "cache"), **changed})


def trained(run):
    stream = io.StringIO()
    summary = run_ranks(lambda world: train(run, "pairs", world, stream=stream), run.mesh.size, timeout_seconds=200)[0]
    saved = Saved(checkpoints(run.run_dir / "checkpoint")[0])
    return summary, {name: saved.read("parameter", name) for name in saved.manifest.tensors["parameter"]}


def reference_of(run):
    return json.loads((run.run_dir / "reference.json").read_text())


def losses_of(run):
    return [line["loss"] for line in map(json.loads, (run.run_dir / "metrics.jsonl").read_text().splitlines())
            if "loss" in line]


@pytest.mark.slow
def test_a_run_resumes_with_its_own_reference_on_another_mesh(folder, tmp_path):
    whole = run_of(folder, tmp_path / "whole")
    summary, expected = trained(whole)
    assert summary["eval_accuracy"] == 1.0 and summary["eval_reward_margin"] > 0
    losses = losses_of(whole)
    assert abs(losses[0] - np.log(2)) < 1e-9 and losses[-1] < losses[0] - 0.01
    first = run_of(folder, tmp_path / "run", mesh=Mesh(pipe=2))
    trained(replace(first, train=replace(first.train, steps=2)))
    before = reference_of(first)
    for name, values in reference_of(whole)["sets"].items():
        assert np.abs(np.array(values) - before["sets"][name]).max() < 1e-9
    _, found = trained(replace(first, mesh=Mesh(col=2), resume="auto"))
    assert reference_of(first) == before
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-9)


def test_a_resumed_run_without_its_reference_is_refused(folder, tmp_path):
    run = run_of(folder, tmp_path / "run", train=Train(steps=2, sample_tokens=0))
    trained(run)
    path, again = run.run_dir / "reference.json", replace(run, resume="auto", train=replace(run.train, steps=4))
    document = path.read_text()
    for text, kind in ((None, CheckpointError), (document.replace('"data": "', '"data": "other'), DataError),
                       ('{"sets": {"": [[1, 2]], "eval-": []}, ' + document[1:document.index(",")] + "}",
                        CheckpointError)):
        path.unlink() if text is None else path.write_text(text)
        with pytest.raises(kind) as caught:
            trained(again)
        assert caught.value.where == str(path)


def test_all_ranks_end_where_the_first_cannot_read_the_reference(tmp_path):
    def rank(world):
        everyone = world.backend.group("all", [(0, 1)])
        with pytest.raises(CheckpointError) as caught:
            _read_by_first(tmp_path / "reference.json", SimpleNamespace(train=None, eval=None, eval_sets={}), everyone)
        return caught.value.code
    assert run_ranks(rank, 2) == ["no-reference", "reference-of-first"]


def test_without_a_reference_nothing_is_computed_beforehand(folder, tmp_path, capsys):
    run = run_of(folder, tmp_path / "run", preference=Preference(loss="simpo", beta=2.0, gamma=0.5))
    summary, _ = trained(run)
    assert run_command(["evaluate", str(run.run_dir), "--json"]) == 0
    found, = json.loads(capsys.readouterr().out)["results"].values()
    assert "perplexity" not in found, "the loss is that of pairs"
    for name in ("accuracy", "reward_margin"):
        assert abs(found[name] - summary[f"eval_{name}"]) < 1e-9
    assert run_command(["evaluate", str(run.run_dir), "--preference.loss", "dpo"]) == 2
    assert "preference.loss" in capsys.readouterr().err
    assert not (run.run_dir / "reference.json").exists() and summary["eval_count"] == 4


def test_adapters_have_the_base_as_reference(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    base = tokenizer_in(tmp_path / "base")
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=24, max_position_embeddings=96, initializer_range=0.2)).double().save_pretrained(base)
    settings = {"model": Transformer(pretrained=str(base), sequence=96), "lora": Lora(rank=2, alpha=64.0)}
    first = resolve_pretrained(run_of(folder, tmp_path / "first", **settings))
    trained(first)
    assert run_command(["export", str(first.run_dir), str(tmp_path / "adapters"), "--adapters"]) == 0
    second = resolve_pretrained(run_of(folder, tmp_path / "second", **settings | {
        "lora": replace(first.lora, adapters=tmp_path / "adapters")}))
    trained(second)
    assert reference_of(second)["sets"] == reference_of(first)["sets"]
    assert abs(losses_of(second)[0] - np.log(2)) > 1e-3, "the adapters of the first run are there from the first step"

    third = replace(first, run_dir=tmp_path / "third", resume=str(checkpoints(first.run_dir / "checkpoint")[0]),
                    train=replace(first.train, steps=6))
    with pytest.raises(ConfigError) as caught:
        trained(third)
    assert caught.value.where == "resume" and "adapters" in caught.value.what
