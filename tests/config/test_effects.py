"""Settings without effect: the table has every setting, and is right; only values that a user has chosen give
warnings."""

import io
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ranvier.arguments import literal_values
from ranvier.cli import check
from ranvier.cli.main import run_command
from ranvier.config import effects, read
from ranvier.config.resolve import ResolvedRun
from ranvier.config.run import (
    Batch,
    Checkpoint,
    Data,
    Elastic,
    Launch,
    Optim,
    Pipeline,
    Run,
    TensorParallel,
    Train,
    Transformer,
)
from ranvier.mesh import Mesh
from ranvier.optim.rules import rules_of
from ranvier.optim.tensor_update import TensorUpdate
from ranvier.planner.problems import warnings
from ranvier.testing.ranks import run_ranks
from ranvier.train.loop import train
from tests.covering import quick

TABLE = {**effects.CONDITIONS, **effects.ASKED}
ALWAYS = frozenset({
    "mesh.data", "mesh.pipe", "mesh.row", "mesh.col", "batch.global_size", "batch.microbatch_size", "train.epochs",
    "train.learning_rate", "train.warmup_steps", "train.schedule", "pipeline.policy", "pipeline.boundaries",
    "comm.transport", "comm.timeout_seconds", "optim.algorithm", "optim.weight_decay", "optim.groups",
    "optim.clip_norm", "optim.ema", "optim.offload", "optim.bucket_size", "optim.update_in_backward",
    "memory.recompute",
    "checkpoint.dir", "checkpoint.best", "checkpoint.background",
    "checkpoint.on_error", "guard.bad_step", "guard.loss_spike_factor",
    "launch.launcher", "launch.join_address",
    "log.tracker", "log.every", "launch.threads", "launch.device", "launch.hang_seconds", "model.family",
    "model.preset", "model.pretrained",
    "model.float8",
    "model.num_layers", "model.hidden", "model.heads", "model.dropout",
    "lora.rank", "lora.adapters", "data.task", "data.cache_dir", "data.eval", "data.eval_sets",
    "elastic.freeze", "elastic.manual", "elastic.profile_microbatches", "seed", "precision", "memory_report", "verbose",
    "resume", "run_dir"})
