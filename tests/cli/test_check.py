"""Every cross-field problem and warning, and what is predicted for a run without any."""

import dataclasses
from dataclasses import replace

import pytest

from benchmarks.tensor import exposed
from ranvier.cli import check
from ranvier.config import read, rules
from ranvier.config.resolve import ResolvedRun, resolve
from ranvier.config.run import Run
from ranvier.cost.cluster_files import load_cluster
from ranvier.cost.memory import PROCESS_BYTES
from ranvier.models import llama
from ranvier.planner.auto import with_plan
from ranvier.planner.candidates import _smaller_model
from ranvier.planner.problems import problems, warnings
from ranvier.planner.search import search
from tests.covering import covering, quick
from tests.errors import check as check_error
from tests.errors import raises


def run_with(**flags):
    found = read.merge([read.Layer(origin="flag", is_text=True, values={
        name.replace("__", "."): text for name, text in flags.items()})])
    assert not found.problems
    return found.run


def test_data_that_a_run_would_look_up_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").write_text("text")
    for name, is_named in (("gone", True), ("no/where", True), ("here", False), ("./gone", False),
                           ("wikitext-2", False), ("python-stdlib", False), ("json:dumps", False)):
        report = check.check(run_with(data__corpus=name))
        found = [one for one in report.warnings if one.code == "data-from-hub"]
        assert bool(found) == is_named, name
        for one in found:
            check_error(one, "data-from-hub", where="data.corpus", value=name)
    found = check.check(run_with(data__mixture="here=1,gone=2", data__eval="also")).warnings
    assert [(one.where, one.value) for one in found if one.code == "data-from-hub"] == [
        ("data.mixture", "gone"), ("data.eval", "also")]
    found = check.check(run_with(data__corpus="here", data__eval_sets="a=gone,b=here")).warnings
    assert [(one.where, one.value) for one in found if one.code == "data-from-hub"] == [("data.eval-sets", "gone")]
    (tmp_path / "own_hub_task.py").write_text("from ranvier.data.chat import Chat as Own")
    monkeypatch.syspath_prepend(tmp_path)
    for task, train, is_named in (("chat", "no/where", True), ("chat", "gone", False), ("images", "no/where", False),
                                  ("qa", "no/where", False), ("own_hub_task:Own", "no/where", False)):
        found = check.check(run_with(data__task=task, data__train=train)).warnings
        assert ("data-from-hub" in {one.code for one in found}) == is_named, task


def test_an_open_mesh_that_cannot_be_planned_is_no_problem_of_its_own():
    run = run_with(mesh__data="auto", mesh__pipe="auto", data__task="classification", data__train="gone.tsv",
                   model__family="bert", data__tokenizer="wordpiece")
    report = check.check(run, 2)
    assert "data.train" in {one.where for one in report.problems} and report.planned is None
    assert "mesh-needs-ranks" not in {one.code for one in report.problems}


@pytest.mark.parametrize(("flag", "most"), [("mesh__col", 4), ("model__heads", 128), ("model__kv_heads", 4)])
def test_a_number_far_beyond_the_model_is_refused_at_once(flag, most):
    """No loop counts down from the number."""
    run = resolve(run_with(**{"model__family": "llama", flag: str((1 << 62) - 1)}))
    found = [*rules.divisibility_problems(run), *llama.problems(run.model)]
    assert most in [one.settings.get(flag.replace("__", ".").replace("_", "-")) for one in found]


