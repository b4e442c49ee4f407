"""Runs of decoders whose layers freeze: on changing meshes, cached, resumed, exported, and with adapters."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from ranvier.checkpoint.hf.export_model import export
from ranvier.checkpoint.hf.from_pretrained import resolve_pretrained
from ranvier.checkpoint.manifest import Saved, checkpoints
from ranvier.cli.check import check
from ranvier.cli.main import run_command
from ranvier.config.resolve import resolve
from ranvier.config.run import Batch, Checkpoint, Data, Elastic, Launch, Lora, Optim, Pipeline, Run, Train, Transformer
from ranvier.cost import transition
from ranvier.elastic.ledger import Ledger
from ranvier.mesh import Mesh
from ranvier.planner.count import laid_out
from ranvier.planner.elastic_plan import course
from ranvier.planner.work import Work
from tests.elastic.runs import AT_ONCE, IN_TWO, always, events, lines, losses, read_rows, run_all, transitions
from tests.elastic.test_plan_and_run import CLUSTER, decisions, stated_facts

PAYS = Ledger.decide
SIZES = dict(num_layers=4, hidden=16, heads=2, vocab=300, sequence=12)
MODELS = {"gpt": Transformer(**SIZES), "llama": Transformer(family="llama", tied=True, kv_heads=1, **SIZES)}
NUM_STEPS = 12
BY_HAND = Elastic(freeze="manual", manual=("4:1", "9:3"), auto_pipe=True, auto_dp=True, cache=True, cache_from=1,
                  cache_precision="full")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A few hundred tokens, so that a run of 12 steps sees each window several times."""
    folder = tmp_path_factory.mktemp("text")
    lines = [f"{number} the quick brown fox number {number * 7 % 13} jumps over {number * 3 % 11} lazy dogs"
             for number in range(60)]
    (folder / "text.txt").write_text("\n".join(lines))
    return folder


def run_of(text, run_dir, family="gpt", **changes):
    defaults = dict(mesh=Mesh(pipe=4), precision="fp64", model=MODELS[family], run_dir=run_dir,
                    batch=Batch(global_size=8, microbatch_size=2), optim=Optim(offload="none"),
                    train=Train(steps=NUM_STEPS, learning_rate=3e-3, warmup_steps=2, eval_sequences=4, sample_tokens=4),
                    data=Data(corpus=str(text / "text.txt"), cache_dir=text / "cache"))
    return Run(**defaults | changes)


def in_one_process(text, folder, family="gpt", **changes):
    """Losses of the run that freezes the same layers after the same steps, on one rank, without a cache."""
    elastic = replace(changes.pop("elastic", BY_HAND), auto_pipe=False, auto_dp=False, cache=False)
    run = run_of(text, folder, family, mesh=Mesh(), elastic=elastic, **{"batch": AT_ONCE} | changes)
    run_all(run)
    return losses(run)