"""Settings that change something in every run that is not refused because of them."""
OTHER = {
    "mesh.tile": (2, 2), "train.steps": 77, "train.final_learning_rate": 1e-4, "train.eval_every": 50,
    "train.eval_sequences": 2, "train.eval_ema": True, "train.early_stopping": 1, "train.early_stopping_delta": 0.5,
    "train.sample_tokens": 3, "train.prompt": "the arrow", "pipeline.in_flight": 1,
    "pipeline.look_ahead": 1, "deterministic": True, "pipeline.partition": "uniform", "pipeline.defer_bytes": 1000,
    "pipeline.memory": 2.0, "pipeline.deferred": (1, 1), "pipeline.defer_last": 2,
    "pipeline.stages_per_rank": 2,
    "pipeline.placement": "interleaved", "tensor.scheme": "summa",
    "tensor.sequence_sharding": True, "tensor.keep_weights": True, "tensor.reduce_dtype": "fp32",
    "tensor.panel_bytes": 500,
    "launch.stopped_seconds": 1.0, "launch.survive_losses": True,
    "max_restarts": 2, "optim.betas": (0.5, 0.6), "optim.epsilon": 1e-2,
    "optim.momentum": 0.1, "optim.decay": "matrices", "optim.accumulate": "half", "optim.reduce_dtype": "fp32",
    "optim.chunk_buckets": 1, "optim.offload_share": 0.3, "optim.clip_from": "previous-step",
    "optim.buckets_in_flight": 1, "optim.shard": True, "optim.initial_loss_scale": 8.0,
    "optim.loss_scale_window": 1, "optim.options": ("clip=2",), "optim.muon_scale": "original",
    "train.decay_share": 0.5, "train.decay_shape": "linear",
    "checkpoint.every": 50, "checkpoint.keep": 1, "checkpoint.keep_every": 1,
    "guard.max_bad_steps": 1, "guard.compare_every": 1, "launch.cluster": "laptop", "launch.trial": 3,
    "log.project": "p", "log.store": "s", "log.offline": True, "model.vocab": 999, "comm.collectives": "torch",
    "model.sequence": 11, "model.num_classes": 7, "model.image_size": 64, "model.patch_size": 8,
    "model.compile": True, "model.attention_kernel": "math",
    "model.intermediate": 48, "model.norm_epsilon": 0.5, "model.max_positions": 99, "model.kv_heads": 1,
    "model.head_dim": 6, "model.activation": "gelu",
    "model.bias": "all", "model.untied": True, "model.tied": True, "model.norms": "both", "model.norm_offset": 1,
    "model.qk_norm": "head",
    "model.query_pre_attn_scalar": 5.0, "model.window": 3, "model.full_every": 2,
    "model.full_layers": (0,), "model.nope_layers": (0,), "model.residual_multiplier": 0.5, "model.logits_scaling": 2.0,
    "model.rope_base": 500.0,
    "model.window_rope_base": 77.0,
    "model.rope_scaling": "linear", "model.rope_factor": 2.0, "model.rope_positions": 9,
    "model.rope_limits": (2.0, 3.0),
    "model.rope_magnitude": 1.5, "model.embedding_scale": "sqrt-hidden", "model.attention_softcap": 3.0,
    "model.logit_softcap": 3.0, "lora.alpha": 3.0, "lora.targets": ("qkv",), "lora.dropout": 0.5, "lora.method": "dora",
    "lora.train_head": True, "lora.base_format": "nf4",
    "data.train": "nowhere.tsv", "data.train_samples": 3, "data.eval_samples": 3,
    "data.augment": "flip-crop", "data.augment_repeats": True, "data.corpus": "nowhere", "data.max_bytes": 10,
    "data.text_column": "x", "data.pair_column": "x", "data.label_column": "x", "data.messages_column": "x",
    "data.chat_template": Path("nowhere"), "data.form": "alpaca", "data.mixture": ("nowhere=1",), "data.packing": True,
    "preference.loss": "ipo", "preference.beta": 0.7, "preference.label_smoothing": 0.25, "preference.gamma": 1.5,
    "data.padding": "maximum", "data.tokenizer": "gpt2", "data.options": ("length=3",), "model.options": ("depth=3",),
    "elastic.options": ("patience=2",), "elastic.alpha": 0.9, "elastic.every": 1, "elastic.dry_run": True,
    "elastic.auto_pipe": True, "elastic.auto_dp": True, "elastic.cut": "reference", "elastic.global_batch": "scale",
    "elastic.cache": True, "elastic.cache_from": 1, "elastic.cache_dir": Path("nowhere"), "elastic.cache_bytes": 1,
    "elastic.cache_precision": "full", "elastic.frozen_dropout": False}
"""Another value of each setting that has a condition."""


def test_every_setting_is_in_the_table_or_always_has_an_effect():
    listed = set(TABLE)
    assert not listed & ALWAYS
    assert listed | ALWAYS == set(read.settings()), (
        "say in config/effects.py when a setting has no effect, or list it in ALWAYS if it always has one")
    assert set(OTHER) == listed, "OTHER needs a value other than the default for each setting of config/effects.py"
    assert all(OTHER[name] != read.settings()[name].default for name in listed)


@pytest.mark.parametrize("algorithm", literal_values(read.settings()["optim.algorithm"].annotation))
def test_settings_that_an_optimizer_reads_have_an_effect(algorithm, monkeypatch):
    """Found by watching an update of a matrix of a layer and of a bias."""
    found, plain = set(), Optim.__getattribute__
    monkeypatch.setattr(Optim, "__getattribute__", lambda self, name: (found.add(name), plain(self, name))[1])
    rules = rules_of(Optim(algorithm=algorithm))
    for shape, in_layer in (((2, 3), True), ((3,), False)):
        states = {name: torch.zeros(own or shape)
                  for name, own in rules.state_shapes("", shape, in_layer=in_layer).items()}
        rates = {"step": 1, "learning_rate": 0.1, "weight_decay": 0.1}
        if rules.needs_whole("", shape, in_layer=in_layer):
            rules.tensors.update_tensors({"": TensorUpdate(
                shape=shape, parameter=torch.ones(shape), gradient=torch.ones(shape), states=states, **rates)})
        else:
            rules.elementwise.update(torch.ones(shape), torch.ones(shape), states, **rates)
    monkeypatch.undo()
    optional = {"betas", "epsilon", "momentum", "muon_scale"}
    run = ResolvedRun(optim=Optim(algorithm=algorithm))
    listed = {name for name in optional if TABLE[f"optim.{name}"](run) is None}
    assert listed == found & optional, f"say in config/effects.py which of these settings {algorithm} reads"