@pytest.mark.parametrize(("flags", "where", "message"), [
    ({"mesh__row": "2", "batch__microbatch_size": "3"}, "mesh.row", "does not divide batch.microbatch-size 3"),
    ({"mesh__col": "3"}, "mesh.col", "does not divide model.heads 4"),
    ({"mesh__row": "4", "model__hidden": "24", "mesh__col": "4"}, "mesh.row",
     "does not divide model.hidden / 4, the features of a column: 6"),
    ({"mesh__row": "2", "tensor__scheme": "megatron"}, "tensor.scheme", "splits blocks over columns only"),
    ({"mesh__col": "4", "tensor__scheme": "megatron", "tensor__sequence_sharding": "true", "model__sequence": "126"},
     "mesh.col", "does not divide model.sequence 126"),
    ({"mesh__pipe": "11"}, "mesh.pipe", "is more than the 10 blocks of the model"),
    ({"mesh__data": "33"}, "batch.global-size", "leaves replicas without a sequence: mesh.data is 33"),
    ({"batch__global_size": "10", "mesh__data": "3", "batch__microbatch_size": "5"}, "batch.microbatch-size",
     "is more than a replica's share of the batch, 4 of 10 sequences"),
    ({"model__heads": "3"}, "model.heads", "does not divide model.hidden 128"),
    ({"model__vocab": "256"}, "model.vocab", "is less than a byte-level tokenizer has: 257"),
    ({"data__tokenizer": "gpt2"}, "model.vocab", "is less than GPT-2's tokenizer has: 50257"),
    ({"model__num_layers": "10001"}, "model.num-layers", "is more than 10000, the most that can be cut into stages"),
    ({"mesh__pipe": "3", "pipeline__boundaries": "5,2"}, "pipeline.boundaries",
     "does not rise, or leaves a stage without blocks"),
    ({"mesh__pipe": "3", "pipeline__boundaries": "2"}, "pipeline.boundaries", "has 1 numbers for 3 stages"),
    ({"mesh__pipe": "2", "pipeline__boundaries": "10"}, "pipeline.boundaries",
     "does not rise, or leaves a stage without blocks"),
    ({"model__hidden": str(2**40), "model__vocab": str(2**40)}, "model", "cannot be laid out: ")])
def test_problems(flags, where, message):
    report = check.check(run_with(**flags))
    assert [problem.where for problem in report.problems] == [where]
    assert message in report.problems[0].what
    assert report.problems[0].remedy
    assert (report.problems[0].code == "model-not-laid-out") == (where == "model")
    assert report.stages is None or where.startswith(("mesh.", "batch."))


def test_ranks_that_are_not_the_meshs():
    report = check.check(run_with(mesh__data="2", mesh__pipe="2"), 6)
    assert [str(problem) for problem in report.problems] == [
        "mesh: needs 4 ranks, not 6 (got 'data 2 x pipe 2 x row 1 x col 1'). Change --mesh.data and --mesh.pipe so "
        "that data x pipe x row x col is 6, or start 4 ranks."]


def test_sizes_of_weights_are_not_offered_to_be_changed():
    run = resolve(run_with(mesh__pipe="99", mesh__col="3", model__float8="true", model__hidden="120"))
    own = replace(run, model=replace(run.model, pretrained="there"))
    for model, sizes in ((run, {"model.num-layers", "model.hidden"}), (own, set())):
        found = list(rules.problems(model, num_blocks=10))
        assert {"mesh.pipe", "mesh.col", "model.float8"} <= {problem.where for problem in found}
        assert {name for one in found for name in one.settings if name in ("model.num-layers", "model.hidden")} == sizes
        (heads,) = [problem.remedy for problem in found if problem.where == "mesh.col"]
        assert ("model.heads" in heads) == bool(sizes)
    assert _smaller_model(replace(run_with(), model=own.model), load_cluster("h100"), 8) == ""


def test_all_problems_at_once():
    report = check.check(run_with(mesh__row="3", model__heads="3", model__vocab="2", batch__microbatch_size="64"), 7)
    assert {problem.where for problem in report.problems} == {
        "mesh", "mesh.row", "model.heads", "model.vocab", "batch.microbatch-size"}


@pytest.mark.parametrize(("flags", "where"), [
    ({"pipeline__policy": "gpipe", "pipeline__in_flight": "2"}, "pipeline.in-flight"),
    ({"pipeline__in_flight": "1", "mesh__pipe": "2"}, "pipeline.in-flight"),
    ({"pipeline__policy": "1f1b", "pipeline__defer_bytes": "10"}, "pipeline.defer-bytes"),
    ({"pipeline__boundaries": "3", "pipeline__partition": "uniform", "mesh__pipe": "2"}, "pipeline.partition"),
    ({"train__warmup_steps": "100"}, "train.warmup-steps")])