@pytest.mark.parametrize("family", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_moving_cached_resumed_run_is_the_run_of_one_process(text, tmp_path, monkeypatch, family):
    expected = in_one_process(text, tmp_path / "one", family)
    always(monkeypatch)
    run = run_of(text, tmp_path / "run", family, mesh=Mesh(pipe=2), batch=IN_TWO, elastic=replace(
        BY_HAND, cache_dir=tmp_path / "outputs"), checkpoint=Checkpoint(every=6, keep=5))
    results, told = run_all(run)
    assert losses(run) == pytest.approx(expected, rel=1e-9)
    assert [(line["step"], line["mesh"]["pipe"], line["mesh"]["data"]) for line in transitions(run)] == [
        (4, 1, 2), (9, 1, 2)]
    assert read_rows(results) > 0
    (untied,) = events(run, "untied")
    assert untied["step"] == 4 and untied["text"] == (
        "head.projection.weight is no longer tied to embedding.token.weight, which is frozen, and continues to train "
        "with its own weights")
    assert untied["text"] in told

    again = replace(run, run_dir=tmp_path / "again", mesh=Mesh(data=2), resume=str(
        tmp_path / "run/checkpoint/step-6"), elastic=replace(run.elastic, cache=False))
    run_all(again)
    assert losses(again) == pytest.approx(expected[6:], rel=1e-9)


@pytest.mark.parametrize("family", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_what_is_exported_has_an_untied_head(text, tmp_path, capsys, family):
    """The exported transformers model has tie_word_embeddings false, and can be read to train from."""
    transformers = pytest.importorskip("transformers")
    run = run_of(text, tmp_path / "run", family, mesh=Mesh(), elastic=Elastic(freeze="manual", manual=("2:1",)),
                 train=Train(steps=5, learning_rate=3e-2, eval_sequences=4, sample_tokens=0))
    run_all(run)
    export(tmp_path / "run", tmp_path / "out", tell=lambda line: None)
    document = json.loads((tmp_path / "out/config.json").read_text())
    assert document["tie_word_embeddings"] is False
    kind = transformers.GPT2LMHeadModel if family == "gpt" else transformers.LlamaForCausalLM
    model = kind.from_pretrained(tmp_path / "out")
    saved = Saved(checkpoints(tmp_path / "run/checkpoint")[0])
    lookup, head = (saved.read("parameter", name) for name in ("embedding.token.weight", "head.projection.weight"))
    assert torch.equal(model.get_input_embeddings().weight.double(), lookup)
    assert torch.equal(model.get_output_embeddings().weight.double(), head) and not torch.equal(lookup, head)

    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    capsys.readouterr()
    assert run_command(["evaluate", str(tmp_path / "run"), "--json", "--train.eval-sequences", "4"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["results"].values()
    assert found["loss"] == pytest.approx(last["eval_loss"], rel=1e-9)
    texts = []
    for folder in ("run", "out"):
        capsys.readouterr()
        assert run_command(["generate", str(tmp_path / folder), "--prompt", "the quick", "--temperature", "0",
                            "--max-tokens", "4", "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["answer"])
    assert texts[0] == texts[1]

    onwards = run_of(text, tmp_path / "onwards", mesh=Mesh(), train=replace(run.train, steps=1, learning_rate=1e-30),
                     model=Transformer(family=family, pretrained=str(tmp_path / "out"), sequence=12))
    run_all(resolve_pretrained(onwards))
    again = json.loads((tmp_path / "onwards/metrics.jsonl").read_text().splitlines()[-1])
    assert again["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-9)


UPPER = Lora(rank=2, alpha=4.0, targets=("layer2.*", "layer3.*"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_a_base_below_the_adapters_is_frozen_from_the_start(text, tmp_path, monkeypatch, family):
    """The base is cached across epochs, ranks become replicas before the first step, and nothing else changes."""
    train = Train(steps=11, learning_rate=3e-3, warmup_steps=2, eval_sequences=4, sample_tokens=0)
    plain = run_of(text, tmp_path / "plain", family, mesh=Mesh(), lora=UPPER, train=train, batch=AT_ONCE)
    run_all(plain)
    always(monkeypatch)
    run = run_of(text, tmp_path / "run", family, mesh=Mesh(pipe=2), batch=IN_TWO, lora=UPPER, train=train,
                 checkpoint=Checkpoint(every=10, keep=5), elastic=Elastic(
                     freeze="untrained", auto_pipe=True, auto_dp=True, cache=True, cache_from=1,
                     cache_precision="full", cache_dir=tmp_path / "outputs"))
    results, told = run_all(run)
    assert losses(run) == pytest.approx(losses(plain), rel=1e-9)
    (change,) = transitions(run)
    assert (change["step"], change["frozen_layers"], change["mesh"]["pipe"], change["mesh"]["data"]) == (0, 2, 1, 2)
    assert change["cache"] and change["reason"] == "nothing trains in them" and not events(run, "untied")
    said = " ".join(told.split())
    assert "freezes the layers in which nothing trains, packs the pipeline, adds replicas, caches" in said
    assert read_rows(results) > 0

    other = run_of(text, tmp_path / "other", family, mesh=Mesh(), lora=replace(UPPER, rank=3), elastic=run.elastic,
                   train=replace(train, steps=4), batch=AT_ONCE)
    results, _ = run_all(other)  # another LoRA rank, on the same base: no run reads another run's entries
    counts = results[0]["cache"][0]
    assert counts["misses"] > 0 and counts["misses"] + counts["hits"] == 8 * 4

    again = replace(run, run_dir=tmp_path / "again", mesh=Mesh(pipe=2), resume=str(tmp_path / "run/checkpoint/step-10"))
    run_all(again)
    assert losses(again) == pytest.approx(losses(plain)[10:], rel=1e-9)


@pytest.mark.slow
def test_other_policies_begin_with_the_layers_in_which_nothing_trains(text, tmp_path):
    run = run_of(text, tmp_path / "run", mesh=Mesh(pipe=2), lora=UPPER,
                 elastic=Elastic(freeze="manual", manual=("0:1", "3:2", "5:3")),
                 train=Train(steps=7, eval_sequences=4, sample_tokens=0))
    run_all(run)
    assert [(line["step"], line["frozen_layers"]) for line in transitions(run)] == [(0, 2), (5, 3)]


def test_freezing_what_does_not_train_needs_such_layers(text, tmp_path):
    run = run_of(text, tmp_path / "run", elastic=Elastic(freeze="untrained"))
    for lora in (Lora(), Lora(rank=2)):
        (problem,) = check(replace(run, lora=lora)).problems
        assert str(problem) == (
            "elastic.freeze: freezes no layer: the first one has trainable parameters (got 'untrained'). Give adapters "
            "to upper layers only, for example --lora.targets 'layer3.*', or choose another policy.")
    assert not check(replace(run, lora=UPPER)).problems


@pytest.mark.parametrize(("mesh", "boundaries"), [
    (Mesh(), None), pytest.param(Mesh(data=2, pipe=2), (5,), marks=pytest.mark.slow)])
def test_the_memory_of_the_kept_weights_is_predicted(text, tmp_path, mesh, boundaries):
    """On one stage there are then two tables, one with states; on several stages there were two before."""
    run = run_of(text, tmp_path / "run", mesh=mesh, pipeline=Pipeline(boundaries=boundaries), memory_report=True,
                 elastic=Elastic(freeze="manual", manual=("2:1",)),
                 train=Train(steps=3, eval_sequences=4, sample_tokens=0))
    results, _ = run_all(run)
    before, after = laid_out(resolve(run))[1], laid_out(resolve(run), 1)[1]
    for rank, measured in enumerate(results[0]["memory"]):
        stage = run.mesh.coordinates(rank).pipe
        for category in ("parameters", "gradients", "moments"):
            assert measured["device"][category] == after[stage].device[category], category
    table, layer = 8 * 300 * 16, 8 * (12 * 16 * 16 + 13 * 16)  # fp64
    added = after[0].device["parameters"] - before[0].device["parameters"]
    assert added == (table if mesh.pipe == 1 else 0)
    freed = sum(entry.device["moments"] for entry in before) - sum(entry.device["moments"] for entry in after)
    assert freed == 2 * (layer + 8 * 12 * 16)  # the layer and the positions; the head keeps the table's states


def test_packed_documents_are_cached(text, tmp_path):
    """A packed sequence has the same number in all epochs, and its segments are cached with it."""
    (tmp_path / "documents.jsonl").write_text("\n".join(
        json.dumps({"text": f"{number} " + "the brown fox jumps " * (number % 3 + 1)}) for number in range(60)))
    data = Data(corpus=str(tmp_path / "documents.jsonl"), cache_dir=text / "cache", packing=True)
    changes = dict(data=data, elastic=Elastic(
        freeze="manual", manual=("3:2",), cache=True, cache_from=1, cache_precision="full"))
    run = run_of(text, tmp_path / "run", mesh=Mesh(), batch=AT_ONCE, **changes)
    results, _ = run_all(run)
    assert losses(run) == pytest.approx(in_one_process(text, tmp_path / "one", **changes), rel=1e-10)
    assert read_rows(results) > 0


def test_the_mesh_is_chosen_again_once_steps_are_measured(text, tmp_path, monkeypatch):
    """Before the first step nothing is measured, so a mesh that does not seem to pay is compared again after eight."""
    asked = []

    def pays(ledger, **facts):
        asked.append(facts["step"])
        return replace(PAYS(ledger, **facts), pays=facts["step"] > 0)

    always(monkeypatch)
    monkeypatch.setattr(Ledger, "decide", pays)
    run = run_of(text, tmp_path / "run", mesh=Mesh(pipe=2), lora=UPPER,
                 train=Train(steps=10, learning_rate=3e-3, warmup_steps=2, eval_sequences=4, sample_tokens=0),
                 elastic=Elastic(freeze="untrained", auto_pipe=True, auto_dp=True))
    run_all(run)
    told = [(line["step"], line["frozen_layers"], line["mesh"]["data"]) for line in transitions(run)]
    assert told == [(0, 2, 1), (9, 2, 2)] and asked[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("changed", [
    {"lora": UPPER, "elastic": Elastic(freeze="untrained", auto_pipe=True, auto_dp=True)},
    {"elastic": Elastic(freeze="manual", manual=("5:1", "10:3"), auto_pipe=True, auto_dp=True)}],
    ids=["adapters", "by hand"])
def test_a_decoder_and_its_plan_take_the_same_decisions(text, tmp_path, monkeypatch, changed):
    monkeypatch.setattr(transition, "PRIOR_SECONDS", 1e-9)
    monkeypatch.setattr(transition, "PRIOR_BYTES_PER_SECOND", 1e15)
    run = run_of(text, tmp_path / "run", train=Train(steps=14, eval_sequences=4, sample_tokens=0), **changed)
    plan = course(resolve(replace(run, launch=Launch(device="cpu"))), CLUSTER, Work())
    stated_facts(monkeypatch, plan)
    run_all(run)
    steps = lines(run, "metrics.jsonl")
    happened = [(line["step"] - 1, line["frozen_layers"], (line["data"], line["pipe"])) for line in steps]
    expected = [(period.first_step, period.frozen, period.mesh.shape[:2]) for period in plan.periods]
    assert decisions(happened) == decisions(expected) and expected[-1][1:] != (0, (1, 4))


@pytest.mark.slow
def test_the_cache_of_a_decoder_on_columns(text, tmp_path):
    """A decoder's state is one tensor."""
    elastic = Elastic(freeze="manual", manual=("1:1", "9:3"), cache=True, cache_from=1, cache_precision="full")
    train = Train(steps=14, learning_rate=3e-3, eval_sequences=2, sample_tokens=0)
    expected = in_one_process(text, tmp_path / "one", elastic=elastic, train=train)
    run = run_of(text, tmp_path / "run", mesh=Mesh(col=2), train=train, elastic=replace(
        elastic, cache_dir=tmp_path / "outputs"))
    results, _ = run_all(run)
    assert losses(run) == pytest.approx(expected, rel=1e-9)
    assert read_rows(results) > 0