def texts(folder):
    choose = random.Random(0)
    words = ("the", "arrow", "flies", "over", "green", "fields", "and", "waits")
    (folder / "texts").mkdir()
    for number in range(30):
        (folder / "texts" / f"{number}.txt").write_text(" ".join(choose.choices(words, k=100)))
    rows = [f"{('bad', 'good')[number % 2]}\t{' '.join(choose.choices(words, k=4))} {number}" for number in range(24)]
    (folder / "train.tsv").write_text("\n".join(["label\tsentence", *rows]))
    for number in range(24):
        place = folder / "images" / ("cat", "dog")[number % 2] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 5 * number, dtype=np.uint8)).save(place)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs in which most settings that have a condition have no effect in one of them."""
    folder = tmp_path_factory.mktemp("effects")
    texts(folder)
    gpt = Transformer(num_layers=2, hidden=16, heads=2, vocab=300, sequence=16)
    lm = Run(batch=Batch(global_size=4, microbatch_size=2), model=gpt, checkpoint=Checkpoint(every=0),
             train=Train(steps=2, sample_tokens=5, eval_sequences=4, learning_rate=1e-2),
             data=Data(corpus=str(folder / "texts"), cache_dir=folder / "cache"))
    bert = replace(lm, model=replace(gpt, vocab=60, sequence=8), train=replace(lm.train, epochs=1),
                   batch=Batch(global_size=8, microbatch_size=4),
                   data=Data(task="classification", train=str(folder / "train.tsv"), cache_dir=folder / "cache"))
    return {
        "one rank": replace(lm, optim=Optim(weight_decay=0.0)),
        "gpipe": replace(lm, mesh=Mesh(pipe=2), launch=Launch(device="cpu"),
                         pipeline=Pipeline(policy="gpipe", boundaries=(3,)),
                         optim=Optim(algorithm="sgd"), train=replace(lm.train, sample_tokens=0, eval_every=3),
                         checkpoint=Checkpoint(every=3)),
        "columns": replace(lm, mesh=Mesh(col=2)),
        "megatron": replace(lm, mesh=Mesh(col=2), tensor=TensorParallel(scheme="megatron")),
        "sentences": replace(bert, elastic=Elastic(freeze="manual", manual=("1:1",)), train=replace(bert.train,
                                                                                                 sample_tokens=0)),
        "dry": replace(bert, elastic=Elastic(freeze="cap", every=1, dry_run=True)),
        "images": replace(bert, model=replace(gpt, image_size=8, patch_size=4),
                          data=replace(bert.data, task="images", train=str(folder / "images")))}


def numbers(run, folder):
    """Results of a run, without times."""
    run = replace(run, run_dir=folder)
    run_ranks(lambda world: train(run, "tiny", world, stream=io.StringIO()), run.mesh.size, timeout_seconds=120)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss", "grad_norm", "tokens", "learning_rate", "eval_loss", "eval_accuracy", "frozen_layers")
    last = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    return [{name: step.get(name) for name in kept} for step in steps], last.get("sample")


def idle(run):
    """The settings that have no effect in `run`, by the table."""
    return [name for name, reason in TABLE.items() if reason(run) is not None]


@pytest.mark.parametrize("kind", quick(2, ["one rank", "gpipe", "columns", "megatron", "sentences", "dry", "images"]))
def test_what_is_said_to_have_no_effect_has_none(runs, kind, tmp_path):
    run = runs[kind]
    values = read.flatten(run)
    changed = read._build(Run, {**values, **{name: OTHER[name] for name in idle(run)}})
    assert {warning.where for warning in effects.warnings(changed)} >= {
        read.flag(name) for name in idle(run) if TABLE[name](changed)}
    assert numbers(changed, tmp_path / "changed") == numbers(run, tmp_path / "plain")


def test_each_condition_is_tried(runs):
    tried = {name for run in runs.values() for name in idle(run)}
    assert set(TABLE) - tried == set()


# ---------------------------------------------------------------------- values that give warnings

def warned(*layers):
    found = read.merge(layers)
    return [warning.where for warning in warnings(found.run, found.chosen)]


def flags(**values):
    return read.Layer(origin="flag", is_text=True, values={name.replace("__", "."): text
                                                              for name, text in values.items()})


def test_only_values_of_a_user_are_told(tmp_path):
    shipped = read.load("gpt-12b")[1]
    assert warned(shipped, flags(precision="fp32")) == [], "the user has not chosen the recipe's optim.accumulate"
    assert warned(shipped, flags(precision="fp32", optim__accumulate="half")) == ["optim.accumulate"]
    assert warned(flags(optim__momentum="0.9")) == ["optim.momentum"], "though it is the default"
    assert warned(flags(optim__shard="false", elastic__cache="false")) == [], "these values ask for nothing"
    own = tmp_path / "run.toml"
    read.write(replace(Run(optim=Optim(momentum=0.5)), run_dir=tmp_path), own)
    assert warned(read.load(str(own))[1]) == [], "a run's own file has all values"
    other = tmp_path / "mine.toml"
    other.write_text("[optim]\nmomentum = 0.5\n")
    assert warned(read.load(str(other))[1]) == ["optim.momentum"]


@pytest.mark.parametrize(("values", "told"), [
    (dict(model__rope_scaling="linear", model__rope_factor="2", model__rope_limits="1,4", model__rope_positions="9",
          model__rope_magnitude="2"), ["model.rope-positions", "model.rope-limits", "model.rope-magnitude"]),
    (dict(model__rope_scaling="llama3", model__rope_positions="9", model__rope_limits="1,4"), ["model.rope-scaling"]),
    (dict(model__rope_scaling="dynamic", model__rope_positions="9"), []),
    (dict(model__window="3", model__full_every="1"), ["model.window"]),
    (dict(model__window="3", model__full_layers="0,2"), []),
    (dict(model__family="gpt", model__intermediate="48", model__norm_epsilon="0.1"), [
        "model.intermediate", "model.norm-epsilon"]),
    (dict(model__family="auto", data__task="reward", model__kv_heads="2", model__untied="true"), ["model.untied"]),
    (dict(data__corpus="a.txt", data__mixture="b.txt=1,c.txt=2"), ["data.corpus"])])
def test_what_other_settings_of_a_model_leave_idle(values, told):
    assert warned(flags(**{"model__family": "llama", **values})) == told


def test_a_cluster_is_read_where_something_is_auto():
    def told(**values):
        found = read.merge([flags(launch__cluster="laptop", **values)])
        return [warning.where for warning in check.check(found.run, 4, chosen=found.chosen).warnings]

    assert told(mesh__data="4") == ["launch.cluster"] and told(mesh__data="auto") == []


def test_steps_that_are_asked_for_overrule_a_recipes_epochs(capsys):
    recipe = read.load("bert-sentiment")[1]
    found = read.merge([recipe, flags(train__steps="8")])
    assert (found.run.train.steps, found.run.train.epochs) == (8, None)
    assert found.origins["train.epochs"] == "flag through train.steps"
    assert read.merge([recipe, flags(train__steps="8", train__epochs="2")]).run.train.epochs == 2
    assert warned(recipe, flags(train__steps="8", train__epochs="2")) == ["train.steps"]
    for given, shown in ((["--train.steps", "8"], ("8", "none")), ([], ("by train.epochs", "3"))):
        run_command(["check", "bert-sentiment", "--model.pretrained", "none", "--json", *given])
        values = {entry["name"]: entry["value"] for entry in json.loads(capsys.readouterr().out)["values"]}
        assert (values["train.steps"], values["train.epochs"]) == shown


def test_a_limit_is_of_the_corpus_that_it_was_given_for():
    recipe = read.load("gpt-tiny")[1]
    assert read.merge([recipe, flags(data__corpus="mine.txt")]).run.data.max_bytes == "auto"
    for values in ({}, {"data__corpus": "python-stdlib"}):
        assert read.merge([recipe, flags(**values)]).run.data.max_bytes == 8_000_000
    assert read.merge([recipe, flags(data__corpus="mine.txt", data__max_bytes="5")]).run.data.max_bytes == 5
    images = read.load("vit-cifar10")[1]
    for values, counts in (({}, (2000, 500)), ({"data__train": "cifar10"}, (2000, 500)),
                           ({"data__train": "mine"}, (None, None)), ({"data__eval": "mine"}, (2000, None)),
                           ({"data__train": "mine", "data__eval_samples": "7"}, (None, 7))):
        data = read.merge([images, flags(**values)]).run.data
        assert (data.train_samples, data.eval_samples) == counts


def test_a_warm_up_that_is_longer_than_the_epochs_is_told_when_their_steps_are_known(runs, tmp_path):
    run = runs["sentences"]
    run = replace(run, train=replace(run.train, warmup_steps=50))
    assert list(warnings(run, ())) == []
    numbers(run, tmp_path)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    told, = [event["text"] for event in events if event["event"] == "settings"]
    assert told == ("train.warmup-steps: is not shorter than the run of 3 steps, so warmup takes all of it (got 50). "
                    "Lower --train.warmup-steps, or raise --train.epochs.")