def test_warnings(flags, where):
    report = check.check(run_with(**flags))
    assert [warning.where for warning in report.warnings] == [where]
    assert report.problems == ()


def test_stages_and_memory():
    run = run_with(mesh__data="2", mesh__pipe="2", precision="fp64")
    report = check.check(run, 4)
    assert (report.problems, report.warnings) == ((), ())
    assert [block for row in report.stages.rows for block in row.blocks] == [
        "embedding", *(f"layer{i}.{part}" for i in range(4) for part in ("attention", "mlp")), "head"]
    tied = run.model.vocab * run.model.hidden
    for row, entry in zip(report.stages.rows, report.memory, strict=True):
        owned = row.num_parameters - (tied if row.stage == 1 else 0)
        assert (entry.pipeline_rank, entry.ranks) == (row.stage, 2)
        assert entry.device["parameters"] == entry.device["gradients"] == 8 * row.num_parameters
        assert (entry.device["moments"], entry.device["master"]) == (16 * owned, 0), "stage 0 owns the tied table"
        assert entry.device_bytes > 16 * row.num_parameters + 16 * owned


@pytest.mark.parametrize(("task", "data", "scheme"), quick(2, covering(
    [("classification", "sst2"), ("qa", "squad"), ("images", "cifar10")], ["stationary", "summa", "megatron"])))
def test_stages_and_memory_of_other_families(task, data, scheme):
    """The carried states of these families are dicts, or their inputs are images."""
    rows = {} if scheme == "megatron" else {"mesh__row": "2"}
    report = check.check(run_with(data__task=task, data__train=data, mesh__pipe="2", mesh__col="2",
                                  tensor__scheme=scheme, memory__recompute="1", **rows))
    assert report.problems == ()
    assert report.stages.rows[0].blocks[0] == "embedding" and report.stages.rows[-1].blocks[-1] == "head"
    for entry in report.memory:
        assert entry.device["activations"] > 0 and (entry.device["tensor mesh"] > 0 or scheme == "megatron")


def test_memory_follows_the_microbatches_in_flight():
    def activations(**flags):
        return [entry.device["activations"] for entry in check.check(run_with(mesh__pipe="4", **flags)).memory]

    one = activations(pipeline__in_flight="1")
    assert activations(pipeline__policy="gpipe") == [8 * size for size in one]
    assert activations(pipeline__policy="1f1b") == [(4 - stage) * size for stage, size in enumerate(one)]
    assert activations(pipeline__memory="none") == [(4 - stage) * size for stage, size in enumerate(one)]
    assert activations(pipeline__memory="none", batch__global_size="8") == [2 * size for size in one[:3]] + one[3:]
    assert activations()[0] > 4 * one[0], "next to a process that uses most of the memory"


def test_any_number_of_ranks_on_a_laptop():
    found = read.merge([read.load("gpt-100b")[1]])
    run = dataclasses.replace(found.run, mesh=found.run.mesh.resized(data=4096))
    report = check.check(run, run.mesh.size)
    assert report.problems == ()
    total = sum(row.num_parameters for row in report.stages.rows)
    assert 95e9 < total < 110e9
    assert len(report.memory) == run.mesh.pipe


def test_the_default_run_is_fine():
    assert problems(resolve(Run())) == []
    assert list(warnings(resolve(Run()))) == []


# ---------------------------------------------------------------------- the optimizer and memory

@pytest.mark.parametrize(("flags", "where"), [
    ({"optim__algorithm": "sgd", "optim__betas": "0.8,0.9"}, "optim.betas"),
    ({"optim__algorithm": "sgd", "optim__epsilon": "1e-6"}, "optim.epsilon"),
    ({"optim__momentum": "0.5"}, "optim.momentum"), ({"optim__accumulate": "half"}, "optim.accumulate"),
    ({"optim__reduce_dtype": "fp32"}, "optim.reduce-dtype"),
    ({"precision": "bf16", "mesh__data": "1", "optim__reduce_dtype": "fp32"}, "optim.reduce-dtype"),
    ({"precision": "bf16", "optim__initial_loss_scale": "8"}, "optim.initial-loss-scale"),
    ({"optim__loss_scale_window": "8"}, "optim.loss-scale-window"),
    ({"optim__buckets_in_flight": "1"}, "optim.buckets-in-flight"),
    ({"mesh__data": "1", "optim__shard": "true"}, "optim.shard"),
    ({"train__final_learning_rate": "1e-5"}, "train.final-learning-rate")])
def test_settings_of_the_optimizer_that_do_nothing(flags, where):
    run = run_with(**{"mesh__data": "2"} | flags)
    (warning,) = warnings(run)
    assert (warning.where, warning.code) == (where, "without-effect")


@pytest.mark.parametrize(("flags", "message"), [
    ({}, "needs batches of one microbatch, not 8: blocks share the memory of gradients, in which those of several "
         "microbatches cannot add up"),
    ({"batch__microbatch_size": "32", "optim__clip_norm": "1"}, "cannot clip by a norm that is known only at the end"),
    ({"batch__microbatch_size": "32", "precision": "fp16"}, "cannot skip a step whose gradients overflow")])
def test_what_update_in_backward_cannot_do(flags, message):
    (problem,) = problems(resolve(run_with(optim__update_in_backward="true", **flags)))
    assert (problem.where, problem.what) == ("optim.update-in-backward", message)


def test_groups_are_checked_against_the_models_names():
    assert check.check(run_with(optim__groups="*.bias:1:0, embedding.*:0.5:0.1")).problems == ()
    assert [str(problem) for problem in check.check(run_with(optim__groups="*.bias:1:0,heads.*:1:0,x")).problems] == [
        "optim.groups: is not PATTERN:FACTOR:DECAY with two numbers of at least 0 (got 'x'). Write for example "
        "'*.bias:1:0': factor on the learning rate, then weight decay."]
    (problem,) = check.check(run_with(optim__groups="*.bias:1:0,heads.*:1:0")).problems
    assert problem.what == "fits no parameter of the model" and problem.value == "heads.*:1:0"


def test_what_all_ranks_would_need_here():
    report = check.check(run_with(mesh__data="2", mesh__pipe="2"))
    needed = sum(2 * (entry.device_bytes + entry.host_bytes) for entry in report.memory) + 4 * PROCESS_BYTES
    assert report.machine.needed_bytes == needed and report.machine.available_bytes > 0
    assert dataclasses.replace(report.machine, available_bytes=needed).__str__().endswith(": enough")
    assert dataclasses.replace(report.machine, available_bytes=needed - 1).__str__().endswith(": not enough")
    assert check.check(run_with(mesh__data="65")).machine is None
    run = run_with(mesh__pipe="2", precision="bf16", optim__offload="stream", launch__device="cuda")
    report = check.check(run)
    assert report.machine.needed_bytes == sum(entry.host_bytes for entry in report.memory) + 2 * PROCESS_BYTES


@pytest.mark.parametrize(("scheme", "recompute"), [
    pytest.param("stationary", "1", marks=pytest.mark.slow), ("megatron", "none")])
def test_exposed_bytes_of_the_tensor_mesh_on_cuda(monkeypatch, scheme, recompute):
    """As many bytes as counted by running layers, except for the small sums of norms."""
    monkeypatch.setattr(exposed, "LAYERS", 2)
    flags = {"mesh__col": "8", "model__hidden": "1024", "model__heads": "8", "model__sequence": "4096",
             "model__family": "gpt", "batch__microbatch_size": "4", "tensor__scheme": scheme, "precision": "bf16",
             "tensor__sequence_sharding": "false", "memory__recompute": recompute}
    on_cpu, on_cuda = (check.check(run_with(**flags, launch__device=device)).tensor_mesh
                       for device in ("cpu", "cuda"))
    assert on_cpu.exposed_bytes is None and "while no product" not in str(on_cpu)
    assert f"of which {on_cuda.exposed_bytes / 2**20:,.2f} MiB while no product is computed" in str(on_cuda)
    found = exposed.transfers(exposed.Case(scheme=scheme, row=1, col=8, sequences=4, sequence=4096, hidden=1024,
                                           recomputed=recompute == "1"))
    hidden, total = exposed.hidden_bytes([one for one in found if one.num_bytes > 1 << 20])
    assert (total - hidden) / exposed.LAYERS == pytest.approx(on_cuda.exposed_bytes, rel=0.02)


def test_a_machine_that_is_too_small_is_a_warning(monkeypatch):
    monkeypatch.setattr(check, "available_memory_bytes", lambda: 1000 << 20)
    report = check.check(run_with(mesh__data="2", mesh__pipe="2"))
    assert report.problems == ()
    (warning,) = report.warnings
    check_error(warning, "machine-memory-too-small", "4 ranks", where="memory of this machine")
    assert "lower --batch.microbatch-size (it is 4); set --memory.recompute selective, or to auto" in str(warning)
    monkeypatch.setattr(check, "available_memory_bytes", lambda: 2000 << 20)
    assert check.check(run_with(mesh__data="2", mesh__pipe="2")).warnings == ()


@pytest.mark.parametrize(("flags", "ranks", "shape"), [
    ({"mesh__row": "auto", "mesh__col": "auto"}, 4, (2, 2)),
    pytest.param({"mesh__row": "auto", "mesh__col": "auto", "model__sequence": "512"}, 4, (4, 1),
                 marks=pytest.mark.slow),
    ({"mesh__row": "auto", "mesh__col": "auto", "model__hidden": "1024", "model__heads": "16"}, 4, (1, 4)),
    ({"mesh__row": "auto", "mesh__col": "2"}, 4, (2, 2)),
    ({"mesh__col": "auto", "mesh__row": "2", "mesh__data": "2"}, 8, (2, 2)),
    ({"mesh__row": "auto", "mesh__col": "auto", "tensor__scheme": "megatron"}, 4, (1, 4))])
def test_auto_takes_the_shape_that_receives_least(flags, ranks, shape):
    run, found = with_plan(run_with(**flags), ranks)
    assert not found and (run.mesh.row, run.mesh.col) == shape and run.mesh.size == ranks
    report = check.check(run_with(**flags), ranks)
    assert not report.problems and report.document()["tensor_mesh"]["row"] == shape[0]


@pytest.mark.parametrize(("flags", "ranks", "code", "facts"), [
    ({"mesh__row": "auto"}, None, "number-of-ranks-unknown", ()),
    ({"mesh__row": "auto", "mesh__pipe": "2"}, 5, "mesh-axis-not-possible", (5, 2)),
    ({"mesh__row": "auto", "mesh__col": "3"}, 4, "mesh-axis-not-possible", (4, 3)),
    ({"mesh__row": "auto", "mesh__col": "auto"}, 7, "no-tensor-mesh", (128,))])
def test_auto_that_cannot_be(flags, ranks, code, facts):
    run, found = with_plan(run_with(**flags), ranks)
    assert len(found) == 1 and found[0].remedy
    check_error(found[0], code, *facts)
    assert isinstance(run, ResolvedRun)
    report = check.check(run_with(**flags), ranks)
    assert found[0].what in {problem.what for problem in report.problems}
    assert report.stages is None and report.memory == () and report.machine is None  # no mesh to describe


def test_a_microbatch_that_rows_do_not_divide_comes_with_one_that_they_do():
    (problem,) = problems(with_plan(run_with(mesh__row="8", batch__microbatch_size="4"), 8)[0], 8)
    assert problem.remedy == ("Set --mesh.row 4, or --batch.microbatch-size 8: rows share the sequences of a "
                              "microbatch.")


def test_placement_on_nodes_is_shown():
    flags = {"mesh__row": "4", "mesh__col": "4", "model__hidden": "256"}
    placed = check.check(run_with(**flags), 16, 4).tensor_mesh
    assert placed.tile[0] * placed.tile[1] == 4 and placed.node_bytes <= placed.node_bytes_row_by_row
    assert "on each node" in str(placed)
    assert check.check(run_with(**flags), 16, 16).tensor_mesh.tile is None
    assert check.check(run_with(), 1, 1).tensor_mesh is None


@pytest.mark.parametrize(("flags", "where"), [
    ({"tensor__scheme": "summa"}, "tensor.scheme"),
    ({"tensor__sequence_sharding": "true", "mesh__row": "2"}, "tensor.sequence-sharding"),
    ({"tensor__sequence_sharding": "true", "mesh__col": "2", "tensor__scheme": "summa"}, "tensor.sequence-sharding"),
    ({"tensor__keep_weights": "true", "mesh__col": "2"}, "tensor.keep-weights"),
    ({"tensor__reduce_dtype": "fp32", "precision": "bf16"}, "tensor.reduce-dtype"),
    ({"tensor__reduce_dtype": "fp32", "mesh__col": "2"}, "tensor.reduce-dtype")])
def test_tensor_settings_without_effect(flags, where):
    warnings = check.check(run_with(**flags)).warnings
    assert [warning.where for warning in warnings if warning.where.startswith("tensor")] == [where]


def test_a_tile_that_does_not_divide_is_a_problem_not_an_exception():
    found = read.merge([read.Layer(origin="flag", is_text=True, values={
        "mesh.row": "2", "mesh.col": "2", "mesh.tile": "3,2"})])
    assert [problem.where for problem in found.problems] == ["mesh.tile"] and found.run.mesh.tile is None


def test_auto_with_a_tile_that_does_not_fit_is_reported():
    flags = {"mesh__row": "auto", "mesh__col": "auto", "mesh__tile": "3,3"}
    report = check.check(run_with(**flags), 4)
    assert [problem.where for problem in report.problems] == ["mesh.tile"] and report.document()


LLAMA = {"model__preset": "llama-2-7b", "model__family": "llama", "precision": "bf16", "model__sequence": "4096",
         "batch__global_size": "256", "mesh__data": "8", "mesh__pipe": "2", "optim__shard": "true"}


def test_the_memory_of_a_cluster_is_compared_instead_of_this_machine():
    """Memory is as `plan` predicts it: on GPUs with 80 GB, whatever this machine is."""
    run = run_with(**LLAMA, batch__microbatch_size="2")
    found = search(with_plan(run, 16)[0], load_cluster("h100"), 16, ["in-flight"]).best[0]
    report = check.check(replace(found.run, launch=run.launch), 16, cluster="h100")
    assert not report.problems and not report.warnings and report.machine is None
    assert [entry.device_bytes for entry in report.memory] == [entry.device_bytes for entry in found.memory]
    most = max(entry.device_bytes for entry in report.memory) / 2**20
    assert f"a rank needs {most:,.0f} MiB, and its device has 76,657" in report.cluster
    assert report.document()["cluster"] == report.cluster


def test_what_a_cluster_has_too_little_of():
    report = check.check(run_with(**LLAMA, batch__microbatch_size="8"), 16, cluster="h100")
    assert [problem.where for problem in report.problems] == ["memory of the device"]
    assert "a rank of stage 0 needs" in str(report.problems[0])
    assert "--memory.recompute selective" in str(report.problems[0])
    report = check.check(run_with(mesh__data="32", batch__microbatch_size="1"), 32, cluster="laptop")
    check_error(report.problems[0], "mesh-above-cluster", 8)
    assert "a rank needs" in report.cluster
    with raises("unknown-cluster", "no-such"):
        check.check(run_with(), 1, cluster="no-such")
